"""Mixed layouts, whose blocks recompute differently: their costs under every option, and bounds within memory.

**Step.** Were the stages balanced, a layer of kind k under option o would add

    value[k,o] = f busy[k,o] + exposed[k,o] / pp

to a step, f being that of a step over the work of one micro-batch (`lower_bound_s`), and the largest of pp stages is at
least their mean. All stages together may save A bytes for each micro-batch: a device holds at least the fewest micro-batches in
flight, and memory is convex in what a stage holds. For every price of a byte,

    step >= sum_k n_k min_o (value[k,o] + price saved[k,o]) - price A

by Lagrangian duality; the best price is among those at which some kind changes its option.

**Slowest stage.** Early stages hold more micro-batches, so they recompute more or hold fewer blocks. Of the most frequent kind of
block stage s holds x[s,o] under option o, in seconds t and bytes of its device

    sum_o t[o] x[s,o] <= t                                         the slowest stage takes t
    sum_o (in_flight[s] saved[o] + static) x[s,o] <= headroom      while activations are present
    sum_o update x[s,o] <= headroom                                when the gradients are

and by linear duality no more blocks altogether than n_s(t), the least of u t + v headroom over the vertices of
u t[o] + v (in_flight[s] saved[o] + static) >= 1. All N blocks are held, none of them cut, so t is the least with

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

from ...schema.units import FloatArray, IntArray
from ..pipeline.replay import in_flight_of_stage
from . import memory
from .contents import StageContents, step_shape
from .table import CostTable, KnownCosts

LARGEST_RATIO = 4.0
"""Stages that take longer than this many times their bound without memory count as taking that long."""

NUM_HALVINGS = 12
"""Of that range."""


@dataclass(frozen=True)
class RecomputeCosts:
    """Mixed layouts [N]: ``minimum`` has the least of all options, ``by_option`` [O] each of RECOMPUTES for all blocks."""

    minimum: CostTable
    by_option: tuple[CostTable, ...]

    @classmethod
    def from_table(cls, costs: CostTable) -> RecomputeCosts:
        """Return the costs of mixed layouts only."""
        return cls(costs, costs.by_option)

    @cached_property
    def has_choice(self) -> NDArray[np.bool_]:
        """Which kinds [K] hold a block and so have something to recompute."""
        return np.array([(kind.inner_block is not None) for kind in self.minimum.kinds])

    def of_kinds(self, name: str, idx: int) -> FloatArray:
        """Return a LayerCost field of each kind under each option [K, O] of one layout."""
        values = [[getattr(cost, name)[idx] for cost in costs.by_kind] for costs in self.by_option]
        return np.array(values, dtype=np.float64).T

    def exposed_s(self, idx: int) -> FloatArray:
        """Return exposed communication over data of each kind under each option [K, O] of one layout, once per step."""
        values = [[seconds[idx] for seconds in costs.dp_exposed_by_kind] for costs in self.by_option]
        return np.array(values, dtype=np.float64).T

    @cached_property
    def min_exposed_by_kind(self) -> tuple[FloatArray, ...]:
        """The minimum of the options for each kind [K] of [N]."""
        by_option = [costs.dp_exposed_by_kind for costs in self.by_option]
        return tuple(np.min([seconds[k] for seconds in by_option], axis=0) for k in range(len(self.minimum.kinds)))

    def working_bytes(self, idx: int) -> FloatArray:
        """Return the working set of a stage [O] whose blocks use the option."""
        return np.array([costs.working_bytes[idx] for costs in self.by_option])

    def assigned(self, idx: int, options: Sequence[int]) -> CostTable:
        """Return one layout (row 0) whose layers [L] recompute as ``options`` says: a kind for each kind and option."""
        row, num_kinds = np.array([idx]), len(self.minimum.kinds)
        option_of_layer = np.asarray(options, dtype=np.int64)
        kind_of_layer = self.minimum.kind_of_layer
        known = KnownCosts(
            by_kind=tuple(cost.take(row) for costs in self.by_option for cost in costs.by_kind),
            dp_exposed_by_kind=tuple(s[row] for costs in self.by_option for s in costs.dp_exposed_by_kind),
        )
        return replace(
            self.minimum.select(row),
            kinds=self.minimum.kinds * len(self.by_option),
            kind_of_layer=option_of_layer * num_kinds + kind_of_layer,
            by_case=tuple(cost.take(costs.case_idx[row]) for costs in self.by_option for cost in costs.by_case),
            case_idx=np.zeros(1, dtype=np.int64),
            option_of_layer=np.where(self.has_choice[kind_of_layer], option_of_layer, -1),
            working_of_option=self.working_bytes(idx),
            known=known,
        )


def lower_bound_step_s(options: RecomputeCosts, per_second: FloatArray, saved_bytes: FloatArray) -> FloatArray:
    """Return a bound [N] on what the layers add to a step.

    Args:
        options: mixed layouts [N].
        per_second: seconds of a step for one of all layers' work on one micro-batch, divided evenly [N].
        saved_bytes: activations that all stages together may save for each micro-batch [N].
    """
    pp, counts = options.minimum.layouts.pp, options.minimum.counts.astype(np.float64)
    values, saved = [], []
    for costs in options.by_option:
        pairs, rows = zip(costs.by_case, costs.dp_exposed_by_kind, strict=True), costs.case_idx
        values.append([per_second * cost.busy_s[rows] + exposed / pp for cost, exposed in pairs])
        saved.append([cost.activation_bytes[rows] for cost in costs.by_case])
    value_s, bytes_ = np.array(values), np.array(saved)  # [O, K, N]
    best = _at_price(value_s, bytes_, counts, np.zeros(len(pp)), saved_bytes)
    headroom = np.maximum(saved_bytes, 0.0)
    for k in np.flatnonzero(options.has_choice):
        for one, other in itertools.combinations(range(len(value_s)), 2):
            difference = bytes_[one, k] - bytes_[other, k]
            price = (value_s[other, k] - value_s[one, k]) / np.where(difference == 0, np.inf, difference)
            best = np.maximum(best, _at_price(value_s, bytes_, counts, np.maximum(price, 0.0), headroom))
    return best


def _at_price(
    values: FloatArray, saved: FloatArray, counts: FloatArray, price: FloatArray, headroom: FloatArray
) -> FloatArray:
    cheapest = np.min(values + price * saved, axis=0)
    return np.asarray(np.tensordot(counts, cheapest, axes=1) - price * np.where(price > 0, headroom, 0.0))


def lower_bound_slowest_s(costs: CostTable, without_memory_s: FloatArray) -> FloatArray:
    """Return the seconds [N] of one micro-batch that the slowest stage of mixed layouts takes at least.

    Args:
        costs: table of mixed layouts.
        without_memory_s: a bound that knows nothing of memory [N]; the result is not below it.
    """
    result = without_memory_s.copy()
    for pp in np.unique(costs.layouts.pp):
        if pp > 1:
            rows = np.flatnonzero(costs.layouts.pp == pp)
            result[rows] = _of_one_pp(costs.select(rows), int(pp), without_memory_s[rows])
    return result


def _of_one_pp(costs: CostTable, pp: int, without_memory_s: FloatArray) -> FloatArray:
    blocks = [k for k, kind in enumerate(costs.kinds) if kind.is_block]
    main = max(blocks, key=lambda k: costs.counts[k])
    needed = int(costs.counts[main])
    others_s = costs.total("busy_s") - needed * costs.by_case[main].busy_s[costs.case_idx]
    lines = _lines(costs, main, pp)

    def too_short(rows: IntArray, t: FloatArray) -> NDArray[np.bool_]:
        slope, intercept = (values[:, rows] for values in lines)  # [V, n, S]
        num_blocks = slope * t[:, None] + intercept
        line = np.argmin(num_blocks, axis=0)[None]
        num_blocks, slope = (np.take_along_axis(values, line, axis=0)[0] for values in (num_blocks, slope))
        uncut = np.floor(num_blocks * (1 + 1e-12) + 1e-9).sum(axis=1)
        with_others = num_blocks.sum(axis=1) - others_s[rows] * slope.min(axis=1)
        return np.asarray((uncut < needed) | (with_others < needed * (1 - 1e-12)))

    all_rows = np.arange(len(without_memory_s))
    rows = all_rows[too_short(all_rows, without_memory_s)]
    low, high = without_memory_s[rows], LARGEST_RATIO * without_memory_s[rows]
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        short = too_short(rows, middle)
        low, high = np.where(short, middle, low), np.where(short, high, middle)
    result = without_memory_s.copy()
    result[rows] = low * (1 - 1e-12)
    return result


def _lines(costs: CostTable, kind: int, pp: int) -> tuple[FloatArray, FloatArray]:
    """Return slope and intercept [V, N, S] of lines whose minimum is how many blocks of a kind a stage may hold in t seconds."""
    b, options = costs.layouts, costs.by_option
    seconds = np.array([option.by_case[kind].busy_s[option.case_idx] for option in options])  # [O, N]
    saved = np.array([option.by_case[kind].activation_bytes[option.case_idx] for option in options])
    none, one = (_headroom_bytes(costs, kind, count) for count in (0.0, 1.0))
    headroom, static = np.maximum(none[0], 0.0), none[0] - one[0]
    flight = in_flight_of_stage(b.schedule[:, None], b.num_microbatches[:, None], pp, np.arange(pp))  # [N, S]
    taken = flight * saved[:, :, None] + static[:, None]  # [O, N, S]
    times = np.broadcast_to(seconds[:, :, None], taken.shape)
    zero = np.zeros(taken.shape[1:])
    slopes, intercepts = [1 / times.min(axis=0)], [zero]
    with np.errstate(divide="ignore", invalid="ignore"):
        slopes += [zero, zero]
        intercepts += [
            headroom[:, None] / np.maximum(taken.min(axis=0), 1e-9),
            zero + (np.maximum(none[1], 0.0) / np.maximum(none[1] - one[1], 1e-9))[:, None],
        ]
        for i, j in itertools.combinations(range(len(options)), 2):
            cross = times[i] * taken[j] - times[j] * taken[i]
            u, v = (taken[j] - taken[i]) / cross, (times[i] - times[j]) / cross
            is_vertex = np.isfinite(u) & np.isfinite(v) & (u >= 0) & (v >= 0)
            is_vertex &= np.all(u * times + v * taken >= 1 - 1e-9, axis=0)
            slopes.append(np.where(is_vertex, u, 0.0))
            intercepts.append(np.where(is_vertex, v * headroom[:, None], np.inf))
    return np.stack(slopes), np.stack(intercepts) * (1 + 1e-9)


def _headroom_bytes(costs: CostTable, kind: int, count: float) -> tuple[FloatArray, FloatArray]:
    """Return the bytes [N] that remain at most on a stage with ``count`` blocks of a kind: for activations, and with its gradients.

    Both fall at least as fast from any number of blocks to the next as from none to one: the peak is a maximum of such lines.
    """
    block, rows, cap_bytes = costs.by_case[kind], costs.case_idx, costs.cluster.memory_budget_bytes
    none = np.zeros(len(rows))
    contents = StageContents(
        params=count * block.num_params[rows],
        trained=count * block.num_trained[rows],
        expert_params=count * block.expert_params[rows],
        block_trained=costs.block_trained,
        frozen_bytes=count * block.frozen_bytes[rows],
        root_params=none,
        block_params=costs.block_params,
        activation_bytes=none,
        working_bytes=costs.working_bytes,
        logits=none,
        boundary_bytes=costs.boundary_bytes,
    )
    shape = step_shape(costs.layouts, np.ones(len(rows)), num_neighbours=np.ones(len(rows), dtype=np.int64))
    headroom = memory.activation_headroom_bytes(contents, shape, costs.scenario, cap_bytes=cap_bytes)
    required = memory.required_by_terms(memory.stage_memory(contents, shape, costs.scenario), costs.scenario)
    return np.asarray(headroom), np.asarray(cap_bytes - required)
