"""Bytes on one device of one pipeline stage, by the phase of the step in which the peak falls.

A stage holds P parameters per tensor-parallel rank, of which R sit in embedding and head (the root unit of fully_shard) and
U in the largest block. With N = dp_shard, b the bytes of the compute dtype, m micro-batches, i of them in flight:

    parameters   4 P / N                       fp32 masters (under fp32 they are the parameters)
    optimizer    o P / N                       o = 8 for AdamW
    gradients    zero 0: 4 P    zero 1: 4 P / N, and 4 P while more than one micro-batch accumulates    zero 2, 3: 4 P / N
    unsharded    zero 0: b P if mixed precision    zero 1, 2: b P    zero 3: b (R + 2 U), this block and the prefetched one
    activations  i * (kept by the stage's layers)
    logits       T V / tp * bytes per logit on the stage with the head
    temporary    working set of one layer, gather and reduce buffers, workspace

Phase `loss`: the last micro-batch's backward begins: activations and logits, gradients of earlier micro-batches (m > 1).
Phase `update`: activations are gone, all gradients are there. The peak is the larger one; its parts are reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..schema import ClusterSpec, Workload
from ..schema.plan import MemoryBreakdown
from .coefficients import coefficients

Array = Any
"""A float or a float array; all arguments of one call broadcast together."""

_LOGIT_BYTES = {4: 12, 2: 14}
"""Bytes per logit alive when the loss is differentiated: the logits, their fp32 form where they are not fp32, log-softmax,
gradient."""


@dataclass(frozen=True, kw_only=True)
class StageContents:
    """What a stage holds, per tensor-parallel rank and micro-batch; floats or arrays."""

    params: Array
    root_params: Array
    block_params: Array
    activation_bytes: Array
    working_bytes: Array
    logits: Array


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """The choices of the layout that memory depends on; ints or arrays."""

    dp_shard: Array
    zero_stage: Array
    num_microbatches: Array
    in_flight: Array


def in_flight(schedule_is_1f1b: Array, num_microbatches: Array, pp: Array, stage_idx: Array) -> Array:
    """Micro-batches whose activations a stage holds at once: min(m, pp - stage) under 1f1b, m under gpipe."""
    return np.where(schedule_is_1f1b == 1, np.minimum(num_microbatches, pp - stage_idx), num_microbatches)


def stage_memory(stage: StageContents, step: StepShape, workload: Workload, cluster: ClusterSpec) -> dict[str, Array]:
    """Parts of the allocated peak, bytes; keys are the fields of MemoryBreakdown."""
    b = workload.compute_bytes
    sharded = stage.params / step.dp_shard
    gradients = 4.0 * np.where(step.zero_stage == 0, stage.params, sharded)
    accumulates = step.num_microbatches > 1
    unreduced = np.where((step.zero_stage == 1) & accumulates, 4.0 * stage.params, 0.0)
    buffers = np.where(step.dp_shard > 1, (b + 8.0) * np.maximum(stage.block_params, stage.root_params), 0.0)
    loss = {
        "gradients": np.where(accumulates, gradients + unreduced, 0.0),
        "activations": step.in_flight * stage.activation_bytes,
        "logits": stage.logits * float(_LOGIT_BYTES[b]),
    }
    update = {
        "gradients": gradients + unreduced,
        "activations": 0.0 * loss["activations"],
        "logits": 0.0 * loss["logits"],
    }
    at_loss = sum(loss.values()) >= sum(update.values())
    return {
        "parameters": 4.0 * sharded,
        "optimizer": float(workload.optimizer_bytes) * sharded,
        "unsharded": _unsharded(stage, step, workload),
        "temporary": stage.working_bytes + buffers + _workspace_bytes(cluster),
        **{name: np.where(at_loss, loss[name], update[name]) for name in loss},
    }


def _unsharded(stage: StageContents, step: StepShape, workload: Workload) -> Array:
    b = workload.compute_bytes
    mixed = workload.precision != "fp32"
    kept = np.where((step.zero_stage > 0) | mixed, b * stage.params, 0.0)
    return np.where(step.zero_stage == 3, b * (stage.root_params + 2 * stage.block_params), kept)


def _workspace_bytes(cluster: ClusterSpec) -> float:
    return 0.0 if cluster.weakest_device.vendor == "cpu" else float(coefficients()["memory"]["workspace_bytes"])


def total_bytes(parts: dict[str, Array]) -> Array:
    """Allocated peak."""
    return sum(parts.values())


def breakdown(parts: dict[str, Array]) -> MemoryBreakdown:
    """Numbers, whole bytes."""
    return MemoryBreakdown(**{name: int(value) for name, value in parts.items()})


def reserved_over_allocated(cluster: ClusterSpec) -> float:
    """Slack of the caching allocator; a CPU has none."""
    return 1.0 if cluster.weakest_device.vendor == "cpu" else float(coefficients()["memory"]["reserved_over_allocated"])


def upper_bytes(allocated: Array, cluster: ClusterSpec) -> Array:
    """Upper end of the interval of reserved memory: what must be within the budget."""
    return allocated * reserved_over_allocated(cluster) * (1 + coefficients()["interval"]["memory"])
