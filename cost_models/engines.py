"""What each engine does with gradients and updated parameters, in data parallelism and in the update: facts of its code, not
coefficients.

aceso: as Megatron before it overlapped anything (Aceso, EuroSys 2024, on a fork of 2021).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..schema import Workload
from ..schema.units import MIB
from ..schema.workload import Engine
from .layouts import FloatArray, IntArray, LayoutBatch


class DataParallelFacts(NamedTuple):
    """Data parallelism of one engine.

    Attributes:
        reduction_hides_from: lowest ZeRO stage at which reductions run beside the (last) backward pass.
        gather_hides_from: the same for gathers of parameters and the forward pass.
        bucket_bytes: parameters in the compute dtype whose whole gradients are reduced at once; infinite for a layer's.
        hides_in_chunks: whether with model chunks the communication of one runs beside the compute of the others.
        gathers_owned: whether parameters that are sharded over fewer ranks than the optimizer states are gathered from the
            owners of the states in every forward pass (and from the fewer in the backward pass), instead of once a step.
        sums_replicas_once: whether gradients that are sharded are summed over the replicas of the shards once a step.
        zero1_by_tensor: whether ZeRO-1 runs collectives tensor by tensor instead of on flat buckets.
    """

    reduction_hides_from: int
    gather_hides_from: int
    bucket_bytes: float
    hides_in_chunks: bool
    zero1_by_tensor: bool
    gathers_owned: bool = False
    sums_replicas_once: bool = False


DATA_PARALLEL: dict[Engine, DataParallelFacts] = {
    # Prefetches the next layer's parameters, reduces beside the next layer's backward pass: runtime/data_parallel.py.
    # reshard_after_forward=N keeps what a forward pass gathered within N ranks.
    "fsdp2": DataParallelFacts(0, 0, np.inf, hides_in_chunks=False, zero1_by_tensor=False, gathers_owned=True),
    # Megatron-Core's recipes: overlap_grad_reduce beside the last backward pass, overlap_param_gather beside the first forward
    # pass, chunk by chunk with align_param_gather; overlap_p2p_comm where there are model chunks.
    "megatron": DataParallelFacts(0, 0, np.inf, hides_in_chunks=True, zero1_by_tensor=False),
    # overlap_comm is false unless stage 3, and updated parameters are gathered in the step itself.
    # ZeRO++ reads its second partition (hpZ) in the backward pass only; MiCS sums over islands at the step's end.
    "deepspeed": DataParallelFacts(
        3, 3, np.inf, hides_in_chunks=False, zero1_by_tensor=False, gathers_owned=True, sums_replicas_once=True
    ),
    # v0.5 reduces after the backward pass: whole gradients in DistributedDataParallel's buckets (bucket_cap_mb = 25), under ZeRO-1
    # every tensor by itself (reduce_scatter_coalesced and all_gather_coalesced in optim/zero.py).
    "nanotron": DataParallelFacts(3, 3, 25 * MIB, hides_in_chunks=False, zero1_by_tensor=True),
    # hybrid_zero_optim.py: overlap_sync_grad, but ZeRO-1 deals out whole tensors: reduced to the owner, broadcast after the step.
    "internevo": DataParallelFacts(0, 3, np.inf, hides_in_chunks=False, zero1_by_tensor=True),
    "aceso": DataParallelFacts(3, 3, np.inf, hides_in_chunks=False, zero1_by_tensor=False),
}

_STEP_BYTES = {"adamw": 28.0, "muon": 20.0, "sgd": 12.0}
"""Fused update: read parameter, gradient and states, write parameter and states, fp32."""

_CLIP_BYTES = 12.0
"""Gradient clipping: read for the norm; read and write for the scale."""

ZEROTH_ORDER_ELEMENTS = 14
"""Elements that zeroth-order training reads and writes of one parameter in a step: three moves and a step along the direction, each
of two reads and a write, and the decay (runtime/training/zeroth_order.py)."""

DIRECTION_ELEMENTS = 4
"""Elements written of one parameter's direction, drawn whole by every rank for each of the four."""

