"""What a stage holds, the choices that its memory depends on, and what comes and goes within a pass over it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...schema import Workload
from ...schema.units import Array
from ..coefficients import Scenario
from ..layer.data import has_copies, waits_for_pipeline
from ..layer.parallel import sharded_params

_EAGER_LOGIT_BYTES = 14.0
"""Of one logit where the loss is torch's cross_entropy of logits.float(): logits, log-softmax, its gradient, the logits' (fp32 all
but the first); the fp32 copy is gone by then. Of a share of them four in fp32 meet: torch.distributed.tensor.parallel.loss."""

_LOSS_PARTS = 8  # of torchtune's and torchtitan's chunked losses
LOSS_CHUNK_ELEMENTS = 2**24  # logits that our loss works on at a time (runtime/loss.py: CHUNK_ELEMENTS)

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
        prefetch, tp_overlap, cuda_graphs, reduces_in_compute_dtype: as of a LayoutTable.
        tp, experts: ranks that share a stage's matrices; its experts, and one of them (ep, expert_tp).
        num_sequences: of a step, whose tokens a rank has on its device.
        in_flight: micro-batches whose activations are stored; ``logits_in_flight`` those whose logits are; ``summed_in_flight`` of
            the former at a moment at which all gradients add up, -1 where there is none before the last backward pass.
        reduces_apart: ranks have several chunks, whose gradients are reduced one after the other.
        num_neighbours: stages that activations or gradients are received from.
        input_gradients: stages whose input keeps its gradient until the step ends, of every micro-batch: torch's
            stage_backward_input leaves it there, stage_backward does not.
    """

    dp_replicate: Array
    dp_shard: Array
    expert_shards: Array
    gradient_shards: tuple[Array, Array]
    optimizer_shards: tuple[Array, Array]
    zero_stage: Array
    prefetch: Array
    is_replicated: Array
    tp_overlap: Array
    cuda_graphs: Array
    reduces_in_compute_dtype: Array
    tp: Array
    experts: tuple[Array, Array]
    num_microbatches: Array
    num_sequences: Array
    in_flight: Array
    logits_in_flight: Array
    summed_in_flight: Array
    reduces_apart: Array
    num_neighbours: Array
    input_gradients: Array
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

    ``working_bytes`` and ``block_activation_bytes`` are those of the block with most.
    ``read_bytes``: of the activations what products read that nothing but the gradients of their weights needs.
    ``output_bytes``: what the stage sends on, which torch's pipelining keeps until the backward pass, less what it saves of what it
        received, which stays in the buffer that it arrived in.
    ``head_activation_bytes``: saved by the head, whose backward pass has ended when a block's begins.
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
    pending_bytes: Array
    working_bytes: Array
    split_working_bytes: Array
    block_activation_bytes: Array
    logits: Array
    boundary_bytes: Array
    read_bytes: Array = 0.0
    output_bytes: Array = 0.0
    head_activation_bytes: Array = 0.0
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


def transients(stage: StageContents, step: StepShape, scenario: Scenario) -> list[MemoryTerms]:
    """Return what comes and goes while all activations are present, by moment: unsharded parameters, logits and temporary bytes,
    and below zero those of the activations that have gone.

    The loss; then the backward pass of the head and the reduction of its gradients, of a block and the reduction of its.
    Where parameters are gathered in pieces a unit's are present in its backward pass, with those of the blocks gathered in advance;
    what goes into a reduction stays until the next one begins (torch's FSDPParamGroup.post_backward). Below zero 3 a
    pipeline's reductions come after the last backward pass of all, when no activations remain; the gradient of a tied embedding
    waits for the first layer's backward pass.
    """
    workload = scenario.workload
    b, block, none = workload.compute_bytes, stage.block_params, 0.0 * stage.logits
    ahead = np.minimum(step.prefetch * block, stage.params)
    head = np.where(stage.logits > 0, stage.root_params, 0.0)
    grads, of_head = (block, head) if workload.adapters is None else (stage.block_trained, none)
    is_late = waits_for_pipeline(step, workload)
    waits = is_late | stage.ends_are_one
    reduced = np.where(waits, 0.0, of_head)
    stays = np.where(has_copies(step, workload) & ~is_late, 4.0, 0.0)
    waiting = np.where(stage.ends_are_one & ~is_late, b * of_head, 0.0)
    # The copies of a block whose backward pass has ended, which only zero 3 counts by blocks.
    ended = np.where(has_copies(step, workload) & ~is_late & ~step.gathers_in_pieces, b * block, 0.0)
    of_head_gone, of_block_gone = (
        -stage.head_activation_bytes,
        -stage.head_activation_bytes - stage.block_activation_bytes,
    )

    def reduction(params: Array, is_later: Array) -> Array:
        return np.where(is_later, b * params, reduction_bytes(params, stage, step, scenario))

    return [
        {
            "unsharded": gathered_bytes(params, stage, step, workload) - less,
            "logits": logits,
            "temporary": temporary + 0.0 * stage.params,
            "activations": gone + 0.0 * stage.params,
        }
        for params, less, logits, temporary, gone in (
            (
                head,
                0.0,
                loss_bytes(stage.logits, workload, stage.boundary_bytes, step.tp),
                b * of_head if workload.loss == "fused" else 0.0,
                0.0,
            ),
            (head + ahead, 0.0, logit_gradient_bytes(stage.logits, workload, stage.boundary_bytes), b * of_head, 0.0),
            (ahead, 0.0, none, reduction(of_head, waits), 0.0),
            (block + ahead, 0.0, none, stage.working_bytes + stays * reduced + waiting, of_head_gone),
            (block + ahead, ended, none, stage.working_bytes + stays * grads + waiting, of_block_gone),
            (ahead, 0.0, none, reduction(block, is_late) + waiting, of_head_gone),
        )
    ]


