"""What memory depends on: the contents of a pipeline stage, and the choices of a layout that say how much of them a rank holds.

What a pipeline stage holds under one layout, and the bytes of its device at the fullest moment of the schedule.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...schema.arrays import Array, FloatArray, IntArray
from ...schema.layout_table import LayoutTable
from ...schema.schedules import SCHEDULE_NAMES
from ..layer.parallel import sharded_params
from ..layer.vocabulary import MORE_IN_FLIGHT
from ..pipeline import replay
from ..pipeline.replay import PipelineShape, in_flight
from .table import CostTable


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """The choices of the layout that memory depends on; ints or arrays.

    Attributes:
        dp_replicate, dp_shard: groups that hold the same shards, and ranks over which states are sharded (context ranks included).
        is_replicated: whether ranks hold whole replicas of one stage and nothing more.
        tp: ranks that share a stage's matrices.
        expert_shards: ranks over which the states of experts are sharded.
        gradient_shards, optimizer_shards: the same two for gradients and for optimizer states, multiples of the former.
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
        """Bytes of a frozen model beside adapters: whole, or this rank's shard under zero 3."""
        return self.frozen_bytes / np.where(step.zero_stage == 3, step.dp_shard, 1)

    def owned(self, step: StepShape) -> Array:
        """Trained parameters of which one rank owns the states; those of experts are sharded over groups of their own."""
        return sharded_params(self.trained, self.expert_params, *step.optimizer_shards)

    def reduced(self, step: StepShape) -> Array:
        """Trained parameters of which one rank keeps the gradients where they are sharded."""
        return sharded_params(self.trained, self.expert_params, *step.gradient_shards)

    def kept(self, step: StepShape) -> Array:
        """Trained parameters of which one rank keeps the values that passes read where they are sharded."""
        return sharded_params(self.trained, self.expert_params, step.dp_shard, step.expert_shards)


def with_vocabulary(costs: CostTable, contents: StageContents, at: int | slice = slice(None)) -> StageContents:
    """Contents of stages that have a share of the vocabulary each, under layouts ``at`` that split it."""
    share = costs.vocabulary
    if share is None:
        return contents
    is_split = costs.batch.vocabulary[at] == 1
    largest = np.maximum(share.embedding.num_params, share.head.num_params)[at]
    return replace(
        contents,
        params=contents.params + share.total("num_params")[at],
        trained=contents.trained + share.total("num_trained")[at],
        frozen_bytes=contents.frozen_bytes + share.total("frozen_bytes")[at],
        root_params=np.where(is_split, largest, contents.root_params),
        working_bytes=np.maximum(contents.working_bytes, share.head.working_bytes[at]) + share.held_bytes[at],
        logits=np.where(is_split, share.logits[at], contents.logits),
    )


def more_in_flight(costs: CostTable, in_flight: Any, at: int | slice = slice(None)) -> Any:
    """Micro-batches in flight where the barrier of a split vocabulary keeps one more."""
    b = costs.batch
    more = np.minimum(b.num_microbatches[at], in_flight + MORE_IN_FLIGHT)
    return np.where(b.vocabulary[at] == 1, more, in_flight)


def _stage_shape(costs: CostTable, idx: int, stage_idx: IntArray) -> StepShape:
    b = costs.batch
    if pipeline_shape(costs, idx).splits_backward:
        flight = in_flight(pipeline_shape(costs, idx))[stage_idx]
    else:
        flight = replay.in_flight_of_stage(
            b.schedule[idx], b.num_microbatches[idx], b.pp[idx], stage_idx, b.num_model_chunks[idx]
        )
    flight = more_in_flight(costs, flight, idx)
    num_neighbours = (stage_idx > 0).astype(np.int64) + (stage_idx < b.pp[idx] - 1)
    return step_shape(b, flight, num_neighbours=num_neighbours, at=idx)


def _of_ranks(costs: CostTable, idx: int, contents: StageContents) -> StageContents:
    """Contents of each rank [..., pp] given those of its stages [..., S]."""
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


def _neighbours_of_ranks(costs: CostTable, shape: PipelineShape) -> IntArray:
    """Stages that each rank [pp] receives from; torch's stages have receive buffers of their own."""
    stages = np.arange(shape.num_stages)
    neighbours = (stages > 0).astype(np.int64) + (stages < shape.num_stages - 1)
    if costs.workload.engine_facts.receives_by_stage:
        return np.bincount(np.array(shape.rank_of_stage), neighbours, shape.pp).astype(np.int64)
    return neighbours[: shape.pp]


def pipeline_shape(costs: CostTable, idx: int) -> PipelineShape:
    """The schedule of layout ``idx`` and its numbers."""
    b = costs.batch
    return PipelineShape(
        schedule=SCHEDULE_NAMES[b.schedule[idx]],
        pp=int(b.pp[idx]),
        num_model_chunks=int(b.num_model_chunks[idx]),
        num_microbatches=int(b.num_microbatches[idx]),
        order=costs.order,
    )


def step_shape(
    batch: LayoutTable, in_flight: IntArray | FloatArray, *, num_neighbours: IntArray, at: int | slice = slice(None)
) -> StepShape:
    """What memory.py looks at of the layouts ``at``, given the micro-batches in flight and the neighbours of a stage."""
    return StepShape(
        dp_replicate=batch.num_replicas[at],
        dp_shard=batch.num_shards[at],
        expert_shards=batch.expert_shards[at],
        gradient_shards=(batch.num_gradient_shards[at], batch.expert_gradient_shards[at]),
        optimizer_shards=(batch.num_optimizer_shards[at], batch.expert_optimizer_shards[at]),
        zero_stage=batch.zero_stage[at],
        is_replicated=batch.is_replicated[at],
        tp=batch.tp[at],
        num_microbatches=batch.num_microbatches[at],
        in_flight=in_flight,
        num_neighbours=num_neighbours,
        offload=batch.offload[at],
        offload_fraction=batch.offload_fraction[at],
    )


def contents_between(costs: CostTable, idx: int, first: IntArray, last: IntArray) -> StageContents:
    """Contents of stages that hold layers ``first .. last - 1`` under layout ``idx``; arrays of any one shape."""

    def span(name: str) -> FloatArray:
        prefix = costs.prefix(name, idx)
        return np.asarray(prefix[last] - prefix[first])

    roots = np.concatenate([[0.0], np.cumsum(costs.per_layer("num_params", idx) * costs.is_root)])
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
    """Largest working set of a layer; where blocks recompute differently, under the options of those on the stage."""
    if costs.option_of_layer is None or costs.working_of_option is None:
        return np.asarray(costs.working_bytes[idx])
    largest = np.zeros(np.shape(first))
    for option, working in enumerate(costs.working_of_option):
        before = np.concatenate([[0], np.cumsum(costs.option_of_layer == option)])
        largest = np.maximum(largest, np.where(before[last] > before[first], working, 0.0))
    return largest
