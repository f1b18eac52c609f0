"""Mesh-sliced weight broadcast."""
