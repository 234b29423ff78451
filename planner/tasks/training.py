"""Training: the layouts of a request searched, the simplest of the fastest chosen, and written as a Plan with its runner-ups."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from ...cost_models.coefficients import Scenario
from ...cost_models.hardware.machine import is_measured
from ...cost_models.measured import measured_terms
from ...cost_models.pipeline.orders import Order, to_torch_csv
from ...cost_models.stage.bounds import estimates_s
from ...cost_models.stage.table import CostTable
from ...schema import (
    Alternative,
    Certificate,
    ClusterSpec,
    Layout,
    ModelSpec,
    OffloadSchedule,
    SolverLimitError,
    Stage,
    TrainingEstimate,
    TrainingPlan,
)
from ...schema.device_groups import part_label
from ...schema.layout import Recompute
from ...schema.layout_table import RECOMPUTES, LayoutTable
from ...schema.runnable import why_not_runnable, why_not_trainable
from ...schema.schedules import OVER_A_V
from ...schema.units import format_bytes, format_percent
from ..choice import Choice, add_half_blocks, choose, lacks_headroom
from ..expand import Candidate, expand_with_fp32_gradients, expand_with_new_order, improve_order, with_best_map
from ..layer_modes import with_modes
from ..request import Deadline, PlanRequest
from ..search import MAX_SHORTENED, REL_GAP, SearchResult, early_answer, search
from ..space import Space, build_space
from ..stage_choice import LEANEST, order_instance, synthesise

WORTH_MOVING = 0.01
"""The share of a step that an offload schedule saves at least, where the model fits without: much less than what predictions of two
layouts that differ in it are off (coefficients.toml, [ratio.sd])."""

TOO_LARGE = "does not fit"

TIME_TITLES = {
    "compute": "compute of the busiest rank",
    "recompute": "recompute",
    "tp": "tensor-parallel communication",
    "cp": "context-parallel communication",
    "ep": "expert-parallel communication",
    "dp": "data-parallel communication",
    "pp": "stage transfers",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer update",
    "offload": "waiting for the host",
}

MAX_ORDERS = 4
"""Orders that are made for the front of time and memory."""

MAX_ORDERED, MAX_TRIES, FASTEST_FIRST = 2, 12, 2
"""Layouts that get orders of their own after a search, those whose stages are cut for that, and those taken by their named time."""

_OVER_A_V = frozenset(schedule.idx for schedule in OVER_A_V)


def search_layouts(
    request: PlanRequest,
    space: Space | None = None,
    *,
    runner_ups: int = 0,
    worse_than_s: float = math.inf,
    max_expanded: float = math.inf,
) -> SearchResult:
    """Search the layouts of a request (`search`), then try orders of passes made for the best ones.

    Raises:
        ConfigError: there are no layouts; the message names the rules.
        SolverLimitError: the deadline came before every layout had a bound, and before an early answer.
    """
    early = early_answer(request) if space is None and math.isinf(worse_than_s) else None
    try:
        result = search(
            request,
            space or build_space(request),
            runner_ups=runner_ups,
            worse_than_s=worse_than_s,
            max_expanded=max_expanded,
            makes_order="schedule" not in request.fixed,
            known=early,
        )
    except SolverLimitError:
        if early is None or not early.feasible:
            raise
        return early
    if "schedule" not in request.fixed:
        add_synthesised_orders(result, request.deadline, worse_than_s=worse_than_s)
    if "half_blocks" not in request.fixed:
        add_half_blocks(request, result, worse_than_s=worse_than_s)
    result.feasible[:1] = [with_best_map(result.costs, candidate) for candidate in result.feasible[:1]]
    if any(result.costs.layouts.pp[candidate.idx] > 1 for candidate in result.feasible[:1]):
        from ..stage_degrees import add_stage_degrees  # few plans have a pipeline

        add_stage_degrees(request, result)
    return result


def build_plan(
    request: PlanRequest,
    layout: Layout,
    stages: tuple[Stage, ...],
    estimate: TrainingEstimate,
    certificate: Certificate,
    *,
    nodes: Sequence[int] = (),
    shares: tuple[int, ...] = (),
    order: Order = (),
    alternatives: tuple[Alternative, ...] = (),
    offload: OffloadSchedule | None = None,
    notes: Sequence[str] = (),
) -> TrainingPlan:
    """Write the answer to a request; ``nodes`` hold the ranks in this order (empty: as listed)."""
    plan = TrainingPlan(
        model=request.model,
        cluster=request.cluster,
        workload=request.workload,
        layout=layout,
        stages=stages,
        pipeline_order=tuple(to_torch_csv(order).splitlines()),
        rank_map=device_of_rank(request.cluster, nodes),
        shares=shares,
        estimate=estimate,
        search=certificate,
        alternatives=alternatives,
        offload=offload,
        notes=tuple(notes),
        provenance=request.provenance(),
    )
    return with_modes(plan)


def device_of_rank(cluster: ClusterSpec, nodes: Sequence[int]) -> tuple[int, ...]:
    """Return TrainingPlan.rank_map of an order of nodes; empty stands for the order in which they are listed."""
    sizes = cluster.node_sizes
    first = list(itertools.accumulate(sizes, initial=0))
    return tuple(first[n] + i for n in nodes or range(len(sizes)) for i in range(sizes[n]))


def plan_layout(request: PlanRequest, result: SearchResult, *, top: int, slowest_s: float = math.inf) -> TrainingPlan:
    """Return the plan of the layout that is taken of those that a search found (`choose`), none slower than ``slowest_s``."""
    choice = choose(request, result, slowest_s=slowest_s)
    chosen = choice.chosen
    layout = chosen.layout(result.costs.layouts)
    return plan_candidate(request, layout, chosen, result.certificate()).replace(
        fastest=build_fastest(result, choice),
        alternatives=build_alternatives(result, choice, top),
        notes=(*_notes(request, choice), *_notes_on_gradients(request, chosen, result)),
    )


def plan_candidate(request: PlanRequest, layout: Layout, chosen: Candidate, certificate: Certificate) -> TrainingPlan:
    """Return the plan of one layout that a search found, with neither runner-ups nor notes."""
    return build_plan(
        request,
        layout,
        stages_of(request.model.staged(half_blocks=layout.half_blocks), chosen),
        chosen.estimate,
        certificate,
        nodes=chosen.nodes,
        shares=chosen.shares,
        order=chosen.order,
    )


def _notes_on_gradients(request: PlanRequest, chosen: Candidate, result: SearchResult) -> tuple[str, ...]:
    """Say what gradients in the compute dtype are worth where the search chose them: they change the sums that are trained with."""
    if chosen.layout(result.costs.layouts).gradients == "fp32" or "gradients" in request.fixed:
        return ()
    in_fp32 = expand_with_fp32_gradients(result.costs, chosen.idx)
    gain = "in fp32 this layout would not fit"
    if in_fp32 is not None:
        gain = f"in fp32 this layout would take {100 * (in_fp32.step_time_s / chosen.step_time_s - 1):.1f} % longer"
    return (f"gradients add up and are reduced in 16 bits, {gain}; --fix gradients=fp32 plans with fp32",)


def stages_of(model: ModelSpec, chosen: Candidate) -> tuple[Stage, ...]:
    """Return the layers of each stage in order, as they were costed (Layout.num_model_chunks says which rank holds which)."""
    is_block, recomputes = [layer.is_block for layer in model.iter_layers()], [RECOMPUTES[o] for o in chosen.options]
    spans = itertools.pairwise(chosen.boundaries)
    stages = tuple(stage_of_layers(first, recomputes[first:end], is_block[first:end]) for first, end in spans)
    return tuple(stage.replace(tp=tp) for stage, tp in zip(stages, chosen.tps, strict=True)) if chosen.tps else stages


def stage_of_layers(first_layer_idx: int, recomputes: Sequence[Recompute], is_block: Sequence[bool]) -> Stage:
    """Return a stage, with one recompute for all its blocks where they do the same."""
    used = {recompute for recompute, block in zip(recomputes, is_block, strict=True) if block}
    return Stage(
        first_layer_idx=first_layer_idx,
        num_layers=len(recomputes),
        recompute=max(used, key=RECOMPUTES.index),
        layer_recompute=tuple(recomputes) if len(used) > 1 else (),
    )


def build_fastest(result: SearchResult, choice: Choice) -> Alternative | None:
    """Return the fastest layout by prediction, where a plainer one was taken."""
    chosen, fastest = choice.chosen, choice.fastest
    if chosen is fastest:
        return None
    gain = format_percent(1 - fastest.step_time_s / chosen.step_time_s)
    reason = f"{gain} faster by prediction, really faster with a probability of {format_percent(choice.probability, 0)}: not taken"
    return build_alternative(fastest.layout(result.costs.layouts), fastest.estimate, chosen.estimate).replace(
        reason=reason
    )


def build_alternatives(result: SearchResult, choice: Choice, top: int) -> tuple[Alternative, ...]:
    """Return the best of every other combination of degrees, and those faster ones that lack the least memory."""
    chosen, batch = choice.chosen, result.costs.layouts
    seen = {batch.degrees(chosen.idx), batch.degrees(choice.fastest.idx)}

    def different(candidates: Iterable[Candidate], count: int) -> Iterator[Alternative]:
        for candidate in candidates:
            if count == 0:
                return
            if (degrees := batch.degrees(candidate.idx)) not in seen:
                seen.add(degrees)
                count -= 1
                yield build_alternative(candidate.layout(batch), candidate.estimate, chosen.estimate)

    by_bytes = sorted(result.too_large, key=lambda c: c.estimate.peak_allocated_bytes)
    faster = (c for c in by_bytes if c.estimate.step_time_s < chosen.estimate.step_time_s)
    return (*different(result.feasible, top), *different(faster, min(top, 2)))


def alternatives_with_schedules(
    scheduled: Sequence[Alternative], result: SearchResult | None, chosen: TrainingEstimate, top: int
) -> tuple[Alternative, ...]:
    """Return the runner-ups of a plan with an offload schedule: the fastest of others with one, and of ``result`` without any."""
    plain: list[Alternative] = []
    if result is not None:
        fastest = result.feasible[0]
        first = build_alternative(fastest.layout(result.costs.layouts), fastest.estimate, chosen)
        as_chosen = replace(fastest, estimate=chosen)
        plain = [first, *build_alternatives(result, Choice(as_chosen, as_chosen, 1.0), top)]
    feasible = sorted((a for a in (*scheduled, *plain) if not _is_too_large(a)), key=lambda a: a.step_time_s)
    return (*feasible[:top], *(a for a in plain if _is_too_large(a)))


def _is_too_large(other: Alternative) -> bool:
    return other.reason.startswith(TOO_LARGE)


def build_alternative(layout: Layout, estimate: TrainingEstimate, chosen: TrainingEstimate) -> Alternative:
    """Return a layout that was not chosen, with the reason."""
    return Alternative(
        layout=layout,
        step_time_s=estimate.step_time_s,
        peak_reserved_bytes=estimate.peak_reserved_bytes,
        reason=why_slower(estimate, chosen) if estimate.fits else why_too_large(estimate),
    )


def why_slower(other: TrainingEstimate, chosen: TrainingEstimate) -> str:
    """Return the term of the step that costs the loser the most, as a share of the winner's step."""
    lost = {name: getattr(other.breakdown_s, name) - getattr(chosen.breakdown_s, name) for name in TIME_TITLES}
    worst = max(lost, key=lost.__getitem__)
    slower = other.step_time_s / chosen.step_time_s - 1
    if round(100 * slower, 1) == 0:
        return "as fast, not simpler"
    if slower < 0:
        return f"{100 * slower:+.1f} %: within the error of the comparison, not simpler"
    return f"{100 * slower:+.1f} %: {TIME_TITLES[worst]} {100 * lost[worst] / chosen.step_time_s:+.1f} %"


