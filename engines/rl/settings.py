"""What exports of post-training plans share: overrides as a script, limits on pools, and what every engine is told of a layout."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from typing import Any

from ...schema.rl_plan import RlPlan
from ...schema.training_plan import TrainingPlan
from ..adapter import Limit, comment

SCRIPT = "run.sh"

ONE_OR_TWO_POOLS = Limit(
    "pools",
    lambda p: len(p.pools) == 1 or (len(p.pools) == 2 and ("generator",) in [pool.roles for pool in p.pools]),
    lambda p: (
        f"pools {', '.join('+'.join(pool.roles) for pool in p.pools)}: it has one for all, or one for the generator alone"
    ),
    'plan with placement = "colocated", or without models that are placed elsewhere',
)
ALL_DEVICES = Limit(
    "devices",
    lambda p: sum(pool.num_devices for pool in p.pools) == p.cluster.num_devices,
    lambda p: f"{sum(pool.num_devices for pool in p.pools)} of {p.cluster.num_devices} devices are used",
    "plan for as many devices as are used",
)
ENTIRE_NODES = Limit(
    "nodes",
    lambda p: (
        len(p.pools) == 1
        or p.cluster.num_nodes == 1
        or all(pool.num_devices % p.cluster.groups[0].devices_per_node == 0 for pool in p.pools)
    ),
    lambda p: "a pool has a part of a node beside entire ones",
    "plan for another number of nodes",
)


ALL_TOGETHER = Limit(
    "fetches",
    lambda p: p.post_training.fetches == 1,
    lambda p: f"samples of a step are fetched in {p.post_training.fetches} parts",
    "plan with fetches = 1",
)
NO_ISLANDS = Limit(
    "islands",
    lambda p: p.post_training.islands == 1,
    lambda p: f"{p.post_training.islands} islands share responses",
    "plan without islands and shared",
)
NO_TEACHER = Limit(
    "teacher",
    lambda p: "teacher" not in p.post_training.roles,
    lambda p: "it has a teacher",
    "plan without [teacher]",
)


def script(head: str, command: str, settings: Mapping[str, Any]) -> str:
    """Return a shell script that calls a command with overrides, one a line."""
    lines = [f"{name}={_text(value)}" for name, value in settings.items()]
    arguments = " \\\n  ".join(map(shlex.quote, lines))
    return f'#!/usr/bin/env bash\n{comment(head)}set -euo pipefail\n\nexec {command} \\\n  {arguments} \\\n  "$@"\n'


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, str) and not re.fullmatch(
        r"[\w./:-]*", value
    ):  # Hydra's grammar: quoted, nothing is interpolated
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'").replace("${", "\\${").replace("\n", " ") + "'"
    return "null" if value is None else str(value)


def nodes_of(plan: RlPlan, pool: int) -> tuple[int, int]:
    """Return the nodes of a pool and its devices on each."""
    size, node = plan.pools[pool].num_devices, plan.cluster.groups[0].devices_per_node
    return (1, size) if size < node else (size // node, node)


def memory_fraction(plan: RlPlan) -> float:
    """Return the part of a device's memory that the generating engine may use: what its largest call takes, or its own default."""
    copy = plan.copy_of("generator")
    assert copy.serving is not None
    if len(plan.pools[copy.pool].roles) == 1:
        return copy.serving.limits.cache_fraction
    used = copy.live_bytes / plan.cluster.weakest_device.memory_bytes
    return round(min(max(used, 0.05), copy.serving.limits.cache_fraction), 2)


def tokens_of_pass(plan: RlPlan, training: TrainingPlan) -> int:
    """Return the tokens of a micro-batch on one rank of context parallelism; the longest sample is no more than one."""
    work = plan.post_training
    tokens = max(training.layout.micro_batch_size * training.workload.seq_len, work.prompt_len + work.max_len)
    return math.ceil(tokens / training.layout.cp)


def same_layout(plan: RlPlan, role: str) -> tuple[str, ...]:
    """Say where a copy that an engine runs under the actor's layout is planned with another one."""
    others = [copy for copy in plan.copies if copy.role == role and copy.training is not None]
    actor = plan.copy_of("actor").training
    assert actor is not None
    return tuple(
        f"the {role}'s layout {copy.layout}: it runs as the actor does"
        for copy in others
        if copy.training is not None
        and copy.training.layout.replace(micro_batch_size=1) != actor.layout.replace(micro_batch_size=1)
    )
