"""A plan made again for what is left of its cluster: the same model and workload on other nodes or fewer devices of each."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..schema import ClusterSpec, Plan

KEPT_FIELDS = frozenset({"recompute", "sequence_parallel", "micro_batch_size", "offload_fraction"})
"""Of the layout's fields that the plan had to keep: those that do not say how many devices share something."""


def replanned(plan: Plan, path: Path, *, nnodes: int) -> tuple[Plan, Path]:
    """The plan and its file, or where this job's machines are not those of the plan, another one and its file.

    Looked at are the number of nodes, and how many devices this one has: fewer than the plan counts on, and all nodes are taken
    to have as many.

    Raises:
        ConfigError: the plan's nodes differ from each other, so that it is not known which are left.
        InfeasibleError: nothing fits on what is left.
    """
    cluster = remaining_cluster(plan.cluster, nnodes=nnodes, devices_here=_devices_here(plan))
    if cluster is None:
        return plan, path
    from ..planner import plan as make_plan
    from ..planner.offload_request import OffloadRequest
    from ..schema.errors import ConfigError, InfeasibleError
    from ..schema.layout import parse_assignments

    fixed = {name: value for name, value in parse_assignments(plan.provenance.fixed).items() if name in KEPT_FIELDS}
    offload = OffloadRequest.of(plan)
    try:
        found = make_plan(plan.model, cluster, plan.workload, fixed=fixed, runnable=True, offload=offload)
    except (InfeasibleError, ConfigError):
        if not fixed:
            raise
        found = make_plan(plan.model, cluster, plan.workload, runnable=True, offload=offload)
    target = path.with_name(f"{path.stem}.{cluster.num_devices}-devices.json")
    found.save(target)
    return found, target


def remaining_cluster(cluster: ClusterSpec, *, nnodes: int, devices_here: int) -> ClusterSpec | None:
    """The cluster with so many nodes, and no more devices in each than there are; None where that is the cluster itself.

    Raises:
        ConfigError: its nodes are not all alike.
    """
    from ..schema.errors import ConfigError
    from ..schema.offers import with_nodes

    lacks_devices = any(devices_here < group.devices_per_node for group in cluster.groups)
    if nnodes == cluster.num_nodes and not lacks_devices:
        return None
    if len(cluster.groups) > 1:
        raise ConfigError(f"the nodes of {cluster.name} differ: it is not known which are left", help="plan again")
    resized = with_nodes(cluster, nnodes) if nnodes != cluster.num_nodes else cluster
    return _with_devices(resized, devices_here) if lacks_devices else resized


def _with_devices(cluster: ClusterSpec, devices: int) -> ClusterSpec:
    """So many devices in each node; links within a node join all of them."""
    group = cluster.groups[0]
    per_node = group.devices_per_node
    sizes: dict[int, object] = {}
    for level in cluster.levels:
        size = level.domain_size * devices // per_node if level.domain_size > per_node else devices
        sizes.setdefault(size, level.replace(domain_size=size))
    return cluster.replace(
        name=f"{cluster.name}, {devices} devices in each node",
        groups=(group.replace(devices_per_node=devices, levels=()),),
        levels=tuple(sizes.values()),
    )


def _devices_here(plan: Plan) -> int:
    from ..profilers.machine import num_cores

    if plan.cluster.weakest_device.vendor == "cpu":
        return num_cores()
    import torch

    return torch.cuda.device_count()
