"""The layout that is fastest over batches of unequal lengths: a Problem of the one search, over mean seconds of drawn batches.

Groups of ranks are made anew for every batch, so that a layout here is what groups leave open: tp, how parameters are sharded and
replicated, recompute, the axes of experts; cp and the micro-batch follow from each batch. Through a pipeline every batch is packed:
its stages are those of packs of one length, its schedule 1f1b unless another one is fixed, for which any number of packs will do.

    best    min over layouts of  mean over b of (SECONDS(b, layout) + STEP),   SECONDS of the batch problem (solvers/batch_groups)
    row     a layout with a bound that costs nothing: its step with the same tokens in packs of one length, documents attending to
            themselves only, every rank evenly full (`search_layouts`, which also says which layouts there are)
    again   its costs by length and degree are worked out, and the mean of the batches' own bounds
    leaf    every batch is scheduled

The batches are drawn once, the same for all layouts, so that layouts differ by what they are and not by luck.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..schema import Certificate, InfeasibleError, Layout, TrainingEstimate, TrainingPlan, Workload
from ..schema.batch import LengthCosts, Lengths
from ..schema.schedules import DEFAULT
from ..schema.stages import Stage
from ..schema.units import format_percent
from ..solvers.batch_groups import batch_bound_s, instance_under, schedule_batch
from ..solvers.branch_and_bound import Leaf, Node, Search, Step, Stop
from .batch import layout_estimate, length_costs
from .expand import Candidate, expand_layout
from .explain.infeasible import explain_infeasible
from .pack_costs import PackCosts
from .request import PlanRequest
from .search import SearchResult
from .tasks.training import build_alternative, plan_candidate, search_layouts, stages_of

NUM_BATCHES, SEED = 16, 0
"""Batches that are drawn: of 512 code files the mean over 16 is within 1 % of that over 256."""

_MIN_BATCHES, _DRAWN = 2, NUM_BATCHES * 512
"""As few of larger batches, as draw so many sequences: what a mean is off by falls with the number of sequences."""

_PACKED_TOKENS = 4096
"""Tokens of the packs by which layouts are bounded: few enough that recompute is not decided by them."""

_MAX_ROWS = 6
"""Layouts of other degrees that the search behind the bounds hands on, of each recompute."""

REL_GAP = 0.005


@dataclass(frozen=True)
class _Row:
    """A layout: the candidate that packs made it, and what is known since its first turn."""

    candidate: Candidate
    layout: Layout
    stages: tuple[Stage, ...]
    costs: LengthCosts | None = None


@dataclass(frozen=True)
class Mean:
    """A layout with its mean over the batches."""

    row: _Row
    seconds: float

    @property
    def costs(self) -> LengthCosts:
        """Return what sequences cost under it."""
        assert self.row.costs is not None
        return self.row.costs


class LayoutsOverBatches:
    """The problem; see the module."""

    def __init__(self, request: PlanRequest, rows: list[_Row], batches: list[tuple[int, ...]]) -> None:
        self.request, self.rows, self.batches = request, rows, batches
        self.refused: list[InfeasibleError] = []

    def roots(self) -> Step[_Row, Mean]:
        """Return a node for each layout."""
        return Step(nodes=[Node(row.candidate.step_time_s, row, idx) for idx, row in enumerate(self.rows)])

    def expand(self, node: Node[_Row], incumbent: float) -> Step[_Row, Mean]:
        """Work out a layout's costs, or schedule its batches."""
        row, request = node.state, self.request
        if row.costs is None:
            lengths = request.workload.lengths
            assert lengths is not None
            try:
                costs = length_costs(
                    request.model, request.cluster, request.workload, row.layout,
                    shortest=lengths.lengths[0], longest=request.workload.seq_len, stages=row.stages,
                )  # fmt: skip
                bounds = [batch_bound_s(instance_under(costs, batch)) for batch in self.batches]
            except InfeasibleError as error:
                self.refused.append(error)
                return Step(evaluated=1)
            # By its own costs, which may be below those of packs.
            row = dataclasses.replace(row, costs=costs)
            if math.isfinite(incumbent):
                return Step(nodes=[Node(costs.step_s + float(np.mean(bounds)), row, node.key)])
        assert row.costs is not None
        answers = []
        for batch in self.batches:
            if request.deadline.is_over:  # a batch may take seconds
                return Step(nodes=[node])
            answers.append(schedule_batch(instance_under(row.costs, batch)).seconds)
        seconds = row.costs.step_s + float(np.mean(answers))
        return Step(leaves=[Leaf(seconds, Mean(row, seconds), key=node.key)], evaluated=1)


