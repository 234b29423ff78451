"""The built-in training of every rank: join the job, build the model, then batch, step, checkpoint and metrics, step by step."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
import warnings
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from ...schema import ConfigError, MeshwrightError, RuntimeMismatchError, TrainingPlan
from ..adapters import merge_adapters, save_adapters
from ..job.machine import check_device, explain_out_of_memory
from ..job.watch import FOLDER_VARIABLE, STOPPED_FILE, ProgressFile
from ..parallel_model import MIN_SCALE, ParallelModel
from ..parallelize_model import parallelize
from ..weights.save import save_weights
from .checkpoint import CheckpointWriter, TrainingProgress, load_checkpoint
from .expert_load import ExpertLoad
from .memory import MemoryMeter
from .metrics import RETAINED_STEPS, WARMUP_STEPS, MetricsWriter, RankRecord, StepRecord, mfu, summarise
from .optimizer import RouterBalance, build_optimizer, build_scheduler, take_step
from .options import TrainOptions, list_checkpoints, prepare_options
from .samples import TokenBatches, open_batches
from .save_schedule import SaveSchedule
from .step_clock import StepPart, StepTrace, clock_waiting

T = TypeVar("T")


@dataclass(eq=False)
class TrainingRun:
    """The state of a rank's run.

    Attributes:
        samples: sequences of the data that the run has seen, all ranks together.
        data: fingerprint of the data.
        stop_requested: by a scheduler (SIGTERM); the ranks then agree on a step after which all of them do.
        steps: of the entire run that are done, those before a resumed checkpoint included.
    """

    model: ParallelModel
    optimizer: torch.optim.Optimizer
    options: TrainOptions
    meter: MemoryMeter
    writer: MetricsWriter
    data: str
    samples: int = 0
    stop_requested: bool = False
    step_times_s: list[float] = field(default_factory=list)
    parts_s: deque[dict[StepPart, float]] = field(default_factory=lambda: deque(maxlen=RETAINED_STEPS))
    is_stopped: bool = False

    def __post_init__(self) -> None:
        options = self.options
        self.steps = self._resume()
        # A step that overflows moves the schedule on and not the parameters.
        warnings.filterwarnings("ignore", message=r"Detected call of `lr_scheduler.step\(\)` before")
        self._scheduler = build_scheduler(self.optimizer, options, done=self.steps)
        self._balance = RouterBalance(self.model, options.router_bias_rate)
        self._expert_load = ExpertLoad(self.model) if options.hot_experts else None
        self._progress = ProgressFile()
        self._trace = StepTrace(self.model.plan, self.model.clock, options.trace) if options.trace else None
        self._traced_step = min(self.steps + WARMUP_STEPS + 1, options.steps)
        self._saves, self._due = None, SaveSchedule(options, done=self.steps)
        if options.checkpoint_dir is not None:
            self._saves = CheckpointWriter(
                options.checkpoint_dir, self.model, self.optimizer, keep=options.keep_checkpoints,
                in_background=options.checkpoint_beside,
            )  # fmt: skip

    @property
    def is_finished(self) -> bool:
        """Tell whether every step is done, or the ranks agreed to end."""
        return self.is_stopped or self.steps >= self.options.steps

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take SIGTERM as a request while inside, not as the end."""
        before = signal.signal(signal.SIGTERM, lambda *_: setattr(self, "stop_requested", True))
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def _resume(self) -> int:
        """Return the steps already done: those of the newest checkpoint, or none."""
        options = self.options
        checkpoints = list_checkpoints(options.checkpoint_dir) if options.resume and options.checkpoint_dir else ()
        newest = gather(str(checkpoints[-1]) if checkpoints else None)[0]
        if newest is None:
            return 0
        self.meter.pause()
        info = load_checkpoint(newest, self.model, self.optimizer)
        self.meter.resume()
        if info.seed != options.seed:
            raise ConfigError(f"{newest} was trained with --seed {info.seed}, this run has {options.seed}")
        if info.step >= options.steps:
            raise ConfigError(f"{newest} has {info.step} steps done; --steps {options.steps} leaves none to do")
        if info.data not in ("", self.data) and not options.restart_data:
            raise ConfigError(
                f"{newest} was trained on other data, or on sequences of another length",
                help="give the same --data, or add --restart-data to begin the order of the new data",
            )
        scale = self.model.loss_scale
        if scale.is_dynamic and info.loss_scale is not None:
            scale.value, scale.steps = info.loss_scale, info.scale_steps
        if not options.restart_data:
            batch = self.model.plan.workload.global_batch_size
            self.samples = info.samples if info.samples is not None else info.step * batch
        return info.step

    def step(self, tokens: torch.Tensor) -> None:
        """Do one step; the clock runs from the batch being on the device to the parameters being new."""
        model, options = self.model, self.options
        trace = self._trace if self.steps + 1 == self._traced_step else None
        if trace is not None:
            trace.begin()
        start_s = self._now_s()
        if trace is not None:
            model.clock.keep()
        learning_rate = float(self.optimizer.param_groups[0]["lr"])
        sums, overflowed = take_step(
            model,
            self.optimizer,
            tokens,
            max_grad_norm=options.max_grad_norm,
            done=self.steps,
            votes=self.stop_requested,
        )
        if self._expert_load is not None:
            self._expert_load.follow()
        self._balance.update()
        loss, square, votes = sums.tolist()
        step_time_s = self._now_s() - start_s
        self.steps += 1
        self.samples += model.plan.workload.global_batch_size
        self.is_stopped = votes > 0
        used_scale = model.loss_scale.value
        model.loss_scale.update(overflowed=overflowed)
        self._require_finite(loss, math.sqrt(square) if square >= 0 else math.nan)
        self._scheduler.step()
        self._progress.beat()
        self.step_times_s.append(step_time_s)
        if len(self.step_times_s) == WARMUP_STEPS:
            self.meter.stop_counting()
        self.parts_s.append(model.clock.take(step_time_s))
        if trace is not None:
            trace.write(step=self.steps, start_s=start_s, step_time_s=step_time_s)
        record = StepRecord(
            step=self.steps,
            loss=loss,
            grad_norm=None if overflowed else math.sqrt(square),
            learning_rate=learning_rate,
            step_time_s=step_time_s,
            tokens_per_s=model.plan.workload.tokens_per_step / step_time_s,
            mfu=mfu(model.plan, step_time_s),
            peak_allocated_bytes=self.meter.peak_allocated_bytes(),
            parts_s=self.parts_s[-1],
        )
        if model.loss_scale.is_dynamic:
            record["loss_scale"] = used_scale
        if model.offload is not None:
            record["offload"] = model.offload.report(model.module)
        self.writer.write(record)

    def _require_finite(self, loss: float, norm: float) -> None:
        scale = self.model.loss_scale
        overflows = scale.is_dynamic and scale.value >= MIN_SCALE  # a smaller scale may help
        if not math.isfinite(loss) or not (overflows or math.isfinite(norm)):
            raise MeshwrightError(
                f"the loss is {loss} and the gradient norm {norm} at step {self.steps}",
                help="use a lower --learning-rate",
            )

    def checkpoint(self) -> None:
        """Save where it is due; does not count in the measured memory."""
        options = self.options
        if self._saves is None:
            return
        if not self._due.is_due(self.steps) and not self.is_finished:
            self._saves.poll()
            return
        self._progress.rest()
        self.meter.pause()
        self._due.begin()
        scale = self.model.loss_scale
        progress = TrainingProgress(
            step=self.steps, seed=options.seed, samples=self.samples, data=self.data,
            loss_scale=scale.value if scale.is_dynamic else None, scale_steps=scale.steps,
        )  # fmt: skip
        self._saves.save(progress)
        self._due.end(self.steps, self.step_times_s)
        if self.is_finished:
            self._saves.finish()
            folder = os.environ.get(FOLDER_VARIABLE)
            if self.steps < options.steps and folder is not None:
                (Path(folder) / STOPPED_FILE).write_text(str(self.steps))
        self.meter.resume()

    def finish(self) -> None:
        """Report the measurements of all ranks with the prediction."""
        self.meter.stop_counting()
        self._progress.rest()
        local = RankRecord(
            rank=self.model.plan.rank_map.index(dist.get_rank()),
            peak_allocated_bytes=self.meter.peak_allocated_bytes(),
            peak_reserved_bytes=self.meter.peak_reserved_bytes(),
            parts_s=list(self.parts_s),
        )
        ranks = sorted(gather(local), key=lambda entry: entry["rank"])
        self.writer.write(summarise(self.model.plan, self.step_times_s, ranks, memory_source=self.meter.source))
        self.writer.close()

    def _now_s(self) -> float:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return time.perf_counter()


