"""Write the answer of a search for a serving plan: pools, routes, estimates of the simulation, front, runner-ups and notes."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ...cost_models.coefficients import packaged_coefficients
from ...cost_models.hardware.host_memory import host_weight_rates
from ...cost_models.serving.attention_ffn import SplitCosts
from ...cost_models.serving.host_experts import resident_hits
from ...cost_models.serving.shares import EIGHTHS
from ...cost_models.serving.simulation import InstanceUse
from ...schema import Certificate
from ...schema.host_experts import experts_title
from ...schema.plan import Unit
from ...schema.serving import Pool, Requests, Role, ServingMode
from ...schema.serving_plan import (
    PoolEstimate,
    Route,
    ServingAlternative,
    ServingEstimate,
    ServingFrontPoint,
    ServingPlan,
    SplitUse,
    layout_title,
    pools_title,
    share_title,
)
from ...schema.units import GB, counted, format_bytes, format_percent, format_seconds
from ..request import PlanRequest
from ..tasks.serving import ServingProblem, ServingSearch
from .bound import resource_bound
from .checks import MAX_CV, Deployment, Served
from .families import Family, KindRates
from .fine_tuning import fine_tuning_of
from .kinds import InstanceBase, InstanceKind
from .mix import Mixture

MAX_FRONT = 12
ORDER: tuple[ServingMode, ...] = ("agg", "disagg", "shared", "afd")
"""Of runner-ups that are estimated alike, the simplest first."""

FRONT_REPLICAS = 4
"""Instances that prefill side by side: more wait less."""

UNIT_OF: dict[str, Unit] = {
    "gpus": "devices", "cost": "usd_per_hour", "throughput": "tokens_per_s_per_device", "latency": "s",
}  # fmt: skip


def build_serving_plan(request: PlanRequest, search: ServingSearch, *, top: int) -> ServingPlan:
    """Return the plan of a search that found a deployment."""
    problem, answer = search.problem, search.answer
    assert answer.best is not None
    served, serving = answer.best.candidate, search.problem.serving
    sign = -1 if problem.goal == "throughput" else 1
    by_resources = resource_bound(problem)
    bound = sign * answer.bound
    if by_resources is not None:
        bound = max(bound, by_resources) if sign > 0 else min(bound, by_resources)
    objective = sign * answer.best.objective
    pools = pools_of(served.deployment)
    return ServingPlan(
        model=request.model,
        cluster=request.cluster,
        serving=serving.replace(weights=pools[-1].weights, cache=pools[-1].cache),
        pools=pools,
        routes=routes_of(len(serving.requests.classes), served.deployment),
        estimate=estimate_of(problem, served),
        resource_bound=by_resources,
        search=Certificate.proved(
            objective=objective,
            bound=min(bound, objective) if sign > 0 else max(bound, objective),
            unit=UNIT_OF[problem.goal],
            finished=answer.is_proved,
            evaluated=len(problem.served),
            pruned=max(len(problem.families) - answer.evaluated, 0),
            search_s=answer.solve_s,
        ),
        front=front_of(problem),
        alternatives=tuple(_alternatives(problem, served, top, is_proved=answer.is_proved)),
        notes=tuple(_notes(request, problem, served)),
        provenance=request.provenance(),
    )


def pools_of(deployment: Deployment) -> tuple[Pool, ...]:
    """Return the pools of a deployment."""
    roles: tuple[Role, ...] = tuple("agg" for _ in deployment.kinds)
    if deployment.is_disaggregated:
        roles = ("prefill", "decode")
    pairs = zip(roles, deployment.kinds, deployment.counts, strict=True)
    return tuple(kind.pool(role, count) for role, kind, count in pairs)


def routes_of(num_classes: int, deployment: Deployment) -> tuple[Route, ...]:
    """Return the routes of classes, which all go the same way where the deployment does not say."""
    if deployment.routes is not None:
        shares = ((w, pool, share) for w, row in enumerate(deployment.routes) for pool, share in enumerate(row))
        return tuple(Route(request_class=w, pool=pool, share=share) for w, pool, share in shares if share > 0)
    second = 1 if deployment.is_disaggregated else None
    return tuple(Route(request_class=idx, pool=0, decode_pool=second, share=1.0) for idx in range(num_classes))


def estimate_of(problem: ServingProblem, served: Served) -> ServingEstimate:
    """Return the figures of a simulated deployment."""
    deployment = served.deployment
    overall = served.estimate()
    assert overall is not None
    family = family_of(problem, deployment)
    by_class = [served.estimate(idx) for idx in range(len(served.serving.requests.classes))]
    largest = [
        count * family.largest(pool, fluid=False, replicas=count) for pool, count in enumerate(deployment.counts)
    ]
    price = deployment.usd_per_hour
    mean_prompt = float(problem.mix.share @ problem.mix.prompt_len)
    return ServingEstimate(
        tokens_per_s=served.tokens_per_s,
        num_devices=deployment.num_devices,
        tokens_per_s_per_device=served.tokens_per_s / deployment.num_devices,
        tokens_per_s_per_user=1 / overall.tpot.mean_s if overall.tpot.mean_s else 1 / overall.ttft.mean_s,
        requests_per_s=served.requests_per_s,
        max_requests_per_s=max(min(largest) if deployment.routes is None else 0.0, served.requests_per_s),
        usd_per_hour=price,
        usd_per_million_tokens=None if price is None else price / served.tokens_per_s / 3600 * 1e6,
        transfer_s=deployment.sent_s_per_token * mean_prompt,
        overall=overall,
        classes=tuple(entry for entry in by_class if entry is not None) if len(by_class) > 1 else (),
        limits=served.limits,
        pools=tuple(
            _pool_estimate(problem, served, family, pool, uses) for pool, uses in enumerate(served.result.pools)
        ),
        fine_tuning=fine_tuning_of(problem, served),
    )


def _under_limits(problem: ServingProblem, kind: InstanceKind) -> Iterator[KindRates]:
    same = (each for each in problem.rates if each.kind.base is kind.base)
    yield from (one for each in same for one in (each, *each.with_limits("agg")) if one.kind is kind)


def family_of(problem: ServingProblem, deployment: Deployment) -> Family:
    """Return the family of a deployment."""
    if deployment.routes is not None:
        return Mixture(tuple(next(_under_limits(problem, kind)) for kind in deployment.kinds))
    every = (
        limited
        for family in problem.families
        if _bases(family.kinds) == _bases(deployment.kinds)
        for limited in (family, *family.with_limits())
    )
    return next(family for family in every if all(map(operator.is_, family.kinds, deployment.kinds)))


def _pool_estimate(
    problem: ServingProblem, served: Served, family: Family, pool: int, uses: Sequence[InstanceUse]
) -> PoolEstimate:
    kind, count = served.deployment.kinds[pool], served.deployment.counts[pool]
    duration = max(sum(use.seconds for use in uses), 1e-9)
    steps = max(sum(use.steps for use in uses), 1)
    ranks = kind.layout.attention_dp
    rows = sum(use.decode_tokens for use in uses) / steps / ranks
    prompt_steps, prompt_s = sum(use.prompt_steps for use in uses), sum(use.prompt_busy_s for use in uses)
    prompts = sum(use.prompt_tokens for use in uses) / max(prompt_steps if kind.shared else steps, 1) / ranks
    mix = family.rates[pool].mix
    context = mix.cached_steps / mix.decode_steps if mix.decode_steps else 0.0
    ends = prompts / mix.new_tokens if mix.new_tokens else 0.0
    # Of steps a part has prompts; where they run at once, none of those that decode.
    part = 0.0 if kind.shared else prompt_steps / steps
    with_prompts = np.array([0.0, 1.0]) / max(part, 1e-9)
    parts = kind.steps(served.deployment.num_devices).parts(
        rows, rows * context, prompts * with_prompts, mix.mean_context, prompts=ends * with_prompts
    )
    seconds = {name: float(np.broadcast_to(value, 2) @ (1 - part, part)) for name, value in parts.items()}
    mean_s = kind.model.tokens_per_step * sum(use.busy_s for use in uses) / steps
    if (total := sum(seconds.values())) > mean_s:
        # The step of mean rows may be longer than the mean step: rows reach fewer new experts the more they are.
        seconds = {name: value * mean_s / total for name, value in seconds.items()}
    seconds["overhead"] = max(mean_s - sum(seconds.values()), 0.0)
    routes, classes = served.deployment.routes, served.serving.requests.classes
    share = 1.0 if routes is None else sum(c.share * row[pool] for c, row in zip(classes, routes, strict=True))
    per_instance = served.requests_per_s * share / count
    largest = max(family.largest(pool, fluid=False, replicas=count), per_instance)
    is_full = per_instance > 0.8 * largest
    memory = kind.memory
    used = memory.weight_bytes + memory.workspace_bytes + memory.graph_bytes + memory.context_bytes + memory.cache_bytes
    return PoolEstimate(
        requests_per_s=per_instance,
        decode_rows=rows,
        prefill_tokens=prompts,
        step_s=max(mean_s, 1e-9),
        step_parts_s=seconds,  # type: ignore[arg-type]
        binds=family.binds(pool) if is_full else "rate",
        cache_bytes=round(memory.cache_bytes),
        cache_use=sum(use.cache_s for use in uses) / duration,
        weight_bytes=round(memory.weight_bytes),
        free_bytes=round(memory.device_bytes - used),
        utilisation=min(sum(use.busy_s for use in uses) / duration, 1.0),
        prefill_step_s=prompt_s / prompt_steps if kind.shared and prompt_steps else None,
        prefill_utilisation=min(prompt_s / duration, 1.0) if kind.shared else None,
        largest_requests_per_s=max(largest, 1e-9),
        split=_split_use(kind, rows, rows * context, mean_s),
    )


def _split_use(kind: InstanceKind, rows: float, cached: float, mean_s: float) -> SplitUse | None:
    """Return what either group of devices and the link between them do of a mean step."""
    if not isinstance(kind.step, SplitCosts):
        return None
    attention, feed_forward, link = (float(seconds) / max(mean_s, 1e-9) for seconds in kind.step.busy(rows, cached))
    return SplitUse(
        attention=attention, feed_forward=feed_forward, link=link,
        weight_bytes=round(kind.memory.ffn_weight_bytes), free_bytes=round(kind.memory.ffn_free_bytes),
    )  # fmt: skip


def front_of(problem: ServingProblem) -> tuple[ServingFrontPoint, ...]:
    """Return what no other deployment beats in tokens a second of a user and of a device, by the steady state.

    Pools of two kinds stand in the ratio in which neither waits for the other.
    """
    points: list[tuple[Any, ...]] = []
    mix = problem.mix
    tokens = problem.tokens
    if not mix.decode_steps:
        return ()
    for family in problem.families:
        last = family.rates[-1]
        curve = last.decode_curve if family.is_disaggregated else last.curve
        devices = float(last.kind.size)
        rates = curve.requests_per_s
        sizes = devices + 0 * rates
        if family.is_disaggregated:
            per_prefill = family.largest(0, fluid=False, replicas=FRONT_REPLICAS)
            if not per_prefill:
                continue
            sizes = sizes + rates / per_prefill * family.kinds[0].size
        keeps = curve.load < 0.98
        columns = (1 / curve.step_s, rates * tokens / sizes, rates)
        points += [(*(float(column[idx]) for column in columns), family) for idx in np.flatnonzero(keeps)[::4].tolist()]
    points.sort(key=lambda point: (-point[0], -point[1]))
    front: list[ServingFrontPoint] = []
    best = 0.0
    for user, device, rate, family in points:
        if device > best * 1.02:
            best = device
            front.append(
                ServingFrontPoint(
                    mode=family.mode,
                    pools=kinds_title(family.kinds),
                    tokens_per_s_per_user=user,
                    tokens_per_s_per_device=device,
                    requests_per_s=rate,
                )
            )
    step = max(len(front) / MAX_FRONT, 1)
    return tuple(front[int(idx * step)] for idx in range(min(len(front), MAX_FRONT)))


def kinds_title(kinds: Sequence[InstanceKind]) -> str:
    """Return the layouts of a family in a line."""
    roles = ("prefill", "decode") if len(kinds) > 1 else ("",)
    return " + ".join(
        f"{role} {share_title(kind.prefill_eighths)}{layout_title(kind.layout)}{experts_title(kind.experts_on_host)}".strip()
        for role, kind in zip(roles, kinds, strict=True)
    )


def _alternatives(
    problem: ServingProblem, served: Served, top: int, *, is_proved: bool
) -> Iterator[ServingAlternative]:
    """Yield runner-ups: first what was simulated and failed or lost, then families by the estimate, of both modes."""
    chosen = served.deployment
    simulated = {id(served)}
    rows: list[tuple[float, ServingAlternative]] = []
    for other in problem.served:
        if id(other) in simulated or (
            other.deployment.kinds == chosen.kinds and other.deployment.counts == chosen.counts
        ):
            continue
        broken = [limit for limit in other.limits if not limit.is_met]
        reason = "; ".join(
            f"simulated {limit.metric} {format_seconds(limit.simulated_s)} of {format_seconds(limit.limit_s)}"
            for limit in broken
        ) or ("the queue grows" if not other.keeps_up else "simulated: not better")
        reason += _unlike_limits(other.deployment, chosen)
        rows.append((0.0, _alternative(problem, other.deployment, other.requests_per_s, other.tokens_per_s, reason)))
    yield from (entry for _, entry in rows[: max(top // 2, 1) if top else 0])
    remaining = top - min(len(rows), max(top // 2, 1))
    requests, estimated = problem.serving.requests, []
    for family in problem.families:
        if (
            _bases(family.kinds) == _bases(chosen.kinds)
            or (guess := _estimated(family, requests, chosen.num_devices)) is None
        ):
            continue
        counts, carried = guess
        deployment = Deployment(family.kinds, counts)
        per = 1 if requests.concurrency is None else deployment.num_devices
        value = problem.cost(family, counts) if requests.rate is not None else -carried / per
        fits = "" if family.fits(counts) else f"needs {counted(deployment.num_devices, 'device')} by the estimate"
        estimated.append((value, ORDER.index(family.mode), deployment, carried, fits))
    estimated.sort(key=lambda entry: (entry[0], entry[1]))
    other_mode = [
        next(entry for entry in estimated if entry[1] == mode)
        for mode in dict.fromkeys(entry[1] for entry in estimated)
        if ORDER[mode] != chosen.mode
    ]
    for _, _, deployment, carried, reason in [*other_mode, *(e for e in estimated if e not in other_mode)][
        : max(remaining, 0)
    ]:
        more = _more_than(problem, deployment, chosen)
        tried = "not better by the estimate" if is_proved else "not simulated: the search ended early"
        why = reason or (f"{more} more by the estimate" if more else tried)
        yield _alternative(problem, deployment, carried, carried * problem.tokens, why)


def _more_than(problem: ServingProblem, deployment: Deployment, chosen: Deployment) -> str:
    """Return what a deployment takes beyond the chosen one, in devices or money; empty where it does not."""
    if problem.goal == "cost":
        usd = (deployment.usd_per_hour or 0.0) - (chosen.usd_per_hour or 0.0)
        return f"{usd:.2f} USD/h" if usd >= 0.005 else ""
    more = deployment.num_devices - chosen.num_devices
    return counted(more, "device") if more > 0 else ""


def _bases(kinds: Sequence[InstanceKind]) -> list[InstanceBase]:
    return [kind.base for kind in kinds]


def _unlike_limits(deployment: Deployment, chosen: Deployment) -> str:
    """Return the limits of the same instances that are not the chosen ones': `` with max_batch 64``."""
    if _bases(deployment.kinds) != _bases(chosen.kinds):
        return ""
    pairs = [(ours.limits, other.limits) for ours, other in zip(deployment.kinds, chosen.kinds, strict=True)]
    names = ("max_batch", "max_batched_tokens", "chunk")
    unlike = [f"{name} {getattr(a, name)}" for a, b in pairs for name in names if getattr(a, name) != getattr(b, name)]
    return f" with {', '.join(dict.fromkeys(unlike))}" if unlike else ""