def why_too_large(estimate: TrainingEstimate) -> str:
    """Return the bytes a layout would need against the budget, and its largest term."""
    terms = estimate.memory_bytes.model_dump()
    largest = max(terms, key=terms.__getitem__)
    return (
        f"{TOO_LARGE}: needs up to {format_bytes(estimate.required_bytes)} of "
        f"{format_bytes(estimate.budget_bytes)}; {largest} {format_bytes(terms[largest])}"
    )


def _notes(request: PlanRequest, choice: Choice) -> list[str]:
    """Say what was assumed, and what the reader should know of the plan."""
    chosen = choice.chosen
    model, cluster, workload = request.model, request.cluster, request.workload
    notes, is_ours = [], workload.engine_facts.is_own_runtime
    if not is_ours:
        notes.append(f"for {workload.engine}: `meshwright apply` does not execute this plan")
    if chosen is not choice.fastest:
        notes.append(_note_on_choice(request, choice))
    if chosen.order:
        notes.append("the order of passes was made for these stages and this memory (pipeline_order); it has no name")
    if chosen.tps:
        notes.append(
            f"stages share their layers over {', '.join(map(str, chosen.tps))} ranks; the bound is about one tp for all"
        )
    if chosen.half_blocks:
        notes.append(
            "stages end inside blocks; the search's bound is about cuts between blocks (--fix half_blocks=true: any)"
        )
    if cluster.is_mixed:
        notes.append(_note_on_pools(cluster, chosen))
    profiles = [profile for profile in (cluster.profile, *(group.profile for group in cluster.groups)) if profile]
    load = 100 * max((profile.foreign_load_fraction for profile in profiles), default=0.0)
    if load > 20:
        notes.append(
            f"other work used {load:.0f} % of the cores while this machine was measured: its figures are too low"
        )
    notes += notes_on_measured(request)
    if model.is_moe and workload.engine == "deepspeed":
        notes.append(
            "experts are split over tp only: DeepSpeed is planned without expert parallelism; fsdp2 and megatron have it"
        )
    if workload.seq_len > model.max_seq_len:
        notes.append(
            f"sequences of {workload.seq_len} are longer than the {model.max_seq_len} of the published configuration"
        )
    if not is_measured(cluster.weakest_device):
        notes.append(f"{cluster.weakest_device.name} is known from its data sheet only; its kernels were not measured")
    return notes + (notes_on_runtime(request) if is_ours else [])


