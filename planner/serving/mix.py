"""Mixes of instances, on unlike devices or for unlike classes: which go to which, by a program over the steady state's seconds.

    s[w,e] = 1 / mu[w,e] * (1 / mu[e]) / (sum_w share_w / mu[w,e])

mu[w,e] is the largest rate of a class alone within the limits, mu[e] that of the load as it comes, so that the load on one kind
costs what the steady state says; a pool for one class alone takes 1 / mu[w,e]. The answer is simulated, each pool with its own
requests; one that fails is made again with longer seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...schema import ClusterSpec, LinkLevel, Offer
from ...schema.serving import ServingMode
from ...schema.units import FloatArray
from ...solvers.deployment import DeploymentInstance, solve
from .checks import Deployment
from .families import Family, KindRates

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
    def mode(self) -> ServingMode:
        """Return that instances prefill and decode."""
        return "agg"

    @property
    def roles(self) -> tuple[str, ...]:
        """Return the roles of the pools."""
        return ("agg",) * len(self.rates)

    @property
    def sent_s_per_token(self) -> float:
        """Return that nothing is sent."""
        return 0.0


@dataclass(frozen=True, eq=False)
class Column:
    """A pool that the program may open: a kind of instance for all classes, or (``only``) for one of them."""

    rates: KindRates
    only: int | None = None


def columns_of_each_type(rates: Sequence[KindRates], *, by_price: bool) -> list[Column]:
    """Return the kinds that carry most for their cost, of each type of device: of the load as it comes, of a class by size."""
    chosen: list[Column] = []
    serving = rates[0].serving
    apart = range(len(serving.requests.classes)) if len(serving.requests.classes) > 1 else ()
    for part in sorted({each.kind.part for each in rates}):
        of_part = [each for each in rates if each.kind.part == part]
        able = [each for each in of_part if _carried(each, by_price=by_price) > 0]
        best = sorted(able, key=lambda each: -_carried(each, by_price=by_price))[:KINDS_OF_A_TYPE]
        chosen += [
            Column(max(each.with_limits("agg"), key=lambda each: _carried(each, by_price=by_price))) for each in best
        ]
        for only in apart:
            best_of_size: dict[int, tuple[float, KindRates]] = {}
            for each in of_part:
                value, size = each.largest_of_class(only, fluid=False), each.kind.size
                if value > best_of_size.get(size, (0.0, each))[0]:
                    best_of_size[size] = value, each
            chosen += [
                Column(max(each.with_limits("agg"), key=lambda each: each.largest_of_class(only, fluid=False)), only)
                for _, each in best_of_size.values()
            ]
    return chosen


def _carried(each: KindRates, *, by_price: bool) -> float:
    """Return the requests a second for what an instance costs, by the estimate."""
    return each.largest("agg", fluid=False).requests_per_s / _cost(each, by_price=by_price)


def _cost(each: KindRates, *, by_price: bool) -> float:
    price = each.kind.usd_per_hour
    return price if by_price and price is not None else float(each.kind.size)


def program(columns: Sequence[Column], rate: float, *, by_price: bool, fluid: bool) -> DeploymentInstance:
    """Return the data of (E1) to (E5) for kinds that prefill and decode."""
    serving = columns[0].rates.serving
    classes = serving.requests.classes
    share = np.array([entry.share for entry in classes])
    seconds: FloatArray = np.full((len(classes), len(columns)), np.inf)
    for e, column in enumerate(columns):
        each = column.rates
        if column.only is not None:
            if carried := each.largest_of_class(column.only, fluid=fluid):
                seconds[column.only, e] = 1 / carried
            continue
        by_class = np.array([each.largest_of_class(only, fluid=fluid) for only in range(len(classes))])
        together = each.largest("agg", fluid=fluid).requests_per_s
        if together and np.all(by_class > 0):
            by_class = by_class * together * float((share / by_class).sum())
        seconds[by_class > 0, e] = 1 / by_class[by_class > 0]
    kinds = [column.rates.kind for column in columns]
    parts = sorted({kind.part for kind in kinds})
    stock = {kind.part: kind.stock for kind in kinds}
    return DeploymentInstance(
        rates=rate * share,
        seconds=seconds,
        cost=np.array([_cost(column.rates, by_price=by_price) for column in columns]),
        size=np.array([kind.size for kind in kinds]),
        device_type=np.array([parts.index(kind.part) for kind in kinds]),
        stock=np.array([float(stock[part]) for part in parts]),
        roles=tuple("agg" for _ in columns),
    )


def mixed_deployments(
    columns: Sequence[Column], rate: float, *, by_price: bool, below: float
) -> Iterator[tuple[Deployment, float]]:
    """Yield the cheapest mix by the steady state and a bound on all, then with longer seconds, as long as kinds are mixed.

    Args:
        below: what a mix may cost.
    """
    estimated = program(columns, rate, by_price=by_price, fluid=False)
    bound = solve(program(columns, rate, by_price=by_price, fluid=True)).bound
    single = solve(estimated).choice
    if single is not None and (single.instances > 0).sum() < 2:  # all to one pool is a family: keep classes apart
        columns = [column for column in columns if column.only is not None]
        if not columns:
            return
        estimated = program(columns, rate, by_price=by_price, fluid=False)
    for _ in range(MAX_TRIES):
        answer = solve(estimated)
        choice = answer.choice
        if choice is None or answer.objective > below * (1 + 1e-9):
            return
        chosen = np.flatnonzero(choice.instances > 0).tolist()
        if len(chosen) < 2:
            return
        shares = choice.shares[:, chosen]
        routes = tuple(tuple(row) for row in (shares / shares.sum(axis=1, keepdims=True)).tolist())
        counts = tuple(choice.instances[chosen].tolist())
        yield Deployment(tuple(columns[e].rates.kind for e in chosen), counts, routes), bound
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
