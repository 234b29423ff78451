"""A whole training step: layers add up to stages, stages to a step.

`SpaceCosts` holds the cost of each kind of layer under each layout; from it come, with the same formulas,
`lower_bounds` (all layouts at once, every stage ideally balanced) and `estimate_step` (one layout with its real stages).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..schema import ClusterSpec, Estimate, Workload
from ..schema.errors import ConfigError
from ..schema.layout import SCHEDULES
from ..schema.model import Block, Embedding
from ..schema.plan import Interval, MemoryBreakdown, StageEstimate, TimeBreakdown
from . import memory
from .coefficients import peak_flops_per_s
from .interval import time_interval
from .layouts import MIXED, FloatArray, IntArray, LayoutBatch
from .operators import model_flops_per_token
from .option_costs import OptionCosts
from .pipeline import Work, fewest_in_flight, lower_bound_s, pipelined_s
from .pipeline_replay import Shape, held, in_flight, makespan_s
from .recompute_bounds import least_step_s
from .space_costs import SpaceCosts
from .vocabulary import MORE_IN_FLIGHT


def lower_bounds(costs: SpaceCosts) -> tuple[FloatArray, FloatArray]:
    """Admissible bounds for every layout: seconds of a step and bytes of the fullest device, [N] each.

    Stages are taken as perfectly balanced in time and in memory at once. Both costs are convex in what a stage holds, so no
    real split does better. For pp = 1 the time is exact.
    """
    return time_bounds(costs), memory_bounds(costs)


def quick_time_bounds(costs: SpaceCosts) -> FloatArray:
    """Admissible bound on the seconds of a step [N] from the work inside layers and the pipeline's bubble alone."""
    return np.asarray(lower_bound_s(pipeline_work(costs, slowest_stage_s(costs), np.zeros(len(costs.batch)))))


def time_bounds(costs: SpaceCosts) -> FloatArray:
    """Admissible bound on the seconds of a step [N]."""
    mixed = costs.batch.recompute == MIXED
    if mixed.any() and not mixed.all():
        bound = np.zeros(len(mixed))
        for rows in (np.flatnonzero(mixed), np.flatnonzero(~mixed)):
            bound[rows] = time_bounds(costs.select(rows))
        return bound
    updates = [costs.update_s(cost.num_trained[costs.like], cost.expert_params[costs.like]) for cost in costs.inside]
    always = costs.dp_edges_s + _fullest_stage(costs, updates) + _vocabulary_bound_s(costs)
    exposed = OptionCosts.of(costs).least_exposed_by_kind if mixed.any() else costs.dp_exposed_by_kind
    bound = (
        lower_bound_s(pipeline_work(costs, slowest_stage_s(costs), 2 * costs.transfer_s))
        + _fullest_stage(costs, exposed)
        + always
    )
    return np.asarray(np.maximum(bound, _with_recompute(costs) + always) if mixed.any() else bound)


def _with_recompute(costs: SpaceCosts) -> FloatArray:
    """What the layers of mixed layouts and their transfers take at least once they fit [N]."""
    total, none = costs.total("busy_s"), np.zeros(len(costs.batch))
    # With one stage a rank, balanced stages take as much longer as there is more work.
    per_second = lower_bound_s(pipeline_work(costs, total / costs.batch.pp, none)) / total
    layers = least_step_s(OptionCosts.of(costs), per_second, _kept_by_all_stages(costs))
    return np.asarray(layers + per_second * 2 * costs.transfer_s * costs.batch.pp)


def _vocabulary_bound_s(costs: SpaceCosts) -> FloatArray:
    """What a split vocabulary adds to a step at least [N]: the same on every stage."""
    if costs.vocabulary is None:
        return np.zeros(len(costs.batch))
    update = costs.update_s(costs.vocabulary.total("num_trained"), 0.0)
    return np.asarray(costs.vocabulary_s + costs.vocabulary_dp_s + update)


def _with_vocabulary(
    costs: SpaceCosts, contents: memory.StageContents, at: int | slice = slice(None)
) -> memory.StageContents:
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


