"""Post-training plans as the configuration of post-training engines."""
