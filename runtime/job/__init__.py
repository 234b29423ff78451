"""Run a plan as a job of ranks on this node and others: `apply`, with what happens to it as `JobEvent`s."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .events import JobEvent
    from .run import apply

__all__ = ["JobEvent", "apply"]

_HOMES = {"JobEvent": ".events", "apply": ".run"}
"""Imported when they are first used; no module may have the name of one of these."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)
