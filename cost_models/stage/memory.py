"""Bytes on one device of one pipeline stage, by the phase of the step in which the peak falls.

A stage holds P parameters per tensor-parallel rank; U are in its largest block, R in its largest unit outside the blocks
(embedding, or norm and head). With N = dp_shard, b the bytes of the compute dtype, m micro-batches, i in flight, our runtime has

    parameters   4 P / N                       fp32 masters (under fp32 they are the parameters)
    optimizer    o P / N                       o = 8 for AdamW
    gradients    zero 0: 4 P    zero 1: 4 P / N, or 4 P where micro-batches accumulate (always so under a pipeline)
                 zero 2, 3: 4 P / N, under a pipeline 4 P, as torch reduces after the last backward pass only
    with levels  gradients and states have an N each (gradient_shard, optimizer_shard), masters that of the states; parameters that
                 stay within fewer ranks (zero 3) are a copy of b P / N besides, counted as unsharded
    unsharded    zero 0 to 2: b P, copies that fully_shard gathers or casts    zero 3: this unit and the block gathered in advance
    activations  i * (saved by the stage's layers)
    logits       b T V / tp on the stage with the head, turned into their gradient in place; of every micro-batch between its
                 forward and its backward pass there (all of them under gpipe)
    temporary    of the moment (`transients`): what the loss makes of a chunk, the gradients of the head and their reduction, or
                 the working set of one layer, its gradients and theirs; under a pipeline the receive buffers of all m
                 micro-batches, hidden states from one side and gradients from the other

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

from dataclasses import dataclass, replace

import numpy as np

from ...schema import Workload
from ...schema.training_plan import MemoryBreakdown
from ...schema.units import Array
from ..coefficients import Scenario
from ..layer.data import buffered_gradients, has_copies, summed_gradients
from ..layer.parallel import exchange_buffer_bytes, sharded_params, userbuffers_bytes

_EAGER_LOGIT_BYTES = 14.0
"""Of one logit where the loss is torch's cross_entropy of logits.float(): logits, log-softmax, its gradient, the logits' (fp32 all
but the first); the fp32 copy is gone by then. Of a share of them four in fp32 meet: torch.distributed.tensor.parallel.loss."""

_LOSS_PARTS = 8  # of torchtune's and torchtitan's chunked losses
LOSS_CHUNK_ELEMENTS = 2**24  # logits that our loss works on at a time (runtime/loss.py: CHUNK_ELEMENTS)
_MORE_THAN_ANY = float(2**52)  # bytes beyond any device's, whose sum with its terms is exact to less than one

MemoryTerms = dict[str, Array]
"""Bytes by the names of MemoryBreakdown."""


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """The choices of the layout that memory depends on; ints or arrays.

    Attributes:
        dp_replicate, dp_shard: groups that hold the same shards, and ranks over which states are sharded (context ranks included).
        expert_shards: ranks over which the states of experts are sharded.
        gradient_shards, optimizer_shards: both for gradients and for optimizer states, multiples of the former.
        is_replicated: ranks hold replicas of one stage and nothing more.
        tp_overlap, cuda_graphs, reduces_in_compute_dtype: as of a LayoutTable.
        tp, experts: ranks that share a stage's matrices; its experts, and one of them (ep, expert_tp).
        in_flight: micro-batches whose activations are stored; ``logits_in_flight`` those whose logits are.
        num_neighbours: stages that activations or gradients are received from.
    """

    dp_replicate: Array
    dp_shard: Array
    expert_shards: Array
    gradient_shards: tuple[Array, Array]
    optimizer_shards: tuple[Array, Array]
    zero_stage: Array
    is_replicated: Array
    tp_overlap: Array
    cuda_graphs: Array
    reduces_in_compute_dtype: Array
    tp: Array
    experts: tuple[Array, Array]
    num_microbatches: Array
    in_flight: Array
    logits_in_flight: Array
    num_neighbours: Array
    offload: Array
    offload_fraction: Array

    @property
    def has_second_copy(self) -> Array:
        """True where parameters are sharded over fewer ranks than the optimizer states they are made from."""
        wider = (self.optimizer_shards[0] > self.dp_shard) | (self.optimizer_shards[1] > self.expert_shards)
        return (self.zero_stage == 3) & wider

    @property
    def on_device(self) -> Array:
        """Part of the optimizer states, and of the masters they update, that is not on the host."""
        return 1.0 - np.where(self.offload > 0, self.offload_fraction, 0.0)

    @property
    def gathers_in_pieces(self) -> Array:
        """True where unsharded parameters come unit by unit."""
        return (self.zero_stage == 3) | (self.offload == 2)

    @property
    def is_piped(self) -> Array:
        """True where the stage is one of several."""
        return np.asarray(self.num_neighbours) > 0


@dataclass(frozen=True, kw_only=True)
class StageContents:
    """What a stage holds, per tensor-parallel rank and micro-batch; floats or arrays; ``expert_params`` are part of ``params``.

    ``ends_are_one``: embedding and head are one parameter, whose gradient is reduced after the last block's.
    """

    params: Array
    expert_params: Array
    trained: Array
    block_trained: Array
    frozen_bytes: Array
    root_params: Array
    block_params: Array
    activation_bytes: Array
    working_bytes: Array
    logits: Array
    boundary_bytes: Array
    ends_are_one: Array = False

    def frozen(self, step: StepShape, workload: Workload) -> Array:
        """Return the bytes of a frozen model next to its adapters: unsharded, or this rank's shard where fully_shard has it."""
        is_wrapped = has_copies(step, workload) & (workload.engine_facts.memory is None)
        return self.frozen_bytes / np.where((step.zero_stage == 3) | is_wrapped, step.dp_shard, 1)

    def owned(self, step: StepShape) -> Array:
        """Return the trained parameters of which one rank owns the states; those of experts have groups of their own."""
        return sharded_params(self.trained, self.expert_params, *step.optimizer_shards)

    def reduced(self, step: StepShape) -> Array:
        """Return the trained parameters of which one rank stores the gradients where they are sharded."""
        return sharded_params(self.trained, self.expert_params, *step.gradient_shards)

    def stored(self, step: StepShape) -> Array:
        """Return the trained parameters of which one rank stores the values that passes read where they are sharded."""
        return sharded_params(self.trained, self.expert_params, step.dp_shard, step.expert_shards)


