"""Families of deployments: one kind of instance, or one that prefills and one that decodes; how many instances a load takes.

Every figure comes twice from the steady state: as a bound (``fluid``: no waiting, nothing varies) and as an estimate.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...cost_models.serving.closed_loop import ClosedLoop
from ...cost_models.serving.instance_model import InstanceModel
from ...cost_models.serving.mix import Mix
from ...cost_models.serving.steady_state import (
    Largest,
    OperatingPoints,
    Prefill,
    largest_per_step,
    largest_rate,
    operating_points,
)
from ...schema.serving import LatencyLimit, Serving, ServingMode
from .checks import Deployment
from .kinds import InstanceKind
from .space import mix_of

CURVE = 64
"""Points of the curves for latency and for the front."""


class KindRates:
    """What an instance of a kind carries in each role, worked out once."""

    def __init__(self, kind: InstanceKind, serving: Serving) -> None:
        self.kind, self.serving, self.mix = kind, serving, mix_of(serving, kind.prefixes)
        self.fluid_mix = mix_of(serving, kind.loosest_prefixes)
        self._known: dict[tuple[str, bool, int], Largest] = {}
        self._of_class: dict[tuple[int, bool], float] = {}
        self._curves: dict[tuple[str, bool], OperatingPoints] = {}
        self._loops: dict[tuple[str, bool], ClosedLoop] = {}
        self._variants: dict[str, tuple[KindRates, ...]] = {}
        self._by_kind: dict[int, KindRates] = {}

    def limits(self, role: str) -> tuple[LatencyLimit, ...]:
        """Return the limits that one pool alone decides."""
        # The first token waits for a place where it is decoded, too; a request takes at least as long as it decodes.
        metrics = {"agg": ("ttft", "tpot", "e2e"), "prefill": ("ttft",), "decode": ("ttft", "tpot", "e2e")}[role]
        return tuple(limit for limit in self.serving.limits if limit.metric in metrics)

    def largest(self, role: str, *, fluid: bool, replicas: int = 1, sent_s_per_token: float = 0.0) -> Largest:
        """Return the largest rate of an instance; in a closed loop limits on the first token are the queue's."""
        # Pooled waiting changes little beyond a few replicas.
        near = 1 if fluid else 2 ** round(math.log2(max(replicas, 1)))
        sent_s = sent_s_per_token if role == "prefill" else 0.0
        key = (f"{role} {sent_s:.6e}", fluid, near)
        if key not in self._known:
            self._known[key] = largest_rate(
                self._model(fluid=fluid), self._mix(role, fluid=fluid), self.limits(role), fluid=fluid, replicas=near,
                prefill=role == "prefill", transfer_s_per_token=sent_s,
            )  # fmt: skip
        return self._known[key]

    def largest_of_class(self, only: int, *, fluid: bool) -> float:
        """Return the requests a second of a class by itself that an instance carries within the limits."""
        if (only, fluid) not in self._of_class:
            prefixes = self.kind.loosest_prefixes if fluid else self.kind.prefixes
            mix = mix_of(self.serving, prefixes, only)
            result = largest_rate(self._model(fluid=fluid), mix, self.limits("agg"), fluid=fluid)
            self._of_class[only, fluid] = result.requests_per_s
        return self._of_class[only, fluid]

    def curve(self, role: str, *, fluid: bool) -> OperatingPoints:
        """Return CURVE points of the instance in a role, at its best or as estimated."""
        if (role, fluid) not in self._curves:
            model, mix = self._model(fluid=fluid), self._mix(role, fluid=fluid)
            end = largest_per_step(model, mix)
            self._curves[role, fluid] = operating_points(model, mix, np.geomspace(2e-4 * end, end, CURVE), fluid=fluid)
        return self._curves[role, fluid]

    def loop(self, role: str, *, fluid: bool) -> ClosedLoop:
        """Return what the instance does with requests that are kept in flight, at its best or as estimated."""
        if (role, fluid) not in self._loops:
            model, mix = self._model(fluid=fluid), self._mix(role, fluid=fluid)
            self._loops[role, fluid] = ClosedLoop.of(model, mix, fluid=fluid)
        return self._loops[role, fluid]

    @cached_property
    def prefill_service_s(self) -> float:
        """Seconds of the mean request's first token without waiting."""
        return float(Prefill.of(self.kind.loosest, self.fluid_mix, fluid=True).points(np.zeros(1)).ttft_s[0])

    def _mix(self, role: str, *, fluid: bool) -> Mix:
        mix = self.fluid_mix if fluid else self.mix
        return mix.decoding if role == "decode" else mix

    def _model(self, *, fluid: bool) -> InstanceModel:
        return self.kind.loosest if fluid else self.kind.model

    def with_limits(self, role: str) -> tuple[KindRates, ...]:
        """Return the same instance under each of the limits that may be best in a role, the engine's own first."""
        if role not in self._variants:
            known = self.kind.variants
            max_rows = math.inf
            if role != "prefill" and any(limit.metric == "tpot" for limit in self.serving.limits):
                limited = self.largest(role, fluid=True)
                if limited.binds == "tpot" and limited.point is not None:
                    max_rows = float(limited.point.rows[0]) * self.kind.layout.pp
            self._variants[role] = tuple(
                self._by_kind.setdefault(id(kind), KindRates(kind, self.serving)) for kind in known(role, max_rows)
            )
        return self._variants[role]


