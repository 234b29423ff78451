"""Gathering of parameters and reduction of gradients of one layer over the ranks that share them.

What each engine does with gradients and updated parameters, in data parallelism and in the update: facts of its code, not
coefficients.

aceso: as Megatron before it overlapped anything (Aceso, EuroSys 2024, on a fork of 2021).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...schema import ClusterSpec, Workload
from ...schema.arrays import Array, FloatArray, IntArray
from ...schema.layout_table import OFFLOADS, LayoutTable
from ..coefficients import coefficients
from ..hardware.collectives import collective_s
from ..hardware.host import host_link_bytes_per_s
from .operators import CostInputs


class ShardGroups(NamedTuple):
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


def data_parallel_s(params: LayerParams, setting: CostInputs) -> DataParallelTime:
    """Gathers and reductions over the ranks that share parameters [N]; experts with axes of their own have their own groups.

    Where the engine runs them tensor by tensor, each further one costs the steps of a ring: its latency is not shared.
    Frozen parameters are gathered only where they are sharded. Offloaded ones reach the device over the host's link first.
    """
    batch, workload = setting.batch, setting.workload
    together = np.where(batch.experts_follow_tp, params.trained, params.trained - params.routed)
    frozen = np.where(batch.zero_stage == 3, params.frozen_bytes, 0.0)
    replicas = batch.num_replicas * batch.num_shards // batch.num_optimizer_shards
    ranks = ShardGroups(batch.num_shards, batch.num_gradient_shards, batch.num_optimizer_shards, replicas, batch.tp)
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
    ranks = ShardGroups(*levels, replicas, batch.ep * batch.expert_tp)
    of_experts = _sharded_s(alone, np.zeros(len(batch)), ranks, setting)
    has_own = alone > 0
    return DataParallelTime(*(a + np.where(has_own, b, 0.0) for a, b in zip(found, of_experts, strict=True)))


def without_reductions(found: DataParallelTime, batch: LayoutTable) -> DataParallelTime:
    """Of zeroth-order training: parameters move before each of its two passes, so that below zero 3 they are gathered twice too."""
    none = np.zeros(len(batch))
    gather = np.where(batch.zero_stage == 3, found.gather_s, 2 * found.gather_s)
    return DataParallelTime(gather, found.regather_s, none, none)


def _sharded_s(
    num_trained: FloatArray, frozen_bytes: FloatArray, ranks: ShardGroups, setting: CostInputs
) -> DataParallelTime:
    """All-gathers of parameters in the compute dtype; reduce-scatter of gradients, and all-reduce over replicas in buckets [N].

    With P, G, S ranks that share parameters, gradients and optimizer states: passes gather over P, and reduce over G. Once a step
    gradients are reduced from G to S and updated parameters gathered from S to P, unless the engine gathers over S in every
    forward pass. What is whole (parameters below zero 3) is gathered over S.
    """
    workload, cluster, batch = setting.workload, setting.cluster, setting.batch
    facts = workload.engine_facts.data_parallel
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
        gather = np.where(in_parts & (not facts.gathers_from_owners), regather, from_owners)
        levels = levels + np.where(
            in_parts & (not facts.gathers_from_owners), _gather_once_s(gathered, ranks, cluster), 0.0
        )
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


def _gather_once_s(gathered: FloatArray, ranks: ShardGroups, cluster: ClusterSpec) -> FloatArray:
    """Seconds [N] to bring updated parameters from the shards of the optimizer states to those that passes gather."""
    return collective_s(
        "all_gather",
        gathered / ranks.parameters,
        ranks.optimizer // ranks.parameters,
        ranks.stride * ranks.parameters,
        cluster,
    )


def _fetch_s(params: LayerParams, setting: CostInputs) -> FloatArray:
    """Seconds of one rank's shard over the host's link, where parameters are offloaded [N]."""
    batch = setting.batch
    shard_bytes = (params.trained * setting.workload.compute_bytes + params.frozen_bytes) / batch.num_optimizer_shards
    rate = host_link_bytes_per_s(batch.offload_to_storage, setting.cluster)
    return np.where(batch.offload == OFFLOADS.index("parameters"), shard_bytes / rate, 0.0)


ZEROTH_ORDER_ELEMENTS = 14
"""Elements that zeroth-order training reads and writes of one parameter in a step: three moves and a step along the direction, each
of two reads and a write, and the decay (runtime/training/zeroth_order.py)."""


DIRECTION_ELEMENTS = 4
"""Elements written of one parameter's direction, drawn whole by every rank for each of the four."""


