"""The built-in training loop that every rank runs."""