_COPY_BYTES: dict[Engine, float] = {
    "fsdp2": 0.0,  # fully_shard casts when it gathers, and gradients are dropped, not zeroed
    "megatron": 6.0,  # the compute dtype's copy is written; the gradient buffer is zeroed
    "deepspeed": 24.0,  # the same; gradients cast to fp32, checked for overflow and unscaled
    "nanotron": 10.0,  # the same as megatron's, the copy in a pass of its own
    "internevo": 24.0,  # as deepspeed
    "aceso": 6.0,  # as megatron
}


def is_megatron(workload: Workload) -> bool:
    """Whether the engine runs Megatron's layers and pipeline, or something as eager."""
    return workload.engine in ("megatron", "deepspeed", "aceso", "internevo")


def update_bytes_per_param(workload: Workload) -> float:
    """Bytes read and written for one parameter by the optimizer step, all passes of the engine."""
    masters = (_STEP_BYTES[workload.optimizer] + _CLIP_BYTES) * workload.master_bytes / 4
    return masters + (0.0 if workload.precision == "bf16" else _COPY_BYTES[workload.engine])


def passes_bytes_per_param(batch: LayoutBatch, workload: Workload) -> FloatArray:
    """Bytes that all micro-batches of a step read and write for one parameter, beside the layers' own operators [N].

    Megatron's weight-gradient products read and write the fp32 sum when they end (gradient_accumulation_fusion); others add in a
    pass of their own once micro-batches accumulate: autograd in the compute dtype, nanotron in fp32 (FP32GradientAccumulator). Runs
    of Megatron-Core on H100 and GB200 show 10 +- 1 bytes beyond their products, whatever the micro-batch.
    """
    m, b = batch.num_microbatches, workload.compute_bytes
    if workload.engine == "fsdp2":
        return _copied_bytes_per_param(batch, workload)
    if workload.engine == "megatron":
        return np.asarray(m * 8.0, dtype=np.float64)
    added = b + 8 if workload.engine == "nanotron" else 3 * b
    return np.asarray(np.where(m > 1, m * added, 0), dtype=np.float64)


def _copied_bytes_per_param(batch: LayoutBatch, workload: Workload) -> FloatArray:
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


def hides(batch: LayoutBatch, workload: Workload) -> tuple[IntArray, IntArray]:
    """1 where gathers, and where reductions, run beside compute, 0 where after it [N]."""
    facts = DATA_PARALLEL[workload.engine]
    return (
        np.asarray(workload.overlap & (batch.zero_stage >= facts.gather_hides_from), dtype=np.int64),
        np.asarray(workload.overlap & (batch.zero_stage >= facts.reduction_hides_from), dtype=np.int64),
    )


def hides_in_chunks(workload: Workload) -> bool:
    """Whether communication of one model chunk runs beside the compute of others."""
    return workload.overlap and DATA_PARALLEL[workload.engine].hides_in_chunks


def num_buckets(batch: LayoutBatch, workload: Workload, num_params: FloatArray) -> FloatArray:
    """All-reduces of a layer's whole gradients [N]; a share of a bucket is filled by its neighbours."""
    buckets = num_params * workload.compute_bytes / DATA_PARALLEL[workload.engine].bucket_bytes
    return np.asarray(np.where((batch.zero_stage == 0) & (buckets > 0), buckets, 1.0))


def num_collectives(batch: LayoutBatch, workload: Workload, num_tensors: int) -> IntArray:
    """Collectives of one layer's parameters under ZeRO-1 [N]: one bucket, or one a tensor."""
    by_tensor = DATA_PARALLEL[workload.engine].zero1_by_tensor & (batch.zero_stage == 1)
    return np.asarray(np.where(by_tensor, num_tensors, 1), dtype=np.int64)


FIRST_BLOCKS: frozenset[Engine] = frozenset({"megatron"})
"""Engines that recompute the same number of blocks on every stage, the first ones, and those fully.

Megatron-Core: recompute_granularity is one for the whole model; with full and recompute_method block the first
recompute_num_layers of every (virtual) stage are recomputed. Our runtime checkpoints block by block
(runtime/recompute.py), DeepSpeed wherever the model's code calls checkpoint().
"""
