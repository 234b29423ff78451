"""Groups of experts that stay on one node each (C4): groups onto nodes, then every node for itself.

Both steps are the problem of solvers/expert_instance.py again: groups are experts without replicas and nodes are GPUs;
then the nodes of all layers are layers. EPLB's groups are a second start, so that no layer is worse than its result.
"""

from __future__ import annotations

import numpy as np

from ..schema.errors import ConfigError
from .expert_balance import Search, balanced, uniform_objective
from .expert_eplb import pack_evenly
from .expert_instance import Instance, IntArray


def in_groups(instance: Instance, num_groups: int, search: Search) -> IntArray:
    """X [L, S] under (C4).

    Raises:
        ConfigError: groups that do not divide the experts or among the nodes, slots or GPUs that differ.
    """
    require_even(instance, num_groups)
    per_group = instance.num_experts // num_groups
    nodes = _nodes(instance, num_groups)
    ours = balanced(nodes, search).reshape(instance.num_layers, instance.num_nodes, -1)
    theirs = pack_evenly(nodes.weight.mean(axis=2), instance.num_nodes)
    placed = _within_nodes(instance, ours, per_group, search)
    other = _within_nodes(instance, theirs, per_group, search)
    better = uniform_objective(instance, other) < uniform_objective(instance, placed)
    placed[better] = other[better]
    return placed


def _within_nodes(instance: Instance, groups: IntArray, per_group: int, search: Search) -> IntArray:
    """X [L, S] with the groups [L, N, P] on their nodes."""
    num_layers, num_nodes = groups.shape[:2]
    members = (groups[..., None] * per_group + np.arange(per_group)).reshape(num_layers, num_nodes, -1)
    local = np.stack([np.take_along_axis(load[:, None, :], members, axis=2) for load in instance.load])
    local = local.reshape(len(instance.load), num_layers * num_nodes, -1)
    # A node without any load is placed as if all of its experts had the same.
    local = np.where(local.sum(axis=2, keepdims=True) > 0, local, 1.0)
    gpus = instance.num_gpus // num_nodes
    node = Instance(local, instance.slots_per_gpu[:gpus], instance.gpu_speed[:gpus])
    placed = balanced(node, search)
    experts = np.take_along_axis(members.reshape(num_layers * num_nodes, -1), placed, axis=1)
    return experts.reshape(num_layers, instance.num_slots)


def groups_on_nodes(instance: Instance, num_groups: int, search: Search) -> IntArray:
    """Node of each expert [L, E]."""
    groups = balanced(_nodes(instance, num_groups), search)
    node = np.empty_like(groups)
    np.put_along_axis(node, groups, np.repeat(np.arange(instance.num_nodes), num_groups // instance.num_nodes)[None], 1)
    return node.repeat(instance.num_experts // num_groups, axis=1)


def _nodes(instance: Instance, num_groups: int) -> Instance:
    """Groups as experts and nodes as GPUs."""
    return Instance(
        instance.load.reshape(*instance.load.shape[:2], num_groups, -1).sum(axis=3),
        np.full(instance.num_nodes, num_groups // instance.num_nodes),
        np.ones(instance.num_nodes),
    )


def require_even(instance: Instance, num_groups: int) -> None:
    """Raise unless groups divide experts and nodes divide groups, GPUs are alike and the slots of a node can be filled."""
    if num_groups < 1 or instance.num_experts % num_groups:
        raise ConfigError(f"{instance.num_experts} experts do not divide into {num_groups} groups")
    if num_groups % instance.num_nodes:
        raise ConfigError(
            f"{num_groups} groups do not divide among {instance.num_nodes} nodes (C4)",
            help="leave num_groups out to place experts on any node",
        )
    if np.any(instance.slots_per_gpu != instance.slots_per_gpu[0]) or np.any(instance.gpu_speed != 1):
        raise ConfigError(
            "groups on nodes need GPUs that are alike: no slots_per_gpu and no gpu_speed beside num_groups"
        )
    if instance.num_slots // instance.num_nodes > instance.num_experts // instance.num_nodes * (
        instance.num_gpus // instance.num_nodes
    ):
        raise ConfigError("more replicas than GPUs: the slots of a node cannot be filled with its own experts (C2)")
