"""Expanding a layout: its layers cut into stages exactly, its ranks mapped to nodes, costed.

    cut       two even cuts (solvers/stages/splits.py): for the pipeline only, and with what stages do once
    replay    of one stage a rank and of chunks: what no cut beats when the schedule is replayed (solvers/stages/split_bound.py),
              and the cut that this bound comes from
    choices   of mixed layouts also what each block recomputes (stage_choice.py)
    order     of the synthesised schedule an order of passes made for the cut (stage_choice.py)
    map       on mixed clusters stages on device pools, with measured links nodes in an order (rank_map.py)

Vectorised bounds (cost_models/stage/bounds.py) order a space; the bounds here are worked out for one layout, when its turn comes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..cost_models.pipeline.orders import Order
from ..cost_models.pipeline.replay import lower_bound_s
from ..cost_models.stage import memory
from ..cost_models.stage.bounds import fullest_stage, pipeline_work
from ..cost_models.stage.contents import (
    RecomputeCosts,
    contents_between,
    pipeline_shape,
    rank_memory_terms,
    stage_memory_terms,
)
from ..cost_models.stage.replicas import estimate_on_replicas, has_unlike_replicas, micro_batches, replicas_of_pools
from ..cost_models.stage.step import estimate_step
from ..cost_models.stage.table import CostTable, is_aligned
from ..schema import Layout, TrainingEstimate
from ..schema.errors import ConfigError
from ..schema.layout import Gradients
from ..schema.layout_table import MIXED, RECOMPUTES, LayoutTable
from ..schema.schedules import GIVEN, OVER_A_V
from ..schema.units import FloatArray, IntArray
from ..solvers import rank_mapping
from ..solvers.backend import Status
from ..solvers.stages import chunk_cuts, split_bound, splits
from ..solvers.stages.split_bound import paths_past
from .rank_map import STEPS_IN_SEARCH, expand_on_pools, in_order, node_order, nodes_in_order
from .request import PlanRequest
from .stage_choice import (
    LEANEST,
    SYNTHESISED,
    Layers,
    Stages,
    choose_stages,
    last_layers_that_fit,
    synthesise,
    with_schedule,
)

Cut = tuple[int, ...]
"""Boundaries of stages: first layer of each, and the number of layers."""

Fits = NDArray[np.bool_]

MIN_OPEN = 0.005
"""Part of a step that another cut of chunks could gain at most, from which cuts are compared by replays."""


@dataclass(frozen=True)
class Candidate:
    """One expanded layout; no split of it is faster than ``bound_s`` under its schedule, or ``any_order_s`` under any order.

    Attributes:
        idx: in the table that it was expanded from.
        boundaries: of its stages; ``options``: an index into RECOMPUTES for each layer.
        nodes: they hold the ranks in this order; empty: as the cluster lists them.
        part_of_stage: of a mixed cluster the device pool of each stage; empty: every rank counts as the weakest, or has its share.
        shares: sequences of each data-parallel rank, where these are of unlike speed; empty: even ones.
        order: of the synthesised schedule.
        gradients: their dtype where it is not the table's.
        half_blocks: its layers are half blocks where those of the table are not.
        given, tps: its layout where that is not in the table, and the tp of each stage; empty: the layout's (stage_degrees.py).
    """

    idx: int
    boundaries: Cut
    estimate: TrainingEstimate
    bound_s: float
    options: tuple[int, ...]
    nodes: tuple[int, ...] = ()
    part_of_stage: tuple[int, ...] = ()
    shares: tuple[int, ...] = ()
    order: Order = ()
    any_order_s: float = 0.0
    gradients: Gradients | None = None
    half_blocks: bool = False
    given: Layout | None = None
    tps: tuple[int, ...] = ()

    @property
    def step_time_s(self) -> float:
        """Seconds of one step."""
        return self.estimate.step_time_s

    def layout(self, table: LayoutTable) -> Layout:
        """Return the layout as it came out: mixed only where blocks recompute differently, synthesised where it has an order."""
        if self.given is not None:
            return self.given
        layout = table.layout(self.idx)
        if self.gradients is not None:
            layout = layout.replace(gradients=self.gradients)
        if self.order:
            layout = layout.replace(schedule=GIVEN.name)
        if self.half_blocks:
            layout = layout.replace(half_blocks=True)
        return layout.replace(recompute=RECOMPUTES[self.options[0]]) if len(set(self.options)) == 1 else layout


def expand_layout(request: PlanRequest, layout: Layout, *, as_listed: bool = False) -> Candidate:
    """`expand` one given layout; ``as_listed``: on the nodes in the order of the cluster's file, stages where that puts them."""
    table = LayoutTable.from_layouts([layout], request.workload.global_batch_size)
    costs = CostTable.from_layouts(request.model, request.workload, request.cluster, table)
    return (_expand_as_listed(costs, 0) if as_listed else None) or expand(costs, 0)