@dataclass(frozen=True, eq=False)
class Family:
    """One kind of instance, or a kind that prefills and one that decodes."""

    rates: tuple[KindRates, ...]

    @property
    def kinds(self) -> tuple[InstanceKind, ...]:
        """Return the kinds of the pools."""
        return tuple(each.kind for each in self.rates)

    @property
    def is_disaggregated(self) -> bool:
        """Return whether another pool decodes."""
        return len(self.rates) > 1

    @cached_property
    def _lone(self) -> Deployment:
        """One instance of each."""
        return Deployment(self.kinds, (1,) * len(self.kinds))

    @property
    def mode(self) -> ServingMode:
        """Return how the requests are served."""
        return self._lone.mode

    @property
    def roles(self) -> tuple[str, ...]:
        """Return the roles of the pools."""
        return ("prefill", "decode") if self.is_disaggregated else ("agg",)

    @property
    def sent_s_per_token(self) -> float:
        """Return the seconds to send what a token of a prompt left."""
        return self._lone.sent_s_per_token

    def largest(self, pool: int, *, fluid: bool, replicas: int = 1) -> float:
        """Return the requests a second of an instance of a pool, also within what its link sends (E4)."""
        each, sent = self.rates[pool], self.sent_s_per_token
        result = each.largest(self.roles[pool], fluid=fluid, replicas=replicas, sent_s_per_token=sent)
        mean_prompt = float(each.mix.share @ each.mix.prompt_len)
        return min(result.requests_per_s, 1 / (sent * mean_prompt)) if sent else result.requests_per_s

    def with_limits(self) -> list[Family]:
        """Return the family under each of the limits of its pools, the engines' own first."""
        of_pools = (each.with_limits(role) for each, role in zip(self.rates, self.roles, strict=True))
        return [Family(rates) for rates in itertools.product(*of_pools)]

    def binds(self, pool: int) -> str:
        """Return what keeps an instance of a pool from more."""
        return self.rates[pool].largest(self.roles[pool], fluid=False, sent_s_per_token=self.sent_s_per_token).binds

    def fits(self, counts: tuple[int, ...]) -> bool:
        """Return whether the stock of each device pool has so many instances (E3)."""
        used: dict[int, int] = {}
        stock: dict[int, int] = {}
        for kind, count in zip(self.kinds, counts, strict=True):
            for part, size in kind.uses.items():
                used[part] = used.get(part, 0) + size * count
            stock |= kind.stocks
        return all(count > 0 for count in counts) and all(size <= stock[part] for part, size in used.items())

    def min_counts(self, rate: float, *, fluid: bool) -> tuple[int, ...] | None:
        """Return the instances that carry a rate within the limits; None where an instance carries nothing."""
        counts = []
        for pool in range(len(self.rates)):
            result = self.largest(pool, fluid=fluid)
            if not result:
                return None
            count = math.ceil(rate / result * (1 - 1e-9))
            if not fluid:  # many replicas wait less
                count = math.ceil(rate / self.largest(pool, fluid=False, replicas=count) * (1 - 1e-9))
            counts.append(max(count, 1))
        return tuple(counts)

    def counts_near(self, low: tuple[int, ...], high: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Yield counts from the bound's to a little above the estimate's, those that the stock has."""
        ranges = [range(a, max(a, b) + 2) for a, b in zip(low, high, strict=True)]
        every = [(n,) for n in ranges[0]] if len(ranges) == 1 else [(p, d) for p in ranges[0] for d in ranges[1]]
        yield from (counts for counts in every if self.fits(counts))

    def best_split(self, *, fluid: bool) -> tuple[tuple[int, ...], float]:
        """Return the counts that carry most on all devices, and their rate."""
        first = self.kinds[0]
        if not self.is_disaggregated:
            return (first.max_count,), first.max_count * self.largest(0, fluid=fluid, replicas=first.max_count)
        best: tuple[tuple[int, ...], float] = ((0, 0), 0.0)
        second = self.kinds[1]
        per_prefill, per_decode = self.largest(0, fluid=fluid), self.largest(1, fluid=fluid)
        for prefill in range(1, first.max_count + 1):
            decode = max(second.count_within({first.part: first.size * prefill}), 0)
            rate = min(prefill * per_prefill, decode * per_decode)
            if decode and rate > best[1]:
                best = (prefill, decode), rate
        return best

    def curve(self, *, fluid: bool) -> OperatingPoints:
        """Return points of an instance that makes tokens: the last pool's."""
        return self.rates[-1].curve(self.roles[-1], fluid=fluid)

    def in_closed_loop(self, counts: tuple[int, ...], concurrency: int, *, fluid: bool) -> tuple[float, float, float]:
        """Return requests a second, mean seconds of the first token and of a token, of a load that is kept in flight."""
        last, before_s, cap = self.rates[-1], 0.0, math.inf
        if self.is_disaggregated:
            mean_prompt = float(last.mix.share @ last.mix.prompt_len)
            before_s = self.rates[0].prefill_service_s + self.sent_s_per_token * mean_prompt
            cap = counts[0] * self.largest(0, fluid=True)
        loop, steps = last.loop(self.roles[-1], fluid=fluid), last.mix.decode_steps
        carried, first_s, token_s = loop.under(concurrency, more_first_s=before_s, decode_steps=steps, count=counts[-1])
        if carried > cap:
            carried, token_s = cap, loop.token_s_by_rate(cap / counts[-1])
        waiting_s = concurrency / carried - steps * token_s if carried else math.inf
        return carried, max(first_s, waiting_s), token_s
