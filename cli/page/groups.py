"""The groups of each axis on nodes and links: which ranks of a group share a node, and which link its traffic crosses.

Nodes whose devices play the same part are drawn once. Of the coordinates of a rank those that tell the most nodes apart are dropped
first, replicas and shards before context ranks before stages, until few enough kinds of nodes remain.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from ...schema.units import GB, IntArray, format_seconds

if TYPE_CHECKING:
    from ...schema import Layout, TrainingPlan

MAX_CARDS = 64
"""Nodes drawn one by one; of more, equal ones are drawn as one card."""

AXES = {
    "tp": ("tensor parallel", "tp"),
    "cp": ("context parallel", "cp"),
    "etp": ("expert tensor parallel", "ep"),
    "ep": ("expert parallel", "ep"),
    "dp_shard": ("data parallel, sharded", "dp"),
    "dp_replicate": ("data parallel, replicated", "dp"),
    "pp": ("pipeline", "pp"),
}
"""Axis of the layout: its title, and the term of the step that its traffic shows in."""


def axis_strides(layout: Layout) -> dict[str, tuple[int, int]]:
    """Return stride and size of each used axis: ranks of a group differ by multiples of the stride."""
    strides, stride = {}, 1
    for name in ("tp", "cp", "dp_shard", "dp_replicate", "pp"):
        strides[name] = (stride, getattr(layout, name))
        stride *= getattr(layout, name)
    if not layout.experts_follow_tp:
        strides |= {"etp": (1, layout.etp), "ep": (layout.etp, layout.ep)}
    return {name: strides[name] for name in AXES if name in strides and strides[name][1] > 1}


def group_map(plan: TrainingPlan) -> dict[str, Any]:
    """Return axes, links and kinds of nodes, as the template and its script read them."""
    layout, cluster = plan.layout, plan.cluster
    device_of_rank = np.array(plan.rank_map)
    rank_of_device = np.argsort(device_of_rank)
    sizes = np.array(cluster.node_sizes)
    node_of_device = np.repeat(np.arange(len(sizes)), sizes)
    strides = axis_strides(layout)
    axes = []
    for name, (stride, size) in strides.items():
        groups = _groups(layout.world_size, stride, size)
        nodes = node_of_device[device_of_rank[groups]]
        num_nodes = np.array([len(set(row)) for row in nodes[: 4 * MAX_CARDS].tolist()])
        level = _outermost_level(plan, device_of_rank[groups], chained=name == "pp")
        seconds = getattr(plan.estimate.breakdown_s, AXES[name][1])
        axes.append(
            {
                "name": name,
                "title": AXES[name][0],
                "stride": stride,
                "size": size,
                "groups": len(groups),
                "nodes": int(num_nodes.max()),
                "level": level,
                "exposed": format_seconds(seconds) if seconds > 0 else "",
                "share": f"{100 * seconds / plan.estimate.step_time_s:.1f} %",
            }
        )
    cards, dropped = _cards(plan, rank_of_device, node_of_device, sizes)
    is_in_order = bool((device_of_rank == np.arange(len(device_of_rank))).all())
    return {
        "axes": axes,
        "levels": _levels(plan, axes),
        "cards": cards,
        "dropped": [AXES[name][0] for name in dropped],
        "num_nodes": len(sizes),
        "script": {
            "axes": axes,
            "levels": [level["title"] for level in _levels(plan, axes)],
            "pp": [layout.stage_ranks, layout.pp],
            "ranks": None if is_in_order else rank_of_device.tolist(),
            "sizes": _as_runs(sizes.tolist()),
            "cards": _as_runs(_card_of_node(cards, len(sizes))),
        },
    }


def _groups(world_size: int, stride: int, size: int) -> IntArray:
    """Return the ranks of every group of an axis [groups, size]."""
    ranks = np.arange(world_size)
    first = ranks[(ranks // stride) % size == 0]
    return np.asarray(first[:, None] + stride * np.arange(size)[None, :])


def _outermost_level(plan: TrainingPlan, devices: IntArray, *, chained: bool) -> int:
    """Return the outermost level that a group's traffic crosses; of a pipeline, between neighbours."""
    pairs = [(devices[:, :-1], devices[:, 1:])] if chained else [(devices[:, :1], devices)]
    for idx, level in enumerate(plan.cluster.levels):
        if all((one // level.domain_size == other // level.domain_size).all() for one, other in pairs):
            return idx
    return len(plan.cluster.levels) - 1


def _levels(plan: TrainingPlan, axes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for idx, level in enumerate(plan.cluster.levels):
        if level.domain_size == 1:
            continue
        link, node = level.link, plan.cluster.largest_node
        num_domains = plan.cluster.num_devices // level.domain_size
        where = "within each node" if level.domain_size == node else f"joins {level.domain_size:,} devices"
        if level.domain_size == plan.cluster.num_devices and level.domain_size > node:
            where = f"joins all {plan.cluster.num_nodes:,} nodes"
        rows.append(
            {
                "idx": idx,
                "title": (link.title or link.name).split("(")[0].split(",")[0].strip(),
                "rate": f"{link.bandwidth_bytes_per_s / GB:g} GB/s",
                "shared": "" if link.shared_by == "device" else f" a {link.shared_by}",
                "where": where,
                "domains": num_domains,
                "axes": [axis["name"] for axis in axes if axis["level"] == idx],
            }
        )
    return rows


def _cards(
    plan: TrainingPlan, rank_of_device: IntArray, node_of_device: IntArray, sizes: IntArray
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the kinds of nodes, each with its nodes as runs and the ranks of the first, and the axes that were dropped."""
    strides = axis_strides(plan.layout)
    names = [name for name in ("dp_replicate", "dp_shard", "cp", "tp", "pp") if name in strides]
    starts = np.concatenate([[0], np.cumsum(sizes)])
    device_names = [group.device.name for group in plan.cluster.groups for _ in range(group.num_nodes)]
    dropped: list[str] = []
    while True:
        remaining = [name for name in names if name not in dropped]
        coordinates = np.array([(rank_of_device // strides[name][0]) % strides[name][1] for name in remaining])
        nodes_of_key: dict[Any, list[int]] = {}
        for node, (first, last) in enumerate(pairwise(starts.tolist())):
            key = (device_names[node], last - first, coordinates[:, first:last].tobytes() if remaining else b"")
            nodes_of_key.setdefault(node if not dropped else key, []).append(node)
        if len(nodes_of_key) <= MAX_CARDS or not remaining:
            break
        dropped.append(remaining[0])
    cards = []
    for nodes in nodes_of_key.values():
        ranks = rank_of_device[starts[nodes[0]] : starts[nodes[0] + 1]]
        stages = sorted({int(rank) // plan.layout.stage_ranks for rank in ranks})
        runs = _runs(nodes)
        cards.append(
            {
                "nodes": runs,
                "first": nodes[0],
                "count": len(nodes),
                "title": f"node {nodes[0]}" if len(nodes) == 1 else _counted(runs),
                "device": device_names[nodes[0]] if len(plan.cluster.groups) > 1 else "",
                "stage": f"pp {_span(stages)}" if plan.layout.pp > 1 else "",
                "ranks": ranks.tolist(),
            }
        )
    return cards, dropped


def _runs(numbers: list[int]) -> list[tuple[int, int]]:
    """Return ascending numbers as runs (first, last)."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs


def _counted(runs: list[tuple[int, int]]) -> str:
    first, last = runs[0]
    return (f"nodes {first}\N{EN DASH}{last}" if last > first else f"nodes {first}") + (
        ", ..." if len(runs) > 1 else ""
    )


def _span(numbers: list[int]) -> str:
    return f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]}\N{EN DASH}{numbers[-1]}"


def _card_of_node(cards: list[dict[str, Any]], num_nodes: int) -> list[int]:
    card_of_node = [0] * num_nodes
    for idx, card in enumerate(cards):
        for first, last in card["nodes"]:
            card_of_node[first : last + 1] = [idx] * (last + 1 - first)
    return card_of_node


def _as_runs(values: list[int]) -> list[tuple[int, int]]:
    """Return a list as (value, how often in a row)."""
    runs: list[tuple[int, int]] = []
    for value in values:
        if runs and runs[-1][0] == value:
            runs[-1] = (value, runs[-1][1] + 1)
        else:
            runs.append((value, 1))
    return runs
