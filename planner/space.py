"""The search space: every combination of degrees and choices that the rules allow, as arrays, by groups of degrees.

What an engine executes is in schema/layout_rules.py. Of that, some combinations are never enumerated unless they are asked for:

    tp             beyond the domain of the fastest link: its collectives are on the critical path of every layer, and slower there
    1f1b           gpipe takes as long and holds no less; our runtime needs it for batches that do not fill the pipeline
    micro-batches  above MAX_MICRO_BATCH_SIZE sequences
    dp_shard       for other engines than ours: 1, what lies in one domain of each link level, or all. Between two of these the
                   collectives cross the same links, and only memory changes
    states         for engines that shard gradients and optimizer states over more ranks than parameters: over the same steps of
                   link levels, both alike
    chunks         as many as divide a stage's blocks, ceil(blocks / pp), into chunks of equal size; for our runtime two besides
    offloading, partial recompute
    cp_ulysses     ways to split cp that cannot be better than another one (enumeration.py)
    switches       tp without sequence parallelism, chunks of products and graphs, where no stage has 1 % less work by them; fp32
                   gradients of sharded states, which no step is faster by (enumeration.py)

The first two and cp_ulysses lose nothing; the others are restrictions of the space, and a certificate speaks of the space that
remains.

Most layouts of a large space differ in what no degree depends on: how states are sharded over the same ranks, in which order passes
run, what is recomputed. Such a group has one bound (search.py), and its layouts are made only where that is below the incumbent. A
layout's position in the space is its group's and its position within the group, whether it was made or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..cost_models.stage import bounds, memory
from ..cost_models.stage.capacity import time_bounds_of_pools
from ..cost_models.stage.table import CostTable
from ..schema import ConfigError
from ..schema.layout_rules import ENGINE_RULES, VERSION_RULES, Rule
from ..schema.layout_table import MIXED, LayoutTable, distinct_rows
from ..schema.schedules import GIVEN
from ..schema.units import BoolArray, FloatArray, IntArray
from .columns import Columns, select
from .enumeration import Enumeration
from .rank_map import best_case
from .request import PlanRequest

MIN_GROWTH = 1 << 14
"""Layouts that come into the pool together, at least."""

GROWTH_FRACTION = 0.5
"""The same as a part of those that are in: what is copied then stays proportional to what is in."""

NARROW_FROM, MANY_EXPERTS = 256, 32
"""Devices from which on the space of a mixture of experts takes longer to make than an early answer may; experts that fill ep."""

BLOCK = 1 << 13
"""Layouts bounded together: arrays of this size stay in a core's cache."""


@dataclass(frozen=True)
class DegreeGroups:
    """Groups [G] of layouts: ``options`` [O] at ``first`` .. ``first + count - 1`` are those of a group.

    Attributes:
        degrees: columns [G] that all layouts of a group share.
        options: columns [O] of the others; groups with the same degrees but those of experts and exchanges share them.
        first, count: which options each group has [G], at least one.
        constants: columns of a batch that are the same in the entire space.
    """

    degrees: Columns
    options: Columns
    first: IntArray
    count: IntArray
    constants: Mapping[str, Any]

    def __len__(self) -> int:
        return len(self.first)

    @cached_property
    def start(self) -> IntArray:
        """Position in the space of the first layout of each group [G]."""
        return _starts(self.count)

    def members(self, groups: IntArray) -> tuple[LayoutTable, IntArray, IntArray]:
        """Return all layouts of some groups, the group of each and its position in the space [M]."""
        count = self.count[groups]
        of_group = np.repeat(groups, count)
        within = np.arange(len(of_group)) - np.repeat(_starts(count), count)
        columns = {name: column[of_group] for name, column in self.degrees.items()}
        columns |= {name: column[self.first[of_group] + within] for name, column in self.options.items()}
        return self._table(columns), of_group, self.start[of_group] + within

    def relaxed(self) -> LayoutTable:
        """Return a layout of each group [G], nothing sharded, whose bound holds under any order of passes and every recompute."""
        ones, recomputes = np.ones(len(self), dtype=np.int64), np.unique(self.options["recompute"])
        chosen = {
            "dp_replicate": self.options["dp_replicate"][self.first] * self.options["dp_shard"][self.first],
            **dict.fromkeys(("dp_shard", "gradient_shard", "optimizer_shard"), ones),
            "zero_stage": 0 * ones,
            "schedule": GIVEN.idx * ones,
            "gradients": np.max(self.options["gradients"]) * ones,  # of both, those of the compute dtype move less
            "recompute": (recomputes[0] if len(recomputes) == 1 else MIXED) * ones,
        }
        return self._table(self.degrees | chosen)

    def _table(self, columns: Columns) -> LayoutTable:
        size = len(columns["tp"])
        arrays: dict[str, Any] = columns | {name: np.full(size, value) for name, value in self.constants.items()}
        return LayoutTable(**arrays)


