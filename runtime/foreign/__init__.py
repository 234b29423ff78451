"""Modules that are not ours, `transformers` models and plain ones, spread as a plan says."""
