"""Gathering of parameters and reduction of gradients of one layer over the ranks that share them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..schema import ClusterSpec
from .coefficients import coefficients
from .collectives import collective_s
from .engines import DATA_PARALLEL, num_buckets, num_collectives
from .host_memory import host_link_bytes_per_s
from .layouts import OFFLOADS, FloatArray, IntArray, LayoutBatch
from .setting import Setting


class Ranks(NamedTuple):
    """Groups of ranks that share parameters [N]: over how many parameters, gradients and optimizer states are sharded, each a
    multiple of the one before; how many groups hold the same states; and the distance between neighbours.
    """

    parameters: IntArray
    gradients: IntArray
    optimizer: IntArray
    replicas: IntArray
    stride: IntArray


class DataParallelTime(NamedTuple):
    """Seconds [N] of one layer's collectives over data.

    Attributes:
        gather_s: of parameters before the forward pass, or once a step below zero 3.
        regather_s: of parameters before the backward pass, under zero 3.
        reduce_s: of gradients after the backward pass.
        levels_s: once a step, between ranks over which states are sharded differently.
    """

    gather_s: FloatArray
    regather_s: FloatArray
    reduce_s: FloatArray
    levels_s: FloatArray


@dataclass(frozen=True, kw_only=True)
class LayerParams:
    """What one rank holds of a layer before data parallelism shards it.

    Attributes:
        trained: parameters [N]; ``routed`` of them are routed experts'.
        frozen_bytes: bytes of the others, as they are stored [N].
        num_tensors: how many matrices and vectors they are.
    """

    trained: FloatArray
    routed: FloatArray
    frozen_bytes: FloatArray
    num_tensors: int


def data_parallel_s(params: LayerParams, setting: Setting) -> DataParallelTime:
    """Gathers and reductions over the ranks that share parameters [N]; experts with axes of their own have their own groups.

    Where the engine runs them tensor by tensor, each further one costs the steps of a ring: its latency is not shared.
    Frozen parameters are gathered only where they are sharded. Offloaded ones reach the device over the host's link first.
    """
    batch, workload = setting.batch, setting.workload
    together = np.where(batch.experts_follow_tp, params.trained, params.trained - params.routed)
    frozen = np.where(batch.zero_stage == 3, params.frozen_bytes, 0.0)
    replicas = batch.num_replicas * batch.num_shards // batch.num_optimizer_shards
    ranks = Ranks(batch.num_shards, batch.num_gradient_shards, batch.num_optimizer_shards, replicas, batch.tp)
    found = _sharded_s(together, frozen, ranks, setting)
    further = num_collectives(batch, workload, params.num_tensors) - 1
    steps_s = further * batch.num_shards * coefficients()["data_parallel"]["tensor_step_s"]
    fetch_s = _fetch_s(params, setting)
    found = DataParallelTime(
        found.gather_s + steps_s + fetch_s,
        found.regather_s + steps_s + fetch_s,
        found.reduce_s + steps_s,
        found.levels_s,
    )
    if np.all(batch.experts_follow_tp):
        return found
    alone = np.where(batch.experts_follow_tp, 0.0, params.routed)
    levels = (batch.expert_shards, batch.expert_gradient_shards, batch.expert_optimizer_shards)
    replicas = np.maximum(batch.expert_replicas * batch.expert_shards // batch.expert_optimizer_shards, 1)
    ranks = Ranks(*levels, replicas, batch.ep * batch.expert_tp)
    of_experts = _sharded_s(alone, np.zeros(len(batch)), ranks, setting)
    has_own = alone > 0
    return DataParallelTime(*(a + np.where(has_own, b, 0.0) for a, b in zip(found, of_experts, strict=True)))


def without_gradients(found: DataParallelTime, batch: LayoutBatch) -> DataParallelTime:
    """Of zeroth-order training: parameters move before each of its two passes, so that below zero 3 they are gathered twice too."""
    none = np.zeros(len(batch))
    gather = np.where(batch.zero_stage == 3, found.gather_s, 2 * found.gather_s)
    return DataParallelTime(gather, found.regather_s, none, none)


def _sharded_s(num_trained: FloatArray, frozen_bytes: FloatArray, ranks: Ranks, setting: Setting) -> DataParallelTime:
    """All-gathers of parameters in the compute dtype; reduce-scatter of gradients, and all-reduce over replicas in buckets [N].

    With P, G, S ranks that share parameters, gradients and optimizer states: passes gather over P, and reduce over G. Once a step
    gradients are reduced from G to S and updated parameters gathered from S to P, unless the engine gathers over S in every
    forward pass. What is whole (parameters below zero 3) is gathered over S.
    """
    workload, cluster, batch = setting.workload, setting.cluster, setting.batch
    facts = DATA_PARALLEL[workload.engine]
    in_parts = batch.zero_stage == 3
    gathered = num_trained * workload.compute_bytes + frozen_bytes
    reduced = num_trained * float(workload.gradient_bytes)
    regather = collective_s("all_gather", gathered, ranks.parameters, ranks.stride, cluster)
    gather = regather
    scatter = collective_s("reduce_scatter", reduced, ranks.gradients, ranks.stride, cluster)
    buckets, distance = num_buckets(batch, workload, num_trained), ranks.stride * ranks.optimizer
    bucket_s = collective_s("all_reduce", reduced / ranks.optimizer / buckets, ranks.replicas, distance, cluster)
    over_replicas = buckets * bucket_s
    levels = np.zeros(len(batch))
    if np.any(ranks.optimizer > ranks.parameters):
        from_owners = collective_s("all_gather", gathered, ranks.optimizer, ranks.stride, cluster)
        gather = np.where(in_parts & (not facts.gathers_owned), regather, from_owners)
        levels = levels + np.where(in_parts & (not facts.gathers_owned), _gather_once_s(gathered, ranks, cluster), 0.0)
        levels = levels + collective_s(
            "reduce_scatter",
            reduced / ranks.gradients,
            ranks.optimizer // ranks.gradients,
            ranks.stride * ranks.gradients,
            cluster,
        )
    once = (ranks.optimizer > ranks.gradients) | (in_parts & facts.sums_replicas_once)
    reduce = scatter + np.where(once, 0.0, over_replicas)
    return DataParallelTime(gather, regather, reduce, levels + np.where(once, over_replicas, 0.0))


def _gather_once_s(gathered: FloatArray, ranks: Ranks, cluster: ClusterSpec) -> FloatArray:
    """Seconds [N] to bring updated parameters from the shards of the optimizer states to those that passes gather."""
    return collective_s(
        "all_gather",
        gathered / ranks.parameters,
        ranks.optimizer // ranks.parameters,
        ranks.stride * ranks.parameters,
        cluster,
    )


def _fetch_s(params: LayerParams, setting: Setting) -> FloatArray:
    """Seconds of one rank's shard over the host's link, where parameters are offloaded [N]."""
    batch = setting.batch
    shard_bytes = (params.trained * setting.workload.compute_bytes + params.frozen_bytes) / batch.num_optimizer_shards
    rate = host_link_bytes_per_s(batch.offload_to_storage, setting.cluster)
    return np.where(batch.offload == OFFLOADS.index("parameters"), shard_bytes / rate, 0.0)