def _estimated(family: Family, requests: Requests, num_devices: int) -> tuple[tuple[int, ...], float] | None:
    """Return the counts of a family that the load takes by the estimate, and the requests a second that they serve; None: no such.

    Of a load that is kept in flight, those on about as many devices as the plan has.
    """
    if requests.rate is not None:
        counts = family.min_counts(requests.rate, fluid=False)
        return None if counts is None else (counts, requests.rate)
    counts, carried = family.best_split(fluid=False)
    if not all(counts):
        return None
    if requests.concurrency is None:
        return counts, carried
    whole = sum(count * kind.size for count, kind in zip(counts, family.kinds, strict=True))
    counts = tuple(max(round(count * num_devices / whole), 1) for count in counts)
    return counts, family.in_closed_loop(counts, requests.concurrency, fluid=False)[0]


def _alternative(
    problem: ServingProblem, deployment: Deployment, requests_per_s: float, tokens_per_s: float, reason: str
) -> ServingAlternative:
    names_devices = bool(problem.request.cluster.parts)
    return ServingAlternative(
        mode=deployment.mode,
        pools=pools_title(pools_of(deployment), names_devices=names_devices),
        num_devices=deployment.num_devices,
        requests_per_s=requests_per_s,
        tokens_per_s_per_device=tokens_per_s / deployment.num_devices,
        usd_per_hour=deployment.usd_per_hour,
        reason=reason,
    )


