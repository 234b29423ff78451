"""A deployment served request by request: the simulation that every printed percentile of a serving plan comes from.

Requests before the engines are warm, and those after which the load ebbs, are simulated and not counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Literal

import numpy as np

from ...cost_models.serving.instance import InstanceUse
from ...cost_models.serving.simulation import EnginePool, RequestTable, SimulatedRequests, simulate
from ...schema import ConfigError
from ...schema.requests_file import read_trace
from ...schema.serving import LatencyLimit, LatencyMetric, Pool, Requests, Role, Serving, ServingMode
from ...schema.serving_plan import ClassEstimate, LimitEstimate, Percentiles
from ...schema.units import BoolArray, FloatArray, IntArray
from .kinds import InstanceBase, InstanceKind
from .limits import Touched

MIN_COUNTED, MAX_COUNTED = 800, 4000
"""Requests over which percentiles are taken."""

LIVES = 3.0
"""Counted requests over those in flight at a time: what was met is then not one long wave of the load."""

WARM_LIVES = 2.5
"""Requests before the counted ones over those in flight: lives lengthen as the instances fill."""

MAX_CV = 4.0
"""Arrivals are drawn from gamma distributions up to this variation; recorded ones may have more."""

GROWTH = 0.02
"""What is to be done may grow by this part of the requests that are counted, and by twice what chance makes of it."""

NUM_LOOKS = 32
"""Times at which what is to be done is added up: a line through them has little of waves, which two ends would have all of."""

BATCHES = 20
"""Parts of the counted requests whose means tell how much neighbours are alike (batch means)."""

CONFIDENCE = 1.959964
"""Of a normal distribution: 95 %."""


@dataclass(frozen=True)
class Deployment:
    """Pools of instances: one that prefills and decodes, or one for each; with ``routes`` several that do both.

    Attributes:
        routes: of each class the share of every pool.
    """

    kinds: tuple[InstanceKind, ...]
    counts: tuple[int, ...]
    routes: tuple[tuple[float, ...], ...] | None = None

    @property
    def is_disaggregated(self) -> bool:
        """Return whether another pool decodes."""
        return len(self.kinds) > 1 and self.routes is None

    @property
    def pools(self) -> tuple[Pool, ...]:
        """Return its pools as a plan has them."""
        alike: tuple[Role, ...] = ("agg",)
        roles = ("prefill", "decode") if self.is_disaggregated else alike * len(self.kinds)
        return tuple(kind.pool(role, count) for role, kind, count in zip(roles, self.kinds, self.counts, strict=True))

    @property
    def bases(self) -> list[InstanceBase]:
        """Return its kinds without their batch limits."""
        return [kind.base for kind in self.kinds]

    @property
    def mode(self) -> ServingMode:
        """Return how the requests are served."""
        if self.kinds[-1].micro_batches is not None:
            return "afd"
        if self.is_disaggregated:
            return "disagg"
        return "agg" if self.kinds[0].shared is None else "shared"

    @property
    def num_devices(self) -> int:
        """Return the devices of all instances."""
        return sum(kind.size * count for kind, count in zip(self.kinds, self.counts, strict=True))

    @property
    def usd_per_hour(self) -> float | None:
        """Return the price of all instances."""
        prices = [(kind.usd_per_hour, count) for kind, count in zip(self.kinds, self.counts, strict=True)]
        return None if any(p is None for p, _ in prices) else sum((p or 0) * count for p, count in prices)

    @property
    def sent_s_per_token(self) -> float:
        """Return the seconds to send what a token of a prompt left: at the pace of the side whose device has more of it."""
        return max(kind.sent_s_per_token for kind in self.kinds) if self.is_disaggregated else 0.0


@dataclass(frozen=True)
class Served:
    """What a simulation of a deployment gave.

    Attributes:
        result: of the first pool alone, where prompts were late in it.
        counted: requests that are counted, of ``result``; classes: of all of them.
        requests_per_s: that ended; keeps_up: as many as arrived.
    """

    deployment: Deployment
    serving: Serving
    result: SimulatedRequests
    counted: BoolArray
    classes: IntArray
    requests_per_s: float
    tokens_per_s: float
    keeps_up: bool

    def values(self, metric: LatencyMetric | Literal["queue"], request_class: int | None = None) -> FloatArray:
        """Return the seconds of the counted requests, of TPOT those with more than one token."""
        mask = self.counted if request_class is None else self.counted & (self.classes == request_class)
        if metric == "tpot":
            mask = mask & (self.result.output_len > 1)
        values: FloatArray = getattr(self.result, f"{metric}_s")
        return values[mask]

    @cached_property
    def limits(self) -> tuple[LimitEstimate, ...]:
        """Return each limit with what was simulated."""
        return tuple(self._limit(limit) for limit in self.serving.limits)

    @cached_property
    def meets_limits(self) -> bool:
        """Return whether every limit is met at its quantile, and no queue grows."""
        return self.keeps_up and all(limit.is_met for limit in self.limits)

    @cached_property
    def touched(self) -> tuple[Touched, ...]:
        """Return what the instances of each pool that was simulated reached of their limits."""
        return tuple(Touched.of(uses) for uses in self.result.pools)

    def _limit(self, limit: LatencyLimit) -> LimitEstimate:
        values = self.values(limit.metric)
        if not len(values):
            return LimitEstimate(
                metric=limit.metric, quantile=limit.quantile, limit_s=limit.seconds, simulated_s=0, within=1,
                within_low=1, within_high=1,
            )  # fmt: skip
        share = float((values <= limit.seconds).mean())
        low, high = wilson(share, independent(values <= limit.seconds))
        return LimitEstimate(
            metric=limit.metric, quantile=limit.quantile, limit_s=limit.seconds,
            simulated_s=float(np.quantile(values, limit.quantile)), within=share, within_low=low, within_high=high,
        )  # fmt: skip

    def estimate(self, request_class: int | None = None) -> ClassEstimate | None:
        """Return the latencies of all requests or of a class; None where none of it was simulated."""
        mask = self.counted if request_class is None else self.counted & (self.classes == request_class)
        if not mask.any():
            return None
        within = np.ones(int(mask.sum()), dtype=bool)
        for limit in self.serving.limits:
            within &= getattr(self.result, f"{limit.metric}_s")[mask] <= limit.seconds
        share = float(mask.sum() / self.counted.sum())
        load = self.serving.requests.classes
        return ClassEstimate(
            requests=None if request_class is None else load[request_class],
            num_simulated=int(mask.sum()),
            ttft=percentiles(self.values("ttft", request_class)),
            tpot=percentiles(self.values("tpot", request_class)),
            e2e=percentiles(self.values("e2e", request_class)),
            queue=percentiles(self.values("queue", request_class)),
            goodput_requests_per_s=self.requests_per_s * share * float(within.mean()),
            attainment=float(within.mean()),
        )


def independent(within: BoolArray) -> float:
    """Return how many independent requests tell as much of a share as these [N], in order, whose neighbours share one queue.

    From the variance of the means of BATCHES parts: share (1 - share) / (their variance / BATCHES), at most N.
    """
    count, share = len(within), float(within.mean())
    variance = (
        float(np.var([part.mean() for part in np.array_split(within, min(BATCHES, count))], ddof=1))
        if count > 1
        else 0.0
    )
    return min(float(count), max(share * (1 - share) / (variance / BATCHES), 1.0)) if variance else float(count)


def wilson(share: float, count: float) -> tuple[float, float]:
    """Return the 95 % interval of a share of so many independent requests (Wilson, JASA 22, 1927)."""
    z = CONFIDENCE
    centre = share + z * z / (2 * count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    total = 1 + z * z / count
    return max((centre - half) / total, 0.0), min((centre + half) / total, 1.0)


def percentiles(values: FloatArray) -> Percentiles:
    """Return mean and percentiles; zero of nothing."""
    if not len(values):
        return Percentiles(mean_s=0, p50_s=0, p90_s=0, p99_s=0)
    p50, p90, p99 = np.quantile(values, (0.5, 0.9, 0.99)).tolist()
    return Percentiles(mean_s=float(values.mean()), p50_s=p50, p90_s=p90, p99_s=p99)


def serve(
    deployment: Deployment, serving: Serving, *, rate: float | None, in_flight: float, longest_s: float = 0.0
) -> Served:
    """Simulate a deployment under the load, at this rate or in a closed loop.

    Args:
        rate: requests a second; None: the load's concurrency is kept.
        in_flight: about how many requests there are at a time.
        longest_s: of a request of the longest class: engines are warm after one and a half of them.
    """
    counted = int(np.clip(LIVES * in_flight, MIN_COUNTED, MAX_COUNTED))
    warm = int(min(max(in_flight * WARM_LIVES, 1.5 * (rate or 0.0) * longest_s), 4 * MAX_COUNTED)) + 20
    after = int(min(in_flight, 4 * MAX_COUNTED)) if rate is not None else 0
    concurrency = serving.requests.concurrency if rate is None else None
    if concurrency is not None:
        warm = 2 * concurrency  # as load generators do: the first burst is gone then
        after = concurrency
    sizes = (warm, counted, after)
    table, classes = drawn_requests(serving.requests, sizes, 1.0 if rate is None else rate)
    pairs, devices = zip(deployment.kinds, deployment.counts, strict=True), deployment.num_devices
    pools = [kind.engine_pool(count, devices) for kind, count in pairs]
    mask, looks = np.zeros(len(table), dtype=bool), (warm, warm + counted)
    mask[slice(*looks)] = True

    def served(result: SimulatedRequests) -> Served:
        per_s, keeps_up = _ended_per_s(result, mask, rate, concurrency or 1)
        # At a rate the mean is the load's; in a closed loop that of the requests whose seconds gave the rate.
        tokens = per_s * (
            serving.requests.mean_output_len if rate is not None else float(table.output_len[mask].mean())
        )
        return Served(deployment, serving, result, mask, classes, per_s, tokens, keeps_up)

    if deployment.routes is not None:
        return served(_serve_apart(pools, table, classes, deployment.routes, looks))
    if deployment.is_disaggregated and concurrency is None and serving.limits:
        # What decodes holds up no prompt: where prompts alone are late, nothing else needs to be simulated.
        prompts = served(simulate(pools[0], replace(table, output_len=np.ones_like(table.output_len))))
        if not all(limit.is_met for limit in prompts.limits):
            return prompts
    sent_s = deployment.sent_s_per_token
    return served(simulate(pools, table, concurrency=concurrency, transfer_s_per_token=sent_s, looks=looks))


def _serve_apart(
    pools: list[EnginePool],
    table: RequestTable,
    classes: IntArray,
    routes: tuple[tuple[float, ...], ...],
    looks: tuple[int, int],
) -> SimulatedRequests:
    """Simulate pools side by side, each with its requests: those of a class are dealt as its shares say."""
    pool_of = np.zeros(len(table), dtype=np.int64)
    for idx, shares in enumerate(routes):
        members = np.flatnonzero(classes == idx)
        # A golden-ratio sequence deals every stretch of requests in proportion.
        dealt = (np.arange(1, len(members) + 1) * 0.6180339887498949) % 1.0
        pool_of[members] = np.searchsorted(np.cumsum(shares), dealt).clip(0, len(shares) - 1)
    columns = ("sent_s", "ttft_s", "tpot_s", "e2e_s", "queue_s", "output_len", "preemptions")
    merged: dict[str, Any] = {}
    uses: list[Any] = []
    for idx, pool in enumerate(pools):
        members = np.flatnonzero(pool_of == idx)
        if not len(members):
            uses.append((InstanceUse(),))
            continue
        lengths = (part[members] for part in (table.prompt_len, table.output_len, table.prefix_len))
        first, last = np.searchsorted(members, looks).tolist()
        result = simulate(pool, RequestTable(table.arrival_s[members], *lengths), looks=(first, last))
        uses.append(result.pools[0])
        for name in columns:
            values = getattr(result, name)
            merged.setdefault(name, np.zeros(len(table), dtype=values.dtype))[members] = values
    ends = merged["sent_s"] + merged["e2e_s"]
    duration = float(ends.max() - merged["sent_s"].min())
    in_flight = float(merged["e2e_s"].sum()) / duration
    return SimulatedRequests(**merged, pools=tuple(uses), duration_s=duration, mean_in_flight=in_flight)


def _ended_per_s(
    result: SimulatedRequests, mask: BoolArray, rate: float | None, concurrency: int
) -> tuple[float, bool]:
    """Return the requests that end in a second while the counted ones do, and whether they keep up with those that arrive.

    Where they do, as many end as arrive: what is counted would differ by what chance leaves in flight.
    """
    if rate is not None:
        begin, end = result.sent_s[mask][[0, -1]]
        undone = _undone(result, np.linspace(begin, end, NUM_LOOKS))
        growth = np.polyfit(np.linspace(0, 1, NUM_LOOKS), undone, 1)[0]
        if growth <= GROWTH * int(mask.sum()) + 2 * math.sqrt(undone.mean() + 1):
            return rate, True
        ends = result.sent_s + result.e2e_s
        return float(((ends > begin) & (ends <= end)).sum()) / max(end - begin, 1e-9), False
    # By Little's law: where all come in waves, those that end in a stretch of time depend on how many waves it holds.
    return concurrency / float(result.e2e_s[mask].mean()), True


def _undone(result: SimulatedRequests, times_s: FloatArray) -> FloatArray:
    """Return what is to be done at some times [T], in requests: each as one up to its first token, then as the part of it to come.

    Requests of one length end in waves, between which the number in flight tells nothing of a queue.
    """
    to_come_s = result.sent_s + result.e2e_s - times_s[:, None]
    parts = np.clip(to_come_s / np.maximum(result.e2e_s - result.ttft_s, 1e-9), 0, 1)
    return np.asarray((parts * (result.sent_s <= times_s[:, None])).sum(axis=1))


@lru_cache(maxsize=8)
def _drawn(requests: Requests, sizes: tuple[int, ...]) -> tuple[FloatArray, IntArray, IntArray]:
    """Return gaps, lengths [count, 3] and classes of requests, the same for every deployment; gaps of each part have mean one."""
    rng, count, cv = np.random.default_rng(20), sum(sizes), min(requests.arrival_cv, MAX_CV)
    parts = [rng.gamma(1 / cv**2, cv**2, size) if cv > 0 else np.ones(size) for size in sizes if size]
    gaps = np.concatenate([part / part.mean() for part in parts])
    known = np.array([(c.prompt_len, c.output_len, c.prefix_len) for c in requests.classes], dtype=np.int64)
    recorded = _recorded(requests)
    if recorded is not None:
        lengths = recorded[rng.integers(0, len(recorded), count)]
        apart = np.log(lengths[:, None, :2]) - np.log(known[None, :, :2])
        return gaps, lengths, np.asarray((apart**2).sum(axis=2).argmin(axis=1))
    # Each class as often as its share says, in an order without pattern.
    shares = np.cumsum([entry.share for entry in requests.classes])
    classes = np.searchsorted(shares, (np.arange(count) + 0.5) / count).clip(0, len(shares) - 1)
    classes = rng.permutation(classes)
    return gaps, known[classes], classes


def _recorded(requests: Requests) -> IntArray | None:
    if requests.trace is None:
        return None
    try:
        trace = read_trace(requests.trace.path)
    except ConfigError:
        return None
    if trace.file.sha256 != requests.trace.sha256:
        return None
    return np.stack([trace.prompt_len, trace.output_len, trace.prefix_len], axis=1)


def drawn_requests(requests: Requests, sizes: tuple[int, ...], rate: float) -> tuple[RequestTable, IntArray]:
    """Return requests as the load has them, in parts of so many, lengths of a recorded one as recorded, and the class of each."""
    gaps, lengths, classes = _drawn(requests, sizes)
    return RequestTable(np.cumsum(gaps) / rate, lengths[:, 0], lengths[:, 1], lengths[:, 2]), classes