def plan_lengths(request: PlanRequest, *, top: int) -> TrainingPlan:
    """Return the plan of the layout with the least mean seconds over drawn batches, with what sequences cost under it.

    Raises:
        InfeasibleError: no layout holds the longest sequence, or none fits at all.
    """
    workload, lengths = request.workload, request.workload.lengths
    assert lengths is not None
    packed = _packed(request, lengths)
    rows, results = list[_Row](), list[SearchResult]()
    for recompute in (packed.fixed["recompute"],) if "recompute" in packed.fixed else ("none", "selective", "full"):
        alike = dataclasses.replace(packed, fixed={**packed.fixed, "recompute": recompute})
        results.append(search_layouts(alike, runner_ups=_MAX_ROWS))
        rows += _rows(results[-1], workload)
    if not rows:
        raise explain_infeasible(packed, results[-1])
    problem = LayoutsOverBatches(request, rows, _batches(workload))
    search: Search[_Row, Mean] = Search(problem)
    answer = search.run(Stop(rel_gap=REL_GAP, deadline=request.deadline), on_progress=request.on_progress)
    if answer.best is None:
        if problem.refused:
            raise problem.refused[0]
        raise request.deadline.error("while batches were scheduled")
    best = answer.best.candidate
    others = sorted(
        (leaf.candidate for leaf in answer.leaves if leaf is not answer.best), key=lambda mean: mean.seconds
    )
    chosen = _estimate(request, best, problem.batches)
    certificate = Certificate.proved(
        objective=best.seconds,
        bound=min(best.seconds, answer.bound),
        finished=answer.is_proved,
        evaluated=answer.evaluated,
        pruned=len(rows) - answer.evaluated,
        pruned_in_groups=sum(result.problem.num_layouts for result in results) - len(rows),
        search_s=answer.solve_s + sum(result.search_s for result in results),
    )
    plan = plan_candidate(packed, best.row.layout, best.row.candidate, certificate)
    return plan.replace(
        workload=workload,
        batches=best.costs,
        estimate=chosen,
        alternatives=tuple(
            build_alternative(mean.row.layout, _estimate(request, mean, problem.batches), chosen)
            for mean in others[:top]
        ),
        notes=(*plan.notes, _note(best, answer.best.objective, problem)),
        provenance=request.provenance(),
    )


def estimate_lengths(request: PlanRequest, layout: Layout, stages: Sequence[Stage] = ()) -> TrainingEstimate:
    """Return the estimate of a layout over the drawn batches, as its plan has it; of a pipeline cut into ``stages``, or anew.

    Raises:
        ConfigError: its schedule is of one number of micro-batches, or its ranks make no groups.
        InfeasibleError: a rank holds no tokens, or all together not the longest sequence.
    """
    lengths, workload = request.workload.lengths, request.workload
    assert lengths is not None
    candidate = expand_layout(_packed(request, lengths), layout)
    stages = tuple(stages) or stages_of(request.model.staged(half_blocks=layout.half_blocks), candidate)
    costs = length_costs(
        request.model, request.cluster, workload, layout, shortest=lengths.lengths[0], longest=workload.seq_len,
        stages=stages,
    )  # fmt: skip
    batches = _batches(workload)
    seconds = [schedule_batch(instance_under(costs, batch)).seconds for batch in batches]
    row = _Row(candidate, layout, stages, costs)
    return _estimate(request, Mean(row, costs.step_s + float(np.mean(seconds))), batches)


def _batches(workload: Workload) -> list[tuple[int, ...]]:
    assert workload.lengths is not None
    size = workload.global_batch_size
    count = max(_MIN_BATCHES, min(NUM_BATCHES, math.ceil(_DRAWN / size)))
    return [workload.lengths.draw(size, SEED + b) for b in range(count)]


