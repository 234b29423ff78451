"""What can be chosen for degrees without changing what their layers cost: sharding of states, schedule, recompute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..cost_models.layouts import LAYOUT_RECOMPUTES, MIXED, IntArray
from ..schema import ConfigError, Workload
from ..schema.layout import SCHEDULES, Schedule
from ..schema.layout_facts import SPLIT_SCHEDULES, V_SCHEDULES
from ..schema.workload import Engine
from .columns import Columns, cross, select

ZERO_STAGES: dict[Engine, tuple[int, ...]] = {"megatron": (0, 1)}
"""What is enumerated where an engine has not all of 0 to 3; asking for another one names the engine's rule."""

_LEVELS_UNDER_ZERO_3: tuple[Engine, ...] = ("fsdp2", "deepspeed")
"""Engines that keep parameters within fewer ranks than gradients and optimizer states (schema/rules.py)."""


def with_levels(
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
        rows.append(select(c | levels, np.broadcast_to(keep, dp.shape)))
    return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}


def has_zero_stage(c: Mapping[str, IntArray]) -> NDArray[np.bool_]:
    """Ranks to shard over, if and only if something is sharded; context ranks alone may be."""
    stage = c["zero_stage"]
    return np.asarray(((c["dp_shard"] == 1) | (stage > 0)) & ((c["dp_shard"] * c["cp"] > 1) | (stage == 0)))


def splits_backward(c: Columns) -> NDArray[np.bool_]:
    """Rows whose schedule postpones gradients of weights."""
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
        select(c, keep) | {"schedule": np.full(int(keep.sum()), SCHEDULES.index(name), dtype=np.int64)}
        for name, keep in where.items()
    ]
    return {name: np.concatenate([row[name] for row in rows]) for name in c}


def with_schedule(c: Columns, workload: Workload, fixed: Mapping[str, Any]) -> Columns:
    """The schedules that the micro-batches allow."""
    pp, microbatches = c["pp"], c["num_microbatches"]
    possible = np.ones_like(pp, dtype=bool)
    fills = (microbatches >= pp) | (pp == 1) | (workload.engine != "fsdp2")
    schedule = np.where(fills, SCHEDULES.index("1f1b"), SCHEDULES.index("gpipe"))
    if "schedule" in fixed:
        schedule = np.full_like(schedule, SCHEDULES.index(fixed["schedule"]))
        # An order is made over a V (planner/synthesis.py), where the named schedules that it stands in for are defined.
        possible &= (fixed["schedule"] != "synthesised") | ((c["num_model_chunks"] == 2) & (microbatches >= pp))
    if fixed.get("offload") == "parameters":
        possible &= (c["zero_stage"] == 3) | (c["zero_stage"] == 0)
    c = c | {"schedule": schedule}
    if "schedule" not in fixed and workload.engine == "fsdp2":
        return _with_split_backward(select(c, possible), microbatches[possible])
    return select(c, possible)


def with_recompute(c: Columns, fixed: Mapping[str, Any], *, mixes: bool) -> Columns:
    """The given recompute; else one for each block where ranks have one stage of 1f1b or gpipe, and every uniform one elsewhere.

    Without ``mixes`` every one is uniform: stages on devices that differ are cut with one choice for all.
    """
    plain = np.isin(c["schedule"], [SCHEDULES.index(name) for name in ("1f1b", "gpipe")])
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
