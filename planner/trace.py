"""A timeline in the Trace Event Format that chrome://tracing and ui.perfetto.dev open: ranks as processes, streams as threads.

Source: Trace Event Format, docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU; ``ts`` and ``dur`` are
microseconds.
"""

from __future__ import annotations

from typing import Any

from ..schema import Plan
from .timeline import StepTimeline, Stream

NAMES = {"F": "forward", "B": "backward (input)", "W": "backward (weights)", "BW": "backward"}
"""What the letters of passes stand for."""
STREAMS: tuple[Stream, ...] = ("compute", "communication", "optimizer")


def chrome_trace(plan: Plan, steps: StepTimeline) -> dict[str, Any]:
    """The timeline as an object to be written as JSON."""
    events: list[dict[str, Any]] = []
    for rank, ranks in enumerate(steps.ranks):
        name = f"pipeline rank {rank} (ranks {ranks.start}..{ranks.stop - 1})" if len(ranks) > 1 else f"rank {rank}"
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
        for thread, stream in enumerate(STREAMS):
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": stream}})
    for piece in steps.slices:
        once = piece.micro_batch < 0
        event: dict[str, Any] = {
            "ph": "X",
            "name": piece.kind if once else f"{piece.kind}{piece.micro_batch}",
            "cat": piece.stream if once else NAMES[piece.kind],
            "pid": piece.rank,
            "tid": STREAMS.index(piece.stream),
            "ts": 1e6 * piece.start_s,
            "dur": 1e6 * piece.seconds,
        }
        if not once:
            event["args"] = {"stage": piece.stage, "micro_batch": piece.micro_batch}
        events.append(event)
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "kind": "predicted",
            "layout": str(plan.layout),
            "step_time_s": steps.step_time_s,
        },
        "traceEvents": events,
    }