def stage_memory(stage: StageContents, step: StepShape, scenario: Scenario) -> MemoryTerms:
    """Return the terms of the allocated peak, bytes; keys are the fields of MemoryBreakdown."""
    workload = scenario.workload
    stage = replace(stage, activation_bytes=stage.activation_bytes * scenario.cluster.calibration.activations)
    if workload.engine_facts.memory is not None:
        return _other_engine(stage, step, scenario)
    if not workload.has_backward:
        return _zeroth_order(stage, step, scenario)
    b, copies = workload.compute_bytes, has_copies(step, workload)
    before, final = summed_gradients(stage, step, workload)
    # fully_shard keeps them from the forward to the backward pass (reshard_after_forward=N).
    second_copy = b * np.where(step.has_second_copy, stage.stored(step), 0.0)
    receive = step.num_neighbours * step.num_microbatches * stage.boundary_bytes
    passing = _fullest(transients(stage, step, scenario))
    waiting = (step.logits_in_flight - 1) * (b * stage.logits if workload.loss == "engine" else 0.0)
    full = {
        "gradients": before,
        "unsharded": passing["unsharded"] + np.where(copies, second_copy, 0.0),
        "activations": step.in_flight * stage.activation_bytes,
        "logits": passing["logits"] + waiting,
        "temporary": passing["temporary"] + receive,
    }
    unit = np.maximum(stage.root_params, stage.block_params)
    # Under a pipeline one unit's sum in fp32 is reduced, which is counted, after its copy in the compute dtype is dropped.
    added = np.where(step.is_piped & copies, b * np.minimum(unit, stage.trained), 0.0)
    gathered = np.where(step.is_piped, _gathered(stage.trained, stage, step, workload) - added, b * stage.root_params)
    update = {
        "gradients": final,
        "unsharded": np.where(copies, gathered, 0.0),
        "activations": 0.0 * full["activations"],
        "logits": 0.0 * full["logits"],
        "temporary": _reduction(unit, stage, step, scenario) - added + receive,
    }
    return {
        "parameters": _parameters(stage, step, workload),
        "optimizer": _states(stage.owned(step), step, workload),
        **_fullest([full, update], also_temporary=_workspace_bytes(scenario)),
    }


