"""Bytes on one device of one pipeline stage, by the phase of the step in which the peak falls.

A stage holds P parameters per tensor-parallel rank; U are in its largest block, R in its largest unit outside the blocks
(embedding, or norm and head). With N = dp_shard, b the bytes of the compute dtype, m micro-batches, i of them in flight:

    parameters   4 P / N                       fp32 masters (under fp32 they are the parameters)
    optimizer    o P / N                       o = 8 for AdamW
    gradients    zero 0: 4 P    zero 1: 4 P / N, or 4 P where micro-batches accumulate (always so under a pipeline)
                 zero 2, 3: 4 P / N
    with levels  gradients and states have an N each (gradient_shard, optimizer_shard), masters that of the states; parameters that
                 stay within fewer ranks (zero 3) are a copy of b P / N besides, counted as unsharded
    unsharded    zero 0 to 2: b P, copies that fully_shard gathers or casts    zero 3: this unit and the block gathered in advance
    activations  i * (kept by the stage's layers)
    logits       b T V / tp on the stage with the head, turned into their gradient in place
    temporary    of the moment (`transients`): what the loss makes of a chunk, the gradients of the head and their reduction, or
                 the working set of one layer, its gradients and theirs; under a pipeline the receive buffers of all m
                 micro-batches, hidden states from one side and gradients from the other

Other engines than fsdp2 keep copies and one gradient buffer for the whole step: engine_memory.py.

fully_shard is there whenever ranks share data parallelism or parameters are cast, but for whole fp32 replicas, which DDP reduces:
their gradients end in its buckets, 4 P that are always there. Without either nothing is gathered or reduced.
Phase `full`: the last micro-batch's backward begins; activations, copies and gradients of earlier micro-batches are there.
Phase `update`: activations and copies are gone, all gradients are there. The peak is the larger one; its parts are reported.
Source: runtime/data_parallel.py, runtime/loss.py and torch's fully_shard; measured by benchmarks/apply_accuracy.py.

What other engines than our runtime hold on one device of one pipeline stage, by the phase of the step in which the peak falls.

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

from dataclasses import replace

import numpy as np

from ...schema import ClusterSpec, Workload
from ...schema.arrays import Array, FloatArray, IntArray
from ...schema.engine_facts import MemoryFacts
from ...schema.plan import MemoryBreakdown
from ..coefficients import coefficients
from ..layer.data import _is_whole, has_copies
from ..pipeline.replay import peak_in_flight_by_chunk
from .contents import (
    StageContents,
    StepShape,
    _neighbours_of_ranks,
    _of_ranks,
    _stage_shape,
    pipeline_shape,
    step_shape,
)
from .table import CostTable

_EAGER_LOGIT_BYTES = 14.0
"""Of one logit where the loss is torch's cross_entropy of logits.float(): logits, log-softmax, its gradient, the logits' (fp32 all
but the first); the fp32 copy is gone by then."""


_MORE_THAN_ANY = float(2**52)
"""Bytes beyond any device's, whose sum with its parts is exact to less than one."""


LOSS_CHUNK_ELEMENTS = 2**24
"""Logits that the loss works on at a time (runtime/loss.py: CHUNK_ELEMENTS)."""


def stage_memory(stage: StageContents, step: StepShape, workload: Workload, cluster: ClusterSpec) -> dict[str, Array]:
    """Parts of the allocated peak, bytes; keys are the fields of MemoryBreakdown."""
    stage = replace(stage, activation_bytes=stage.activation_bytes * cluster.calibration.activations)
    if not workload.engine_facts.is_own_runtime:
        return _other_engine(stage, step, workload, cluster)
    if not workload.has_backward:
        return _zeroth_order(stage, step, workload, cluster)
    b, copies = workload.compute_bytes, has_copies(step, workload)
    kept, final = _gradients(stage, step, workload)
    # fully_shard keeps them from the forward to the backward pass (reshard_after_forward=N).
    second_copy = b * np.where(step.has_second_copy, stage.kept(step), 0.0)
    receive = step.num_neighbours * step.num_microbatches * stage.boundary_bytes
    passing = _fullest(transients(stage, step, workload, cluster))
    full = {
        "gradients": kept,
        "unsharded": passing["unsharded"] + np.where(copies, second_copy, 0.0),
        "activations": step.in_flight * stage.activation_bytes,
        "logits": passing["logits"],
        "temporary": passing["temporary"] + receive,
    }
    unit = np.maximum(stage.root_params, stage.block_params)
    gathered = np.where(_is_piped(step), _gathered(stage.trained, stage, step, workload), b * stage.root_params)
    update = {
        "gradients": final,
        "unsharded": np.where(copies, gathered, 0.0),
        "activations": 0.0 * full["activations"],
        "logits": 0.0 * full["logits"],
        "temporary": _reduction(unit, stage, step, workload, cluster) + receive,
    }
    return {
        "parameters": _parameters(stage, step, workload),
        "optimizer": float(workload.optimizer_bytes) * stage.owned(step) * step.on_device,
        **_fullest([full, update], also_temporary=_workspace_bytes(cluster)),
    }


