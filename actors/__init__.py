"""Roles: learner, generator, reward."""