def _note_on_choice(request: PlanRequest, choice: Choice) -> str:
    """Say why the fastest layout by prediction was not taken."""
    why = "simpler"
    if lacks_headroom(request, choice.fastest) and not lacks_headroom(request, choice.chosen):
        why = "with more memory to spare"
    price = format_percent(choice.slower_fraction)
    if price == format_percent(0):
        return f"as fast as the fastest layout found, and {why}"
    return (
        f"{price} slower by prediction than the fastest layout found, and {why}: that one is really faster with a probability of "
        f"{format_percent(choice.probability, 0)} only (--prefer fastest takes it)"
    )


def notes_on_measured(request: PlanRequest) -> list[str]:
    """Say what of the estimate comes from the profile besides products, attention, layers and collectives."""
    if (profile := request.cluster.profile) is None:
        return []
    terms = measured_terms(profile, Scenario.build(request.workload, request.cluster))
    notes = [f"from the profile: {'; '.join(terms)}"] if terms else []
    engines = profile.engines_of({run.layer for run in request.model.layers}, request.model.hidden_dim)
    if engines and request.workload.engine not in engines:
        notes.append(
            f"layers of the profile were measured under {', '.join(sorted(engines))}: not used for this engine"
        )
    return notes


def notes_on_runtime(request: PlanRequest) -> list[str]:
    """Say why `apply` cannot run the plan, where it cannot."""
    if request.model.code is not None:
        code, lacking = request.model.code, why_not_trainable(request.workload)
        coupled = [f"{code.coupling}: results are not those of one rank with the whole batch"] if code.coupling else []
        if not lacking:
            return [
                f"traced from the code of {code.class_name}: run it in a script of your own with `parallelize(model, plan)` "
                "(docs/models.md)",
                *coupled,
            ]
    else:
        lacking = (*request.cluster.why_not_driven, *why_not_runnable(request.model, request.workload))
    return ["`meshwright apply` cannot run this plan: " + "; ".join(lacking)] if lacking else []


