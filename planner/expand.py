"""Expanding a layout: its layers cut into stages exactly, its ranks mapped to nodes, costed.

cut       two even cuts, and where a replay promises more another one (cuts.py)
choices   of mixed layouts also what each block recomputes (stage_choice.py)
order     of the synthesised schedule an order of passes made for the cut that has the lowest bound (stage_choice.py)
map       on mixed clusters stages on device pools, with measured links nodes in an order (rank_map.py)
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..cost_models.pipeline.orders import Order
from ..cost_models.stage.contents import RecomputeCosts, pipeline_shape
from ..cost_models.stage.replicas import estimate_on_replicas, has_unlike_replicas, micro_batches, replicas_of_pools
from ..cost_models.stage.step import estimate_step
from ..cost_models.stage.table import CostTable, is_aligned
from ..schema import Layout, TrainingEstimate
from ..schema.errors import ConfigError
from ..schema.layout import Gradients
from ..schema.layout_table import MIXED, RECOMPUTES, LayoutTable
from ..schema.schedules import GIVEN, OVER_A_V
from ..solvers import rank_mapping
from ..solvers.stages import splits
from .cuts import Cut, best_chunks, even_cuts, rank_fits, replayed_bound, required_bytes, stage_fits
from .rank_map import STEPS_IN_SEARCH, expand_on_pools, in_order, node_order, nodes_in_order, placed_stages
from .request import PlanRequest
from .stage_choice import (
    LEANEST,
    SYNTHESISED,
    Layers,
    Stages,
    choose_stages,
    order_instance,
    synthesise,
    with_schedule,
)

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
    """`expand_fitting` one layout of a large space with the first order of passes that is made for it (`improve_order`).

    Args:
        costs: of the space.
        row: the layout.
        bound_s: under any order.
        below_s: seconds of a step that matter.
    """
    only = costs.select(np.array([row])).compacted()
    candidate = _expand_with_order(only, 0, bound_s, below_s, quick=True)
    return candidate and replace(candidate, idx=row, any_order_s=bound_s)


def improve_order(costs: CostTable, candidate: Candidate, *, below_s: float = np.inf) -> Candidate:
    """Return a candidate with an order of its own with the best order found for its stages; ``below_s``: a step that matters."""
    only = costs.select(np.array([candidate.idx])).compacted()
    made = synthesise(order_instance(only, 0, candidate.boundaries), below_s=below_s)
    if made is None or made[1].step_time_s >= candidate.step_time_s:
        return candidate
    return replace(candidate, order=made[0], estimate=made[1])


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
    cut = even_cuts(costs, idx, cap_bytes=np.inf)[0][0]
    return Candidate(idx, cut, estimate_step(costs, idx, cut), 0.0, _uniform_options(costs, idx))


def expand_fitting(costs: CostTable, idx: int, *, bound_s: float = 0.0, below_s: float = np.inf) -> Candidate | None:
    """`expand`, or return None where no split into stages is within memory.

    Args:
        bound_s: of the layout before it is cut; the result's bound is raised to what its stages can have at best.
        below_s: seconds of a step that matter: cuts whose bound is not below are not compared further.
    """
    if _is_on_pools(costs, idx):
        return _expand_on_pools(costs, idx, bound_s, below_s)
    candidate = _expand_as_listed(costs, idx, bound_s=bound_s, below_s=below_s)
    if candidate is not None and costs.device_pools and has_unlike_replicas(costs)[idx]:
        return _with_unlike_shares(costs, replace(candidate, bound_s=bound_s))
    if candidate is None or costs.cluster.bandwidth_matrix is None:
        return candidate
    return _with_rank_map(costs, replace(candidate, bound_s=bound_s))


def _pool_fits(pool: CostTable, row: int, cap_bytes: float) -> NDArray[np.bool_]:
    return stage_fits(pool, row, cap_bytes=cap_bytes)


def _is_on_pools(costs: CostTable, idx: int) -> bool:
    return bool(costs.device_pools) and bool(is_aligned(costs.select(np.array([idx])))[0])


def bound_of_stages_s(costs: CostTable, idx: int, *, below_s: float) -> float:
    """Return seconds that no split of layout ``idx`` is below: by a replay, or on device pools by the splits that fit.

    Zero where neither is looked at, infinite where no split fits on the pools.
    """
    if not _is_on_pools(costs, idx):
        return replayed_bound(costs, idx, below_s=below_s).bound_s
    return min((placed.bound_s for placed in placed_stages(costs, idx, _pool_fits)), default=np.inf)


def _expand_on_pools(costs: CostTable, idx: int, bound_s: float, below_s: float) -> Candidate | None:
    placed = expand_on_pools(costs, idx, _pool_fits, below_s=below_s)
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
    cuts, cut_bound_s = even_cuts(costs, idx, cap_bytes=costs.cluster.memory_budget_bytes)
    if not cuts:
        return None
    bound_s, options = max(bound_s, cut_bound_s), _uniform_options(costs, idx)
    candidates = [Candidate(idx, cut, estimate_step(costs, idx, cut), bound_s, options) for cut in cuts]
    return _with_replayed_cut(costs, min(candidates, key=lambda c: c.step_time_s), below_s=below_s)


def _expand_with_order(
    costs: CostTable, idx: int, bound_s: float, below_s: float, *, quick: bool = False
) -> Candidate | None:
    """Cut stages as under the named schedules, and make an order of passes for the cut whose first order is the shortest.

    Little is tried that takes ``below_s``.

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
    cuts = dict.fromkeys(cut for under in named for cut in even_cuts(under, 0, cap_bytes=budget)[0])
    replayed = (_expand_as_listed(under, 0) for under in named)
    cuts |= dict.fromkeys(candidate.boundaries for candidate in itertools.islice(filter(None, replayed), 1))
    best: Candidate | None = None
    for instance in sorted((order_instance(costs, idx, cut) for cut in cuts), key=lambda instance: instance.bound_s):
        shortest_s = np.inf if best is None else best.step_time_s
        made = synthesise(instance, below_s=min(below_s, shortest_s), quick=True)
        if made is not None and made[1].step_time_s < shortest_s:
            order, estimate = made
            best = Candidate(idx, instance.boundaries, estimate, bound_s, _uniform_options(costs, idx), order=order)
    return best if best is None or quick else improve_order(costs, best, below_s=below_s)


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