def _more_in_flight(costs: SpaceCosts, in_flight: Any, at: int | slice = slice(None)) -> Any:
    """Micro-batches in flight where the barrier of a split vocabulary keeps one more."""
    b = costs.batch
    more = np.minimum(b.num_microbatches[at], in_flight + MORE_IN_FLIGHT)
    return np.where(b.vocabulary[at] == 1, more, in_flight)


def pipeline_work(costs: SpaceCosts, slowest_s: FloatArray, transfer_s: FloatArray) -> Work:
    """What the bounds of pipeline.py look at, given what the slowest rank has at least and the transfers of each rank [N]."""
    b = costs.batch
    busy = [cost.busy_s for cost in costs.inside]
    forward = [cost.forward_s + cost.comm_forward_s for cost in costs.inside]
    blocks = [k for k, kind in enumerate(costs.kinds) if isinstance(kind, Block)]
    deep = [k for k, kind in enumerate(costs.kinds) if not isinstance(kind, Embedding)]

    def total(kinds: Sequence[int]) -> FloatArray:
        return np.asarray(sum(costs.counts[k] * busy[k] for k in kinds))[costs.like]

    def extreme(values: Sequence[FloatArray], largest: bool) -> FloatArray:
        return np.asarray((np.max if largest else np.min)(np.stack(values), axis=0))

    def part(values: FloatArray, of: FloatArray) -> FloatArray:
        # A head that is split over all stages is no layer of the last one.
        return np.asarray(np.divide(values, of, out=np.zeros_like(of), where=of > 0))

    def shares(values: Sequence[FloatArray]) -> list[FloatArray]:
        """Of the work of each kind in ``deep``; a layer that is not there does not count."""
        return [np.divide(values[k], busy[k], out=np.zeros_like(busy[k]), where=busy[k] > 0) for k in deep]

    weight = [cost.weight_s for cost in costs.inside]
    dearest = extreme([busy[k] for k in blocks], True)
    most = max(blocks, key=lambda k: costs.counts[k])
    return Work(
        schedule=b.schedule,
        pp=b.pp,
        num_model_chunks=b.num_model_chunks,
        num_microbatches=b.num_microbatches,
        total_s=total(range(len(busy))),
        blocks_s=total(blocks),
        deep_s=total(deep),
        slowest_s=slowest_s,
        num_blocks=costs.model.num_blocks,
        block_s=extreme([busy[k] for k in blocks], False)[costs.like],
        block_forward_s=extreme([forward[k] for k in blocks], False)[costs.like],
        transfer_s=transfer_s,
        total_forward_s=np.asarray(sum(n * seconds for n, seconds in zip(costs.counts, forward, strict=True)))[
            costs.like
        ],
        main_s=busy[most][costs.like],
        num_other_blocks=costs.model.num_blocks - int(costs.counts[most]),
        main_forward_share=(forward[most] / busy[most])[costs.like],
        block_share=(extreme([busy[k] for k in blocks], False) / dearest)[costs.like],
        block_forward_share=(extreme([forward[k] for k in blocks], False) / dearest)[costs.like],
        path_share=1 - extreme(shares(weight), True)[costs.like],
        forward_share=extreme(shares(forward), True)[costs.like],
        weight_share=extreme(shares(weight), True)[costs.like],
    )


