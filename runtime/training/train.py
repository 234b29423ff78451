"""The built-in training loop that every rank runs: AdamW, warm-up and cosine, clipping, metrics, checkpoints."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ...schema import Plan, RuntimeMismatchError
from ..adapters import merge_adapters, save_adapters
from ..data.samples import TokenBatches
from ..job.machine import check_device
from ..job.out_of_memory import naming_rank
from ..spread import parallelize
from ..weights.save import save_weights
from .memory import MemoryMeter
from .metrics import MetricsWriter
from .optimizer import build_optimizer
from .options import TrainOptions
from .prepare import open_batches, prepare_options
from .run import TrainingRun, gather
from .step_parts import waiting_timed


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
    meter = MemoryMeter(device, count=options.count_memory)
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
        batches, data = open_batches(plan, options, local_batch=local_batch, dp_rank=model.mesh.dp_rank)
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
