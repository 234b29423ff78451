"""What a run reports: one JSON object a step, and a last one with the measurements beside the plan's prediction."""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NotRequired, TextIO, TypedDict

from ..schema import ConfigError, Plan
from .memory import MemorySource

WARMUP_STEPS = 2
"""Steps at the start of a run that do not count in the measured step time: allocators and caches fill in them."""


class StepRecord(TypedDict):
    """One step; ``peak_allocated_bytes`` is the highest so far on the reporting rank.

    ``grad_norm`` is None where gradients overflowed under fp16-mixed and the step changed nothing; ``loss_scale`` is there under
    fp16-mixed only.
    """

    step: int
    loss: float
    grad_norm: float | None
    learning_rate: float
    step_time_s: float
    tokens_per_s: float
    mfu: float
    peak_allocated_bytes: int
    loss_scale: NotRequired[float]


class RankPeak(TypedDict):
    """Peak memory of one rank over the whole run."""

    rank: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int


class MetricsWriter:
    """Writes JSON lines to a file, each whole when it is written.

    Args:
        path: None writes nothing.
        append: keep what the file holds.

    Raises:
        ConfigError: the file cannot be opened.
    """

    def __init__(self, path: str | Path | None, *, append: bool = False) -> None:
        self._file: TextIO | None = None
        try:
            if path is not None:
                self._file = Path(path).open("a" if append else "w", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None

    def write(self, record: StepRecord | dict[str, Any]) -> None:
        """One line."""
        if self._file is not None:
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def mfu(plan: Plan, step_time_s: float) -> float:
    """FLOPs that the model needs for a step over what all devices could do at their peak in that time, as in the plan."""
    return plan.estimate.mfu * plan.estimate.step_time_s / step_time_s


def summarise(
    plan: Plan, step_times_s: Sequence[float], peaks: Sequence[RankPeak], *, memory_source: MemorySource
) -> dict[str, Any]:
    """The last object: ``{"predicted": {...}, "measured": {...}, "ratio": {...}}``; a ratio is measured over predicted.

    Args:
        step_times_s: seconds of every step of this run, in order; where more follow, the first `WARMUP_STEPS` do not
            count.
        peaks: one entry per rank.
    """
    warmup = WARMUP_STEPS if len(step_times_s) > WARMUP_STEPS else 0
    step_time_s = statistics.median(step_times_s[warmup:])
    estimate = plan.estimate
    predicted = {
        "step_time_s": estimate.step_time_s,
        "step_time_interval_s": estimate.step_time_interval_s.model_dump(),
        "tokens_per_s": estimate.tokens_per_s,
        "mfu": estimate.mfu,
        "peak_allocated_bytes": estimate.peak_allocated_bytes,
        "peak_reserved_bytes": estimate.peak_reserved_bytes,
    }
    measured = {
        "step_time_s": step_time_s,
        "tokens_per_s": plan.workload.tokens_per_step / step_time_s,
        "mfu": mfu(plan, step_time_s),
        "peak_allocated_bytes": max(peak["peak_allocated_bytes"] for peak in peaks),
        "peak_reserved_bytes": max(peak["peak_reserved_bytes"] for peak in peaks),
        "steps": len(step_times_s),
        "warmup_steps": warmup,
        "memory_source": memory_source,
        "ranks": list(peaks),
    }
    ratio = {
        name: measured[name] / predicted[name]
        for name in ("step_time_s", "tokens_per_s", "mfu", "peak_allocated_bytes", "peak_reserved_bytes")
        if predicted[name]
    }
    return {"predicted": predicted, "measured": measured, "ratio": ratio}


def follow(path: str | Path, finished: threading.Event, *, poll_s: float = 0.05) -> Iterator[dict[str, Any]]:
    """Objects of a file that another process writes, as they come; ends when ``finished`` is set and all is read."""
    path = Path(path)
    position, rest = 0, b""
    while True:
        last = finished.is_set()
        if path.exists():
            with path.open("rb") as file:
                file.seek(position)
                new = file.read()
            position += len(new)
            *lines, rest = (rest + new).split(b"\n")
            yield from (json.loads(line) for line in lines)
        if last:
            return
        if not rest:
            time.sleep(poll_s)
