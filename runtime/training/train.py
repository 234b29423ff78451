"""The built-in training of every rank: join the job, build the model, then batch, step, checkpoint and metrics, step by step."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import Protocol

import torch
import torch.distributed as dist

from ...schema import ConfigError, MeshwrightError, TrainingPlan
from ...schema.local_updates import with_sync_every
from ..adapters import merge_adapters, save_adapters
from ..documents.packs import RankBatch
from ..job.events import JobEvent
from ..job.machine import explain_out_of_memory
from ..job.watch import FOLDER_VARIABLE, STOPPED_FILE, ProgressFile
from ..loss_scale import MIN_SCALE
from ..weights.save import save_weights
from .checkpoint import CheckpointWriter, TrainingProgress, load_newest
from .checkpoint_files import checkpoints_to_resume
from .expert_load import ExpertLoad
from .islands import IslandPlace, LocalUpdater
from .memory import MemoryMeter
from .metrics import (
    RETAINED_STEPS,
    WARMUP_STEPS,
    BatchRecord,
    MetricsWriter,
    RankRecord,
    StepRecord,
    last_step,
    mfu,
    summarise,
)
from .optimizer import RouterBalance, build_scheduler, local_sums, update
from .options import TrainOptions, prepare_options, require_local
from .rank_part import Batches, RankPart, backend_and_device, build_part, gather
from .save_schedule import SaveSchedule
from .step_clock import StepPart, StepTrace, clock_waiting


class Guard(Protocol):
    """What a job that goes on without dead ranks does at each step (supervision/); every rank has one."""

    def before_step(self) -> None:
        """Raise where a rank is gone."""

    def before_sums(self) -> None:
        """Do what must be done before any rank can end the step."""

    def before_update(self) -> None:
        """Raise where this thread is not to change the states."""

    def calls_a_halt(self) -> bool:
        """Tell whether this rank asks all to interrupt the run after the next step."""

    def after_step(self) -> None:
        """Note that this rank has ended the step; may raise where the run was to be interrupted."""


@dataclass(eq=False)
class TrainingRun:
    """The state of a rank's run.

    Attributes:
        report: file that the plan's first rank appends its metrics to.
        samples: sequences of the data that the run has seen, all ranks together.
        stop_requested: by a scheduler (SIGTERM); the ranks then agree on a step after which all of them do.
        steps: of the entire run that are done, those before a resumed checkpoint included.
        start: how far the run is whose part this is; None: at the beginning, or at the checkpoint that is to be resumed.
        saved: step of the last checkpoint that was written in this run.
        is_halted: a guard asked for the run to be interrupted after the last step.
        sums: over all ranks, of the last step; None where this rank has gradients of the next one and awaits their sums.
    """

    part: RankPart
    options: TrainOptions
    meter: MemoryMeter
    report: str | Path | None = None
    guard: Guard | None = None
    start: TrainingProgress | None = None
    samples: int = 0
    stop_requested: bool = False
    step_times_s: list[float] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    parts_s: deque[dict[StepPart, float]] = field(default_factory=lambda: deque(maxlen=RETAINED_STEPS))
    is_stopped: bool = False
    saved: int = -1
    is_halted: bool = False
    sums: list[float] | None = field(default_factory=list)

    def __post_init__(self) -> None:
        # A step that overflows moves the schedule on and not the parameters.
        warnings.filterwarnings("ignore", message=r"Detected call of `lr_scheduler.step\(\)` before")
        self._progress, self._saves, self._notes = ProgressFile(), None, list[str]()
        self._owes_save, self._save_s, self._begun_s = False, 0.0, time.time()
        self.writer = MetricsWriter(None)
        self._reported = 0
        self._batch: RankBatch | None = None
        self.model, self.optimizer = self.part.model, self.part.optimizer
        if self.start is not None:
            self.adopt(self.part, self.start)
            return
        self._resume()
        self._begin()

    def _begin(self) -> None:
        """Begin with the model that is there, after the steps that are done."""
        options = self.options
        self._scheduler = build_scheduler(self.optimizer, options, done=self.steps)
        self._balance = RouterBalance(self.model, options.router_bias_rate)
        self._expert_load = ExpertLoad(self.model) if options.hot_experts else None
        self._trace = StepTrace(self.model.plan, self.model.clock, options.trace) if options.trace else None
        self._traced_step = min(self.steps + WARMUP_STEPS + 1, options.steps)
        self._due = SaveSchedule(options, done=self.steps, begun_s=self._begun_s, save_s=self._save_s)
        if options.checkpoint_dir is not None:
            self._saves = CheckpointWriter(
                options.checkpoint_dir, self.model, self.optimizer, keep=options.keep_checkpoints,
                in_background=options.checkpoint_beside,
            )  # fmt: skip
        is_reporter = dist.get_rank() == self.model.plan.rank_map[0]
        # After what ranks wrote before a restart.
        self.writer = MetricsWriter(self.report if is_reporter else None, append=True)
        for note in self._notes:
            self.writer.write({"note": note})

    def adopt(self, part: RankPart, progress: TrainingProgress | None) -> None:
        """Go on with another model and another part of the data.

        Args:
            progress: of the model's states; None: they are new, and the newest checkpoint is read where the run resumes.
        """
        if self._saves is not None:
            self._saves.abandon()
        self.writer.close()
        self.part, self.model, self.optimizer = part, part.model, part.optimizer
        self.sums, self.is_stopped, self.is_halted = [], False, False
        if progress is None:
            self._resume()
        else:
            self._follow(progress)
        self._begin()
        if self.report is not None:
            self._reported = max(self._reported, last_step(self.report))
        self.step_times_s, self.parts_s = [], deque(maxlen=RETAINED_STEPS)

    @property
    def is_finished(self) -> bool:
        """Tell whether every step is done, or the ranks agreed to end."""
        return self.is_stopped or self.steps >= self.options.steps

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take SIGTERM as a request while inside, not as the end, where the run can be saved; the main thread alone can."""
        if self.options.checkpoint_dir is None or threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGTERM, lambda *_: setattr(self, "stop_requested", True))
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def _follow(self, progress: TrainingProgress) -> None:
        """Count on from some progress."""
        self.steps, self.samples, self._save_s = progress.step, progress.samples or 0, progress.save_s
        scale = self.model.loss_scale
        if scale.is_dynamic and progress.loss_scale is not None:
            scale.value, scale.steps = progress.loss_scale, progress.scale_steps

    def _resume(self) -> None:
        """Count on from the newest checkpoint, or begin."""
        options = self.options
        folders = checkpoints_to_resume(options.checkpoint_dir if options.resume else None)
        if self.part.updates is not None:  # no island goes back further than the others
            folders = self.part.updates.place.common(folders)[:1]
        self.meter.pause()
        newest, info, self._notes = load_newest(folders, self.model, self.optimizer)
        self.meter.resume()
        if info is None:
            self._follow(TrainingProgress(step=0))
            return
        if info.seed != options.seed:
            raise ConfigError(f"{newest} was trained with --seed {info.seed}, this run has {options.seed}")
        if info.step >= options.steps:
            raise ConfigError(f"{newest} has {info.step} steps done; --steps {options.steps} leaves none to do")
        if info.data not in ("", self.part.data) and not options.restart_data:
            raise ConfigError(
                f"{newest} was trained on other data, or on sequences of another length",
                help="give the same --data, or add --restart-data to begin the order of the new data",
            )
        samples = info.samples if info.samples is not None else info.step * self.part.sequences
        self._follow(info.replace(samples=0 if options.restart_data else samples))

    def step(self, tokens: torch.Tensor | RankBatch) -> None:
        """Do one step; the clock runs from the batch being on the device to the parameters being new."""
        model = self.model
        self._batch = tokens if isinstance(tokens, RankBatch) else None
        is_traced = self._trace is not None and self.steps + 1 == self._traced_step
        if self.guard is not None:
            self.guard.before_step()
        if is_traced and self._trace is not None:
            self._trace.begin()
        start_s = self._now_s()
        if is_traced:
            model.clock.keep()
        caller = self.guard or self.part.updates
        votes = self.stop_requested, caller is not None and caller.calls_a_halt()
        sums = local_sums(model, self.optimizer, tokens, done=self.steps, votes=votes)
        if self.guard is not None:
            self.guard.before_sums()
        self.sums = None
        model.add_over_ranks(sums)
        self.complete(sums, start_s, is_traced=is_traced)
        if self.guard is not None:
            self.guard.after_step()

    def complete(self, sums: torch.Tensor, start_s: float | None = None, *, is_traced: bool = False) -> None:
        """End a step whose gradients are there, given the sums over all ranks."""
        model = self.model
        if self.guard is not None:
            self.guard.before_update()
        learning_rate = float(self.optimizer.param_groups[0]["lr"])
        overflowed = update(model, self.optimizer, sums, max_grad_norm=self.options.max_grad_norm)
        self.sums = sums.tolist()
        if self._expert_load is not None:
            self._expert_load.follow()
        self._balance.update()
        loss, square, *votes = self.sums
        self.steps += 1
        self.samples += self.part.sequences
        stop_requested, self.is_halted = (number > 0 for number in votes)
        self.is_stopped = stop_requested and self.part.updates is None
        norm = math.sqrt(square) if square >= 0 else math.nan
        if self.part.updates is not None:
            self._require_finite(loss, norm)  # before the other islands have it
            self._sum_islands(self.part.updates, stop_requested=stop_requested)
        step_time_s = 0.0 if start_s is None else self._now_s() - start_s
        used_scale = model.loss_scale.value
        model.loss_scale.update(overflowed=overflowed)
        self._require_finite(loss, norm)
        self._scheduler.step()
        self._progress.beat(self.steps)
        self.step_times_s.append(step_time_s or max(self.step_times_s, default=1.0))
        if len(self.step_times_s) == WARMUP_STEPS:
            self.meter.stop_counting()
        self.parts_s.append(model.clock.take(step_time_s))
        if is_traced and self._trace is not None and start_s is not None:
            self._trace.write(step=self.steps, start_s=start_s, step_time_s=step_time_s)
        num_tokens = model.plan.workload.tokens_per_step if self._batch is None else self._batch.num_tokens
        record = StepRecord(
            step=self.steps,
            loss=loss,
            grad_norm=None if overflowed else norm,
            learning_rate=learning_rate,
            step_time_s=self.step_times_s[-1],
            tokens_per_s=num_tokens / self.step_times_s[-1],
            mfu=mfu(model.plan, self.step_times_s[-1]) * num_tokens / model.plan.workload.tokens_per_step,
            peak_allocated_bytes=self.meter.peak_allocated_bytes(),
            parts_s=self.parts_s[-1],
        )
        if self._batch is not None:
            self.num_tokens.append(num_tokens)
            record["batch"] = BatchRecord(
                num_tokens=num_tokens, micro_batches=len(self._batch.packs), predicted_s=self._batch.predicted_s,
                schedule_s=self._batch.schedule_s,
            )  # fmt: skip
        if model.loss_scale.is_dynamic:
            record["loss_scale"] = used_scale
        if model.offload is not None:
            record["offload"] = model.offload.report(model.module)
        if self.steps > self._reported:  # a step that is done again was told
            self.writer.write(record)

    def _sum_islands(self, updates: LocalUpdater, *, stop_requested: bool) -> None:
        if updates.is_due(self.steps):
            self._progress.rest()
        with self.model.clock.part("communication"):
            updates.after_step(self.progress, stop_requested=stop_requested, halt_requested=self.is_halted)
            if self.steps >= self.options.steps or updates.is_stopped:
                updates.settle()
        self.is_stopped = updates.is_stopped

    def _require_finite(self, loss: float, norm: float) -> None:
        scale = self.model.loss_scale
        overflows = scale.is_dynamic and scale.value >= MIN_SCALE  # a smaller scale may help
        if not math.isfinite(loss) or not (overflows or math.isfinite(norm)):
            raise MeshwrightError(
                f"the loss is {loss} and the gradient norm {norm} at step {self.steps}",
                help="use a lower --learning-rate",
            )

    @property
    def progress(self) -> TrainingProgress:
        """How far the run is."""
        scale = self.model.loss_scale
        return TrainingProgress(
            step=self.steps, seed=self.options.seed, samples=self.samples, data=self.part.data,
            loss_scale=scale.value if scale.is_dynamic else None, scale_steps=scale.steps, save_s=self._due.save_s,
        )  # fmt: skip

    def rest(self) -> None:
        """Note that what comes next may take any time, until the next step."""
        self._progress.rest()

    def checkpoint(self) -> None:
        """Save where it is due; does not count in the measured memory."""
        options = self.options
        if self._saves is None:
            return
        waits = self.part.updates is not None and not self.part.updates.is_idle
        self._owes_save |= self._due.is_due(self.steps, self.step_times_s)
        if (not self._owes_save or waits) and not self.is_finished:
            if note := self._saves.poll():
                self.writer.write({"note": note})
            return
        self._owes_save = False
        self._progress.rest()
        self.meter.pause()
        self._due.begin()
        self._saves.save(self.progress)
        self.saved = self.steps
        self._due.end(self.steps, self.step_times_s)
        event = JobEvent(event="checkpoint", after_step=self.steps, seconds=self._due.save_s)
        self.writer.write(event.record())
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
        updates = self.part.updates
        summary = summarise(
            self.model.plan, self.step_times_s, ranks, memory_source=self.meter.source, num_tokens=self.num_tokens,
            takes_turns=updates is not None,
        )  # fmt: skip
        if updates is not None:
            summary["measured"]["sent_bytes"] = sum(gather(updates.sent_bytes))
            summary["measured"]["sync_every"] = updates.pace.every * len(updates.fragments)
            summary["measured"]["exchange_s"] = fmean(updates.exchanges_s) if updates.exchanges_s else None
        self.writer.write(summary)
        self.writer.close()

    def _now_s(self) -> float:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return time.perf_counter()


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
    require_local(plan, options)
    backend, device = backend_and_device(plan)
    place: IslandPlace | None = None
    given = options
    if plan.local_updates is not None:
        plan = with_sync_every(plan, options.sync_every) if isinstance(options.sync_every, int) else plan
        place = IslandPlace.join(plan, backend=backend, device=device, timeout_s=timeout_s)
        if place is None:
            return
        plan, options = place.plan, place.options(options)
    else:
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(backend, timeout=timeout, device_id=device if device.type == "cuda" else None)
    meter = MemoryMeter(device, count=options.count_memory)
    options = prepare_options(plan, options)
    with explain_out_of_memory(plan, device):
        part = build_part(plan, options, device, place)
        if place is not None:
            part = replace(part, updates=LocalUpdater(place, part.model, given, timeout_s=timeout_s))
            part.model.local_updates = part.updates
        train_to_the_end(TrainingRun(part, options, meter, report, start=part.updates and part.updates.start))
    if place is not None:
        place.membership.finish()
    dist.destroy_process_group()


