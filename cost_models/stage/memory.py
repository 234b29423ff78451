"""Bytes on one device of one pipeline stage, by the phase of the step in which the peak falls.

A stage holds P parameters per tensor-parallel rank; U are in its largest block, R in its largest unit outside the blocks
(embedding, or norm and head). With N = dp_shard, b the bytes of the compute dtype, m micro-batches, i in flight, our runtime has

    parameters   4 P / N                       fp32 masters (under fp32 they are the parameters)
    optimizer    o P / N                       o = 8 for AdamW
    gradients    zero 0: 4 P    zero 1: 4 P / N, or 4 P where micro-batches accumulate (always so under a pipeline)
                 zero 2, 3: 4 P / N, under a pipeline 4 P, as torch reduces after the last backward pass only
    with levels  gradients and states have an N each (gradient_shard, optimizer_shard), masters that of the states; parameters that
                 stay within fewer ranks (zero 3) are a copy of b P / N besides, counted as unsharded
    unsharded    zero 0 to 2: b P, copies that fully_shard gathers or casts    zero 3: this unit and the blocks gathered in advance
    activations  i * (saved by the stage's layers, and what it sends on: torch's pipelining keeps it; less what it received)
    logits       b T V / tp on the stage with the head, turned into their gradient in place; of every micro-batch between its
                 forward and its backward pass there (all of them under gpipe)
    temporary    of the moment (`transients`): what the loss makes of a chunk, the gradients of the head and their reduction, or
                 the working set of one layer, its gradients and theirs; under a pipeline the receive buffers of all m
                 micro-batches, hidden states from one side and gradients from the other; the tokens of all sequences of the step

fully_shard is used whenever ranks share data parallelism or parameters are cast, but for fp32 replicas, which DDP reduces:
their gradients end in its buckets, 4 P that are always present. Without either nothing is gathered or reduced.
Phase `full`: the last micro-batch's backward begins; activations, copies and gradients of earlier micro-batches are present.
Phase `update`: activations and copies are gone, all gradients are present. The peak is the larger one; its terms are reported.
Source: runtime/data_parallel.py, runtime/loss.py and torch's fully_shard; measured by benchmarks/apply_accuracy.py.

With g the bytes of a gradient, other engines have, over N ranks that shard states,

    parameters  4 P / N       fp32 masters; unsharded and without copies under fp32
    optimizer   8 P / N       AdamW
    unsharded   b P           copies that the products read; zero 3: b P / N and what is gathered at once
    gradients   g P           one buffer for the entire step (zero 2 and 3: g P / N); where g < 4 fp32 ones of the shard, in the
                              update only, or for the entire step under DeepSpeed
    buckets     DeepSpeed     two of reduce_bucket_size fp32 elements

so 18 bytes a parameter for Megatron with fp32 gradients (6 + 12 / N with its distributed optimizer), 20 for DeepSpeed (4 + 16 / N).
The peak is that of the phase `loss` (all activations and the logits), `backward` (and the working set of a layer) or `update`.
Sources: Megatron-LM docs/source/api-guide/dist_optimizer.md; DeepSpeed's configuration (defaults of zero_optimization).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...schema import Workload
from ...schema.training_plan import MemoryBreakdown
from ...schema.units import Array
from ..coefficients import Scenario
from ..layer.data import buffered_gradients, has_copies, summed_gradients, waits_for_pipeline
from ..layer.parallel import exchange_buffer_bytes, userbuffers_bytes
from .passing import (
    MemoryTerms,
    StageContents,
    StepShape,
    final_reduction_bytes,
    gathered_bytes,
    is_host,
    last_reduction_bytes,
    loss_bytes,
    reduction_bytes,
    transients,
)

_TOKEN_BYTES = 8  # runtime/training/train.py gives a step all its sequences at once, as torch.long
_MORE_THAN_ANY = float(2**52)  # bytes beyond any device's, whose sum with its terms is exact to less than one


def stage_memory(
    stage: StageContents, step: StepShape, scenario: Scenario, fullest: MemoryTerms | None = None
) -> MemoryTerms:
    """Return the terms of the allocated peak, bytes; keys are the fields of MemoryBreakdown.

    Args:
        fullest: terms of the fullest moment of an order of passes (fullest.py), of which the step does not know.
    """
    workload = scenario.workload
    activations = scenario.cluster.calibration.activations * (stage.activation_bytes + stage.output_bytes)
    stage = replace(stage, activation_bytes=activations)
    if workload.engine_facts.memory is not None:
        return _other_engine(stage, step, scenario)
    if not workload.has_backward:
        return _zeroth_order(stage, step, scenario)
    moments = _moments(stage, step, scenario) if fullest is None else [fullest]
    receive = (step.num_neighbours + step.input_gradients) * step.num_microbatches * stage.boundary_bytes
    tokens = _TOKEN_BYTES * (workload.seq_len + 1) * step.num_sequences
    return {
        "parameters": _parameters(stage, step, workload),
        "optimizer": _states(stage.owned(step), step, workload),
        **_fullest(moments, also_temporary=_workspace_bytes(scenario) + receive + tokens),
    }


def _moments(stage: StageContents, step: StepShape, scenario: Scenario) -> list[MemoryTerms]:
    """Return what is present with all activations, with those that gradients are beside, and in the update."""
    workload = scenario.workload
    b, copies, waits = workload.compute_bytes, has_copies(step, workload), waits_for_pipeline(step, workload)
    before, final = summed_gradients(stage, step, workload)
    # fully_shard keeps them from the forward to the backward pass (reshard_after_forward=N).
    second_copy = b * np.where(step.has_second_copy, stage.stored(step), 0.0)
    passing = _fullest(transients(stage, step, scenario))
    of_one = b * stage.logits if workload.loss == "engine" else 0.0
    unit = np.maximum(stage.root_params, stage.block_params)
    # Of several chunks the others have been reduced by then; how much the last one has is not known here.
    gathered = np.where(waits, gathered_bytes(stage.trained, stage, step, workload), b * stage.root_params)
    gathered = np.where(step.reduces_apart, 0.0, gathered)
    if workload.update == "in_backward":
        reduced = reduction_bytes(unit, stage, step, scenario)
    else:
        reduced = last_reduction_bytes(unit, stage, step, scenario)
    # The last one of several chunks has all its gradients still: no less than the input of a unit's sum.
    finally_reduced = np.where(step.reduces_apart, 4.0 * unit, final_reduction_bytes(stage, step, scenario))
    reduced = np.where(waits, np.where(copies, finally_reduced, b * unit), reduced)
    sharded = float(workload.master_bytes) * stage.reduced(step)
    update = {
        "gradients": np.where(step.reduces_apart, sharded, final),
        "unsharded": np.where(copies, gathered, 0.0),
        "activations": 0.0 * stage.activation_bytes,
        "logits": 0.0 * passing["logits"],
        "temporary": reduced,
    }

    def moment(in_flight: Array, gradients: Array) -> MemoryTerms:
        of_logits = np.minimum(step.logits_in_flight, np.maximum(in_flight, 1))
        return {
            "gradients": gradients,
            "unsharded": passing["unsharded"] + np.where(copies, second_copy, 0.0),
            "activations": np.maximum(in_flight * stage.activation_bytes + passing["activations"], 0.0),
            "logits": passing["logits"] + (of_logits - 1) * of_one,
            "temporary": passing["temporary"],
        }

    # As the first block runs backward nearly all gradients are there; of a single pass its neighbours' are still to come.
    block = np.minimum(stage.block_params, stage.trained)
    is_repeated = waits & (step.num_microbatches > 1)
    later = block + np.where(waits, 0.0, stage.root_params)
    to_come = np.where(is_repeated, 0.0, np.minimum(later, stage.trained) / np.maximum(stage.trained, 1.0))
    pieces = gathered_bytes(np.minimum((1 + step.prefetch) * block, stage.trained), stage, step, workload)
    copied = np.where(step.gathers_in_pieces, pieces, b * (block + stage.root_params))
    all_copies = gathered_bytes(stage.trained, stage, step, workload)
    late = {
        "gradients": np.maximum(
            update["gradients"] * (1 - to_come),
            np.where((step.num_microbatches > 1) & ~step.reduces_apart, before, 0.0),
        ),
        "unsharded": np.where(copies, np.where(waits, np.where(step.reduces_apart, 0.0, all_copies), copied), 0.0),
        "activations": np.minimum(stage.block_activation_bytes, step.in_flight * stage.activation_bytes),
        "logits": 0.0 * passing["logits"],
        "temporary": stage.working_bytes + np.where(copies & ~waits, 4.0 * stage.block_trained, 0.0),
    }
    # Under a pipeline a backward pass ends with the gradient of the embedding, before it is added to those of earlier passes.
    summed = step.summed_in_flight
    all_summed = np.where(summed < 0, 0.0, before)
    embedded = moment(np.where(summed < 0, 0, np.maximum(step.in_flight - 1, 0)), all_summed)
    is_embedding = step.is_piped & (stage.logits == 0) & (workload.adapters is None)
    embedded["temporary"] = np.where(is_embedding, b * stage.root_params, 0.0) + 0.0 * passing["temporary"]
    first = moment(step.in_flight, np.where(summed < step.in_flight, 0.0, before))
    # The gradient of the head is cast before there are any of the blocks.
    of_head = np.where(waits & copies & (stage.logits > 0), np.minimum(stage.root_params, stage.trained), 0.0)
    cast = {**first, "gradients": float(workload.master_bytes) * of_head, "logits": 0.0 * first["logits"]}
    cast["temporary"] = b * of_head + 0.0 * first["temporary"]
    # The gradients of embedding and head, if they are one, and their sum.
    is_one = np.where(stage.ends_are_one & ~step.is_piped, stage.root_params, 0.0)
    of_blocks = 1.0 - np.where(step.num_microbatches > 1, 0.0, np.minimum(is_one / np.maximum(stage.trained, 1.0), 1.0))
    tied = {**update, "gradients": update["gradients"] * of_blocks, "temporary": 3.0 * b * is_one}
    tied["temporary"] = tied["temporary"] + np.where(copies & (is_one > 0), 4.0 * stage.block_trained, 0.0)
    return [first, cast, tied, moment(np.maximum(summed, 0), all_summed), embedded, late, update]


def _zeroth_order(stage: StageContents, step: StepShape, scenario: Scenario) -> MemoryTerms:
    """Return parameters; in a forward pass the loss or a block, and between the passes the direction of the largest tensor.

    Every rank draws the direction unsharded: at most a block's, or what is outside the blocks.
    """
    workload, none = scenario.workload, 0.0 * stage.params
    head, block = np.where(stage.logits > 0, stage.root_params, 0.0), stage.block_params
    direction = workload.master_bytes * step.tp * np.maximum(stage.root_params, block)
    unsharded_of_head, unsharded = (
        gathered_bytes(params, stage, step, workload) for params in (head, (1 + step.prefetch) * block)
    )
    moments = [
        {
            "unsharded": unsharded_of_head,
            "logits": loss_bytes(stage.logits, workload, stage.boundary_bytes),
            "temporary": none,
        },
        {"unsharded": unsharded, "logits": none, "temporary": stage.working_bytes + none},
        {"unsharded": none, "logits": none, "temporary": direction + none},
    ]
    return {
        "parameters": _parameters(stage, step, workload),
        "optimizer": none,
        "gradients": none,
        "activations": none,
        **_fullest(moments, also_temporary=_workspace_bytes(scenario)),
    }


def _states(owned: Array, step: StepShape, workload: Workload) -> Array:
    """Return the bytes of optimizer states on the device; pages that the driver moves are not the allocator's."""
    return 0.0 * owned if workload.paged_states else float(workload.optimizer_bytes) * owned * step.on_device


