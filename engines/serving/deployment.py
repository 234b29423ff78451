"""What the files of all serving engines have in common: where instances lie, their scripts, and the load that tests them.

A script takes the number of its node and starts that node's part of every instance that lies there. Names of the nodes come from
the variable HOSTS; each server listens on its own node's address only, on one node on the loopback.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from ...schema.model import ModelSpec
from ...schema.serving import Pool, PrefixTier
from ...schema.serving_plan import ServingPlan, pools_title
from ..adapter import Limit, comment

Value = str | int | float | bool | Sequence[int] | Mapping[str, Any]
Options = dict[str, Value]
"""Options without their dashes; True: a flag; a mapping is written as JSON."""

SERVE, ROUTER, LOAD = "serve.sh", "router.sh", "load.sh"
PORT, FIRST_PORT = 8000, 8100
"""Of the deployment, and of its first instance."""

_META_PORT = 20_000
"""Added to an instance's port: where the parts of an instance on several nodes meet."""

NEEDS_CHECKPOINT = frozenset({"int8", "nvfp4", "mxfp4", "int4"})
"""Types of weights that no engine makes of a checkpoint in 16 bits as it loads."""


@dataclass(frozen=True)
class Instance:
    """An engine instance on nodes.

    Attributes:
        pool: its number; idx: among the instances of the deployment.
        nodes: that it lies on; devices: of each of them.
    """

    pool: int
    idx: int
    nodes: tuple[int, ...]
    devices: tuple[int, ...]

    @property
    def port(self) -> int:
        """Return where it listens."""
        return FIRST_PORT + self.idx


def instances(plan: ServingPlan) -> tuple[Instance, ...]:
    """Return where each instance lies: on nodes of its device in order, each filled before the next; large ones take entire nodes.

    An instance for which no nodes are left has none.
    """
    sizes, of_device = _nodes(plan)
    free = dict(sizes)
    made: list[Instance] = []
    for pool_idx, pool in enumerate(plan.pools):
        size, candidates = pool.layout.num_devices, of_device.get(pool.device, [])
        for _ in range(pool.replicas):
            nodes = [node for node in candidates if free[node] >= size][:1]
            if not nodes:
                entire = [node for node in candidates if free[node] == sizes[node]]
                total = list(accumulate(sizes[node] for node in entire))
                nodes = entire[: next((idx + 1 for idx, count in enumerate(total) if count >= size), 0)]
            each = size // len(nodes) if nodes else 0
            begin = sizes[nodes[0]] - free[nodes[0]] if nodes else 0
            made.append(Instance(pool_idx, len(made), tuple(nodes), tuple(range(begin, begin + each))))
            free |= {node: free[node] - each if len(nodes) == 1 else 0 for node in nodes}
    return tuple(made)


def _nodes(plan: ServingPlan) -> tuple[dict[int, int], dict[str, list[int]]]:
    """Return the devices of each node of the cluster, and the nodes of each kind of device."""
    sizes: dict[int, int] = {}
    of_device: dict[str, list[int]] = {}
    for group in plan.cluster.groups:
        numbers = range(len(sizes), len(sizes) + group.num_nodes)
        of_device.setdefault(group.device.name, []).extend(numbers)
        sizes |= dict.fromkeys(numbers, group.devices_per_node)
    return sizes, of_device


def _misplaced(plan: ServingPlan) -> list[str]:
    """Return the roles and devices of pools whose instances do not lie on nodes evenly."""
    sizes, _ = _nodes(plan)
    return sorted({
        f"{pool.role} pool on {pool.device}"
        for item in instances(plan)
        for pool in (plan.pools[item.pool],)
        if len(item.nodes) * len(item.devices) != pool.layout.num_devices
        or any(len(item.devices) > sizes[node] for node in item.nodes)
    })  # fmt: skip


PLACED = Limit(
    "placed",
    lambda p: not _misplaced(p),
    lambda p: (
        f"{pools_title(p.pools)} on the nodes of {p.cluster.name}: instances of the {', the '.join(_misplaced(p))} find no "
        "nodes, or would be cut unevenly over them"
    ),
    "plan with --fix tp=N so that instances fill nodes",
)


IN_ONE_PLACE = Limit(
    "attention_and_feed_forward",
    lambda p: p.mode != "afd",
    lambda p: (
        f"{pools_title(p.pools)}: no serving engine's release has attention and feed-forward parts on devices of their own"
    ),
    "plan with --modes agg,disagg",
)


def spans_nodes(plan: ServingPlan, pool: Pool) -> bool:
    """Return whether an instance of a pool is larger than a node."""
    largest = max(
        (group.devices_per_node for group in plan.cluster.groups if group.device.name == pool.device), default=0
    )
    return pool.layout.num_devices > largest


