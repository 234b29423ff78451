"""Measurements that need a model."""