def _starts(count: IntArray) -> IntArray:
    return np.asarray(np.cumsum(count) - count)


_KEY = (
    "tp", "cp", "pp", "num_model_chunks", "micro_batch_size", "dp", "num_microbatches", "tp_halves", "cuda_graphs", "ep_overlap",
)  # fmt: skip
"""Degrees that say which options there are; those of experts, of exchanges and of the other switches do not."""


@dataclass(frozen=True)
class Space:
    """Layouts that satisfy every rule, as a table or by groups.

    Attributes:
        excluded: how many combinations each rule excluded.
        without: positions of layouts that are left out, increasing.
    """

    given: LayoutTable | None
    excluded: dict[str, int]
    groups: DegreeGroups | None = None
    without: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    @property
    def batch(self) -> LayoutTable:
        """All layouts."""
        return self._members[0]

    @property
    def positions(self) -> IntArray:
        """Where each of them stands among those that were enumerated."""
        return self._members[1]

    @cached_property
    def _members(self) -> tuple[LayoutTable, IntArray]:
        table, positions = self.given, np.arange(0 if self.given is None else len(self.given))
        if table is None:
            assert self.groups is not None
            table, _, positions = self.groups.members(np.arange(len(self.groups)))
        if not len(self.without):
            return table, positions
        kept = np.flatnonzero(self.keeps(positions))
        return table.select(kept), positions[kept]

    def keeps(self, positions: IntArray) -> NDArray[np.bool_]:
        """Return which layouts at these positions are not left out."""
        return ~np.isin(positions, self.without)

    def __len__(self) -> int:
        return len(self.batch) if self.groups is None else int(self.groups.count.sum()) - len(self.without)


def build_narrow_space(request: PlanRequest) -> Space | None:
    """Return a part of a large space that is made at once and has good layouts; None of a small one.

    Without larger micro-batches under a pipeline or tp, the split of many experts over tp, and costs of layers that say which
    switches gain.
    """
    num_experts = max((layer.experts.num_experts for layer in request.model.iter_layers() if layer.experts), default=0)
    if request.cluster.num_devices < NARROW_FROM or not num_experts:
        return None
    fixed = ({"etp": 1} if num_experts >= MANY_EXPERTS else {}) | dict(request.fixed)
    try:
        return build_space(replace(request, fixed=fixed), is_narrow=True)
    except ConfigError:  # none of the layouts is within it
        return None


def build_space(request: PlanRequest, *, is_narrow: bool = False) -> Space:
    """Enumerate, then select what satisfies the fixed fields and every rule of schema/layout_rules.py for the workload's engine.

    Rules are asked as soon as the fields that they look at are chosen, and count combinations of what is chosen by then. Switches
    that no layer gains by are left out unless it ``is_narrow`` (`build_narrow_space`).

    Raises:
        ConfigError: nothing is left; the message names the rules that excluded the most.
        SolverLimitError: the request's deadline came first.
    """
    if request.fixed.get("offload") == "scheduled":
        raise ConfigError("this command does not search offload schedules", help="plan --offload auto does")
    if not request.workload.has_backward:  # nothing is kept that could be recomputed
        request = replace(request, fixed={"recompute": "none", **request.fixed})
    choices = Enumeration(request, is_narrow)
    rules = ENGINE_RULES + (request.workload.engine_facts.rules or ()) + (VERSION_RULES if request.runnable else ())
    sieve = _Sieve(choices, rules)
    groups = _grouped(choices, sieve, costed=not is_narrow)
    if groups is None:
        raise _nothing_left(request, _reasons(choices, sieve.rules))
    return Space(None, sieve.excluded, groups)