def _notes(request: PlanRequest, problem: ServingProblem, served: Served) -> Iterator[str]:
    requests = problem.serving.requests
    if problem.serving.objective == "throughput" and requests.rate is not None:
        yield "a rate is given: most tokens a second and device are those of the fewest devices"
    if not problem.serving.limits:
        yield "no limit on latency is given: requests may wait as long as the load lets them (--ttft, --tpot)"
    if requests.trace is not None and requests.concurrency is None:
        yield (
            f"lengths are drawn from the {requests.trace.num_requests:,} requests of {requests.trace.path}, arrivals with their "
            f"variation (cv {requests.arrival_cv:.2g}); meshwright replay serves them as recorded"
        )
    if requests.concurrency is None and requests.arrival_cv > MAX_CV:
        yield f"arrivals are drawn with cv {MAX_CV:g}, so that bursts are milder than those of cv {requests.arrival_cv:.2g}"
    yield from _on_measured(problem, served)
    if served.deployment.routes is not None:
        yield "classes go to instances of their own; the bound on such mixes takes their seconds to add up (E2)"
    if (drafting := served.deployment.kinds[-1].speculate) is not None:
        tokens = drafting.tokens_per_step(drafting.draft_tokens or 1)
        yield f"a step gives {tokens:.3g} tokens of a draft of {drafting.draft_tokens}: as was asked for, not measured here"
    elif problem.serving.speculate is not None:
        yield "no tokens are drafted: under this load a step of more rows costs more than the accepted tokens save"
    if (adapters := problem.serving.adapters) is not None:
        yield (
            f"the {adapters.count:,} adapters of rank {adapters.rank} are all in the devices' memory; none is fetched from the host"
        )
    yield from _on_prefixes(problem, served)
    yield from _on_experts(problem, served)
    if (shared := served.deployment.kinds[0].shared) is not None:
        yield (
            f"prompts have {shared.prefill_eighths} of {EIGHTHS} parts of the multiprocessors at any time, rows that decode the "
            "others; what both draw of the bandwidth is shared between them"
        )
    if served.deployment.is_disaggregated:
        yield "keys and values of a prompt are sent when it ends, over the outermost link; the first token waits for them"
    if served.deployment.mode == "afd":
        yield (
            f"no release of {problem.serving.engine} has attention and feed-forward parts on devices of their own: its scheduler "
            "and overheads are taken as they are, and nothing exports or runs this plan"
        )
    yield from _on_steps(problem, served)
    if problem.space.too_large:
        yield f"{counted(len(problem.space.too_large), 'layout')} of an instance do not fit the memory of a device"


