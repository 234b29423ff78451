"""What the stages and ranks of one layout hold, and the memory it takes; tables of layouts whose blocks recompute differently."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from ...schema import Workload
from ...schema.layout_table import LayoutTable
from ...schema.schedules import by_schedule
from ...schema.units import BoolArray, FloatArray, IntArray
from ..layer.vocabulary import MORE_IN_FLIGHT
from ..pipeline.in_flight import Holding, holdings, in_flight, in_flight_of_stage, summed_in_flight
from ..pipeline.replay import PipelineShape
from .fullest import fullest_moment, stored_activations
from .memory import activation_headroom_bytes, required_by_terms, stage_memory
from .passing import MemoryTerms, StageContents, StepShape
from .table import CostTable, KnownCosts


def step_shape(
    layouts: LayoutTable,
    in_flight: IntArray | FloatArray,
    *,
    num_neighbours: IntArray,
    logits_in_flight: Any = None,
    summed_in_flight: Any = None,
    input_gradients: Any = 0,
    idx: int | slice | IntArray = slice(None),
) -> StepShape:
    """Return what memory depends on of the layouts ``idx``, given micro-batches in flight and neighbours of a stage.

    All in flight are so beside gradients unless given.
    Logits wait with the activations of the head: of all micro-batches where forward passes come first, else of one unless given.
    """
    if logits_in_flight is None:
        all_first = by_schedule("all_forward_first")[layouts.schedule[idx]] & (layouts.pp[idx] > 1)
        logits_in_flight = np.where(all_first, layouts.num_microbatches[idx], 1)
    return StepShape(
        dp_replicate=layouts.num_replicas[idx],
        dp_shard=layouts.num_shards[idx],
        expert_shards=layouts.expert_shards[idx],
        gradient_shards=(layouts.num_gradient_shards[idx], layouts.expert_gradient_shards[idx]),
        optimizer_shards=(layouts.num_optimizer_shards[idx], layouts.expert_optimizer_shards[idx]),
        zero_stage=layouts.zero_stage[idx],
        prefetch=layouts.prefetch[idx],
        is_replicated=layouts.is_replicated[idx],
        tp_overlap=layouts.tp_overlap[idx],
        cuda_graphs=layouts.cuda_graphs[idx],
        reduces_in_compute_dtype=layouts.reduces_in_compute_dtype[idx],
        tp=layouts.tp[idx],
        experts=(layouts.ep[idx], layouts.expert_tp[idx]),
        num_microbatches=layouts.num_microbatches[idx],
        in_flight=in_flight,
        logits_in_flight=logits_in_flight,
        summed_in_flight=in_flight if summed_in_flight is None else summed_in_flight,
        reduces_apart=(layouts.num_model_chunks[idx] > 1) & (layouts.pp[idx] > 1),
        num_sequences=layouts.num_microbatches[idx] * layouts.micro_batch_size[idx],
        num_neighbours=num_neighbours,
        input_gradients=input_gradients,
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


def more_in_flight(costs: CostTable, in_flight: Any, idx: int | slice | IntArray = slice(None)) -> Any:
    """Return the micro-batches in flight with one more where the barrier of a split vocabulary holds it, and one block of another
    where the exchange of tokens runs beside it: a forward pass saves as the backward pass frees, block by block.

    Under a pipeline one more forward pass of a chunk comes before the first backward pass, and none between two of them.
    Source: Megatron-LM, get_pp_rank_microbatches and TransformerModelChunkSchedulePlan.run.
    """
    b = costs.layouts
    barrier = np.where(b.vocabulary[idx] == 1, MORE_IN_FLIGHT, 0.0)
    more = in_flight + barrier + b.ep_overlap[idx] * b.pp[idx] / costs.model.num_blocks
    return np.where(more > in_flight, np.minimum(b.num_microbatches[idx], more), in_flight)


def shape_of_stages(costs: CostTable, idx: int, stage_idx: IntArray) -> StepShape:
    """Return what memory depends on of stages ``stage_idx`` of layout ``idx``."""
    b, shape = costs.layouts, pipeline_shape(costs, idx)
    if shape.pp == 1:
        flight = np.ones(np.shape(stage_idx))
    elif shape.record.splits_backward:
        flight = in_flight(shape)[stage_idx]
    else:
        flight = in_flight_of_stage(
            b.schedule[idx], b.num_microbatches[idx], b.pp[idx], stage_idx, b.num_model_chunks[idx]
        )
    num_neighbours = (stage_idx > 0).astype(np.int64) + (stage_idx < b.pp[idx] - 1)
    flight = more_in_flight(costs, flight, idx)
    summed = summed_in_flight(b.num_microbatches[idx], flight) if shape.pp > 1 else flight
    inputs = (stage_idx > 0) & shape.record.splits_backward
    return step_shape(
        b,
        flight,
        num_neighbours=num_neighbours,
        summed_in_flight=summed,
        input_gradients=inputs.astype(np.int64),
        idx=idx,
    )


def contents_between(costs: CostTable, idx: int, first: IntArray, last: IntArray) -> StageContents:
    """Return the contents of stages that hold layers ``first .. last - 1`` under layout ``idx``; arrays of any one shape."""

    def span(name: str) -> FloatArray:
        prefix = costs.prefix(name, idx)
        return np.asarray(prefix[last] - prefix[first])

    roots = np.concatenate([[0.0], np.cumsum(costs.per_layer("num_params", idx) * ~costs.is_block)])
    less = costs.per_layer("last_pending_bytes", idx) - costs.per_layer("pending_bytes", idx)
    last_pending = np.where(last > first, less[last - 1], 0.0)
    has_head = (first <= costs.head_idx) & (costs.head_idx < last)
    contents = StageContents(
        params=span("num_params"),
        trained=span("num_trained"),
        expert_params=span("expert_params"),
        block_trained=costs.block_trained[idx],
        frozen_bytes=span("frozen_bytes"),
        root_params=np.minimum(roots[last] - roots[first], costs.root_params[idx]),
        block_params=costs.block_params[idx],
        activation_bytes=span("activation_bytes"),
        pending_bytes=np.where(first > 0, span("pending_bytes") + last_pending, 0.0),
        working_bytes=_working_between(costs, idx, first, last),
        split_working_bytes=np.asarray(costs.split_working_bytes[idx]),
        block_activation_bytes=np.asarray(costs.block_activation_bytes[idx]),
        head_activation_bytes=has_head * costs.per_layer("activation_bytes", idx)[costs.head_idx],
        logits=np.where(has_head, costs.logits[idx], 0.0),
        boundary_bytes=costs.boundary_bytes[idx],
        read_bytes=span("read_bytes"),
        output_bytes=outputs_retained(costs.workload, first > 0, last < len(costs.kind_of_layer))
        * costs.boundary_bytes[idx],
        ends_are_one=costs.model.tie_embeddings & (costs.layouts.pp[idx] == 1),
    )
    return with_vocabulary(costs, contents, idx)


def outputs_retained(workload: Workload, receives: BoolArray, sends: BoolArray) -> IntArray:
    """Return how many outputs a stage of our runtime keeps more than it has inputs in a buffer: -1, 0 or 1."""
    keeps = workload.engine_facts.memory is None and workload.has_backward
    return keeps * (1 * np.asarray(sends) - receives)


def handed_on(costs: CostTable, shape: PipelineShape) -> IntArray:
    """Return which stages [S] of our runtime hand what they put out to the next one on the same rank: it takes the place of a
    receive buffer, as the gradient that comes back does.
    """
    rank = np.array(shape.rank_of_stage)
    is_handed = np.append(rank[1:] == rank[:-1], False) & (shape.pp > 1)
    return (is_handed & costs.workload.engine_facts.receives_by_stage & costs.workload.has_backward).astype(np.int64)


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
    summed = (
        "params", "trained", "expert_params", "frozen_bytes", "root_params", "activation_bytes", "pending_bytes", "logits",
        "output_bytes", "head_activation_bytes",
    )  # fmt: skip
    every = np.shape(contents.params)
    of_ranks = replace(contents, **{name: np.broadcast_to(getattr(contents, name), every) @ on_rank for name in summed})
    return replace(of_ranks, root_params=np.minimum(of_ranks.root_params, costs.root_params[idx]))


def shape_of_ranks(costs: CostTable, idx: int, in_flight: FloatArray) -> StepShape:
    """Return what memory depends on of each rank of layout ``idx``; torch's stages have receive buffers of their own."""
    shape = pipeline_shape(costs, idx)
    stages = np.arange(shape.num_stages)
    neighbours = (stages > 0).astype(np.int64) + (stages < shape.num_stages - 1)
    if costs.workload.engine_facts.receives_by_stage:
        neighbours = np.bincount(np.array(shape.rank_of_stage), neighbours, shape.pp).astype(np.int64)
    has_inputs = (stages > 0) & shape.record.splits_backward & ~np.roll(handed_on(costs, shape), 1).astype(bool)
    inputs = np.bincount(np.array(shape.rank_of_stage), has_inputs, shape.pp)
    return step_shape(
        costs.layouts,
        in_flight,
        num_neighbours=neighbours[: shape.pp],
        logits_in_flight=1,
        input_gradients=inputs,
        idx=idx,
    )


