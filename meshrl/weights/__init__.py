"""Weights from learner to generators: layouts, plans, arenas, transports, and the broadcast made of them."""
