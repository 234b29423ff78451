"""A user's module on the ranks of tensor parallelism, each operator as a plan places it (schema/placements.py)."""