def expand_with_fp32_gradients(costs: CostTable, row: int) -> Candidate | None:
    """`expand_fitting` one layout of a large space with gradients that add up and are reduced in fp32."""
    only = costs.select(np.array([row])).compacted()
    layouts = only.layouts.replace(gradients=np.zeros_like(only.layouts.gradients))
    pools = tuple(pool.with_layouts(layouts) for pool in only.device_pools)
    candidate = expand_fitting(replace(only.with_layouts(layouts), device_pools=pools), 0)
    return None if candidate is None else replace(candidate, idx=row, gradients="fp32")


def expand_with_new_order(costs: CostTable, row: int, *, bound_s: float, below_s: float = np.inf) -> Candidate | None:
    """`expand_fitting` one layout of a large space with an order of passes made for it; ``bound_s``: under any order."""
    only = with_schedule(costs.select(np.array([row])).compacted(), SYNTHESISED)
    candidate = expand_fitting(only, 0, bound_s=bound_s, below_s=below_s)
    return candidate and replace(candidate, idx=row, any_order_s=bound_s)


def expand_row(costs: CostTable, row: int) -> Candidate:
    """`expand` one layout of a large space, without costing the others."""
    return replace(expand(costs.select(np.array([row])).compacted(), 0), idx=row)


def expand(costs: CostTable, idx: int) -> Candidate:
    """Cut the layers of layout ``idx`` into stages and cost them; without memory limits where no split is within them."""
    candidate = expand_fitting(costs, idx)
    if candidate is not None:
        return candidate
    if costs.layouts.recompute[idx] == MIXED:
        costs = costs.by_option[RECOMPUTES.index("full")]
    if costs.layouts.schedule[idx] == SYNTHESISED:
        costs, idx = with_schedule(costs.select(np.array([idx])), LEANEST), 0
    cut = _even_cuts(costs, idx, cap_bytes=np.inf)[0][0]
    return Candidate(idx, cut, estimate_step(costs, idx, cut), 0.0, _uniform_options(costs, idx))


def expand_fitting(costs: CostTable, idx: int, *, bound_s: float = 0.0, below_s: float = np.inf) -> Candidate | None:
    """`expand`, or return None where no split into stages is within memory.

    Args:
        bound_s: of the layout before it is cut; the result's bound is raised to what its stages can have at best.
        below_s: seconds of a step that matter: cuts whose bound is not below are not compared further.
    """
    if costs.device_pools and is_aligned(costs.select(np.array([idx])))[0]:
        return _expand_on_pools(costs, idx, bound_s)
    candidate = _expand_as_listed(costs, idx, bound_s=bound_s, below_s=below_s)
    if candidate is not None and costs.device_pools and has_unlike_replicas(costs)[idx]:
        return _with_unlike_shares(costs, replace(candidate, bound_s=bound_s))
    if candidate is None or costs.cluster.bandwidth_matrix is None:
        return candidate
    return _with_rank_map(costs, replace(candidate, bound_s=bound_s))


