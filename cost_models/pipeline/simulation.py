"""Replay a pipeline schedule: who runs what when, how long it takes and how much memory it holds.

Sets
    s = 0..S-1   stages (model chunks) in the order of the model
    r = 0..R-1   ranks; RANK[s] holds stage s; every rank holds one or several
    i = 0..M-1   micro-batches
Data
    FORWARD[s], BACKWARD[s], WEIGHT[s]   seconds of the forward pass, of the gradient of the input and of the weights
    TRANSFER[s]                          seconds from stage s to s+1 and back; zero on one rank; it occupies neither rank
    HELD[s]                              bytes a forward pass keeps; B gives BACK_B[s] of them back, W gives BACK_W[s]
An order is, per rank, the sequence of its actions (stage, kind, micro-batch); kind F, B (input), W (weights) or BW (both at once).

Recurrences, start(a) being the latest of
    end of the action before a on its rank;
    F(s,i): end F(s-1,i) + TRANSFER[s-1];   B(s,i), BW(s,i): end of B or BW(s+1,i) + TRANSFER[s], on the last stage end F(s,i);
    W(s,i): end B(s,i).

Two lengths: `makespan_s` from the first start to the last end, and `span_s`, the longest time any one rank needs from its first
start to its last end. The second is the cost of a step when ranks enter the next step without waiting for each other.
Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241, section 2 (whose bubble rate is 1 - work / span).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...schema.errors import ConfigError

Kind = Literal["F", "B", "W", "BW"]
_NOT_RUN = -1.0


class Action(NamedTuple):
    """One kind of pass of one stage over one micro-batch."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


