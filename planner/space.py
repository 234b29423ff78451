"""The search space: every combination of degrees and choices that the rules allow, as arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from ..cost_models.layouts import RECOMPUTES, SCHEDULES, IntArray, LayoutBatch, not_searched
from ..schema import ClusterSpec, ConfigError, ModelSpec, Workload
from ..schema.rules import RULES, Facts, model_facts

MAX_MICRO_BATCH_SIZE = 64
"""Sequences; larger micro-batches only add memory once the matrix products are saturated."""


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


def build_space(model: ModelSpec, workload: Workload, cluster: ClusterSpec, fixed: Mapping[str, Any]) -> Space:
    """Enumerate, then keep what satisfies ``fixed`` and every rule of schema/rules.py.

    Raises:
        ConfigError: nothing is left; the message names the rules that excluded the most.
    """
    columns = _enumerate(model, workload, cluster, fixed)
    arrays: dict[str, Any] = dict(columns)
    facts = Facts(
        **{
            name: arrays[name]
            for name in (
                "dp_replicate",
                "dp_shard",
                "cp",
                "tp",
                "pp",
                "ep",
                "etp",
                "num_model_chunks",
                "micro_batch_size",
                "zero_stage",
            )
        },
        sequence_parallel=columns["sequence_parallel"],
        offloads=int(fixed.get("offload", "none") != "none" or fixed.get("offload_activations", 0) > 0),
        recompute_fraction=fixed.get("recompute_fraction", 1.0),
        one_f_one_b=columns["schedule"] == SCHEDULES.index("1f1b"),
        world_size=cluster.num_devices,
        scaleup_domain=cluster.scaleup_domain,
        seq_len=workload.seq_len,
        global_batch_size=workload.global_batch_size,
        **model_facts(model),
    )
    keep = np.ones(len(columns["tp"]), dtype=bool)
    excluded, reasons = {}, []
    for rule in RULES:
        holds = np.broadcast_to(np.asarray(rule.holds(facts), dtype=bool), keep.shape)
        broken = np.flatnonzero(keep & ~holds)
        excluded[rule.name] = len(broken)
        if len(broken):
            reasons.append((len(broken), f"{rule.reason(_facts_of(facts, broken[0]))}   [{rule.name}]"))
        keep &= holds
    if not keep.any():
        raise _nothing_left(model, workload, cluster, fixed, reasons)
    arrays |= not_searched(len(keep))
    batch = LayoutBatch(num_microbatches=facts.num_microbatches, **arrays).select(keep)
    return Space(batch, excluded)


def _enumerate(
    model: ModelSpec, workload: Workload, cluster: ClusterSpec, fixed: Mapping[str, Any]
) -> dict[str, IntArray]:
    """Every combination of degrees whose product is the world size, with every other choice; columns [N]."""
    world = cluster.num_devices
    cp = int(fixed.get("cp", 1))
    rows: list[tuple[int, ...]] = []
    for tp in _choices(fixed, "tp", divisors(world)):
        for pp in _choices(fixed, "pp", [d for d in divisors(max(world // (tp * cp), 1)) if d <= model.num_blocks]):
            dp = max(world // (tp * cp * pp), 1)
            for shard in _choices(fixed, "dp_shard", divisors(dp)):
                replicate = _choices(fixed, "dp_replicate", [max(dp // shard, 1)])
                per_rank = max(workload.global_batch_size // dp, 1)
                sizes = [d for d in divisors(per_rank) if d <= MAX_MICRO_BATCH_SIZE]
                for micro in _choices(fixed, "micro_batch_size", sizes):
                    rows.extend((r, shard, tp, pp, micro) for r in replicate)
    grid = np.array(rows, dtype=np.int64).reshape(-1, 5)
    return _with_choices(grid, workload, fixed)


def _with_choices(grid: IntArray, workload: Workload, fixed: Mapping[str, Any]) -> dict[str, IntArray]:
    """Cross degrees [M, 5] with ZeRO stage, sequence parallelism, recompute and schedule."""
    recomputes = [RECOMPUTES.index(r) for r in _choices(fixed, "recompute", list(RECOMPUTES))]
    zero_stages = _choices(fixed, "zero_stage", [0, 1, 2, 3])
    options = np.array([(z, r) for z in zero_stages for r in recomputes], dtype=np.int64)
    repeated = np.repeat(grid, len(options), axis=0)
    zero, recompute = np.tile(options, (len(grid), 1)).T
    dp_replicate, dp_shard, tp, pp, micro = repeated.T
    possible = (dp_shard > 1) == (zero > 0) if fixed.get("cp", 1) == 1 else (dp_shard == 1) | (zero > 0)
    if "sequence_parallel" in fixed:
        sequence_parallel = np.full(tp.shape, fixed["sequence_parallel"], dtype=bool)
        possible &= ~sequence_parallel | (tp > 1)
    else:
        sequence_parallel = (tp > 1) & (workload.seq_len % tp == 0)
    microbatches = workload.global_batch_size // (dp_replicate * dp_shard * micro)
    # 1f1b holds no more than gpipe and takes as long; gpipe is for batches too small to fill the pipeline.
    schedule = np.where((microbatches >= pp) | (pp == 1), SCHEDULES.index("1f1b"), SCHEDULES.index("gpipe"))
    if "schedule" in fixed:
        schedule = np.full_like(schedule, SCHEDULES.index(fixed["schedule"]))
    columns = {
        "dp_replicate": dp_replicate,
        "dp_shard": dp_shard,
        "tp": tp,
        "pp": pp,
        **{name: np.full_like(pp, fixed.get(name, 1)) for name in ("cp", "ep", "etp")},
        "num_model_chunks": np.full_like(pp, fixed.get("num_model_chunks", 1)),
        "micro_batch_size": micro,
        "zero_stage": zero,
        "sequence_parallel": sequence_parallel.astype(np.int64),
        "recompute": recompute,
        "schedule": schedule,
    }
    return {name: column[possible] for name, column in columns.items()}


def _choices(fixed: Mapping[str, Any], name: str, otherwise: list[Any]) -> list[Any]:
    return [fixed[name]] if name in fixed else otherwise


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