def _parameters(stage: StageContents, step: StepShape, workload: Workload) -> Array:
    """Return the bytes of trained parameters as the optimizer sees them, as far as they are on the device, and of frozen ones.

    Of trained parameters whose masters are on the host a shard in the compute dtype remains under zero 3 (below it, the copies
    that every pass uses are counted as unsharded); offloaded parameters leave nothing.
    """
    remaining = np.where(step.zero_stage == 3, workload.compute_bytes * (1.0 - step.on_device), 0.0)
    trained = stage.owned(step) * (workload.master_bytes * step.on_device + remaining)
    return np.where(step.offload == 2, 0.0, trained + stage.frozen(step, workload))


def _other_engine(stage: StageContents, step: StepShape, scenario: Scenario) -> MemoryTerms:
    workload, b = scenario.workload, scenario.workload.compute_bytes
    facts = workload.engine_facts.memory
    assert facts is not None, "all engines but our own runtime have them"
    reads_masters = workload.is_full_precision or workload.precision == "bf16"
    activations = step.in_flight * stage.activation_bytes
    buffers = userbuffers_bytes(stage.boundary_bytes, step, workload)
    buffers = buffers + exchange_buffer_bytes(stage.boundary_bytes, step.experts, scenario)
    in_pool = np.where(step.cuda_graphs, 1.0, 0.0)  # what graphs use in their passes is nobody else's
    before, final = buffered_gradients(stage, step, workload, keeps_fp32=facts.keeps_fp32_gradients)
    receive = step.num_neighbours * np.minimum(step.in_flight, 2) * stage.boundary_bytes
    # Zero 3 has one buffer, in the compute dtype; without sharding both are in the gradients' own.
    buckets = facts.bucket_bytes * np.choose(step.zero_stage, [b / 4.0, 1.0, 1.0, b / 8.0])
    # In fp32 there is no copy: logits, softmax, gradient.
    logits: Array = (facts.logit_bytes if b < 4 else max(facts.logit_bytes, 12.0)) * stage.logits
    if workload.loss != "engine":
        logits = loss_bytes(stage.logits, workload, stage.boundary_bytes)
    # Reduced as soon as they are there, or made in advance; otherwise products add to a buffer.
    gradients_leave = (np.asarray(step.zero_stage) >= 2) | (workload.loss == "fused")
    of_head = np.where(gradients_leave & (stage.logits > 0) & (workload.adapters is None), b * stage.root_params, 0.0)
    loss = {
        "gradients": before,
        "activations": activations,
        "logits": logits,
        "temporary": receive + buckets + in_pool * stage.working_bytes + of_head,
    }
    backward = {**loss, "logits": 0.0 * stage.logits, "temporary": receive + buckets + stage.working_bytes}
    remaining = buckets + in_pool * stage.working_bytes + 0.0 * receive
    update = {**backward, "gradients": final, "activations": in_pool * activations, "temporary": remaining}
    sharded = stage.owned(step)
    masters: Array = np.where(reads_masters & (step.zero_stage < 3), stage.trained, sharded)
    trained = float(workload.master_bytes) * masters * step.on_device
    # Copies that the products read: a shard and what is gathered at once, or all of them.
    live = np.minimum(facts.live_elements, stage.params)
    by_block = stage.root_params + 2 * stage.block_params
    largest = np.maximum(stage.root_params, stage.block_params / 3)
    units = np.maximum(live, largest) if facts.live_elements else by_block  # DeepSpeed gathers product by product
    shard = np.where(reads_masters & ~np.asarray(step.has_second_copy), 0.0, stage.stored(step))
    # The partition that the passes read, and where those stay within fewer ranks the one that the first gather reads.
    primary = sharded if workload.engine_facts.data_parallel.gathers_from_owners and not reads_masters else 0.0
    shard = np.where(step.offload == 2, 0.0, shard + np.where(step.has_second_copy, primary, 0.0))
    copies = b * np.where(step.gathers_in_pieces, units + shard, 0.0 if reads_masters else stage.trained)
    return {
        "parameters": np.where(step.offload == 2, 0.0, trained + stage.frozen(step, workload)),
        "optimizer": _states(sharded, step, workload),
        "unsharded": copies,
        **_fullest([loss, backward, update], also_temporary=_workspace_bytes(scenario) + buffers),
    }