def _on_measured(problem: ServingProblem, served: Served) -> Iterator[str]:
    """Yield how likely a limit on TPOT holds when it is measured, by how far predictions of load tests were off."""
    if problem.serving.engine == "meshwright":
        return
    if any(kind.experts_on_host is not None for kind in served.deployment.kinds):
        yield "steps with experts on the host are compared with one engine's published rates, not with load tests (docs/serving.md)"
        return
    ratios = packaged_coefficients().value("serving.measured_over_predicted.tpot")
    levels = np.arange(1, len(ratios) + 1) / (len(ratios) + 1)
    for limit in served.limits:
        if limit.metric == "tpot" and limit.simulated_s:
            ratio = limit.limit_s / limit.simulated_s
            share = format_percent(float(np.interp(ratio, ratios, levels)), 0)
            yield (
                f"tpot is predicted as {format_seconds(limit.simulated_s)}, {ratio:.2f} times which is the limit: {share} of the "
                "load tests that were predicted measured no more than that (a tighter --tpot is safer)"
            )


def _on_prefixes(problem: ServingProblem, served: Served) -> Iterator[str]:
    """Yield where the prefixes of the load lie, and what that takes."""
    kind, stored = served.deployment.kinds[0], problem.serving.requests.stored_tokens
    if kind.prefixes == "device":
        share = stored / (kind.limits.cache_blocks * kind.limits.block_size)
        yield f"prefixes of {stored:,} tokens lie in every instance's cache, {format_percent(share)} of it"
    elif kind.prefixes == "none":
        yield f"prefixes of {stored:,} tokens are computed with every prompt: no place for them serves the load better"
    elif kind.prefixes is not None:
        seconds = kind.model.fetch_s_per_token * float(problem.mix.share @ problem.mix.prefix_len)
        size = format_bytes(kind.size * kind.pool("agg", 1).host_prefix_bytes)
        where = "the host's memory" if kind.prefixes == "host" else "the host's drives"
        if kind.prefixes == "host" and any(
            group.host_memory_bytes is None for group in kind.step.instance.cluster.groups
        ):
            where += " (how much it has the cluster does not say)"
        yield (
            f"prefixes of {stored:,} tokens lie in {where}, {size} an instance; a request copies its own in "
            f"{format_seconds(seconds)}"
        )


