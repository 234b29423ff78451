"""Mixes of instances on unlike devices: which classes go to which, by a program of whole numbers over the steady state's seconds.

    s[w,e] = 1 / mu[w,e] * (1 / mu[e]) / (sum_w share_w / mu[w,e])

mu[w,e] is the largest rate of a class alone within the limits, mu[e] that of the load as it comes, so that the load on one kind
costs what the steady state says. The answer is simulated, each pool with its own requests; one that fails is made again with longer
seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...cost_models.serving.steady_state import largest_rate
from ...schema import ClusterSpec, LinkLevel, Offer
from ...schema.units import FloatArray
from ...solvers.deployment import DeploymentInstance, solve
from .checks import Deployment
from .families import Family, KindRates
from .space import mix_of

KINDS_OF_A_TYPE = 1
"""Of each type of device, the kinds that carry most for their cost enter the program."""

LONGER = 1.04
"""Seconds are made longer by this factor where the simulation fails, MAX_TRIES times."""

MAX_TRIES = 4


@dataclass(frozen=True, eq=False)
class Mixture(Family):
    """Kinds of instances side by side that prefill and decode; each class has a share of every pool."""

    @property
    def is_disaggregated(self) -> bool:
        """Return that no pool only decodes."""
        return False

    @property
    def roles(self) -> tuple[str, ...]:
        """Return the roles of the pools."""
        return ("agg",) * len(self.rates)

    @property
    def sent_s_per_token(self) -> float:
        """Return that nothing is sent."""
        return 0.0


def kinds_of_each_type(rates: Sequence[KindRates], *, by_price: bool) -> list[KindRates]:
    """Return the kinds that carry most for their cost, of each type of device."""
    chosen: list[KindRates] = []
    for part in sorted({each.kind.part for each in rates}):
        carried = [
            (each.largest("agg", fluid=False).requests_per_s / _cost(each, by_price=by_price), idx)
            for idx, each in enumerate(rates)
            if each.kind.part == part
        ]
        best = sorted((-value, idx) for value, idx in carried if value > 0)[:KINDS_OF_A_TYPE]
        chosen += [rates[idx] for _, idx in best]
    return chosen


def _cost(each: KindRates, *, by_price: bool) -> float:
    price = each.kind.usd_per_hour
    return price if by_price and price is not None else float(each.kind.size)


def program(rates: Sequence[KindRates], rate: float, *, by_price: bool, fluid: bool) -> DeploymentInstance:
    """Return the data of (E1) to (E5) for kinds that prefill and decode."""
    serving = rates[0].serving
    classes = serving.requests.classes
    share = np.array([entry.share for entry in classes])
    seconds: FloatArray = np.full((len(classes), len(rates)), np.inf)
    mixes = [mix_of(serving, w) for w in range(len(classes))]
    for e, each in enumerate(rates):
        carried = [largest_rate(each.kind.model, mix, each.limits("agg"), fluid=fluid).requests_per_s for mix in mixes]
        by_class = np.array(carried)
        together = each.largest("agg", fluid=fluid).requests_per_s
        if together and np.all(by_class > 0):
            by_class = by_class * together * float((share / by_class).sum())
        seconds[by_class > 0, e] = 1 / by_class[by_class > 0]
    parts = sorted({each.kind.part for each in rates})
    stock = {each.kind.part: each.kind.stock for each in rates}
    return DeploymentInstance(
        rates=rate * share,
        seconds=seconds,
        cost=np.array([_cost(each, by_price=by_price) for each in rates]),
        size=np.array([each.kind.size for each in rates]),
        device_type=np.array([parts.index(each.kind.part) for each in rates]),
        stock=np.array([float(stock[part]) for part in parts]),
        roles=tuple("agg" for _ in rates),
    )


def mixed_deployments(rates: Sequence[KindRates], rate: float, *, by_price: bool) -> Iterator[tuple[Deployment, float]]:
    """Yield the cheapest mix by the steady state and a bound on all, then with longer seconds, as long as kinds are mixed."""
    estimated = program(rates, rate, by_price=by_price, fluid=False)
    bound = solve(program(rates, rate, by_price=by_price, fluid=True)).bound
    for _ in range(MAX_TRIES):
        choice = solve(estimated).choice
        if choice is None:
            return
        chosen = np.flatnonzero(choice.instances > 0).tolist()
        if len(chosen) < 2:
            return
        shares = choice.shares[:, chosen]
        routes = tuple(tuple(row) for row in (shares / shares.sum(axis=1, keepdims=True)).tolist())
        counts = tuple(choice.instances[chosen].tolist())
        yield Deployment(tuple(rates[e].kind for e in chosen), counts, routes), bound
        estimated = replace(estimated, seconds=LONGER * estimated.seconds)


def cluster_of_offers(offers: Sequence[Offer]) -> ClusterSpec:
    """Return all that can be rented as one cluster: groups of nodes for each offer, joined by the slowest of their links."""
    if len(offers) == 1:
        return offers[0].cluster
    groups = [
        group.replace(levels=offer.cluster.levels if len(offer.cluster.groups) == 1 else group.levels)
        for offer in offers
        for group in offer.cluster.groups
    ]
    slowest = min((offer.cluster.levels[-1].link for offer in offers), key=lambda link: link.bandwidth_bytes_per_s)
    total = sum(group.num_devices for group in groups)
    return ClusterSpec(
        name=" and ".join(offer.name for offer in offers),
        groups=tuple(groups),
        levels=(LinkLevel(link=slowest, domain_size=total),),
    )