def stage_memory_terms(costs: CostTable, idx: int, contents: StageContents, stage_idx: IntArray) -> MemoryTerms:
    """Return the memory terms of stages ``stage_idx`` of layout ``idx``; the chunks of a rank count as one stage."""
    step, shape = shape_of_stages(costs, idx, stage_idx), pipeline_shape(costs, idx)
    if not shape.record.splits_backward or shape.num_stages != shape.pp or shape.pp == 1:
        return stage_memory(contents, step, costs.scenario)
    chunks = _by_chunk(contents, ..., None)
    return fullest_terms(costs, idx, contents, chunks, step, Holding(*(part[stage_idx] for part in holdings(shape))))


def rank_memory_terms(costs: CostTable, idx: int, contents: StageContents) -> tuple[StageContents, MemoryTerms]:
    """Return contents and memory terms of each rank [..., pp] of layout ``idx``, given the contents of its stages [..., S]."""
    shape = pipeline_shape(costs, idx)
    by_rank = np.argsort(np.array(shape.rank_of_stage), kind="stable").reshape(shape.pp, -1)
    contents = replace(
        contents, output_bytes=contents.output_bytes - handed_on(costs, shape) * costs.boundary_bytes[idx]
    )
    of_ranks, step = contents_of_ranks(costs, idx, contents), shape_of_ranks(costs, idx, np.ones(shape.pp))
    return of_ranks, fullest_terms(costs, idx, of_ranks, _by_chunk(contents, ..., by_rank), step, holdings(shape))


