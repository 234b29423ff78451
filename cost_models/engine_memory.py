"""What other engines than our runtime hold on one device of one pipeline stage, by the phase of the step in which the peak falls.

With P parameters per tensor-parallel rank, N ranks that shard states, b bytes of the compute dtype and g of a gradient:

    parameters  4 P / N       fp32 masters; whole and without copies under fp32
    optimizer   8 P / N       AdamW
    unsharded   b P           copies that the products read; zero 3: b P / N and what is gathered at once
    gradients   g P           one buffer for the whole step (zero 2 and 3: g P / N); where g < 4 fp32 ones of the shard, in the
                              update only, or for the whole step under DeepSpeed
    buckets     DeepSpeed     two of reduce_bucket_size fp32 elements

so 18 bytes a parameter for Megatron with fp32 gradients (6 + 12 / N with its distributed optimizer), 16 with gradients in the
compute dtype, and 20 for DeepSpeed (4 + 16 / N). Phases: `loss` (all activations and the logits), `backward` (all activations
and the working set of a layer), `update` (no activations). The peak is the largest.
Sources: Megatron-LM docs/source/api-guide/dist_optimizer.md; DeepSpeed's configuration (defaults of zero_optimization); terms
of Megatron fitted to four peaks of Megatron-LM on 8 B200 (0.3 % left), of nanotron checked: `meshwright validate`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..schema import Workload
from ..schema.workload import Engine
from .engines import DATA_PARALLEL

if TYPE_CHECKING:
    from .stage_contents import StageContents, StepShape

Array = Any


@dataclass(frozen=True, kw_only=True)
class MemoryFacts:
    """How an engine's kernels and buffers differ from our runtime's.

    Attributes:
        logit_bytes: of one logit with everything the loss makes of it at its peak.
        glu_tensors: tensors of the feed-forward width that a gated activation keeps with its output.
        qkv_copies: packed outputs of the query-key-value product beside what attention keeps: 1 where values are a view of
            them, so that all of it stays.
        kv_copies: further copies of keys and values.
        unfused_rmsnorm: an RMSNorm is several kernels and keeps its input in fp32 and normalised besides.
        keeps_all_outputs: of every operator of a block, also of those whose backward pass does not read them.
        keeps_fp32_gradients: of this rank's shard, from one step to the next.
        bucket_bytes: of the buffers gradients are reduced in.
        live_elements: of the parameters gathered at once under zero 3.
        keeps_expert_output: experts' results are weighted by themselves, which needs them again for the gradient of the weights;
            Megatron weights inside the activation instead.
    """

    logit_bytes: float
    glu_tensors: float
    qkv_copies: int = 0
    kv_copies: int = 0
    unfused_rmsnorm: bool = False
    keeps_all_outputs: bool = False
    keeps_fp32_gradients: bool = False
    bucket_bytes: float = 0.0
    live_elements: float = 0.0
    keeps_expert_output: bool = True


MEMORY: dict[Engine, MemoryFacts] = {
    # Logits, their fp32 softmax, their gradient; fused SwiGLU; rotary embedding makes new q and k, v stays a view.
    # [fitted: logit_bytes and qkv_copies to the four peaks of `meshwright validate --source simumax` without expert parallelism]
    "megatron": MemoryFacts(logit_bytes=8.0, glu_tensors=3, qkv_copies=1, keeps_expert_output=False),
    # Megatron's kernels under its own optimizer.
    "internevo": MemoryFacts(logit_bytes=8.0, glu_tensors=3, qkv_copies=1, keeps_expert_output=False),
    # Megatron's operators, one module each, so that any of them can be recomputed (Aceso, EuroSys 2024): inputs and outputs
    # of all of them stay. [fitted: 0.19 GiB a layer and sequence of OPT-350M at tp 4, `meshwright validate --source libai_sailor2`]
    "aceso": MemoryFacts(logit_bytes=10.0, glu_tensors=4, qkv_copies=1, keeps_all_outputs=True),
    # sharded_cross_entropy: logits, fp32 copy, less their maximum, exponentials; torch's silu and product; k and v concatenated.
    "nanotron": MemoryFacts(logit_bytes=14.0, glu_tensors=4, qkv_copies=1, kv_copies=1),
    # Megatron's vocab_parallel_cross_entropy: logits, their fp32 copy, softmax; eager activations;
    # reduce_bucket_size 5e8 twice (overlap_comm), max_live_parameters 1e9.
    # [fitted: 20 bytes a parameter and 3.7 GiB besides are what the runs of `meshwright validate --source sailor` hold]
    "deepspeed": MemoryFacts(
        logit_bytes=10.0,
        glu_tensors=4,
        unfused_rmsnorm=True,
        keeps_fp32_gradients=True,
        bucket_bytes=2 * 5e8 * 4,
        live_elements=1e9,
    ),
}


def phases(
    stage: StageContents, step: StepShape, workload: Workload
) -> tuple[dict[str, Array], list[dict[str, Array]]]:
    """Bytes that are there all the time, and those of each phase, under the names of MemoryBreakdown."""
    engine, b = MEMORY[workload.engine], workload.compute_bytes
    activations = step.in_flight * stage.activation_bytes
    gradients, final = _gradients(stage, step, workload)
    receive = step.num_neighbours * np.minimum(step.in_flight, 2) * stage.boundary_bytes
    always = {
        **_states(stage, step, workload),
        "unsharded": _copies(stage, step, workload),
    }
    # Zero 3 has one buffer, in the compute dtype.
    buckets = engine.bucket_bytes * np.where(step.zero_stage == 3, b / 8.0, 1.0)
    # In fp32 there is no copy: logits, softmax, gradient.
    logit_bytes = engine.logit_bytes if b < 4 else max(engine.logit_bytes, 12.0)
    loss = {
        "gradients": gradients,
        "activations": activations,
        "logits": logit_bytes * stage.logits,
        "temporary": receive + buckets,
    }
    backward = {**loss, "logits": 0.0 * stage.logits, "temporary": loss["temporary"] + stage.working_bytes}
    update = {**backward, "gradients": final, "activations": 0.0 * activations, "temporary": buckets + 0.0 * receive}
    return always, [loss, backward, update]


def _states(stage: StageContents, step: StepShape, workload: Workload) -> dict[str, Array]:
    sharded = stage.owned(step)
    masters: Array = np.where(_is_master(workload) & (step.zero_stage < 3), stage.trained, sharded)
    trained = float(workload.master_bytes) * masters * step.on_device
    return {
        "parameters": np.where(step.offload == 2, 0.0, trained + stage.frozen(step)),
        "optimizer": float(workload.optimizer_bytes) * sharded * step.on_device,
    }


def _is_master(workload: Workload) -> bool:
    """Whether the parameters that the products read are those the optimizer updates."""
    return workload.precision in ("fp32", "bf16")


def _copies(stage: StageContents, step: StepShape, workload: Workload) -> Array:
    """Parameters in the compute dtype; under zero 3 this rank's shard of them and what is gathered at once."""
    b, live = workload.compute_bytes, MEMORY[workload.engine].live_elements
    units = np.maximum(stage.root_params + 2 * stage.block_params, np.minimum(live, stage.params))
    shard = np.where(_is_master(workload) & ~np.asarray(step.has_second_copy), 0.0, stage.kept(step))
    # The partition that the passes read, and where those stay within fewer ranks the one that the first gather reads.
    primary = 0.0 if _is_master(workload) or not DATA_PARALLEL[workload.engine].gathers_owned else stage.owned(step)
    shard = np.where(step.offload == 2, 0.0, shard + np.where(step.has_second_copy, primary, 0.0))
    in_pieces = (step.zero_stage == 3) | (step.offload == 2)
    return b * np.where(in_pieces, units + shard, 0.0 if _is_master(workload) else stage.trained)


def _gradients(stage: StageContents, step: StepShape, workload: Workload) -> tuple[Array, Array]:
    """Bytes of gradients before and in the update.

    DeepSpeed's BF16_Optimizer adds gradients in the compute dtype up in an fp32 copy of all of them. With the states on the host
    each shard leaves for it as soon as it is reduced.
    """
    g, sharded = workload.gradient_bytes, stage.owned(step)
    keeps = MEMORY[workload.engine].keeps_fp32_gradients
    if keeps and g == 4:
        g += workload.compute_bytes
    # With offloaded parameters every engine streams so.
    leaves = (keeps & (step.zero_stage >= 2) & (step.offload > 0)) | (step.offload == 2)
    buffer = np.where(leaves, 0.0, g * np.where(step.zero_stage >= 2, stage.reduced(step), stage.trained))
    # Under zero 3 the update goes through sub-groups of 1e9 parameters.
    updated = np.where(step.zero_stage == 3, np.minimum(1e9, sharded), sharded) * step.on_device
    final = buffer + (0.0 if g >= workload.master_bytes else 4.0 * updated)
    return np.where(keeps & (step.zero_stage < 3), final, buffer), final