def gathered_bytes(params: Array, stage: StageContents, step: StepShape, workload: Workload) -> Array:
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


def reduction_bytes(params: Array, stage: StageContents, step: StepShape, scenario: Scenario) -> Array:
    """Return gradients of one unit in the compute dtype, input and output of their fp32 reduction; gloo copies its input."""
    workload, shards = scenario.workload, step.gradient_shards[0]
    b = workload.compute_bytes
    unit = params if workload.adapters is None else np.minimum(params, stage.block_trained)
    copy = np.where(shards > 1, 4.0, 0.0) if is_host(scenario) else 0.0
    return np.where(has_copies(step, workload), b + 4.0 + copy + 4.0 / shards, b) * unit


def last_reduction_bytes(params: Array, stage: StageContents, step: StepShape, scenario: Scenario) -> Array:
    """Return what the last unit's reduction in a backward pass takes, next to the gradients that remain after it.

    Gradients that added up in fp32 move into its input; others are there in the compute dtype as it is made. They are gone when its
    output is, the shard that remains; but for the unit's last parameter, which torch's foreach_reduce holds where ranks share the
    sum: all of an embedding or a head. gloo copies its input.
    """
    workload, shards = scenario.workload, step.gradient_shards[0]
    b, copy = workload.compute_bytes, np.where(shards > 1, 4.0, 0.0) * is_host(scenario)
    unit = params if workload.adapters is None else np.minimum(params, stage.block_trained)
    is_summed = (step.num_microbatches > 1) & (step.zero_stage <= 1)
    is_retained = (shards > 1) & (stage.root_params >= stage.block_params)
    summed = np.maximum(4.0, copy + 4.0 / shards + 4.0 * is_retained)
    single = np.maximum(b + 4.0 - 4.0 / shards, 4.0 + copy + b * is_retained)
    return np.where(has_copies(step, workload), np.where(is_summed, summed, single), b) * unit


def final_reduction_bytes(stage: StageContents, step: StepShape, scenario: Scenario) -> Array:
    """Return what the sums over data at the end of a pipeline's step take, next to the gradients and copies of all units.

    Unit by unit the copies go, the gradients move into the input of their sum in fp32, and a shard of it remains. The embedding is
    first, the head last; their gradients are held until the shard is there (`last_reduction_bytes`). gloo copies its input.
    """
    b, shards = scenario.workload.compute_bytes, step.gradient_shards[0]
    root, has_head = np.minimum(stage.root_params, stage.trained), np.asarray(stage.logits) > 0
    block = np.minimum(stage.block_params, stage.trained)
    host, output = is_host(scenario), np.where(shards > 1, 4.0 / shards, 0.0)
    of_root, of_block = 4.0 + output + np.where(shards > 1, 4.0, 0.0) * host, 4.0 + output * host
    first = np.maximum((of_block - b) * block, np.where(has_head, 0.0, (of_root - b) * root))
    last = of_root * root - b * stage.trained - (4.0 - 4.0 / shards) * (stage.trained - root)
    return np.maximum(first, np.where(has_head, last, 0.0))


def is_host(scenario: Scenario) -> bool:
    """Tell whether the devices are CPUs."""
    return scenario.cluster.weakest_device.backend.is_host
