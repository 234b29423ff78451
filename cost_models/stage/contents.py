"""What a pipeline stage holds under one layout, and the choices of the layout that say how much of it is on one rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...schema.layout_table import LayoutTable
from ...schema.units import Array, FloatArray, IntArray
from ..layer.parallel import sharded_params
from ..layer.vocabulary import MORE_IN_FLIGHT
from ..pipeline.replay import PipelineShape, in_flight, in_flight_of_stage
from .table import CostTable


@dataclass(frozen=True, kw_only=True)
class StageContents:
    """What a stage holds, per tensor-parallel rank and micro-batch; floats or arrays; ``expert_params`` are part of ``params``."""

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

    def frozen(self, step: StepShape) -> Array:
        """Return the bytes of a frozen model next to its adapters: unsharded, or this rank's shard under zero 3."""
        return self.frozen_bytes / np.where(step.zero_stage == 3, step.dp_shard, 1)

    def owned(self, step: StepShape) -> Array:
        """Return the trained parameters of which one rank owns the states; those of experts have groups of their own."""
        return sharded_params(self.trained, self.expert_params, *step.optimizer_shards)

    def reduced(self, step: StepShape) -> Array:
        """Return the trained parameters of which one rank stores the gradients where they are sharded."""
        return sharded_params(self.trained, self.expert_params, *step.gradient_shards)

    def stored(self, step: StepShape) -> Array:
        """Return the trained parameters of which one rank stores the values that passes read where they are sharded."""
        return sharded_params(self.trained, self.expert_params, step.dp_shard, step.expert_shards)


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """The choices of the layout that memory depends on; ints or arrays.

    Attributes:
        dp_replicate, dp_shard: groups that hold the same shards, and ranks over which states are sharded (context ranks included).
        is_replicated: ranks hold replicas of one stage and nothing more.
        tp: ranks that share a stage's matrices.
        expert_shards: ranks over which the states of experts are sharded.
        gradient_shards, optimizer_shards: the same two for gradients and for optimizer states, multiples of the former.
        in_flight: micro-batches whose activations are stored.
        num_neighbours: stages that activations or gradients are received from.
    """

    dp_replicate: Array
    dp_shard: Array
    expert_shards: Array
    gradient_shards: tuple[Array, Array]
    optimizer_shards: tuple[Array, Array]
    zero_stage: Array
    is_replicated: Array
    tp: Array = 1
    num_microbatches: Array
    in_flight: Array
    num_neighbours: Array
    offload: Array
    offload_fraction: Array

    @property
    def has_second_copy(self) -> Array:
        """Whether parameters are sharded over fewer ranks than the optimizer states they are made from."""
        wider = (self.optimizer_shards[0] > self.dp_shard) | (self.optimizer_shards[1] > self.expert_shards)
        return (self.zero_stage == 3) & wider

    @property
    def on_device(self) -> Array:
        """Part of the optimizer states, and of the masters they update, that is not on the host."""
        return 1.0 - np.where(self.offload > 0, self.offload_fraction, 0.0)


def step_shape(
    layouts: LayoutTable, in_flight: IntArray | FloatArray, *, num_neighbours: IntArray, idx: int | slice = slice(None)
) -> StepShape:
    """Return what memory depends on of the layouts ``idx``, given micro-batches in flight and neighbours of a stage."""
    return StepShape(
        dp_replicate=layouts.num_replicas[idx],
        dp_shard=layouts.num_shards[idx],
        expert_shards=layouts.expert_shards[idx],
        gradient_shards=(layouts.num_gradient_shards[idx], layouts.expert_gradient_shards[idx]),
        optimizer_shards=(layouts.num_optimizer_shards[idx], layouts.expert_optimizer_shards[idx]),
        zero_stage=layouts.zero_stage[idx],
        is_replicated=layouts.is_replicated[idx],
        tp=layouts.tp[idx],
        num_microbatches=layouts.num_microbatches[idx],
        in_flight=in_flight,
        num_neighbours=num_neighbours,
        offload=layouts.offload[idx],
        offload_fraction=layouts.offload_fraction[idx],
    )


def pipeline_shape(costs: CostTable, idx: int) -> PipelineShape:
    """Return the schedule of layout ``idx`` and its numbers."""
    b = costs.layouts
    return PipelineShape(
        schedule=b.schedule_of_row(idx).name,
        pp=int(b.pp[idx]),
        num_model_chunks=int(b.num_model_chunks[idx]),
        num_microbatches=int(b.num_microbatches[idx]),
        order=costs.order,
    )


def more_in_flight(costs: CostTable, in_flight: Any, idx: int | slice = slice(None)) -> Any:
    """Return the micro-batches in flight with one more where the barrier of a split vocabulary holds it."""
    b = costs.layouts
    more = np.minimum(b.num_microbatches[idx], in_flight + MORE_IN_FLIGHT)
    return np.where(b.vocabulary[idx] == 1, more, in_flight)


