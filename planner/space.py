"""The search space: every combination of degrees and choices that the rules allow, as arrays.

What an engine executes is in schema/rules.py. Of that, some combinations are never enumerated unless they are asked for:

    tp             beyond the domain of the fastest link: its collectives are on the critical path of every layer, and slower there
    1f1b           gpipe takes as long and holds no less; our runtime needs it for batches that do not fill the pipeline
    micro-batches  above MAX_MICRO_BATCH_SIZE sequences
    dp_shard       for other engines than ours: 1, what lies in one domain of each link level, or all. Between two of these the
                   collectives cross the same links, and only memory changes
    states         for engines that shard gradients and optimizer states over more ranks than parameters: over the same steps of
                   link levels, both alike
    chunks         as many as divide a stage's blocks, ceil(blocks / pp), into chunks of equal size; for our runtime two besides
    offloading, partial recompute
    cp_ulysses     ways to split cp that cannot be better than another one (dominance.py)

The first two and the last lose nothing; the others are restrictions of the space, and a certificate speaks of the space that is
left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..cost_models.layouts import LAYOUT_RECOMPUTES, MIXED, OFFLOADS, VOCABULARIES, IntArray, LayoutBatch, not_searched
from ..schema import ClusterSpec, ConfigError, ModelSpec, Workload
from ..schema.layout import NUMBERS, SCHEDULES, Schedule
from ..schema.layout_facts import SPLIT_SCHEDULES, V_SCHEDULES, Facts, model_facts
from ..schema.rules import exchange_rules, rules_of
from ..schema.workload import Engine
from .deadline import Deadline
from .dominance import exchanges_worth_trying

MAX_MICRO_BATCH_SIZE = 64
"""Sequences; larger micro-batches only add memory once the matrix products are saturated."""

_ZERO_STAGES: dict[Engine, tuple[int, ...]] = {"megatron": (0, 1)}
"""What is enumerated where an engine has not all of 0 to 3; asking for another one names the engine's rule."""

_LEVELS_UNDER_ZERO_3: tuple[Engine, ...] = ("fsdp2", "deepspeed")
"""Engines that keep parameters within fewer ranks than gradients and optimizer states (schema/rules.py)."""

_FACTS = (*NUMBERS, "sequence_parallel")

_LEFT = ("tp", "cp", "pp", "dp_shard")
"""Degrees that are chosen; dp_replicate is what they leave."""

Columns = dict[str, IntArray]


@dataclass(frozen=True)
class Space:
    """Layouts that satisfy every rule, and for each rule how many combinations it excluded."""

    batch: LayoutBatch
    excluded: dict[str, int]

    @property
    def num_excluded(self) -> int:
        """Combinations that some rule excluded."""
        return sum(self.excluded.values())


