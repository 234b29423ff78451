"""Gathering of parameters and reduction of gradients of one layer over the ranks that share them."""

from __future__ import annotations

import numpy as np

from ..schema import ClusterSpec, Workload
from .coefficients import coefficients
from .collectives import collective_s
from .engines import num_buckets, num_collectives
from .host_memory import host_link_bytes_per_s
from .layouts import OFFLOADS, FloatArray, IntArray, LayoutBatch


def data_parallel_s(
    frozen: FloatArray,
    num_trained: FloatArray,
    routed: FloatArray,
    num_tensors: int,
    batch: LayoutBatch,
    workload: Workload,
    cluster: ClusterSpec,
) -> tuple[FloatArray, FloatArray]:
    """All-gather and reduction over the ranks that share parameters; experts with axes of their own have their own groups.

    Where the engine runs them tensor by tensor, each further one costs the steps of a ring: its latency is not shared.
    Frozen parameters are gathered only where they are sharded. Offloaded ones reach the device over the host's link first.
    """
    together = np.where(batch.experts_follow_tp, num_trained, num_trained - routed)
    gathered = together * workload.compute_bytes + np.where(batch.zero_stage == 3, frozen, 0.0)
    buckets = num_buckets(batch, workload, together)
    groups = (batch.num_shards, batch.num_replicas, batch.tp)
    gather, reduce = _sharded_s(gathered, together * float(workload.gradient_bytes), *groups, buckets, cluster)
    further = num_collectives(batch, workload, num_tensors) - 1
    steps_s = further * batch.num_shards * coefficients()["data_parallel"]["tensor_step_s"]
    from_host = (num_trained * workload.compute_bytes + frozen) / batch.num_shards
    is_away = batch.offload == OFFLOADS.index("parameters")
    fetch_s = np.where(is_away, from_host / host_link_bytes_per_s(batch.offload_to_storage, cluster), 0.0)
    gather, reduce = gather + steps_s + fetch_s, reduce + steps_s
    if np.all(batch.experts_follow_tp):
        return gather, reduce
    alone = np.where(batch.experts_follow_tp, 0.0, routed)
    groups = (batch.expert_shards, batch.expert_replicas, batch.ep * batch.expert_tp)
    sizes = (alone * workload.compute_bytes, alone * float(workload.gradient_bytes))
    expert_gather, expert_reduce = _sharded_s(*sizes, *groups, num_buckets(batch, workload, alone), cluster)
    has_own = alone > 0
    return gather + np.where(has_own, expert_gather, 0.0), reduce + np.where(has_own, expert_reduce, 0.0)


def _sharded_s(
    gathered: FloatArray,
    reduced: FloatArray,
    shards: IntArray,
    replicas: IntArray,
    stride: IntArray,
    buckets: FloatArray,
    cluster: ClusterSpec,
) -> tuple[FloatArray, FloatArray]:
    """All-gather of ``gathered`` bytes; reduce-scatter (and all-reduce over replicas, in buckets) of ``reduced`` bytes."""
    gather = collective_s("all_gather", gathered, shards, stride, cluster)
    scatter = collective_s("reduce_scatter", reduced, shards, stride, cluster)
    replicate = buckets * collective_s("all_reduce", reduced / shards / buckets, replicas, stride * shards, cluster)
    return gather, scatter + replicate
