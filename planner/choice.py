"""Which layout is taken: the fastest by prediction, unless a plainer one may well be as fast.

    near ties   layouts that the fastest is not faster than with PROBABILITY, by the error of the ratio of two layouts' times
                (cost_models/stage/interval.py), which is smaller than that of either and grows with what differs between them
    taken       of these those with the fewest axes; of those the ones that leave HEADROOM of the device's memory free, if any do;
                of those the fastest, of layouts that are ALIKE in time the simplest (`complexity`)

A search expands what may be the fastest. Plainer layouts whose bounds are within the near ties are expanded afterwards, the
simplest first, until one is a near tie.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..cost_models.stage.bounds import ROUGH_ERROR, budget_bytes, estimates_s, memory_bounds, time_bounds
from ..cost_models.stage.capacity import stages_may_fit
from ..cost_models.stage.contents import RecomputeCosts
from ..cost_models.stage.interval import margin, probability_above, ratio_coefficients, ratio_sd
from ..cost_models.stage.table import CostTable
from ..schema import Layout
from ..schema.layout_table import LayoutTable
from ..schema.units import BoolArray, FloatArray, IntArray
from .expand import Candidate, bound_of_stages_s, expand_fitting, expand_with_fp32_gradients
from .request import PlanRequest
from .search import REL_GAP, SearchResult
from .stage_choice import SYNTHESISED, Layers, free_program

NUM_COARSE, AXES_AND_PASSES = 3, 2
"""Columns of `complexity` that weigh more than headroom, and than the dtype of gradients."""

MAX_PRICE = 0.05
"""What a plainer layout may take longer by prediction, whatever the error of the ratio: what many would not give up. The mean
regret over all measured groups is the same with 0.03 and 0.1 (fitting ratios)."""

ALIKE = 0.001
"""Steps that differ by less take the same time by prediction. Simplicity within the same axes is worth no more: with near ties in
its place the mean regret over all measured groups was 3.1 % and not 2.8 (fitting ratios)."""

MAX_CUT, MAX_CUT_TRIES, MAX_CUT_GAIN = 4, 12, 0.1
"""Layouts that are cut inside blocks after a search, those that are tried for that, and how far above the best the bound between
blocks may be."""

MAX_TRIES, MAX_BOUNDED, MAX_GROWTHS = 32, 1 << 12, 2
"""Plainer layouts that are cut into stages, those whose bounds are worked out before, and how often the search's pool grows."""


def complexity(table: LayoutTable) -> IntArray:
    """Return what orders layouts by simplicity [N, ...], first column first: fewer axes beside data parallelism, which is the plain
    way to use more devices (replicas of shards are one more), backward passes in one, gradients in fp32, no recompute, smaller
    degrees of the axes that cost the most care, a lower ZeRO stage, fewer switches, less memory where only sequence parallelism is
    left out.
    """
    degrees = (table.tp, table.pp, table.cp, table.ep, table.etp, table.num_model_chunks)
    levels = (np.minimum(table.dp_replicate, table.dp_shard), table.gradient_shard, table.optimizer_shard)
    axes = np.sum([degree > 1 for degree in (*degrees, *levels)], axis=0)
    axes = axes + ((table.cp_ulysses > 1) & (table.cp_ulysses < table.cp))
    columns = (
        axes,
        np.asarray(table.schedule_fact("splits_backward")),
        np.asarray(table.reduces_in_compute_dtype),
        table.recompute,
        table.pp,
        table.tp,
        table.cp,
        table.ep,
        table.etp,
        table.num_model_chunks,
        table.zero_stage,
        np.sum([table.tp_overlap, table.tp_halves, table.cuda_graphs, table.ep_overlap, table.half_blocks], axis=0),
        (table.tp > 1) & (np.asarray(table.sequence_parallel) == 0),
        table.micro_batch_size,
    )
    return np.stack([np.asarray(column, dtype=np.int64) for column in columns], axis=1)


def near_ties(
    table: LayoutTable, seconds: FloatArray, probability: float, sd: Mapping[str, float] | None = None
) -> BoolArray:
    """Return which layouts may be as fast as the one with the fewest seconds: it is not faster with this probability."""
    fastest = int(np.argmin(seconds))
    log_ratio = np.log(seconds / seconds[fastest])
    return np.asarray(log_ratio <= _margin(ratio_sd(table, fastest, sd), probability))