class _Sieve:
    """Select the rows that no rule excludes, as far as their columns decide it; ``excluded`` counts the others by rule."""

    def __init__(self, choices: Enumeration, rules: Sequence[Rule]) -> None:
        self.choices, self.rules = choices, rules
        self.excluded = {rule.name: 0 for rule in rules}
        self.undecided = set(self.excluded)

    def __call__(self, c: Columns) -> Columns:
        table, remaining = self.choices.table(c), np.ones(len(c["tp"]), dtype=bool)
        for rule in self.rules:
            self.choices.request.deadline.require(f"checking {len(remaining)} layouts against the rules")
            if not rule.is_decided(table.known):
                continue
            holds = self.choices.holds(table, rule)
            self.undecided.discard(rule.name)
            self.excluded[rule.name] += int(np.count_nonzero(remaining & ~holds))
            remaining &= holds
        return select(c, remaining)


def _grouped(choices: Enumeration, sieve: _Sieve, *, costed: bool) -> DegreeGroups | None:
    """Return the layouts that remain, by their degrees; None if there are none."""
    degrees = choices.degrees(sieve, costed=costed)
    if not len(degrees["tp"]):
        return None
    rows, case_idx = distinct_rows([degrees[name] for name in _KEY])
    options = sieve(choices.options({name: degrees[name][rows] for name in _KEY} | {"key": np.arange(len(rows))}))
    assert not sieve.undecided, f"rules that need degrees of experts and options at once: {sieve.undecided}"
    if not len(options["key"]):
        return None
    options = choices.recomputes(options)
    key = options.pop("key")
    count, order = np.bincount(key, minlength=len(rows)), np.argsort(key, kind="stable")
    has_options = np.flatnonzero(count[case_idx])
    case_idx = case_idx[has_options]
    return DegreeGroups(
        degrees={name: column[has_options] for name, column in degrees.items() if name != "dp"},
        options={name: column[order] for name, column in options.items() if name not in _KEY},
        first=_starts(count)[case_idx],
        count=count[case_idx],
        constants={name: column[0] for name, column in choices.constants(1).items()},
    )


def _reasons(choices: Enumeration, rules: Sequence[Rule]) -> list[tuple[int, str]]:
    """Return the rules that exclude everything by themselves, or else those that exclude something, with how many combinations."""
    table = choices.table(choices.options(choices.degrees(lambda c: c, costed=False)))
    problem, remaining = choices.problem, np.ones(len(table), dtype=bool)
    reasons, decisive = [], []
    for rule in rules:
        holds = choices.holds(table, rule)
        broken = np.flatnonzero(remaining & ~holds)
        if len(broken):
            reasons.append((len(broken), rule.explain(table.row(broken[0]), problem)))
        if len(remaining) and not holds.any():  # by itself it excludes everything
            decisive.append((len(remaining), rule.explain(table.row(0), problem)))
        remaining &= holds
    return decisive or reasons


def _nothing_left(request: PlanRequest, reasons: list[tuple[int, str]]) -> ConfigError:
    size, num_devices = request.workload.global_batch_size, request.cluster.num_devices
    fixed = ", ".join(f"{name}={value}" for name, value in request.fixed.items())
    if not reasons:
        of_layout = "zero_stage above 0 needs dp_shard > 1 and dp_shard > 1 needs it; sequence_parallel needs tp > 1"
        reasons = [(1, f"{of_layout}   [layout]")]
    advice = f"use a global batch size of at least {num_devices}, one that divides over them or a divisor of them"
    if request.workload.precision != "fp32" and any("[shards_of_code]" in reason for _, reason in reasons):
        advice = "add --precision fp32, in which whole replicas run"
    return ConfigError(
        f"no layout of {request.model.name} on {num_devices} devices with global batch size {size}"
        + (f" and {fixed}" if fixed else "")
        + " can be executed",
        details=tuple(reason for _, reason in sorted(reasons, reverse=True)[:4]),
        help="loosen --fix" if fixed else advice,
    )


