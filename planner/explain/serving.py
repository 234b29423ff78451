"""Why a serving plan is as it is: what binds, what a change is worth, why not another mode; or why nothing serves the load.

Every figure comes from searching and simulating again with the change.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ...cost_models.serving.host_experts import may_lie_with_host
from ...cost_models.serving.steady_state import largest_rate, operating_points
from ...schema import ConfigError, InfeasibleError, MeshwrightError
from ...schema.base import Frozen
from ...schema.host_experts import ExpertsOnHost
from ...schema.layout import format_assignments, parse_assignments
from ...schema.serving import MODES, LatencyLimit, Pool, Serving, ServingMode
from ...schema.serving_plan import ServingPlan, pools_title
from ...schema.units import counted, format_percent, format_seconds
from ..request import Deadline, PlanRequest
from ..serving.answer import build_serving_plan, family_of
from ..serving.checks import Deployment
from ..serving.kinds import InstanceKind
from ..serving.space import mix_of
from ..tasks.serving import ServingProblem, ServingSearch, search_serving
from .advice import grow_cluster

LOOSER = (1.25, 1.5, 2.0, 4.0)
"""Factors by which a limit is loosened, the smallest that helps is said."""

GROWTH = (2, 4, 8, 16, 32, 64)
"""Times the devices of the cluster that are tried; a larger one has layouts of more devices, too."""


class ServingChange(Frozen):
    """A change of what was asked, and the plan that it has.

    Attributes:
        change: in words; pools: of the plan with it, empty where there is none.
        difference: to the plan, in words.
    """

    change: str
    pools: str = ""
    num_devices: int | None = None
    requests_per_s: float | None = None
    tokens_per_s_per_device: float | None = None
    difference: str


class ServingExplanation(Frozen):
    """What binds a serving plan, and what changes would give.

    Attributes:
        binds: for each pool, in words.
        changes: verified by another search; why_not: of what was asked.
        not_searched: changes for which the time limit left none.
    """

    binds: tuple[str, ...]
    changes: tuple[ServingChange, ...] = ()
    not_searched: tuple[str, ...] = ()
    why_not: ServingChange | None = None


def request_of(plan: ServingPlan, deadline: Deadline | None = None) -> PlanRequest:
    """Return what a plan answers."""
    fixed = parse_assignments(plan.provenance.fixed, Serving.fixable) if plan.provenance is not None else {}
    return PlanRequest(plan.model, plan.cluster, plan.serving, fixed, deadline=deadline or Deadline())


def explain_serving(plan: ServingPlan, *, why_not: str = "", deadline: Deadline | None = None) -> ServingExplanation:
    """Return what binds a plan and what changes are worth, or with ``why_not`` how the plan with that compares.

    Raises:
        ConfigError: why_not is neither a mode nor fields of a layout of an instance.
        SolverLimitError: the time limit ended before why_not was searched.
    """
    request = request_of(plan, deadline)
    binds = tuple(_binding(plan))
    if why_not:
        return ServingExplanation(binds=binds, why_not=_why_not(plan, request, why_not))
    rows: list[ServingChange] = []
    not_searched: list[str] = []
    for text, changed in _changes(plan, request):
        if not request.deadline.is_over:
            row = _compared(plan, text, changed)
            if row.pools or not request.deadline.is_over:
                rows.append(row)
                continue
        not_searched.append(text)
    if plan.serving.requests.rate is not None:
        if request.deadline.is_over:
            not_searched.append("the largest rate, and that of one more instance")
        else:
            rows += _one_more(plan, request)
    return ServingExplanation(binds=binds, changes=tuple(rows), not_searched=tuple(not_searched))


def _binding(plan: ServingPlan) -> Iterator[str]:
    for pool, cost in zip(plan.pools, plan.estimate.pools, strict=True):
        largest = max(cost.step_parts_s, key=lambda part: cost.step_parts_s[part])
        share = cost.step_parts_s[largest] / max(sum(cost.step_parts_s.values()), 1e-12)
        why = {
            "rate": f"the load alone: {cost.requests_per_s:.3g} of {cost.largest_requests_per_s:.3g} requests/s an instance",
            "cache": "the cache: no more requests fit",
            "max_batch": f"max_batch {pool.limits.max_batch}",
            "max_batched_tokens": f"max_batched_tokens {pool.limits.max_batched_tokens}",
            "prompts": "prompts: all the time of the instance is theirs",
        }.get(cost.binds, f"the limit on {cost.binds}")
        busy = ""
        if (split := cost.split) is not None:
            busy = (
                f"; of it attention devices are busy for {format_percent(split.attention, 0)}, feed-forward devices for "
                f"{format_percent(split.feed_forward, 0)}, the link for {format_percent(split.link, 0)}"
            )
        yield (
            f"{pool.replicas} x {pool.role} bound by {why}; its step of {format_seconds(cost.step_s)} is "
            f"{100 * share:.0f} % {largest.replace('_', ' ')}{busy}"
        )


def _changes(plan: ServingPlan, request: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    serving = plan.serving
    for idx, limit in enumerate(serving.limits):
        looser = limit.replace(seconds=1.25 * limit.seconds)
        text = f"{limit.metric} {format_seconds(looser.seconds)} instead of {format_seconds(limit.seconds)}"
        yield text, replace(request, task=_with_limit(serving, idx, looser))
    yield from (
        (f"mode {other} instead of {plan.mode}", _in_mode(request, other))
        for other in dict.fromkeys(("agg", "disagg", *serving.modes))
        if other != plan.mode
    )
    if serving.experts_on_host is not None:
        yield "all experts on the devices", replace(request, task=serving.replace(experts_on_host=None))
        ways = {"copy": "experts on the host copied up alone", "compute": "experts on the host computed there alone"}
        for by, words in ways.items():
            if by != serving.experts_on_host.by:
                placed = serving.experts_on_host.replace(by=by)
                yield words, replace(request, task=serving.replace(experts_on_host=placed))
    if plan.pools[-1].weights in ("bf16", "fp16"):
        yield "weights in fp8", replace(request, task=serving.replace(weights="fp8"))
    if plan.pools[-1].cache in ("bf16", "fp16"):
        yield "cache in fp8", replace(request, task=serving.replace(cache="fp8"))


_OF_MODE: Mapping[str, ServingMode] = {"prefill_eighths": "shared", "ffn_devices": "afd", "micro_batches": "afd"}
"""What instances of one mode alone have."""


def _in_mode(request: PlanRequest, mode: ServingMode) -> PlanRequest:
    """Return the request for another mode, without what only one has."""
    assert isinstance(request.task, Serving)
    fixed = {name: value for name, value in request.fixed.items() if _OF_MODE.get(name, mode) == mode}
    return replace(request, task=request.task.replace(modes=(mode,)), fixed=fixed)


def _one_more(plan: ServingPlan, request: PlanRequest) -> Iterator[ServingChange]:
    """Yield the requests a second that the pools carry as they are, and with one more instance of each."""
    fields = {name: getattr(plan.pools[0].layout, name) for name in ("tp", "pp", "attention_dp", "ep")}
    if (eighths := plan.pools[0].prefill_eighths) is not None:
        fields["prefill_eighths"] = eighths
    alike = all(pool.layout == plan.pools[0].layout for pool in plan.pools)
    problem = ServingProblem(replace(request, task=_free_rate(plan.serving), fixed=fields if alike else request.fixed))
    kinds = []
    for pool in plan.pools:
        if (kind := _kind_of(problem, plan, pool)) is None:
            return  # edited since it was planned: no instance of the space is like it
        kinds.append(kind)
    now = tuple(pool.replicas for pool in plan.pools)
    before = 0.0
    for idx in range(-1, len(now)):
        counts = tuple(count + (pool == idx) for pool, count in enumerate(now))
        deployment = Deployment(tuple(kinds), counts)
        served = problem.saturated(family_of(problem, deployment), deployment)[0]
        if served is None:
            continue
        rate = served.requests_per_s
        what = "as it is, at its largest rate" if idx < 0 else f"one more {plan.pools[idx].role} instance"
        words = f"carries {rate:.3g} requests/s" + (f", {rate - before:+.2g}" if before else "")
        before = before or rate
        yield ServingChange(
            change=what, pools=pools_title(deployment.pools), num_devices=deployment.num_devices, requests_per_s=rate,
            tokens_per_s_per_device=served.tokens_per_s / deployment.num_devices, difference=words,
        )  # fmt: skip


def _kind_of(problem: ServingProblem, plan: ServingPlan, pool: Pool) -> InstanceKind | None:
    """Return the kind of instance that a pool has, with its micro-batches and experts on the host; None where there is none."""
    has_chosen = any(each.micro_batches is not None or each.experts_on_host is not None for each in plan.pools)
    for kind in (*problem.space.kinds, *problem.space.split):
        unlike = kind.ffn_part is not None and kind.base.clusters[1].weakest_device.name
        of_kind = kind.layout, kind.device, unlike or None, kind.prefill_eighths
        if of_kind == (pool.layout, pool.device, pool.ffn_device, pool.prefill_eighths):
            # The plan's micro-batches, or its experts on the host, are one of the kind's choices, as limits are.
            chosen = pool.micro_batches, pool.experts_on_host
            variants = kind.variants(pool.role, math.inf) if has_chosen else [kind]
            return next((each for each in variants if (each.micro_batches, each.experts_on_host) == chosen), None)
    return None


def _free_rate(serving: Serving) -> Serving:
    requests = serving.requests.replace(rate=None)
    return serving.replace(requests=requests, objective="throughput")


def _with_limit(serving: Serving, idx: int, limit: LatencyLimit) -> Serving:
    return serving.replace(limits=(*serving.limits[:idx], limit, *serving.limits[idx + 1 :]))


def _searched(request: PlanRequest) -> ServingPlan | None:
    """Return the plan of a changed request; None where nothing serves it."""
    answer = _plan_or_reason(request)
    return answer if isinstance(answer, ServingPlan) else None


def _plan_or_reason(request: PlanRequest) -> ServingPlan | str:
    """Return the plan of a changed request, or why there is none."""
    try:
        search = search_serving(request)
    except MeshwrightError as error:
        return error.message
    if search.answer.best is not None:
        return build_serving_plan(request, search, top=0)
    return "; ".join(["nothing serves the load so", *itertools.islice(_lacks(search.problem), 1)])


def _compared(plan: ServingPlan, text: str, request: PlanRequest) -> ServingChange:
    other = _plan_or_reason(request)
    if isinstance(other, str):
        return ServingChange(change=text, difference=other)
    more = other.num_devices - plan.num_devices
    now, then = plan.estimate.tokens_per_s_per_device, other.estimate.tokens_per_s_per_device
    words = [counted(abs(more), "device") + (" fewer" if more < 0 else " more")] if more else ["as many devices"]
    if other.serving.requests.rate is None and plan.serving.requests.rate is not None:
        words = [f"{other.estimate.requests_per_s:.3g} requests/s"]
    elif abs(then / now - 1) > 0.005:
        words.append(f"{100 * (then / now - 1):+.1f} % tokens/s a device")
    prices = plan.estimate.usd_per_hour, other.estimate.usd_per_hour
    if plan.serving.goal == "cost" and prices[0] is not None and prices[1] is not None:
        words.insert(0, f"{prices[1] - prices[0]:+.2f} USD/h")
    return ServingChange(
        change=text,
        pools=pools_title(other.pools),
        num_devices=other.num_devices,
        requests_per_s=other.estimate.requests_per_s,
        tokens_per_s_per_device=then,
        difference=", ".join(words),
    )


def _why_not(plan: ServingPlan, request: PlanRequest, question: str) -> ServingChange:
    assert isinstance(request.task, Serving)
    if question in MODES:
        if plan.mode == MODES[question]:
            raise ConfigError(f"the plan is {question}: {pools_title(plan.pools)}")
        text, changed = question, _in_mode(request, MODES[question])
    else:
        fields: Mapping[str, Any] = parse_assignments(question, Serving.fixable)
        changed = PlanRequest.create(plan.model, plan.cluster, plan.serving, fixed=fields, deadline=request.deadline)
        text = format_assignments(changed.fixed)
    row = _compared(plan, text, changed)
    if not row.pools and request.deadline.is_over:
        raise request.deadline.error(f"with {text}")
    return row


def explain_unserved(request: PlanRequest, search: ServingSearch) -> MeshwrightError:
    """Return the error for a load that no deployment serves within the limits: what lacks, and the least change that helps."""
    problem, cluster = search.problem, request.cluster
    if search.answer.ended == "deadline":
        return request.deadline.error(f"for {request.model.name}", f"{len(problem.served)} deployments simulated")
    devices = " and ".join(f"{group.num_devices} x {group.device.name}" for group in cluster.groups)
    details = list(_lacks(problem))
    if request.fixed:
        details.append(f"fixed: {format_assignments(request.fixed)}")
    changes = list(_helping(request, problem))
    details += [f"also serves it: {change}" for change in changes[1:]]
    return InfeasibleError(
        f"no deployment of {request.model.name} on {devices} serves the load within its limits",
        details=tuple(details),
        help=changes[0]
        if changes
        else "nothing that was tried serves it: fp8, more devices, a lower rate, looser limits"
        + (", until the time limit ended (--time-limit-s)" if request.deadline.is_over else ""),
    )


def _lacks(problem: ServingProblem) -> Iterator[str]:
    """Yield which limit or resource is short, with the numbers."""
    serving = problem.serving
    if not problem.space.kinds:
        layout, reason = min(problem.space.too_large, key=lambda entry: -entry[0].num_devices)
        yield f"memory: no layout of an instance fits; with {counted(layout.num_devices, 'device')}: {reason}"
        return
    for limit in serving.limits:
        lone_rate = max(
            (
                largest_rate(kind.model, mix_of(problem.serving, kind.prefixes), (limit,), fluid=True).requests_per_s
                for kind in problem.space.kinds
            ),
            default=0.0,
        )
        if not lone_rate:
            quickest = min(_quickest_s(problem, kind, limit) for kind in problem.space.kinds)
            yield (
                f"{limit.metric}: no layout has {format_seconds(limit.seconds)} even for a lone request; the quickest has "
                f"{format_seconds(quickest)}"
            )
            return
    tried = [served for served in problem.served if not served.meets_limits]
    for served in tried[:2]:
        broken = ", ".join(
            f"{limit.metric} {format_seconds(limit.simulated_s)} at p{100 * limit.quantile:g} of {format_seconds(limit.limit_s)}"
            for limit in served.limits
            if not limit.is_met
        )
        names = " + ".join(
            f"{count} x {counted(kind.size, 'device')}"
            for kind, count in zip(served.deployment.kinds, served.deployment.counts, strict=True)
        )
        yield f"simulated {names}: {broken or 'the queue grows'}"
    rate = serving.requests.rate
    if rate is not None and problem.families:
        best = max(problem.families, key=lambda family: family.best_split(fluid=False)[1])
        carried = best.best_split(fluid=False)[1]
        total = counted(problem.request.cluster.num_devices, "device")
        yield f"devices: {rate:,.6g} requests/s are asked for; {total} can carry about {carried:.3g} within the limits"


def _quickest_s(problem: ServingProblem, kind: InstanceKind, limit: LatencyLimit) -> float:
    """Return the seconds of a metric for a lone request on an instance."""
    point = operating_points(kind.model, mix_of(problem.serving, kind.prefixes), np.array([1e-6]), fluid=True)
    return float(point.quantile_s(limit.metric, limit.quantile)[0])


def _helping(request: PlanRequest, problem: ServingProblem) -> Iterator[str]:
    """Yield changes after which a deployment serves the load, each verified: types, devices, limits."""
    assert isinstance(request.task, Serving)
    serving = request.task
    kinds = problem.space.kinds
    is_unreachable = bool(kinds) and any(
        min(_quickest_s(problem, kind, limit) for kind in kinds) > limit.seconds for limit in serving.limits
    )
    for name, value in (("weights", "fp8"), ("cache", "fp8")):
        if getattr(serving, name) in (None, "bf16", "fp16") and (
            other := _searched(replace(request, task=serving.replace(**{name: value})))
        ):
            option = "--kv" if name == "cache" else "--weights"
            yield f"{option} {value}: {pools_title(other.pools)}, {counted(other.num_devices, 'device')}"
    if not kinds and may_lie_with_host(request.model, request.cluster, serving):
        placed = replace(request, task=serving.replace(experts_on_host=ExpertsOnHost()))
        if other := _searched(placed):
            yield f"--experts-on-host on: {pools_title(other.pools)}, {counted(other.num_devices, 'device')}"
    if not is_unreachable:
        for times in GROWTH:
            devices = times * request.cluster.num_devices
            cluster = grow_cluster(request.cluster, devices)
            if cluster is not None and (other := _searched(replace(request, cluster=cluster))):
                yield f"more devices: {pools_title(other.pools)}, {counted(other.num_devices, 'device')} of {devices}"
                break
        if serving.requests.rate is not None and (other := _searched(replace(request, task=_free_rate(serving)))):
            for part in (0.97, 0.9):
                rate = float(f"{part * other.estimate.requests_per_s:.2g}")
                lower = serving.replace(requests=serving.requests.replace(rate=rate))
                if rate < serving.requests.rate and (slower := _searched(replace(request, task=lower))):
                    yield f"--rate {rate:g}: {pools_title(slower.pools)}, {counted(slower.num_devices, 'device')}"
                    break
    for idx, limit in enumerate(serving.limits):
        quickest = min((_quickest_s(problem, kind, limit) for kind in problem.space.kinds), default=0.0)
        # Below the quickest a lone request takes nothing helps: begin there.
        first = max(1.0, 1.1 * quickest / limit.seconds)
        for factor in LOOSER:
            seconds = float(f"{first * factor * limit.seconds:.3g}")
            looser = limit.replace(seconds=seconds)
            if other := _searched(replace(request, task=_with_limit(serving, idx, looser))):
                text = f"--{limit.metric} {1000 * looser.seconds:g}ms@p{100 * limit.quantile:g}"
                yield f"{text}: {pools_title(other.pools)}, {counted(other.num_devices, 'device')}"
                break