def pool_limit(name: str, broken: Callable[[Pool], str], fix: str) -> Limit:
    """Return a limit that every pool has to keep; ``broken`` says why it does not, or nothing."""

    def reasons(plan: ServingPlan) -> list[str]:
        return [f"{pool.role} pool: {reason}" for pool in plan.pools if (reason := broken(pool))]

    return Limit(name, lambda p: not reasons(p), lambda p: "; ".join(reasons(p)), fix)


def keeps_prefixes(plan: ServingPlan, pool: Pool) -> bool:
    """Return whether the instances of a pool look for prefixes that they have."""
    return plan.serving.prefix_cache and pool.prefixes != "none"


def no_prefixes_on(tier: PrefixTier, fix: str) -> Limit:
    """Return the limit of an engine that has no prefixes at a place."""
    return pool_limit(
        f"prefixes_on_{tier}",
        lambda pool: f"its prefixes lie in {tier}, where the engine has none" if pool.prefixes == tier else "",
        fix,
    )


def hub_name(plan: ServingPlan) -> str:
    """Return what an engine loads: the model's name on the hub where that is known, else its name here."""
    return hub_name_of(plan.model)


def hub_name_of(model: ModelSpec) -> str:
    """Return the same of any model."""
    match = re.match(r"https://huggingface\.co/([\w.-]+/[\w.-]+)", model.source)
    return match[1] if match else model.name


def drafter_named(engine: str) -> Limit:
    """Return the limit that what drafts has a name to load."""
    return pool_limit(
        "drafter_named",
        lambda pool: (
            "a trained head drafts, of which the plan knows no name"
            if pool.speculate is not None and pool.speculate.method == "eagle3" and pool.speculate.model is None
            else ""
        ),
        f"plan with --speculate eagle3:k,model=WHAT_{engine.upper()}_LOADS,...",
    )


def no_adapters(engine: str) -> Limit:
    """Return the limit that requests name no adapters."""
    return pool_limit(
        "no_adapters",
        lambda pool: "its requests name adapters, whose folders this export does not write" if pool.adapters else "",
        f"plan without --adapters, or export to vllm, in place of {engine}",
    )


def no_experts_on_host(engine: str) -> Limit:
    """Return the limit that all experts are on the devices."""
    return pool_limit(
        "no_experts_on_host",
        lambda pool: "experts in the host's memory, where the engine has none" if pool.experts_on_host else "",
        f"plan without --experts-on-host, or with by=compute and export to sglang, in place of {engine}",
    )


def no_shares(why: str) -> Limit:
    """Return the limit of an engine whose phases do not share devices as a plan has it."""
    return pool_limit(
        "no_shares",
        lambda pool: (
            f"prompts on {pool.prefill_eighths}/8 of the multiprocessors while rows decode on the others: {why}"
            if pool.prefill_eighths is not None
            else ""
        ),
        "plan with --modes agg,disagg",
    )


def drafter(pool: Pool) -> str | None:
    """Return what an engine loads to draft tokens; None where the model does it."""
    drafting = pool.speculate
    if drafting is None or drafting.model is None:
        return None
    return hub_name_of(ModelSpec.named(drafting.model)) if drafting.method == "draft" else drafting.model


def longest_request(plan: ServingPlan, pool: Pool) -> int:
    """Return the tokens of the longest request that an instance can hold: the model's, or what its cache takes."""
    capacity = pool.limits.cache_blocks * pool.limits.block_size
    entire = pool.limits.max_batched_tokens if pool.limits.chunk is None else capacity
    return min(plan.model.max_seq_len or capacity, capacity, entire)


def arguments(options: Options) -> list[str]:
    """Return options as a process takes them."""
    words: list[str] = []
    for name, value in options.items():
        flag = f"--{name}"
        if value is True:
            words.append(flag)
        elif isinstance(value, Mapping):
            words += [flag, json.dumps(value)]
        elif isinstance(value, (str, int, float)):
            words += [flag, str(value)]
        else:
            words += [flag, *map(str, value)]
    return words


def title(plan: ServingPlan, engine: str, version: str) -> str:
    """Return the comment at the top of a file."""
    return comment(f"{engine} {version}: {plan.model.name}, {pools_title(plan.pools)}, {plan.num_devices} devices")


