"""ServingPlan: pools of engine instances and the routes of requests through them, with predicted latencies and a certificate."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from .base import Frozen
from .host_experts import experts_title
from .plan import Estimate, Plan
from .serving import LatencyMetric, Pool, RequestClass, Serving, ServingMode
from .units import counted, format_percent, format_seconds

Share = Annotated[float, Field(ge=0, le=1)]
StepPart = Literal[
    "products", "decode_attention", "prefill_attention", "experts", "host_link", "host_compute", "communication", "head",
    "waiting", "overhead",
]  # fmt: skip
"""host_link, host_compute: waiting for experts that are copied up, or computed by the host's processors."""


class Percentiles(Frozen):
    """Seconds of one metric over the requests of a simulation."""

    mean_s: NonNegativeFloat
    p50_s: NonNegativeFloat
    p90_s: NonNegativeFloat
    p99_s: NonNegativeFloat


class Route(Frozen):
    """A share of the requests of a class, and the pools that they go through.

    Attributes:
        request_class: index in the classes of the load; pool: of the first token; decode_pool: of the others, None: the same.
        share: of the requests of the class.
    """

    request_class: NonNegativeInt
    pool: NonNegativeInt
    decode_pool: NonNegativeInt | None = None
    share: Share


class ClassEstimate(Frozen):
    """Predicted latencies of the requests of a class, or of all of them, as simulated.

    Attributes:
        requests: the class; None: all.
        num_simulated: requests that the figures are over.
        queue: from the arrival at an engine to the first step with the prompt; None in plans of older versions.
        goodput_requests_per_s: requests a second that are within every limit.
        attainment: share of the requests that is within every limit.
    """

    requests: RequestClass | None = None
    num_simulated: PositiveInt
    ttft: Percentiles
    tpot: Percentiles
    e2e: Percentiles
    queue: Percentiles | None = None
    goodput_requests_per_s: NonNegativeFloat
    attainment: Share

    def of(self, metric: LatencyMetric) -> Percentiles:
        """Return the percentiles of a metric."""
        value: Percentiles = getattr(self, metric)
        return value


class SplitUse(Frozen):
    """What attention devices, feed-forward devices and the link between them do of a mean step.

    Attributes:
        attention, feed_forward, link: share of the step that each is busy, of the link the busier direction.
        weight_bytes, free_bytes: of a feed-forward device; free: neither weights nor workspace.
    """

    attention: NonNegativeFloat
    feed_forward: NonNegativeFloat
    link: NonNegativeFloat
    weight_bytes: NonNegativeInt
    free_bytes: int


class PoolEstimate(Frozen):
    """Predicted operation of the instances of a pool.

    Attributes:
        requests_per_s: of one instance.
        decode_rows: requests that decode in a mean step, per attention rank; prefill_tokens: of prompts in it.
        step_s: of a mean step; step_parts_s: what it consists of; waiting: of attention devices for rows that come back.
        binds: what keeps the instance from more requests within the limits: compute, cache, a limit by name, or the rate alone.
        cache_bytes: of one device; cache_use: share of it that holds keys and values of requests in flight, on average.
        weight_bytes, free_bytes: of the fullest device; free: neither weights, cache nor workspace.
        utilisation: share of the time that an instance steps.
        prefill_step_s, prefill_utilisation: of steps with prompts where they have their own; decode_rows, step_s, its parts and
            utilisation are of the others then.
        largest_requests_per_s: of one instance within the limits, by the steady state.
        split: where feed-forward parts are on devices of their own; then the other figures are of attention devices.
    """

    requests_per_s: NonNegativeFloat
    decode_rows: NonNegativeFloat
    prefill_tokens: NonNegativeFloat
    step_s: PositiveFloat
    step_parts_s: dict[StepPart, NonNegativeFloat]
    binds: str
    cache_bytes: NonNegativeInt
    cache_use: NonNegativeFloat
    weight_bytes: NonNegativeInt
    free_bytes: int = 0
    utilisation: NonNegativeFloat
    prefill_step_s: PositiveFloat | None = None
    prefill_utilisation: NonNegativeFloat | None = None
    largest_requests_per_s: PositiveFloat
    split: SplitUse | None = None


