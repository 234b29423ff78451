"""Measuring machines, and counting models that no catalogue has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .module.layer_times import time_layers
    from .modules import profile_module

__all__ = ["profile_module", "time_layers"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .module.layer_times import time_layers  # with torch, which the rest of this folder does without
    from .modules import profile_module

    return {"profile_module": profile_module, "time_layers": time_layers}[name]