def _expand_on_pools(costs: CostTable, idx: int, bound_s: float) -> Candidate | None:
    placed = expand_on_pools(costs, idx, lambda pool, row, cap: _stage_fits(pool, row, cap_bytes=cap))
    if placed is None:
        return None
    if costs.cluster.bandwidth_matrix is None:
        bound_s = max(bound_s, placed.bound_s)
    nodes, options = nodes_in_order(costs, placed.pool_of_stage), _uniform_options(costs, idx)
    return Candidate(idx, placed.boundaries, placed.estimate, bound_s, options, nodes, placed.pool_of_stage)


def _with_unlike_shares(costs: CostTable, candidate: Candidate) -> Candidate:
    """Return the candidate with as many micro-batches on each device pool as it is fast, where that is faster than even ones."""
    idx = candidate.idx
    taken, ends = micro_batches(costs, idx), np.cumsum(replicas_of_pools(costs)[:, idx])
    counts = [max(of_pool) for of_pool in np.split(np.array(taken), ends[:-1])]
    estimate = estimate_on_replicas(costs, idx, candidate.boundaries, counts)
    if estimate.step_time_s >= candidate.step_time_s:
        return candidate
    shares = tuple(int(costs.layouts.micro_batch_size[idx]) * count for count in taken)
    nodes = tuple(node for part in costs.cluster.parts for node in part.nodes)
    return replace(candidate, estimate=estimate, shares=shares, nodes=nodes)


def with_best_map(costs: CostTable, candidate: Candidate) -> Candidate:
    """Return a chosen candidate with an order of nodes that was searched for longer, where that is faster."""
    is_special = candidate.part_of_stage or candidate.shares or candidate.half_blocks or candidate.gradients
    if costs.cluster.bandwidth_matrix is None or is_special:
        return candidate
    only = costs.select(np.array([candidate.idx])).compacted()
    listed = _expand_as_listed(only, 0)
    if listed is None:
        return candidate
    moved = _with_rank_map(only, listed, annealing_steps=rank_mapping.ANNEALING_STEPS)
    if moved.step_time_s >= candidate.step_time_s:
        return candidate
    return replace(moved, idx=candidate.idx, bound_s=min(candidate.bound_s, moved.step_time_s))


def _with_rank_map(costs: CostTable, candidate: Candidate, *, annealing_steps: int = STEPS_IN_SEARCH) -> Candidate:
    uniform, idx = costs.by_option[0] if costs.layouts.is_mixed else costs, candidate.idx
    # An order made for one map says nothing of another: a named one weighs the axes.
    if costs.layouts.schedule[idx] == SYNTHESISED:
        uniform, idx = with_schedule(costs.select(np.array([idx])), LEANEST), 0
    nodes = node_order(uniform, idx, candidate.boundaries, annealing_steps=annealing_steps)
    if not nodes:
        return candidate
    row = costs.layouts.select(np.array([candidate.idx]))
    moved = _expand_as_listed(costs.evaluate(row, in_order(costs.cluster, nodes)), 0)
    if moved is None or moved.step_time_s >= candidate.step_time_s:
        return candidate
    return replace(moved, idx=candidate.idx, bound_s=candidate.bound_s, nodes=nodes)


def _expand_as_listed(costs: CostTable, idx: int, *, bound_s: float = 0.0, below_s: float = np.inf) -> Candidate | None:
    if costs.layouts.schedule[idx] == SYNTHESISED:
        return _expand_with_order(costs, idx, bound_s, below_s)
    if costs.layouts.recompute[idx] == MIXED:
        return _expand_with_choices(costs, idx, bound_s)
    cuts, cut_bound_s = _even_cuts(costs, idx, cap_bytes=costs.cluster.memory_budget_bytes)
    if not cuts:
        return None
    bound_s, options = max(bound_s, cut_bound_s), _uniform_options(costs, idx)
    candidates = [Candidate(idx, cut, estimate_step(costs, idx, cut), bound_s, options) for cut in cuts]
    return _with_replayed_cut(costs, min(candidates, key=lambda c: c.step_time_s), below_s=below_s)