def _zeroth_order(stage: StageContents, step: StepShape, workload: Workload, cluster: ClusterSpec) -> dict[str, Array]:
    """Parameters; in a forward pass the loss or a block, and between the passes the direction of the largest tensor, which every
    rank draws whole: at most a block's, or what is outside the blocks.
    """
    none = 0.0 * stage.params
    head, block = np.where(stage.logits > 0, stage.root_params, 0.0), stage.block_params
    whole = workload.master_bytes * step.tp * np.maximum(stage.root_params, block)
    moments = [
        {
            "unsharded": _gathered(head, stage, step, workload),
            "logits": loss_bytes(stage.logits, workload),
            "temporary": none,
        },
        {
            "unsharded": _gathered(2 * block, stage, step, workload),
            "logits": none,
            "temporary": stage.working_bytes + none,
        },
        {"unsharded": none, "logits": none, "temporary": whole + none},
    ]
    return {
        "parameters": _parameters(stage, step, workload),
        "optimizer": none,
        "gradients": none,
        "activations": none,
        **_fullest(moments, also_temporary=_workspace_bytes(cluster)),
    }


def transients(
    stage: StageContents, step: StepShape, workload: Workload, cluster: ClusterSpec
) -> list[dict[str, Array]]:
    """What comes and goes while all activations are there, by moment: the loss; then the backward pass of the head and the
    reduction of its gradients, of a block and the reduction of its; unsharded parameters, logits and temporary bytes.

    Where parameters are gathered in pieces a unit's are there in its backward pass, with those of the block gathered in advance;
    what goes into a reduction stays until the next one begins (torch's FSDPParamGroup.post_backward). Under a pipeline reductions
    come after the last backward pass of all, when no activations are left.
    """
    b = workload.compute_bytes
    head = np.where(stage.logits > 0, stage.root_params, 0.0)
    block = stage.block_params
    reduces = has_copies(step, workload) & ~_is_piped(step)

    def reduction(params: Array) -> Array:
        return np.where(_is_piped(step), b * params, _reduction(params, stage, step, workload, cluster))

    def moment(params: Array, logits: Array, temporary: Array) -> dict[str, Array]:
        unsharded = _gathered(params, stage, step, workload)
        return {"unsharded": unsharded, "logits": logits, "temporary": temporary + 0.0 * stage.params}

    none = 0.0 * stage.logits
    grads = block if workload.adapters is None else stage.block_trained
    return [
        moment(head, loss_bytes(stage.logits, workload), 0.0),
        moment(head + block, b * stage.logits, b * head),
        moment(block, none, reduction(head)),
        moment(
            2 * block, none, stage.working_bytes + b * grads + np.where(reduces, 4.0 * np.maximum(head, grads), 0.0)
        ),
        moment(block, none, reduction(block)),
    ]


def _is_piped(step: StepShape) -> Array:
    """Whether the stage is one of several."""
    return np.asarray(step.num_neighbours) > 0


def _gathered(params: Array, stage: StageContents, step: StepShape, workload: Workload) -> Array:
    """Bytes of whole parameters in the compute dtype beside their shards or masters: of ``params`` where they come in pieces."""
    in_pieces = (step.zero_stage == 3) | (step.offload == 2)
    whole = workload.compute_bytes * np.where(in_pieces, params, stage.trained)
    return np.where(has_copies(step, workload), whole, 0.0)


def loss_bytes(logits: Array, workload: Workload) -> Array:
    """Bytes of logits and what the loss makes of them: ours in chunks, a compiled one in one kernel that leaves a gradient.

    Ours takes the logsumexp of a chunk's differences from the largest, in fp32, beside the chunk in fp32 (runtime/loss.py).
    """
    b = workload.compute_bytes
    if workload.fusion == "engine":
        beside = 4.0 if b == 4 else 8.0
        return b * logits + beside * np.minimum(LOSS_CHUNK_ELEMENTS, logits)
    return (2 * b if workload.fusion == "compiled" else _EAGER_LOGIT_BYTES) * logits