def passes_bytes_per_param(batch: LayoutTable, workload: Workload) -> FloatArray:
    """Bytes that all micro-batches of a step read and write for one parameter, beside the layers' own operators [N].

    Megatron's weight-gradient products read and write the fp32 sum when they end (gradient_accumulation_fusion); others add in a
    pass of their own once micro-batches accumulate: autograd in the compute dtype, nanotron in fp32 (FP32GradientAccumulator). Runs
    of Megatron-Core on H100 and GB200 show 10 +- 1 bytes beyond their products, whatever the micro-batch.
    """
    m, b, summed_by = batch.num_microbatches, workload.compute_bytes, workload.engine_facts.sums_gradients
    if summed_by == "shards":
        return _copied_bytes_per_param(batch, workload)
    if summed_by == "products":
        return np.asarray(m * 8.0, dtype=np.float64)
    added = b + 8 if summed_by == "fp32" else 3 * b
    return np.asarray(np.where(m > 1, m * added, 0), dtype=np.float64)


def _copied_bytes_per_param(batch: LayoutTable, workload: Workload) -> FloatArray:
    """What torch copies, casts and adds in a step for one parameter, bytes read and written [N].

    fully_shard casts shards into its buffer, copies gathered parameters out of it and gradients into the one that is reduced: in
    every pass under zero 3, gradients of every micro-batch under zero 2, else (and under a pipeline) once a step. Gradients that
    wait for the last micro-batch add up whole in the reduction's dtype, those that are reduced more than once as shards. DDP, which
    replicas in one dtype have, copies into its buckets and divides there. Source: torch.distributed.fsdp, torch.nn.parallel.
    """
    m, b, g, master = batch.num_microbatches, workload.compute_bytes, workload.gradient_bytes, workload.master_bytes
    ranks, owners, piped = batch.dp * batch.cp, batch.num_optimizer_shards, batch.pp > 1
    gathers = np.where(piped | (batch.zero_stage < 2), 1, np.where(batch.zero_stage == 3, 2 * m, m))
    gathered = gathers * (np.where(owners > 1, 2 * b, 0) + (b + master) / owners * (b != master))
    if not workload.has_backward:
        return np.asarray(gathered, dtype=np.float64)
    waits = (m > 1) & (piped | (batch.zero_stage < 2))
    # The first gradient is cast where dtypes differ; each further one is read, and the sum read and written.
    summed = np.where(waits, (m - 1) * (2 * g + b) + (b + g) * (b != g), 3 * g * (m - 1) / batch.num_gradient_shards)
    is_ddp = (batch.zero_stage == 0) & (b == g) & (batch.stage_ranks == batch.dp) & ~piped
    buffered = np.where(is_ddp, 4 * g, np.where(waits, 2 * g, b + g))
    reductions = np.where(waits, 1, m)
    return np.asarray(gathered + summed + np.where(ranks > 1, reductions * buffered, 0), dtype=np.float64)


def hides(batch: LayoutTable, workload: Workload) -> tuple[IntArray, IntArray]:
    """1 where gathers, and where reductions, run beside compute, 0 where after it [N]."""
    facts = workload.engine_facts.data_parallel
    return (
        np.asarray(workload.overlap & (batch.zero_stage >= facts.gather_hides_from), dtype=np.int64),
        np.asarray(workload.overlap & (batch.zero_stage >= facts.reduction_hides_from), dtype=np.int64),
    )


def hides_in_chunks(workload: Workload) -> bool:
    """Whether communication of one model chunk runs beside the compute of others."""
    return workload.overlap and workload.engine_facts.data_parallel.hides_in_chunks


def num_buckets(batch: LayoutTable, workload: Workload, num_params: FloatArray) -> FloatArray:
    """All-reduces of a layer's whole gradients [N]; a share of a bucket is filled by its neighbours."""
    buckets = num_params * workload.compute_bytes / workload.engine_facts.data_parallel.bucket_bytes
    return np.asarray(np.where((batch.zero_stage == 0) & (buckets > 0), buckets, 1.0))


def num_collectives(batch: LayoutTable, workload: Workload, num_tensors: int) -> IntArray:
    """Collectives of one layer's parameters under ZeRO-1 [N]: one bucket, or one a tensor."""
    by_tensor = workload.engine_facts.data_parallel.zero1_by_tensor & (batch.zero_stage == 1)
    return np.asarray(np.where(by_tensor, num_tensors, 1), dtype=np.int64)


def has_copies(layout: Any, workload: Workload) -> Array:
    """Whether parameters are gathered or cast by fully_shard, not replicated by DDP; ``layout`` is a StepShape or a LayoutBatch."""
    is_cast = workload.precision not in ("fp32", "bf16")
    return ((layout.dp_shard * layout.dp_replicate > 1) & ~_is_whole(layout, workload)) | is_cast


def _is_whole(layout: Any, workload: Workload) -> Array:
    """Whether our runtime has whole fp32 replicas and nothing more: gradients are reduced in DDP's buckets, which stay."""
    return layout.is_replicated & workload.engine_facts.is_own_runtime & (workload.precision == "fp32")
