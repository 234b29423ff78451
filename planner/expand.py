"""What no split of a layout into stages beats when its schedule is replayed: solvers/stages/split_bound.py for a layout of a space.

Vectorised bounds (cost_models/stage/bounds.py) order a space; these are worked out for one layout at a time, when its turn comes.

Expanding a layout: its layers cut into stages exactly (solvers/stages/stage_split.py), its ranks mapped to nodes, costed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..cost_models.pipeline.lower_bounds import lower_bound_s, paths_past
from ..cost_models.pipeline.simulation import Order
from ..cost_models.stage import memory
from ..cost_models.stage.bounds import fullest_stage, pipeline_work
from ..cost_models.stage.contents import contents_between, pipeline_shape
from ..cost_models.stage.memory import rank_memory_terms, stage_memory_terms
from ..cost_models.stage.recompute import RecomputeCosts
from ..cost_models.stage.step import estimate_step
from ..cost_models.stage.table import CostTable, is_aligned
from ..schema import Estimate, Layout
from ..schema.arrays import FloatArray
from ..schema.errors import ConfigError
from ..schema.layers import Block
from ..schema.layout_table import MIXED, RECOMPUTES, LayoutTable
from ..schema.schedules import GIVEN, OVER_A_V
from ..solvers.solution import Status
from ..solvers.stages import chunk_split, split_bound, stage_split
from .mixed_clusters import expand_on_parts, nodes_of
from .rank_map import in_order, node_order
from .request import PlanRequest
from .stage_choice import Layers, Stages, choose_stages
from .synthesis import LEANEST, SYNTHESISED, synthesise, with_schedule

Fits = NDArray[np.bool_]


class ReplayedBound(NamedTuple):
    """Seconds of a step that no split beats, and the blocks of each rank in the split they come from; empty if none is."""

    bound_s: float
    sizes: tuple[int, ...] = ()


def replayed_bound(costs: CostTable, idx: int, *, below_s: float, fits: Fits | None = None) -> ReplayedBound:
    """No split of layout ``idx`` is faster; ``below_s`` where none is faster than that. Zero where nothing is replayed.

    Of a mixed layout each block counts under the option that is least in everything.

    Args:
        costs: of some layouts.
        idx: one of them.
        below_s: seconds of a step of interest.
        fits: what memory allows: with one stage a rank whether it may hold layers i..j-1 [S, L+1, L+1], else `rank_fits`.
    """
    instance = _split_bound_instance(costs, idx, fits)
    if instance is None:
        return ReplayedBound(0.0)
    edges_s = float(costs.dp_edges_s[idx])
    found = split_bound.lower_bound_s(instance, below_s=below_s - edges_s)
    return ReplayedBound(found.bound_s + edges_s, found.sizes)


def _split_bound_instance(costs: CostTable, idx: int, fits: Fits | None) -> split_bound.SplitBoundInstance | None:
    b, row = costs.layouts, np.array([idx])
    if b.pp[idx] == 1 or b.vocabulary[idx] or (costs.device_pools and is_aligned(costs.select(row))[0]):
        return None
    shape = pipeline_shape(costs, idx)
    try:
        paths_past(shape)
    except ConfigError:  # the step has a closed form, whose bound is as good
        return None
    options = RecomputeCosts.from_table(costs) if b.recompute[idx] == MIXED else None
    seconds = _seconds(costs, idx)
    once = _once_s(costs, idx, options.min_exposed_by_kind if options else costs.dp_exposed_by_kind)
    under = options.by_option if options else ()
    choices = [(_seconds(one, idx), _once_s(one, idx, one.dp_exposed_by_kind)) for one in under]
    is_block = np.array([kind.is_block for kind in costs.kinds])[costs.kind_of_layer]
    fixed = np.zeros((3, shape.num_stages))
    fixed[:2] = costs.transfer_s[idx] / shape.num_model_chunks
    blocks = np.flatnonzero(is_block)
    ends = [(0, costs.kind_of_layer[: blocks[0]]), (-1, costs.kind_of_layer[blocks[-1] + 1 :])]
    once_fixed = np.zeros((len(once), shape.num_stages))
    for stage, kinds in ends:
        fixed[:, stage] += seconds[:, kinds].sum(axis=1)
        once_fixed[:, stage] += once[:, kinds].sum(axis=1)
    kind_of_block = np.unique(costs.kind_of_layer[blocks], return_inverse=True)[1]
    of_block = costs.kind_of_layer[blocks]
    one = costs.select(row)
    least = np.array([_fullest_s(one, values) for values in once])
    return split_bound.SplitBoundInstance(
        shape,
        seconds[:, of_block],
        kind_of_block,
        fixed,
        once[:, of_block],
        once_fixed,
        least,
        _of_blocks(fits, is_block),
        tuple((of_kind[:, of_block], once_of_kind[:, of_block]) for of_kind, once_of_kind in choices),
    )


def _seconds(costs: CostTable, idx: int) -> FloatArray:
    """Forward, input and weight pass of a layer of each kind [3, K]."""
    own = [
        cost.take(costs.case_idx[[idx]]) for cost in costs.by_case
    ]  # of this layout alone: sums over all cases take long
    total = np.concatenate([cost.busy_s for cost in own])
    forward = np.concatenate([cost.forward_s + cost.comm_forward_s for cost in own])
    weight = np.concatenate([cost.weight_s for cost in own])
    return np.stack([forward, total - forward - weight, weight])


def _once_s(costs: CostTable, idx: int, exposed_by_kind: Sequence[FloatArray]) -> FloatArray:
    """What a layer of each kind adds to its rank once, exposed communication and its update [2, K]."""
    case = costs.case_idx[idx]
    trained = np.array([cost.num_trained[case] for cost in costs.by_case])
    experts = np.array([cost.expert_params[case] for cost in costs.by_case])
    exposed = np.array([seconds[idx] for seconds in exposed_by_kind])
    return np.stack([exposed, costs.update_s(trained, experts, idx)])


def _fullest_s(one: CostTable, of_kind: FloatArray) -> float:
    return float(fullest_stage(one, [np.array([seconds]) for seconds in of_kind])[0])


def _of_blocks(fits: Fits | None, is_block: NDArray[np.bool_]) -> Fits | None:
    """Whether a stage may hold blocks i..j-1, with what is before the first block and behind the last one."""
    if fits is None or fits.shape[-1] != len(is_block) + 1:
        return fits
    blocks = np.flatnonzero(is_block)
    first, last = np.append(blocks, len(is_block)), np.append(0, blocks + 1)
    first[0], last[-1] = 0, len(is_block)
    return np.asarray(fits[:, first][:, :, last])


def rank_fits(costs: CostTable, idx: int, *, cap_bytes: float) -> Fits | None:
    """With several chunks a rank, whether it may hold j - i blocks [R, N+1, N+1]; None where blocks differ.

    Chunks count as having the blocks that all of them have.
    """
    kinds = {k for k in costs.kind_of_layer if isinstance(costs.kinds[k], Block)}
    if len(kinds) > 1 or not np.isfinite(cap_bytes):
        return None
    shape = pipeline_shape(costs, idx)
    is_block = np.isin(costs.kind_of_layer, list(kinds))
    blocks = np.flatnonzero(is_block)
    even = np.arange(1, len(blocks) // shape.num_model_chunks + 1)[:, None]  # blocks of each chunk [E, 1]
    stages = np.arange(shape.num_stages)
    first = np.where(stages == 0, 0, blocks[0]) + 0 * even
    last = blocks[0] + even + 0 * stages
    first[:, -1], last[:, -1] = blocks[-1] + 1 - even[:, 0], len(is_block)
    _, parts = rank_memory_terms(costs, idx, contents_between(costs, idx, first, last))
    required = memory.required_by_terms(parts, costs.scenario)
    most = (np.asarray(required <= cap_bytes).sum(axis=0) + 1) * shape.num_model_chunks - 1  # [R]
    size = np.arange(len(blocks) + 1) - np.arange(len(blocks) + 1)[:, None]
    return np.asarray((size >= 0) & (size <= most[:, None, None]))


@dataclass(frozen=True)
class Candidate:
    """One expanded layout; ``idx`` in the space, stage boundaries, estimate; no split of it is faster than ``bound_s``.

    ``options`` has an index into RECOMPUTES for each layer.
    ``nodes`` hold the ranks in this order; empty: as the cluster lists them. Of a mixed cluster ``part_of_stage`` says on which of
    its parts each stage lies; empty: every rank is costed as the weakest. ``order`` is that of a synthesised schedule.
    Under no order of passes a split is faster than ``any_order_s``, under the named one than ``bound_s``.
    """

    idx: int
    boundaries: tuple[int, ...]
    estimate: Estimate
    bound_s: float
    options: tuple[int, ...]
    nodes: tuple[int, ...] = ()
    part_of_stage: tuple[int, ...] = ()
    order: Order = ()
    any_order_s: float = 0.0

    def layout(self, batch: LayoutTable) -> Layout:
        """The layout as it came out: mixed only where blocks recompute differently, synthesised where it has an order."""
        layout = batch.layout(self.idx)
        if self.order:
            layout = layout.replace(schedule=GIVEN.name)
        return layout.replace(recompute=RECOMPUTES[self.options[0]]) if len(set(self.options)) == 1 else layout


def expand_layout(request: PlanRequest, layout: Layout) -> Candidate:
    """`expand` one given layout; without memory limits where no split is within them."""
    batch = LayoutTable.from_layouts([layout], request.workload.global_batch_size)
    return expand(CostTable.from_layouts(request.model, request.workload, request.cluster, batch), 0)


def expand_row(costs: CostTable, row: int, *, bound_s: float = 0.0) -> Candidate:
    """`expand` one layout of a large space, without costing the others."""
    return replace(expand(costs.select(np.array([row])).compacted(), 0, bound_s=bound_s), idx=row)


def expand(costs: CostTable, idx: int, *, bound_s: float = 0.0) -> Candidate:
    """Cut the layers of layout ``idx`` into stages and cost them; without memory limits where no split is within them.

    Two cuts are tried: the even one for the pipeline (stage_split's objective), and one that also counts what a stage adds to the
    step once, its exposed communication and its update, spread over the micro-batches. The faster one that fits is taken.

    Args:
        bound_s: of the layout before it is cut; the result's bound is raised to what its stages can have at best.
    """
    found = expand_fitting(costs, idx, bound_s=bound_s)
    if found is not None:
        return found
    if costs.layouts.recompute[idx] == MIXED:
        costs = costs.by_option[RECOMPUTES.index("full")]
    if costs.layouts.schedule[idx] == SYNTHESISED:
        costs, idx = with_schedule(costs.select(np.array([idx])), LEANEST), 0
    boundaries = _cuts(costs, idx, cap_bytes=np.inf)[0][0]
    return Candidate(idx, boundaries, estimate_step(costs, idx, boundaries), bound_s, _same_for_all(costs, idx))


def expand_fitting(costs: CostTable, idx: int, *, bound_s: float = 0.0) -> Candidate | None:
    """`expand`, or None where no split into stages is within memory."""
    if costs.device_pools and is_aligned(costs.select(np.array([idx])))[0]:
        return _expand_mixed(costs, idx, bound_s)
    found = _expand_as_listed(costs, idx, bound_s=bound_s)
    if found is None or costs.cluster.bandwidth_matrix is None:
        return found
    return _with_rank_map(costs, replace(found, bound_s=bound_s))


def _expand_mixed(costs: CostTable, idx: int, bound_s: float) -> Candidate | None:
    """`expand_fitting` with each stage on one part of a mixed cluster."""
    found = expand_on_parts(costs, idx, lambda part, at, cap: _stage_fits(part, at, cap_bytes=cap))
    if found is None:
        return None
    least_s = bound_s if costs.cluster.bandwidth_matrix is not None else max(bound_s, found.bound_s)
    nodes = nodes_of(costs, found.part_of_stage)
    return Candidate(
        idx, found.boundaries, found.estimate, least_s, _same_for_all(costs, idx), nodes, found.part_of_stage
    )


def _with_rank_map(costs: CostTable, found: Candidate) -> Candidate:
    """The same layout with its ranks on other nodes, where that is faster."""
    uniform, at = costs.by_option[0] if costs.layouts.is_mixed else costs, found.idx
    if (
        costs.layouts.schedule[at] == SYNTHESISED
    ):  # an order made for one map says nothing of another: a named one weighs the axes
        uniform, at = with_schedule(costs.select(np.array([at])), LEANEST), 0
    nodes = node_order(uniform, at, found.boundaries)
    if not nodes:
        return found
    row = costs.layouts.select(np.array([found.idx]))
    there = costs.evaluate(row, in_order(costs.cluster, nodes))
    moved = _expand_as_listed(there, 0)
    if moved is None or moved.estimate.step_time_s >= found.estimate.step_time_s:
        return found
    return replace(moved, idx=found.idx, bound_s=found.bound_s, nodes=nodes)


def _expand_as_listed(costs: CostTable, idx: int, *, bound_s: float = 0.0) -> Candidate | None:
    """`expand_fitting` with the ranks on the nodes as the cluster lists them."""
    if costs.layouts.schedule[idx] == SYNTHESISED:
        return _expand_synthesised(costs, idx, bound_s)
    if costs.layouts.recompute[idx] == MIXED:
        return _expand_with_choices(costs, idx, bound_s)
    cuts, least_s = _cuts(costs, idx, cap_bytes=costs.cluster.memory_budget_bytes)
    if not cuts:
        return None
    estimates = {boundaries: estimate_step(costs, idx, boundaries) for boundaries in cuts}
    best = min(estimates, key=lambda boundaries: estimates[boundaries].step_time_s)
    found = Candidate(idx, best, estimates[best], max(bound_s, least_s), _same_for_all(costs, idx))
    return _as_replayed(costs, found)


def _as_replayed(costs: CostTable, found: Candidate) -> Candidate:
    """The candidate, or the cut that a replay promises most of where that is faster; bounded by what no cut beats."""
    idx, cap_bytes = found.idx, costs.cluster.memory_budget_bytes
    if int(costs.layouts.pp[idx]) == 1:
        return found
    in_chunks = costs.layouts.num_model_chunks[idx] > 1
    fits = rank_fits(costs, idx, cap_bytes=cap_bytes) if in_chunks else _stage_fits(costs, idx, cap_bytes=cap_bytes)
    least = replayed_bound(costs, idx, below_s=found.estimate.step_time_s, fits=fits)
    raised_s = max(found.bound_s, min(least.bound_s, found.estimate.step_time_s))
    found = replace(found, bound_s=raised_s, any_order_s=found.bound_s)
    if not least.sizes:
        return found
    required = _required_bytes(costs, idx)
    ranks = pipeline_shape(costs, idx).rank_of_stage
    instance = chunk_split.ChunkSplitInstance(
        costs.per_layer("busy_s", idx), _is_block(costs), ranks, required, cap_bytes
    )
    boundaries = chunk_split.boundaries_from_blocks(instance, np.array([least.sizes]))
    if in_chunks and np.any(required(boundaries) > cap_bytes):
        return found
    cut = tuple(int(end) for end in boundaries[0])
    estimate = estimate_step(costs, idx, cut)
    return (
        found
        if estimate.step_time_s >= found.estimate.step_time_s
        else replace(found, boundaries=cut, estimate=estimate)
    )


def _expand_synthesised(costs: CostTable, idx: int, bound_s: float) -> Candidate | None:
    """Stages as under the named schedules, with an order made for them.

    Raises:
        ConfigError: the layout has no V.
    """
    if costs.layouts.num_model_chunks[idx] != 2 or costs.layouts.pp[idx] == 1:
        chunks, pp = int(costs.layouts.num_model_chunks[idx]), int(costs.layouts.pp[idx])
        raise ConfigError(
            f"an order is made for two model chunks a rank over a V, not for {chunks} with pp {pp}",
            help="set num_model_chunks=2 with pp > 1, or name a schedule",
        )
    budget, row = costs.cluster.memory_budget_bytes, costs.select(np.array([idx]))
    named = [with_schedule(row, schedule.idx) for schedule in OVER_A_V]
    cuts = [cut for under in named for cut in _cuts(under, 0, cap_bytes=budget)[0]]
    options = _same_for_all(costs, idx)
    candidates = [
        Candidate(idx, boundaries, made.estimate, bound_s, options, order=made.order)
        for boundaries in dict.fromkeys(cuts)
        if (made := synthesise(costs, idx, boundaries)) is not None
    ]
    return min(candidates, key=lambda c: c.estimate.step_time_s, default=None)


def _same_for_all(costs: CostTable, idx: int) -> tuple[int, ...]:
    return (int(costs.layouts.recompute[idx]),) * len(costs.kind_of_layer)


def _expand_with_choices(costs: CostTable, idx: int, bound_s: float) -> Candidate | None:
    """The fastest of the answers for the pipeline alone and with what stages do once."""
    found = choose_stages(Layers(RecomputeCosts.from_table(costs), idx, costs.cluster.memory_budget_bytes))
    candidates = [_candidate(costs, idx, stages, max(bound_s, stages.bound_s)) for stages in found]
    best = min(candidates, key=lambda c: c.estimate.step_time_s, default=None)
    if best is None:
        return None
    if len(set(best.options)) == 1:
        moved = _as_replayed(costs.by_option[best.options[0]], best)
        best = replace(moved, bound_s=best.bound_s)
    least = replayed_bound(costs, idx, below_s=best.estimate.step_time_s)
    return replace(best, bound_s=min(max(best.bound_s, least.bound_s), best.estimate.step_time_s))


def _candidate(costs: CostTable, idx: int, stages: Stages, bound_s: float) -> Candidate:
    """A mixed layout with its stages; ``options`` are equal where all blocks do the same."""
    options = RecomputeCosts.from_table(costs)
    used = {stages.options[layer] for layer in np.flatnonzero(options.has_choice[costs.kind_of_layer])}
    chosen = stages.options if len(used) > 1 else tuple(used) * len(stages.options)
    if len(used) > 1:
        estimate = estimate_step(options.assigned(idx, chosen), 0, stages.boundaries)
    else:
        estimate = estimate_step(costs.by_option[chosen[0]], idx, stages.boundaries)
    return Candidate(idx, stages.boundaries, estimate, min(bound_s, estimate.step_time_s), chosen)


def _cuts(costs: CostTable, idx: int, *, cap_bytes: float) -> tuple[list[tuple[int, ...]], float]:
    """The even cut and the one that counts what a stage adds once, none where no split is within ``cap_bytes``; and seconds that no
    split within them can beat.

    With model chunks nothing is known but the bound of the layout.
    """
    busy = costs.per_layer("busy_s", idx)
    both = (busy, busy + costs.once_per_layer_s(idx) / int(costs.layouts.num_microbatches[idx]))
    if costs.layouts.num_model_chunks[idx] > 1:
        required = chunk_split.memoized(_required_bytes(costs, idx))
        shape = pipeline_shape(costs, idx)
        instances = (
            chunk_split.ChunkSplitInstance(weights, _is_block(costs), shape.rank_of_stage, required, cap_bytes)
            for weights in both
        )
        found = [chunk_split.solve(instance).choice for instance in instances]
        return [boundaries for boundaries in dict.fromkeys(found) if boundaries], 0.0
    fits = _stage_fits(costs, idx, cap_bytes=cap_bytes)
    solved = [stage_split.solve(stage_split.StageSplitInstance(weights, fits)) for weights in both]
    if solved[0].status is Status.INFEASIBLE:
        return [], float("inf")
    return [cut.choice for cut in solved if cut.choice], _split_bound_s(costs, idx, solved[0].objective, fits)


def _required_bytes(costs: CostTable, idx: int) -> chunk_split.Required:
    """Bytes that each rank of a layout requires, as a function of the boundaries of its stages."""

    def required_bytes(boundaries: NDArray[np.int64]) -> NDArray[np.float64]:
        contents = contents_between(costs, idx, boundaries[:, :-1], boundaries[:, 1:])
        _, parts = rank_memory_terms(costs, idx, contents)
        return np.asarray(memory.required_by_terms(parts, costs.scenario))

    return required_bytes


def _split_bound_s(costs: CostTable, idx: int, slowest_s: float, fits: NDArray[np.bool_]) -> float:
    """No split of layout ``idx`` is faster: each maximum over the stages is at least the least that any split has of it."""
    one = costs.select(np.array([idx]))
    pipeline_s = float(lower_bound_s(pipeline_work(one, np.array([slowest_s]), 2 * one.transfer_s))[0])
    exposed = np.array([seconds[idx] for seconds in costs.dp_exposed_by_kind])[costs.kind_of_layer]
    update = costs.once_per_layer_s(idx) - exposed
    least = (stage_split.min_slowest_s(stage_split.StageSplitInstance(values, fits)) for values in (exposed, update))
    return pipeline_s + float(costs.dp_edges_s[idx]) + sum(least)


def _is_block(costs: CostTable) -> NDArray[np.bool_]:
    return np.array([kind.is_block for kind in costs.kinds])[costs.kind_of_layer]


def _stage_fits(costs: CostTable, idx: int, *, cap_bytes: float) -> NDArray[np.bool_]:
    """FITS [S, L+1, L+1]: the stage has a block, and what it requires is within ``cap_bytes``.

    More layers never need less memory, so for each stage and first layer the last one that fits is found by bisection.
    """
    pp, size = int(costs.layouts.pp[idx]), len(costs.kind_of_layer) + 1
    first, last = np.meshgrid(np.arange(size), np.arange(size), indexing="ij")
    blocks = np.concatenate([[0], np.cumsum(_is_block(costs))])
    has_block = blocks[last] > blocks[first]
    if np.isinf(cap_bytes):
        return np.broadcast_to(has_block, (pp, size, size))
    starts = np.broadcast_to(np.arange(size), (pp, size))
    fitting, too_large = starts.copy(), np.full((pp, size), size)
    while np.any(too_large - fitting > 1):
        middle = (fitting + too_large) // 2
        contents = contents_between(costs, idx, starts, middle)
        parts = stage_memory_terms(costs, idx, contents, np.arange(pp)[:, None])
        required = memory.required_by_terms(parts, costs.scenario)
        fits = required <= cap_bytes
        fitting, too_large = np.where(fits, middle, fitting), np.where(fits, too_large, np.maximum(middle, fitting + 1))
    return np.asarray(has_block & (last <= fitting[:, :, None]))