def _on_experts(problem: ServingProblem, served: Served) -> Iterator[str]:
    """Yield which experts lie with the host, what that takes there, and how often rows meet the others."""
    if problem.serving.experts_on_host is None:
        return
    for kind in dict.fromkeys(served.deployment.kinds):
        placed = kind.experts_on_host
        if placed is None or placed.share is None:
            yield f"all experts are on the devices of {layout_title(kind.layout)}: none with the host serve the load better"
            continue
        instance = kind.step.instance
        hits = resident_hits(placed.share, float(instance.coefficients["serving"]["popularity_cv"]))
        groups = instance.cluster.groups
        size = format_bytes(kind.size * kind.step.host_weight_bytes)
        known = (
            "" if all(group.host_memory_bytes for group in groups) else " (how much it has the cluster does not say)"
        )
        met = f"of the rows {format_percent(hits)} meet the others, by the usual spread of loads"
        yield (
            f"{format_percent(placed.share)} of each layer's experts, the least visited, lie in the host's memory, {size} an "
            f"instance{known}; {met}"
            if placed.share < 1
            else f"all routed experts lie in the host's memory, {size} an instance{known}"
        )
        is_known = all(group.host_bandwidth_bytes_per_s and group.host_flops_per_s for group in groups)
        if placed.by != "copy" and not is_known:
            rates = host_weight_rates(instance.cluster, instance.coefficients)
            read, computed = (rate * instance.cluster.largest_node for rate in rates)
            yield (
                f"the host's processors are taken to read {read / GB:.4g} GB/s of weights and to compute {computed / 1e12:.3g} "
                "TFLOP/s a node, as is usual beside such links: host_bandwidth_bytes_per_s and host_flops_per_s of a cluster "
                "file say others"
            )


def _on_steps(problem: ServingProblem, served: Served) -> Iterator[str]:
    """Yield where the seconds of steps come from, of our own engine."""
    devices, unmeasured = served.deployment.num_devices, problem.space.unmeasured
    for kind in served.deployment.kinds:
        if kind.measured is not None:
            fit = kind.measured.steps(devices)
            yield (
                f"steps of {layout_title(kind.layout)} are measured on this machine's engine: {fit.num_measured} of them, "
                f"{format_percent(fit.error)} from their fit in the mean"
            )
    if unmeasured:
        yield f"not measured, and not planned: {', '.join(map(layout_title, unmeasured))}"
    if problem.serving.engine == "meshwright" and served.deployment.kinds[0].measured is None:
        yield "steps are computed: meshwright profile --model MODEL --serve measures those of this machine"