class Pool:
    """Layouts with their ``costs``, what their bounds are worked out from (``bounding``) and their ``positions`` in the space [N].

    ``bound_s`` is what no layout outside is faster than, infinite once all are in.
    """

    def __init__(self, request: PlanRequest, space: Space) -> None:
        """Bound the groups and take in the most promising ones, or every layout where there are no groups."""
        by_groups = space.groups is not None and not request.cluster.parts
        table = space.groups.relaxed() if space.groups is not None and by_groups else space.batch

        def checkpoint() -> None:
            request.deadline.require(f"costing {len(space)} layouts")

        costs = CostTable.from_layouts(request.model, request.workload, request.cluster, table, checkpoint=checkpoint)
        self._space, self.bound_s = space, np.inf
        self.costs, self.bounding = costs, bounding_costs(costs)
        if not by_groups:
            self.positions: IntArray = space.positions
            return
        self._of_groups = self.costs, self.bounding
        bound_s = bounds.quick_time_bounds(self.bounding)
        self._order = np.argsort(bound_s, kind="stable")
        self._waiting_s = bound_s[self._order]
        self._next = 0
        self.positions = np.zeros(0, dtype=np.int64)
        self.costs, self.bounding = (costs.select(self.positions) for costs in self._of_groups)
        self.grow()

    def __len__(self) -> int:
        return len(self.positions)

    def grow(self) -> None:
        """Take in the next groups."""
        groups = self._space.groups
        assert groups is not None
        count = max(MIN_GROWTH, int(GROWTH_FRACTION * len(self)))
        sizes = np.cumsum(groups.count[self._order[self._next :]])
        entering = self._order[self._next : self._next + int(np.searchsorted(sizes, count)) + 1]
        self._next += len(entering)
        self.bound_s = float(self._waiting_s[self._next]) if self._next < len(self._order) else np.inf
        batch, of_group, positions = groups.members(entering)
        selected = np.flatnonzero(self._space.keeps(positions))
        batch, of_group = batch.select(selected), of_group[selected]
        self.positions = np.concatenate([self.positions, positions[selected]])
        costs, bounding = self._of_groups
        self.costs = _append(self.costs, costs, batch, of_group)
        self.bounding = self.costs if costs is bounding else _append(self.bounding, bounding, batch, of_group)


def bounding_costs(costs: CostTable) -> CostTable:
    """Return what bounds are worked out from: the costs, or where links were measured those of the best placement there may be."""
    if costs.cluster.bandwidth_matrix is None:
        return costs
    fastest = best_case(costs.cluster)
    return costs.evaluate(costs.layouts, fastest)


def _append(costs: CostTable, of_groups: CostTable, batch: LayoutTable, of_group: IntArray) -> CostTable:
    """Return the costs with further layouts, whose layers cost what those of their group do under their own recompute."""
    case_idx = of_groups.case_idx[of_group]
    if of_groups.layouts.is_mixed:
        case_idx = case_idx + (batch.recompute - MIXED) * of_groups.cases_by_option
    joined = LayoutTable.concatenate([costs.layouts, batch])
    return costs.with_layouts(joined, np.concatenate([costs.case_idx, case_idx]))


