"""A step as a timeline: who does what when; and as the Trace Event Format that chrome://tracing and ui.perfetto.dev open.

A predicted step and a measured one have the same form, ranks as processes and streams as threads under the same names, so that the
two can be laid over each other.

Source: Trace Event Format, docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU; ``ts`` and ``dur`` are
microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from .layout import Layout
    from .training_plan import TrainingPlan

Stream = Literal[
    "compute", "communication", "optimizer", "copies to the host", "copies to the device", "host processors", "storage"
]
STREAMS: tuple[Stream, ...] = ("compute", "communication", "optimizer")
"""Streams that every step has."""

OFFLOAD_STREAMS: tuple[Stream, ...] = ("copies to the host", "copies to the device", "host processors", "storage")
"""Further streams of a step with an offload schedule, which work at the same time."""

_THREADS = (*STREAMS, *OFFLOAD_STREAMS)

NAMES = {"F": "forward", "B": "backward (input)", "W": "backward (weights)", "BW": "backward"}
"""Names of the letters of passes."""

OPTIMIZER = "optimizer"
DATA_PARALLEL = "data-parallel communication that nothing hides"
COPIED = "copies and sums of parameters and gradients"
SPLIT_VOCABULARY = "vocabulary split over the stages"
FILLING = "sums and gathers of other stages"
COPIES = "waiting for copies from and to the host"

MAX_PROCESSES = 8
"""Ranks of a job that are drawn one by one; of more, one stands for all the ranks of its stage."""


class Slice(NamedTuple):
    """Something one rank does, from ``start_s`` for ``seconds``; ``rank`` is its position along the pipeline, in a measured step
    the rank of the job.

    ``stage`` and ``micro_batch`` are -1 of what is done once a step; ``layer`` is told under an offload schedule only.
    """

    rank: int
    stream: Stream
    kind: str
    start_s: float
    seconds: float
    stage: int = -1
    micro_batch: int = -1
    layer: int = -1


class StepTimeline(NamedTuple):
    """All slices of a predicted step, and the ranks of the job that each rank of the pipeline stands for."""

    slices: tuple[Slice, ...]
    ranks: tuple[range, ...]
    step_time_s: float


def chrome_trace(plan: TrainingPlan, steps: StepTimeline) -> dict[str, Any]:
    """Return a predicted step as an object to be written as JSON."""
    processes = _processes(plan.layout)
    pieces = ((pid, piece) for pid in range(len(processes)) for piece in steps.slices)
    events = [_event(piece, pid) for pid, piece in pieces if processes[pid].start in steps.ranks[piece.rank]]
    return _trace(plan, "predicted", processes, events, step_time_s=steps.step_time_s)


def measured_trace(
    plan: TrainingPlan, by_rank: Sequence[Sequence[Slice]], *, starts_s: Sequence[float], step: int, step_time_s: float
) -> dict[str, Any]:
    """Return a measured step as an object to be written as JSON; of ranks drawn as one, the one that computed longest.

    Args:
        by_rank: what each rank of the job did.
        starts_s: when each of them began.
        step: its number.
        step_time_s: its seconds on the first rank, as reported.
    """

    def computing_s(rank: int) -> float:
        return sum(piece.seconds for piece in by_rank[rank] if piece.stream == "compute")

    processes = _processes(plan.layout)
    shown = [max(ranks, key=computing_s) for ranks in processes]
    events = [_event(piece, pid) for pid, rank in enumerate(shown) for piece in by_rank[rank]]
    others = {"step": step, "ranks": shown, "starts_s": [starts_s[rank] for rank in shown]}
    return _trace(plan, "measured", processes, events, step_time_s=step_time_s, **others)


def _processes(layout: Layout) -> tuple[range, ...]:
    size = 1 if layout.world_size <= MAX_PROCESSES else layout.stage_ranks
    return tuple(range(first, first + size) for first in range(0, layout.world_size, size))


def _trace(
    plan: TrainingPlan, kind: str, processes: Sequence[range], events: list[dict[str, Any]], **others: Any
) -> dict[str, Any]:
    used = {event["tid"] for event in events}
    titles: list[dict[str, Any]] = []
    for pid, ranks in enumerate(processes):
        name = f"pipeline rank {pid} (ranks {ranks.start}..{ranks.stop - 1})" if len(ranks) > 1 else f"rank {pid}"
        titles.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
        titles.append({"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}})
        for thread, stream in enumerate(_THREADS):
            if stream in STREAMS or thread in used:
                titles.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": thread, "args": {"name": stream}})
    return {
        "displayTimeUnit": "ms",
        "otherData": {"kind": kind, "layout": str(plan.layout), **others},
        "traceEvents": [*titles, *events],
    }


def _event(piece: Slice, pid: int) -> dict[str, Any]:
    of_micro_batch, is_pass = piece.micro_batch >= 0, piece.kind in NAMES
    arguments = {"stage": piece.stage, "micro_batch": piece.micro_batch} if of_micro_batch else {}
    arguments |= {"layer": piece.layer} if piece.layer >= 0 else {}
    event: dict[str, Any] = {
        "ph": "X",
        "name": f"{piece.kind}{piece.micro_batch}" if of_micro_batch and is_pass else piece.kind,
        "cat": NAMES[piece.kind] if is_pass else piece.stream,
        "pid": pid,
        "tid": _THREADS.index(piece.stream),
        "ts": 1e6 * piece.start_s,
        "dur": 1e6 * piece.seconds,
    }
    return {**event, "args": arguments} if arguments else event
