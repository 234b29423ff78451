"""Options of the built-in training."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from ...schema.base import Count, Frozen

_WARMUP_FRACTION = 0.1
_FINAL_FRACTION = 0.1


class TrainOptions(Frozen):
    """What the plan does not say about a training run.

    Attributes:
        steps: of the whole run, the ones before a resumed checkpoint included.
        data: text files and folders, or token files; empty is the Python standard library's sources.
        tokenizer: tokenizer.json that makes tokens of text; None: every byte is a token.
        restart_data: a resumed run begins the order of the data anew, for data that are not those of the checkpoint.
        learning_rate: at its highest.
        schedule: of the learning rate after the warm-up.
        warmup_steps: None is a tenth of the steps.
        checkpoint_every: steps between checkpoints; there is one at the end as well.
        keep_checkpoints: how many of the newest stay.
        checkpoint_beside: write checkpoints beside the steps that follow.
        resume: go on from the newest checkpoint where there is one.
        weights: folder of Hugging Face weights to start from; unset, initial ones.
        save_weights: folder to write such weights to at the end; adapters are merged into them.
        zeroth_order: two forward passes instead of a backward pass (runtime/training/zeroth_order.py); of the plan's estimate
            then only the layout means anything; a plan made for it (--train zeroth-order) needs no such option.
        save_adapters: folder to write low-rank adapters to at the end, as peft reads them.
        compile_blocks: let torch.compile fuse the operators of each block.
        trace: file for the timeline of one step, the first after the warm-up.
        count_memory: on a CPU, count every tensor until the steps of the warm-up are over.
        router_bias_rate: by how much a step moves the correction of a sigmoid router's scores towards even loads (DeepSeek-V3).
    """

    steps: Count = 20
    data: tuple[str, ...] = ()
    tokenizer: str | None = None
    restart_data: bool = False
    seed: NonNegativeInt = 0
    learning_rate: PositiveFloat = 3e-4
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: NonNegativeInt | None = None
    weight_decay: NonNegativeFloat = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: PositiveFloat = 1.0
    checkpoint_dir: str | None = None
    checkpoint_every: PositiveInt | None = None
    keep_checkpoints: PositiveInt = 2
    checkpoint_beside: bool = False
    resume: bool = Field(default=False)
    weights: str | None = None
    save_weights: str | None = None
    save_adapters: str | None = None
    zeroth_order: bool = False
    compile_blocks: bool = False
    trace: str | None = None
    count_memory: bool = False
    router_bias_rate: NonNegativeFloat = 1e-3

    def learning_rate_factor(self, step: int) -> float:
        """Of ``learning_rate``: a linear warm-up, then a cosine or a line down to a tenth, or 1; steps count from 1."""
        warmup = self.warmup_steps if self.warmup_steps is not None else max(1, round(self.steps * _WARMUP_FRACTION))
        if step <= warmup:
            return step / warmup
        progress = min(1.0, (step - warmup) / max(1, self.steps - warmup))
        left = {"cosine": (1 + math.cos(math.pi * progress)) / 2, "linear": 1 - progress, "constant": 1.0}[
            self.schedule
        ]
        return _FINAL_FRACTION + (1 - _FINAL_FRACTION) * left