def _fullest_stage(costs: SpaceCosts, by_kind: Sequence[FloatArray]) -> FloatArray:
    """What the stage with the most of it has at least [N], given a layer of each kind [K] of [N].

    The mean of all stages, or the blocks of a kind: some stage holds ceil(n / pp) of n.
    """
    pp = costs.batch.pp
    fullest = sum((n * values for n, values in zip(costs.counts, by_kind, strict=True)), start=np.zeros(len(pp))) / pp
    for n, kind, values in zip(costs.counts, costs.kinds, by_kind, strict=True):
        if isinstance(kind, Block):
            fullest = np.maximum(fullest, -(-n // pp) * values)
    return np.asarray(fullest)


def slowest_stage_s(costs: SpaceCosts) -> FloatArray:
    """Seconds [N] of one micro-batch that the slowest stage takes at least, without transfers.

    Some stage has the mean, or ceil(n / pp) of n blocks of a kind; or the rank with the head has j blocks beside it and another one
    ceil((n - j) / (pp - 1)), at the j where the larger of both is least.
    """
    of_kinds = _fullest_stage(costs, [cost.busy_s[costs.like] for cost in costs.inside])
    b, last_block = costs.batch, max(i for i, k in enumerate(costs.kind_of_layer) if isinstance(costs.kinds[k], Block))
    block = np.min(
        [c.busy_s for c, kind in zip(costs.inside, costs.kinds, strict=True) if isinstance(kind, Block)], axis=0
    )
    behind = np.bincount(costs.kind_of_layer[last_block + 1 :], minlength=len(costs.kinds))
    head = np.asarray(sum(n * cost.busy_s for n, cost in zip(behind, costs.inside, strict=True)))[costs.like]
    block, n, others = block[costs.like], costs.model.num_blocks, np.maximum(b.pp - 1, 1)
    least = np.full(len(b), np.inf)
    for more in (0, 1):
        even = np.floor((n - others * head / block) / b.pp) + more
        beside = np.clip(even, b.num_model_chunks, np.maximum(n - others * b.num_model_chunks, b.num_model_chunks))
        least = np.minimum(least, np.maximum(beside * block + head, -(-(n - beside) // others) * block))
    return np.asarray(np.where(b.pp > 1, np.maximum(of_kinds, least), of_kinds))


def memory_bounds(costs: SpaceCosts) -> FloatArray:
    """Admissible bound on the bytes of the fullest device [N]."""
    parts = memory.stage_memory(_balanced_contents(costs), _least_shape(costs), costs.workload, costs.cluster)
    return np.asarray(memory.total_bytes(parts))


def _kept_by_all_stages(costs: SpaceCosts) -> FloatArray:
    """Activations of one micro-batch that all stages together may keep at most [N], bytes."""
    cap_bytes = costs.cluster.memory_budget_bytes
    contents, shape = _balanced_contents(costs), _least_shape(costs)
    room = memory.kept_room_bytes(contents, shape, costs.workload, costs.cluster, cap_bytes=cap_bytes)
    return np.asarray(room * costs.batch.pp)


def _balanced_contents(costs: SpaceCosts) -> memory.StageContents:
    """The mean of all stages of every layout [N]."""
    b = costs.batch
    params, trained, expert_params = (costs.total(n) / b.pp for n in ("num_params", "num_trained", "expert_params"))
    contents = memory.StageContents(
        params=params,
        trained=trained,
        expert_params=expert_params,
        block_trained=costs.block_trained,
        frozen_bytes=costs.total("frozen_bytes") / b.pp,
        root_params=np.where(b.pp == 1, costs.root_params, 0.0),
        block_params=costs.block_params,
        activation_bytes=_least_activations(costs) / b.pp,
        working_bytes=costs.working_bytes,
        logits=np.where(b.pp == 1, costs.logits, 0.0),
        boundary_bytes=costs.boundary_bytes,
    )
    return _with_vocabulary(costs, contents)


def _least_shape(costs: SpaceCosts) -> memory.StepShape:
    """Of the stage with the fewest micro-batches in flight."""
    b = costs.batch
    fewest = fewest_in_flight(b.schedule, b.num_microbatches, b.pp, b.num_model_chunks)
    return _step_shape(b, _more_in_flight(costs, fewest), num_neighbours=np.minimum(b.pp - 1, 1))


def _least_activations(costs: SpaceCosts) -> FloatArray:
    """Bytes of one micro-batch in all layers [N]; with chunks those of as many of the smallest blocks.

    A rank holds more micro-batches of its first chunk than of its last, so what is kept in the last one weighs less.
    """
    everything = costs.total("activation_bytes")
    smallest = np.min(
        [c.activation_bytes for kind, c in zip(costs.kinds, costs.inside, strict=True) if isinstance(kind, Block)],
        axis=0,
    )
    chunked = costs.model.num_blocks * smallest[costs.like]
    return np.asarray(np.where(costs.batch.num_model_chunks > 1, np.minimum(chunked, everything), everything))


def stage_memory_parts(
    costs: SpaceCosts, idx: int, contents: memory.StageContents, stage_idx: IntArray
) -> dict[str, FloatArray]:
    """Memory parts of stages ``stage_idx`` of layout ``idx``; the chunks of a rank count as one stage, equal to each other."""
    return memory.stage_memory(contents, _stage_shape(costs, idx, stage_idx), costs.workload, costs.cluster)


def _stage_shape(costs: SpaceCosts, idx: int, stage_idx: IntArray) -> memory.StepShape:
    b = costs.batch
    if shape_of(costs, idx).splits_backward:
        flight = in_flight(shape_of(costs, idx))[stage_idx]
    else:
        flight = memory.in_flight(
            b.schedule[idx], b.num_microbatches[idx], b.pp[idx], stage_idx, b.num_model_chunks[idx]
        )
    flight = _more_in_flight(costs, flight, idx)
    num_neighbours = (stage_idx > 0).astype(np.int64) + (stage_idx < b.pp[idx] - 1)
    return _step_shape(b, flight, num_neighbours=num_neighbours, at=idx)


def kept_room_bytes(
    costs: SpaceCosts, idx: int, contents: memory.StageContents, stage_idx: IntArray, *, cap_bytes: float
) -> FloatArray:
    """Activations that stages ``stage_idx`` of layout ``idx`` may keep for each micro-batch, bytes; negative where none fit."""
    shape = _stage_shape(costs, idx, stage_idx)
    room = memory.kept_room_bytes(contents, shape, costs.workload, costs.cluster, cap_bytes=cap_bytes)
    without = replace(contents, activation_bytes=np.zeros_like(contents.params))
    parts = memory.stage_memory(without, shape, costs.workload, costs.cluster)
    required = memory.required_bytes(memory.total_bytes(parts), parts["parameters"], costs.workload, costs.cluster)
    return np.asarray(np.where(required <= cap_bytes, room, -np.inf))


def rank_memory_parts(
    costs: SpaceCosts, idx: int, contents: memory.StageContents
) -> tuple[memory.StageContents, dict[str, FloatArray]]:
    """Contents and memory parts of each rank [..., pp] of layout ``idx``, given those of its stages [..., S], chunks included.

    Activations are those of the fullest moment of the schedule (pipeline_replay.held).
    """
    b, shape = costs.batch, shape_of(costs, idx)
    ranks = np.array(shape.rank_of_stage)
    on_rank = ranks[:, None] == np.arange(shape.pp)

    def summed(values: FloatArray) -> FloatArray:
        return np.asarray(values @ on_rank)

    activations = np.asarray(contents.activation_bytes)
    peak = np.stack(
        [(activations[..., ranks == r] @ counts.T).max(axis=-1) for r, counts in enumerate(held(shape))], axis=-1
    )
    kept = summed(activations)
    whole = memory.StageContents(
        params=summed(contents.params),
        trained=summed(contents.trained),
        expert_params=summed(contents.expert_params),
        block_trained=contents.block_trained,
        frozen_bytes=summed(contents.frozen_bytes),
        root_params=np.minimum(summed(contents.root_params), costs.root_params[idx]),
        block_params=contents.block_params,
        activation_bytes=kept,
        working_bytes=contents.working_bytes,
        logits=summed(contents.logits),
        boundary_bytes=contents.boundary_bytes,
    )
    flight = np.divide(peak, kept, out=np.zeros_like(peak), where=kept > 0)
    stages = np.arange(shape.num_stages)
    neighbours = (stages > 0).astype(np.int64) + (stages < shape.num_stages - 1)
    if costs.workload.engine == "fsdp2":  # torch's stages have receive buffers of their own
        of_rank = np.bincount(ranks, neighbours, shape.pp).astype(np.int64)
    else:
        of_rank = neighbours[: shape.pp]
    step = _step_shape(b, flight, num_neighbours=of_rank, at=idx)
    return whole, memory.stage_memory(whole, step, costs.workload, costs.cluster)


def shape_of(costs: SpaceCosts, idx: int) -> Shape:
    """The schedule of layout ``idx`` and its numbers."""
    b = costs.batch
    return Shape(
        schedule=SCHEDULES[b.schedule[idx]],
        pp=int(b.pp[idx]),
        num_model_chunks=int(b.num_model_chunks[idx]),
        num_microbatches=int(b.num_microbatches[idx]),
    )


def _step_shape(
    batch: LayoutBatch, in_flight: IntArray | FloatArray, *, num_neighbours: IntArray, at: int | slice = slice(None)
) -> memory.StepShape:
    return memory.StepShape(
        dp_replicate=batch.num_replicas[at],
        dp_shard=batch.num_shards[at],
        expert_shards=batch.expert_shards[at],
        gradient_shards=(batch.num_gradient_shards[at], batch.expert_gradient_shards[at]),
        optimizer_shards=(batch.num_optimizer_shards[at], batch.expert_optimizer_shards[at]),
        zero_stage=batch.zero_stage[at],
        num_microbatches=batch.num_microbatches[at],
        in_flight=in_flight,
        num_neighbours=num_neighbours,
        offload=batch.offload[at],
        offload_fraction=batch.offload_fraction[at],
    )


def contents_between(costs: SpaceCosts, idx: int, first: IntArray, last: IntArray) -> memory.StageContents:
    """Contents of stages that hold layers ``first .. last - 1`` under layout ``idx``; arrays of any one shape."""

    def span(name: str) -> FloatArray:
        prefix = costs.prefix(name, idx)
        return np.asarray(prefix[last] - prefix[first])

    roots = np.concatenate([[0.0], np.cumsum(costs.per_layer("num_params", idx) * costs.is_root)])
    contents = memory.StageContents(
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
    return _with_vocabulary(costs, contents, idx)


def _working_between(costs: SpaceCosts, idx: int, first: IntArray, last: IntArray) -> FloatArray:
    """Largest working set of a layer; where blocks recompute differently, under the options of those on the stage."""
    if costs.option_of_layer is None or costs.working_of_option is None:
        return np.asarray(costs.working_bytes[idx])
    largest = np.zeros(np.shape(first))
    for option, working in enumerate(costs.working_of_option):
        before = np.concatenate([[0], np.cumsum(costs.option_of_layer == option)])
        largest = np.maximum(largest, np.where(before[last] > before[first], working, 0.0))
    return largest


def estimate_step(costs: SpaceCosts, idx: int, boundaries: Sequence[int]) -> Estimate:
    """Estimate of layout ``idx`` whose stage s holds layers ``boundaries[s] .. boundaries[s+1] - 1``.

    With model chunks there are pp stages for each, or pp that stand for all the layers of a rank, its chunks equal to each other.
    """
    assert costs.batch.recompute[idx] != MIXED or costs.option_of_layer is not None, "each layer needs an option"
    first, last = np.array(boundaries[:-1]), np.array(boundaries[1:])
    contents = contents_between(costs, idx, first, last)
    shape = shape_of(costs, idx)
    in_chunks = len(first) == shape.num_stages > shape.pp
    num_ranks = shape.pp if in_chunks else len(first)
    ranks = np.array(shape.rank_of_stage) if in_chunks else np.arange(num_ranks)
    if in_chunks:
        contents, parts = rank_memory_parts(costs, idx, contents)
    else:
        parts = stage_memory_parts(costs, idx, contents, ranks)
    passes = _pass_seconds(costs, idx, first, last)
    breakdown_s = _time_breakdown(costs, idx, replace(shape, pp=num_ranks), passes, ranks, contents)
    breakdown_s = _with_vocabulary_s(costs, idx, breakdown_s)
    allocated = memory.total_bytes(parts)
    fullest = int(np.argmax(allocated))
    forward_s, backward_s = (np.bincount(ranks, seconds, num_ranks) for seconds in (passes.forward, passes.backward))
    if (share := costs.vocabulary) is not None:
        ahead_s = share.total("forward_s")[idx] + share.total("comm_forward_s")[idx]
        forward_s, backward_s = forward_s + ahead_s, backward_s + share.total("busy_s")[idx] - ahead_s
    stages = tuple(
        StageEstimate(
            forward_s=float(forward_s[s]),
            backward_s=float(backward_s[s]),
            memory_bytes=memory.breakdown({name: np.broadcast_to(v, num_ranks)[s] for name, v in parts.items()}),
        )
        for s in range(num_ranks)
    )
    return assembled(costs, breakdown_s, stages, fullest)


class Passes(NamedTuple):
    """Seconds of one micro-batch in each stage [S], communication inside layers included: forward, backward and, of that, weights.

    ``parts`` [S] are the same by the names of TimeBreakdown, ``exposed`` [S] what the stage's data-parallel collectives add once.
    """

    forward: FloatArray
    backward: FloatArray
    weight: FloatArray
    exposed: FloatArray
    parts: dict[str, FloatArray]


def _pass_seconds(costs: SpaceCosts, idx: int, first: IntArray, last: IntArray) -> Passes:
    def between(values: FloatArray) -> FloatArray:
        return np.array([values[i:j].sum() for i, j in zip(first, last, strict=True)])

    def stage_sums(name: str) -> FloatArray:
        return between(costs.per_layer(name, idx))

    forward, backward, recompute = stage_sums("forward_s"), stage_sums("backward_s"), stage_sums("recompute_s")
    sent = [[stage_sums(f"{axis}_{way}_s") for way in ("forward", "backward")] for axis in ("tp", "cp", "ep")]
    parts = {"compute": forward + backward, "recompute": recompute}
    parts |= {axis: there + back for axis, (there, back) in zip(("tp", "cp", "ep"), sent, strict=True)}
    return Passes(
        forward + sum(there for there, _ in sent),
        backward + recompute + sum(back for _, back in sent),
        stage_sums("weight_s"),
        between(np.array([e[idx] for e in costs.dp_exposed_by_kind])[costs.kind_of_layer]),
        parts,
    )


def _time_breakdown(
    costs: SpaceCosts, idx: int, shape: Shape, passes: Passes, ranks: IntArray, contents: memory.StageContents
) -> TimeBreakdown:
    """``ranks`` says which rank has each of the ``passes``."""
    m, pp = shape.num_microbatches, shape.pp
    transfer = 2 * float(costs.transfer_s[idx]) if pp > 1 else 0.0

    def on_ranks(seconds: FloatArray) -> FloatArray:
        return np.asarray(np.bincount(ranks, seconds, pp), dtype=np.float64)

    busy = on_ranks(passes.forward + passes.backward) + transfer
    slowest = int(np.argmax(busy))
    parts = {name: m * float(on_ranks(seconds)[slowest]) for name, seconds in passes.parts.items()}
    return TimeBreakdown(
        **parts,
        dp=float(np.max(on_ranks(passes.exposed))) + float(costs.dp_edges_s[idx]),
        pp=m * transfer,
        bubble=max(0.0, step_s(shape, passes, transfer) - m * float(busy[slowest])),  # rounding can leave -1e-16
        optimizer=float(np.max(costs.update_s(contents.trained, contents.expert_params, idx))),
    )


def step_s(shape: Shape, passes: Passes, transfer_s: float) -> float:
    """Seconds of all micro-batches through the pipeline: the schedule, replayed.

    Args:
        shape: schedule and numbers.
        passes: of every stage, or of all the stages of each rank, which then count as equal.
        transfer_s: of one micro-batch to and from the neighbours, over all the chunks of a rank; both ranks wait for it.

    Raises:
        ConfigError: the schedule is not defined for these numbers. Interleaved 1F1B has its closed form for any.
    """
    forward, backward, weight = passes.forward, passes.backward - passes.weight, passes.weight
    chunks = shape.num_model_chunks
    if chunks > 1 and len(forward) == shape.pp:
        of_stage = np.array(shape.rank_of_stage)
        forward, backward, weight = (seconds[of_stage] / chunks for seconds in (forward, backward, weight))
    each_way = transfer_s / 2 / chunks
    try:
        return makespan_s(shape, forward + each_way, backward + each_way, weight)
    except ConfigError:
        if shape.schedule != "1f1b":
            raise
        busy = np.bincount(shape.rank_of_stage, forward + backward + weight, shape.pp) + transfer_s
        return float(pipelined_s(busy, shape.num_microbatches, chunks))


def _with_vocabulary_s(costs: SpaceCosts, idx: int, parts: TimeBreakdown) -> TimeBreakdown:
    """The breakdown with what a split vocabulary adds to every stage."""
    if costs.vocabulary is None:
        return parts
    m, share = int(costs.batch.num_microbatches[idx]), costs.vocabulary.at(np.array([idx]))
    compute = m * float(share.total("forward_s")[0] + share.total("backward_s")[0] + share.total("recompute_s")[0])
    inside = m * float(share.total("comm_forward_s")[0] + share.total("comm_backward_s")[0])
    sent = m * float(costs.vocabulary_sent_s[idx])
    return parts.replace(
        compute=parts.compute + compute,
        tp=parts.tp + inside,
        pp=parts.pp + sent,
        bubble=parts.bubble + max(0.0, float(costs.vocabulary_s[idx]) - compute - inside - sent),
        dp=parts.dp + float(costs.vocabulary_dp_s[idx]),
    )


def with_memory(estimate: Estimate, parts: MemoryBreakdown, workload: Workload, cluster: ClusterSpec) -> Estimate:
    """The estimate with another peak of the fullest device."""
    return estimate.replace(memory_bytes=parts, **_peaks(parts, workload, cluster))


def _peaks(parts: MemoryBreakdown, workload: Workload, cluster: ClusterSpec) -> dict[str, Any]:
    """Fields of an Estimate that follow from the parts of the allocated peak."""
    allocated = parts.total
    reserved = float(memory.reserved_bytes(allocated, parts.parameters, workload, cluster))
    required = int(memory.required_bytes(allocated, parts.parameters, workload, cluster))
    low, high = memory.interval_factors(workload, cluster)
    return {
        "peak_allocated_bytes": allocated,
        "peak_reserved_bytes": int(reserved),
        "peak_device_bytes": int(reserved + memory.context_bytes(cluster)),
        "memory_interval_bytes": Interval(low=low * allocated, high=high * allocated),
        "required_bytes": required,
        "fits": required <= cluster.memory_budget_bytes,
    }


def assembled(
    costs: SpaceCosts, breakdown_s: TimeBreakdown, stages: tuple[StageEstimate, ...], fullest: int
) -> Estimate:
    """The estimate that follows from the parts of a step and from what each stage holds; memory is that of stage ``fullest``."""
    workload, cluster, model = costs.workload, costs.cluster, costs.model
    peak = sum(group.num_devices * peak_flops_per_s(group.device, workload.precision) for group in cluster.groups)
    time = breakdown_s.total
    tokens_per_s = workload.tokens_per_step / time
    layers = tuple((run.layer, run.count) for run in model.layers)
    is_frozen = workload.adapters is not None
    flops = model_flops_per_token(layers, model.hidden_dim, workload.attended_len, frozen=is_frozen) * tokens_per_s
    return Estimate(
        step_time_s=time,
        step_time_interval_s=time_interval(breakdown_s, workload, cluster),
        tokens_per_s=tokens_per_s,
        tokens_per_s_per_device=tokens_per_s / cluster.num_devices,
        mfu=flops / peak,
        budget_bytes=cluster.memory_budget_bytes,
        **_peaks(stages[fullest].memory_bytes, workload, cluster),
        breakdown_s=breakdown_s,
        memory_bytes=stages[fullest].memory_bytes,
        stages=stages,
    )
