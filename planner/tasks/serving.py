"""Serving: which engine instances, how many, and how requests go through them (docs/serving.md).

A node is a family of deployments (planner/serving/families.py) with the counts that are still open, or one deployment; its bound is
the steady state without waiting, its leaf a simulation that meets the limits. More instances of a family never serve worse, so that
a simulation that fails closes all deployments with fewer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from ...schema import ConfigError
from ...schema.serving import Serving
from ...solvers.branch_and_bound import Answer, Leaf, Node, Search, Step, Stop
from ..request import PlanRequest
from ..serving.checks import Deployment, Served, serve
from ..serving.families import Family, KindRates
from ..serving.mix import Mixture, columns_of_each_type, mixed_deployments
from ..serving.space import ServingSpace, mix_of

Goal = Literal["gpus", "cost", "throughput", "latency"]

MAX_SIMULATED = 24
"""Simulations of one search; what is open then is in the gap."""

MAX_RATES = 6
RATE_STEP = 0.01
"""The largest rate of a deployment is simulated to this part of it."""

NEAR = 1.35
"""Estimates of loads with unlike prompts are so much too low, of one pool (docs/serving.md)."""

AFTER = 10**6
"""In a key: after all instances of any size."""

GAP = 0.02
"""Searches for most tokens or least latency end there: a simulation of some thousand requests does not tell less apart."""


@dataclass(frozen=True)
class Open:
    """What a node keeps: a family and the counts that may still be best, with their costs, cheapest first.

    Attributes:
        has_limits: the batch limits of its pools are chosen; else they are opened next (planner/serving/limits.py).
    """

    family: Family
    counts: tuple[tuple[float, tuple[int, ...]], ...]
    tried: bool = False
    has_limits: bool = False


class ServingProblem:
    """Deployments of a request.

    Attributes:
        served: simulations, in order.
    """

    def __init__(self, request: PlanRequest) -> None:
        assert isinstance(request.task, Serving)
        self.request, self.serving = request, request.task
        self.goal: Goal = goal_of(self.serving)
        self.space = ServingSpace.build(request, self.serving)
        self.mix = mix_of(self.serving)
        self.rates, self.split_rates = (
            [KindRates(kind, self.serving) for kind in kinds] for kinds in (self.space.kinds, self.space.split)
        )
        self._unshared = [each for each in self.rates if each.kind.shared is None]
        self.served: list[Served] = []
        self.families = list(self._families())

    def _families(self) -> Iterator[Family]:
        if "agg" in self.serving.modes:
            yield from (Family((each,)) for each in self._unshared)
        if "shared" in self.serving.modes and self.mix.decode_steps:
            yield from (Family((each,)) for each in self.rates if each.kind.shared is not None)
        if "disagg" in self.serving.modes and self.mix.decode_steps:
            yield from (Family(pair) for pair in itertools.product(self._unshared, self._unshared))
        if "afd" in self.serving.modes and self.mix.decode_steps:
            yield from (Family(pair) for pair in itertools.product(self._unshared, self.split_rates))

    # Objectives: all are minimised.

    def cost(self, family: Family, counts: tuple[int, ...]) -> float:
        """Return devices or dollars an hour."""
        deployment = Deployment(family.kinds, counts)
        if self.goal != "cost":
            return float(deployment.num_devices)
        assert deployment.usd_per_hour is not None
        return deployment.usd_per_hour

    def roots(self) -> Step[Open, Served]:
        """Return a node for every family, or for every deployment where the load is fixed and any number serves it."""
        return Step([node for family in self.families for node in self._roots_of(family)], self._mixes())

    def _roots_of(self, family: Family) -> list[Node[Open]]:
        """Return the nodes of a family; where none may meet the limits on tokens as the engine is, those of its batch limits."""
        if nodes := self._nodes(family):
            return nodes
        limited = [node for each in family.with_limits() for node in self._nodes(each)]
        return [replace(node, state=replace(node.state, has_limits=True)) for node in limited]

    def _nodes(self, family: Family) -> list[Node[Open]]:
        make = {
            "gpus": self._by_count,
            "cost": self._by_count,
            "throughput": self._by_rate,
            "latency": self._by_latency,
        }
        return make[self.goal](family)

    def _with_limits(self, node: Node[Open]) -> Step[Open, Served]:
        """Return a node for each of the batch limits of its family, with the counts of the node."""
        counts, nodes = {entry for _, entry in node.state.counts}, []
        for idx, family in enumerate(node.state.family.with_limits()):
            for child in self._nodes(family):
                remaining = tuple(entry for entry in child.state.counts if entry[1] in counts)
                if remaining:
                    state = replace(child.state, counts=remaining, has_limits=True)
                    # Of what is estimated alike, the engines' own limits are tried first.
                    key = (*child.key[:2], AFTER * (idx > 0), *child.key[2:])
                    nodes.append(Node(max(node.bound, child.bound, remaining[0][0]), state, key))
        return Step(nodes)

    def _mixes(self) -> list[Leaf[Served]]:
        """Return a mix of instances, on unlike devices or for unlike classes, that meets the limits, where a rate is given."""
        requests, by_price = self.serving.requests, self.goal == "cost"
        rate, is_mixed = requests.rate, len({kind.part for kind in self.space.kinds}) > 1
        may_differ = is_mixed or len(requests.classes) > 1
        if not may_differ or rate is None or self.goal not in ("gpus", "cost") or "agg" not in self.serving.modes:
            return []
        columns = columns_of_each_type(self._unshared, by_price=by_price) if self._unshared else []
        # On one kind of device a mix is simulated where its estimate is near every family's, which leave out how prompts clump.
        estimates = (
            self.cost(family, counts)
            for family in self.families
            if (counts := family.min_counts(rate, fluid=False)) is not None and family.fits(counts)
        )
        below = math.inf if is_mixed else NEAR * min(estimates, default=math.inf)
        mixed = mixed_deployments(columns, rate, by_price=by_price, below=below) if columns else ()
        for deployment, bound in mixed:
            kinds = {id(column.rates.kind): column.rates for column in columns}
            family = Mixture(tuple(kinds[id(kind)] for kind in deployment.kinds))
            served = self._serve(family, deployment, rate)
            if served.meets_limits:
                cost = deployment.usd_per_hour if by_price else float(deployment.num_devices)
                assert cost is not None
                # A family that costs the same is simpler.
                return [Leaf(cost * (1 + 1e-6), served, min(bound, cost), (cost, True, 0))]
        return []

    def _by_count(self, family: Family) -> list[Node[Open]]:
        requests = self.serving.requests
        if requests.rate is None:
            return self._by_count_in_closed_loop(family)
        low = family.min_counts(requests.rate, fluid=True)
        if low is None or not family.fits(low):
            return []
        high = family.min_counts(requests.rate, fluid=False) or low
        counts = tuple(sorted((self.cost(family, c), c) for c in family.counts_near(low, high)))
        return [Node(counts[0][0], Open(family, counts), self._key(family, high))]

    def _key(self, family: Family, estimated: tuple[int, ...]) -> tuple[float, bool, int]:
        """Order nodes of equal bounds: what is estimated to cost least, one pool before two, few devices in an instance."""
        return self.cost(family, estimated), family.is_disaggregated, max(kind.size for kind in family.kinds)

    def _by_count_in_closed_loop(self, family: Family) -> list[Node[Open]]:
        matches = [entry for entry in self._loop_counts(family) if self._may_meet(family, entry)]
        counts = [(self.cost(family, entry), entry) for entry in matches]
        if not counts:
            return []
        return [Node(min(counts)[0], Open(family, tuple(sorted(counts))), (min(counts)[0], family.is_disaggregated, 0))]

    def _loop_counts(self, family: Family) -> Iterator[tuple[int, ...]]:
        """Yield deployments of a load that is kept in flight: of pools that prefill those that may keep up, and one fewer."""
        concurrency = self.serving.requests.concurrency or 1
        last = family.kinds[-1]
        for count in range(1, min(last.max_count, concurrency) + 1):
            if not family.is_disaggregated:
                yield (count,)
                continue
            per_prefill = family.largest(0, fluid=True)
            if not per_prefill:
                return
            carried, _, _ = family.in_closed_loop((10**6, count), concurrency, fluid=True)
            enough = max(math.ceil(carried / per_prefill), 1)
            for prefill in {max(enough - 1, 1), enough}:
                if family.fits((prefill, count)):
                    yield prefill, count

    def _may_meet(self, family: Family, counts: tuple[int, ...]) -> bool:
        """Return whether the bound of a closed loop is within the limits on tokens."""
        _, _, step_s = family.in_closed_loop(counts, self.serving.requests.concurrency or 1, fluid=True)
        return all(limit.metric != "tpot" or step_s <= limit.seconds for limit in self.serving.limits)

    def _by_rate(self, family: Family) -> list[Node[Open]]:
        """Return nodes by tokens a second and device: of all devices where a rate is free, else of those that are used."""
        concurrency = self.serving.requests.concurrency
        if concurrency is None:
            counts, rate = family.best_split(fluid=True)
            if not rate:
                return []
            estimated = family.best_split(fluid=False)[1]
            bound = -rate * self.tokens / self.request.cluster.num_devices
            return [Node(bound, Open(family, ((bound, counts),)), (-estimated, family.is_disaggregated))]
        nodes = []
        for counts in self._loop_counts(family):
            if self._may_meet(family, counts):
                carried, _, _ = family.in_closed_loop(counts, concurrency, fluid=True)
                estimated, _, _ = family.in_closed_loop(counts, concurrency, fluid=False)
                devices = Deployment(family.kinds, counts).num_devices
                bound = -carried * self.tokens / devices
                nodes.append(
                    Node(bound, Open(family, ((bound, counts),)), (-estimated / devices, family.is_disaggregated))
                )
        return nodes

    def _by_latency(self, family: Family) -> list[Node[Open]]:
        """Return nodes by the mean seconds of a request, each family with all devices."""
        requests = self.serving.requests
        counts, largest = family.best_split(fluid=True)
        if not largest:
            return []
        if requests.rate is not None:
            if largest < requests.rate:
                return []
            first_s, step_s = self._fluid_latency(family, counts, requests.rate)
        else:
            _, first_s, step_s = family.in_closed_loop(counts, requests.concurrency or 1, fluid=True)
            if family.is_disaggregated:
                first_s = family.rates[0].prefill_service_s
        bound = first_s + self.mix.decode_steps * step_s
        return [Node(bound, Open(family, ((bound, counts),)), (bound, family.is_disaggregated))]

    def _fluid_latency(self, family: Family, counts: tuple[int, ...], rate: float) -> tuple[float, float]:
        curve = family.curve(fluid=True)
        idx = max(int(np.searchsorted(curve.requests_per_s, rate / counts[-1])) - 1, 0)  # the better side
        first_s = family.rates[0].prefill_service_s if family.is_disaggregated else float(curve.ttft_s[idx])
        return first_s, float(curve.step_s[idx])

    @property
    def tokens(self) -> float:
        """Generated tokens of a mean request."""
        return float(self.mix.share @ self.mix.output_len)

    def expand(self, node: Node[Open], incumbent: float) -> Step[Open, Served]:
        """Simulate one of the deployments of a node."""
        state = node.state
        if not state.has_limits:
            return self._with_limits(node)
        if self.goal in ("gpus", "cost"):
            return self._expand_counts(node, incumbent)
        _, counts = state.counts[0]
        deployment = Deployment(state.family.kinds, counts)
        requests = self.serving.requests
        if self.goal == "throughput" and requests.concurrency is None:
            return self._saturate(node, state.family, deployment, incumbent)
        served = self._serve(state.family, deployment, requests.rate)
        if not served.meets_limits:
            return Step(evaluated=1, effort=1)
        value = served.estimate()
        assert value is not None
        objective = value.e2e.mean_s if self.goal == "latency" else -served.tokens_per_s / deployment.num_devices
        return Step((), [Leaf(objective, served, key=node.key)], evaluated=1, effort=1)

    def _expand_counts(self, node: Node[Open], incumbent: float) -> Step[Open, Served]:
        """Try the estimate's counts first, then the dearest that is cheaper, or the cheapest that is not excluded."""
        family, rate = node.state.family, self.serving.requests.rate
        open_counts = [
            entry
            for entry in node.state.counts
            if entry[0] < incumbent and not self._is_known_to_fail(family, entry[1])
        ]
        if not open_counts:
            return Step()
        chosen = self._first_try(node.state) if not node.state.tried else open_counts[-1]
        if chosen not in open_counts:
            chosen = open_counts[-1]
        cost, counts = chosen
        served = self._serve(family, Deployment(family.kinds, counts), rate)
        if served.meets_limits:
            remaining = tuple(entry for entry in open_counts if entry[0] < cost)
            leaves = [Leaf(cost, served, key=node.key)]
        else:
            remaining = tuple(
                entry
                for entry in open_counts
                if any(more > tried for more, tried in zip(entry[1], counts, strict=True))
            )
            leaves = []
        nodes = (
            [Node(max(remaining[0][0], node.bound), replace(node.state, counts=remaining, tried=True), node.key)]
            if remaining
            else []
        )
        return Step(nodes, leaves, evaluated=1, effort=1)

    def _is_known_to_fail(self, family: Family, counts: tuple[int, ...]) -> bool:
        """Return whether a simulation failed that would be the same, or whose prompts were late, under limits of this family."""
        for served in self.served:
            other = served.deployment
            if served.meets_limits or other.routes is not None or len(other.kinds) != len(family.kinds):
                continue
            # Of a deployment whose prompts were late, what decodes was not simulated: it is alike whatever it is.
            alike = [
                old.base is new.base
                and old.step is new.step
                and old.prefixes == new.prefixes
                and count <= tried
                and touched.same_under(old.free_limits, new.free_limits)
                for old, new, count, tried, touched in zip(
                    other.kinds, family.kinds, counts, other.counts, served.touched, strict=False
                )
            ]
            if all(alike) or (alike[0] and family.is_disaggregated and _prompts_are_late(served)):
                return True
        return False

    def _first_try(self, state: Open) -> tuple[float, tuple[int, ...]]:
        rate = self.serving.requests.rate
        if rate is None:
            return state.counts[len(state.counts) // 2]
        estimated = state.family.min_counts(rate, fluid=False)
        matches = [entry for entry in state.counts if entry[1] == estimated]
        return matches[0] if matches else state.counts[-1]

    def _saturate(
        self, node: Node[Open], family: Family, deployment: Deployment, incumbent: float
    ) -> Step[Open, Served]:
        """Simulate a deployment at growing rates between the estimate and the bound."""
        scale = self.tokens / self.request.cluster.num_devices
        best, low, high, effort = self.saturated(
            family, deployment, most=-node.bound / scale, useless=-incumbent / scale
        )
        if best is None:
            rest = [Node(-high * scale, node.state, node.key)] if -high * scale > node.bound else []
            return Step(rest, evaluated=1, effort=effort)
        return Step((), [Leaf(-low * scale, best, -high * scale, node.key)], evaluated=1, effort=effort)

    def saturated(
        self, family: Family, deployment: Deployment, *, most: float = math.inf, useless: float = -math.inf
    ) -> tuple[Served | None, float, float, int]:
        """Return the simulation of a deployment at its largest rate, that rate, one that it does not carry, and the simulations.

        Args:
            most: a rate that it carries at most; useless: nothing is returned where it does not carry half of GAP more than that.
        """
        pairs = list(enumerate(deployment.counts))
        is_first = not math.isfinite(useless)
        estimate = min(count * family.largest(pool, fluid=False, replicas=count) for pool, count in pairs)
        high = min(most, min(count * family.largest(pool, fluid=True) for pool, count in pairs))
        low, best, effort = 0.0, None, 0
        rate = min(estimate or 0.5 * high, high) if is_first else min(useless * (1 + GAP / 2), high)
        while effort < MAX_RATES and high > 0 and (high - low) / high > RATE_STEP:
            served = self._serve(family, deployment, rate)
            effort += 1
            if served.meets_limits:
                low, best = rate, served
            else:
                high = rate
                if not is_first and best is None:
                    return None, 0.0, high, effort
            rate = (low + high) / 2 if low else 0.7 * high
        return best, low, high, effort

    def _serve(self, family: Family, deployment: Deployment, rate: float | None) -> Served:
        requests = self.serving.requests
        if rate is None:
            in_flight, longest_s = float(requests.concurrency or 1), 0.0
        else:
            curve = family.curve(fluid=False)
            servers = deployment.counts[-1] if deployment.routes is None else sum(deployment.counts)
            idx = min(int(np.searchsorted(curve.requests_per_s, rate / servers)), len(curve.step_s) - 1)
            decode_s, first_s = self.mix.decode_steps * float(curve.step_s[idx]), float(curve.ttft_s[idx])
            # Near saturation the wait is anything: a request is not taken to wait for longer than it decodes.
            in_flight = rate * (decode_s + (min(first_s, decode_s) if decode_s else first_s))
            longest_s = float(self.mix.output_len.max() * curve.step_s[idx])
        serving = self.serving
        if rate is None and requests.concurrency is None:
            serving = serving.replace(requests=requests.replace(concurrency=1))
        served = serve(deployment, serving, rate=rate, in_flight=in_flight, longest_s=longest_s)
        self.served.append(served)
        return served


def _prompts_are_late(served: Served) -> bool:
    """Return whether the pool that prefills broke the limit on the first token, whatever decodes: no request waited for that."""
    is_late = any(limit.metric == "ttft" and not limit.is_met for limit in served.limits)
    return is_late and not served.touched[-1].reached(served.deployment.kinds[-1].free_limits)


def goal_of(serving: Serving) -> Goal:
    """Return what is minimised or maximised; at a rate that is given, tokens a second and device are most on fewest devices.

    Raises:
        ConfigError: the objective needs a rate or a concurrency.
    """
    requests, goal = serving.requests, serving.goal
    if goal == "throughput" and requests.rate is not None:
        return "gpus"
    if goal in ("gpus", "cost") and requests.rate is None and requests.concurrency is None:
        raise ConfigError(
            f"objective {goal} needs a load: how many requests a second", help="add --rate R, or --concurrency N"
        )
    return goal


@dataclass
class ServingSearch:
    """A search and its answer."""

    problem: ServingProblem
    answer: Answer[Served] = field(default_factory=Answer)


def search_serving(request: PlanRequest) -> ServingSearch:
    """Search the deployment that is best for the load.

    Raises:
        ConfigError: the load and the objective do not go together, or devices have no price.
    """
    problem = ServingProblem(request)
    if problem.goal == "cost" and any(kind.usd_per_hour is None for kind in problem.space.kinds):
        nameless = next(kind.device for kind in problem.space.kinds if kind.usd_per_hour is None)
        raise ConfigError(
            f"objective cost: {nameless} has no price",
            help="a cluster.toml with price_per_hour, or --offers (docs/cluster.md)",
        )
    gap = 0.0 if problem.goal == "gpus" else GAP
    stop = Stop(rel_gap=gap, max_effort=MAX_SIMULATED, deadline=request.deadline)
    return ServingSearch(problem, Search(problem).run(stop, on_progress=request.on_progress))