def _zeroth_order(stage: StageContents, step: StepShape, scenario: Scenario) -> MemoryTerms:
    """Return parameters; in a forward pass the loss or a block, and between the passes the direction of the largest tensor.

    Every rank draws the direction unsharded: at most a block's, or what is outside the blocks.
    """
    workload, none = scenario.workload, 0.0 * stage.params
    head, block = np.where(stage.logits > 0, stage.root_params, 0.0), stage.block_params
    direction = workload.master_bytes * step.tp * np.maximum(stage.root_params, block)
    unsharded_of_head, unsharded = (_gathered(params, stage, step, workload) for params in (head, 2 * block))
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


def transients(stage: StageContents, step: StepShape, scenario: Scenario) -> list[MemoryTerms]:
    """Return what comes and goes while all activations are present, by moment: unsharded parameters, logits and temporary bytes.

    The loss; then the backward pass of the head and the reduction of its gradients, of a block and the reduction of its.
    Where parameters are gathered in pieces a unit's are present in its backward pass, with those of the block gathered in advance;
    what goes into a reduction stays until the next one begins (torch's FSDPParamGroup.post_backward). Under a pipeline reductions
    come after the last backward pass of all, when no activations remain; the gradient of a tied embedding waits for the first
    layer's backward pass.
    """
    workload = scenario.workload
    b, block, none = workload.compute_bytes, stage.block_params, 0.0 * stage.logits
    head = np.where(stage.logits > 0, stage.root_params, 0.0)
    grads, of_head = (block, head) if workload.adapters is None else (stage.block_trained, none)
    waits = step.is_piped | stage.ends_are_one
    reduced = np.where(waits, 0.0, of_head)
    stays = np.where(has_copies(step, workload) & ~step.is_piped, 4.0 * np.maximum(reduced, grads), 0.0)
    waiting = np.where(stage.ends_are_one & ~step.is_piped, b * of_head, 0.0)

    def reduction(params: Array, is_later: Array) -> Array:
        return np.where(is_later, b * params, _reduction(params, stage, step, scenario))

    return [
        {
            "unsharded": _gathered(params, stage, step, workload),
            "logits": logits,
            "temporary": temporary + 0.0 * stage.params,
        }
        for params, logits, temporary in (
            (
                head,
                loss_bytes(stage.logits, workload, stage.boundary_bytes, step.tp),
                b * of_head if workload.loss == "fused" else 0.0,
            ),
            (head + block, logit_gradient_bytes(stage.logits, workload, stage.boundary_bytes), b * of_head),
            (block, none, reduction(of_head, waits)),
            (2 * block, none, stage.working_bytes + b * grads + stays + waiting),
            (block, none, reduction(block, step.is_piped) + waiting),
        )
    ]


def _gathered(params: Array, stage: StageContents, step: StepShape, workload: Workload) -> Array:
    """Return the bytes of unsharded parameters in the compute dtype next to shards: ``params`` where they come in pieces."""
    b, all_of_them = workload.compute_bytes, workload.compute_bytes * stage.trained + stage.frozen_bytes
    return np.where(has_copies(step, workload), np.where(step.gathers_in_pieces, b * params, all_of_them), 0.0)


def logit_gradient_bytes(logits: Array, workload: Workload, hidden_bytes: Array) -> Array:
    """Return the bytes that the head's backward pass reads: gradients of the logits, or those of the hidden states made before."""
    if workload.loss == "fused":
        return np.where(logits > 0, hidden_bytes, 0.0)
    return workload.compute_bytes * logits / max(_head_parts(workload), 1)


def _head_parts(workload: Workload) -> int:
    """Return in how many parts logits are made, each with its loss; 0: as in our runtime."""
    return _LOSS_PARTS if workload.loss == "chunked_head" else workload.engine_facts.loss_chunks