def train_to_the_end(run: TrainingRun) -> None:
    """Do what is left of a run: steps, checkpoints, the report, and what is saved at the end."""
    options, model = run.options, run.model
    with run.listening(), clock_waiting(model.clock):
        for tokens in _in_advance(run, run.part.batches):
            run.step(tokens.to(model.device))
            run.checkpoint()
    run.finish()
    if run.part.updates is not None and not run.is_stopped:
        run.part.updates.finish()
    if options.save_adapters and not run.is_stopped:
        save_adapters(model, options.save_adapters)
    saves = run.part.updates is None or run.part.updates.is_first
    if options.save_weights and saves and not run.is_stopped:
        if model.plan.workload.adapters is not None:
            merge_adapters(model)
        save_weights(model, options.save_weights, origin=options.weights)


def _in_advance(run: TrainingRun, batches: Batches) -> Iterator[torch.Tensor | RankBatch]:
    """Yield batches until the run is finished, each read while the one before is trained on."""
    with ThreadPoolExecutor(1, thread_name_prefix="batches") as reader:
        coming = reader.submit(batches.batch, run.samples)
        while not run.is_finished:
            with run.model.clock.part("data"):
                tokens = coming.result()
            coming = reader.submit(batches.batch, run.samples + run.part.sequences)
            yield tokens
