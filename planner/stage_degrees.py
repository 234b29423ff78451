"""Stages with a tensor-parallel degree each: layouts whose data-parallel ranks join, on some stages, to share layers.

Every stage has the same ranks and passes. At tp ranks a layer a stage has dp = ranks / tp groups, and micro-batches in proportion
to tp, so that each degree is a layout of its own for one stage: its seconds and bytes are those of the table of that layout, and
`solvers.stages.stage_degrees` chooses among them with the cut. Of mixed layouts each stage fills its memory as its degree lets it.
Between stages of different degrees hidden states are dealt out anew, an all-to-all over the larger one (runtime/reshard.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..cost_models.stage.contents import RecomputeCosts
from ..cost_models.stage.step import estimate_step, resharding_s
from ..cost_models.stage.table import CostTable
from ..schema import ClusterSpec, Layout, ModelSpec, Workload
from ..schema.layout_rules import broken_rules, problem_on
from ..schema.layout_table import RECOMPUTES, LayoutTable
from ..schema.stage_degrees import layout_with_tp, why_not_by_stage
from ..schema.units import IntArray
from ..solvers.stages.stage_degrees import StageDegreesInstance, solve
from ..solvers.stages.stage_program import OptionFronts, StageFilling, dense_table, filling_of_span
from .expand import Candidate
from .request import PlanRequest
from .search import SearchResult
from .stage_choice import Layers, free_program, options_of_layers

MAX_TRIES, MIN_GAIN = 2, 0.005
"""Of the fastest layouts, those whose stages get degrees of their own, and the share of a step that this has to save."""

SCHEDULES = ("1f1b", "gpipe")
"""Those under which blocks recompute by themselves."""


def add_stage_degrees(request: PlanRequest, result: SearchResult) -> None:
    """Add layouts whose stages differ in tp where that makes one of the fastest layouts faster.

    The result's bound is about one degree for all: a plan that is faster than that takes the bound along.
    """
    facts, fixed = request.workload.engine_facts, request.fixed.keys()
    if not facts.has_stage_degrees or fixed & {"tp", "recompute", "micro_batch_size", "dp_shard", "dp_replicate"}:
        return
    table, tried = result.costs.layouts, 0
    for candidate in tuple(result.feasible[:MAX_TRIES]):
        layout, best_s = candidate.layout(table), result.feasible[0].step_time_s
        is_placed = candidate.nodes or candidate.part_of_stage or candidate.shares or candidate.order
        if request.deadline.is_over or tried == MAX_TRIES or is_placed or not _may_differ(request, layout):
            continue
        tried += 1
        made = expand_degrees(request, layout)
        if made is not None and made.step_time_s < best_s * (1 - MIN_GAIN):
            result.feasible.append(replace(made, idx=candidate.idx))
    result.feasible.sort(key=lambda c: (c.step_time_s, c.idx))
    result.bound_s = min([result.bound_s, *(c.step_time_s for c in result.feasible[:1])])


def _may_differ(request: PlanRequest, layout: Layout) -> bool:
    """Return whether stages of a layout may have degrees of their own."""
    batch, model = request.workload.global_batch_size, request.model
    runs = (
        layout.pp > 1 and layout.schedule in SCHEDULES and layout.vocabulary == "ends" and not request.cluster.is_mixed
    )
    return runs and not why_not_by_stage(
        layout, [layout.tp] * layout.pp, global_batch_size=batch, is_tied=model.tie_embeddings
    )


def layouts_by_degree(request: PlanRequest, layout: Layout) -> list[Layout]:
    """Return a layout at every tp that one of its stages may have, by growing tp."""
    problem = problem_on(request.model, request.workload, request.cluster)
    ranks, made = int(layout.stage_ranks), list[Layout]()
    for tp in (2**power for power in range(ranks.bit_length())):
        if ranks % tp == 0 and layout.micro_batch_size * tp % layout.tp == 0:
            variant = layout_with_tp(layout, tp).replace(recompute="mixed")
            made += [] if broken_rules(variant, problem) else [variant]
    return made


def expand_degrees(request: PlanRequest, layout: Layout) -> Candidate | None:
    """Return a layout cut into stages of different degrees; None where the best has one for all, or none fits."""
    layouts = layouts_by_degree(request, layout)
    if request.model.tie_embeddings or len(layouts) < 2:  # the ends would have to be alike
        return None
    tables = [_table(request.model, request.workload, request.cluster, variant) for variant in layouts]
    layers = [Layers(RecomputeCosts(table), 0, request.cluster.memory_budget_bytes) for table in tables]
    programs = [free_program(of_degree) for of_degree in layers]
    instances = [program.instance for program in programs]
    degrees = np.array([variant.tp for variant in layouts])
    rounds = float(layouts[0].num_microbatches(request.workload.global_batch_size) - 1)
    spans = np.stack([dense_table(instance, instance.min_s) for instance in instances])
    solution = solve(StageDegreesInstance(spans, 2 * resharding_s(tables[0], 0, degrees), rounds))
    if solution.choice is None or len(set(solution.choice.degrees)) == 1:
        return None
    boundaries, chosen = solution.choice
    counts = [
        filling_of_span(instances[d], OptionFronts(instances[d], 0.0), s, boundaries[s], boundaries[s + 1])
        for s, d in enumerate(chosen)
    ]
    filling = StageFilling(boundaries, np.stack(counts))
    options = options_of_layers(layers[0], programs[0], filling)
    of_stages = [layouts[d] for d in chosen]
    base = min(of_stages, key=lambda variant: variant.tp)
    used = {options[layer] for layer in np.flatnonzero(layers[0].has_choice)}
    if len(used) == 1:
        options = tuple(used) * len(options)
        of_stages = [variant.replace(recompute=RECOMPUTES[options[0]]) for variant in of_stages]
        base = base.replace(recompute=RECOMPUTES[options[0]])
    costs, pool_of_stage = costs_by_stage(request.model, request.workload, request.cluster, of_stages, options)
    estimate = estimate_step(costs, 0, boundaries, pool_of_stage)
    if not estimate.fits:
        return None
    tps = tuple(variant.tp for variant in of_stages)
    return Candidate(0, boundaries, estimate, 0.0, options, given=base, tps=tps)


def costs_by_stage(
    model: ModelSpec, workload: Workload, cluster: ClusterSpec, layouts: Sequence[Layout], options: Sequence[int]
) -> tuple[CostTable, IntArray]:
    """Return the costs of stages that have a layout each, as of device pools, and the pool of each stage."""
    distinct = sorted(set(layouts), key=lambda layout: layout.tp)
    tables = [_table(model, workload, cluster, layout) for layout in distinct]
    if distinct[0].recompute == "mixed":
        tables = [RecomputeCosts(table).assigned(0, options) for table in tables]
    return replace(tables[0], device_pools=tuple(tables)), np.array([distinct.index(layout) for layout in layouts])


def _table(model: ModelSpec, workload: Workload, cluster: ClusterSpec, layout: Layout) -> CostTable:
    return CostTable.from_layouts(
        model, workload, cluster, LayoutTable.from_layouts([layout], workload.global_batch_size)
    )