class LimitEstimate(Frozen):
    """A limit on latency, and what the simulation says of it: seconds at its quantile, the 95 % interval of the share."""

    metric: LatencyMetric
    quantile: Share
    limit_s: PositiveFloat
    simulated_s: NonNegativeFloat
    within: Share
    within_low: Share
    within_high: Share

    @property
    def is_met(self) -> bool:
        """Return whether the requests at the quantile are within the limit."""
        return self.simulated_s <= self.limit_s


class FineTuned(Frozen):
    """Fine-tuning in the steps of so many instances.

    Attributes:
        tokens_per_step: of fine-tuning, in each step of an attention rank, two for a token; tokens_per_s: fine-tuned, of all.
        limits: with what was simulated; none where nothing fits.
    """

    replicas: PositiveInt
    tokens_per_step: NonNegativeFloat
    tokens_per_s: NonNegativeFloat
    limits: tuple[LimitEstimate, ...] = ()


class FineTuningEstimate(Frozen):
    """An adapter's fine-tuning beside the load.

    Attributes:
        state_bytes: of a device: the adapter with its states, what is kept of a sequence.
        pools: of the plan's instances, and of as many as the cluster holds.
        apart_tokens_per_s: of the cluster's other instances, which do nothing else.
        share_of_peak: tokens a second on all instances, of what they would fine-tune without any load.
    """

    state_bytes: NonNegativeInt
    pools: tuple[FineTuned, ...]
    apart_tokens_per_s: NonNegativeFloat
    share_of_peak: Share


class ServingEstimate(Estimate):
    """Predicted figures of a deployment.

    Attributes:
        tokens_per_s: generated; tokens_per_s_per_device: of all devices of the pools; tokens_per_s_per_user: 1 / mean TPOT.
        requests_per_s: that end in a second.
        max_requests_per_s: that these pools carry within the limits, by the steady state.
        usd_per_hour, usd_per_million_tokens: where devices have prices.
        transfer_s: of the keys and values of a mean prompt from prefill to decode.
        overall: all requests; classes: those of the load, in its order.
        fine_tuning: what an adapter's fine-tuning gets of the steps; None: none was asked for.
    """

    num_devices: PositiveInt
    tokens_per_s_per_device: PositiveFloat
    tokens_per_s_per_user: PositiveFloat
    requests_per_s: PositiveFloat
    max_requests_per_s: PositiveFloat
    usd_per_hour: NonNegativeFloat | None = None
    usd_per_million_tokens: NonNegativeFloat | None = None
    transfer_s: NonNegativeFloat = 0.0
    overall: ClassEstimate
    classes: tuple[ClassEstimate, ...] = ()
    limits: tuple[LimitEstimate, ...] = ()
    pools: tuple[PoolEstimate, ...] = Field(min_length=1)
    fine_tuning: FineTuningEstimate | None = None


class ServingFrontPoint(Frozen):
    """What no other plan of the space beats in both: tokens a second of one user, and tokens a second of one device."""

    mode: ServingMode
    pools: str
    tokens_per_s_per_user: PositiveFloat
    tokens_per_s_per_device: PositiveFloat
    requests_per_s: PositiveFloat


class ServingAlternative(Frozen):
    """A runner-up by the steady state, and why it was not taken."""

    mode: ServingMode
    pools: str
    num_devices: PositiveInt
    requests_per_s: NonNegativeFloat
    tokens_per_s_per_device: NonNegativeFloat
    usd_per_hour: NonNegativeFloat | None = None
    reason: str = ""


