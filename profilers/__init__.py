"""Measuring machines, and counting models that no catalogue has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .modules import profile_module

__all__ = ["profile_module"]


def __getattr__(name: str) -> Any:
    if name != "profile_module":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .modules import profile_module  # with torch, which the rest of this folder does without

    return profile_module
