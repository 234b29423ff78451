"""Engine instances that a serving plan may consist of: every layout of every kind of device, with its steps, memory and limits.

tp     divides the heads, within what the fastest links join or whole multiples of it
pp     up to MAX_PP, without attention_dp
attention_dp, ep   of models with experts: the ranks of a stage share the experts, whole (ep) or cut (moe_tp)
An instance has a divisor of a node's devices or whole nodes, so that instances fill nodes without rest (E3).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ...cost_models.serving.dispatch import step_kernels
from ...cost_models.serving.engine import EngineProfile
from ...cost_models.serving.memory import ServingMemory, serving_memory
from ...cost_models.serving.simulation import EnginePool
from ...cost_models.serving.steady_state import Host, InstanceModel, Mix
from ...cost_models.serving.step import StepCosts
from ...schema import ClusterSpec, ConfigError, ModelSpec
from ...schema.serving import CacheDtype, EngineLimits, Pool, Role, Serving, ServingLayout, WeightDtype
from ...schema.units import format_bytes
from ..request import PlanRequest

MAX_PP = 8
MAX_STAGE_DEVICES = 64
"""Ranks that share experts: beyond, published deployments (EP 32 to 144) are of thousands of devices."""


@dataclass(frozen=True, kw_only=True)
class InstanceKind:
    """A kind of engine instance: a layout on one kind of device.

    Attributes:
        part: which of the cluster's device pools; stock: its devices.
        usd_per_hour: of an instance; None: no price is known.
        sent_s_per_token: seconds to send the keys and values of a token of a prompt to another instance.
    """

    part: int
    device: str
    stock: int
    layout: ServingLayout
    step: StepCosts
    memory: ServingMemory
    limits: EngineLimits
    profile: EngineProfile
    model: InstanceModel
    weights: WeightDtype
    cache: CacheDtype
    usd_per_hour: float | None
    sent_s_per_token: float

    @property
    def size(self) -> int:
        """Devices of an instance."""
        return self.layout.num_devices

    @property
    def max_count(self) -> int:
        """Instances that the stock holds."""
        return self.stock // self.size

    def engine_pool(self, replicas: int) -> EnginePool:
        """Return instances for a simulation."""
        return EnginePool.of(
            self.step, self.profile, self.limits, replicas=replicas, ranks=self.layout.attention_dp, lanes=self.layout.pp,
        )  # fmt: skip

    def pool(self, role: Role, replicas: int) -> Pool:
        """Return instances as a plan says them."""
        return Pool(
            role=role, device=self.device, replicas=replicas, layout=self.layout, weights=self.weights, cache=self.cache,
            limits=self.limits,
        )  # fmt: skip


@dataclass
class ServingSpace:
    """All kinds of instances of a request.

    Attributes:
        kinds: those that fit.
        too_large: layouts that do not, with the reason.
    """

    kinds: list[InstanceKind] = field(default_factory=list)
    too_large: list[tuple[ServingLayout, str]] = field(default_factory=list)
    _known: dict[int, dict[Any, Any]] = field(default_factory=dict)

    @classmethod
    def build(cls, request: PlanRequest, serving: Serving) -> ServingSpace:
        """Build every kind; the deadline is looked at before each.

        Raises:
            ConfigError: a fixed degree that no layout of the model has.
        """
        space, cluster = cls(), request.cluster
        parts = [part.cluster for part in cluster.parts] or [cluster]
        profile = EngineProfile.named(serving.engine, serving.engine_version)
        seen = 0
        for index, part in enumerate(parts):
            for layout in layouts(request.model, part, serving):
                if any(getattr(layout, key) != value for key, value in request.fixed.items() if key != "max_batch"):
                    continue
                seen += 1
                request.deadline.require("costing the layouts of engine instances")
                space._add(request, serving, profile, index, part, layout)
        if not seen:
            fixed_text = ", ".join(f"{key}={value}" for key, value in request.fixed.items())
            raise ConfigError(
                f"no engine instance of {request.model.name} on {cluster.name} has {fixed_text}",
                help="degrees divide the heads and experts of the model, and instances fill whole nodes or divide them",
            )
        return space

    def _add(
        self,
        request: PlanRequest,
        serving: Serving,
        profile: EngineProfile,
        part: int,
        cluster: ClusterSpec,
        layout: ServingLayout,
    ) -> None:
        model, device = request.model, cluster.weakest_device
        weights: WeightDtype = serving.weights or "bf16"
        cache: CacheDtype = serving.cache or ("fp32" if weights == "fp32" else "fp16" if weights == "fp16" else "bf16")
        if (min_bytes := _min_weight_bytes(model, layout, weights)) > device.memory_bytes:
            self.too_large.append(
                (
                    layout,
                    f"weights of {format_bytes(min_bytes)} exceed the {format_bytes(device.memory_bytes)} of a device",
                )
            )
            return
        known = self._known.setdefault(part, {})
        step = StepCosts.build(model, cluster, layout, weights=weights, cache=cache, known=known)
        fixed_batch = request.fixed.get("max_batch")
        memory = serving_memory(step, profile, request_len=float(serving.requests.longest), max_batch=fixed_batch)
        if memory.reason is not None:
            self.too_large.append((layout, memory.reason))
            return
        limits = profile.limits(
            device_bytes=float(device.memory_bytes),
            cache_tokens=memory.cache_tokens,
            max_batch=fixed_batch,
            longest_prompt=max(entry.prompt_len for entry in serving.requests.classes),
        )
        price = device.price_per_hour
        kind = InstanceKind(
            part=part,
            device=device.name,
            stock=cluster.num_devices,
            layout=layout,
            step=step,
            memory=memory,
            limits=limits,
            profile=profile,
            model=_instance_model(step, profile, limits, layout),
            weights=weights,
            cache=cache,
            usd_per_hour=None if price is None else price * layout.num_devices,
            sent_s_per_token=step.cache_bytes_per_token / _link_bytes_per_s(cluster),
        )
        self.kinds.append(kind)


def layouts(model: ModelSpec, cluster: ClusterSpec, serving: Serving) -> Iterator[ServingLayout]:
    """Yield the layouts of an engine instance on equal devices."""
    node, total = math.gcd(*cluster.node_sizes), cluster.num_devices
    domain = max(node, cluster.scaleup_domain)
    heads = [block.attention.num_heads for block, _ in model.block_runs]
    experts = [block.experts.num_experts for block, _ in model.block_runs if block.experts is not None]
    degrees = [n for n in range(1, min(total, MAX_STAGE_DEVICES) + 1) if node % n == 0 or n % node == 0]
    tps = [n for n in degrees if n <= domain and all(count % n == 0 for count in heads)]
    for tp, pp in itertools.product(
        tps, (n for n in range(1, MAX_PP + 1) if n & (n - 1) == 0 and n <= model.num_blocks)
    ):
        size = tp * pp
        if size > total or not (node % size == 0 or size % node == 0):
            continue
        yield ServingLayout(tp=tp, pp=pp)
        if pp == 1 and tp > 1 and all(count % tp == 0 for count in experts) and experts:
            yield ServingLayout(tp=tp, ep=tp)
    if not experts or serving.engine == "meshwright":
        return
    for stage, tp in itertools.product(degrees, tps):
        ranks = stage // tp
        if stage % tp or ranks < 2 or stage > total:
            continue
        yield from (
            ServingLayout(tp=tp, attention_dp=ranks, ep=ep)
            for ep in (1, stage)
            if all(count % ep == 0 for count in experts) and (ep > 1 or stage <= domain)
        )


def _min_weight_bytes(model: ModelSpec, layout: ServingLayout, weights: WeightDtype) -> float:
    """Return weights that a device has at least, without building the layout: everything cut over all of its devices."""
    from ...schema.serving import BYTES_OF

    return model.num_params * BYTES_OF[weights] / layout.num_devices


def _instance_model(
    step: StepCosts, profile: EngineProfile, limits: EngineLimits, layout: ServingLayout
) -> InstanceModel:
    overhead, request = profile.overhead, profile.request
    return InstanceModel(
        steps=step,
        host=Host(
            overlapped=overhead.overlapped,
            step_s=overhead.step_s,
            row_s=overhead.row_s,
            device_s=overhead.device_s,
            eager_s=overhead.eager_kernel_s
            * step_kernels(step.instance.model, step.instance.weights, step.instance.experts),
            graph_rows=float(max(limits.graph_sizes, default=0)),
            request_s=request.fixed_s + 2 * request.way_s,
            token_s=request.token_s,
        ),
        lanes=layout.attention_dp * layout.pp,
        max_batch=max(limits.max_batch // layout.pp, 1),
        max_batched_tokens=limits.max_batched_tokens,
        cache_tokens=limits.cache_blocks * limits.block_size / layout.pp,
        prefill_first=profile.scheduler.policy == "prefill_first",
        reserves_output=profile.admission.reserve_new == 1 and profile.admission.reserve_running == 1,
    )


def _link_bytes_per_s(cluster: ClusterSpec) -> float:
    """Return what one device sends to another instance: over the outermost link, which instances are sure to share."""
    link = cluster.levels[-1].link
    sharing = {"device": 1, "host": cluster.largest_node, "node": cluster.largest_node}[link.shared_by]
    return link.bandwidth_bytes_per_s * min(link.efficiency.p2p, 1.0) / sharing


def mix_of(serving: Serving, only: int | None = None) -> Mix:
    """Return the classes of a load as the steady state takes them."""
    return Mix.of(serving.requests, only=only, prefix_cache=serving.prefix_cache)
