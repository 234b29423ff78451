"""Execute a plan on torch.distributed."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .job.events import JobEvent
    from .job.run import apply
    from .models.decoder import Decoder
    from .parallel_model import ParallelModel
    from .parallelize_model import parallelize
    from .rl.launch import run_rl
    from .training.optimizer import build_optimizer, clip_gradients
    from .weights.save import save_weights

__all__ = [
    "Decoder",
    "JobEvent",
    "ParallelModel",
    "apply",
    "build_optimizer",
    "clip_gradients",
    "parallelize",
    "run_rl",
    "save_weights",
]

_HOMES = {
    "Decoder": ".models.decoder",
    "JobEvent": ".job.events",
    "ParallelModel": ".parallel_model",
    "apply": ".job.run",
    "build_optimizer": ".training.optimizer",
    "clip_gradients": ".training.optimizer",
    "parallelize": ".parallelize_model",
    "run_rl": ".rl.launch",
    "save_weights": ".weights.save",
}
"""Imported when they are first used: all of torch's distributed tensors take seconds that other parts of this folder do not need.

No module may have the name of one of these: once imported, it would take the place of the function.
"""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)