def begin_script(plan: ServingPlan, engine: str, version: str, *, names_nodes: bool = True) -> str:
    """Return the beginning of a script: the model, and where it names nodes those of all."""
    begin = (
        "#!/usr/bin/env bash\n"
        + title(plan, engine, version)
        + "set -euo pipefail\n"
        + f"model={shlex.quote(hub_name(plan))}\n"
        + 'MODEL=${MODEL:-"$model"}\n'
    )
    if not names_nodes:
        return begin
    count = 1 + max(node for item in instances(plan) for node in item.nodes)
    default = "127.0.0.1" if count == 1 else ""
    return (
        begin
        + f'read -r -a HOSTS <<< "${{HOSTS:-{default}}}"\n'
        + f"if (( ${{#HOSTS[@]}} < {count} )); then\n"
        + f"  echo 'HOSTS=\"first second ...\" must name {count} nodes' >&2; exit 2\nfi\n"
    )


def serve_script(
    plan: ServingPlan,
    *,
    engine: str,
    version: str,
    command: Callable[[Pool], str],
    on_nodes: Callable[[Instance, Pool, int], str | None],
) -> str:
    """Return the script that starts a node's part of the deployment.

    Args:
        command: of an instance in bash, with its devices in ``$1``, its port in ``$2`` and its number in ``$3``.
        on_nodes: what an instance on several nodes is told besides, by the position of the node among its nodes; bash. None: it is
            not started there.
    """
    lines = [begin_script(plan, engine, version), "NODE=${1:-0}\n"]
    for number, pool in enumerate(plan.pools):
        lines.append(f"{_function(plan, number)}() {{ # devices, port, number, options\n{command(pool)}\n}}\n")
    by_node: dict[int, list[str]] = {}
    for item in instances(plan):
        for rank, node in enumerate(item.nodes):
            more = on_nodes(item, plan.pools[item.pool], rank) if len(item.nodes) > 1 else ""
            by_node.setdefault(node, [])
            if more is None:
                continue
            devices = ",".join(map(str, item.devices))
            call = f"{_function(plan, item.pool)} {devices} {item.port} {item.idx} {more}".rstrip()
            by_node[node].append(f"    {call} &\n")
    lines.append("trap 'jobs -p | xargs -r kill 2>/dev/null || true' EXIT\ncase $NODE in\n")
    idle = "    echo started from another node\n"
    lines += [f"  {node})\n{''.join(calls) or idle}    ;;\n" for node, calls in sorted(by_node.items())]
    lines.append('  *) echo "no node $NODE in this plan" >&2; exit 2 ;;\nesac\nwait\n')
    return "".join(lines)


def _function(plan: ServingPlan, number: int) -> str:
    pool = plan.pools[number]
    return pool.role if sum(other.role == pool.role for other in plan.pools) == 1 else f"{pool.role}_{number}"


def meeting_port(item: Instance) -> int:
    """Return the port at which the parts of an instance meet."""
    return item.port + _META_PORT


def urls(plan: ServingPlan, role: str | None = None) -> list[str]:
    """Return the addresses of the instances of a role in bash; None: of all."""
    return [
        f'"http://${{HOSTS[{item.nodes[0]}]}}:{item.port}"'
        for item in instances(plan)
        if role in (None, plan.pools[item.pool].role)
    ]


def router_script(plan: ServingPlan, engine: str, version: str, lines: Sequence[str]) -> str:
    """Return the script of what spreads requests over the instances."""
    return begin_script(plan, engine, version) + " \\\n  ".join(lines) + "\n"


def entry_port(plan: ServingPlan, *, routed: bool) -> int:
    """Return where requests go: to the router, or to the only instance."""
    return PORT if routed else instances(plan)[0].port


def common_notes(plan: ServingPlan, engine: str) -> tuple[str, ...]:
    """Return what of the plan an engine is not told in so many words."""
    lines = []
    if plan.serving.engine != engine:
        lines.append(
            f"scheduler and overheads: the plan counts on {plan.serving.engine}'s; plan with --engine {engine} for its own"
        )
    blocks = ", ".join(
        f"{pool.limits.cache_blocks} x {pool.limits.block_size} tokens ({pool.role})" for pool in plan.pools
    )
    lines.append(f"cache: the engine measures what is free; the plan counts on {blocks} on each attention rank")
    if any(0 < route.share < 1 for route in plan.routes):
        lines.append("routes: shares of classes over pools; the router sees load, not classes")
    return tuple(lines)


def to_set(plan: ServingPlan) -> tuple[str, ...]:
    """Return what stays the user's to say."""
    lines = ["MODEL: a folder or a name on the hub, where it is another than that in the files"]
    if kinds := sorted({pool.weights for pool in plan.pools} & NEEDS_CHECKPOINT):
        lines.append(
            f"MODEL: a checkpoint whose weights are in {', '.join(kinds)}; engines do not convert to it as they load"
        )
    if any(node for item in instances(plan) for node in item.nodes):
        lines.append("HOSTS: names of the nodes, in the order of the plan; serve.sh N on each")
    return tuple(lines)
