"""Checks that a launcher makes before it starts the ranks of the built-in training; models are imported only where it needs one."""

from __future__ import annotations

import hashlib
import shutil

from ...schema import ConfigError, RuntimeMismatchError, TrainingPlan
from ...schema.schedules import SCHEDULES
from ..checkpoints import check_writable, list_checkpoints
from ..data.samples import TokenBatches, TokenStream, open_data, tokenize_paths
from .options import TrainOptions


def prepare_options(plan: TrainingPlan, options: TrainOptions) -> TrainOptions:
    """Return the options with text made into tokens, after checking everything about them that can be wrong; starts nothing.

    Raises:
        ConfigError: no data, too little of it, not those of the model's vocabulary, or options that contradict.
        RuntimeMismatchError: the plan cannot be compiled.
    """
    if options.checkpoint_dir is None and (options.checkpoint_every or options.resume):
        raise ConfigError("--checkpoint-every and --resume need a folder", help="add --checkpoint-dir DIR")
    present = list_checkpoints(options.checkpoint_dir) if options.checkpoint_dir and not options.resume else ()
    if present:
        raise ConfigError(
            f"{options.checkpoint_dir} already holds {present[-1].name}",
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


def check_weight_options(plan: TrainingPlan, options: TrainOptions) -> None:
    """Check the weights a run starts from and the place of those it ends with."""
    if options.zeroth_order or not plan.workload.has_backward:
        from .optimizer import require_zeroth_order

        require_zeroth_order(plan)
    if options.save_adapters and plan.workload.adapters is None:
        raise ConfigError("--save-adapters, but the plan trains no adapters", help="plan with --train lora:r=16")
    if options.weights:
        from ..weights.load import check_weights

        check_weights(plan.model, options.weights)
    if options.save_weights:
        from ..weights.save import check_weights_target

        check_weights_target(plan.model, options.save_weights)


def open_batches(
    plan: TrainingPlan, options: TrainOptions, *, local_batch: int, dp_rank: int
) -> tuple[TokenBatches, str]:
    """Return the sequences of one data-parallel rank, and what tells these data from others."""
    vocab_size, seq_len = plan.model.vocab_size, plan.workload.seq_len
    stream: TokenStream = open_data(options.data, vocab_size=vocab_size)
    batches = TokenBatches(
        stream, seq_len=seq_len, local_batch=local_batch, dp_rank=dp_rank, seed=options.seed, vocab_size=vocab_size
    )
    return batches, hashlib.sha256(f"{stream.fingerprint} {seq_len}".encode()).hexdigest()


def require_compilable(plan: TrainingPlan) -> None:
    """Refuse what torch.compile does not take."""
    reasons = []
    if SCHEDULES[plan.layout.schedule].splits_backward:
        reasons.append(f"schedule {plan.layout.schedule} splits backward passes, a compiled block has one")
    if plan.layout.cp > 1:
        reasons.append("attention over the ranks of cp cannot be traced")
    if any(stage.offload_of(idx) != "none" for stage in plan.stages for idx in stage.layer_idxs):
        reasons.append("what a compiled block keeps is not what the offload schedule moves")
    if plan.cluster.weakest_device.backend.is_host and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        reasons.append("on a CPU torch.compile needs a C++ compiler (g++), and there is none")
    if reasons:
        raise RuntimeMismatchError(
            "--compile does not suit this plan", details=tuple(reasons), help="leave out --compile"
        )
