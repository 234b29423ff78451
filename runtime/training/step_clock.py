"""The clock of a step: where its seconds go on one rank, in forward, backward, waiting for other ranks, update and the rest.

On a CPU every collective and message blocks the process, so waiting is timed where torch waits and counts to no other part:
during a pass, the clipping or the loss it is communication, between the passes of a pipeline it is waiting for a neighbour. On a
GPU nothing blocks: parts are the stream's seconds between two events, waiting included. A part costs microseconds, so that
all steps of every run have them. All-to-alls of a backward pass wait inside torch's C++ and count as backward.

Of one step the clock can also record when each part and each wait began and ended, as `StepSpan`s.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from ...cost_models.pipeline.simulation import Action

StepPart = Literal["forward", "backward", "communication", "pipeline_wait", "optimizer", "other", "data", "preempted"]

STEP_PARTS: tuple[StepPart, ...] = (
    "forward", "backward", "communication", "pipeline_wait", "optimizer", "other", "data", "preempted",
)  # fmt: skip
"""``optimizer`` is the update alone, ``other`` the rest of the step. The last two do not add to its time: ``data`` comes before it;
``preempted`` is how long, of the parts that compute on a CPU, the process had no core, because other work had it.
"""

OUTSIDE_STEP: tuple[StepPart, ...] = ("data", "preempted")


class StepSpan(NamedTuple):
    """A part, or a wait, of the step that is recorded; seconds since the step began. ``action`` is what a pass was of."""

    part: StepPart
    start_s: float
    end_s: float
    action: Action | None = None
    is_wait: bool = False


_Mark = tuple[StepPart, Any, Any, Action | None]


class StepClock:
    """The clock of one rank. Final.

    Args:
        device: where the rank computes.
        is_pipeline: waiting outside every part is for a neighbour in the pipeline.
    """

    def __init__(self, device: torch.device, *, is_pipeline: bool = False) -> None:
        self._on_gpu = device.type == "cuda"
        self._outside: StepPart = "pipeline_wait" if is_pipeline else "communication"
        self._seconds = dict.fromkeys(STEP_PARTS, 0.0)
        self._marks: list[_Mark] = []
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
        counted = sum(value for name, value in seconds.items() if name not in OUTSIDE_STEP)
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
