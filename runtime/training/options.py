"""Options of the built-in training, as `meshwright apply` takes them; nothing of torch is imported here."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from ...schema.base import Count, Frozen, OptionSpec

_WARMUP_FRACTION = 0.1
_FINAL_FRACTION = 0.1

_Folder = OptionSpec(metavar="FOLDER")
_OfCheckpoints = OptionSpec(needs=("checkpoint_dir",))
_NoOption = OptionSpec(is_option=False)


class TrainOptions(Frozen):
    """What the plan does not say about a training run.

    Attributes:
        steps: steps of the entire run, those before a resumed checkpoint included.
        data: text files and folders, or token files (`meshwright tokens`); repeatable. Default: Python's own sources.
        tokenizer: tokenizer.json for text, or its folder. Default: every byte is a token.
        restart_data: begin the order of the data anew, for data that are not those of the checkpoint.
        seed: of the weights and of the order of the data.
        learning_rate: at its highest, after a linear warm-up.
        schedule: of the learning rate after the warm-up, down to a tenth.
        warmup_steps: steps of the warm-up. Default: a tenth of the steps.
        checkpoint_dir: folder for checkpoints; shared by all nodes.
        checkpoint_every: steps between checkpoints; there is one at the end as well. Default: only that one.
        keep_checkpoints: how many of the newest stay.
        checkpoint_beside: write checkpoints while the next steps run; takes host memory.
        resume: go on from the newest checkpoint, if there is one.
        weights: Hugging Face safetensors to start from. Default: initial weights.
        save_weights: new folder for weights in Hugging Face's layout at the end, adapters merged into them; shared by all nodes.
        save_adapters: folder for trained adapters at the end, as peft reads them.
        zeroth_order: train by two forward passes, without backward passes and their memory; a plan made with --train zeroth-order
            needs no such option, of another plan only the layout then means anything.
        compile_blocks: torch.compile each block, where the plan allows it.
        trace: one measured step, the first after the warm-up, for ui.perfetto.dev, in the form that `plan --trace` gives the
            predicted one.
        count_memory: on CPUs: count the bytes of all tensors until the second step is over.
        router_bias_rate: how far a step moves the correction of a sigmoid router's scores towards even loads (DeepSeek-V3); 0: not
            at all.
    """

    steps: Count = 20
    data: Annotated[tuple[str, ...], OptionSpec(metavar="PATH")] = ()
    tokenizer: Annotated[str | None, OptionSpec(metavar="FILE")] = None
    restart_data: Annotated[bool, OptionSpec(needs=("resume",))] = False
    seed: NonNegativeInt = 0
    learning_rate: PositiveFloat = 3e-4
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: NonNegativeInt | None = None
    weight_decay: Annotated[NonNegativeFloat, _NoOption] = 0.1
    betas: Annotated[tuple[float, float], _NoOption] = (0.9, 0.95)
    max_grad_norm: Annotated[PositiveFloat, _NoOption] = 1.0
    checkpoint_dir: Annotated[str | None, _Folder] = None
    checkpoint_every: Annotated[PositiveInt | None, _OfCheckpoints] = None
    keep_checkpoints: Annotated[PositiveInt, _OfCheckpoints] = 2
    checkpoint_beside: Annotated[bool, _OfCheckpoints] = False
    resume: Annotated[bool, _OfCheckpoints] = False
    weights: Annotated[str | None, _Folder] = None
    save_weights: Annotated[str | None, _Folder] = None
    save_adapters: Annotated[str | None, _Folder] = None
    zeroth_order: bool = False
    compile_blocks: Annotated[bool, OptionSpec(name="--compile")] = False
    trace: Annotated[str | None, OptionSpec(metavar="FILE.json")] = None
    count_memory: bool = False
    router_bias_rate: NonNegativeFloat = 1e-3

    def learning_rate_factor(self, step: int) -> float:
        """Return the share of ``learning_rate`` at a step from 1: a linear warm-up, then down to a tenth, or constant."""
        warmup = self.warmup_steps if self.warmup_steps is not None else max(1, round(self.steps * _WARMUP_FRACTION))
        if step <= warmup:
            return step / warmup
        progress = min(1.0, (step - warmup) / max(1, self.steps - warmup))
        remaining = {"cosine": (1 + math.cos(math.pi * progress)) / 2, "linear": 1 - progress, "constant": 1.0}
        return _FINAL_FRACTION + (1 - _FINAL_FRACTION) * remaining[self.schedule]
