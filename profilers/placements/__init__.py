"""What tensor parallelism can do with a user's module: units traced, placements of operators found by trial, and proved."""