def plainest(
    table: LayoutTable,
    seconds: FloatArray,
    lacks_headroom: BoolArray,
    *,
    probability: float,
    sd: Mapping[str, float] | None = None,
) -> int:
    """Return the index of the layout that is taken.

    Of the near ties those that are the same in the first columns of `complexity` and in headroom count, and of these the fastest.
    """
    near = np.flatnonzero(near_ties(table, seconds, probability, sd))
    ranks = complexity(table.select(near))
    coarse = np.column_stack([ranks[:, :NUM_COARSE], lacks_headroom[near]])
    alike = np.flatnonzero((coarse == coarse[np.lexsort(coarse.T[::-1])[0]]).all(axis=1))
    rows, ranks = near[alike], ranks[alike]
    closer = np.flatnonzero(seconds[rows] <= seconds[rows].min() * (1 + ALIKE))
    return int(rows[closer[np.lexsort((seconds[rows[closer]], *ranks[closer].T[::-1]))[0]]])


@dataclass(frozen=True)
class Choice:
    """The layout that is taken and the fastest one by prediction, with how probably that is the faster one."""

    chosen: Candidate
    fastest: Candidate
    probability: float

    @property
    def slower_fraction(self) -> float:
        """Share by which the chosen step is longer by prediction."""
        return self.chosen.step_time_s / self.fastest.step_time_s - 1


def choose(request: PlanRequest, result: SearchResult, *, slowest_s: float = math.inf) -> Choice:
    """Return what is taken of the layouts that a search found and of plainer ones that it left out, within ``slowest_s``."""
    if request.prefer == "plain":
        add_plainer(request, result, slowest_s=slowest_s)
    fastest = result.feasible[0]
    if request.prefer == "fastest":
        return Choice(fastest, fastest, 1.0)
    candidates = [c for c in result.feasible if c.step_time_s <= max(slowest_s, fastest.step_time_s)]
    if "gradients" not in request.fixed:
        candidates += in_fp32(request, result, candidates)
    table = table_of(request, [c.layout(result.costs.layouts) for c in candidates])
    seconds = np.array([c.step_time_s for c in candidates])
    lacks = np.array([lacks_headroom(request, c) for c in candidates])
    idx = plainest(table, seconds, lacks, probability=_probability())
    log_ratio, sd = math.log(seconds[idx] / seconds[0]), float(ratio_sd(table, 0)[idx])
    return Choice(candidates[idx], fastest, 1.0 if idx == 0 else probability_above(log_ratio, sd))


