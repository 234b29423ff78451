"""Which file writes the configuration of which engine."""

from __future__ import annotations

from collections.abc import Callable

from ..schema.errors import ConfigError
from ..schema.plan import Plan
from . import accelerate, deepspeed, kubernetes, megatron, nemo, torchtitan
from .documents import TARGETS, Exported, TargetName

_EXPORTS: dict[TargetName, Callable[[Plan], Exported]] = {
    "torchtitan": torchtitan.export,
    "megatron": megatron.export,
    "nemo": nemo.export,
    "deepspeed": deepspeed.export,
    "accelerate": accelerate.export,
    "kubernetes": kubernetes.export,
}


def export(plan: Plan, engine: str) -> Exported:
    """The plan in an engine's own form.

    Raises:
        ConfigError: there is no such engine, or it cannot run the plan as it is: each reason with its numbers.
    """
    if engine not in _EXPORTS:
        raise ConfigError(f"unknown engine {engine!r}", help=f"one of {', '.join(TARGETS)}")
    return next(make for name, make in _EXPORTS.items() if name == engine)(plan)
