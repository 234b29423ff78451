"""Replay any order of a pipeline: who runs what when, how long it takes and how much memory it holds.

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
from typing import Literal

import numpy as np

from ...schema import TrainingPlan
from ...schema.errors import ConfigError
from ...schema.units import FloatArray
from .orders import Order, Pipeline, order_of_schedule, planned_order

_NOT_RUN = -1.0


@dataclass(frozen=True)
class Timeline:
    """Seconds per rank and action in the order's sequence, and the peak bytes [R] of the stored activations."""

    start_s: tuple[FloatArray, ...]
    end_s: tuple[FloatArray, ...]
    peak_bytes: FloatArray

    @property
    def makespan_s(self) -> float:
        """First start to last end over all ranks."""
        return float(max(end[-1] for end in self.end_s) - min(start[0] for start in self.start_s))

    @property
    def span_s(self) -> float:
        """The longest time of one rank from its first start to its last end."""
        return float(max(end[-1] - start[0] for start, end in zip(self.start_s, self.end_s, strict=True)))

    @property
    def busy_s(self) -> FloatArray:
        """[R] seconds each rank computes."""
        return np.array([np.sum(end - start) for start, end in zip(self.start_s, self.end_s, strict=True)])

    @property
    def bubble_fraction(self) -> float:
        """1 - work of the busiest rank / span: the bubble rate of arXiv:2401.10241."""
        return 1.0 - float(np.max(self.busy_s)) / self.span_s


def simulate(pipeline: Pipeline, order: Order) -> Timeline:
    """Run an order as early as its dependencies allow: one pass over the actions.

    Each rank runs until it waits for another, which wakes it; whoever still waits at the end does so for ever.

    Raises:
        ConfigError: an action is missing, doubled or on the wrong rank; or the order never finishes, with what each rank waits for.
    """
    _check_actions(pipeline, order)
    m, last = pipeline.num_microbatches, pipeline.num_stages - 1
    hops = [pipeline.hop_s(s) for s in range(last)]
    full_s = [b + w for b, w in zip(pipeline.backward_s, pipeline.weight_s, strict=True)]
    seconds = {"F": pipeline.forward_s, "B": pipeline.backward_s, "W": pipeline.weight_s, "BW": full_s}
    finished = {kind: [_NOT_RUN] * (pipeline.num_stages * m) for kind in ("F", "B")}
    starts: list[list[float]] = [[] for _ in order]
    ends: list[list[float]] = [[] for _ in order]
    waiting, runnable = dict[tuple[str, int], int](), list(range(len(order)))
    while runnable:
        rank = runnable.pop()
        clock = ends[rank][-1] if ends[rank] else 0.0
        for stage, kind, micro_batch in itertools.islice(order[rank], len(ends[rank]), None):
            cell = stage * m + micro_batch
            source, needed, delay = _needs(stage, kind, cell, m, last, hops)
            if source is not None:
                arrived = finished[source][needed]
                if arrived == _NOT_RUN:
                    waiting[source, needed] = rank
                    break
                if arrived + delay > clock:
                    clock = arrived + delay
            starts[rank].append(clock)
            clock += seconds[kind][stage]
            ends[rank].append(clock)
            if kind != "W":
                made = "F" if kind == "F" else "B"
                finished[made][cell] = clock
                if (made, cell) in waiting:
                    runnable.append(waiting.pop((made, cell)))
    stuck = [rank for rank, actions in enumerate(order) if len(ends[rank]) < len(actions)]
    if not stuck:
        start_s, end_s = (tuple(np.array(row) for row in rows) for rows in (starts, ends))
        return Timeline(start_s, end_s, peak_bytes(pipeline, order))
    details = []
    for rank in stuck:
        action = order[rank][len(ends[rank])]
        source, needed, _ = _needs(action.stage, action.kind, action.stage * m + action.micro_batch, m, last, hops)
        stage, micro_batch = divmod(needed, m)
        details.append(
            f"rank {rank} at {action} waits for {stage}{source}{micro_batch} of rank {pipeline.rank_of_stage[stage]}"
        )
    raise ConfigError(
        f"the schedule deadlocks: {len(stuck)} of {len(order)} ranks wait for ever",
        details=tuple(details),
        help="move the awaited action before the one that waits, on the rank that holds it",
    )


def _needs(
    stage: int, kind: str, cell: int, m: int, last: int, hops: Sequence[float]
) -> tuple[Literal["F", "B"] | None, int, float]:
    """Return what an action waits for: F or B of which (stage, micro-batch), and the transfer behind it."""
    if kind == "F":
        return ("F", cell - m, hops[stage - 1]) if stage else (None, cell, 0.0)
    if kind == "W":
        return "B", cell, 0.0
    return ("F", cell, 0.0) if stage == last else ("B", cell + m, hops[stage])


def peak_bytes(pipeline: Pipeline, order: Order) -> FloatArray:
    """Return the most bytes held at once [R]; they depend on the sequence of each rank only, not on time."""
    change = pipeline.memory_changes
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
            passes = {(stage, each, micro_batch) for each in (("B", "W") if kind == "BW" else (kind,))}
            if passes & seen:
                raise ConfigError(f"rank {rank} runs {action} twice")
            seen |= passes
    expected = 3 * pipeline.num_stages * pipeline.num_microbatches
    if len(seen) != expected:
        raise ConfigError(f"the order holds {len(seen)} of the {expected} passes F, B and W of the step")


def pipeline_order(plan: TrainingPlan, num_microbatches: int | None = None) -> Order:
    """Return the passes of each rank of a plan's pipeline, in its order: that of the schedule, or the one the plan brings along.

    Args:
        num_microbatches: where they are not the plan's.

    Raises:
        ConfigError: the schedule is not defined for these numbers, or a synthesised order lacks passes, would wait for ever, or
            takes the micro-batches of the last stage out of turn (torch finds the losses by their position).
    """
    order, layout, count = planned_order(plan), plan.layout, num_microbatches or plan.num_microbatches
    if order is None:
        order = order_of_schedule(layout.schedule, layout.pp, count, layout.num_model_chunks)
    ones, zeros = (1.0,) * len(plan.stages), (0.0,) * len(plan.stages)
    of_a_second = Pipeline(
        num_microbatches=count, rank_of_stage=plan.rank_of_stage, forward_s=ones, backward_s=ones,
        weight_s=ones, transfer_s=zeros[1:], held_bytes=ones, backward_freed_bytes=zeros, weight_freed_bytes=ones,
    )  # fmt: skip
    simulate(of_a_second, order)  # raises where passes are missing or wait for ever
    last = len(plan.stages) - 1
    turns = [action.micro_batch for row in order for action in row if (action.stage, action.kind) == (last, "F")]
    if turns != sorted(turns):
        raise ConfigError(f"the plan's pipeline_order takes the micro-batches of the last stage in the order {turns}")
    return order
