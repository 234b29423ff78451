"""The built-in training loop that every rank runs: AdamW, warm-up and cosine, clipping, metrics, checkpoints."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ...schema import ConfigError, Plan, RuntimeMismatchError
from ..adapters import merge_adapters, save_adapters
from ..checkpoints.checkpoint import check_writable, list_checkpoints
from ..data.samples import TokenBatches, TokenStream
from ..data.source import open_data, tokenized
from ..job.machine import check_device
from ..job.out_of_memory import naming_rank
from ..parallelize import parallelize
from ..weights.load import check_weights
from ..weights.save import check_weights_target, save_weights
from .compiled import require_compilable
from .memory import MemoryMeter
from .metrics import MetricsWriter
from .optimizer import build_optimizer
from .options import TrainOptions
from .run import TrainingRun, gather
from .step_parts import waiting_timed
from .zeroth_order import require_zeroth_order


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
    options = options.replace(data=tokenized(options.data, options.tokenizer), tokenizer=None)
    _batches(plan, options, local_batch=1, dp_rank=0)
    return options


def check_weight_options(plan: Plan, options: TrainOptions) -> None:
    """Look at the weights a run starts from and at the place of those it ends with.

    Raises:
        ConfigError: they are of another model or damaged, or the place cannot be written.
    """
    if options.zeroth_order:
        require_zeroth_order(plan)
    if options.save_adapters and plan.workload.adapters is None:
        raise ConfigError("--save-adapters, but the plan trains no adapters", help="plan with --train lora:r=16")
    if options.weights:
        check_weights(plan.model, options.weights)
    if options.save_weights:
        check_weights_target(plan.model, options.save_weights)


def train(plan: Plan, options: TrainOptions, *, report: str | Path | None = None, timeout_s: float = 600.0) -> None:
    """Train the plan's model from scratch or from a checkpoint; each rank of a torchrun job calls it.

    Args:
        report: file that logical rank 0's process appends one JSON object a step to, and one with the comparison.
        timeout_s: how long a collective may wait for a rank.

    Raises:
        ConfigError, RuntimeMismatchError: the options, the data or this machine do not suit the plan.
        MeshwrightError: the loss is no longer a number, a checkpoint cannot be written, or there is no memory left.
    """
    device = _join(plan, timeout_s)
    meter = MemoryMeter(device)
    options = prepare_options(plan, options)
    with naming_rank(plan, device):
        model = parallelize(
            None,
            plan,
            device=device,
            seed=options.seed,
            weights=options.weights,
            compile_blocks=options.compile_blocks,
        )
        local_batch = plan.workload.global_batch_size // model.mesh.dp_degree
        batches, data = _batches(plan, options, local_batch=local_batch, dp_rank=model.mesh.dp_rank)
        if len(set(gather(data))) > 1:
            raise RuntimeMismatchError(
                "the ranks found different data", help="give --data a folder that all nodes share"
            )
        optimizer = build_optimizer(
            model, learning_rate=options.learning_rate, weight_decay=options.weight_decay, betas=options.betas,
            zeroth_order=options.zeroth_order,
        )  # fmt: skip
        is_reporter = dist.get_rank() == plan.rank_map[0]
        writer = MetricsWriter(report if is_reporter else None, append=True)  # after what ranks wrote before a restart
        run = TrainingRun(model, optimizer, options, meter, writer, data)
        if options.checkpoint_dir is None:
            _run_steps(run, batches)
        else:
            with run.stop.listening():
                _run_steps(run, batches)
        run.finish()
        if options.save_adapters and not run.is_stopped:
            save_adapters(model, options.save_adapters)
        if options.save_weights and not run.is_stopped:
            if plan.workload.adapters is not None:
                merge_adapters(model)
            save_weights(model, options.save_weights, like=options.weights)
    dist.destroy_process_group()


def _run_steps(run: TrainingRun, batches: TokenBatches) -> None:
    with waiting_timed(run.model.clock):
        for tokens in _in_advance(run, batches):
            run.step(tokens.to(run.model.device))
            run.checkpoint()


def _in_advance(run: TrainingRun, batches: TokenBatches) -> Iterator[torch.Tensor]:
    """Batches until the run is finished, each read while the one before is trained on."""
    batch = run.model.plan.workload.global_batch_size
    with ThreadPoolExecutor(1, thread_name_prefix="batches") as reader:
        coming = reader.submit(batches.batch, run.samples)
        while not run.is_finished:
            with run.model.clock.part("data"):
                tokens = coming.result()
            coming = reader.submit(batches.batch, run.samples + batch)
            yield tokens


def _batches(plan: Plan, options: TrainOptions, *, local_batch: int, dp_rank: int) -> tuple[TokenBatches, str]:
    """The sequences of one data-parallel rank, and what tells these data from others."""
    vocab_size, seq_len = plan.model.vocab_size, plan.workload.seq_len
    stream: TokenStream = open_data(options.data, vocab_size=vocab_size)
    batches = TokenBatches(
        stream, seq_len=seq_len, local_batch=local_batch, dp_rank=dp_rank, seed=options.seed, vocab_size=vocab_size
    )
    return batches, hashlib.sha256(f"{stream.fingerprint} {seq_len}".encode()).hexdigest()


def _join(plan: Plan, timeout_s: float) -> torch.device:
    """Enter the job's process group; this rank's device."""
    cluster = plan.cluster
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    backend = _backend(plan)
    timeout = timedelta(seconds=timeout_s)
    if backend == "gloo":
        dist.init_process_group(backend, timeout=timeout)
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    group = [group for group in cluster.groups for _ in range(group.num_devices)][rank]
    check_device(plan, group, device)
    torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=timeout, device_id=device)
    return device


def _backend(plan: Plan) -> str:
    """Streamed parameters and their gradients are reduced and counted on the host."""
    backend = plan.cluster.weakest_device.backend
    streams = plan.offload is not None and plan.offload.streamed_parameter_layers
    return f"cpu:gloo,cuda:{backend}" if streams and backend != "gloo" else backend
