"""Other deployments than a serving plan's: the front of tokens a second of a user and of a device, and runner-ups with why not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ...schema.host_experts import experts_title
from ...schema.serving import Requests, ServingMode
from ...schema.serving_plan import (
    ServingAlternative,
    ServingFrontPoint,
    layout_title,
    pools_title,
    share_title,
)
from ...schema.units import counted, format_seconds
from ..tasks.serving import ServingProblem
from .checks import Deployment, Served
from .families import Family
from .kinds import InstanceKind

MAX_FRONT = 12
ORDER: tuple[ServingMode, ...] = ("agg", "disagg", "shared", "afd")
"""Of runner-ups that are estimated alike, the simplest first."""

FRONT_REPLICAS = 4
"""Instances that prefill side by side: more wait less."""


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
        curve = family.curve(fluid=False)
        rates = curve.requests_per_s
        sizes = np.full(rates.shape, float(family.kinds[-1].size))
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


def alternatives(problem: ServingProblem, served: Served, top: int, *, is_proved: bool) -> Iterator[ServingAlternative]:
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
        if [kind.base for kind in family.kinds] == chosen.bases or (
            guess := _estimated(family, requests, chosen.num_devices)
        ) is None:
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


def _unlike_limits(deployment: Deployment, chosen: Deployment) -> str:
    """Return the limits of the same instances that are not the chosen ones': `` with max_batch 64``."""
    if deployment.bases != chosen.bases:
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
    num_all = sum(count * kind.size for count, kind in zip(counts, family.kinds, strict=True))
    counts = tuple(max(round(count * num_devices / num_all), 1) for count in counts)
    return counts, family.in_closed_loop(counts, requests.concurrency, fluid=False)[0]


def _alternative(
    problem: ServingProblem, deployment: Deployment, requests_per_s: float, tokens_per_s: float, reason: str
) -> ServingAlternative:
    names_devices = bool(problem.request.cluster.parts)
    return ServingAlternative(
        mode=deployment.mode,
        pools=pools_title(deployment.pools, names_devices=names_devices),
        num_devices=deployment.num_devices,
        requests_per_s=requests_per_s,
        tokens_per_s_per_device=tokens_per_s / deployment.num_devices,
        usd_per_hour=deployment.usd_per_hour,
        reason=reason,
    )