def loss_bytes(logits: Array, workload: Workload, hidden_bytes: Array = 0.0, tp: Array = 1) -> Array:
    """Return the bytes of logits and what the loss makes of them: ours in chunks, a compiled one in one kernel.

    Ours takes the logsumexp of a chunk's differences from the largest, in fp32, next to the chunk in fp32 (runtime/loss.py); a loss
    that is made for some of the tokens after the other has the logits of those only; one that takes parts of logits that are all
    there keeps the log-softmax of each in fp32, which a compiled one makes again. A fused one has as many as the hidden states have
    elements, and the gradients of those (Liger: tokens / (vocabulary / hidden) at a time).
    """
    b, chunks = workload.compute_bytes, _head_parts(workload)
    if workload.loss == "fused":
        return np.where(logits > 0, 2.0 * hidden_bytes, 0.0)
    if workload.loss == "in_place":
        return b * logits
    if workload.loss == "chunked":
        stored, of_part = (b, b) if workload.code == "compiled" else (b + 4.0, 8.0)
        return (stored + of_part / _LOSS_PARTS) * logits
    if workload.code == "engine" and not chunks:
        of_chunk = 4.0 if b == 4 else 8.0
        return b * logits + of_chunk * np.minimum(LOSS_CHUNK_ELEMENTS, logits)
    eager = _EAGER_LOGIT_BYTES + np.where(np.asarray(tp) > 1, 2.0, 0.0)
    return (2 * b if workload.code == "compiled" else eager) * logits / max(chunks, 1)


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


def _reduction(params: Array, stage: StageContents, step: StepShape, scenario: Scenario) -> Array:
    """Return gradients of one unit in the compute dtype, input and output of their fp32 reduction; gloo copies its input."""
    workload, shards = scenario.workload, step.gradient_shards[0]
    b = workload.compute_bytes
    unit = params if workload.adapters is None else np.minimum(params, stage.block_trained)
    copy = np.where(shards > 1, 4.0, 0.0) if _is_host(scenario) else 0.0
    return np.where(has_copies(step, workload), b + 4.0 + copy + 4.0 / shards, b) * unit


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
    workspace = 0.0 if _is_host(scenario) else float(scenario.coefficients["memory"]["workspace_bytes"])
    return scenario.cluster.calibration.overhead_bytes + workspace


def _is_host(scenario: Scenario) -> bool:
    return scenario.cluster.weakest_device.backend.is_host


# From terms to what must fit


def total_bytes(terms: MemoryTerms) -> Array:
    """Return the allocated peak."""
    return sum(terms.values())


def breakdown(terms: MemoryTerms) -> MemoryBreakdown:
    """Return the terms as numbers, integer bytes."""
    return MemoryBreakdown(**{name: int(value) for name, value in terms.items()})


def reserved_over_allocated(scenario: Scenario) -> float:
    """Return the slack of the caching allocator, or of the C library's on a CPU."""
    name = "resident_over_allocated_cpu" if _is_host(scenario) else "reserved_over_allocated"
    return float(scenario.coefficients["memory"][name])


def context_bytes(scenario: Scenario) -> float:
    """Return what the driver's tools show besides the reserved memory: context, kernels, NCCL's channels."""
    return 0.0 if _is_host(scenario) else float(scenario.coefficients["memory"]["context_bytes"])


def process_bytes(scenario: Scenario) -> float:
    """Return what a process on a CPU grows by besides its tensors, where that was measured (profilers/measure/process.py).

    The budget does not count it: it is part of the cluster's ``reserved_bytes``.
    """
    profile = scenario.cluster.profile
    measured = profile.allocator if profile is not None and _is_host(scenario) else None
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
    evaluation with so many of them that the update is not the peak tells the rest.
    """
    each = step.in_flight * scenario.cluster.calibration.activations
    terms = stage_memory(replace(stage, activation_bytes=_MORE_THAN_ANY / each), step, scenario)
    margin, slack = required_bytes(1.0, 0.0, scenario), reserved_over_allocated(scenario)
    reserved = cap_bytes / margin * slack  # the margin above includes the slack of one allocated byte
    static = 0.0 if scenario.workload.adapters is None else terms["parameters"]
    allocated = static + (reserved - static) / slack
    return (allocated - (total_bytes(terms) - _MORE_THAN_ANY)) / each


def _engine_key(scenario: Scenario) -> str:
    return "cpu" if _is_host(scenario) else scenario.workload.calibration_engine