def divisors(n: int) -> list[int]:
    """All divisors of n, increasing."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def build_space(
    model: ModelSpec,
    workload: Workload,
    cluster: ClusterSpec,
    fixed: Mapping[str, Any],
    *,
    runnable: bool = False,
    deadline: Deadline | None = None,
) -> Space:
    """Enumerate, then keep what satisfies ``fixed`` and every rule of schema/rules.py for the workload's engine.

    Args:
        model, workload, cluster: what to train, how and where.
        fixed: fields of a layout to keep.
        runnable: only what our own runtime executes in this version.
        deadline: unset, the enumeration takes the time it takes.

    Raises:
        ConfigError: nothing is left; the message names the rules that excluded the most.
        SolverLimitError: the deadline came first.
    """
    if fixed.get("offload") == "scheduled":
        raise ConfigError("this command does not search offload schedules", help="plan --offload auto does")
    deadline = deadline or Deadline(float("inf"))
    columns = _enumerate(model, workload, cluster, fixed, runnable=runnable, deadline=deadline)
    facts = _all_facts(columns, model, workload, cluster, fixed)
    keep = np.ones(len(columns["tp"]), dtype=bool)
    excluded, reasons, decisive = {}, [], []
    for rule in rules_of(workload.engine, runnable=runnable):
        deadline.require(f"checking {len(keep)} layouts against the rules")
        holds = np.broadcast_to(np.asarray(rule.holds(facts), dtype=bool), keep.shape)
        broken = np.flatnonzero(keep & ~holds)
        excluded[rule.name] = len(broken)
        if len(broken):
            reasons.append((len(broken), f"{rule.reason(_facts_of(facts, broken[0]))}   [{rule.name}]"))
        if len(keep) and not holds.any():  # by itself it excludes everything
            decisive.append((len(keep), f"{rule.reason(_facts_of(facts, 0))}   [{rule.name}]"))
        keep &= holds
    if not keep.any():
        raise _nothing_left(model, workload, cluster, fixed, decisive or reasons)
    columns = _select(columns | {"num_microbatches": np.asarray(facts.num_microbatches)}, keep)
    columns = _with_recompute(columns, fixed, mixes=not cluster.parts)
    if workload.engine == "fsdp2":  # as the rule split_backward_keeps_activations, which saw what is asked for only
        columns = _select(columns, ~_splits_backward(columns) | (columns["recompute"] == 0))
    arrays: dict[str, Any] = columns | _unsearched(len(columns["tp"]), fixed)
    return Space(LayoutBatch(**arrays), excluded)


def _all_facts(
    columns: Columns, model: ModelSpec, workload: Workload, cluster: ClusterSpec, fixed: Mapping[str, Any]
) -> Facts:
    """What the rules look at, of every row."""
    degrees: dict[str, Any] = {name: columns[name] for name in _FACTS}
    return Facts(
        **degrees,
        offloads=int(fixed.get("offload", "none") != "none" or fixed.get("offload_activations", 0) > 0),
        recomputes=int(fixed.get("recompute", "none") != "none"),
        recompute_fraction=fixed.get("recompute_fraction", 1.0),
        schedule=columns["schedule"],
        world_size=cluster.num_devices,
        scaleup_domain=cluster.scaleup_domain,
        seq_len=workload.seq_len,
        global_batch_size=workload.global_batch_size,
        fused_attention=workload.attention == "flash",
        vocabulary_is_split=int(fixed.get("vocabulary") == "split"),
        **model_facts(model),
    )


def _with_recompute(c: Columns, fixed: Mapping[str, Any], *, mixes: bool) -> Columns:
    """The given recompute; else one for each block where ranks have one stage of 1f1b or gpipe, and every uniform one elsewhere.

    Without ``mixes`` every one is uniform: stages on devices that differ are cut with one choice for all.
    """
    plain = np.isin(c["schedule"], [SCHEDULES.index(name) for name in ("1f1b", "gpipe")])
    mixed = mixes & plain & (c["num_model_chunks"] == 1) & (fixed.get("vocabulary", "ends") == "ends")
    if "recompute" in fixed:
        given = _cross(c, "recompute", [LAYOUT_RECOMPUTES.index(fixed["recompute"])])
        if fixed["recompute"] != "mixed":
            return given
        if not mixed.any():
            raise ConfigError(
                "recompute=mixed is planned for one stage a rank under 1f1b or gpipe, on devices that are alike"
            )
        return _select(given, mixed)
    mixed &= "recompute_fraction" not in fixed
    return _cross(c, "recompute", list(range(MIXED + 1)), lambda c: _takes(c["recompute"], np.repeat(mixed, MIXED + 1)))


def _takes(recompute: IntArray, mixed: NDArray[np.bool_]) -> NDArray[np.bool_]:
    return np.asarray((recompute == MIXED) == mixed)


def _unsearched(size: int, fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Columns that are as ``fixed`` says, or without what they stand for."""
    columns = not_searched(size)
    given: dict[str, Any] = {name: fixed[name] for name in columns if name in fixed}
    if "offload" in given:
        given["offload"] = OFFLOADS.index(given["offload"])
    if "vocabulary" in given:
        given["vocabulary"] = VOCABULARIES.index(given["vocabulary"])
    given |= {"offload_to_storage": int(fixed.get("offload_to") == "storage")}
    return columns | {name: np.full_like(columns[name], value) for name, value in given.items()}