def _fullest(phases: list[dict[str, Array]], *, also_temporary: float = 0.0) -> dict[str, Array]:
    """Of phases with the same parts, those of the one with the largest sum."""
    largest = np.argmax(np.stack(np.broadcast_arrays(*(total_bytes(phase) for phase in phases))), axis=0)
    peak = {name: np.choose(largest, [phase[name] for phase in phases]) for name in phases[0]}
    return {**peak, "temporary": peak["temporary"] + also_temporary}


def _parameters(stage: StageContents, step: StepShape, workload: Workload) -> Array:
    """Bytes of the trained parameters as the optimizer sees them, as far as they are on the device, and of frozen ones.

    Of trained parameters whose masters are on the host a shard in the compute dtype remains under zero 3 (below it, the copies
    that every pass uses are counted as unsharded); offloaded parameters leave nothing.
    """
    left_behind = np.where(step.zero_stage == 3, workload.compute_bytes * (1.0 - step.on_device), 0.0)
    trained = stage.owned(step) * (workload.master_bytes * step.on_device + left_behind)
    return np.where(step.offload == 2, 0.0, trained + stage.frozen(step))


def _other_engine(stage: StageContents, step: StepShape, workload: Workload, cluster: ClusterSpec) -> dict[str, Array]:
    always, phases = phases_of_other_engines(stage, step, workload)
    return {**always, **_fullest(phases, also_temporary=_workspace_bytes(cluster))}


def _gradients(stage: StageContents, step: StepShape, workload: Workload) -> tuple[Array, Array]:
    """Bytes of gradients when the last backward pass begins, and when it has ended."""
    whole = float(workload.master_bytes) * stage.trained
    sharded = float(workload.master_bytes) * stage.reduced(step)
    accumulates = (step.num_microbatches > 1) | (step.num_neighbours > 0)
    # Below zero 2 whole gradients wait for the last micro-batch; each unit's are freed as its shard is made.
    final = np.where((step.zero_stage == 0) | ((step.zero_stage == 1) & accumulates), whole, sharded)
    # Sums of earlier micro-batches lie beside DDP's buckets until the last one moves into them.
    buckets = np.where(_is_whole(step, workload), whole, 0.0)
    return np.where(accumulates, final, 0.0) + buckets, final


def _reduction(params: Array, stage: StageContents, step: StepShape, workload: Workload, cluster: ClusterSpec) -> Array:
    """Gradients of one unit in the compute dtype, input and output of their fp32 reduction; gloo scatters a copy of its input."""
    b, shards = workload.compute_bytes, step.gradient_shards[0]
    unit = params if workload.adapters is None else np.minimum(params, stage.block_trained)
    copy = np.where(shards > 1, 4.0, 0.0) if cluster.weakest_device.backend.is_host else 0.0
    return np.where(has_copies(step, workload), b + 4.0 + copy + 4.0 / shards, b) * unit


def _workspace_bytes(cluster: ClusterSpec) -> float:
    is_cpu = cluster.weakest_device.backend.is_host
    return cluster.calibration.overhead_bytes + (0.0 if is_cpu else float(coefficients()["memory"]["workspace_bytes"]))


def total_bytes(parts: dict[str, Array]) -> Array:
    """Allocated peak."""
    return sum(parts.values())


def breakdown(parts: dict[str, Array]) -> MemoryBreakdown:
    """Numbers, whole bytes."""
    return MemoryBreakdown(**{name: int(value) for name, value in parts.items()})


def reserved_over_allocated(cluster: ClusterSpec) -> float:
    """Slack of the caching allocator, or of the C library's on a CPU."""
    is_cpu = cluster.weakest_device.backend.is_host
    return float(coefficients()["memory"]["resident_over_allocated_cpu" if is_cpu else "reserved_over_allocated"])


def context_bytes(cluster: ClusterSpec) -> float:
    """What the driver's tools show besides the reserved memory: context, kernels, NCCL's channels."""
    return 0.0 if cluster.weakest_device.backend.is_host else float(coefficients()["memory"]["context_bytes"])


def interval_factors(workload: Workload, cluster: ClusterSpec) -> tuple[float, float]:
    """Ends of the nominal 90 % interval of a measured peak, as multiples of the predicted one."""
    low, high = coefficients()["interval"]["memory"][_engine_key(workload, cluster)]
    return float(low), float(high)


