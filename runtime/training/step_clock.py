"""The clock of a step: where its seconds go on one rank, in forward, backward, waiting for other ranks, update and the rest.

On a CPU every collective and message blocks the process, so waiting is timed where torch waits and counts to no other part:
during a pass, the clipping or the loss it is communication, between the passes of a pipeline it is waiting for a neighbour. On a
GPU nothing blocks: parts are the stream's seconds between two events, waiting included. A part costs microseconds, so that
all steps of every run have them. All-to-alls of a backward pass wait inside torch's C++ and count as backward.

Of one step the clock can also record when each part and each wait began and ended, which is written as a trace in the form of the
predicted one (schema/trace.py): passes and the update under its names, and waiting and the rest of the step. Ranks of one machine
share a clock. Between machines clocks are set by a barrier before the step, so that what is drawn of two machines may be off by
the time in which a barrier lets its ranks go.
"""

from __future__ import annotations

import json
import platform
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from ...cost_models.pipeline.orders import Action
from ...schema import TrainingPlan
from ...schema.base import write_atomically
from ...schema.trace import DATA_PARALLEL, OPTIMIZER, Slice, measured_trace

StepPart = Literal["forward", "backward", "communication", "pipeline_wait", "optimizer", "other", "data", "preempted"]

STEP_PARTS: tuple[StepPart, ...] = get_args(StepPart)
"""``optimizer`` is the update alone, ``other`` the rest of the step. The last two do not add to its time: ``data`` comes before it;
``preempted`` is how long, of the parts that compute on a CPU, the process had no core, because other work had it.
"""

