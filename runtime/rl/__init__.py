"""Post-training: ranks in pools that generate, score and update by turns (docs/post-training.md)."""
