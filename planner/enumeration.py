"""Columns of arrays, one row for each combination of choices, and how rows are combined with further ones.

What can be chosen for degrees without changing what their layers cost: sharding of states, schedule, recompute.

Every combination of the choices that make a layout, as columns of arrays: degrees first, then what can be chosen for each.

What is never enumerated unless it is asked for stands in space.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..schema import ConfigError, Workload
from ..schema.arrays import IntArray
from ..schema.engine_facts import ENGINES, Engine, exchange_rules, sequence_rules
from ..schema.layout import LAYOUT_FIELDS, Layout
from ..schema.layout_rules import ProblemFacts
from ..schema.layout_table import LAYOUT_RECOMPUTES, MIXED, LayoutTable, column_of
from ..schema.runnable import problem_facts
from ..schema.schedules import DEFAULT, FOR_FEW_MICROBATCHES, GIVEN, SCHEDULES, by_schedule
from .dominance import exchanges_worth_trying, worth_whole_sequence
from .request import PlanRequest

Columns = dict[str, IntArray]


def divisors(n: int) -> list[int]:
    """All divisors of n, increasing."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def cross(
    columns: Columns,
    name: str,
    options: Sequence[int],
    allowed: Callable[[Mapping[str, IntArray]], NDArray[np.bool_]] | None = None,
) -> Columns:
    """Every row with every option of a new column; those that are ``allowed``."""
    size = len(next(iter(columns.values()))) if columns else 1
    rows = np.repeat(np.arange(size), len(options))
    values = np.tile(np.asarray(options, dtype=np.int64), size)
    if allowed is not None:
        keep = allowed(_Crossed(columns, rows, name, values))
        rows, values = rows[keep], values[keep]
    return {key: column[rows] for key, column in columns.items()} | {name: values}


class _Crossed(Mapping[str, IntArray]):
    """Rows of some columns beside a new one; a column is made when it is asked for, because few are."""

    def __init__(self, columns: Columns, rows: IntArray, name: str, values: IntArray) -> None:
        """``values`` of the new column ``name`` stand beside ``rows`` of the others."""
        self._columns, self._rows, self._new = columns, rows, {name: values}

    def __getitem__(self, name: str) -> IntArray:
        return self._new[name] if name in self._new else self._columns[name][self._rows]

    def __iter__(self) -> Iterator[str]:
        return iter({**self._columns, **self._new})

    def __len__(self) -> int:
        return len({**self._columns, **self._new})


def select(columns: Columns, keep: NDArray[np.bool_]) -> Columns:
    """The rows of a mask."""
    if keep.all():
        return columns
    rows = np.flatnonzero(keep)
    return {name: column[rows] for name, column in columns.items()}


def always(c: Mapping[str, IntArray]) -> NDArray[np.bool_]:
    """Every row."""
    return np.ones_like(c["tp"], dtype=bool)


