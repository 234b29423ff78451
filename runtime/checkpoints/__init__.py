"""Checkpoints that any other layout can read."""