def gather(value: T) -> list[T]:
    """Return one value of every rank, in the order of the processes."""
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def train(
    plan: TrainingPlan, options: TrainOptions, *, report: str | Path | None = None, timeout_s: float = 600.0
) -> None:
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
    with explain_out_of_memory(plan, device):
        model = parallelize(
            None, plan, device=device, seed=options.seed, weights=options.weights, compile_blocks=options.compile_blocks
        )
        batches, data = open_batches(plan, options.data, seed=options.seed, rows=model.share.rows)
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
        with (
            contextlib.nullcontext() if options.checkpoint_dir is None else run.listening(),
            clock_waiting(model.clock),
        ):
            for tokens in _in_advance(run, batches):
                run.step(tokens.to(device))
                run.checkpoint()
        run.finish()
        if options.save_adapters and not run.is_stopped:
            save_adapters(model, options.save_adapters)
        if options.save_weights and not run.is_stopped:
            if plan.workload.adapters is not None:
                merge_adapters(model)
            save_weights(model, options.save_weights, origin=options.weights)
    dist.destroy_process_group()


def _in_advance(run: TrainingRun, batches: TokenBatches) -> Iterator[torch.Tensor]:
    """Yield batches until the run is finished, each read while the one before is trained on."""
    batch = run.model.plan.workload.global_batch_size
    with ThreadPoolExecutor(1, thread_name_prefix="batches") as reader:
        coming = reader.submit(batches.batch, run.samples)
        while not run.is_finished:
            with run.model.clock.part("data"):
                tokens = coming.result()
            coming = reader.submit(batches.batch, run.samples + batch)
            yield tokens


def _join(plan: TrainingPlan, timeout_s: float) -> torch.device:
    """Enter the job's process group; return this rank's device."""
    cluster, timeout = plan.cluster, timedelta(seconds=timeout_s)
    backend: str = cluster.weakest_device.backend.collectives
    if backend == "gloo":
        dist.init_process_group(backend, timeout=timeout)
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    group = [group for group in cluster.groups for _ in range(group.num_devices)][int(os.environ["RANK"])]
    check_device(plan, group, device)
    torch.cuda.set_device(device)
    if plan.offload is not None and plan.offload.streamed_parameter_layers:
        backend = f"cpu:gloo,cuda:{backend}"  # those are reduced and counted on the host
    dist.init_process_group(backend, timeout=timeout, device_id=device)
    return device