def shape_of_stages(costs: CostTable, idx: int, stage_idx: IntArray) -> StepShape:
    """Return what memory depends on of stages ``stage_idx`` of layout ``idx``."""
    b, shape = costs.layouts, pipeline_shape(costs, idx)
    if shape.splits_backward:
        flight = in_flight(shape)[stage_idx]
    else:
        flight = in_flight_of_stage(
            b.schedule[idx], b.num_microbatches[idx], b.pp[idx], stage_idx, b.num_model_chunks[idx]
        )
    num_neighbours = (stage_idx > 0).astype(np.int64) + (stage_idx < b.pp[idx] - 1)
    return step_shape(b, more_in_flight(costs, flight, idx), num_neighbours=num_neighbours, idx=idx)


def contents_between(costs: CostTable, idx: int, first: IntArray, last: IntArray) -> StageContents:
    """Return the contents of stages that hold layers ``first .. last - 1`` under layout ``idx``; arrays of any one shape."""

    def span(name: str) -> FloatArray:
        prefix = costs.prefix(name, idx)
        return np.asarray(prefix[last] - prefix[first])

    roots = np.concatenate([[0.0], np.cumsum(costs.per_layer("num_params", idx) * ~costs.is_block)])
    contents = StageContents(
        params=span("num_params"),
        trained=span("num_trained"),
        expert_params=span("expert_params"),
        block_trained=costs.block_trained[idx],
        frozen_bytes=span("frozen_bytes"),
        root_params=np.minimum(roots[last] - roots[first], costs.root_params[idx]),
        block_params=costs.block_params[idx],
        activation_bytes=span("activation_bytes"),
        working_bytes=_working_between(costs, idx, first, last),
        logits=np.where((first <= costs.head_idx) & (costs.head_idx < last), costs.logits[idx], 0.0),
        boundary_bytes=costs.boundary_bytes[idx],
    )
    return with_vocabulary(costs, contents, idx)


def _working_between(costs: CostTable, idx: int, first: IntArray, last: IntArray) -> FloatArray:
    """Return the largest working set of a layer; where blocks recompute differently, under the options of those on the stage."""
    if costs.option_of_layer is None or costs.working_of_option is None:
        return np.asarray(costs.working_bytes[idx])
    largest = np.zeros(np.shape(first))
    for option, working in enumerate(costs.working_of_option):
        before = np.concatenate([[0], np.cumsum(costs.option_of_layer == option)])
        largest = np.maximum(largest, np.where(before[last] > before[first], working, 0.0))
    return largest


def with_vocabulary(costs: CostTable, contents: StageContents, idx: int | slice = slice(None)) -> StageContents:
    """Return the contents of stages that have a share of the vocabulary each, under layouts ``idx`` that split it."""
    share = costs.vocabulary
    if share is None:
        return contents
    is_split = costs.layouts.vocabulary[idx] == 1
    largest = np.maximum(share.embedding.num_params, share.head.num_params)[idx]
    return replace(
        contents,
        params=contents.params + share.total("num_params")[idx],
        trained=contents.trained + share.total("num_trained")[idx],
        frozen_bytes=contents.frozen_bytes + share.total("frozen_bytes")[idx],
        root_params=np.where(is_split, largest, contents.root_params),
        working_bytes=np.maximum(contents.working_bytes, share.head.working_bytes[idx]) + share.waiting_bytes[idx],
        logits=np.where(is_split, share.logits[idx], contents.logits),
    )


def contents_of_ranks(costs: CostTable, idx: int, contents: StageContents) -> StageContents:
    """Return the contents of each rank [..., pp] given those of its stages [..., S]."""
    shape = pipeline_shape(costs, idx)
    on_rank = np.array(shape.rank_of_stage)[:, None] == np.arange(shape.pp)

    def summed(values: FloatArray) -> FloatArray:
        return np.asarray(values @ on_rank)

    return StageContents(
        params=summed(contents.params),
        trained=summed(contents.trained),
        expert_params=summed(contents.expert_params),
        block_trained=contents.block_trained,
        frozen_bytes=summed(contents.frozen_bytes),
        root_params=np.minimum(summed(contents.root_params), costs.root_params[idx]),
        block_params=contents.block_params,
        activation_bytes=summed(np.asarray(contents.activation_bytes)),
        working_bytes=contents.working_bytes,
        logits=summed(contents.logits),
        boundary_bytes=contents.boundary_bytes,
    )


def neighbours_of_ranks(costs: CostTable, shape: PipelineShape) -> IntArray:
    """Return the stages that each rank [pp] receives from; torch's stages have receive buffers of their own."""
    stages = np.arange(shape.num_stages)
    neighbours = (stages > 0).astype(np.int64) + (stages < shape.num_stages - 1)
    if costs.workload.engine_facts.receives_by_stage:
        return np.bincount(np.array(shape.rank_of_stage), neighbours, shape.pp).astype(np.int64)
    return neighbours[: shape.pp]