def in_fp32(request: PlanRequest, result: SearchResult, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return near ties with 16-bit gradients once more with fp32 ones, where they fit: of both dtypes the search costs one.

    Those with the fewest axes: one of them is taken.
    """
    near = [c for c in candidates if _is_near(request, result, c)]
    ranks = [_rank(request, c.layout(result.costs.layouts), lacks=False)[:AXES_AND_PASSES] for c in near]
    plainest = [c for c, rank in zip(near, ranks, strict=True) if rank == min(ranks)]
    reduced = [c for c in plainest if c.layout(result.costs.layouts).gradients == "compute"]
    made = [expand_with_fp32_gradients(result.costs, c.idx) for c in reduced]
    return [candidate for candidate in made if candidate is not None]


def table_of(request: PlanRequest, layouts: Sequence[Layout]) -> LayoutTable:
    """Return layouts that answer a request as a table."""
    return LayoutTable.from_layouts(layouts, request.workload.global_batch_size)


def is_near_tie(request: PlanRequest, layout: Layout, seconds: float, faster: Layout, faster_s: float) -> bool:
    """Return whether a layout may be as fast as one that is faster by prediction."""
    if "scheduled" in (layout.offload, faster.offload):
        return False
    return bool(near_ties(table_of(request, [layout, faster]), np.array([seconds, faster_s]), _probability())[0])


def _probability() -> float:
    return float(ratio_coefficients()["preferred_probability"])


def lacks_headroom(request: PlanRequest, candidate: Candidate) -> bool:
    """Return whether a candidate leaves less of a device's memory free than is preferred."""
    cluster, estimate = request.cluster, candidate.estimate
    preferred_bytes = float(ratio_coefficients()["preferred_headroom"]) * cluster.weakest_device.memory_bytes
    return estimate.required_bytes > estimate.budget_bytes - preferred_bytes


def add_plainer(request: PlanRequest, result: SearchResult, *, slowest_s: float) -> None:
    """Expand layouts that are simpler than the near ties that were found and by their bounds may be one, the simplest first.

    Recompute that differs from block to block fills the memory that there is: it is chosen again for less of it.
    """
    if result.stopped_early:
        return
    fastest, layouts = result.feasible[0], result.costs.layouts
    near = [candidate for candidate in result.feasible if _is_near(request, result, candidate)]
    full = [candidate for candidate in near if lacks_headroom(request, candidate)]
    added = [c for candidate in full for c in with_headroom(request, result, candidate.idx, fastest)]
    best = min(_rank(request, c.layout(layouts), lacks=lacks_headroom(request, c)) for c in (*near, *added))
    longer = dict[tuple[int, ...], float]()  # than estimated, of layouts of a kind at least
    for row, estimate_s, tie_s in _plainer_rows(request, result, fastest, slowest_s):
        layouts = result.costs.layouts
        if request.deadline.is_over or _rank(request, layouts.layout(row), lacks=False) > best:
            break
        kind = tuple(int(column[row]) for column in (layouts.schedule, layouts.num_model_chunks, layouts.recompute))
        if estimate_s * longer.get(kind, 1.0) > (1 + ROUGH_ERROR) * tie_s:
            continue
        if not _may_be_below(result.costs.select(np.array([row])).compacted(), tie_s):
            continue
        result.evaluated += 1
        for candidate in with_headroom(request, result, row, fastest):
            added.append(candidate)
            longer[kind] = min(candidate.step_time_s / estimate_s, longer.get(kind, math.inf))
            if _is_near(request, result, candidate):
                lacks = lacks_headroom(request, candidate)
                best = min(best, _rank(request, candidate.layout(result.costs.layouts), lacks=lacks))
    result.feasible = sorted([*result.feasible, *added], key=lambda c: (c.estimate.step_time_s, c.idx))


def add_half_blocks(request: PlanRequest, result: SearchResult, *, worse_than_s: float = math.inf) -> None:
    """Add layouts whose stages end inside blocks where that makes a layout the fastest.

    Tried are layouts with one stage a rank whose bound with half blocks is below the best. The result's bound is about cuts between
    blocks: a plan that is faster than that takes the bound along. With ``half_blocks`` fixed the search is one over halves.
    """
    best_s = result.feasible[0].step_time_s if result.feasible else worse_than_s
    can_cut = request.workload.engine_facts.cuts_blocks and request.model.in_halves is not None
    if result.stopped_early or math.isinf(best_s) or not can_cut:
        return
    waiting, _ = result.problem.rows_within(best_s * (1 + MAX_CUT_GAIN), max_growths=0)
    table, rows = result.costs.layouts, np.union1d(waiting, [c.idx for c in result.feasible]).astype(np.int64)
    one_stage = (
        (table.pp > 1) & (table.num_model_chunks == 1) & (table.vocabulary == 0) & np.logical_not(table.offloads)
    )
    rows = rows[one_stage[rows] & (table.schedule[rows] != SYNTHESISED)]
    if not len(rows):
        return
    layouts = table.select(rows).replace(half_blocks=np.ones(len(rows), dtype=np.int64))
    costs = CostTable.from_layouts(request.model, request.workload, request.cluster, layouts)
    bound_s, fits = time_bounds(costs), memory_bounds(costs) <= budget_bytes(costs)
    promising = np.flatnonzero(fits & (bound_s < best_s * (1 - REL_GAP)))
    estimate_s = estimates_s(costs.select(promising).compacted(), bound_s[promising])
    is_feasible = np.isin(rows[promising], [c.idx for c in result.feasible])
    promising = promising[is_feasible | (estimate_s < (1 + ROUGH_ERROR) * best_s)]
    num_fitting = 0
    for row in promising[np.argsort(bound_s[promising], kind="stable")][:MAX_CUT_TRIES]:
        if request.deadline.is_over or num_fitting == MAX_CUT or bound_s[row] >= best_s * (1 - REL_GAP):
            break
        only = costs.select(np.array([row])).compacted()
        if not _may_be_below(only, best_s):
            num_fitting += 1
            continue
        candidate = expand_fitting(only, 0, bound_s=float(bound_s[row]))
        num_fitting += candidate is not None
        if candidate is not None and candidate.step_time_s < best_s * (1 - REL_GAP):
            result.feasible.append(replace(candidate, idx=int(rows[row]), half_blocks=True))
            best_s = candidate.step_time_s
    result.feasible.sort(key=lambda c: (c.step_time_s, c.idx))
    result.bound_s = min([result.bound_s, *(c.step_time_s for c in result.feasible[:1])])


def _may_be_below(costs: CostTable, below_s: float) -> bool:
    """Return whether the one layout of a table may take less, by a replay, or within memory where blocks choose."""
    if not stages_may_fit(costs)[0]:
        return False
    is_open = bound_of_stages_s(costs, 0, below_s=below_s) < below_s
    if not is_open or not costs.layouts.is_mixed:
        return is_open
    layers = Layers(RecomputeCosts(costs), 0, costs.cluster.memory_budget_bytes, below_s=below_s)
    return bool(len(layers.spans[0])) and layers.lower_bound_s(free_program(layers)) < below_s


def with_headroom(request: PlanRequest, result: SearchResult, row: int, fastest: Candidate) -> Iterator[Candidate]:
    """Yield a layout cut into stages; where its blocks recompute what they must, within the preferred headroom if that goes."""
    costs, budget_bytes = result.costs.select(np.array([row])).compacted(), request.cluster.memory_budget_bytes
    candidate = None
    if costs.layouts.is_mixed:
        smaller = request.cluster.with_headroom(float(ratio_coefficients()["preferred_headroom"]))
        candidate = expand_fitting(costs.evaluate(costs.layouts, smaller), 0)
    candidate = candidate or (None if row == fastest.idx else expand_fitting(costs, 0, below_s=fastest.step_time_s))
    if candidate is not None:
        estimate = candidate.estimate.replace(budget_bytes=budget_bytes)
        yield replace(candidate, idx=row, estimate=estimate, any_order_s=candidate.bound_s)


def _rank(request: PlanRequest, layout: Layout, *, lacks: bool) -> tuple[int, ...]:
    return (*map(int, complexity(table_of(request, [layout]))[0][:NUM_COARSE]), int(lacks))


def _is_near(request: PlanRequest, result: SearchResult, candidate: Candidate) -> bool:
    fastest, layouts = result.feasible[0], result.costs.layouts
    return is_near_tie(
        request, candidate.layout(layouts), candidate.step_time_s, fastest.layout(layouts), fastest.step_time_s
    )


def _plainer_rows(
    request: PlanRequest, result: SearchResult, fastest: Candidate, slowest_s: float
) -> list[tuple[int, float, float]]:
    """Return rows that were not expanded and are estimated within their near ties, with estimate and tie: fewest axes, then lowest
    bounds first.
    """
    problem = result.problem
    rows, quick_s = problem.rows_within(fastest.step_time_s * (1 + MAX_PRICE), max_growths=MAX_GROWTHS)
    layouts = result.costs.layouts
    with_fastest = LayoutTable.concatenate([layouts.select(rows), table_of(request, [fastest.layout(layouts)])])
    sd = ratio_sd(with_fastest, len(rows))[:-1]
    tie_s = np.minimum(fastest.step_time_s * np.exp(_margin(sd, _probability())), slowest_s)
    ranks = complexity(with_fastest)[:-1]
    may_tie = np.flatnonzero(quick_s <= tie_s)
    order = may_tie[np.lexsort((quick_s[may_tie], *ranks[may_tie, :NUM_COARSE].T[::-1]))][:MAX_BOUNDED]
    bound_s = problem.frontier.bounds(rows[order])[1]
    order, bound_s = order[bound_s <= tie_s[order]], bound_s[bound_s <= tie_s[order]]
    estimate_s = estimates_s(problem.pool.bounding.select(rows[order]).compacted(), bound_s)
    may_tie = np.flatnonzero(estimate_s <= (1 + ROUGH_ERROR) * tie_s[order])[:MAX_TRIES]
    return [(int(rows[order[i]]), float(estimate_s[i]), float(tie_s[order[i]])) for i in may_tie]


def _margin(sd: FloatArray, probability: float) -> FloatArray:
    return np.minimum(margin(sd, probability), math.log(1 + MAX_PRICE))
