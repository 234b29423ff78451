"""Measuring machines, and counting models that no catalogue has."""

from .modules.trace import profile_module

__all__ = ["profile_module"]