def _by_chunk(contents: StageContents, *where: Any) -> StageContents:
    """Return the fields of contents, all of one shape, at an index."""
    shape = np.broadcast_shapes(*(np.shape(getattr(contents, field.name)) for field in fields(contents)))
    values = {field.name: np.broadcast_to(getattr(contents, field.name), shape)[where] for field in fields(contents)}
    return StageContents(**values)


def fullest_terms(
    costs: CostTable,
    idx: int | IntArray,
    contents: StageContents,
    chunks: StageContents,
    step: StepShape,
    holding: Holding,
) -> MemoryTerms:
    """Return the memory terms of ranks [...] with chunks [..., v] that hold most at one of the moments [..., K].

    Of several layouts ``idx`` [N, 1, 1] the contents of ranks are [N, R, 1], those of chunks [N, R, v].
    """
    workload, shape = costs.workload, np.shape(contents.params)
    if workload.engine_facts.memory is None and workload.has_backward:
        chunks = replace(chunks, activation_bytes=chunks.activation_bytes + chunks.output_bytes)
        moment = fullest_moment(chunks, step, costs.scenario, holding)
        return stage_memory(
            contents, step, costs.scenario, {name: np.reshape(term, shape) for name, term in moment.items()}
        )
    peak, saved = stored_activations(chunks, holding).max(axis=-1).reshape(shape), contents.activation_bytes
    flight = np.divide(peak, saved, out=np.ones_like(peak), where=saved > 0)
    flight = np.where(costs.layouts.ep_overlap[idx], more_in_flight(costs, flight, idx), flight)
    return stage_memory(contents, replace(step, in_flight=flight, summed_in_flight=flight), costs.scenario)


