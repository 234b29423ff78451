"""Options of the built-in training."""

from __future__ import annotations

import math

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from ..schema.base import Count, Frozen

_WARMUP_FRACTION = 0.1
_FINAL_FRACTION = 0.1


class TrainOptions(Frozen):
    """What the plan does not say about a training run.

    Attributes:
        steps: of the whole run, the ones before a resumed checkpoint included.
        data: text files and folders; empty is the Python standard library's sources.
        learning_rate: at its highest.
        checkpoint_every: steps between checkpoints; there is one at the end as well.
        resume: go on from the newest checkpoint where there is one.
        weights: folder of Hugging Face weights to start from; unset, initial ones.
        save_weights: folder to write such weights to at the end.
    """

    steps: Count = 20
    data: tuple[str, ...] = ()
    seed: NonNegativeInt = 0
    learning_rate: PositiveFloat = 3e-4
    weight_decay: NonNegativeFloat = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: PositiveFloat = 1.0
    checkpoint_dir: str | None = None
    checkpoint_every: PositiveInt | None = None
    resume: bool = Field(default=False)
    weights: str | None = None
    save_weights: str | None = None

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up over the first tenth of the steps, then a cosine down to a tenth; steps count from 1."""
        warmup = max(1, round(self.steps * _WARMUP_FRACTION))
        if step <= warmup:
            return self.learning_rate * step / warmup
        progress = (step - warmup) / max(1, self.steps - warmup)
        cosine = (1 + math.cos(math.pi * progress)) / 2
        return self.learning_rate * (_FINAL_FRACTION + (1 - _FINAL_FRACTION) * cosine)