def reserved_bytes(allocated: Array, parameters: Array, workload: Workload, cluster: ClusterSpec) -> Array:
    """What the caching allocator holds: slack on everything but a frozen model, which is loaded once into blocks of its size."""
    static = 0.0 if workload.adapters is None else parameters
    return static + (allocated - static) * reserved_over_allocated(cluster)


def required_bytes(allocated: Array, parameters: Array, workload: Workload, cluster: ClusterSpec) -> Array:
    """What must be within the budget for a run to count as fitting: the reserved peak times a margin of its engine.

    The margin is no end of an interval but where decisions are best: `fits_margin` in coefficients.toml.
    """
    margin = float(coefficients()["memory"]["fits_margin"][_engine_key(workload, cluster)])
    return margin * reserved_bytes(allocated, parameters, workload, cluster)


def activation_headroom_bytes(
    stage: StageContents, step: StepShape, workload: Workload, cluster: ClusterSpec, *, cap_bytes: float
) -> Array:
    """Activations that each micro-batch may keep, bytes, for a device to require no more than ``cap_bytes`` before its update.

    Negative where it requires more without any. Required bytes grow with the activations by the same slope everywhere, so one
    evaluation with so many of them that the update is not the peak tells the rest.
    """
    each = step.in_flight * cluster.calibration.activations
    parts = stage_memory(replace(stage, activation_bytes=_MORE_THAN_ANY / each), step, workload, cluster)
    margin, slack = required_bytes(1.0, 0.0, workload, cluster), reserved_over_allocated(cluster)
    reserved = cap_bytes / margin * slack  # the margin above includes the slack of one allocated byte
    static = 0.0 if workload.adapters is None else parts["parameters"]
    allocated = static + (reserved - static) / slack
    return (allocated - (total_bytes(parts) - _MORE_THAN_ANY)) / each


def lower_bound_required_bytes(allocated: Array, workload: Workload, cluster: ClusterSpec) -> Array:
    """Lower bound of `required_bytes` where only a bound of the allocated peak is known."""
    return required_bytes(allocated, allocated, workload, cluster)


def _engine_key(workload: Workload, cluster: ClusterSpec) -> str:
    return "cpu" if cluster.weakest_device.backend.is_host else workload.engine