def _fullest(phases: list[MemoryTerms], *, also_temporary: Array = 0.0) -> MemoryTerms:
    """Return, of phases with the same terms, those of the one with the largest sum."""
    largest = np.argmax(np.stack(np.broadcast_arrays(*(total_bytes(phase) for phase in phases))), axis=0)
    peak = {name: np.choose(largest, [phase[name] for phase in phases]) for name in phases[0]}
    return {**peak, "temporary": peak["temporary"] + also_temporary}


def _workspace_bytes(scenario: Scenario) -> float:
    workspace = 0.0 if is_host(scenario) else float(scenario.coefficients["memory"]["workspace_bytes"])
    return scenario.cluster.calibration.overhead_bytes + workspace


# From terms to what must fit


def total_bytes(terms: MemoryTerms) -> Array:
    """Return the allocated peak."""
    return sum(terms.values())


def breakdown(terms: MemoryTerms) -> MemoryBreakdown:
    """Return the terms as numbers, integer bytes."""
    return MemoryBreakdown(**{name: int(value) for name, value in terms.items()})


def reserved_over_allocated(scenario: Scenario) -> float:
    """Return the slack of the caching allocator, or of the C library's on a CPU."""
    name = "resident_over_allocated_cpu" if is_host(scenario) else "reserved_over_allocated"
    return float(scenario.coefficients["memory"][name])


