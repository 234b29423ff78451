"""Serving, request by request: arrivals, routing, engine instances step by step, transfers of caches, what each one saw.

The one simulation that plans, replays and tests use. Open loop: requests arrive by themselves; closed loop: a number of them is
kept in flight, each followed by the next of the list. A request passes

    client -> front end (tokenise, one after the other) -> copy of its prefix, if it lies with the host -> queue
           -> prompt -> tokens -> client
                                              disaggregated: -> transfer of its cache, one by one from each instance -> queue

and a disaggregated one has its first token when the instance that decodes has taken its cache. Nothing is drawn at random.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from ...schema.errors import ConfigError
from ...schema.serving import EngineLimits, PrefixTier
from ...schema.units import FloatArray, IntArray
from .dispatch import step_kernels
from .engine import EngineProfile
from .instance import Instance, InstanceUse
from .rank import RequestStates
from .shared_instance import SharedInstance, SharedTables
from .shares import SharedSteps
from .step import StepCosts
from .step_table import EngineTable, StepParts, table_of

__all__ = ["EnginePool", "InstanceUse", "RequestTable", "SimulatedRequests", "simulate"]

Router = Literal["round_robin", "least_loaded"]
_SEND, _QUEUE, _STEP, _LEAVE = range(4)


@dataclass(frozen=True)
class RequestTable:
    """Requests in order of arrival, arrays [N]; arrival_s is not read in a closed loop, prefix_len is shared with others."""

    arrival_s: FloatArray
    prompt_len: IntArray
    output_len: IntArray
    prefix_len: IntArray

    @classmethod
    def of(
        cls, prompt_len: ArrayLike, output_len: ArrayLike, arrival_s: ArrayLike = 0.0, prefix_len: ArrayLike = 0
    ) -> RequestTable:
        """Return requests of these arrays or numbers, sorted by arrival."""
        arrival, prompt, output, prefix = np.broadcast_arrays(arrival_s, prompt_len, output_len, prefix_len)
        order = np.argsort(arrival, kind="stable")
        return cls(
            arrival[order].astype(np.float64), *(values[order].astype(np.int64) for values in (prompt, output, prefix))
        )

    def __len__(self) -> int:
        return len(self.arrival_s)


@dataclass(frozen=True)
class EnginePool:
    """Equal engine instances of a simulation.

    Attributes:
        limits: of an attention rank; ranks: attention ranks of an instance; lanes: pipeline stages, each with steps of its own.
        prefixes: where those of requests lie; on the device the limits' cache is what they leave of it.
        fetch_s_per_token: of one that is copied from the host.
        shared: tables of prompts that run at once with rows that decode, whose steps ``table`` has; None: they share steps.
    """

    table: EngineTable
    profile: EngineProfile
    limits: EngineLimits
    replicas: int = 1
    ranks: int = 1
    lanes: int = 1
    prefixes: PrefixTier = "device"
    fetch_s_per_token: float = 0.0
    shared: SharedTables | None = None

    @classmethod
    def of(
        cls, step: StepParts | SharedSteps, profile: EngineProfile, limits: EngineLimits, *, replicas: int = 1, ranks: int = 1,
        lanes: int = 1, num_kernels: int | None = None, prefixes: PrefixTier = "device", fetch_s_per_token: float = 0.0,
    ) -> EnginePool:  # fmt: skip
        """Return the pool of an engine's costs; lanes share the cache, the batch and the link to the host of an instance.

        ``num_kernels``: of a step that no graph holds; None: those of the model (`step_kernels`).
        """
        both = step if isinstance(step, SharedSteps) else None
        step = step.decode if isinstance(step, SharedSteps) else step
        if num_kernels is None:
            of = step.instance if isinstance(step, StepCosts) else None
            num_kernels = step_kernels(of.model, of.weights, of.experts) if of else 0
            num_kernels *= getattr(step, "micro_batches", 1)
        if lanes > 1:
            step = step.filled() if isinstance(step, StepCosts) else step
            limits = limits.replace(
                max_batch=max(limits.max_batch // lanes, 1), cache_blocks=max(limits.cache_blocks // lanes, 1)
            )
        table = table_of(step, profile, limits, num_kernels=num_kernels)
        shared = None if both is None else SharedTables.of(both, profile, limits, num_kernels=num_kernels)
        return cls(table, profile, limits, replicas, ranks, lanes, prefixes, lanes * fetch_s_per_token, shared)


@dataclass(frozen=True)
class SimulatedRequests:
    """What every request saw, arrays [N] in order of arrival, and what the instances did.

    Attributes:
        ttft_s: sent to first token; tpot_s: mean of the tokens after it (0 where there is none); e2e_s: sent to last token.
        queue_s: waiting for its first step, of the pool that has its prompt.
        preemptions: times that a request lost its cache.
        pools: the instances of each pool, lanes apart, over the time that was looked at; duration_s: first request sent to last
            one answered.
        mean_in_flight: requests, averaged over time.
    """

    sent_s: FloatArray
    ttft_s: FloatArray
    tpot_s: FloatArray
    e2e_s: FloatArray
    queue_s: FloatArray
    output_len: IntArray
    preemptions: IntArray
    pools: tuple[tuple[InstanceUse, ...], ...]
    duration_s: float
    mean_in_flight: float

    @property
    def output_tokens_per_s(self) -> float:
        """Return the generated tokens over the duration."""
        return float(self.output_len.sum() / self.duration_s) if self.duration_s else 0.0


def simulate(
    pools: EnginePool | Sequence[EnginePool],
    requests: RequestTable,
    *,
    concurrency: int | None = None,
    transfer_s_per_token: float = 0.0,
    router: Router = "least_loaded",
    looks: tuple[int, int] | None = None,
) -> SimulatedRequests:
    """Serve requests; a second pool decodes what the first one has prefilled.

    Args:
        looks: what instances do is from the time at which the first of these requests is sent to that of the second; None: all.

    Raises:
        ConfigError: a request that no cache holds.
    """
    stages = [pools] if isinstance(pools, EnginePool) else list(pools)
    return _Simulation(stages, requests, concurrency, transfer_s_per_token, router, looks).run()


class _Simulation:
    """The events: a request is sent, reaches a queue, steps end, a request leaves."""

    def __init__(
        self,
        pools: list[EnginePool],
        requests: RequestTable,
        concurrency: int | None,
        transfer_s: float,
        router: Router,
        looks: tuple[int, int] | None,
    ) -> None:
        self.requests, self.concurrency, self.transfer_s, self.router = requests, concurrency, transfer_s, router
        count = len(requests)
        self.states = RequestStates(
            prompt=requests.prompt_len.tolist(), output=requests.output_len.tolist(), prefix=requests.prefix_len.tolist(),
            has_cache=[False] * count, made=[0] * count, queued_s=[0.0] * count, admitted_s=[0.0] * count,
            first_s=[0.0] * count, preemptions=[0] * count,
        )  # fmt: skip
        self.pools = pools
        for idx, pool in enumerate(pools):
            _check_cache(pool, requests, decodes=idx == len(pools) - 1)
        self.instances = [
            [_instance(pool, self.states, hands_over=idx < len(pools) - 1) for _ in range(pool.replicas * pool.lanes)]
            for idx, pool in enumerate(pools)
        ]
        self.turns = [0] * len(pools)
        self.looks, self.seen = looks or (), list[list[list[InstanceUse]]]()
        self.events: list[tuple[float, int, int, int, int, int]] = []
        self.sequence = 0
        self.sent_s, self.answered_s = [0.0] * count, [0.0] * count
        self.next_request = 0

    def run(self) -> SimulatedRequests:
        """Run to the last answer."""
        count = len(self.requests)
        self._send_first(count)
        begin = before = self.events[0][0] if self.events else 0.0
        in_flight, integral, answered = 0, 0.0, 0
        while answered < count:
            now, _, kind, pool, which, detail = heapq.heappop(self.events)
            if kind == _STEP:
                instance = self.instances[pool][which]
                if instance.version == detail:
                    self._end_steps(pool, which, instance, now)
            elif kind == _QUEUE:
                instance = self.instances[pool][which]
                if instance.queue(detail, now):
                    self._push(instance.end_s, _STEP, pool, which, instance.version)
            else:
                integral, before = integral + in_flight * (now - before), now
                if kind == _SEND:
                    in_flight += 1
                    if detail in self.looks:
                        self.seen.append([[instance.look(now) for instance in pool] for pool in self.instances])
                    self._send(detail, now)
                else:
                    in_flight, answered = in_flight - 1, answered + 1
                    self.answered_s[detail] = now
                    if self.next_request < count:
                        self._push(now, _SEND, 0, 0, self.next_request)
                        self.next_request += 1
        return self._result(begin, before, integral)

    def _send_first(self, count: int) -> None:
        """Schedule what arrives by itself: everything, or the first request of each slot of a closed loop."""
        self.next_request = count if self.concurrency is None else min(self.concurrency, count)
        arrivals = self.requests.arrival_s.tolist() if self.concurrency is None else [0.0] * self.next_request
        for request, arrival in enumerate(arrivals):
            self._push(arrival, _SEND, 0, 0, request)

    def _push(self, when: float, kind: int, pool: int, which: int, detail: int) -> None:
        """Add an event; detail: of steps the version of their stretch, else the request."""
        self.sequence += 1
        heapq.heappush(self.events, (when, self.sequence, kind, pool, which, detail))

    def _choose(self, pool: int) -> int:
        """Return the instance that a request goes to, and count it there."""
        instances = self.instances[pool]
        if self.router == "least_loaded":
            which = min(range(len(instances)), key=lambda idx: instances[idx].load)
        else:
            which = self.turns[pool] % len(instances)
            self.turns[pool] += 1
        instances[which].load += 1
        return which

    def _send(self, request: int, now: float) -> None:
        """Pass a request through the front end of an instance."""
        self.sent_s[request] = now
        which = self._choose(0)
        instance, cost = self.instances[0][which], self.pools[0].profile.request
        ready = max(instance.front_free_s, now + cost.way_s) + cost.fixed_s + cost.token_s * self.states.prompt[request]
        instance.front_free_s = ready
        if self.pools[0].prefixes in ("host", "storage") and (prefix := self.states.prefix[request]):
            ready = max(ready, instance.host_links_free_s[0]) + self.pools[0].fetch_s_per_token * prefix
            heapq.heapreplace(instance.host_links_free_s, ready)
        self._push(ready, _QUEUE, 0, which, request)

    def _end_steps(self, pool: int, which: int, instance: Instance, now: float) -> None:
        """Apply the steps that ended, pass on what they completed, and start the next ones."""
        ended, states = instance.finish(), self.states
        last = pool == len(self.pools) - 1
        for request in ended:
            if last or states.made[request] >= states.output[request]:
                self._push(now + self.pools[pool].profile.request.way_s, _LEAVE, pool, which, request)
                continue
            instance.link_free_s = max(instance.link_free_s, now) + self.transfer_s * states.prompt[request]
            states.has_cache[request] = True
            self._push(instance.link_free_s, _QUEUE, pool + 1, self._choose(pool + 1), request)
        if instance.start(now):
            self._push(instance.end_s, _STEP, pool, which, instance.version)

    def _result(self, begin: float, end: float, integral: float) -> SimulatedRequests:
        """Return the arrays, as clients see them: an answer's tokens are on their way for as long as its end."""
        states, sent, answered = self.states, np.array(self.sent_s), np.array(self.answered_s)
        first = np.array(states.first_s) + self.pools[-1].profile.request.way_s
        after = np.maximum(np.array(states.output) - 1, 0)
        duration = end - begin
        uses = [[instance.close(end) for instance in pool] for pool in self.instances]
        if self.seen:
            looks = (*self.seen, uses)[:2]
            uses = [[*map(InstanceUse.between, *of_pool)] for of_pool in zip(uses, *looks, strict=True)]
        return SimulatedRequests(
            sent_s=sent,
            ttft_s=first - sent,
            tpot_s=np.where(after > 0, (answered - first) / np.maximum(after, 1), 0.0),
            e2e_s=answered - sent,
            queue_s=np.array(states.admitted_s) - np.array(states.queued_s),
            output_len=np.array(states.output, dtype=np.int64),
            preemptions=np.array(states.preemptions, dtype=np.int64),
            pools=tuple(map(tuple, uses)),
            duration_s=duration,
            mean_in_flight=integral / duration if duration else 0.0,
        )


def _instance(pool: EnginePool, states: RequestStates, *, hands_over: bool) -> Instance:
    """Return an instance of a pool, idle."""
    settings = pool.table, pool.profile, pool.limits, states
    if pool.shared is not None:
        return SharedInstance(*settings, ranks=pool.ranks, shared=pool.shared, prefixes=pool.prefixes)
    return Instance(*settings, ranks=pool.ranks, hands_over=hands_over, prefixes=pool.prefixes)


def _check_cache(pool: EnginePool, requests: RequestTable, *, decodes: bool) -> None:
    """Raise an error where a request alone overfills the cache, or what prefixes leave of it."""
    limits = pool.limits
    tokens = requests.prompt_len + (requests.output_len - 1 if decodes else 0)
    if pool.prefixes == "device":
        tokens = tokens - requests.prefix_len // limits.block_size * limits.block_size
    room = limits.cache_blocks * limits.block_size
    if len(tokens) and (longest := int(tokens.max())) > room:
        raise ConfigError(
            f"a request of {longest} tokens is longer than the cache of an attention rank, {room} tokens",
            help="give the instance more devices (tp), a cache of fp8, or leave longer requests out",
        )
