"""The job around the ranks: starting them, watching them, saying in one message why one failed."""
