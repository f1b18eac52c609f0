"""Rollout-to-train handoff."""
