"""Metrics of a run: one JSON object a step, and a last one with the measurements next to the plan's prediction.

A slow rank is named by an exact sign test over the steps. Of every rank r and step t let c[r, t] be the seconds of its own work,
waiting left out. Peers have the same work: the other ranks of the same pipeline stage; of a stage with one rank all others, each
over what the plan expects of it. With

    d[r, t] = log(c[r, t] / expected[r]) - median over peers of the same,   m[r] = median over steps of d[r]

a rank is slow where m exceeds the smallest difference that is worth naming, `SLOWER` among ranks with the same work and
`SLOWER_THAN_EXPECTED` where only the plan's expectation makes them comparable, and where d is above zero in more steps than
chance allows: of a rank that is as its peers each step is above or below with equal odds, so that k or more of T are above with
the probability of a binomial tail, whatever the distribution of the noise. Over all ranks together a run without a slow rank
names one at most once in 1 / `FALSE_ALARMS` runs (Bonferroni), which is why few steps name nobody: T >= log2(R / FALSE_ALARMS).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NotRequired, TextIO, TypedDict

import numpy as np
from numpy.typing import NDArray

from ...schema import ConfigError, TrainingPlan
from .memory import MemorySource
from .step_clock import STEP_PARTS, StepPart

WARMUP_STEPS = 2
"""Steps at the start of a run that do not count in the measured step time: allocators and caches fill in them."""

RETAINED_STEPS = 256
"""Steps, the last ones, whose parts every rank keeps for the comparison of ranks at the end."""

SLOWER, SLOWER_THAN_EXPECTED = 0.10, 0.50
FALSE_ALARMS = 0.01

FloatArray = NDArray[np.float64]


class OffloadRecord(TypedDict):
    """Bytes that one rank moved in a step, those that the plan predicts, and ``host_bytes`` that its offloading holds."""

    to_host_bytes: int
    to_device_bytes: int
    read_bytes: int
    stored_bytes: int
    planned_to_host_bytes: int
    planned_to_device_bytes: int
    host_bytes: int
    warnings: list[str]


class BatchRecord(TypedDict):
    """A batch of documents: its tokens, this rank's micro-batches, and the seconds predicted for it and spent on its schedule."""

    num_tokens: int
    micro_batches: int
    predicted_s: float
    schedule_s: float


class StepRecord(TypedDict):
    """One step; ``peak_allocated_bytes`` is the highest so far on the reporting rank.

    ``grad_norm`` is None where gradients overflowed under fp16-mixed and the step changed nothing.
    """

    step: int
    loss: float
    grad_norm: float | None
    learning_rate: float
    step_time_s: float
    tokens_per_s: float
    mfu: float
    peak_allocated_bytes: int
    parts_s: dict[StepPart, float]
    loss_scale: NotRequired[float]
    offload: NotRequired[OffloadRecord]
    batch: NotRequired[BatchRecord]


class RankRecord(TypedDict):
    """One rank over the entire run: peak memory, and the parts of its steps in order (of the last ones)."""

    rank: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    parts_s: list[dict[StepPart, float]]


class MetricsWriter:
    """Writer of JSON lines to a file, each complete when it is written; without a path nothing is.

    A line that a writer before could not end, because the disk was full, stays on a line of its own; who reads passes over it.

    Raises:
        ConfigError: the file cannot be opened.
    """

    def __init__(self, path: str | Path | None, *, append: bool = False) -> None:
        self._file: TextIO | None = None
        try:
            if path is not None:
                is_cut = append and _is_cut(Path(path))
                self._file = Path(path).open("a" if append else "w", encoding="utf-8")  # noqa: SIM115
                self._file.write("\n" * is_cut)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None

    def write(self, record: StepRecord | dict[str, Any]) -> None:
        """Write one line."""
        if self._file is not None:
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def last_step(path: str | Path) -> int:
    """Return the last step that a file of metrics tells of; 0 where there is none."""
    lines = Path(path).read_bytes().splitlines() if Path(path).exists() else []
    return max((record.get("step", 0) for record in _complete(lines)), default=0)