def context_bytes(scenario: Scenario) -> float:
    """Return what the driver's tools show besides the reserved memory: context, kernels, NCCL's channels."""
    return 0.0 if is_host(scenario) else float(scenario.coefficients["memory"]["context_bytes"])


def process_bytes(scenario: Scenario) -> float:
    """Return what a process on a CPU grows by besides its tensors, where that was measured (profilers/measure/process.py).

    The budget does not count it: it is part of the cluster's ``reserved_bytes``.
    """
    profile = scenario.cluster.profile
    measured = profile.allocator if profile is not None and is_host(scenario) else None
    return 0.0 if measured is None else float(measured.process_bytes)


def reserved_bytes(allocated: Array, parameters: Array, scenario: Scenario) -> Array:
    """Return what the caching allocator holds: slack on all but a frozen model, which is loaded once into blocks of its size."""
    static = 0.0 if scenario.workload.adapters is None else parameters
    return static + (allocated - static) * reserved_over_allocated(scenario)


def required_bytes(allocated: Array, parameters: Array, scenario: Scenario) -> Array:
    """Return what must be within the budget for a run to count as fitting: the reserved peak times a margin of its engine.

    The margin is no end of an interval but where decisions are best: `fits_margin` in coefficients.toml.
    """
    margin = float(scenario.coefficients["memory"]["fits_margin"][_engine_key(scenario)])
    return margin * reserved_bytes(allocated, parameters, scenario)


