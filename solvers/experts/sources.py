"""Who sends to whom: GPUs with their experts go to the nodes whose own tokens want them, with loads known by source.

Data      FROM[m,e]  tokens of expert e that begin on node m;  y[s] the share of its expert's tokens that slot s takes of each node;
          the contents of the GPUs, balanced as if no node were nearer than another (packing.py, replicas.py)
Variables node[b]    the node that content b goes to
Objective (O) max  sum_b sum_{s in b} y[s] FROM[node[b], x[s]]: tokens that stay on their node
Constraint
    (C1) even: every node gets as many contents as it has GPUs

Contents keep their slots together, so that the balance stays as it is. That is an assignment problem, solved exactly (Crouse, IEEE
Transactions on Aerospace and Electronic Systems 52(4), 2016, in scipy).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...schema.errors import ConfigError
from ...schema.units import FloatArray, IntArray
from .instance import ExpertInstance, uniform_shares, validate_loads


def validate_sources(sources: Any, instance: ExpertInstance) -> FloatArray:
    """Return FROM by node [N, L, E] of loads [R, L, E] by source rank, ranks of a node following one another."""
    loads = np.asarray(sources, dtype=np.float64)
    expected = (instance.num_layers, instance.num_experts)
    if loads.ndim != 3 or loads.shape[1:] != expected or loads.shape[0] % instance.num_nodes:
        raise ConfigError(
            f"loads by source have shape {loads.shape}; needed are [ranks, {expected[0]} layers, {expected[1]} experts] with "
            f"ranks in {instance.num_nodes} nodes of equal size"
        )
    if np.any(instance.slots_per_gpu != instance.slots_per_gpu[0]) or np.any(instance.gpu_speed != 1):
        raise ConfigError("loads by source need GPUs that are alike: no slots_per_gpu and no gpu_speed beside them")
    return np.asarray(loads.reshape(instance.num_nodes, -1, *expected).sum(axis=1))


def total_of_sources(sources: Any) -> FloatArray:
    """Return LOAD [1, L, E] of all ranks; a rank may have no tokens."""
    try:
        loads = np.asarray(sources, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"loads by source are an array of numbers [ranks, layers, experts]: {error}") from None
    wrong = ~np.isfinite(loads) | (loads < 0)
    if loads.ndim != 3 or wrong.any():
        raise ConfigError(
            f"loads by source are finite, not negative counts [ranks, layers, experts]; these have shape {loads.shape}, "
            f"{int(wrong.sum())} of {loads.size} are negative, NaN or infinite"
        )
    return validate_loads(loads.sum(axis=0))


def move_near_sources(instance: ExpertInstance, placed: IntArray, from_node: FloatArray) -> IntArray:
    """Return x [L, S] with the contents of the GPUs, as they are, on the nodes that send them most (O), one on each GPU (C1)."""
    from scipy.optimize import linear_sum_assignment

    contents = placed.reshape(instance.num_layers, instance.num_gpus, -1).copy()
    stays = _tokens_by_content(instance, placed, from_node)
    for layer, value in enumerate(stays):
        content, gpu = linear_sum_assignment(value[:, instance.node_of_gpu], maximize=True)
        contents[layer, gpu] = contents[layer, content]
    return contents.reshape(placed.shape)


def off_node_tokens(instance: ExpertInstance, placed: IntArray, from_node: FloatArray) -> FloatArray:
    """Return the tokens [L] that leave the node they begin on, a token once for each of its experts."""
    by_content = _tokens_by_content(instance, placed, from_node)
    stay = by_content[:, np.arange(instance.num_gpus), instance.node_of_gpu].sum(axis=1)
    return np.asarray(from_node.sum(axis=(0, 2)) - stay)


def _tokens_by_content(instance: ExpertInstance, placed: IntArray, from_node: FloatArray) -> FloatArray:
    """Return the tokens that each GPU's slots get from each node [L, G, N]."""
    share = uniform_shares(placed, instance.num_experts)
    by_slot = np.take_along_axis(from_node, placed[None], axis=2) * share  # [N, L, S]
    shape = (instance.num_nodes, instance.num_layers, instance.num_gpus, -1)
    return np.moveaxis(by_slot.reshape(shape).sum(axis=3), 0, 2)