def _is_cut(path: Path) -> bool:
    """Tell whether the last line of a file has no end."""
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def _complete(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the objects of the lines that were written to their end."""
    for line in lines:
        with contextlib.suppress(json.JSONDecodeError):
            yield json.loads(line)


def mfu(plan: TrainingPlan, step_time_s: float) -> float:
    """Return the FLOPs of a step over what all devices could do at their peak in that time, as in the plan."""
    return plan.estimate.mfu * plan.estimate.step_time_s / step_time_s


_COMPARED = ("step_time_s", "tokens_per_s", "mfu", "peak_allocated_bytes", "peak_reserved_bytes")


def summarise(
    plan: TrainingPlan,
    step_times_s: Sequence[float],
    ranks: Sequence[RankRecord],
    *,
    memory_source: MemorySource,
    num_tokens: Sequence[int] = (),
    takes_turns: bool = False,
) -> dict[str, Any]:
    """Return the last object: ``{"predicted": {...}, "measured": {...}, "ratio": {...}}``; a ratio is measured over predicted.

    ``step_times_s`` are of every step of this run, in order; where more follow, the first `WARMUP_STEPS` do not count.
    ``num_tokens`` are those of each step, where steps differ in them. ``takes_turns``: some steps do more than others, so that
    their mean counts and not their median.
    """
    warmup = WARMUP_STEPS if len(step_times_s) > WARMUP_STEPS else 0
    average = statistics.fmean if takes_turns else statistics.median
    step_time_s, parts = average(step_times_s[warmup:]), plan.estimate.breakdown_s
    tokens_per_s = plan.workload.tokens_per_step / step_time_s
    if num_tokens:
        tokens_per_s = sum(num_tokens[warmup:]) / sum(step_times_s[warmup:])
    predicted = {
        **{name: getattr(plan.estimate, name) for name in _COMPARED},
        "step_time_interval_s": plan.estimate.step_time_interval_s.model_dump(),
        # Of the busiest rank, in the parts that a run can tell apart; they sum to the step time.
        "parts_s": {
            "compute": parts.compute + parts.recompute,
            "communication": parts.tp + parts.cp + parts.ep + parts.dp,
            "pipeline_wait": parts.pp + parts.bubble,
            "optimizer": parts.optimizer,
        },
    }
    # [T, len(STEP_PARTS)] of each rank: the steps that count, as far as they were retained.
    counted = len(step_times_s) - warmup
    parts_s = [
        np.array([[step[name] for name in STEP_PARTS] for step in rank["parts_s"][-counted:]]).reshape(
            -1, len(STEP_PARTS)
        )
        for rank in ranks
    ]
    medians = [
        dict(zip(STEP_PARTS, np.median(steps, axis=0).tolist(), strict=True)) if len(steps) else {} for steps in parts_s
    ]
    measured = {
        "step_time_s": step_time_s,
        "tokens_per_s": tokens_per_s,
        "mfu": mfu(plan, step_time_s) * tokens_per_s * step_time_s / plan.workload.tokens_per_step,
        "peak_allocated_bytes": max(rank["peak_allocated_bytes"] for rank in ranks),
        "peak_reserved_bytes": max(rank["peak_reserved_bytes"] for rank in ranks),
        "parts_s": _measured_parts_s(medians),
        "stragglers": _stragglers(plan, parts_s),
        "steps": len(step_times_s),
        "warmup_steps": warmup,
        "memory_source": memory_source,
        "ranks": [
            {**rank, "stage_idx": rank["rank"] // plan.layout.stage_ranks, "parts_s": median_parts}
            for rank, median_parts in zip(ranks, medians, strict=True)
        ],
    }
    ratio = {name: measured[name] / predicted[name] for name in _COMPARED if predicted[name]}
    return {"predicted": predicted, "measured": measured, "ratio": ratio}


def _measured_parts_s(medians: Sequence[dict[StepPart, float]]) -> dict[str, float]:
    """Return the parts of the rank that computes longest, under the names of the prediction, and what has none."""
    if not all(medians):
        return {}
    busiest = max(medians, key=lambda parts: parts["forward"] + parts["backward"])
    passes: tuple[StepPart, ...] = ("forward", "backward")
    rest = {name: seconds for name, seconds in busiest.items() if name not in passes}
    return {"compute": sum(busiest[name] for name in passes), **rest}


def _stragglers(plan: TrainingPlan, parts_s: Sequence[FloatArray]) -> list[Straggler]:
    """Return slow ranks by their own work: passes and update on a CPU; on a GPU, whose passes include waiting, the update."""
    on_gpu = plan.cluster.weakest_device.backend.has_streams
    local_work: tuple[StepPart, ...] = ("optimizer",) if on_gpu else ("forward", "backward", "optimizer")
    columns = [STEP_PARTS.index(name) for name in local_work]
    compute_s = np.array([parts[:, columns].sum(axis=1) for parts in parts_s])
    stage_of_rank = np.arange(len(parts_s)) // plan.layout.stage_ranks
    if compute_s.ndim < 2 or not compute_s.size:
        return []
    stages = plan.estimate.stages
    expected = np.array([stage.forward_s + stage.backward_s for stage in stages])
    return stragglers(compute_s, stage_of_rank, expected[np.minimum(stage_of_rank, len(stages) - 1)])


def read_new_records(path: str | Path, finished: threading.Event, *, poll_s: float = 0.05) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file that another process writes, as they come; end when ``finished`` is set and all is read."""
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
            yield from _complete(lines)
        if last:
            return
        if not rest:
            time.sleep(poll_s)


class Straggler(TypedDict):
    """A slow rank: by what fraction its own work takes longer than its peers', and how likely so many slow steps are by chance."""

    rank: int
    slower_fraction: float
    chance: float


def stragglers(compute_s: FloatArray, stage_of_rank: NDArray[np.int64], expected_s: FloatArray) -> list[Straggler]:
    """Return the slow ranks, slowest first.

    Args:
        compute_s: seconds of each rank's own work in each step [R, T].
        stage_of_rank: pipeline position [R]; expected_s: what the plan expects of each rank's work [R], in any unit.
    """
    num_ranks, num_steps = compute_s.shape
    if num_ranks < 2 or num_steps == 0 or np.any(compute_s <= 0):
        return []
    from scipy.special import bdtrc  # here: no launcher needs it, of the ranks the one that reports, at its end

    logs = np.log(compute_s / expected_s[:, None])
    slow = []
    for rank in range(num_ranks):
        others = np.arange(num_ranks) != rank
        peers = others & (stage_of_rank == stage_of_rank[rank])
        min_slower = SLOWER if peers.any() else SLOWER_THAN_EXPECTED
        difference = logs[rank] - np.median(logs[peers if peers.any() else others], axis=0)
        slower = math.expm1(float(np.median(difference)))
        chance = float(bdtrc(max(np.count_nonzero(difference > 0), 1) - 1, num_steps, 0.5))
        if slower > min_slower and chance * num_ranks <= FALSE_ALARMS:
            slow.append(Straggler(rank=rank, slower_fraction=slower, chance=chance))
    return sorted(slow, key=lambda entry: -entry["slower_fraction"])
