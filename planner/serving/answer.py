"""Write the answer of a search for a serving plan: pools, routes, and the estimates of its simulation."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

import numpy as np

from ...cost_models.serving.attention_ffn import SplitCosts
from ...cost_models.serving.simulation import InstanceUse
from ...schema import Certificate
from ...schema.plan import Unit
from ...schema.serving_plan import (
    PoolEstimate,
    Route,
    ServingEstimate,
    ServingPlan,
    SplitUse,
)
from ..request import PlanRequest
from ..tasks.serving import ServingProblem, ServingSearch
from .bound import resource_bound
from .checks import Deployment, Served
from .families import Family, KindRates
from .fine_tuning import fine_tuning_of
from .kinds import InstanceKind
from .mix import Mixture
from .notes import notes_of
from .runner_ups import alternatives, front_of

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
    pools = served.deployment.pools
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
        alternatives=tuple(alternatives(problem, served, top, is_proved=answer.is_proved)),
        notes=tuple(notes_of(request, problem, served)),
        provenance=request.provenance(),
    )


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
        if [kind.base for kind in family.kinds] == deployment.bases
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
