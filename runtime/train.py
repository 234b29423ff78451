"""The built-in training loop that every rank runs: AdamW, warm-up and cosine, clipping, metrics, checkpoints."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from ..schema import ConfigError, MeshwrightError, Plan, RuntimeMismatchError
from .checkpoint import check_writable, list_checkpoints, load_checkpoint, save_checkpoint
from .data import BYTE_VOCAB_SIZE, TextCorpus, TokenBatches, find_text
from .hf_save import check_weights_target, save_weights
from .hf_weights import check_weights
from .machine import check_device
from .memory import MemoryMeter
from .metrics import MetricsWriter, RankPeak, StepRecord, summarise
from .optimizer import build_optimizer, clip_gradients
from .options import TrainOptions
from .parallel_model import ParallelModel
from .parallelize import parallelize

T = TypeVar("T")


def check_options(plan: Plan, options: TrainOptions) -> TextCorpus:
    """The corpus of a run, after everything about it that can be wrong was looked at; starts nothing.

    Raises:
        ConfigError: no text, too little of it, a vocabulary without all bytes, or checkpoint options that contradict.
    """
    if plan.model.vocab_size < BYTE_VOCAB_SIZE:
        raise ConfigError(
            f"the data has {BYTE_VOCAB_SIZE} kinds of byte, {plan.model.name} a vocabulary of {plan.model.vocab_size}"
        )
    if options.checkpoint_dir is None and (options.checkpoint_every or options.resume):
        raise ConfigError("--checkpoint-every and --resume need a folder", help="add --checkpoint-dir DIR")
    found = list_checkpoints(options.checkpoint_dir) if options.checkpoint_dir and not options.resume else ()
    if found:
        raise ConfigError(
            f"{options.checkpoint_dir} already holds {found[-1].name}",
            help="add --resume to go on from it, or give another --checkpoint-dir",
        )
    if options.checkpoint_dir:
        check_writable(options.checkpoint_dir)
    check_weight_options(plan, options)
    corpus = find_text(options.data)
    TokenBatches(corpus, seq_len=plan.workload.seq_len, local_batch=1, dp_rank=0, seed=options.seed)
    return corpus


def check_weight_options(plan: Plan, options: TrainOptions) -> None:
    """Look at the weights a run starts from and at the place of those it ends with.

    Raises:
        ConfigError: they are of another model or damaged, or the place cannot be written.
    """
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
        MeshwrightError: the loss is no longer a number.
    """
    device = _join(plan, timeout_s)
    meter = MemoryMeter(device)
    corpus = check_options(plan, options)
    if len(set(_gather(corpus.fingerprint))) > 1:
        raise RuntimeMismatchError("the ranks found different data", help="give --data a folder that all nodes share")
    model = parallelize(None, plan, device=device, seed=options.seed, weights=options.weights)
    optimizer = build_optimizer(
        model, learning_rate=options.learning_rate, weight_decay=options.weight_decay, betas=options.betas
    )
    is_reporter = dist.get_rank() == plan.rank_map[0]
    run = _Run(model, optimizer, options, meter, MetricsWriter(report if is_reporter else None))
    local_batch = plan.workload.global_batch_size // model.mesh.dp_degree
    batches = TokenBatches(
        corpus, seq_len=plan.workload.seq_len, local_batch=local_batch, dp_rank=model.mesh.dp_rank, seed=options.seed
    )
    for step in range(run.resume() + 1, options.steps + 1):
        run.step(step, batches.batch(step).to(device))
        run.checkpoint(step)
    run.finish()
    if options.save_weights:
        save_weights(model, options.save_weights, like=options.weights)
    dist.destroy_process_group()


@dataclass(eq=False)
class _Run:
    """One rank's training run."""

    model: ParallelModel
    optimizer: torch.optim.Optimizer
    options: TrainOptions
    meter: MemoryMeter
    writer: MetricsWriter
    step_times_s: list[float] = field(default_factory=list)

    def resume(self) -> int:
        """Steps already done: those of the newest checkpoint, or none."""
        options = self.options
        found = list_checkpoints(options.checkpoint_dir) if options.resume and options.checkpoint_dir else ()
        newest = _gather(str(found[-1]) if found else None)[0]
        if newest is None:
            return 0
        self.meter.pause()
        info = load_checkpoint(newest, self.model, self.optimizer)
        self.meter.resume()
        if info.seed != options.seed:
            raise ConfigError(f"{newest} was trained with --seed {info.seed}, this run has {options.seed}")
        if info.step >= options.steps:
            raise ConfigError(f"{newest} has {info.step} steps done; --steps {options.steps} leaves none to do")
        return info.step

    def step(self, step: int, tokens: torch.Tensor) -> None:
        """Forward, backward and update; the clock runs from the batch being there to the parameters being new."""
        learning_rate = self.options.learning_rate_at(step)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        start_s = self._now_s()
        loss = self.model.forward_backward(tokens)
        grad_norm = clip_gradients(self.model, self.options.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        step_time_s = self._now_s() - start_s
        if not math.isfinite(loss) or not math.isfinite(grad_norm):
            raise MeshwrightError(
                f"the loss is {loss} and the gradient norm {grad_norm} at step {step}",
                help="use a lower --learning-rate",
            )
        self.step_times_s.append(step_time_s)
        self.writer.write(
            StepRecord(
                step=step,
                loss=loss,
                grad_norm=grad_norm,
                learning_rate=learning_rate,
                step_time_s=step_time_s,
                tokens_per_s=self.model.plan.workload.tokens_per_step / step_time_s,
                peak_allocated_bytes=self.meter.peak_allocated_bytes(),
            )
        )

    def checkpoint(self, step: int) -> None:
        """Save where it is due; does not count in the measured memory."""
        options = self.options
        every = options.checkpoint_every or options.steps
        if options.checkpoint_dir is None or (step % every and step != options.steps):
            return
        self.meter.pause()
        save_checkpoint(options.checkpoint_dir, self.model, self.optimizer, step=step, seed=options.seed)
        self.meter.resume()

    def finish(self) -> None:
        """Report the measurements of all ranks beside the prediction."""
        peak = RankPeak(
            rank=self.model.plan.rank_map.index(dist.get_rank()),
            peak_allocated_bytes=self.meter.peak_allocated_bytes(),
            peak_reserved_bytes=self.meter.peak_reserved_bytes(),
        )
        peaks = sorted(_gather(peak), key=lambda entry: entry["rank"])
        self.writer.write(summarise(self.model.plan, self.step_times_s, peaks, memory_source=self.meter.source))
        self.writer.close()

    def _now_s(self) -> float:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return time.perf_counter()


def _join(plan: Plan, timeout_s: float) -> torch.device:
    """Enter the job's process group; this rank's device."""
    cluster = plan.cluster
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    backend = cluster.weakest_device.backend
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


def _gather(value: T) -> list[T]:
    """One value of every rank, in the order of the processes."""
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
