"""Options of the built-in training.

What a launcher looks at before it starts the ranks of the built-in training; models are imported only where it needs one.

torch.compile of each block: kernels fused within a block, hooks of parallel axes outside.
"""

from __future__ import annotations

import hashlib
import math
import shutil
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from ...schema import ConfigError, Plan, RuntimeMismatchError
from ...schema.base import Count, Frozen
from ..checkpoints.checkpoint import check_writable, list_checkpoints
from ..data.samples import TokenBatches, TokenStream, open_data, tokenize_paths

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


def prepare_options(plan: Plan, options: TrainOptions) -> TrainOptions:
    """The options with text made into tokens, after everything about them that can be wrong was looked at; starts nothing.

    Raises:
        ConfigError: no data, too little of it, not those of the model's vocabulary, or options that contradict.
        RuntimeMismatchError: the plan cannot be compiled.
    """
    if options.checkpoint_dir is None and (options.checkpoint_every or options.resume):
        raise ConfigError("--checkpoint-every and --resume need a folder", help="add --checkpoint-dir DIR")
    found = list_checkpoints(options.checkpoint_dir) if options.checkpoint_dir and not options.resume else ()
    if found:
        raise ConfigError(
            f"{options.checkpoint_dir} already holds {found[-1].name}",
            help="add --resume to go on from it, or give another --checkpoint-dir",
        )
    if options.compile_blocks:
        require_compilable(plan)
    if options.checkpoint_dir:
        check_writable(options.checkpoint_dir)
    check_weight_options(plan, options)
    options = options.replace(data=tokenize_paths(options.data, options.tokenizer), tokenizer=None)
    open_batches(plan, options, local_batch=1, dp_rank=0)
    return options


def check_weight_options(plan: Plan, options: TrainOptions) -> None:
    """Look at the weights a run starts from and at the place of those it ends with.

    Raises:
        ConfigError: they are of another model or damaged, or the place cannot be written.
    """
    if options.zeroth_order or not plan.workload.has_backward:
        from .zeroth_order import require_zeroth_order

        require_zeroth_order(plan)
    if options.save_adapters and plan.workload.adapters is None:
        raise ConfigError("--save-adapters, but the plan trains no adapters", help="plan with --train lora:r=16")
    if options.weights:
        from ..weights.load import check_weights

        check_weights(plan.model, options.weights)
    if options.save_weights:
        from ..weights.save import check_weights_target

        check_weights_target(plan.model, options.save_weights)


def open_batches(plan: Plan, options: TrainOptions, *, local_batch: int, dp_rank: int) -> tuple[TokenBatches, str]:
    """The sequences of one data-parallel rank, and what tells these data from others."""
    vocab_size, seq_len = plan.model.vocab_size, plan.workload.seq_len
    stream: TokenStream = open_data(options.data, vocab_size=vocab_size)
    batches = TokenBatches(
        stream, seq_len=seq_len, local_batch=local_batch, dp_rank=dp_rank, seed=options.seed, vocab_size=vocab_size
    )
    return batches, hashlib.sha256(f"{stream.fingerprint} {seq_len}".encode()).hexdigest()


SPLIT_BACKWARD = frozenset({"zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "synthesised"})
"""Schedules with passes for the gradients of inputs and of weights apart; a compiled block has one backward pass."""


def require_compilable(plan: Plan) -> None:
    """Refuse what torch.compile does not take.

    Raises:
        RuntimeMismatchError: with what is in the way.
    """
    reasons = []
    if plan.layout.schedule in SPLIT_BACKWARD:
        reasons.append(f"schedule {plan.layout.schedule} splits backward passes, a compiled block has one")
    if plan.layout.cp > 1:
        reasons.append("attention over the ranks of cp cannot be traced")
    if any(stage.offload_of(idx) != "none" for stage in plan.stages for idx in stage.layer_idxs):
        reasons.append("what a compiled block keeps is not what the offload schedule moves")
    if plan.cluster.weakest_device.vendor == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        reasons.append("on a CPU torch.compile needs a C++ compiler (g++), and there is none")
    if reasons:
        raise RuntimeMismatchError(
            "--compile does not suit this plan", details=tuple(reasons), help="leave out --compile"
        )