Order = tuple[tuple[Action, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Stages, where they are, what they cost; arrays over stages [S], transfers [S-1]. Seconds and bytes."""

    num_microbatches: int
    rank_of_stage: tuple[int, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    weight_s: tuple[float, ...]
    transfer_s: tuple[float, ...]
    held_bytes: tuple[float, ...]
    backward_freed_bytes: tuple[float, ...]
    weight_freed_bytes: tuple[float, ...]

    def __post_init__(self) -> None:
        lengths = {len(getattr(self, name)) for name in _PER_STAGE}
        if lengths != {self.num_stages} or len(self.transfer_s) != self.num_stages - 1:
            raise ConfigError(f"pipeline of {self.num_stages} stages has columns of {sorted(lengths)} values")
        if set(self.rank_of_stage) != set(range(self.num_ranks)):
            raise ConfigError(f"ranks {self.rank_of_stage} leave one of 0..{self.num_ranks - 1} without a stage")
        freed = zip(self.held_bytes, self.backward_freed_bytes, self.weight_freed_bytes, strict=True)
        if self.num_microbatches < 1 or any(abs(h - b - w) > 1e-6 * abs(h) for h, b, w in freed):
            raise ConfigError("a pipeline needs a micro-batch, and B and W must free what F holds, stage by stage")

    @property
    def num_stages(self) -> int:
        """S."""
        return len(self.rank_of_stage)

    @property
    def num_ranks(self) -> int:
        """R."""
        return max(self.rank_of_stage) + 1

    def hop_s(self, stage: int) -> float:
        """Return the seconds from `stage` to the next one; zero when one rank holds both."""
        return 0.0 if self.rank_of_stage[stage] == self.rank_of_stage[stage + 1] else self.transfer_s[stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of one rank, in the order of the model."""
        return tuple(s for s, holder in enumerate(self.rank_of_stage) if holder == rank)

    def work_s(self) -> NDArray[np.float64]:
        """Return the busy seconds of each rank in a step [R]."""
        per_stage = np.array(self.forward_s) + self.backward_s + self.weight_s
        weights = per_stage * self.num_microbatches
        return np.bincount(self.rank_of_stage, weights, self.num_ranks).astype(np.float64)


_PER_STAGE = ("forward_s", "backward_s", "weight_s", "held_bytes", "backward_freed_bytes", "weight_freed_bytes")


@dataclass(frozen=True)
class Timeline:
    """Seconds per rank and action in the order's sequence, and the peak bytes [R] of the stored activations."""

    start_s: tuple[NDArray[np.float64], ...]
    end_s: tuple[NDArray[np.float64], ...]
    peak_bytes: NDArray[np.float64]

    @property
    def makespan_s(self) -> float:
        """First start to last end over all ranks."""
        return float(max(end[-1] for end in self.end_s) - min(start[0] for start in self.start_s))

    @property
    def span_s(self) -> float:
        """The longest time of one rank from its first start to its last end."""
        return float(max(end[-1] - start[0] for start, end in zip(self.start_s, self.end_s, strict=True)))

    @property
    def busy_s(self) -> NDArray[np.float64]:
        """[R] seconds each rank computes."""
        return np.array([np.sum(end - start) for start, end in zip(self.start_s, self.end_s, strict=True)])

    @property
    def bubble_fraction(self) -> float:
        """1 - work of the busiest rank / span: the bubble rate of arXiv:2401.10241."""
        return 1.0 - float(np.max(self.busy_s)) / self.span_s


def simulate(pipeline: Pipeline, order: Order) -> Timeline:
    """Run an order as early as its dependencies allow: one pass over the actions.

    Raises:
        ConfigError: an action is missing, doubled or on the wrong rank; or the order never finishes, with what each rank waits for.
    """
    _check_actions(pipeline, order)
    run = _Replay(pipeline, order)
    run.to_the_end()
    return Timeline(
        tuple(np.array(times) for times in run.starts),
        tuple(np.array(times) for times in run.ends),
        peak_bytes(pipeline, order),
    )


def peak_bytes(pipeline: Pipeline, order: Order) -> NDArray[np.float64]:
    """Return the most bytes held at once [R]; they depend on the sequence of each rank only, not on time."""
    change = {
        "F": pipeline.held_bytes,
        "B": tuple(-freed for freed in pipeline.backward_freed_bytes),
        "W": tuple(-freed for freed in pipeline.weight_freed_bytes),
        "BW": tuple(-held for held in pipeline.held_bytes),
    }
    levels = (itertools.accumulate(change[kind][stage] for stage, kind, _ in actions) for actions in order)
    return np.array([max(level, default=0.0) for level in levels])


def _check_actions(pipeline: Pipeline, order: Order) -> None:
    """Require every F once, every backward once as B and W or as BW, each on the rank of its stage."""
    if len(order) != pipeline.num_ranks:
        raise ConfigError(f"the order has {len(order)} ranks, the pipeline {pipeline.num_ranks}")
    seen: set[tuple[int, str, int]] = set()
    for rank, actions in enumerate(order):
        for action in actions:
            stage, kind, micro_batch = action
            known = 0 <= stage < pipeline.num_stages and 0 <= micro_batch < pipeline.num_microbatches
            if not known or pipeline.rank_of_stage[stage] != rank:
                raise ConfigError(f"rank {rank} cannot run {action}: no such action on this rank")
            kinds = ("B", "W") if kind == "BW" else (kind,)
            if any((stage, each, micro_batch) in seen for each in kinds):
                raise ConfigError(f"rank {rank} runs {action} twice")
            seen.update((stage, each, micro_batch) for each in kinds)
    expected = 3 * pipeline.num_stages * pipeline.num_microbatches
    if len(seen) != expected:
        raise ConfigError(f"the order holds {len(seen)} of the {expected} passes F, B and W of the step")


class _Replay:
    """State of one replay: ends of F and B [S M], what each still blocks, and per rank its starts and ends so far."""

    def __init__(self, pipeline: Pipeline, order: Order) -> None:
        self.pipeline, self.order = pipeline, order
        size = pipeline.num_stages * pipeline.num_microbatches
        self.finished = {"F": [_NOT_RUN] * size, "B": [_NOT_RUN] * size}
        self.starts: list[list[float]] = [[] for _ in order]
        self.ends: list[list[float]] = [[] for _ in order]
        self.waiting: dict[tuple[str, int], int] = {}
        self.hops = [pipeline.hop_s(s) for s in range(pipeline.num_stages - 1)]
        full_s = [b + w for b, w in zip(pipeline.backward_s, pipeline.weight_s, strict=True)]
        self.seconds = {"F": pipeline.forward_s, "B": pipeline.backward_s, "W": pipeline.weight_s, "BW": full_s}

    def to_the_end(self) -> None:
        """Run each rank until it waits for another, which wakes it; whoever still waits at the end does so for ever."""
        runnable = list(range(len(self.order)))
        while runnable:
            self._advance(runnable.pop(), runnable)
        stuck = [rank for rank, actions in enumerate(self.order) if len(self.ends[rank]) < len(actions)]
        if stuck:
            raise ConfigError(
                f"the schedule deadlocks: {len(stuck)} of {len(self.order)} ranks wait for ever",
                details=tuple(self._what_it_waits_for(rank) for rank in stuck),
                help="move the awaited action before the one that waits, on the rank that holds it",
            )

    def _advance(self, rank: int, runnable: list[int]) -> None:
        """Run one rank until an input is missing; append the ranks this wakes to `runnable`."""
        m, last = self.pipeline.num_microbatches, self.pipeline.num_stages - 1
        seconds, finished, waiting, hops = self.seconds, self.finished, self.waiting, self.hops
        starts, ends = self.starts[rank], self.ends[rank]
        clock = ends[-1] if ends else 0.0
        for stage, kind, micro_batch in itertools.islice(self.order[rank], len(ends), None):
            cell = stage * m + micro_batch
            source, needed, delay = _needs(stage, kind, cell, m, last, hops)
            if source is not None:
                arrived = finished[source][needed]
                if arrived == _NOT_RUN:
                    waiting[source, needed] = rank
                    break
                if arrived + delay > clock:
                    clock = arrived + delay
            starts.append(clock)
            clock += seconds[kind][stage]
            ends.append(clock)
            if kind != "W":
                made = "F" if kind == "F" else "B"
                finished[made][cell] = clock
                if (made, cell) in waiting:
                    runnable.append(waiting.pop((made, cell)))

    def _what_it_waits_for(self, rank: int) -> str:
        action = self.order[rank][len(self.ends[rank])]
        m, last = self.pipeline.num_microbatches, self.pipeline.num_stages - 1
        source, needed, _ = _needs(action.stage, action.kind, action.stage * m + action.micro_batch, m, last, self.hops)
        stage, micro_batch = divmod(needed, m)
        return f"rank {rank} at {action} waits for {stage}{source}{micro_batch} of rank {self.pipeline.rank_of_stage[stage]}"


def _needs(
    stage: int, kind: str, cell: int, m: int, last: int, hops: Sequence[float]
) -> tuple[Literal["F", "B"] | None, int, float]:
    """Return what an action waits for: F or B of which (stage, micro-batch), and the transfer behind it."""
    if kind == "F":
        return ("F", cell - m, hops[stage - 1]) if stage else (None, cell, 0.0)
    if kind == "W":
        return "B", cell, 0.0
    return ("F", cell, 0.0) if stage == last else ("B", cell + m, hops[stage])