def stage_headroom_bytes(
    costs: CostTable, idx: int, contents: StageContents, stage_idx: IntArray, *, cap_bytes: float
) -> FloatArray:
    """Return the bytes of activations that stages of layout ``idx`` may save for each micro-batch; -inf where none fit."""
    shape = shape_of_stages(costs, idx, stage_idx)
    headroom = activation_headroom_bytes(contents, shape, costs.scenario, cap_bytes=cap_bytes)
    without = replace(contents, activation_bytes=np.zeros_like(contents.params))
    required = required_by_terms(stage_memory(without, shape, costs.scenario), costs.scenario)
    return np.asarray(np.where(required <= cap_bytes, headroom, -np.inf))


def rank_headroom_bytes(costs: CostTable, idx: int, contents: StageContents, *, cap_bytes: float) -> FloatArray:
    """Return the bytes of activations that each rank [..., pp] may hold at once, given the contents of its stages [..., S]."""
    step, of_ranks = shape_of_ranks(costs, idx, np.ones(costs.layouts.pp[idx])), contents_of_ranks(costs, idx, contents)
    if costs.workload.engine_facts.memory is None and pipeline_shape(costs, idx).record.splits_backward:
        # An input pass, or the gradients that a weight pass over one chunk has made.
        made = costs.workload.compute_bytes * np.max(contents.trained, axis=-1)
        of_ranks = replace(of_ranks, working_bytes=np.maximum(of_ranks.split_working_bytes, made))
    return np.asarray(activation_headroom_bytes(of_ranks, step, costs.scenario, cap_bytes=cap_bytes))


@dataclass(frozen=True)
class RecomputeCosts:
    """Mixed layouts [N]: ``minimum`` has the least of all options, ``by_option`` [O] each of RECOMPUTES for all blocks."""

    minimum: CostTable

    @property
    def by_option(self) -> tuple[CostTable, ...]:
        """As if all blocks recomputed the same, for each of RECOMPUTES."""
        return self.minimum.by_option

    @cached_property
    def has_choice(self) -> BoolArray:
        """Which kinds [K] hold a block and so have something to recompute."""
        return np.array([kind.inner_block is not None for kind in self.minimum.kinds])

    def of_kinds(self, name: str, idx: int) -> FloatArray:
        """Return a LayerCost field of each kind under each option [K, O] of one layout."""
        values = [[getattr(cost, name)[idx] for cost in costs.by_kind] for costs in self.by_option]
        return np.array(values, dtype=np.float64).T

    def exposed_s(self, idx: int) -> FloatArray:
        """Return exposed communication over data of each kind under each option [K, O] of one layout, once per step."""
        values = [[seconds[idx] for seconds in costs.per_step.dp_exposed_by_kind] for costs in self.by_option]
        return np.array(values, dtype=np.float64).T

    @cached_property
    def min_exposed_by_kind(self) -> tuple[FloatArray, ...]:
        """The minimum of the options for each kind [K] of [N]."""
        by_option = [costs.per_step.dp_exposed_by_kind for costs in self.by_option]
        return tuple(np.min([seconds[k] for seconds in by_option], axis=0) for k in range(len(self.minimum.kinds)))

    def working_bytes(self, idx: int) -> FloatArray:
        """Return the working set of a stage [O] whose blocks use the option."""
        return np.array([costs.working_bytes[idx] for costs in self.by_option])

    def assigned(self, idx: int, options: Sequence[int]) -> CostTable:
        """Return one layout (row 0) whose layers [L] recompute as ``options`` says: a kind for each kind and option."""
        row, num_kinds = np.array([idx]), len(self.minimum.kinds)
        option_of_layer = np.asarray(options, dtype=np.int64)
        kind_of_layer = self.minimum.kind_of_layer
        known = KnownCosts(
            by_kind=tuple(cost.take(row) for costs in self.by_option for cost in costs.by_kind),
            dp_exposed_by_kind=tuple(s[row] for costs in self.by_option for s in costs.per_step.dp_exposed_by_kind),
        )
        return replace(
            self.minimum.select(row),
            kinds=self.minimum.kinds * len(self.by_option),
            kind_of_layer=option_of_layer * num_kinds + kind_of_layer,
            by_case=tuple(cost.take(costs.case_idx[row]) for costs in self.by_option for cost in costs.by_case),
            case_idx=np.zeros(1, dtype=np.int64),
            option_of_layer=np.where(self.has_choice[kind_of_layer], option_of_layer, -1),
            working_of_option=self.working_bytes(idx),
            known=known,
        )
