"""From generator docks to learner docks: which columns exist, where they are held, how they travel."""