def _note_on_pools(cluster: ClusterSpec, chosen: Candidate) -> str:
    """Say which stages lie on which nodes of a mixed cluster."""
    if chosen.shares:
        devices_per_rank = cluster.num_devices // len(chosen.shares)
        ranks = [part.cluster.num_devices // devices_per_rank for part in cluster.parts]
        first = list(itertools.accumulate(ranks, initial=0))
        of_pools = [chosen.shares[first[g] : first[g] + count] for g, count in enumerate(ranks)]
        dealt = (
            f"{' to '.join(str(share) for share in sorted({min(shares), max(shares)}))} on {part_label(cluster.parts, g)}"
            for g, shares in enumerate(of_pools)
        )
        return f"mixed cluster: data-parallel ranks take sequences as they are fast: {', '.join(dealt)}"
    if not chosen.part_of_stage and len({group.device for group in cluster.groups}) == 1:
        return (
            "the stages do not each lie in one zone or network; what joins all devices counts as the link between nodes"
        )
    if not chosen.part_of_stage:
        return "mixed cluster: the stages do not each lie on nodes of one kind; every rank is planned as the slowest and smallest"
    runs = itertools.groupby(enumerate(chosen.estimate.stages), key=lambda item: item[1].device)
    stages_of = [(device, [s for s, _ in stages]) for device, stages in runs]
    placed = ", ".join(
        f"{s[0]} to {s[-1]} on {device}" if len(s) > 1 else f"{s[0]} on {device}" for device, s in stages_of
    )
    return f"mixed cluster: stages {placed}; each stage is planned for its own devices and links"


def add_synthesised_orders(result: SearchResult, deadline: Deadline, *, worse_than_s: float = math.inf) -> None:
    """Add layouts with orders of passes made for them (`synthesise`) where that makes a layout over a V the fastest.

    Layouts over a V are tried whose bound under any order (cost_models/pipeline) is below the best, or below ``worse_than_s`` where
    nothing else is. The result's bound is about named schedules: an order that is faster than that takes the bound along.
    """
    best_s = result.feasible[0].estimate.step_time_s if result.feasible else worse_than_s
    if result.stopped_early or math.isinf(best_s):
        return
    layouts, tried, ordered = result.costs.layouts, result.problem.tried_orders, list[Candidate]()
    known, num_fitting = [_all_but_schedule(layouts, row) for row in tried], len(tried)
    longer = max((c.step_time_s / c.any_order_s for c in tried.values() if c is not None), default=1.0)
    for any_order_s, row in _rows_over_a_v(result, best_s)[:MAX_TRIES]:
        if deadline.is_over or num_fitting == MAX_ORDERED:
            break
        # A second one is not made where it would have to come closer to its bound than the first one did.
        if any_order_s * longer >= best_s * (1 - REL_GAP) or _all_but_schedule(layouts, row) in known:
            continue
        candidate = expand_with_new_order(result.costs, row, bound_s=any_order_s, below_s=best_s)
        if candidate is None:
            continue
        if candidate.step_time_s <= MAX_SHORTENED * best_s:
            candidate = improve_order(result.costs, candidate, below_s=best_s)
        num_fitting, longer = num_fitting + 1, candidate.step_time_s / any_order_s
        if candidate.step_time_s < best_s * (1 - REL_GAP):
            ordered.append(candidate)
            best_s = candidate.step_time_s
    result.feasible = sorted([*result.feasible, *ordered], key=lambda c: (c.estimate.step_time_s, c.idx))
    result.bound_s = min([result.bound_s, *(c.estimate.step_time_s for c in result.feasible[:1])])


def _rows_over_a_v(result: SearchResult, below_s: float) -> list[tuple[float, int]]:
    """Return layouts over a V and their bounds under any order, if below ``below_s``; of those that differ in the schedule one.

    First the fastest under named schedules, then by what named orders are estimated to take. None is tried where not even the named
    order that holds least has stages that fit, or where those named orders that seem to fit are estimated to take too long to be
    shortened so far.
    """
    batch, pool = result.costs.layouts, result.problem.pool
    too_large = {_all_but_schedule(batch, row) for row in result.problem.rejected if batch.schedule[row] == LEANEST}
    lowest: dict[tuple[float, ...], tuple[float, int]] = {}
    estimated = dict[tuple[float, ...], float]()
    met = [
        (row, bound_s) for row, bound_s in result.problem.any_order_s.items() if int(batch.schedule[row]) in _OVER_A_V
    ]
    rows, bounds_s = np.array([row for row, _ in met], dtype=np.int64), np.array([bound_s for _, bound_s in met])
    estimated_s = estimates_s(pool.bounding.select(rows).compacted(), bounds_s) if met else bounds_s
    for (row, any_order_s), estimate_s in zip(met, estimated_s.tolist(), strict=True):
        if any_order_s < below_s:
            key = _all_but_schedule(batch, row)
            lowest[key] = min(lowest.get(key, (any_order_s, row)), (any_order_s, row))
            estimated[key] = min(estimated.get(key, math.inf), estimate_s)
    promising = {key for key, seconds in estimated.items() if seconds <= MAX_SHORTENED * below_s}
    fastest = [_all_but_schedule(batch, c.idx) for c in result.feasible if int(batch.schedule[c.idx]) in _OVER_A_V]
    by_estimate = sorted(promising - too_large, key=lambda key: (estimated[key], lowest[key]))
    known = [key for key in dict.fromkeys(fastest) if key in lowest][:FASTEST_FIRST]
    return [lowest[key] for key in dict.fromkeys([*known, *by_estimate])]


def synthesise_orders(
    costs: CostTable, feasible: Iterable[Candidate], best_s: float, deadline: Deadline
) -> list[Candidate]:
    """Return candidates with orders of their own, each faster than ``best_s`` and the one before."""
    groups = dict[tuple[float, ...], list[Candidate]]()
    for candidate in feasible:
        is_mapped = candidate.nodes or candidate.part_of_stage
        if int(costs.layouts.schedule[candidate.idx]) in _OVER_A_V and not is_mapped:
            groups.setdefault(_all_but_schedule(costs.layouts, candidate.idx), []).append(candidate)
    by_bound = [sorted(group, key=lambda c: c.any_order_s) for group in groups.values()]
    by_bound.sort(key=lambda group: (group[0].any_order_s, group[0].idx))
    finalists = [c for group in by_bound for c in {c.boundaries: c for c in group}.values()]
    ordered: list[Candidate] = []
    for candidate in finalists[:MAX_ORDERS]:
        if deadline.is_over or candidate.any_order_s >= best_s * (1 - REL_GAP):
            break
        made = synthesise(order_instance(costs, candidate.idx, candidate.boundaries))
        if made is not None and made[1].step_time_s < best_s * (1 - REL_GAP):
            ordered.append(replace(candidate, order=made[0], estimate=made[1]))
            best_s = made[1].step_time_s
    return ordered


def _all_but_schedule(batch: LayoutTable, idx: int) -> tuple[float, ...]:
    return tuple(float(column[idx]) for name, column in batch.columns.items() if name != "schedule")