def _enumerate(
    model: ModelSpec,
    workload: Workload,
    cluster: ClusterSpec,
    fixed: Mapping[str, Any],
    *,
    runnable: bool,
    deadline: Deadline,
) -> Columns:
    """Every combination of degrees whose product is the world size, with every other choice; columns [N]."""
    world, is_ours = cluster.num_devices, workload.engine == "fsdp2"
    all_of = divisors(world)
    in_domain = divisors(cluster.scaleup_domain)

    def left(c: Mapping[str, IntArray]) -> IntArray:
        taken = np.ones_like(c["tp"])
        for name in _LEFT:
            taken = taken * c.get(name, 1)
        return np.maximum(world // taken, 1)

    def cross(
        c: Columns, name: str, options: Sequence[int], allowed: Callable[[Mapping[str, IntArray]], NDArray[np.bool_]]
    ) -> Columns:
        deadline.require(f"enumerating layouts ({len(c['tp']) if c else 1} up to {name})")
        return _cross(c, name, [int(fixed[name])]) if name in fixed else _cross(c, name, options, allowed)

    c: Columns = {}
    c = cross(c, "tp", all_of if is_ours else in_domain, lambda c: world % c["tp"] == 0)
    c = cross(c, "cp", all_of, lambda c: _divides(c, "cp", left))
    sizes = [d for d in divisors(workload.global_batch_size) if d <= MAX_MICRO_BATCH_SIZE]
    sizes = [int(fixed["micro_batch_size"])] if "micro_batch_size" in fixed else sizes
    c = cross(c, "cp_ulysses", all_of, _always)
    worth = np.ones((len(c["tp"]), len(sizes)), dtype=bool)
    if "cp_ulysses" not in fixed:
        c = _select(c, _can_exchange(c, model, workload, cluster))
        worth = exchanges_worth_trying(c, sizes, model, workload, cluster)
        ever = np.flatnonzero(worth.any(axis=1))
        c, worth = {name: column[ever] for name, column in c.items()}, worth[ever]
    c["split_idx"] = np.arange(len(c["tp"]))
    c = cross(c, "pp", all_of, lambda c: _divides(c, "pp", left) & (c["pp"] <= model.num_blocks))
    chunks = list(range(1, -(-model.num_blocks // 2) + 1))
    c = cross(c, "num_model_chunks", chunks, lambda c: _equal_chunks(c, model.num_blocks, is_ours=is_ours))
    islands = [level.domain_size for level in cluster.levels]
    c = cross(c, "dp_shard", all_of, lambda c: _divides(c, "dp_shard", left) & (runnable | _fills(c, islands, left)))
    c = _cross(c, "dp_replicate", [fixed["dp_replicate"]]) if "dp_replicate" in fixed else c | {"dp_replicate": left(c)}
    c = cross(c, "zero_stage", _ZERO_STAGES.get(workload.engine, (0, 1, 2, 3)), _has_zero_stage)
    c = _select(c, _has_zero_stage(c))
    c = _with_levels(c, workload.engine, fixed, islands, runnable=runnable)
    c = cross(c, "micro_batch_size", sizes, lambda c: _fits_batch(c, workload.global_batch_size))
    c = _select(c, worth[c.pop("split_idx"), np.searchsorted(sizes, c["micro_batch_size"])])
    experts = list(model_facts(model)["expert_counts"])
    c = cross(c, "ep", divisors(int(np.gcd.reduce(experts))) if experts else [1], _always)
    # A given ep that does not fold onto the ranks is left to the rules, which say so.
    c = cross(c, "etp", in_domain if experts else [1], lambda c: _folds(c) | (("ep" in fixed) & (c["etp"] == 1)))
    return _with_sequence_and_schedule(c, workload, fixed)


def _cross(
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


def _select(columns: Columns, keep: NDArray[np.bool_]) -> Columns:
    if keep.all():
        return columns
    rows = np.flatnonzero(keep)
    return {name: column[rows] for name, column in columns.items()}


def _always(c: Mapping[str, IntArray]) -> NDArray[np.bool_]:
    return np.ones_like(c["tp"], dtype=bool)


def _can_exchange(c: Columns, model: ModelSpec, workload: Workload, cluster: ClusterSpec) -> NDArray[np.bool_]:
    """Splits of cp that the engine takes; a cp that it does not take at all is left to the rules, which say so."""
    ones = np.ones_like(c["tp"])
    facts = _all_facts(dict.fromkeys(_FACTS, ones) | {"schedule": ones} | c, model, workload, cluster, {})
    holds = np.all([np.broadcast_to(rule.holds(facts), ones.shape) for rule in exchange_rules(workload.engine)], axis=0)
    group = np.unique(c["tp"] * (1 << 32) + c["cp"], return_inverse=True)[1]
    is_taken = np.bincount(group, weights=holds)[group] > 0
    return np.asarray(holds | (~is_taken & (c["cp_ulysses"] == 1)))


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


def _with_levels(
    c: Columns, engine: Engine, fixed: Mapping[str, Any], islands: Sequence[int], *, runnable: bool
) -> Columns:
    """Where gradients and optimizer states may be sharded over more ranks than parameters: a domain of a link level, or all."""
    dp = c["dp_replicate"] * c["dp_shard"]
    widths = [np.ones_like(dp)]
    if given := [int(fixed[name]) for name in ("optimizer_shard", "gradient_shard") if name in fixed]:
        widths = [np.full_like(dp, given[0])]
    elif not runnable and engine in _LEVELS_UNDER_ZERO_3:
        widths += [np.gcd(np.maximum(size // (c["tp"] * c["cp"]), 1), dp) for size in islands] + [dp]
    rows = []
    for idx, width in enumerate(widths):
        keep = np.asarray((idx == 0) | ((c["zero_stage"] == 3) & (width > c["dp_shard"])))
        for earlier in widths[:idx]:
            keep &= width != earlier
        of_gradients = np.where(c["zero_stage"] == 3, width, 1)
        levels = {"optimizer_shard": width, "gradient_shard": of_gradients}
        levels |= {name: np.full_like(dp, fixed[name]) for name in levels if name in fixed}
        rows.append(_select(c | levels, np.broadcast_to(keep, dp.shape)))
    return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}


def _has_zero_stage(c: Mapping[str, IntArray]) -> NDArray[np.bool_]:
    """Ranks to shard over, if and only if something is sharded; context ranks alone may be."""
    stage = c["zero_stage"]
    return np.asarray(((c["dp_shard"] == 1) | (stage > 0)) & ((c["dp_shard"] * c["cp"] > 1) | (stage == 0)))


def _folds(c: Mapping[str, IntArray]) -> NDArray[np.bool_]:
    """Experts fill the ranks of a stage; etp = tp without ep is the same as no axes of their own."""
    ranks = c["dp_replicate"] * c["dp_shard"] * c["cp"] * c["tp"]
    return np.asarray((ranks % (c["ep"] * c["etp"]) == 0) & ((c["ep"] > 1) | (c["etp"] == 1) | (c["etp"] != c["tp"])))


def _fits_batch(c: Mapping[str, IntArray], global_batch_size: int) -> NDArray[np.bool_]:
    """The micro-batch divides what a data-parallel rank gets of the batch."""
    per_rank = np.maximum(global_batch_size // (c["dp_replicate"] * c["dp_shard"]), 1)
    return np.asarray(per_rank % c["micro_batch_size"] == 0)


def _equal_chunks(c: Mapping[str, IntArray], num_blocks: int, *, is_ours: bool) -> NDArray[np.bool_]:
    """As many chunks as divide the blocks of a stage, or the two of our V schedules; each of them has a block."""
    chunks, pp = c["num_model_chunks"], c["pp"]
    divide = ((is_ours & (chunks == 2)) | (-(-num_blocks // pp) % chunks == 0)) & (chunks * pp <= num_blocks)
    return np.asarray((chunks == 1) | ((pp > 1) & divide))


def _splits_backward(c: Columns) -> NDArray[np.bool_]:
    return np.isin(c["schedule"], [SCHEDULES.index(schedule) for schedule in SPLIT_SCHEDULES])


def _with_split_backward(c: Columns, microbatches: IntArray) -> Columns:
    """Beside every row those with the schedules that postpone gradients of weights, where they are defined."""
    chunks, pp = c["num_model_chunks"], c["pp"]
    fills = (pp > 1) & (microbatches >= pp) & (c["zero_stage"] <= 1)
    where: dict[Schedule, NDArray[np.bool_]] = {
        "zb-h1": fills & ((chunks == 1) | (microbatches % pp == 0)),
        "zb-h2": fills & (chunks == 1),
        **dict.fromkeys(V_SCHEDULES, fills & (chunks == 2)),
    }
    rows = [c] + [
        _select(c, keep) | {"schedule": np.full(int(keep.sum()), SCHEDULES.index(name), dtype=np.int64)}
        for name, keep in where.items()
    ]
    return {name: np.concatenate([row[name] for row in rows]) for name in c}


def _with_sequence_and_schedule(c: Columns, workload: Workload, fixed: Mapping[str, Any]) -> Columns:
    """Sequence parallelism wherever it is possible, and the schedules."""
    tp, pp = c["tp"], c["pp"]
    sequence_parallel = (tp > 1) & (workload.seq_len % (c["cp"] * tp) == 0)
    possible = np.ones_like(tp, dtype=bool)
    if "sequence_parallel" in fixed:
        sequence_parallel = np.full(tp.shape, fixed["sequence_parallel"], dtype=bool)
        possible = ~sequence_parallel | (tp > 1)
    microbatches = workload.global_batch_size // (c["dp_replicate"] * c["dp_shard"] * c["micro_batch_size"])
    fills = (microbatches >= pp) | (pp == 1) | (workload.engine != "fsdp2")
    schedule = np.where(fills, SCHEDULES.index("1f1b"), SCHEDULES.index("gpipe"))
    if "schedule" in fixed:
        schedule = np.full_like(schedule, SCHEDULES.index(fixed["schedule"]))
        # An order is made over a V (planner/synthesis.py), where the named schedules that it stands in for are defined.
        possible &= (fixed["schedule"] != "synthesised") | ((c["num_model_chunks"] == 2) & (microbatches >= pp))
    if fixed.get("offload") == "parameters":
        possible &= (c["zero_stage"] == 3) | (c["zero_stage"] == 0)
    c = c | {"sequence_parallel": sequence_parallel.astype(np.int64), "schedule": schedule}
    if "schedule" not in fixed and workload.engine == "fsdp2":
        return _with_split_backward(_select(c, possible), microbatches[possible])
    return _select(c, possible)


def _facts_of(facts: Facts, idx: int) -> Facts:
    """The facts of one layout, as numbers."""
    values: dict[str, Any] = {field.name: getattr(facts, field.name) for field in fields(facts)}
    numbers: dict[str, Any] = {name: int(v[idx]) if isinstance(v, np.ndarray) else v for name, v in values.items()}
    return Facts(**numbers)


def _nothing_left(
    model: ModelSpec, workload: Workload, cluster: ClusterSpec, fixed: Mapping[str, Any], reasons: list[tuple[int, str]]
) -> ConfigError:
    wanted = ", ".join(f"{name}={value}" for name, value in fixed.items())
    if not reasons:
        reasons = [
            (
                1,
                "zero_stage above 0 needs dp_shard > 1 and dp_shard > 1 needs it; sequence_parallel needs tp > 1   [layout]",
            )
        ]
    if wanted:
        help_ = "loosen --fix"
    else:
        help_ = f"use a global batch size that divides over {cluster.num_devices} devices or a divisor of them"
    return ConfigError(
        f"no layout of {model.name} on {cluster.num_devices} devices with global batch size {workload.global_batch_size}"
        + (f" and {wanted}" if wanted else "")
        + " can be executed",
        details=tuple(reason for _, reason in sorted(reasons, reverse=True)[:4]),
        help=help_,
    )