def required_by_terms(terms: MemoryTerms, scenario: Scenario) -> Array:
    """Return `required_bytes` of the terms of a stage."""
    return required_bytes(total_bytes(terms), terms["parameters"], scenario)


def lower_bound_required_bytes(allocated: Array, scenario: Scenario) -> Array:
    """Return a lower bound of `required_bytes` where only a bound of the allocated peak is known."""
    return required_bytes(allocated, allocated, scenario)


def activation_headroom_bytes(stage: StageContents, step: StepShape, scenario: Scenario, *, cap_bytes: float) -> Array:
    """Return the bytes that each micro-batch may save for a device to require at most ``cap_bytes`` before its update.

    Negative where it requires more without any. Required bytes grow with the activations by the same slope everywhere, so one
    evaluation with so many of them that the update is not the peak tells the rest: with the micro-batches that are in flight at
    most, and with those that are so beside all gradients.
    """
    headroom = _headroom_bytes(stage, step, scenario, cap_bytes)
    summed = np.asarray(step.summed_in_flight)
    if not np.any((summed > 0) & (summed < step.in_flight)):
        return headroom
    with_gradients = replace(step, in_flight=np.maximum(summed, 1))
    return np.where(
        summed > 0, np.minimum(headroom, _headroom_bytes(stage, with_gradients, scenario, cap_bytes)), headroom
    )


def _headroom_bytes(stage: StageContents, step: StepShape, scenario: Scenario, cap_bytes: float) -> Array:
    each = step.in_flight * scenario.cluster.calibration.activations
    terms = stage_memory(replace(stage, activation_bytes=_MORE_THAN_ANY / each), step, scenario)
    margin, slack = required_bytes(1.0, 0.0, scenario), reserved_over_allocated(scenario)
    reserved = cap_bytes / margin * slack  # the margin above includes the slack of one allocated byte
    static = 0.0 if scenario.workload.adapters is None else terms["parameters"]
    allocated = static + (reserved - static) / slack
    return (allocated - (total_bytes(terms) - _MORE_THAN_ANY)) / each


def _engine_key(scenario: Scenario) -> str:
    return "cpu" if is_host(scenario) else scenario.workload.calibration_engine
