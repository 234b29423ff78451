"""Execute a plan on torch.distributed.

Its names are imported when they are first used: a job's launcher needs no model, and importing one takes seconds.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .models.decoder import Decoder
    from .parallel_model import ParallelModel
    from .spread import parallelize
    from .training.optimizer import build_optimizer, clip_gradients
    from .weights.save import save_weights

__all__ = ["Decoder", "ParallelModel", "build_optimizer", "clip_gradients", "parallelize", "save_weights"]

_PLACES = {
    "Decoder": "models.decoder",
    "ParallelModel": "parallel_model",
    "parallelize": "spread",
    "build_optimizer": "training.optimizer",
    "clip_gradients": "training.optimizer",
    "save_weights": "weights.save",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