def _expand_with_order(costs: CostTable, idx: int, bound_s: float, below_s: float) -> Candidate | None:
    """Cut stages as under the named schedules, and make an order of passes for them; little is tried that takes ``below_s``.

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
    cuts = dict.fromkeys(cut for under in named for cut in _even_cuts(under, 0, cap_bytes=budget)[0])
    replayed = (_expand_as_listed(under, 0) for under in named)
    cuts |= dict.fromkeys(candidate.boundaries for candidate in itertools.islice(filter(None, replayed), 1))
    options = _uniform_options(costs, idx)
    ordered = [(cut, *made) for cut in cuts if (made := synthesise(costs, idx, cut, below_s=below_s)) is not None]
    candidates = [Candidate(idx, cut, estimate, bound_s, options, order=order) for cut, order, estimate in ordered]
    return min(candidates, key=lambda c: c.step_time_s, default=None)


def _uniform_options(costs: CostTable, idx: int) -> tuple[int, ...]:
    return (int(costs.layouts.recompute[idx]),) * len(costs.kind_of_layer)


def _expand_with_choices(costs: CostTable, idx: int, bound_s: float) -> Candidate | None:
    answers = choose_stages(Layers(RecomputeCosts(costs), idx, costs.cluster.memory_budget_bytes))
    candidates = [_candidate_with_choices(costs, idx, stages, max(bound_s, stages.bound_s)) for stages in answers]
    best = min(candidates, key=lambda c: c.step_time_s, default=None)
    if best is None:
        return None
    if len(set(best.options)) == 1:
        replayed = _with_replayed_cut(costs.by_option[best.options[0]], best)
        best = replace(replayed, bound_s=best.bound_s)
    replay_s = replayed_bound(costs, idx, below_s=best.step_time_s).bound_s
    return replace(best, bound_s=min(max(best.bound_s, replay_s), best.step_time_s))


def _candidate_with_choices(costs: CostTable, idx: int, stages: Stages, bound_s: float) -> Candidate:
    """Cost a mixed layout with its stages; ``options`` are equal where all blocks do the same."""
    choices = RecomputeCosts(costs)
    used = {stages.options[layer] for layer in np.flatnonzero(choices.has_choice[costs.kind_of_layer])}
    if len(used) > 1:
        options, estimate = stages.options, estimate_step(choices.assigned(idx, stages.options), 0, stages.boundaries)
    else:
        options = tuple(used) * len(stages.options)
        estimate = estimate_step(costs.by_option[options[0]], idx, stages.boundaries)
    return Candidate(idx, stages.boundaries, estimate, min(bound_s, estimate.step_time_s), options)


def _even_cuts(costs: CostTable, idx: int, *, cap_bytes: float) -> tuple[list[Cut], float]:
    """Return the even cut and the one that counts what a stage adds once, none where no split is within ``cap_bytes``.

    Also seconds that no split within them can beat; with model chunks zero: nothing is known but the bound of the layout.
    """
    busy = costs.per_layer("busy_s", idx)
    both = (busy, busy + costs.once_per_layer_s(idx) / int(costs.layouts.num_microbatches[idx]))
    if costs.layouts.num_model_chunks[idx] > 1:
        required, ranks = splits.memoized(_required_bytes(costs, idx)), pipeline_shape(costs, idx).rank_of_stage
        instances = (splits.ChunkSplitInstance(weights, costs.is_block, ranks, required, cap_bytes) for weights in both)
        cuts = [splits.solve_chunks(instance).choice for instance in instances]
        return [cut for cut in dict.fromkeys(cuts) if cut], 0.0
    fits = _stage_fits(costs, idx, cap_bytes=cap_bytes)
    solved = [splits.solve_stages(splits.StageSplitInstance(weights, fits)) for weights in both]
    if solved[0].status is Status.INFEASIBLE:
        return [], float("inf")
    return [cut.choice for cut in solved if cut.choice], _split_bound_s(costs, idx, solved[0].objective, fits)


def _split_bound_s(costs: CostTable, idx: int, slowest_s: float, fits: Fits) -> float:
    """Return what no split is below: each maximum over the stages is at least the lowest that any split has of it."""
    one = costs.select(np.array([idx]))
    pipeline_s = float(lower_bound_s(pipeline_work(one, np.array([slowest_s]), 2 * one.transfer_s))[0])
    exposed = np.array([seconds[idx] for seconds in costs.dp_exposed_by_kind])[costs.kind_of_layer]
    update = costs.once_per_layer_s(idx) - exposed
    slowest = (splits.fastest_split(splits.StageSplitInstance(once, fits))[0] for once in (exposed, update))
    return pipeline_s + float(costs.dp_edges_s[idx]) + sum(slowest)


def _required_bytes(costs: CostTable, idx: int) -> splits.Required:

    def required_bytes(boundaries: IntArray) -> FloatArray:
        contents = contents_between(costs, idx, boundaries[:, :-1], boundaries[:, 1:])
        _, terms = rank_memory_terms(costs, idx, contents)
        return np.asarray(memory.required_by_terms(terms, costs.scenario))

    return required_bytes


def _stage_fits(costs: CostTable, idx: int, *, cap_bytes: float) -> Fits:
    """Return FITS [S, L+1, L+1]: the stage has a block, and what it requires is within ``cap_bytes``."""
    pp, size = int(costs.layouts.pp[idx]), len(costs.kind_of_layer) + 1
    blocks = np.concatenate([[0], np.cumsum(costs.is_block)])
    has_block = blocks[None, :] > blocks[:, None]
    if np.isinf(cap_bytes):
        return np.broadcast_to(has_block, (pp, size, size))

    def fits(first: IntArray, last: IntArray) -> NDArray[np.bool_]:
        contents = contents_between(costs, idx, first, last)
        terms = stage_memory_terms(costs, idx, contents, np.arange(pp)[:, None])
        return np.asarray(memory.required_by_terms(terms, costs.scenario) <= cap_bytes)

    return np.asarray(has_block & (np.arange(size) <= last_layers_that_fit((pp,), size, fits)[..., None]))


def _with_replayed_cut(costs: CostTable, candidate: Candidate, *, below_s: float = np.inf) -> Candidate:
    """Return the candidate, or the cut that a replay promises most of where that is faster; bounded by what no cut beats.

    Cuts of chunks are compared by replays where the bound is ``below_s``.
    """
    idx, cap_bytes = candidate.idx, costs.cluster.memory_budget_bytes
    if int(costs.layouts.pp[idx]) == 1:
        return candidate
    in_chunks = costs.layouts.num_model_chunks[idx] > 1
    fits = _rank_fits(costs, idx, cap_bytes=cap_bytes) if in_chunks else _stage_fits(costs, idx, cap_bytes=cap_bytes)
    replayed = replayed_bound(costs, idx, below_s=candidate.step_time_s, fits=fits)
    raised_s = max(candidate.bound_s, min(replayed.bound_s, candidate.step_time_s))
    candidate = replace(candidate, bound_s=raised_s, any_order_s=candidate.bound_s)
    required, ranks = _required_bytes(costs, idx), pipeline_shape(costs, idx).rank_of_stage
    instance = splits.ChunkSplitInstance(costs.per_layer("busy_s", idx), costs.is_block, ranks, required, cap_bytes)
    cuts = [splits.boundaries_from_blocks(instance, np.array([replayed.sizes]))] if replayed.sizes else []
    if in_chunks and raised_s < min(below_s, candidate.step_time_s * (1 - MIN_OPEN)):
        best, bound_s = _best_chunks(costs, candidate, [*cuts, np.array([candidate.boundaries])], fits, below_s=below_s)
        candidate = replace(candidate, bound_s=min(max(raised_s, bound_s), candidate.step_time_s))
        cuts = [best] if best is not None else []
    elif in_chunks and cuts and np.any(required(cuts[0]) > cap_bytes):
        return candidate
    for boundaries in cuts:
        ends = tuple(int(end) for end in boundaries[0])
        estimate = estimate_step(costs, idx, ends)
        if estimate.step_time_s < candidate.step_time_s:
            return replace(candidate, boundaries=ends, estimate=estimate)
    return candidate


def _best_chunks(
    costs: CostTable, candidate: Candidate, known: Sequence[IntArray], fits: Fits | None, *, below_s: float
) -> tuple[IntArray | None, float]:
    """Return the boundaries [1, S+1] of the best cut of chunks found from known ones, and seconds that none is below."""
    idx, cap_bytes = candidate.idx, costs.cluster.memory_budget_bytes
    instance, required = _split_bound_instance(costs, idx, fits), _required_bytes(costs, idx)
    if instance is None:
        return None, 0.0
    edges_s, blocks = float(costs.dp_edges_s[idx]), np.flatnonzero(costs.is_block)
    before = np.concatenate([[0], np.cumsum(costs.is_block)])

    def boundaries(sizes: IntArray) -> IntArray:
        ends = blocks[np.cumsum(sizes, axis=1) - 1] + 1
        ends[:, -1] = len(costs.is_block)
        return np.concatenate([np.zeros((len(sizes), 1), dtype=np.int64), ends], axis=1)

    def within_memory(sizes: IntArray) -> Fits:
        return np.asarray(np.all(required(boundaries(sizes)) <= cap_bytes, axis=1))

    starts = [np.diff(before[cut[0]]) for cut in known]
    best = chunk_cuts.best_cut(instance, starts, within_memory, below_s=below_s - edges_s)
    if best is None:
        return None, 0.0
    return boundaries(best.sizes[None, :]), best.bound_s + edges_s * (best.bound_s > 0)


def replayed_bound(costs: CostTable, idx: int, *, below_s: float, fits: Fits | None = None) -> split_bound.SplitBound:
    """Return what no split of layout ``idx`` is faster than; ``below_s`` where none is below that, zero where nothing is replayed.

    Of a mixed layout each block counts under the option that is lowest in everything.

    Args:
        below_s: seconds of a step of interest.
        fits: what memory allows: with one stage a rank whether it may hold layers i..j-1 [S, L+1, L+1], else `_rank_fits`.
    """
    instance = _split_bound_instance(costs, idx, fits)
    if instance is None:
        return split_bound.SplitBound(0.0, ())
    edges_s = float(costs.dp_edges_s[idx])
    bound = split_bound.lower_bound_s(instance, below_s=below_s - edges_s)
    return replace(bound, bound_s=bound.bound_s + edges_s)


def _split_bound_instance(costs: CostTable, idx: int, fits: Fits | None) -> split_bound.SplitBoundInstance | None:
    table, one = costs.layouts, costs.select(np.array([idx]))
    if table.pp[idx] == 1 or table.vocabulary[idx] or (costs.device_pools and is_aligned(one)[0]):
        return None
    shape = pipeline_shape(costs, idx)
    try:
        paths_past(shape)
    except ConfigError:  # the step has a closed form, whose bound is as good
        return None
    choices = RecomputeCosts(costs) if table.recompute[idx] == MIXED else None
    exposed_by_kind = costs.dp_exposed_by_kind if choices is None else choices.min_exposed_by_kind
    seconds, once = _seconds(costs, idx), _once_s(costs, idx, exposed_by_kind)
    by_option = [
        (_seconds(option, idx), _once_s(option, idx, option.dp_exposed_by_kind))
        for option in (choices.by_option if choices else ())
    ]
    blocks = np.flatnonzero(costs.is_block)
    fixed, once_fixed = np.zeros((3, shape.num_stages)), np.zeros((len(once), shape.num_stages))
    fixed[:2] = costs.transfer_s[idx] / shape.num_model_chunks
    for stage, kinds in ((0, costs.kind_of_layer[: blocks[0]]), (-1, costs.kind_of_layer[blocks[-1] + 1 :])):
        fixed[:, stage] += seconds[:, kinds].sum(axis=1)
        once_fixed[:, stage] += once[:, kinds].sum(axis=1)
    kinds = costs.kind_of_layer[blocks]
    fullest = [float(fullest_stage(one, [np.array([value]) for value in values])[0]) for values in once]
    return split_bound.SplitBoundInstance(
        shape,
        seconds[:, kinds],
        np.unique(kinds, return_inverse=True)[1],
        fixed,
        once[:, kinds],
        once_fixed,
        np.array(fullest),
        _fits_of_blocks(fits, costs.is_block),
        tuple((of_kind[:, kinds], once_of_kind[:, kinds]) for of_kind, once_of_kind in by_option),
    )


def _seconds(costs: CostTable, idx: int) -> FloatArray:
    """Return forward, input and weight pass of a layer of each kind [3, K]."""
    by_kind = [cost.take(costs.case_idx[[idx]]) for cost in costs.by_case]  # one case: sums over all cases take long
    total = np.concatenate([cost.busy_s for cost in by_kind])
    forward = np.concatenate([cost.forward_s + cost.comm_forward_s for cost in by_kind])
    weight = np.concatenate([cost.weight_s for cost in by_kind])
    return np.stack([forward, total - forward - weight, weight])


def _once_s(costs: CostTable, idx: int, exposed_by_kind: Sequence[FloatArray]) -> FloatArray:
    """Return what a layer of each kind adds to its rank once, exposed communication and its update [2, K]."""
    case_idx = costs.case_idx[idx]
    trained, experts = np.array([(c.num_trained[case_idx], c.expert_params[case_idx]) for c in costs.by_case]).T
    return np.stack([[seconds[idx] for seconds in exposed_by_kind], costs.update_s(trained, experts, idx)])


def _fits_of_blocks(fits: Fits | None, is_block: NDArray[np.bool_]) -> Fits | None:
    """Return whether a stage may hold blocks i..j-1, with what is before the first block and behind the last one."""
    if fits is None or fits.shape[-1] != len(is_block) + 1:
        return fits
    blocks = np.flatnonzero(is_block)
    first, last = np.append(blocks, len(is_block)), np.append(0, blocks + 1)
    first[0], last[-1] = 0, len(is_block)
    return np.asarray(fits[:, first][:, :, last])


def _rank_fits(costs: CostTable, idx: int, *, cap_bytes: float) -> Fits | None:
    """Return with several chunks a rank, whether it may hold j - i blocks [R, N+1, N+1]; None where blocks differ.

    Chunks count as having the blocks that all of them have.
    """
    kinds = set(costs.kind_of_layer[costs.is_block].tolist())
    if len(kinds) > 1 or not np.isfinite(cap_bytes):
        return None
    shape, blocks = pipeline_shape(costs, idx), np.flatnonzero(costs.is_block)
    even = np.arange(1, len(blocks) // shape.num_model_chunks + 1)[:, None]  # blocks of each chunk [E, 1]
    stages = np.arange(shape.num_stages)
    first = np.where(stages == 0, 0, blocks[0]) + 0 * even
    last = blocks[0] + even + 0 * stages
    first[:, -1], last[:, -1] = blocks[-1] + 1 - even[:, 0], len(costs.is_block)
    _, terms = rank_memory_terms(costs, idx, contents_between(costs, idx, first, last))
    required = memory.required_by_terms(terms, costs.scenario)
    max_blocks = (np.asarray(required <= cap_bytes).sum(axis=0) + 1) * shape.num_model_chunks - 1  # [R]
    size = np.arange(len(blocks) + 1) - np.arange(len(blocks) + 1)[:, None]
    return np.asarray((size >= 0) & (size <= max_blocks[:, None, None]))
