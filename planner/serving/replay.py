"""A serving plan under other requests: the deployment simulated request by request, percentiles and what every instance did."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ...cost_models.serving.attention_ffn import SplitCosts
from ...cost_models.serving.engine import EngineProfile
from ...cost_models.serving.host_experts import why_host_lacks, with_experts_on_host
from ...cost_models.serving.measured_steps import MeasuredEngine
from ...cost_models.serving.nano_batches import with_nano_batches
from ...cost_models.serving.prefixes import fetch_s_per_token, host_holds, without_prefixes
from ...cost_models.serving.shares import SharedSteps
from ...cost_models.serving.simulation import EnginePool, RequestTable, SimulatedRequests, simulate
from ...cost_models.serving.speculation import with_drafts
from ...cost_models.serving.step import StepCosts
from ...schema import ClusterSpec, ConfigError
from ...schema.base import Frozen
from ...schema.requests_file import Trace
from ...schema.serving import LatencyLimit, Pool, Requests
from ...schema.serving_plan import ServingPlan
from ...schema.units import FloatArray, IntArray
from .checks import drawn_requests
from .layouts import require_length

QUANTILES = (0.5, 0.9, 0.99)
NUM_DRAWN = 4000
"""Requests of a load that is stated, so that those that warm the engines are few of them."""

METRICS = ("ttft", "tpot", "e2e", "queue")
"""queue: from the arrival at an engine to the first step with the prompt."""


class Latency(Frozen):
    """Seconds of one metric: mean, percentiles, the longest."""

    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float
    max_s: float


class InstanceReplay(Frozen):
    """What one engine instance did, averaged over the time of the replay.

    Attributes:
        pool: index in the plan; instance: of its replicas (and their stages, which have steps of their own in flight).
        utilisation: share of the time that it steps; running, waiting: requests; cache_use: share of its blocks.
    """

    pool: int
    instance: int
    steps: int
    utilisation: float
    running: float
    waiting: float
    max_waiting: int
    cache_use: float
    max_cache_use: float
    prompt_tokens: int
    output_tokens: int


class LimitReplay(Frozen):
    """A limit of the plan: the seconds at its quantile, and the share of requests within it."""

    limit: LatencyLimit
    seconds: float
    within: float


class Replay(Frozen):
    """The answer of ``meshwright replay``."""

    num_requests: int
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    mean_in_flight: float
    preemptions: int
    latencies: dict[str, Latency]
    limits: tuple[LimitReplay, ...]
    instances: tuple[InstanceReplay, ...]


def replay(
    plan: ServingPlan, load: Trace | Requests, *, rate: float | None = None, concurrency: int | None = None
) -> Replay:
    """Serve requests with a plan's pools: recorded ones as they arrived, at another mean rate, or a number of them in flight.

    Of a load that is stated NUM_DRAWN requests are drawn as plans draw them; it has a rate or a concurrency of its own.

    Raises:
        ConfigError: a request is longer than a cache or than the model takes, or all arrive at once and no rate is given.
    """
    if isinstance(load, Requests):
        concurrency, requests = load.concurrency, load
        table, _ = drawn_requests(load, (NUM_DRAWN,), load.rate or 1.0)
    else:
        table, requests = _recorded(load, rate), plan.serving.requests.replace(trace=load.file)
    require_length(plan.model, requests.longest)
    served, pools_of = [], []
    for pools, which in _ways(plan, table):
        part = RequestTable(*(getattr(table, name)[which] for name in table.__dataclass_fields__))
        if not len(part):
            continue
        share = None if concurrency is None else max(round(concurrency * len(part) / len(table)), 1)
        engines = [engine_pool(plan, plan.pools[idx], requests) for idx in pools]
        sent_s = plan.estimate.transfer_s / max(plan.serving.requests.mean_prompt_len, 1.0)
        served.append(simulate(engines, part, concurrency=share, transfer_s_per_token=sent_s))
        pools_of.append(pools)
    return _answer(plan, served, pools_of)


def _recorded(trace: Trace, rate: float | None) -> RequestTable:
    """Return recorded requests, from the first one's arrival on, at their rate or another."""
    arrival = trace.arrival_s
    if rate is not None:
        if not trace.rate:
            raise ConfigError(f"{trace.file.path}: all requests arrive at once, which no --rate changes")
        arrival = arrival * (trace.rate / rate)
    return RequestTable(arrival - arrival[0], trace.prompt_len, trace.output_len, trace.prefix_len)


def engine_pool(plan: ServingPlan, pool: Pool, requests: Requests | None = None) -> EnginePool:
    """Return the engine instances of a pool for a simulation; ``requests``: whose prefixes they hold, in place of the plan's.

    Raises:
        ConfigError: the place of the pool's prefixes does not hold those of the requests.
    """
    serving, layout = plan.serving, pool.layout
    step: Any = _steps(plan, pool)
    if pool.speculate is not None and pool.speculate.draft_tokens is not None:
        step = with_drafts(step, pool.speculate, pool.speculate.draft_tokens)
    if pool.nano_batch_rows is not None:
        step = with_nano_batches(step)
    if pool.experts_on_host is not None:
        step = with_experts_on_host(step, pool.experts_on_host)
    costs: StepCosts = step
    if why := why_host_lacks(costs):
        raise ConfigError(f"pool {pool.role}: {why}", help="plan again for this cluster")
    if pool.prefill_eighths is not None:
        step = SharedSteps.build(costs, pool.prefill_eighths)
    profile = EngineProfile.named(serving.engine, serving.engine_version).scheduled(serving.scheduler)
    measured = None
    if serving.engine == "meshwright" and plan.cluster.profile is not None:
        measured = MeasuredEngine.of(plan.cluster.profile, plan.model, layout, pool.weights, pool.cache)
    if measured is not None:
        step, profile = measured.steps(plan.num_devices), measured.profile(profile)
    requests = requests or serving.requests
    prefixes = pool.prefixes or ("device" if serving.prefix_cache else "none")
    limits = without_prefixes(pool.limits, requests, prefixes)
    if limits is None or (prefixes == "host" and not host_holds(costs, requests)):
        raise ConfigError(
            f"the requests share prefixes of {requests.stored_tokens:,} tokens: more than the {prefixes} of pool {pool.role} holds",
            help="plan with these requests, or with --prefix-cache off",
        )
    return EnginePool.of(
        step, profile, limits, replicas=pool.replicas, ranks=layout.attention_dp, lanes=layout.pp,
        prefixes=prefixes, fetch_s_per_token=fetch_s_per_token(costs, prefixes),
    )  # fmt: skip


