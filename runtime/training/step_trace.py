"""One step as it was measured, in the form of a predicted one (schema/trace.py): what every rank did when, in one file.

Slices are the spans that the step's clock recorded (step_clock.py): passes and the update under the names that the prediction has,
and what it has no slices for: waiting, and the rest of the step. On a CPU a pass that waits for others has the waiting next to it,
on the stream of communication; on a GPU, where nothing blocks, passes include it.

Clocks: ranks of one machine share one. Between machines they are set by a barrier before the step, so that what is drawn of two
machines may be off by the time in which a barrier lets its ranks go.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from ...schema import Plan
from ...schema.base import write_atomically
from ...schema.trace import DATA_PARALLEL, OPTIMIZER, Slice, Stream, measured_trace
from .step_clock import StepClock, StepSpan

COLLECTIVE = "waiting for a collective"
NEIGHBOUR = "waiting for a neighbour in the pipeline"
SUMS = "gradients, loss and norm over the ranks"
REST = "clipping, loss, the rest"

SHORTEST_FRACTION = 1e-4
"""Waits that are a smaller part of the step are left out: torch waits for every collective, most of them long done."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class _RankStep(NamedTuple):
    """What a rank tells of its step: its machine, when the barrier and the step began there, and what it did."""

    rank: int
    machine: str
    barrier_s: float
    start_s: float
    slices: list[Slice]


class StepTrace:
    """Keeps one step of a run and writes it; every rank has one and calls both methods. Final."""

    def __init__(self, plan: Plan, clock: StepClock, path: str) -> None:
        self._plan, self._clock, self._path = plan, clock, path
        self._barrier_s = 0.0

    def begin(self) -> None:
        """Wait for the other ranks just before the step; ranks leave together."""
        dist.barrier()
        self._barrier_s = time.perf_counter()

    def write(self, *, step: int, start_s: float, step_time_s: float) -> None:
        """Gather the step that has ended; the first rank of the plan writes the file.

        Args:
            step: its number.
            start_s: when it began, by `time.perf_counter`.
            step_time_s: its seconds.

        Raises:
            ConfigError: the file cannot be written.
        """
        rank = self._plan.rank_map.index(dist.get_rank())
        slices = step_slices(self._clock.take_spans(), self._plan, rank, step_time_s)
        local = _RankStep(rank, _machine(), self._barrier_s, start_s, slices)
        steps: list[_RankStep] = [local] * dist.get_world_size()
        dist.all_gather_object(steps, local)
        if rank == 0:
            starts_s = step_starts_s(steps)
            by_rank = [_later(one.slices, starts_s[one.rank]) for one in sorted(steps)]
            trace = measured_trace(self._plan, by_rank, starts_s=starts_s, step=step, step_time_s=step_time_s)
            write_atomically(Path(self._path), json.dumps(trace))


def step_slices(pieces: Sequence[StepSpan], plan: Plan, rank: int, step_time_s: float) -> list[Slice]:
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
    return sorted([*slices, *_rest(slices, rank, passes_end_s, step_time_s)], key=lambda piece: piece.start_s)


def _rest(slices: Sequence[Slice], rank: int, passes_end_s: float, step_time_s: float) -> list[Slice]:
    """Return what lies between the passes, the update and the end of the step."""
    updates = [(piece.start_s, piece.start_s + piece.seconds) for piece in slices if piece.stream == "optimizer"]
    ends = [passes_end_s, *(end for _, end in updates)]
    begins = [*(begin for begin, _ in updates), step_time_s]
    stream: Stream = "optimizer"
    return [Slice(rank, stream, REST, a, b - a) for a, b in zip(ends, begins, strict=True) if b > a]


def step_starts_s(ranks: Sequence[_RankStep]) -> list[float]:
    """Return when the step began on each rank of the plan, seconds since it began on the first one."""
    zero: dict[str, float] = {}
    for one in ranks:
        zero[one.machine] = min(one.barrier_s, zero.get(one.machine, one.barrier_s))
    starts_s = [one.start_s - zero[one.machine] for one in sorted(ranks)]
    return [start_s - min(starts_s) for start_s in starts_s]


def _later(slices: Sequence[Slice], seconds: float) -> list[Slice]:
    return [piece._replace(start_s=piece.start_s + seconds) for piece in slices]


def _machine() -> str:
    """Return a name of this machine: ranks with the same answer read the same clock."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else platform.node()
