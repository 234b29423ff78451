"""OptionCosts: mixed layouts under every recompute choice, and one of them with a choice for each of its layers.

Least seconds of mixed layouts, as arrays: what recompute costs at least to bring balanced stages within memory.

Were the stages balanced, a layer of kind k under option o would add

    value[k,o] = f busy[k,o] + exposed[k,o] / pp

to a step, f being that of a step over the work of one micro-batch (pipeline.lower_bound_s), and the largest of pp stages is at
least their mean. All stages together may keep A bytes for each micro-batch: a device holds at least the fewest micro-batches in
flight, and memory is convex in what a stage holds. For every price of a byte,

    step >= sum_k n_k min_o (value[k,o] + price kept[k,o]) - price A

by Lagrangian duality; the best price is among those at which some kind changes its option.

What the slowest stage of a mixed layout takes at least for one micro-batch, given what each stage has memory for: as arrays.

Early stages hold more micro-batches, so they recompute more or hold fewer blocks. Of the most frequent kind of block stage s holds
x[s,o] under option o, in seconds t and bytes of its device

    sum_o t[o] x[s,o] <= t                                     the slowest stage takes t
    sum_o (in_flight[s] kept[o] + static) x[s,o] <= room       while activations are there
    sum_o update x[s,o] <= room                                when the gradients are

and by linear duality no more blocks altogether than n_s(t), the least of u t + v room over the vertices of
u t[o] + v (in_flight[s] kept[o] + static) >= 1. All N blocks are held, whole ones, so t is the least with

    sum_s floor(n_s(t)) >= N      and      sum_s n_s(t) - W min_s n_s'(t) >= N

where W are the seconds of all other layers, which take their time on some stage: n_s is concave.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ...schema.arrays import FloatArray, IntArray
from ...schema.layers import Block, MTPHead
from ..pipeline import replay
from . import memory
from .contents import StageContents, step_shape
from .table import CostTable


@dataclass(frozen=True)
class RecomputeCosts:
    """Mixed layouts [N]: ``least`` has the least of the options in everything, ``under`` [O] each of RECOMPUTES for all blocks."""

    least: CostTable
    under: tuple[CostTable, ...]

    @classmethod
    def of(cls, costs: CostTable) -> RecomputeCosts:
        """From costs of mixed layouts only."""
        return cls(costs, costs.by_option)

    @cached_property
    def has_choice(self) -> NDArray[np.bool_]:
        """Which kinds [K] hold a block and so have something to recompute."""
        return np.array([isinstance(kind, Block | MTPHead) for kind in self.least.kinds])

    def of_kinds(self, name: str, idx: int) -> FloatArray:
        """A LayerCost field of each kind under each option [K, O] of one layout."""
        values = [[getattr(cost, name)[idx] for cost in costs.by_kind] for costs in self.under]
        return np.array(values, dtype=np.float64).T

    def exposed_s(self, idx: int) -> FloatArray:
        """Exposed communication over data of each kind under each option [K, O] of one layout, once per step."""
        values = [[seconds[idx] for seconds in costs.dp_exposed_by_kind] for costs in self.under]
        return np.array(values, dtype=np.float64).T

    @cached_property
    def least_exposed_by_kind(self) -> tuple[FloatArray, ...]:
        """The least of the options for each kind [K] of [N]."""
        by_option = [costs.dp_exposed_by_kind for costs in self.under]
        return tuple(np.min([seconds[k] for seconds in by_option], axis=0) for k in range(len(self.least.kinds)))

    def working_bytes(self, idx: int) -> FloatArray:
        """Working set of a stage [O] whose blocks use the option."""
        return np.array([costs.working_bytes[idx] for costs in self.under])

    def assigned(self, idx: int, options: Sequence[int]) -> CostTable:
        """One layout (row 0) whose layers [L] recompute as ``options`` says: a kind of its own for each kind and option."""
        row, num_kinds = np.array([idx]), len(self.least.kinds)
        chosen = np.asarray(options, dtype=np.int64)
        of_layer = self.least.kind_of_layer
        costs = replace(
            self.least.select(row),
            kinds=self.least.kinds * len(self.under),
            kind_of_layer=chosen * num_kinds + of_layer,
            inside=tuple(cost.at(costs.like[row]) for costs in self.under for cost in costs.inside),
            like=np.zeros(1, dtype=np.int64),
            option_of_layer=np.where(self.has_choice[of_layer], chosen, -1),
            working_of_option=self.working_bytes(idx),
        )
        # What was worked out for each option is that of the kinds.
        vars(costs)["by_kind"] = tuple(cost.at(row) for costs in self.under for cost in costs.by_kind)
        exposed = tuple(seconds[row] for costs in self.under for seconds in costs.dp_exposed_by_kind)
        vars(costs)["dp_exposed_by_kind"] = exposed
        return costs


def lower_bound_step_s(options: RecomputeCosts, per_second: FloatArray, kept_bytes: FloatArray) -> FloatArray:
    """Admissible bound [N] on what the layers add to a step.

    Args:
        options: mixed layouts [N].
        per_second: seconds of a step for one of all layers' work on one micro-batch, spread evenly [N].
        kept_bytes: activations that all stages together may keep for each micro-batch [N].
    """
    b, counts = options.least.batch, options.least.counts.astype(np.float64)
    value, kept = [], []
    for costs in options.under:
        exposed = costs.dp_exposed_by_kind
        value.append(
            [per_second * cost.busy_s[costs.like] + e / b.pp for cost, e in zip(costs.inside, exposed, strict=True)]
        )
        kept.append([cost.activation_bytes[costs.like] for cost in costs.inside])
    values, bytes_ = np.array(value), np.array(kept)  # [O, K, N]
    with_choice = np.flatnonzero(options.has_choice)
    best = _at_price(values, bytes_, counts, np.zeros(len(b)), kept_bytes)
    room = np.maximum(kept_bytes, 0.0)
    for k in with_choice:
        for some, other in itertools.combinations(range(len(values)), 2):
            saved = bytes_[some, k] - bytes_[other, k]
            price = np.maximum((values[other, k] - values[some, k]) / np.where(saved == 0, np.inf, saved), 0.0)
            best = np.maximum(best, _at_price(values, bytes_, counts, price, room))
    return best


def _at_price(
    values: FloatArray, kept: FloatArray, counts: FloatArray, price: FloatArray, room: FloatArray
) -> FloatArray:
    cheapest = np.min(values + price * kept, axis=0)
    return np.asarray(np.tensordot(counts, cheapest, axes=1) - price * np.where(price > 0, room, 0.0))


LARGEST_RATIO = 4.0
"""Stages that take longer than this many times what they take at least anyway count as taking that long."""


NUM_HALVINGS = 12
"""Halvings of that range."""


def lower_bound_slowest_s(costs: CostTable, least_s: FloatArray) -> FloatArray:
    """Seconds [N] of one micro-batch that the slowest stage of mixed layouts takes at least, not below ``least_s``."""
    result = least_s.copy()
    for pp in np.unique(costs.batch.pp):
        if pp > 1:
            rows = np.flatnonzero(costs.batch.pp == pp)
            result[rows] = _of_one_pp(costs.select(rows), int(pp), least_s[rows])
    return result


def _of_one_pp(costs: CostTable, pp: int, least_s: FloatArray) -> FloatArray:
    blocks = [k for k, kind in enumerate(costs.kinds) if isinstance(kind, Block)]
    most = max(blocks, key=lambda k: costs.counts[k])
    needed = int(costs.counts[most])
    others_s = costs.total("busy_s") - needed * costs.inside[most].busy_s[costs.like]
    lines = _lines(costs, most, pp)

    def too_short(rows: IntArray, t: FloatArray) -> NDArray[np.bool_]:
        slope, intercept = (values[:, rows] for values in lines)  # [V, n, S]
        held = slope * t[:, None] + intercept
        at = np.argmin(held, axis=0)[None]
        held, slope = (np.take_along_axis(values, at, axis=0)[0] for values in (held, slope))
        whole = np.floor(held * (1 + 1e-12) + 1e-9).sum(axis=1)
        beside = held.sum(axis=1) - others_s[rows] * slope.min(axis=1)
        return np.asarray((whole < needed) | (beside < needed * (1 - 1e-12)))

    everything = np.arange(len(least_s))
    rows = everything[too_short(everything, least_s)]
    low, high = least_s[rows], LARGEST_RATIO * least_s[rows]
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        short = too_short(rows, middle)
        low, high = np.where(short, middle, low), np.where(short, high, middle)
    result = least_s.copy()
    result[rows] = low * (1 - 1e-12)
    return result


def _lines(costs: CostTable, kind: int, pp: int) -> tuple[FloatArray, FloatArray]:
    """Slope and intercept [V, N, S] of the lines whose least is how many blocks of ``kind`` a stage may hold in t seconds."""
    b, under = costs.batch, RecomputeCosts.of(costs).under
    seconds = np.array([one.inside[kind].busy_s[one.like] for one in under])  # [O, N]
    kept = np.array([one.inside[kind].activation_bytes[one.like] for one in under])
    none, one = (_headroom_bytes(costs, kind, count) for count in (0.0, 1.0))
    room, static = np.maximum(none[0], 0.0), none[0] - one[0]
    flight = replay.in_flight_of_stage(b.schedule[:, None], b.num_microbatches[:, None], pp, np.arange(pp))  # [N, S]
    taken = flight * kept[:, :, None] + static[:, None]  # [O, N, S]
    times = np.broadcast_to(seconds[:, :, None], taken.shape)
    zero = np.zeros(taken.shape[1:])
    slopes, intercepts = [1 / times.min(axis=0)], [zero]
    with np.errstate(divide="ignore", invalid="ignore"):
        slopes += [zero, zero]
        intercepts += [
            room[:, None] / np.maximum(taken.min(axis=0), 1e-9),
            zero + (np.maximum(none[1], 0.0) / np.maximum(none[1] - one[1], 1e-9))[:, None],
        ]
        for some, other in itertools.combinations(range(len(under)), 2):
            cross = times[some] * taken[other] - times[other] * taken[some]
            u, v = (taken[other] - taken[some]) / cross, (times[some] - times[other]) / cross
            is_vertex = np.isfinite(u) & np.isfinite(v) & (u >= 0) & (v >= 0)
            is_vertex &= np.all(u * times + v * taken >= 1 - 1e-9, axis=0)
            slopes.append(np.where(is_vertex, u, 0.0))
            intercepts.append(np.where(is_vertex, v * room[:, None], np.inf))
    return np.stack(slopes), np.stack(intercepts) * (1 + 1e-9)


def _headroom_bytes(costs: CostTable, kind: int, count: float) -> tuple[FloatArray, FloatArray]:
    """Bytes [N] that a stage with so many blocks of a kind has left at most: for activations, and when its gradients are there.

    Both fall at least as fast from any number of blocks to the next as from none to one: the peak is a maximum of such lines.
    """
    block, like, cap_bytes = costs.inside[kind], costs.like, costs.cluster.memory_budget_bytes
    contents = StageContents(
        params=count * block.num_params[like],
        trained=count * block.num_trained[like],
        expert_params=count * block.expert_params[like],
        block_trained=costs.block_trained,
        frozen_bytes=count * block.frozen_bytes[like],
        root_params=np.zeros(len(like)),
        block_params=costs.block_params,
        activation_bytes=np.zeros(len(like)),
        working_bytes=costs.working_bytes,
        logits=np.zeros(len(like)),
        boundary_bytes=costs.boundary_bytes,
    )
    ones = np.ones(len(like))
    shape = step_shape(costs.batch, ones, num_neighbours=np.ones(len(like), dtype=np.int64))
    workload, cluster = costs.workload, costs.cluster
    room = memory.activation_headroom_bytes(contents, shape, workload, cluster, cap_bytes=cap_bytes)
    parts = memory.stage_memory(contents, shape, workload, cluster)
    required = memory.required_bytes(memory.total_bytes(parts), parts["parameters"], workload, cluster)
    return np.asarray(room), np.asarray(cap_bytes - required)