COLLECTIVE = "waiting for a collective"
NEIGHBOUR = "waiting for a neighbour in the pipeline"
SUMS = "gradients, loss and norm over the ranks"
REST = "clipping, loss, the rest"
SHORTEST_FRACTION = 1e-4
"""Waits that are a smaller part of the step are left out: torch waits for every collective, most of them long done."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class StepSpan(NamedTuple):
    """A part, or a wait, of the step that is recorded; seconds since the step began. ``action`` is what a pass was of."""

    part: StepPart
    start_s: float
    end_s: float
    action: Action | None = None
    is_wait: bool = False


class StepClock:
    """The clock of one rank; in a pipeline waiting outside every part is for a neighbour. Final."""

    def __init__(self, device: torch.device, *, is_pipeline: bool = False) -> None:
        self.device, self._on_gpu = device, device.type == "cuda"
        self._outside: StepPart = "pipeline_wait" if is_pipeline else "communication"
        self._seconds = dict.fromkeys(STEP_PARTS, 0.0)
        self._marks: list[tuple[StepPart, Any, Any, Action | None]] = []
        self._waited, self._depth, self._thread = 0.0, 0, threading.get_ident()
        self._begun: Any = None
        self._pieces: list[StepSpan] = []

    def keep(self) -> None:
        """Begin a step of which each part and wait is recorded until `take_spans`."""
        self._pieces = []
        self._begun = time.perf_counter()
        if self._on_gpu:
            self._begun = torch.cuda.Event(enable_timing=True)
            self._begun.record()

    def take_spans(self) -> list[StepSpan]:
        """Return what was recorded of the step that has ended; on a GPU after it was synchronised and taken. Recording ends."""
        pieces, self._pieces, self._begun = self._pieces, [], None
        return pieces

    @contextmanager
    def part(self, name: StepPart, action: Action | None = None) -> Iterator[None]:
        """Count what happens inside for a part, except for waiting. Parts do not nest."""
        if self._on_gpu:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
            self._marks.append((name, begin, end, action))
            return
        start, before, ran = time.perf_counter(), self._waited, time.thread_time()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            ended = time.perf_counter()
            busy_s = ended - start - (self._waited - before)
            if self._begun is not None:
                self._pieces.append(StepSpan(name, start - self._begun, ended - self._begun, action))
            self._seconds[name] += busy_s
            if name != "data":
                self._seconds["preempted"] += max(0.0, busy_s - (time.thread_time() - ran))

    def take(self, step_time_s: float) -> dict[StepPart, float]:
        """Return the parts of the step that has ended, seconds, and begin anew; on a GPU after it was synchronised."""
        for name, begin, end, action in self._marks:
            self._seconds[name] += begin.elapsed_time(end) / 1e3
            if self._begun is not None:
                since = [self._begun.elapsed_time(event) / 1e3 for event in (begin, end)]
                self._pieces.append(StepSpan(name, since[0], since[1], action))
        seconds, self._seconds, self._marks = self._seconds, dict.fromkeys(STEP_PARTS, 0.0), []
        counted = sum(value for name, value in seconds.items() if name not in ("data", "preempted"))
        return {**seconds, "other": max(0.0, step_time_s - counted)}

    def waited(self, since_s: float) -> None:
        """Count what passed since a moment of time.perf_counter, on this thread, as waiting for other ranks."""
        ended = time.perf_counter()
        part: StepPart = "communication" if self._depth else self._outside
        self._waited += ended - since_s
        self._seconds[part] += ended - since_s
        if self._begun is not None and not self._on_gpu:
            self._pieces.append(StepSpan(part, since_s - self._begun, ended - self._begun, is_wait=True))

    def timed(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        """Return a waiting function that tells this clock how long it took."""

        def timed_wait(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:  # a checkpoint that is written in the background
                return wait(*args, **kwargs)
            start = time.perf_counter()
            try:
                return wait(*args, **kwargs)
            finally:
                self.waited(start)

        return timed_wait


@contextmanager
def clock_waiting(clock: StepClock) -> Iterator[None]:
    """Count every wait of this process for a collective or a message while inside."""
    work, tensor = dist.Work.wait, functional.wait_tensor
    dist.Work.wait = clock.timed(work)  # type: ignore[method-assign]
    functional.wait_tensor = clock.timed(tensor)
    try:
        yield
    finally:
        dist.Work.wait = work  # type: ignore[method-assign]
        functional.wait_tensor = tensor


class _RankStep(NamedTuple):
    """What a rank tells of its step: its machine (the same, the same clock), when barrier and step began there, what it did."""

    rank: int
    machine: str
    barrier_s: float
    start_s: float
    slices: list[Slice]


class StepTrace:
    """Keeps one step of a run and writes it; every rank has one and calls both methods. Final."""

    def __init__(self, plan: TrainingPlan, clock: StepClock, path: str) -> None:
        self._plan, self._clock, self._path = plan, clock, path
        self._barrier_s = 0.0

    def begin(self) -> None:
        """Wait for the other ranks just before the step; ranks leave together."""
        dist.barrier()
        self._barrier_s = time.perf_counter()

    def write(self, *, step: int, start_s: float, step_time_s: float) -> None:
        """Gather the step that has ended, which began at ``start_s`` by `time.perf_counter`; the plan's first rank writes the file.

        Raises:
            ConfigError: the file cannot be written.
        """
        rank = self._plan.rank_map.index(dist.get_rank())
        slices = step_slices(self._clock.take_spans(), self._plan, rank, step_time_s)
        machine = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else platform.node()
        local = _RankStep(rank, machine, self._barrier_s, start_s, slices)
        steps: list[_RankStep] = [local] * dist.get_world_size()
        dist.all_gather_object(steps, local)
        if rank == 0:
            starts_s = step_starts_s(steps)
            by_rank = [
                [piece._replace(start_s=piece.start_s + starts_s[one.rank]) for piece in one.slices]
                for one in sorted(steps)
            ]
            trace = measured_trace(self._plan, by_rank, starts_s=starts_s, step=step, step_time_s=step_time_s)
            write_atomically(Path(self._path), json.dumps(trace))


def step_slices(pieces: Sequence[StepSpan], plan: TrainingPlan, rank: int, step_time_s: float) -> list[Slice]:
    """Return what a rank did, from the beginning of its step."""
    passes_end_s = max((piece.end_s for piece in pieces if piece.action is not None), default=0.0)
    layout = plan.layout
    collective = COLLECTIVE if layout.tp * layout.cp * layout.ep > 1 else DATA_PARALLEL
    slices: list[Slice] = []
    for part, start_s, end_s, action, is_wait in pieces:
        seconds = end_s - start_s
        if action is not None:
            slices.append(Slice(rank, "compute", action.kind, start_s, seconds, action.stage, action.micro_batch))
        elif part == "optimizer" and not is_wait:
            slices.append(Slice(rank, "optimizer", OPTIMIZER, start_s, seconds))
        elif is_wait and seconds >= SHORTEST_FRACTION * step_time_s:
            waited_for = NEIGHBOUR if part == "pipeline_wait" else collective
            name = SUMS if start_s >= passes_end_s else waited_for
            slices.append(Slice(rank, "communication", name, start_s, seconds))
    # The rest lies between the passes, the update and the end of the step.
    updates = [(piece.start_s, piece.start_s + piece.seconds) for piece in slices if piece.stream == "optimizer"]
    ends, begins = [passes_end_s, *(end for _, end in updates)], [*(begin for begin, _ in updates), step_time_s]
    slices += [Slice(rank, "optimizer", REST, a, b - a) for a, b in zip(ends, begins, strict=True) if b > a]
    return sorted(slices, key=lambda piece: piece.start_s)


def step_starts_s(ranks: Sequence[_RankStep]) -> list[float]:
    """Return when the step began on each rank of the plan, seconds since it began on the first one."""
    zero: dict[str, float] = {}
    for one in ranks:
        zero[one.machine] = min(one.barrier_s, zero.get(one.machine, one.barrier_s))
    starts_s = [one.start_s - zero[one.machine] for one in sorted(ranks)]
    return [start_s - min(starts_s) for start_s in starts_s]
