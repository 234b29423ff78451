"""Batches of documents of unequal lengths: a rank's part of them, the groups of ranks, and attention within each document."""