def _packed(request: PlanRequest, lengths: Lengths) -> PlanRequest:
    """Return the request with the tokens of a mean batch in packs of one length."""
    tokens = request.workload.tokens_per_step
    devices = request.cluster.num_devices
    length = min(_PACKED_TOKENS, max(1, request.workload.seq_len))
    batch = max(1, math.ceil(tokens / length))
    batch = math.ceil(batch / devices) * devices  # every degree of data parallelism deals it evenly
    workload = request.workload.replace(
        lengths=None, seq_len=length, global_batch_size=batch, document_len=lengths.attended_len(length)
    )
    fixed = {"cp": 1, **request.fixed} if int(request.fixed.get("pp", 0) or 0) > 1 else {**request.fixed, "cp": 1}
    return dataclasses.replace(request, task=workload, fixed={"schedule": DEFAULT.name, **fixed})


def _rows(result: SearchResult, workload: Workload) -> list[_Row]:
    """Return the layouts that groups and packs leave open, each with its fastest candidate, fastest first."""
    rows: dict[Layout, _Row] = {}
    for candidate in result.feasible:
        layout = candidate.layout(result.costs.layouts).replace(micro_batch_size=1)
        if layout.dp > workload.global_batch_size or candidate.tps:
            continue  # a plan has a sequence for each of them, and packs have one shape in all stages
        if layout.pp > 1 and layout.num_microbatches(workload.global_batch_size) < layout.pp:
            continue
        model = result.costs.model.staged(half_blocks=layout.half_blocks)
        rows.setdefault(layout, _Row(candidate, layout, stages_of(model, candidate)))
    return list(rows.values())


def _estimate(request: PlanRequest, mean: Mean, batches: list[tuple[int, ...]]) -> TrainingEstimate:
    """Return the estimate of a layout over the batches: its memory with full micro-batches, its parts as those of packs.

    Compute makes up for what packs lack of the work of every sequence on one rank: attention over long ones. What is beyond that
    work, evenly dealt, is context-parallel communication (exchange, and ranks that wait), or of a pipeline its bubble.
    """
    packed, costs = mean.row.candidate.estimate, mean.costs
    tokens = request.workload.tokens_per_step
    packs = _packed(request, request.workload.lengths).workload  # type: ignore[arg-type]
    scale = tokens / packs.tokens_per_step
    parts = {name: scale * value for name, value in packed.breakdown_s.model_dump().items()} | {"bubble": 0.0}
    ranks = costs.num_ranks // (1 if costs.pipeline is None else costs.pipeline.cp)
    single_rank_s = float(np.mean([costs.seconds(np.array(batch, dtype=float), 1).sum() for batch in batches])) / ranks
    even_s = min(single_rank_s + costs.step_s, mean.seconds)
    beyond = even_s - sum(parts.values())
    parts["compute"] += max(beyond, 0.0)
    shrunk = min(1.0, even_s / sum(parts.values()))
    parts = {name: value * shrunk for name, value in parts.items()}
    parts["cp" if costs.pipeline is None else "bubble"] += mean.seconds - sum(parts.values())
    full = _full(request, mean)
    interval, ratio = packed.step_time_interval_s, mean.seconds / packed.step_time_s
    return full.replace(
        step_time_s=mean.seconds,
        step_time_interval_s=interval.replace(low=interval.low * ratio, high=interval.high * ratio),
        tokens_per_s=tokens / mean.seconds,
        tokens_per_s_per_device=tokens / mean.seconds / request.cluster.num_devices,
        mfu=packed.mfu * scale / ratio,
        breakdown_s=packed.breakdown_s.replace(**parts),
    )


def _full(request: PlanRequest, mean: Mean) -> TrainingEstimate:
    """Return the estimate of a step whose ranks each hold all the tokens that they can."""
    layout, tokens = mean.row.layout, mean.costs.tokens_per_rank
    if layout.pp > 1:
        stages = mean.row.stages
        return PackCosts(request.model, request.cluster, request.workload, layout, stages).estimate(tokens * layout.cp)
    workload = request.workload.replace(
        lengths=None, seq_len=tokens, global_batch_size=layout.dp, document_len=min(tokens, request.workload.seq_len)
    )
    return layout_estimate(request.model, request.cluster, workload, layout)


def _note(best: Mean, seconds: float, problem: LayoutsOverBatches) -> str:
    bounds = np.mean([batch_bound_s(instance_under(best.costs, batch)) for batch in problem.batches])
    beyond = format_percent(1 - (float(bounds) + best.costs.step_s) / seconds)
    return (
        f"the mean of {len(problem.batches)} batches drawn from the lengths, each scheduled by itself: {beyond} over their bounds; "
        f"a rank holds {best.costs.tokens_per_rank:,} tokens of a micro-batch"
    )