class Frontier:
    """Layouts that may fit, by increasing bound on their time.

    Attributes:
        rows: of the pool, those that are bounded.
        quick_s, budget_bytes: of each layout [N] its quick bound, and what its bound on memory must be within.
        bound_bytes: of each layout [N], infinite where not evaluated.
    """

    def __init__(self, pool: Pool) -> None:
        """Order the pool by its quick bounds."""
        self._pool = pool
        self.quick_s, self._bound_s, self.bound_bytes, self.budget_bytes = np.zeros((4, 0))
        self.rows = self._order = np.zeros(0, dtype=np.int64)
        self._next, self._raised_s = 0, dict[int, float]()
        self._order_new()

    def _order_new(self) -> None:
        """Put what came into the pool since the last time among what waits."""
        old, new = len(self.quick_s), len(self._pool)
        costs = self._pool.bounding if old == 0 else self._pool.bounding.select(np.arange(old, new))
        self.quick_s = np.concatenate([self.quick_s, bounds.quick_time_bounds(costs)])
        self.bound_bytes = np.concatenate([self.bound_bytes, np.full(new - old, np.inf)])
        self.budget_bytes = np.concatenate([self.budget_bytes, bounds.budget_bytes(costs)])
        waiting = np.concatenate([self._order[self._next :], np.arange(old, new)])
        self._order, self._next = waiting[np.argsort(self.quick_s[waiting], kind="stable")], 0

    @property
    def bound_s(self) -> float:
        """Seconds that no layout that waits can beat; infinite without any."""
        return min(self._first_s, self._pool.bound_s, self._next_in_pool_s)

    @property
    def is_ready(self) -> bool:
        """The first row is known: its full bound is no larger than any quick bound that waits."""
        return np.isfinite(self._first_s) and self._first_s == self.bound_s

    @property
    def _first_s(self) -> float:
        return float(self._bound_s[0]) if len(self.rows) else float("inf")

    @property
    def _next_in_pool_s(self) -> float:
        return float(self.quick_s[self._order[self._next]]) if self._next < len(self._order) else float("inf")

    def pop(self) -> int:
        """Take the first one off."""
        row = int(self.rows[0])
        self.rows, self._bound_s = self.rows[1:], self._bound_s[1:]
        return row

    def raise_first(self, bound_s: float) -> bool:
        """Give the first layout a better bound, if it is larger than the one it had: it waits for its turn under that one."""
        if bound_s <= self._first_s:
            return False
        row = self.pop()
        self._raised_s[row] = bound_s
        idx = int(np.searchsorted(self._bound_s, bound_s, side="right"))
        self.rows, self._bound_s = np.insert(self.rows, idx, row), np.insert(self._bound_s, idx, bound_s)
        return True

    def nearest_misses(self, incumbent_s: float, count: int) -> list[int]:
        """Return, of the layouts that would be faster and that memory excluded by its bound, those that lack the least."""
        is_excluded = np.isfinite(self.bound_bytes) & ~self._may_fit(slice(None))
        faster = np.flatnonzero(is_excluded & (self.quick_s < incumbent_s))
        nearest = faster[np.argsort(self.bound_bytes[faster], kind="stable")][: 32 * count]
        is_faster = bounds.time_bounds(self._pool.bounding.select(nearest).compacted()) < incumbent_s
        return [int(row) for row in nearest[is_faster][:count]]

    def bound_block(self) -> None:
        """Bound the next layouts in the order of the quick bounds, after taking in the groups that come before them."""
        while self._pool.bound_s <= self._next_in_pool_s and np.isfinite(self._pool.bound_s):
            self._pool.grow()
            self._order_new()
        rows = self._order[self._next : self._next + BLOCK]
        self._next += len(rows)
        fits, fitting_s = self.bounds(rows)
        if not fits.any():
            return
        bound_s = np.concatenate([self._bound_s, fitting_s[fits]])
        rows = np.concatenate([self.rows, rows[fits]])
        order = np.lexsort((rows, bound_s))
        self.rows, self._bound_s = rows[order], bound_s[order]

    def bounds(self, rows: IntArray) -> tuple[BoolArray, FloatArray]:
        """Return which rows may fit by their bound on memory, and the bounds on their time [N], infinite for the others."""
        costs = self._pool.bounding.select(rows).compacted()
        self.bound_bytes[rows] = bounds.memory_bounds(costs)
        fits, bound_s = self._may_fit(rows), np.full(len(rows), np.inf)
        if fits.any():
            fitting = costs.select(np.flatnonzero(fits))
            within_memory_s = time_bounds_of_pools(fitting)
            within_memory_s[np.isinf(within_memory_s)] = 0.0  # named as what lacks memory once its turn comes
            bound_s[fits] = np.maximum(bounds.time_bounds(fitting), within_memory_s)
        return fits, np.maximum(bound_s, [self._raised_s.get(int(row), 0.0) for row in rows])

    def quick_within(self, limit_s: float, *, max_growths: int) -> tuple[IntArray, FloatArray]:
        """Return rows whose quick bounds are within a limit, and these; the pool takes in more layouts so many times at most."""
        for _ in range(max_growths):
            if self._pool.bound_s > limit_s:
                break
            self._pool.grow()
            self._order_new()
        rows = np.flatnonzero(self.quick_s <= limit_s)
        return rows, self.quick_s[rows]

    def _may_fit(self, rows: IntArray | slice) -> BoolArray:
        required = memory.lower_bound_required_bytes(self.bound_bytes[rows], self._pool.bounding.scenario)
        return np.asarray(required <= self.budget_bytes[rows])
