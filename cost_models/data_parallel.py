"""Gathering of parameters and reduction of gradients of one layer over the ranks that share them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .coefficients import coefficients
from .collectives import collective_s
from .engines import num_buckets, num_collectives
from .host_memory import host_link_bytes_per_s
from .layouts import OFFLOADS, FloatArray, IntArray
from .setting import Setting


class Ranks(NamedTuple):
    """Groups of ranks that share parameters [N]: over which they are sharded, how many of those, and between neighbours."""

    shards: IntArray
    replicas: IntArray
    stride: IntArray


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


def data_parallel_s(params: LayerParams, setting: Setting) -> tuple[FloatArray, FloatArray]:
    """All-gather and reduction over the ranks that share parameters [N]; experts with axes of their own have their own groups.

    Where the engine runs them tensor by tensor, each further one costs the steps of a ring: its latency is not shared.
    Frozen parameters are gathered only where they are sharded. Offloaded ones reach the device over the host's link first.
    """
    batch, workload = setting.batch, setting.workload
    together = np.where(batch.experts_follow_tp, params.trained, params.trained - params.routed)
    frozen = np.where(batch.zero_stage == 3, params.frozen_bytes, 0.0)
    ranks = Ranks(batch.num_shards, batch.num_replicas, batch.tp)
    gather, reduce = _sharded_s(together, frozen, ranks, setting)
    further = num_collectives(batch, workload, params.num_tensors) - 1
    steps_s = further * batch.num_shards * coefficients()["data_parallel"]["tensor_step_s"]
    gather, reduce = gather + steps_s + _fetch_s(params, setting), reduce + steps_s
    if np.all(batch.experts_follow_tp):
        return gather, reduce
    alone = np.where(batch.experts_follow_tp, 0.0, params.routed)
    ranks = Ranks(batch.expert_shards, batch.expert_replicas, batch.ep * batch.expert_tp)
    expert_gather, expert_reduce = _sharded_s(alone, np.zeros(len(batch)), ranks, setting)
    has_own = alone > 0
    return gather + np.where(has_own, expert_gather, 0.0), reduce + np.where(has_own, expert_reduce, 0.0)


def _sharded_s(
    num_trained: FloatArray, frozen_bytes: FloatArray, ranks: Ranks, setting: Setting
) -> tuple[FloatArray, FloatArray]:
    """All-gather of parameters in the compute dtype; reduce-scatter of gradients, and all-reduce over replicas in buckets [N]."""
    workload, cluster = setting.workload, setting.cluster
    gathered = num_trained * workload.compute_bytes + frozen_bytes
    reduced = num_trained * float(workload.gradient_bytes)
    gather = collective_s("all_gather", gathered, ranks.shards, ranks.stride, cluster)
    scatter = collective_s("reduce_scatter", reduced, ranks.shards, ranks.stride, cluster)
    buckets, distance = num_buckets(setting.batch, workload, num_trained), ranks.stride * ranks.shards
    bucket_s = collective_s("all_reduce", reduced / ranks.shards / buckets, ranks.replicas, distance, cluster)
    return gather, scatter + buckets * bucket_s


def _fetch_s(params: LayerParams, setting: Setting) -> FloatArray:
    """Seconds of one rank's shard over the host's link, where parameters are offloaded [N]."""
    batch = setting.batch
    shard_bytes = (params.trained * setting.workload.compute_bytes + params.frozen_bytes) / batch.num_shards
    rate = host_link_bytes_per_s(batch.offload_to_storage, setting.cluster)
    return np.where(batch.offload == OFFLOADS.index("parameters"), shard_bytes / rate, 0.0)
