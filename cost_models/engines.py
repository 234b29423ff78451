"""What each engine does with gradients and updated parameters of data parallelism: facts of its code, not coefficients.

| engine | fact | where it is seen |
|---|---|---|
| fsdp2 | prefetches the next layer's parameters, reduces beside the next layer's backward pass | runtime/data_parallel.py |
| megatron | bucketed reduction beside the last backward pass, parameters gathered beside the next forward pass; with model chunks beside those of all micro-batches in another chunk, and transfers between stages beside compute | Megatron-Core: overlap_grad_reduce, overlap_param_gather, align_param_gather and overlap_p2p_comm of its recipes |
| deepspeed | reduces after the backward pass, gathers after the step; ZeRO-3 prefetches | overlap_comm is false unless stage 3 |
| nanotron | reduces after the backward pass; whole gradients in buckets of 25 MiB of parameters, under ZeRO-1 every tensor by itself | torch's DistributedDataParallel: bucket_cap_mb; nanotron v0.5 optim/zero.py: reduce_scatter_coalesced, all_gather_coalesced |
| internevo | reduces beside the last backward pass; ZeRO-1 deals out whole tensors | InternEvo solver/optimizer/hybrid_zero_optim.py: reduce to the owner, broadcast of each owner's |
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..schema import Workload
from ..schema.units import MIB
from ..schema.workload import Engine
from .layouts import FloatArray, IntArray, LayoutBatch


class EngineFacts(NamedTuple):
    """Data parallelism of one engine.

    Attributes:
        reduction_hides_from: lowest ZeRO stage at which gathers and reductions run beside compute.
        gather_hides_from: the same for the gathers of parameters.
        bucket_bytes: parameters in the compute dtype whose whole gradients are reduced at once; infinite for a layer's.
        hides_in_chunks: whether with model chunks the communication of one runs beside the compute of the others.
        zero1_by_tensor: whether ZeRO-1 runs collectives tensor by tensor instead of on flat buckets.
    """

    reduction_hides_from: int
    gather_hides_from: int
    bucket_bytes: float
    hides_in_chunks: bool
    zero1_by_tensor: bool


ENGINES: dict[Engine, EngineFacts] = {
    "fsdp2": EngineFacts(0, 0, np.inf, hides_in_chunks=False, zero1_by_tensor=False),
    "megatron": EngineFacts(0, 0, np.inf, hides_in_chunks=True, zero1_by_tensor=False),
    "deepspeed": EngineFacts(3, 3, np.inf, hides_in_chunks=False, zero1_by_tensor=False),
    "nanotron": EngineFacts(3, 3, 25 * MIB, hides_in_chunks=False, zero1_by_tensor=True),
    "internevo": EngineFacts(0, 3, np.inf, hides_in_chunks=False, zero1_by_tensor=True),
}


_STEP_BYTES = {"adamw": 28.0, "muon": 20.0, "sgd": 12.0}
"""Fused update: read parameter, gradient and states, write parameter and states, fp32."""

_CLIP_BYTES = 12.0
"""Gradient clipping: read for the norm; read and write for the scale."""

_COPY_BYTES: dict[Engine, float] = {
    "fsdp2": 0.0,  # fully_shard casts when it gathers, and gradients are dropped, not zeroed
    "megatron": 6.0,  # the compute dtype's copy is written; the gradient buffer is zeroed
    "deepspeed": 24.0,  # the same; gradients cast to fp32, checked for overflow and unscaled
    "nanotron": 10.0,  # the same as megatron's, the copy in a pass of its own
    "internevo": 24.0,  # as deepspeed
}


def update_bytes_per_param(workload: Workload) -> float:
    """Bytes read and written for one parameter by the optimizer step, all passes of the engine."""
    masters = (_STEP_BYTES[workload.optimizer] + _CLIP_BYTES) * workload.master_bytes / 4
    return masters + (0.0 if workload.precision == "bf16" else _COPY_BYTES[workload.engine])


def hides(batch: LayoutBatch, workload: Workload) -> tuple[IntArray, IntArray]:
    """1 where gathers, and where reductions, run beside compute, 0 where after it [N]."""
    facts = ENGINES[workload.engine]
    return (
        np.asarray(batch.zero_stage >= facts.gather_hides_from, dtype=np.int64),
        np.asarray(batch.zero_stage >= facts.reduction_hides_from, dtype=np.int64),
    )


def num_buckets(batch: LayoutBatch, workload: Workload, num_params: FloatArray) -> FloatArray:
    """All-reduces of a layer's whole gradients [N]; a share of a bucket is filled by its neighbours."""
    buckets = num_params * workload.compute_bytes / ENGINES[workload.engine].bucket_bytes
    return np.asarray(np.where((batch.zero_stage == 0) & (buckets > 0), buckets, 1.0))


def num_collectives(batch: LayoutBatch, workload: Workload, num_tensors: int) -> IntArray:
    """Collectives of one layer's parameters under ZeRO-1 [N]: one bucket, or one a tensor."""
    by_tensor = ENGINES[workload.engine].zero1_by_tensor & (batch.zero_stage == 1)
    return np.asarray(np.where(by_tensor, num_tensors, 1), dtype=np.int64)
