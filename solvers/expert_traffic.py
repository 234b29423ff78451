"""Places for few visits: homes of experts on nodes, replicas that balance the nodes, and the GPUs of every node.

1. homes: the groups of group-limited routing packed onto nodes, else experts that tokens use together (expert_homes.py);
2. the slots beyond one home each go to replicas that balance the nodes without a visit more (expert_nodes.py);
3. every node is the problem of expert_instance.py again, with the tokens that it serves as loads; slots that are left
replicate its own.

"traffic" lets the homes of a node have 2 % more than the mean before replicas; "pareto" tries several limits and
takes, of those whose nodes end within 2 % (tokens not seen yet spread further), the one with fewest visits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..schema.errors import ConfigError
from .expert_balance import Search, balanced
from .expert_groups import groups_on_nodes, require_even
from .expert_homes import homes, together
from .expert_instance import FloatArray, Instance, IntArray
from .expert_nodes import Routing, Served, replicate, serve
from .expert_placement import Answer

_LIMITS = {"traffic": (1.02,), "pareto": (1.02, 1.1, 1.3)}
_GOAL = 1.02
_LEAST_S = 0.5


@dataclass(frozen=True)
class Homes:
    """How homes are chosen: the groups of experts that stay together, if any, and the limits on the load of a node's
    homes.
    """

    num_groups: int | None
    objective: str


@dataclass(frozen=True)
class _Layer:
    routing: Routing
    served: Served

    @property
    def balance(self) -> float:
        node = self.served.tokens.sum(axis=0)
        return float(node.max() / node.mean())


def as_trace(trace: Any, num_layers: int, num_experts: int) -> IntArray:
    """A validated trace [tokens, L, top_k].

    Raises:
        ConfigError: of another shape, or with experts that do not exist or twice for one token.
    """
    array = np.asarray(trace.detach().cpu().numpy() if hasattr(trace, "detach") else trace)
    if array.ndim != 3 or array.shape[1] != num_layers or 0 in array.shape:
        raise ConfigError(f"a trace has shape [tokens, {num_layers} layers, top_k]; this one {array.shape}")
    if not np.issubdtype(array.dtype, np.integer) or array.min() < 0 or array.max() >= num_experts:
        raise ConfigError(f"a trace names experts 0..{num_experts - 1} by whole numbers")
    if np.any(np.diff(np.sort(array, axis=2), axis=2) == 0):
        raise ConfigError("a token of the trace uses an expert twice in one layer")
    return array.astype(np.int64)


def near_tokens(instance: Instance, trace: IntArray, how: Homes, search: Search) -> Answer:
    """Places for a trace; `search.time_limit_s` is for the programs of all layers together.

    Raises:
        ConfigError: experts that do not divide among nodes, GPUs that differ.
    """
    require_even(instance, how.num_groups or instance.num_nodes)
    extra = (instance.num_slots - instance.num_experts) // instance.num_nodes
    limit_s = max(search.time_limit_s / instance.num_layers, _LEAST_S)
    fixed = None if how.num_groups is None else groups_on_nodes(instance, how.num_groups, search)
    layers = []
    for layer in range(instance.num_layers):
        tokens = trace[:, layer]
        tried = []
        for limit in _LIMITS[how.objective]:
            home = fixed[layer] if fixed is not None else _homes(instance, tokens, limit)
            routing = replicate(
                tokens,
                home,
                instance.num_nodes,
                extra,
                instance.num_experts,
                time_limit_s=limit_s / len(_LIMITS[how.objective]),
                seed=search.seed,
            )
            tried.append(_Layer(routing, serve(tokens, routing, seed=search.seed)))
            if fixed is not None:
                break
        layers.append(min(tried, key=lambda one: (max(one.balance, _GOAL), one.served.visits)))
    return _on_gpus(instance, layers, search)


def _homes(instance: Instance, tokens: IntArray, limit: float) -> IntArray:
    load = np.bincount(tokens.ravel(), minlength=instance.num_experts).astype(np.float64)
    return homes(together(tokens, instance.num_experts), np.maximum(load, 1e-9), instance.num_nodes, limit)


def _on_gpus(instance: Instance, layers: list[_Layer], search: Search) -> Answer:
    """Slots of every node; nodes that hold as many different experts are solved together."""
    num_layers, num_nodes = instance.num_layers, instance.num_nodes
    slots, gpus = instance.num_slots // num_nodes, instance.num_gpus // num_nodes
    placed = np.zeros((num_layers, num_nodes, slots), dtype=np.int64)
    share = np.zeros(placed.shape)
    by_count: dict[int, list[tuple[int, int, IntArray]]] = {}
    for n, layer in enumerate(layers):
        at_home = layer.routing.home[:, None] == np.arange(num_nodes)
        for node in range(num_nodes):
            held = np.flatnonzero(at_home[:, node] | (layer.routing.part[:, node] > 0))
            by_count.setdefault(len(held), []).append((n, node, held))
    for members in by_count.values():
        local = np.array([layers[n].served.tokens[held, node] for n, node, held in members])
        # A node that serves no token is placed as if all of its experts served the same.
        local = np.where(local.sum(axis=1, keepdims=True) > 0, local, 1.0)
        part = Instance(local[None], instance.slots_per_gpu[:gpus], instance.gpu_speed[:gpus])
        chosen = balanced(part, Search(seed=search.seed))
        for (n, node, held), local_slots in zip(members, chosen, strict=True):
            experts = held[local_slots]
            replicas = np.bincount(experts, minlength=instance.num_experts)[experts]
            served = layers[n].served.tokens
            total = np.maximum(served.sum(axis=1), 1e-300)
            placed[n, node], share[n, node] = experts, served[experts, node] / total[experts] / replicas
    slots_of_layer, share_of_slot = placed.reshape(num_layers, -1), share.reshape(num_layers, -1)
    _spread_unused(slots_of_layer, share_of_slot, instance.num_experts)
    return Answer(
        slots_of_layer,
        share=share_of_slot,
        home=np.array([layer.routing.home for layer in layers]),
        node_part=np.array([layer.routing.part for layer in layers]),
        visits=np.array([layer.served.visits for layer in layers]),
    )


def _spread_unused(placed: IntArray, share: FloatArray, num_experts: int) -> None:
    """Experts that no token of the trace used: even shares, in place."""
    for layer in range(len(placed)):
        total = np.bincount(placed[layer], share[layer], num_experts)
        unused = total[placed[layer]] <= 0
        counts = np.bincount(placed[layer], minlength=num_experts)
        share[layer, unused] = 1.0 / counts[placed[layer]][unused]