def with_levels(
    c: Columns, engine: Engine, fixed: Mapping[str, Any], islands: Sequence[int], *, runnable: bool
) -> Columns:
    """Where gradients and optimizer states may be sharded over more ranks than parameters: a domain of a link level, or all."""
    dp = c["dp_replicate"] * c["dp_shard"]
    widths = [np.ones_like(dp)]
    if given := [int(fixed[name]) for name in ("optimizer_shard", "gradient_shard") if name in fixed]:
        widths = [np.full_like(dp, given[0])]
    elif not runnable and ENGINES[engine].keeps_parameters_closer:
        widths += [np.gcd(np.maximum(size // (c["tp"] * c["cp"]), 1), dp) for size in islands] + [dp]
    rows = []
    for idx, width in enumerate(widths):
        keep = np.asarray((idx == 0) | ((c["zero_stage"] == 3) & (width > c["dp_shard"])))
        for earlier in widths[:idx]:
            keep &= width != earlier
        of_gradients = np.where(c["zero_stage"] == 3, width, 1)
        levels = {"optimizer_shard": width, "gradient_shard": of_gradients}
        levels |= {name: np.full_like(dp, fixed[name]) for name in levels if name in fixed}
        rows.append(select(c | levels, np.broadcast_to(keep, dp.shape)))
    return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}


def has_zero_stage(c: Mapping[str, IntArray]) -> NDArray[np.bool_]:
    """Ranks to shard over, if and only if something is sharded; context ranks alone may be."""
    stage = c["zero_stage"]
    return np.asarray(((c["dp_shard"] == 1) | (stage > 0)) & ((c["dp_shard"] * c["cp"] > 1) | (stage == 0)))


def splits_backward(c: Columns) -> NDArray[np.bool_]:
    """Rows whose schedule postpones gradients of weights."""
    return by_schedule("splits_backward")[c["schedule"]]


def _with_other_schedules(c: Columns, microbatches: IntArray, engine: str) -> Columns:
    """Add to every row those with the other schedules that the engine runs, where these are defined."""
    chunks, pp = c["num_model_chunks"], c["pp"]
    fills = (pp > 1) & (microbatches >= pp) & (c["zero_stage"] <= 1)
    chunks_allow = {"any": (chunks == 1) | (microbatches % pp == 0), "one": chunks == 1, "two": chunks == 2}
    others = (s for s in SCHEDULES.values() if s not in (DEFAULT, FOR_FEW_MICROBATCHES, GIVEN) and engine in s.engines)
    rows = [c]
    for schedule in others:
        row = select(c, fills & chunks_allow[schedule.chunks])
        rows.append(row | {"schedule": np.full_like(row["pp"], schedule.idx)})
    return {name: np.concatenate([row[name] for row in rows]) for name in c}


def with_schedule(c: Columns, workload: Workload, fixed: Mapping[str, Any]) -> Columns:
    """The schedules that the micro-batches allow."""
    pp, microbatches = c["pp"], c["num_microbatches"]
    possible = np.ones_like(pp, dtype=bool)
    fills = (microbatches >= pp) | (pp == 1) | (not workload.engine_facts.is_own_runtime)
    schedule = np.where(fills, DEFAULT.idx, FOR_FEW_MICROBATCHES.idx)
    if "schedule" in fixed:
        schedule = np.full_like(schedule, SCHEDULES[fixed["schedule"]].idx)
        # An order is made over a V (planner/synthesis.py), where the named schedules that it stands in for are defined.
        possible &= (fixed["schedule"] != GIVEN.name) | ((c["num_model_chunks"] == 2) & (microbatches >= pp))
    if fixed.get("offload") == "parameters":
        possible &= (c["zero_stage"] == 3) | (c["zero_stage"] == 0)
    c = c | {"schedule": schedule}
    if "schedule" not in fixed and workload.engine_facts.is_own_runtime:
        return _with_other_schedules(select(c, possible), microbatches[possible], workload.engine)
    return select(c, possible)


def with_recompute(c: Columns, fixed: Mapping[str, Any], *, mixes: bool) -> Columns:
    """The given recompute; else one for each block where ranks have one stage of 1f1b or gpipe, and every uniform one elsewhere.

    Without ``mixes`` every one is uniform: stages on devices that differ are cut with one choice for all.
    """
    plain = by_schedule("bound")[c["schedule"]] == "whole_backward"
    mixed = mixes & plain & (c["num_model_chunks"] == 1) & (fixed.get("vocabulary", "ends") == "ends")
    if "recompute" in fixed:
        given = cross(c, "recompute", [LAYOUT_RECOMPUTES.index(fixed["recompute"])])
        if fixed["recompute"] != "mixed":
            return given
        if not mixed.any():
            raise ConfigError(
                "recompute=mixed is planned for one stage a rank under 1f1b or gpipe, on devices that are alike"
            )
        return select(given, mixed)
    mixed &= "recompute_fraction" not in fixed
    return cross(c, "recompute", list(range(MIXED + 1)), lambda c: _takes(c["recompute"], np.repeat(mixed, MIXED + 1)))


def _takes(recompute: IntArray, mixed: NDArray[np.bool_]) -> NDArray[np.bool_]:
    return np.asarray((recompute == MIXED) == mixed)


MAX_MICRO_BATCH_SIZE = 64
"""Sequences; larger micro-batches only add memory once the matrix products are saturated."""


ENUMERATED = frozenset((
    "tp", "cp", "cp_ulysses", "pp", "num_model_chunks", "micro_batch_size", "ep", "etp", "sequence_parallel", "dp_shard",
    "dp_replicate", "zero_stage", "gradient_shard", "optimizer_shard", "schedule", "recompute",
))  # fmt: skip
"""Fields with a step of their own in the enumeration. Of the others those with options are tried with each (`LayoutField.options`),
and the rest has one value in the entire space: the fixed one, or the default."""


_OPTIONAL = tuple(name for name, field in LAYOUT_FIELDS.items() if field.options)

CONSTANT = tuple(name for name in LAYOUT_FIELDS if name not in ENUMERATED and name not in _OPTIONAL)

_IN_LAYERS = frozenset(name for name in CONSTANT if "layer" in LAYOUT_FIELDS[name].scopes)
"""Fields that are not searched and change what layers cost."""


_LEFT = ("tp", "cp", "pp", "dp_shard")
"""Degrees that are chosen; dp_replicate is what they leave."""


Admitted = Callable[[Columns], Columns]


@dataclass(frozen=True)
class Enumeration:
    """Choices for one request: fields that it fixes have their value."""

    request: PlanRequest

    @property
    def is_ours(self) -> bool:
        """Whether the plan is for our own runtime."""
        return self.request.workload.engine_facts.is_own_runtime

    @cached_property
    def problem(self) -> ProblemFacts:
        """The numbers of model, workload and cluster that rules look at."""
        cluster = self.request.cluster
        return problem_facts(
            self.request.model,
            self.request.workload,
            world_size=cluster.num_devices,
            scaleup_domain=cluster.scaleup_domain,
        )

    def constants(self, size: int) -> dict[str, NDArray[Any]]:
        """Return the columns of ``size`` layouts that are the same in the entire space."""
        return {name: self._constant(name, size) for name in CONSTANT}

    def _constant(self, name: str, size: int) -> NDArray[Any]:
        return column_of(name, self.request.fixed.get(name, Layout.model_fields[name].default), size)

    def table(self, c: Mapping[str, IntArray]) -> LayoutTable:
        """Return the rows as rules look at them: a field without a column is not chosen yet.

        What is recomputed counts as known: nothing, or what is asked for.
        """
        size = len(c["tp"])
        constants = self.constants(size) | {"recompute": self._constant("recompute", size)}
        chosen = {name: column for name, column in c.items() if name in LAYOUT_FIELDS}
        split = {} if "dp_shard" in c or "dp" not in c else {"dp": c["dp"]}
        return LayoutTable(**constants | chosen | split)

    def left(self, c: Mapping[str, IntArray]) -> IntArray:
        """Ranks that the chosen degrees leave."""
        taken = np.ones_like(c["tp"])
        for name in _LEFT:
            taken = taken * c.get(name, 1)
        return np.maximum(self.request.cluster.num_devices // taken, 1)

    def cross(
        self,
        c: Columns,
        name: str,
        options: Sequence[int],
        allowed: Callable[[Mapping[str, IntArray]], NDArray[np.bool_]],
    ) -> Columns:
        """Every row with every option that is allowed, or with the one that is asked for."""
        self.request.deadline.require(f"enumerating layouts ({len(c['tp']) if c else 1} up to {name})")
        return (
            cross(c, name, [int(self.request.fixed[name])])
            if name in self.request.fixed
            else cross(c, name, options, allowed)
        )

    def degrees(self, admitted: Admitted, *, only_worth: bool = True) -> Columns:
        """Every combination of degrees: what layers and stages are, and ``dp``, the ranks that see different sequences.

        ``admitted`` says which rows are worth going on with, of columns that are there already. Without ``only_worth`` none of them
        is costed to see what sequence parallelism is worth.
        """
        fixed, num_blocks, batch_size = (
            self.request.fixed,
            self.request.model.num_blocks,
            self.request.workload.global_batch_size,
        )
        all_of, in_domain = divisors(self.request.cluster.num_devices), divisors(self.request.cluster.scaleup_domain)
        sizes = [d for d in divisors(batch_size) if d <= MAX_MICRO_BATCH_SIZE]
        sizes = [int(fixed["micro_batch_size"])] if "micro_batch_size" in fixed else sizes
        c, worth = self._splits(all_of if self.is_ours else in_domain, all_of, sizes)
        c["split_idx"] = np.arange(len(c["tp"]))
        c = self.cross(c, "pp", all_of, lambda c: _divides(c, "pp", self.left) & (c["pp"] <= num_blocks))
        chunks = list(range(1, -(-num_blocks // 2) + 1))
        c = self.cross(c, "num_model_chunks", chunks, lambda c: _equal_chunks(c, num_blocks, is_ours=self.is_ours))
        c = admitted(c | {"dp": self.left(c)})
        c = self.cross(c, "micro_batch_size", sizes, lambda c: _fits_batch(c, batch_size))
        c = select(c, worth[c.pop("split_idx"), np.searchsorted(sizes, c["micro_batch_size"])])
        experts = list(self.problem.expert_counts)
        c = self.cross(c, "ep", divisors(int(np.gcd.reduce(experts))) if experts else [1], always)
        # A given ep that does not fold onto the ranks is left to the rules, which say so.
        c = self.cross(
            c, "etp", in_domain if experts else [1], lambda c: _folds(c) | (("ep" in fixed) & (c["etp"] == 1))
        )
        for name in _OPTIONAL:
            c = self.cross(c, name, (Layout.model_fields[name].default, *LAYOUT_FIELDS[name].options), always)
        c = c | {"num_microbatches": batch_size // (c["dp"] * c["micro_batch_size"])}
        return admitted(self._with_sequence(admitted(c), only_worth=only_worth))

    def _splits(
        self, tps: Sequence[int], cps: Sequence[int], sizes: Sequence[int]
    ) -> tuple[Columns, NDArray[np.bool_]]:
        """tp, cp and cp_ulysses, and whether a split of cp is worth trying with a micro-batch [N, sizes]."""
        world = self.request.cluster.num_devices
        c = self.cross({}, "tp", tps, lambda c: world % c["tp"] == 0)
        c = self.cross(c, "cp", cps, lambda c: _divides(c, "cp", self.left))
        c = self.cross(c, "cp_ulysses", cps, always)
        if "cp_ulysses" in self.request.fixed:
            return c, np.ones((len(c["tp"]), len(sizes)), dtype=bool)
        c = select(c, self._can_exchange(c))
        worth = exchanges_worth_trying(c, sizes, self.request.model, self.request.workload, self.request.cluster)
        ever = np.flatnonzero(worth.any(axis=1))
        return {name: column[ever] for name, column in c.items()}, worth[ever]

    def _can_exchange(self, c: Columns) -> NDArray[np.bool_]:
        """Splits of cp that the engine takes; a cp that it does not take at all is left to the rules, which say so."""
        ones = np.ones_like(c["tp"])
        table, rules = self.table(c), exchange_rules(self.request.workload.engine)
        holds = np.all([np.broadcast_to(rule.holds(table, self.problem), ones.shape) for rule in rules], axis=0)
        group = np.unique(c["tp"] * (1 << 32) + c["cp"], return_inverse=True)[1]
        is_taken = np.bincount(group, weights=holds)[group] > 0
        return np.asarray(holds | (~is_taken & (c["cp_ulysses"] == 1)))

    def _with_sequence(self, c: Columns, *, only_worth: bool) -> Columns:
        """Sequence parallelism wherever it is possible, and beside it the same without where that may be faster."""
        tp = c["tp"]
        if "sequence_parallel" in self.request.fixed:
            given = np.full_like(tp, self.request.fixed["sequence_parallel"])
            return select(c | {"sequence_parallel": given}, (given == 0) | (tp > 1))
        split = (tp > 1) & (self.request.workload.seq_len % (c["cp"] * tp) == 0)
        choice = np.flatnonzero(split & self._takes_whole_sequence(c))
        if len(choice) and only_worth and not self.request.fixed.keys() & _IN_LAYERS:
            some = {name: column[choice] for name, column in c.items()}
            choice = choice[worth_whole_sequence(some, self.request.model, self.request.workload, self.request.cluster)]
        rows = np.concatenate([np.arange(len(tp)), choice])
        has_it = np.concatenate([split, np.zeros(len(choice), dtype=bool)]).astype(np.int64)
        return {name: column[rows] for name, column in c.items()} | {"sequence_parallel": has_it}

    def _takes_whole_sequence(self, c: Columns) -> NDArray[np.bool_]:
        """Whether the engine runs these degrees without sequence parallelism."""
        table = self.table(c | {"sequence_parallel": np.zeros_like(c["tp"])})
        rules = sequence_rules(self.request.workload.engine)
        holds = np.all([np.broadcast_to(rule.holds(table, self.problem), c["tp"].shape) for rule in rules], axis=0)
        # Megatron overlaps products with the collectives of sequence parallelism only, and refuses to start otherwise.
        return np.asarray(holds & (not self.request.workload.tp_overlap))

    def options(self, c: Columns) -> Columns:
        """Every row of degrees with what does not change its layers: how states are sharded, and the schedule."""
        fixed, engine, runnable = self.request.fixed, self.request.workload.engine, self.request.runnable
        islands = [level.domain_size for level in self.request.cluster.levels]
        c = self.cross(
            c,
            "dp_shard",
            divisors(self.request.cluster.num_devices),
            lambda c: _divides(c, "dp_shard", self.left) & (runnable | _fills(c, islands, self.left)),
        )
        c = (
            cross(c, "dp_replicate", [fixed["dp_replicate"]])
            if "dp_replicate" in fixed
            else c | {"dp_replicate": self.left(c)}
        )
        c = self.cross(c, "zero_stage", ENGINES[engine].zero_stages, has_zero_stage)
        c = select(c, has_zero_stage(c))
        c = with_levels(c, engine, fixed, islands, runnable=runnable)
        return with_schedule(c, self.request.workload, fixed)

    def recomputes(self, c: Columns) -> Columns:
        """Every row of options with what is recomputed."""
        c = with_recompute(c, self.request.fixed, mixes=not self.request.cluster.parts)
        if self.is_ours:  # as the rule split_backward_keeps_activations, which saw what is asked for only
            c = select(c, ~splits_backward(c) | (c["recompute"] == 0))
        return c


def _divides(
    c: Mapping[str, IntArray], name: str, left: Callable[[Mapping[str, IntArray]], IntArray]
) -> NDArray[np.bool_]:
    """The degree divides what the ones before it leave."""
    before = left({key: c[key] for key in _LEFT if key in c and key != name})
    return np.asarray(before % c[name] == 0)


def _fills(
    c: Mapping[str, IntArray], islands: Sequence[int], left: Callable[[Mapping[str, IntArray]], IntArray]
) -> NDArray[np.bool_]:
    """dp_shard is 1, all, or as many ranks of a stage as one domain of some link level holds."""
    everything = left({key: c[key] for key in _LEFT if key in c and key != "dp_shard"})
    fills = (c["dp_shard"] == 1) | (c["dp_shard"] == everything)
    for size in islands:
        inside = np.gcd(np.maximum(size // (c["tp"] * c["cp"]), 1), everything)
        fills |= c["dp_shard"] == inside
    return np.asarray(fills)


def _folds(c: Mapping[str, IntArray]) -> NDArray[np.bool_]:
    """Experts fill the ranks of a stage; etp = tp without ep is the same as no axes of their own."""
    ranks = c["dp"] * c["cp"] * c["tp"]
    return np.asarray((ranks % (c["ep"] * c["etp"]) == 0) & ((c["ep"] > 1) | (c["etp"] == 1) | (c["etp"] != c["tp"])))


def _fits_batch(c: Mapping[str, IntArray], global_batch_size: int) -> NDArray[np.bool_]:
    """The micro-batch divides what a data-parallel rank gets of the batch."""
    per_rank = np.maximum(global_batch_size // c["dp"], 1)
    return np.asarray(per_rank % c["micro_batch_size"] == 0)


def _equal_chunks(c: Mapping[str, IntArray], num_blocks: int, *, is_ours: bool) -> NDArray[np.bool_]:
    """As many chunks as divide the blocks of a stage, or the two of our V schedules; each of them has a block."""
    chunks, pp = c["num_model_chunks"], c["pp"]
    divide = ((is_ours & (chunks == 2)) | (-(-num_blocks // pp) % chunks == 0)) & (chunks * pp <= num_blocks)
    return np.asarray((chunks == 1) | ((pp > 1) & divide))