def _with_replayed_cut(costs: CostTable, candidate: Candidate, *, below_s: float = np.inf) -> Candidate:
    """Return the candidate, or the cut that a replay promises most of where that is faster; bounded by what no cut beats.

    Cuts of chunks are compared by replays where the bound is ``below_s``.
    """
    idx, cap_bytes = candidate.idx, costs.cluster.memory_budget_bytes
    if int(costs.layouts.pp[idx]) == 1:
        return candidate
    in_chunks = costs.layouts.num_model_chunks[idx] > 1
    fits = rank_fits(costs, idx, cap_bytes=cap_bytes) if in_chunks else stage_fits(costs, idx, cap_bytes=cap_bytes)
    replayed = replayed_bound(costs, idx, below_s=candidate.step_time_s, fits=fits)
    raised_s = max(candidate.bound_s, min(replayed.bound_s, candidate.step_time_s))
    candidate = replace(candidate, bound_s=raised_s, any_order_s=candidate.bound_s)
    required, ranks = required_bytes(costs, idx), pipeline_shape(costs, idx).rank_of_stage
    instance = splits.ChunkSplitInstance(costs.per_layer("busy_s", idx), costs.is_block, ranks, required, cap_bytes)
    cuts = [splits.boundaries_from_blocks(instance, np.array([replayed.sizes]))] if replayed.sizes else []
    if in_chunks and raised_s < min(below_s, candidate.step_time_s * (1 - MIN_OPEN)):
        best, bound_s = best_chunks(costs, idx, [*cuts, np.array([candidate.boundaries])], fits, below_s=below_s)
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
