"""Every combination of the choices that make a layout, as columns of arrays: degrees first, then what can be chosen for each.

A step of the enumeration crosses the rows so far with the options of one more field and retains what is allowed. What is never
enumerated unless it is asked for stands in space.py. Left out are also layouts another of which cannot be worse: splits of cp into
a ring and an exchange (`exchanges_worth_trying`), and switches by which layers do not take less (`may_gain`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..cost_models.coefficients import Scenario
from ..cost_models.layer.operators import CostInputs
from ..cost_models.layer.passes import context_of_attention
from ..cost_models.stage.table import CostTable
from ..schema import ClusterSpec, ConfigError
from ..schema.layout import LAYOUT_FIELDS, Layout
from ..schema.layout_rules import ENGINE_RULES, ProblemFacts, Rule, problem_on
from ..schema.layout_table import LAYOUT_RECOMPUTES, MIXED, RECOMPUTES, LayoutTable, column_of, distinct_rows
from ..schema.schedules import DEFAULT, FOR_FEW_MICROBATCHES, GIVEN, SCHEDULES, by_schedule
from ..schema.units import FloatArray, IntArray
from .columns import Allowed, Columns, Rows, cross, select, stack, take
from .request import PlanRequest

MAX_MICRO_BATCH_SIZE = 64
"""Sequences; larger micro-batches only add memory once the matrix products are saturated."""

CROSSED_AT_ONCE = 2**20
"""Rows with an option each before the rules leave some of them out: some ten megabytes a column."""

SAME_SECONDS_FRACTION = 0.01
"""Layouts this close are equal within any model's error: the one that needs less memory stays."""

ENUMERATED = frozenset((
    "tp", "cp", "cp_ulysses", "pp", "num_model_chunks", "micro_batch_size", "ep", "etp", "sequence_parallel", "tp_overlap",
    "tp_halves", "cuda_graphs", "dp_shard", "dp_replicate", "gradients", "zero_stage", "gradient_shard", "optimizer_shard",
    "schedule", "recompute", "ep_overlap",
))  # fmt: skip
"""Fields with a step of their own in the enumeration. Of the others those with options are tried with each (`LayoutField.options`),
and the rest has one value in the entire space: the fixed one, or the default."""

_OPTIONAL = tuple(name for name, field in LAYOUT_FIELDS.items() if field.options)
CONSTANT = tuple(name for name in LAYOUT_FIELDS if name not in ENUMERATED and name not in _OPTIONAL)
_IN_LAYERS = frozenset(name for name in CONSTANT if "layer" in LAYOUT_FIELDS[name].scopes)
_OF_LAYERS = ("tp", "cp", "cp_ulysses", "micro_batch_size", "ep", "etp", "sequence_parallel", "tp_overlap", "tp_halves")
"""Enumerated fields that say what a layer costs, when `may_gain` asks for it."""

_CHOSEN_DEGREES = ("tp", "cp", "pp", "dp_shard")
"""Degrees that are chosen; dp_replicate is what they leave."""