class ServingPlan(Plan):
    """The answer of ``meshwright plan --serve``.

    Attributes:
        pools: aggregated ones, or of prefill and of decode, the latter with feed-forward parts on devices of their own or without.
        routes: of each class over the pools; of a class they sum to one.
        search: its objective is devices, dollars an hour, or tokens a second and device; candidates are deployments.
        resource_bound: the part of its bound that holds for any schedule of these requests on these devices, in the same unit.
        front: of deployments of one kind of instance, by the steady state.
    """

    task_field: ClassVar[str] = "serving"
    task_name: ClassVar[str] = "serving"

    serving: Serving
    pools: tuple[Pool, ...] = Field(min_length=1)
    routes: tuple[Route, ...] = Field(min_length=1)
    estimate: ServingEstimate
    resource_bound: NonNegativeFloat | None = None
    front: tuple[ServingFrontPoint, ...] = ()
    alternatives: tuple[ServingAlternative, ...] = ()

    @model_validator(mode="after")
    def _routes_lead_through_pools(self) -> Self:
        of_class = [0.0] * len(self.serving.requests.classes)
        for route in self.routes:
            if route.request_class >= len(of_class) or max(route.pool, route.decode_pool or 0) >= len(self.pools):
                raise ValueError("a route names a class or a pool that is not there")
            roles = self.pools[route.pool].role, route.decode_pool is not None and self.pools[route.decode_pool].role
            if roles not in (("agg", False), ("prefill", "decode")):
                raise ValueError(f"a route leads through pools of the roles {roles[0]} and {roles[1]}")
            of_class[route.request_class] += route.share
        if any(abs(total - 1) > 1e-6 for total in of_class):
            raise ValueError("the routes of a class sum to one")
        if len(self.estimate.pools) != len(self.pools):
            raise ValueError("there is an estimate for each pool")
        return self

    @property
    def mode(self) -> ServingMode:
        """Return how it is deployed."""
        return mode_of(self.pools)

    @property
    def num_devices(self) -> int:
        """Return the devices of all pools."""
        return sum(pool.num_devices for pool in self.pools)

    @property
    def summary(self) -> dict[str, str]:
        """Return pools, rate and latencies."""
        cost = self.estimate
        limits = ", ".join(
            f"{limit.metric} {format_seconds(limit.simulated_s)} of {format_seconds(limit.limit_s)} at p{100 * limit.quantile:g}"
            for limit in cost.limits
        )
        return super().summary | {
            "pools": pools_title(self.pools),
            "devices": counted(self.num_devices, "device"),
            "rate": f"{cost.requests_per_s:.3g} requests/s, {cost.tokens_per_s:,.0f} tokens/s generated",
            "latency": limits
            or f"ttft {format_seconds(cost.overall.ttft.p50_s)}, tpot {format_seconds(cost.overall.tpot.p50_s)}",
            "within all limits": format_percent(cost.overall.attainment),
        }


def mode_of(pools: tuple[Pool, ...]) -> ServingMode:
    """Return how pools are deployed."""
    if pools[-1].layout.ffn_devices:
        return "afd"
    if pools[0].role != "agg":
        return "disagg"
    return "agg" if pools[0].prefill_eighths is None else "shared"


def pools_title(pools: tuple[Pool, ...], *, names_devices: bool = False) -> str:
    """Return pools in a line: ``2 x prefill tp=4 + 6 x decode tp=8``, ``3 x shared 3/8 tp=2``; unlike ones with devices."""
    are_unlike = (
        names_devices or len({device for pool in pools for device in (pool.device, pool.ffn_device) if device}) > 1
    )
    return " + ".join(
        f"{pool.replicas} x {'' if pool.role == 'agg' else pool.role + ' '}{share_title(pool.prefill_eighths)}"
        + layout_title(pool.layout)
        + experts_title(pool.experts_on_host)
        + ("" if pool.micro_batches is None else f",micro_batches={pool.micro_batches}")
        + (f" on {devices_title(pool)}" if are_unlike else "")
        for pool in pools
    )


def devices_title(pool: Pool) -> str:
    """Return the devices of a pool: of attention and of feed-forward parts where they are unlike."""
    return pool.device if pool.ffn_device is None else f"{pool.device} and {pool.ffn_device}"


def share_title(prefill_eighths: int | None) -> str:
    """Return the share of prompts before a layout: ``shared 3/8``; nothing where phases have the same steps."""
    return "" if prefill_eighths is None else f"shared {prefill_eighths}/8 "


def layout_title(layout: object) -> str:
    """Return a layout of an instance as ``tp=4,pp=2``, what is one left out."""
    fields = {name: getattr(layout, name) for name in ("tp", "pp", "attention_dp", "ep")}
    ffn_devices = getattr(layout, "ffn_devices", 0)
    names = [f"{name}={value}" for name, value in fields.items() if value > 1] or ["tp=1"]
    return ",".join([*names, f"ffn_devices={ffn_devices}"] if ffn_devices else names)