def _steps(plan: ServingPlan, pool: Pool) -> StepCosts:
    """Return the costs of the instances of a pool, without drafts and nano-batches."""
    devices = _devices(plan.cluster, pool.device)
    serving = plan.serving
    how: dict[str, Any] = {
        "weights": pool.weights, "cache": pool.cache, "adapters": pool.adapters,
        "kernels": EngineProfile.named(serving.engine, serving.engine_version).kernels,
    }  # fmt: skip
    if pool.micro_batches is None:
        return StepCosts.build(plan.model, devices, pool.layout, **how)
    others = devices if pool.ffn_device is None else _devices(plan.cluster, pool.ffn_device)
    return SplitCosts.split(plan.model, (devices, others), pool.layout, micro_batches=pool.micro_batches, **how)


def _devices(cluster: ClusterSpec, device: str) -> ClusterSpec:
    """Return the nodes of a cluster that have a device."""
    for part in cluster.parts:
        if part.device == device:
            return part.cluster
    if cluster.weakest_device.name == device:
        return cluster
    raise ConfigError(f"the plan's cluster has no {device}")


def _ways(plan: ServingPlan, table: RequestTable) -> Iterator[tuple[tuple[int, ...], IntArray]]:
    """Yield the pools of each way through a deployment, and the requests that take it.

    A request is of the class whose lengths are nearest; those of a class go round by the shares of its routes.
    """
    classes = plan.serving.requests.classes
    ways = sorted({(route.pool, -1 if route.decode_pool is None else route.decode_pool) for route in plan.routes})
    lengths = np.log([table.prompt_len, table.output_len])
    centres = np.log([[entry.prompt_len for entry in classes], [entry.output_len for entry in classes]])
    of_class = np.argmin(((lengths[:, :, None] - centres[:, None, :]) ** 2).sum(0), axis=1)
    taken = np.zeros(len(table), dtype=np.int64)
    for idx in range(len(classes)):
        members = np.flatnonzero(of_class == idx)
        shares = np.zeros(len(ways))
        for route in plan.routes:
            if route.request_class == idx:
                shares[ways.index((route.pool, -1 if route.decode_pool is None else route.decode_pool))] += route.share
        turns = (np.arange(len(members)) * 0.6180339887498949) % 1  # a golden-ratio sequence: even at every length
        taken[members] = np.minimum(np.searchsorted(np.cumsum(shares), turns, side="right"), len(ways) - 1)
    for way, (first, last) in enumerate(ways):
        yield (first,) if last < 0 else (first, last), np.flatnonzero(taken == way)


def _answer(plan: ServingPlan, served: Sequence[SimulatedRequests], pools_of: Sequence[tuple[int, ...]]) -> Replay:
    values = {metric: np.concatenate([getattr(part, f"{metric}_s") for part in served]) for metric in METRICS}
    outputs = np.concatenate([part.output_len for part in served])
    values["tpot"] = values["tpot"][outputs > 1]
    duration = max(part.duration_s for part in served)
    instances = [
        InstanceReplay(
            pool=pool, instance=idx, steps=use.steps, utilisation=use.busy_s / duration, running=use.running_s / duration,
            waiting=use.waiting_s / duration, max_waiting=use.max_waiting, cache_use=use.cache_s / duration,
            max_cache_use=use.max_cache, prompt_tokens=use.prompt_tokens, output_tokens=use.decode_tokens,
        )
        for part, pools in zip(served, pools_of, strict=True)
        for pool, uses in zip(pools, part.pools, strict=True)
        for idx, use in enumerate(uses)
    ]  # fmt: skip
    return Replay(
        num_requests=len(outputs),
        duration_s=duration,
        requests_per_s=len(outputs) / duration,
        output_tokens_per_s=float(outputs.sum()) / duration,
        mean_in_flight=sum(part.mean_in_flight * part.duration_s for part in served) / duration,
        preemptions=int(sum(part.preemptions.sum() for part in served)),
        latencies={metric: _latency(seconds) for metric, seconds in values.items() if len(seconds)},
        limits=tuple(_limit(limit, values[limit.metric]) for limit in plan.serving.limits if len(values[limit.metric])),
        instances=tuple(instances),
    )


def _latency(values: FloatArray) -> Latency:
    p50, p90, p99 = (float(value) for value in np.quantile(values, QUANTILES))
    return Latency(mean_s=float(values.mean()), p50_s=p50, p90_s=p90, p99_s=p99, max_s=float(values.max()))


def _limit(limit: LatencyLimit, values: FloatArray) -> LimitReplay:
    seconds = float(np.quantile(values, limit.quantile))
    return LimitReplay(limit=limit, seconds=seconds, within=float((values <= limit.seconds).mean()))