def divisors(n: int) -> list[int]:
    """Return all divisors of n, increasing."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


_FEW = tuple(2**k for k in range(MAX_MICRO_BATCH_SIZE.bit_length()))


def _smallest_micro_batch(share: Any, size: int) -> Any:
    """Return the smallest micro-batches in which so many sequences are no more micro-batches than with ``size``."""
    return -(-share // -(-share // size))


def uneven_micro_batches(share: int) -> list[int]:
    """Return the micro-batches tried for a share of a batch that does not divide: divisors, and what replaces 1, 2, 4, .."""
    return [*divisors(share), *(_smallest_micro_batch(share, few) for few in _FEW)]


def _all_rows(c: Rows) -> NDArray[np.bool_]:
    return np.ones_like(c["tp"], dtype=bool)


@dataclass(frozen=True)
class Enumeration:
    """Choices for one request: fields that it fixes have their value.

    ``is_narrow``: micro-batches of several sequences only where they are fixed, and for torch's parts, which shard parameters
    without a pipeline only, without that and tp.
    """

    request: PlanRequest
    is_narrow: bool = False

    @cached_property
    def problem(self) -> ProblemFacts:
        """The numbers of model, workload and cluster that rules look at."""
        return problem_on(self.request.model, self.request.workload, self.request.cluster)

    @property
    def _is_of_torch(self) -> bool:
        return self.request.workload.engine_facts.uses_fully_shard

    def constants(self, size: int, *also: str) -> dict[str, NDArray[Any]]:
        """Return the columns of ``size`` layouts that are the same in the entire space, and of fields taken as such."""
        values = {name: self.request.fixed.get(name, Layout.model_fields[name].default) for name in (*CONSTANT, *also)}
        return {name: column_of(name, value, size) for name, value in values.items()}

    def table(self, c: Rows) -> LayoutTable:
        """Return the rows as rules look at them: a field without a column is not chosen yet.

        What is recomputed counts as known: nothing, or what is asked for.
        """
        chosen = {name: column for name, column in c.items() if name in LAYOUT_FIELDS}
        split = {} if "dp_shard" in c or "dp" not in c else {"dp": c["dp"]}
        return LayoutTable(**self.constants(len(c["tp"]), "recompute") | chosen | split)

    def holds(self, table: LayoutTable, rule: Rule) -> NDArray[np.bool_]:
        """Return which layouts [N] satisfy a rule."""
        return np.broadcast_to(np.asarray(rule.holds(table, self.problem), dtype=bool), len(table))

    def _all_hold(self, c: Rows, rules: Sequence[Rule]) -> NDArray[np.bool_]:
        table = self.table(c)
        return np.all([self.holds(table, rule) for rule in rules], axis=0)

    def _remaining(self, c: Rows, without: str = "") -> IntArray:
        """Return the ranks that the chosen degrees, but one, leave."""
        taken = [c[name] for name in _CHOSEN_DEGREES if name in c and name != without]
        return np.maximum(self.request.cluster.num_devices // math.prod(taken, start=np.ones_like(c["tp"])), 1)

    def _divides(self, name: str) -> Allowed:
        return lambda c: self._remaining(c, without=name) % c[name] == 0

    def _cross(self, c: Columns, name: str, options: Sequence[int], allowed: Allowed) -> Columns:
        size = len(c["tp"]) if c else 1
        if name in self.request.fixed:
            return cross(c, name, [int(self.request.fixed[name])])
        blocks, step = [], max(1, CROSSED_AT_ONCE // len(options))
        for start in range(0, max(size, 1), step):  # once for no rows: the new column is there
            self.request.deadline.require(f"enumerating layouts ({size} up to {name})")
            block = {key: column[start : start + step] for key, column in c.items()}
            blocks.append(cross(block, name, options, allowed))
        return blocks[0] if len(blocks) == 1 else stack(blocks)

    def degrees(self, admitted: Callable[[Columns], Columns], *, costed: bool = True) -> Columns:
        """Return every combination of degrees: what layers and stages are, and ``dp``, the ranks that see different sequences.

        Args:
            admitted: selects the rows worth going on with, by the columns that are there already.
            costed: what sequence parallelism gains is costed; else no row is left out for it.
        """
        request = self.request
        num_blocks, batch_size = request.model.num_blocks, request.workload.global_batch_size
        of_world, in_domain = divisors(request.cluster.num_devices), divisors(request.cluster.scaleup_domain)
        sizes = self._micro_batches(of_world)
        c, worth_trying = self._splits(of_world if self._is_of_torch else in_domain, of_world, sizes)
        c["split_idx"] = np.arange(len(c["tp"]))
        c = self._cross(c, "pp", of_world, lambda c: self._divides("pp")(c) & (c["pp"] <= num_blocks))
        c = self._cross(c, "num_model_chunks", range(1, -(-num_blocks // 2) + 1), self._equal_chunks)
        c = admitted(c | {"dp": self._remaining(c)})
        c = self._cross(c, "micro_batch_size", sizes, self._share_divides)
        if self.is_narrow and "micro_batch_size" not in request.fixed:
            c = select(c, (c["micro_batch_size"] == 1) | ((c["pp"] * c["tp"] == 1) & self._is_of_torch))
        c = select(c, worth_trying[c.pop("split_idx"), np.searchsorted(sizes, c["micro_batch_size"])])
        experts = list(self.problem.expert_counts)
        c = self._cross(c, "ep", divisors(int(np.gcd.reduce(experts))) if experts else [1], _all_rows)
        c = self._cross(c, "etp", in_domain if experts else [1], self._folds)
        for name in _OPTIONAL:
            c = self._cross(c, name, (Layout.model_fields[name].default, *LAYOUT_FIELDS[name].options), _all_rows)
        c = admitted(c | {"num_microbatches": -(-batch_size // (c["dp"] * c["micro_batch_size"]))})
        c = self._with_sequence_parallelism(c, costed=costed)
        for name in ("tp_overlap", "tp_halves", "cuda_graphs", "ep_overlap"):
            c = self._with_switch(admitted(c), name, costed=costed)
        return admitted(c)

    def _micro_batches(self, of_world: Sequence[int]) -> list[int]:
        """Return the micro-batches to try, increasing: divisors of the batch, and those of shares that are not even."""
        batch_size, fixed = self.request.workload.global_batch_size, self.request.fixed
        if "micro_batch_size" in fixed:
            return [int(fixed["micro_batch_size"])]
        sizes = set(divisors(batch_size))
        if self.problem.takes_uneven_shares:
            for dp in of_world:
                sizes |= set(uneven_micro_batches(-(-batch_size // dp))) if batch_size % dp else set()
        return sorted(size for size in sizes if size <= MAX_MICRO_BATCH_SIZE)

    def _share_divides(self, c: Rows) -> NDArray[np.bool_]:
        """Return where the micro-batches of a data-parallel rank are of one size; where shares are uneven, those worth trying.

        Over several stages these are whole micro-batches; otherwise `uneven_micro_batches` of the largest share.
        """
        batch_size, dp, size = self.request.workload.global_batch_size, c["dp"], c["micro_batch_size"]
        divides = np.maximum(batch_size // dp, 1) % size == 0
        if not self.problem.takes_uneven_shares or not np.any(batch_size % dp):
            return np.asarray(divides)
        share = -(-batch_size // dp)
        is_tried = share % size == 0
        for few in _FEW:
            is_tried |= size == _smallest_micro_batch(share, few)
        in_stages = (batch_size % size == 0) & (batch_size >= dp * size)
        return np.asarray(np.where(batch_size % dp == 0, divides, np.where(c["pp"] > 1, in_stages, is_tried)))

    def _splits(
        self, tps: Sequence[int], cps: Sequence[int], sizes: Sequence[int]
    ) -> tuple[Columns, NDArray[np.bool_]]:
        """Return tp, cp and cp_ulysses, and whether a split of cp is worth trying with a micro-batch [N, sizes]."""
        request = self.request
        c = self._cross({}, "tp", tps, lambda c: request.cluster.num_devices % c["tp"] == 0)
        c = self._cross(c, "cp", cps, self._divides("cp"))
        c = self._cross(c, "cp_ulysses", cps, lambda c: c["cp"] % c["cp_ulysses"] == 0)
        if "cp_ulysses" in request.fixed:
            return c, np.ones((len(c["tp"]), len(sizes)), dtype=bool)
        # A cp that the engine does not take at all is left to the rules, which say so.
        holds = self._all_hold(c, request.workload.engine_facts.exchange_rules)
        group = np.unique(c["tp"] * (1 << 32) + c["cp"], return_inverse=True)[1]
        is_taken = np.bincount(group, weights=holds)[group] > 0
        c = select(c, holds | (~is_taken & (c["cp_ulysses"] == 1)))
        worth_trying = exchanges_worth_trying(c, sizes, request)
        rows = np.flatnonzero(worth_trying.any(axis=1))
        return take(c, rows), worth_trying[rows]

    def _equal_chunks(self, c: Rows) -> NDArray[np.bool_]:
        """Return where so many chunks divide the blocks of a stage, or the two of our V schedules; each of them has a block."""
        chunks, pp, num_blocks = c["num_model_chunks"], c["pp"], self.request.model.num_blocks
        divide = ((self._is_of_torch & (chunks == 2)) | (-(-num_blocks // pp) % chunks == 0)) & (
            chunks * pp <= num_blocks
        )
        return np.asarray((chunks == 1) | ((pp > 1) & divide))

    def _folds(self, c: Rows) -> NDArray[np.bool_]:
        """Experts fill the ranks of a stage; etp = tp without ep is the same as no axes of their own.

        A given ep that does not fold onto the ranks is left to the rules, which say so.
        """
        fills = (c["dp"] * c["cp"] * c["tp"]) % (c["ep"] * c["etp"]) == 0
        folds = fills & ((c["ep"] > 1) | (c["etp"] == 1) | (c["etp"] != c["tp"]))
        return np.asarray(folds | (("ep" in self.request.fixed) & (c["etp"] == 1)))

    def _with_sequence_parallelism(self, c: Columns, *, costed: bool) -> Columns:
        """Add it wherever it is possible, and the same rows without where that may be faster."""
        request, tp = self.request, c["tp"]
        if "sequence_parallel" in request.fixed:
            given = np.full_like(tp, request.fixed["sequence_parallel"])
            return select(c | {"sequence_parallel": given}, (given == 0) | (tp > 1))
        split = (tp > 1) & (request.workload.seq_len % (c["cp"] * tp) == 0)
        split &= request.workload.engine_facts.splits_sequence
        without = self._all_hold(
            c | {"sequence_parallel": np.zeros_like(tp)}, request.workload.engine_facts.sequence_rules
        )
        choice = np.flatnonzero(split & without & request.workload.engine_facts.plans_whole_sequence)
        if len(choice) and costed and not request.fixed.keys() & _IN_LAYERS:
            choice = choice[may_gain(take(c, choice), "sequence_parallel", 0, request)]
        has_it = np.concatenate([split, np.zeros(len(choice), dtype=bool)]).astype(np.int64)
        return take(c, np.concatenate([np.arange(len(tp)), choice])) | {"sequence_parallel": has_it}

    def _with_switch(self, c: Columns, name: str, *, costed: bool) -> Columns:
        """Add a switch: off and, where the rules allow it and layers may take less by it, on."""
        request, off, engine = self.request, np.zeros_like(c["tp"]), self.request.workload.engine_facts
        if name in request.fixed:
            return c | {name: off + int(request.fixed[name])}
        if name not in engine.switches:
            return c | {name: off}
        on = c | {name: off + 1}
        known = self.table(on).known
        rules = [rule for rule in (*ENGINE_RULES, *(engine.rules or ())) if name in rule.needs.split()]
        rows = np.flatnonzero(self._all_hold(on, [rule for rule in rules if rule.is_decided(known)]))
        if len(rows) and costed and not request.fixed.keys() & _IN_LAYERS:
            rows = rows[may_gain(take(c, rows), name, 1, request)]
        return take(c, np.concatenate([np.arange(len(off)), rows])) | {name: np.concatenate([off, np.ones_like(rows)])}

    def options(self, c: Columns) -> Columns:
        """Cross the degrees with what does not change their layers: how states are sharded, and the schedule."""
        request, fixed = self.request, self.request.fixed
        domains = [level.domain_size for level in request.cluster.levels]
        of_world = divisors(request.cluster.num_devices)
        c = self._cross(
            c,
            "dp_shard",
            of_world,
            lambda c: self._divides("dp_shard")(c) & (request.runnable | self._fills(c, domains)),
        )
        replicas = fixed.get("dp_replicate")
        c = c | {"dp_replicate": self._remaining(c) if replicas is None else np.full_like(c["tp"], replicas)}
        c = self._cross(c, "zero_stage", request.workload.engine_facts.zero_stages, has_zero_stage)
        c = self._with_gradients(select(c, has_zero_stage(c)))
        return self._with_schedules(self._with_wider_states(c, domains))

    def _with_gradients(self, c: Columns) -> Columns:
        """Add the dtype of gradients where the engine leaves it to the plan: that of the products, and fp32 where states are whole.

        The former moves less, and holds less of gradients, of which the update makes fp32 ones of this rank's shard: 2 + 4 / N
        bytes a parameter at most over N ranks, no more than the 4 of fp32 from two on.
        """
        request, in_fp32 = self.request, np.zeros_like(c["tp"])
        if "gradients" in request.fixed or "gradients" not in request.workload.engine_facts.switches:
            return c | {"gradients": column_of("gradients", request.fixed.get("gradients", "fp32"), len(in_fp32))}
        unsharded = np.flatnonzero(c["zero_stage"] == 0)
        in_compute_dtype = np.concatenate([in_fp32 + 1, in_fp32[unsharded]])
        return take(c, np.concatenate([np.arange(len(in_fp32)), unsharded])) | {"gradients": in_compute_dtype}

    def _fills(self, c: Rows, domains: Sequence[int]) -> NDArray[np.bool_]:
        """dp_shard is 1, all, or as many ranks of a stage as one domain of some link level holds."""
        everything = self._remaining(c, without="dp_shard")
        fills = (c["dp_shard"] == 1) | (c["dp_shard"] == everything)
        for size in domains:
            fills |= c["dp_shard"] == np.gcd(np.maximum(size // (c["tp"] * c["cp"]), 1), everything)
        return fills

    def _with_wider_states(self, c: Columns, domains: Sequence[int]) -> Columns:
        """Add rows whose gradients and optimizer states are sharded over more ranks than parameters: a link domain, or all."""
        request, fixed, dp = self.request, self.request.fixed, c["dp_replicate"] * c["dp_shard"]
        widths = [np.ones_like(dp)]
        if given := [int(fixed[name]) for name in ("optimizer_shard", "gradient_shard") if name in fixed]:
            widths = [np.full_like(dp, given[0])]
        elif not request.runnable and request.workload.engine_facts.keeps_parameters_closer:
            widths += [np.gcd(np.maximum(size // (c["tp"] * c["cp"]), 1), dp) for size in domains] + [dp]
        blocks = []
        for idx, width in enumerate(widths):
            is_new = np.asarray((idx == 0) | ((c["zero_stage"] == 3) & (width > c["dp_shard"])))
            for earlier in widths[:idx]:
                is_new &= width != earlier
            levels = {"optimizer_shard": width, "gradient_shard": np.where(c["zero_stage"] == 3, width, 1)}
            levels |= {name: np.full_like(dp, fixed[name]) for name in levels if name in fixed}
            blocks.append(select(c | levels, np.broadcast_to(is_new, dp.shape)))
        return stack(blocks)

    def _with_schedules(self, c: Columns) -> Columns:
        fixed, engine = self.request.fixed, self.request.workload.engine
        pp, chunks, microbatches = c["pp"], c["num_model_chunks"], c["num_microbatches"]
        fills = (microbatches >= pp) | (pp == 1) | (not self._is_of_torch)
        schedule, possible = np.where(fills, DEFAULT.idx, FOR_FEW_MICROBATCHES.idx), _all_rows(c)
        if "schedule" in fixed:
            schedule = np.full_like(schedule, SCHEDULES[fixed["schedule"]].idx)
            # An order is made over a V (stage_choice.py), where the named schedules that it stands in for are defined.
            possible &= (fixed["schedule"] != GIVEN.name) | ((chunks == 2) & (microbatches >= pp))
        if fixed.get("offload") == "parameters":
            possible &= (c["zero_stage"] == 3) | (c["zero_stage"] == 0)
        c = select(c | {"schedule": schedule}, possible)
        if "schedule" in fixed or not self._is_of_torch:
            return c
        pp, chunks, microbatches = c["pp"], c["num_model_chunks"], c["num_microbatches"]
        fills = (pp > 1) & (microbatches >= pp) & (c["zero_stage"] <= 1)
        defined = {"any": (chunks == 1) | (microbatches % pp == 0), "one": chunks == 1, "two": chunks == 2}
        blocks = [c]
        for other in SCHEDULES.values():
            if other not in (DEFAULT, FOR_FEW_MICROBATCHES, GIVEN) and engine in other.engines:
                block = select(c, fills & defined[other.chunks])
                blocks.append(block | {"schedule": np.full_like(block["pp"], other.idx)})
        return stack(blocks)

    def recomputes(self, c: Columns) -> Columns:
        """Cross the options with what is recomputed.

        Unless it is fixed: one for each block where ranks have one stage of 1f1b or gpipe, every uniform one elsewhere. On a mixed
        cluster every one is uniform: stages on devices that differ are cut with one choice for all.
        """
        fixed = self.request.fixed
        is_plain = by_schedule("bound")[c["schedule"]] == "whole_backward"
        is_mixed = (not self.request.cluster.parts) & is_plain & (c["num_model_chunks"] == 1)
        is_mixed &= (fixed.get("vocabulary", "ends") == "ends") & (c["cuda_graphs"] + c["ep_overlap"] == 0)
        if "recompute" in fixed:
            c = cross(c, "recompute", [LAYOUT_RECOMPUTES.index(fixed["recompute"])])
            if fixed["recompute"] == "mixed":
                if not is_mixed.any():
                    raise ConfigError(
                        "recompute=mixed is planned for one stage a rank under 1f1b or gpipe, on devices that are alike"
                    )
                c = select(c, is_mixed)
        else:
            choices = [LAYOUT_RECOMPUTES.index(name) for name in self.request.workload.engine_facts.recompute]
            is_mixed &= ("recompute_fraction" not in fixed) & (MIXED in choices)
            takes_mixed = np.repeat(is_mixed, len(choices))
            c = cross(c, "recompute", choices, lambda c: (c["recompute"] == MIXED) == takes_mixed)
        c = select(c, (c["cuda_graphs"] + c["ep_overlap"] == 0) | (c["recompute"] <= RECOMPUTES.index("selective")))
        if self._is_of_torch:  # as the rule split_backward_keeps_activations, which saw what is asked for only
            c = select(c, ~by_schedule("splits_backward")[c["schedule"]] | (c["recompute"] == 0))
        return c


def has_zero_stage(c: Rows) -> NDArray[np.bool_]:
    """Return where there are ranks to shard over if and only if something is sharded; only context ranks may be such."""
    stage = c["zero_stage"]
    return np.asarray(((c["dp_shard"] == 1) | (stage > 0)) & ((c["dp_shard"] * c["cp"] > 1) | (stage == 0)))


def exchanges_worth_trying(c: Columns, micro_batch_sizes: Sequence[int], request: PlanRequest) -> NDArray[np.bool_]:
    """Return where no other split of the same cp over the same tp is as good in everything [N, sizes]; the first of equal ones is.

    Splits of cp keep the same bytes, gradients and stage transfers: they differ in what context parallelism adds to attention. One
    is left out where another adds no more seconds in either pass and no more dispatches of the host, for every kind of attention:
    with the same stages a step does not get faster when its layers take longer, because every start waits for what ends before it
    and communication that hides next to a layer saves at most what that takes (overlap.pair_s).
    """
    model, workload, cluster = request.model, request.workload, request.cluster
    keep = np.ones((len(c["tp"]), len(micro_batch_sizes)), dtype=bool)
    open_rows = np.flatnonzero(c["cp"] > 1)
    if workload.attention != "flash" or not len(open_rows) or _differs_by_place(cluster):
        return keep
    splits = {name: c[name][open_rows] for name in ("tp", "cp", "cp_ulysses")}
    c = cross(splits, "micro_batch_size", micro_batch_sizes)
    table = LayoutTable.filled(len(c["tp"]), **c)
    inputs = CostInputs(hidden_dim=model.hidden_dim, layouts=table, scenario=Scenario.build(workload, cluster))
    added = []
    for block in {block.attention: block for block, _ in reversed(model.block_runs)}.values():
        cost = context_of_attention(block, inputs)
        added += [cost.forward_s + cost.exposed_forward_s, cost.backward_s + cost.exposed_backward_s, cost.dispatches]
    cost_of_split = np.stack(added, axis=-1).reshape(*keep[open_rows].shape, -1)
    groups = distinct_rows([splits["tp"], splits["cp"]]).case_idx
    for group in range(int(groups.max()) + 1):
        rows = np.flatnonzero(groups == group)
        costs = cost_of_split[rows]
        no_worse = np.all(costs[:, None] <= costs[None, :], axis=-1)  # [i, j, size]: i in place of j
        is_earlier = np.triu(np.ones((len(rows), len(rows)), dtype=bool), k=1)[:, :, None]
        keep[open_rows[rows]] = ~np.any(no_worse & (~no_worse.transpose(1, 0, 2) | is_earlier), axis=0)
    return keep


def may_gain(c: Columns, switch: str, value: int, request: PlanRequest) -> NDArray[np.bool_]:
    """Return which rows may gain more than SAME_SECONDS_FRACTION with this value of a switch in place of the other one [N].

    The other value needs less memory: sequence parallelism sends no more between stages and leaves less to do next to products, but
    its two collectives in place of one may take longer; products in chunks and graphs never take longer, but have buffers. A row is
    left out where no part of a stage has more than this fraction less work for a micro-batch, whatever is recomputed (nothing, of a
    switch that is on). A step follows the work of its stages; how that is divided between passes shows where a pipeline fills and
    drains, so this is measured, not a theorem.
    """
    if _differs_by_place(request.cluster):
        return np.ones(len(c["tp"]), dtype=bool)
    names = tuple(name for name in _OF_LAYERS if name in c and name != switch)
    recomputes = range(1 if value else len(RECOMPUTES))
    rows, case_idx = distinct_rows([*(c[name] for name in names), c["pp"] > 1, c["dp"] > 1])
    unsharded = {name: c[name][rows] for name in (*names, "pp")} | {"dp_replicate": c["dp"][rows]}
    c = cross(cross(unsharded, "recompute", recomputes), switch, (0, 1))
    table = LayoutTable.filled(len(c["tp"]), **c)
    costs = CostTable.from_layouts(request.model, request.workload, request.cluster, table)
    work = _work(costs).reshape(-1, len(rows), len(recomputes), 2)
    no_slower = work[..., 1 - value] <= (1 + SAME_SECONDS_FRACTION) * work[..., value]
    return np.asarray(~np.all(no_slower, axis=(0, 2))[case_idx])


def _differs_by_place(cluster: ClusterSpec) -> bool:
    return cluster.is_mixed or cluster.bandwidth_matrix is not None


def _work(costs: CostTable) -> FloatArray:
    """Return seconds of one micro-batch, forward and backward, of the sets of layers that every stage is a sum of [sets, N].

    A stage has a block for certain, so the embedding and the head count with one of every kind.
    """
    is_end = [kind.is_embedding or kind.is_head for kind in costs.kinds]
    busy = [cost.busy_s for cost in costs.by_case]
    ends = [seconds for seconds, end in zip(busy, is_end, strict=True) if end]
    with_block = [np.zeros_like(ends[0]), *ends, np.sum(ends, axis=0)]
    sets = []
    for kind, seconds, end in zip(costs.kinds, busy, is_end, strict=True):
        if not end:
            sets += [seconds + other for other in (with_block if kind.is_block else with_block[:1])]
    return np.stack(sets)[:, costs.case_idx]
