"""meshrl: one controller program drives meshes of generator, reward and learner processes."""