def phases_of_other_engines(
    stage: StageContents, step: StepShape, workload: Workload
) -> tuple[dict[str, Array], list[dict[str, Array]]]:
    """Bytes that are there all the time, and those of each phase, under the names of MemoryBreakdown."""
    engine, b = _memory_facts(workload), workload.compute_bytes
    activations = step.in_flight * stage.activation_bytes
    gradients, final = _gradients_of_other_engines(stage, step, workload)
    receive = step.num_neighbours * np.minimum(step.in_flight, 2) * stage.boundary_bytes
    always = {
        **_states_of_other_engines(stage, step, workload),
        "unsharded": _copies_of_other_engines(stage, step, workload),
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


def _states_of_other_engines(stage: StageContents, step: StepShape, workload: Workload) -> dict[str, Array]:
    sharded = stage.owned(step)
    masters: Array = np.where(_reads_masters(workload) & (step.zero_stage < 3), stage.trained, sharded)
    trained = float(workload.master_bytes) * masters * step.on_device
    return {
        "parameters": np.where(step.offload == 2, 0.0, trained + stage.frozen(step)),
        "optimizer": float(workload.optimizer_bytes) * sharded * step.on_device,
    }


def _reads_masters(workload: Workload) -> bool:
    """Whether the parameters that the products read are those the optimizer updates."""
    return workload.precision in ("fp32", "bf16")


def _copies_of_other_engines(stage: StageContents, step: StepShape, workload: Workload) -> Array:
    """Parameters in the compute dtype; under zero 3 this rank's shard of them and what is gathered at once."""
    b, live = workload.compute_bytes, _memory_facts(workload).live_elements
    units = np.maximum(stage.root_params + 2 * stage.block_params, np.minimum(live, stage.params))
    shard = np.where(_reads_masters(workload) & ~np.asarray(step.has_second_copy), 0.0, stage.kept(step))
    # The partition that the passes read, and where those stay within fewer ranks the one that the first gather reads.
    primary = (
        0.0
        if _reads_masters(workload) or not workload.engine_facts.data_parallel.gathers_from_owners
        else stage.owned(step)
    )
    shard = np.where(step.offload == 2, 0.0, shard + np.where(step.has_second_copy, primary, 0.0))
    in_pieces = (step.zero_stage == 3) | (step.offload == 2)
    return b * np.where(in_pieces, units + shard, 0.0 if _reads_masters(workload) else stage.trained)


def _gradients_of_other_engines(stage: StageContents, step: StepShape, workload: Workload) -> tuple[Array, Array]:
    """Bytes of gradients before and in the update.

    DeepSpeed's BF16_Optimizer adds gradients in the compute dtype up in an fp32 copy of all of them. With the states on the host
    each shard leaves for it as soon as it is reduced.
    """
    g, sharded = workload.gradient_bytes, stage.owned(step)
    keeps = _memory_facts(workload).keeps_fp32_gradients
    if keeps and g == 4:
        g += workload.compute_bytes
    # With offloaded parameters every engine streams so.
    leaves = (keeps & (step.zero_stage >= 2) & (step.offload > 0)) | (step.offload == 2)
    buffer = np.where(leaves, 0.0, g * np.where(step.zero_stage >= 2, stage.reduced(step), stage.trained))
    # Under zero 3 the update goes through sub-groups of 1e9 parameters.
    updated = np.where(step.zero_stage == 3, np.minimum(1e9, sharded), sharded) * step.on_device
    final = buffer + (0.0 if g >= workload.master_bytes else 4.0 * updated)
    return np.where(keeps & (step.zero_stage < 3), final, buffer), final


def stage_memory_terms(
    costs: CostTable, idx: int, contents: StageContents, stage_idx: IntArray
) -> dict[str, FloatArray]:
    """Memory parts of stages ``stage_idx`` of layout ``idx``; the chunks of a rank count as one stage, equal to each other."""
    return stage_memory(contents, _stage_shape(costs, idx, stage_idx), costs.workload, costs.cluster)


def stage_headroom_bytes(
    costs: CostTable, idx: int, contents: StageContents, stage_idx: IntArray, *, cap_bytes: float
) -> FloatArray:
    """Activations that stages ``stage_idx`` of layout ``idx`` may keep for each micro-batch, bytes; negative where none fit."""
    shape = _stage_shape(costs, idx, stage_idx)
    room = activation_headroom_bytes(contents, shape, costs.workload, costs.cluster, cap_bytes=cap_bytes)
    without = replace(contents, activation_bytes=np.zeros_like(contents.params))
    parts = stage_memory(without, shape, costs.workload, costs.cluster)
    required = required_bytes(total_bytes(parts), parts["parameters"], costs.workload, costs.cluster)
    return np.asarray(np.where(required <= cap_bytes, room, -np.inf))


def rank_memory_terms(
    costs: CostTable, idx: int, contents: StageContents
) -> tuple[StageContents, dict[str, FloatArray]]:
    """Contents and memory parts of each rank [..., pp] of layout ``idx``, given those of its stages [..., S], chunks included.

    Activations are those of the fullest moment of the schedule (pipeline_replay.held).
    """
    shape = pipeline_shape(costs, idx)
    ranks = np.array(shape.rank_of_stage)
    activations = np.asarray(contents.activation_bytes)
    peak = np.stack(
        [
            (activations[..., ranks == r] @ counts.T).max(axis=-1)
            for r, counts in enumerate(peak_in_flight_by_chunk(shape))
        ],
        axis=-1,
    )
    whole = _of_ranks(costs, idx, contents)
    kept = whole.activation_bytes
    flight = np.divide(peak, kept, out=np.zeros_like(peak), where=kept > 0)
    step = step_shape(costs.batch, flight, num_neighbours=_neighbours_of_ranks(costs, shape), at=idx)
    return whole, stage_memory(whole, step, costs.workload, costs.cluster)


def rank_headroom_bytes(costs: CostTable, idx: int, contents: StageContents, *, cap_bytes: float) -> FloatArray:
    """Activations that each rank [..., pp] of layout ``idx`` may hold at once, given the contents of its stages [..., S]."""
    shape = pipeline_shape(costs, idx)
    whole, once = _of_ranks(costs, idx, contents), np.ones(shape.pp)
    step = step_shape(costs.batch, once, num_neighbours=_neighbours_of_ranks(costs, shape), at=idx)
    return np.asarray(activation_headroom_bytes(whole, step, costs.workload, costs.cluster, cap_bytes=cap_bytes))


def _memory_facts(workload: Workload) -> MemoryFacts:
    facts = workload.engine_facts.memory
    assert facts is not None
    return facts
