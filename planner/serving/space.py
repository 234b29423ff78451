"""Engine instances that a serving plan may consist of: every layout of every kind of device, with its steps, memory and limits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ...cost_models.serving.dispatch import step_kernels
from ...cost_models.serving.engine import EngineProfile
from ...cost_models.serving.instance_model import Host, InstanceModel
from ...cost_models.serving.measured_steps import MeasuredEngine, MeasuredSteps, measured_weights
from ...cost_models.serving.memory import ServingMemory, serving_memory
from ...cost_models.serving.mix import Mix
from ...cost_models.serving.nano_batches import can_split, split_rows_of, with_nano_batches
from ...cost_models.serving.prefixes import (
    best_tiers,
    fetch_s_per_token,
    host_bytes,
    tiers_of,
    why_none_fit,
    without_prefixes,
)
from ...cost_models.serving.shares import SharedSteps
from ...cost_models.serving.simulation import EnginePool
from ...cost_models.serving.speculation import check_drafts, with_drafts
from ...cost_models.serving.step import StepCosts
from ...schema import ClusterSpec, ConfigError, ModelSpec
from ...schema.serving import (
    BYTES_OF,
    CacheDtype,
    EngineLimits,
    Pool,
    PrefixTier,
    Role,
    Serving,
    ServingLayout,
    WeightDtype,
)
from ...schema.serving_plan import layout_title
from ...schema.speculation import Speculation
from ...schema.units import format_bytes
from ..request import PlanRequest
from .layouts import check_sharing, layouts, ways_of
from .limits import SMALL, LimitChoice, choices, fixed_choice


@dataclass(frozen=True, kw_only=True)
class InstanceKind:
    """A kind of engine instance: a layout on one kind of device.

    Attributes:
        part: which of the cluster's device pools; stock: its devices.
        loosest: no limits of its batches are better than these (planner/serving/limits.py): what its bound is of.
        measured: the engine's steps as `meshwright profile --serve` measured them on these devices; None: they are computed.
        usd_per_hour: of an instance; None: no price is known.
        sent_s_per_token: seconds to send the keys and values of a token of a prompt to another instance.
        prefixes: where those of the load lie, and for its bound.
        shared: steps of both phases where they run at once on parts of the devices; None: they have the same steps.
    """

    part: int
    device: str
    stock: int
    layout: ServingLayout
    step: StepCosts
    measured: MeasuredEngine | None
    memory: ServingMemory
    limits: EngineLimits
    profile: EngineProfile
    model: InstanceModel
    loosest: InstanceModel
    weights: WeightDtype
    cache: CacheDtype
    usd_per_hour: float | None
    sent_s_per_token: float
    base: _Base
    speculate: Speculation | None = None
    prefixes: PrefixTier | None = None
    loosest_prefixes: PrefixTier | None = None
    shared: SharedSteps | None = None

    def variants(self, role: str, max_rows: float) -> list[InstanceKind]:
        """Return the instance under the limits that may be best in a role (planner/serving/limits.py)."""
        return self.base.variants(role, max_rows)

    @property
    def size(self) -> int:
        """Devices of an instance."""
        return self.layout.num_devices

    @property
    def max_count(self) -> int:
        """Instances that the stock holds."""
        return self.stock // self.size

    @property
    def prefill_eighths(self) -> int | None:
        """Return what prompts have of the multiprocessors, where they have steps of their own."""
        return None if self.shared is None else self.shared.prefill_eighths

    def steps(self, devices_in_use: int) -> StepCosts | MeasuredSteps:
        """Return what steps cost while so many devices are in use, of phases that share devices those that decode."""
        if self.shared is not None:
            return self.shared.decode
        return self.step if self.measured is None else self.measured.steps(devices_in_use)

    def engine_pool(self, replicas: int, devices_in_use: int) -> EnginePool:
        """Return instances for a simulation of a deployment that uses so many devices."""
        return EnginePool.of(
            self.shared or self.steps(devices_in_use), self.profile, self.free_limits, replicas=replicas,
            ranks=self.layout.attention_dp, lanes=self.layout.pp, prefixes=self.prefixes or "none",
            fetch_s_per_token=fetch_s_per_token(self.step, self.prefixes),
        )  # fmt: skip

    @property
    def free_limits(self) -> EngineLimits:
        """Return the limits with the cache that prefixes leave."""
        limits = without_prefixes(self.limits, self.base.serving.requests, self.prefixes)
        assert limits is not None
        return limits

    def pool(self, role: Role, replicas: int) -> Pool:
        """Return instances as a plan says them."""
        return Pool(
            role=role, device=self.device, replicas=replicas, layout=self.layout, weights=self.weights, cache=self.cache,
            limits=self.limits, speculate=self.speculate, adapters=self.base.serving.adapters,
            nano_batch_rows=split_rows_of(self.step), prefill_eighths=self.prefill_eighths, prefixes=self.prefixes,
            host_prefix_bytes=round(host_bytes(self.step, self.base.serving.requests, self.prefixes)),
        )  # fmt: skip


@dataclass
class ServingSpace:
    """All kinds of instances of a request.

    Attributes:
        kinds: those that fit.
        too_large: layouts that do not, with the reason.
        unmeasured: layouts that the profile lacks, which has others of the model: measured and computed seconds are not compared.
    """

    kinds: list[InstanceKind] = field(default_factory=list)
    too_large: list[tuple[ServingLayout, str]] = field(default_factory=list)
    unmeasured: list[ServingLayout] = field(default_factory=list)
    _known: dict[int, dict[Any, Any]] = field(default_factory=dict)

    @classmethod
    def build(cls, request: PlanRequest, serving: Serving) -> ServingSpace:
        """Build every kind; the deadline is looked at before each.

        Raises:
            ConfigError: a fixed degree that no layout of the model has.
        """
        space, cluster = cls(), request.cluster
        parts = [part.cluster for part in cluster.parts] or [cluster]
        profile = EngineProfile.named(serving.engine, serving.engine_version).scheduled(serving.scheduler)
        if serving.speculate is not None:
            check_drafts(request.model, serving.speculate)
        check_sharing(request, serving, parts)
        seen = 0
        for index, part in enumerate(parts):
            degrees = {key: value for key, value in request.fixed.items() if key in ServingLayout.model_fields}
            for layout in layouts(request.model, part, serving, fixed_tp=degrees.get("tp", 1)):
                if any(getattr(layout, key) != value for key, value in degrees.items()):
                    continue
                ways = list(ways_of(layout, request, serving))
                seen += bool(ways)
                request.deadline.require("costing the layouts of engine instances")
                if ways:
                    space._add(request, serving, profile, index, part, layout, ways)
        if not seen:
            fixed_text = ", ".join(f"{key}={value}" for key, value in request.fixed.items())
            raise ConfigError(
                f"no engine instance of {request.model.name} on {cluster.name} has {fixed_text}",
                help="degrees divide the heads and experts of the model, and instances fill whole nodes or divide them",
            )
        if not space.kinds and space.unmeasured:
            raise _not_measured(request, serving, space.unmeasured)
        return space

    def _add(
        self,
        request: PlanRequest,
        serving: Serving,
        profile: EngineProfile,
        part: int,
        cluster: ClusterSpec,
        layout: ServingLayout,
        ways: Sequence[int | None],
    ) -> None:
        model, device = request.model, cluster.weakest_device
        weights: WeightDtype = serving.weights or measured_weights(cluster, model) or "bf16"
        cache: CacheDtype = serving.cache or ("fp32" if weights == "fp32" else "fp16" if weights == "fp16" else "bf16")
        if (min_bytes := _min_weight_bytes(model, layout, weights)) > device.memory_bytes:
            self.too_large.append(
                (
                    layout,
                    f"weights of {format_bytes(min_bytes)} exceed the {format_bytes(device.memory_bytes)} of a device",
                )
            )
            return
        measured = None
        if serving.engine == "meshwright" and measured_weights(cluster, model):
            assert cluster.profile is not None
            measured = MeasuredEngine.of(cluster.profile, model, layout, weights, cache)
            if measured is None:
                self.unmeasured.append(layout)
                return
            if serving.adapters is not None:
                raise ConfigError(
                    "--adapters: steps of our own engine were measured without them",
                    help="plan without --profile, whose steps are computed, or --engine vllm",
                )
            profile = measured.profile(profile)
        known = self._known.setdefault(part, {})
        step = StepCosts.build(
            model, cluster, layout, weights=weights, cache=cache, known=known, adapters=serving.adapters
        )
        base_choice = fixed_choice(request.fixed, serving)
        budgets = dict.fromkeys((base_choice, base_choice.with_least_budget()))
        if serving.nano_batches and can_split(layout):
            step = with_nano_batches(step)
        first = [replace(each, prefixes=tier) for each in budgets for tier in tiers_of(serving, profile)]
        for eighths in ways:
            shared = None if eighths is None else SharedSteps.build(step, eighths, known=known)
            reason = ""
            for choice in first:
                base = _Base(
                    serving, profile, part, cluster, layout, step, weights, cache, measured, choice, known, shared
                )
                kind, why = base.kind(choice)
                if kind is not None:
                    self.kinds.append(kind)
                    break
                reason = reason or why
            else:
                if (layout, reason) not in self.too_large:  # of another share it is the same
                    self.too_large.append((layout, reason))


@dataclass(frozen=True, eq=False)
class _Base:
    """An instance whose limits are still open; base_choice: the limits of its engine, or those asked for."""

    serving: Serving
    profile: EngineProfile
    part: int
    cluster: ClusterSpec
    layout: ServingLayout
    step: StepCosts
    weights: WeightDtype
    cache: CacheDtype
    measured: MeasuredEngine | None
    base_choice: LimitChoice
    planes: dict[Any, Any]
    shared: SharedSteps | None = None
    known: dict[LimitChoice, InstanceKind] = field(default_factory=dict)
    drafting: dict[int, StepCosts] = field(default_factory=dict)

    def kind(self, choice: LimitChoice) -> tuple[InstanceKind | None, str]:
        """Return the instance under limits; None where its memory does not hold a request, and why."""
        if choice in self.known:
            return self.known[choice], ""
        device, profile, serving = self.cluster.weakest_device, self.profile, self.serving
        step = self._steps(choice.drafted)
        memory = serving_memory(
            step, profile, request_len=float(serving.requests.longest), max_batch=choice.max_batch,
            max_batched_tokens=choice.max_batched_tokens, processes=1 if self.shared is None else 2,
        )  # fmt: skip
        if memory.reason is not None:
            return None, memory.reason
        limits = profile.limits(
            device_bytes=float(device.memory_bytes),
            cache_tokens=memory.cache_tokens,
            max_batch=choice.max_batch,
            max_batched_tokens=choice.max_batched_tokens,
            longest_prompt=max(entry.prompt_len for entry in serving.requests.classes),
        )
        limits = limits.replace(chunk=choice.chunk_of(limits))
        free_limits = without_prefixes(limits, serving.requests, choice.prefixes)
        if why := why_none_fit(step, serving.requests, choice.prefixes, free_limits):
            return None, why
        assert free_limits is not None
        price = device.price_per_hour
        timed = step if self.measured is None else self.measured.steps(self.layout.num_devices)
        fetch_s = fetch_s_per_token(step, choice.prefixes)
        model = _instance_model(step, profile, free_limits, self.layout, timed, fetch_s)
        if self.shared is not None:
            model = replace(model, steps=self.shared.decode, sharing=self.shared.sharing, prefill_first=False)
        self.known[choice] = InstanceKind(
            part=self.part,
            device=device.name,
            stock=self.cluster.num_devices,
            layout=self.layout,
            step=step,
            measured=self.measured,
            memory=memory,
            limits=limits,
            profile=profile,
            model=model,
            loosest=self._loosest(model, limits, choice),
            weights=self.weights,
            cache=self.cache,
            usd_per_hour=None if price is None else price * self.layout.num_devices,
            sent_s_per_token=step.cache_bytes_per_token / _link_bytes_per_s(self.cluster),
            base=self,
            shared=self.shared,
            speculate=serving.speculate.replace(draft_tokens=choice.drafted)
            if serving.speculate and choice.drafted
            else None,
            prefixes=choice.prefixes,
            loosest_prefixes=choice.prefixes if choice != self.base_choice else tiers_of(serving, profile)[0],
        )
        return self.known[choice], ""

    def _steps(self, drafted: int) -> StepCosts:
        """Return the steps of the instance with drafts of so many tokens."""
        if drafted not in self.drafting:
            assert self.serving.speculate is not None or not drafted
            self.drafting[drafted] = (
                with_drafts(self.step, self.serving.speculate, drafted, known=self.planes)
                if drafted and self.serving.speculate is not None
                else self.step
            )
        return self.drafting[drafted]

    def _loosest(self, model: InstanceModel, limits: EngineLimits, choice: LimitChoice) -> InstanceModel:
        """Return what no choice of limits is better than; limits that were chosen are what they are."""
        if choice != self.base_choice:
            return model
        tiers = self._tiers("agg", limits)
        others = [
            other
            for other in choices("agg", limits, self.serving, self.base_choice, math.inf, tiers)
            if other != choice
        ]
        kinds = [kind for other in others if (kind := self.kind(other)[0]) is not None]
        models = [model, *(kind.model for kind in kinds)]
        return replace(
            model,
            max_batched_tokens=max(each.max_batched_tokens for each in models),
            chunk=min(min(each.chunk, each.max_batched_tokens) for each in models),
            cache_tokens=max(each.cache_tokens for each in models),
            fetch_s_per_token=0.0,
            others=_of_each_draft(models),
        )

    def variants(self, role: str, max_rows: float) -> list[InstanceKind]:
        """Return the instance under the limits that may be best in a role, the engine's own first."""
        limits, base = self.known[self.base_choice].limits, self.base_choice
        if role == "decode" and base.prefixes in ("host", "storage"):  # nothing is fetched: requests bring copies
            base = replace(base, prefixes="none")
        first = self._closed if base == self.base_choice else self.kind(base)[0]
        others = (
            choice
            for choice in choices(role, limits, self.serving, base, max_rows, self._tiers(role, limits))
            if choice != base
        )
        kinds = [kind for kind in (first, *(self.kind(choice)[0] for choice in others)) if kind is not None]
        return list({(kind.limits, kind.speculate, kind.prefixes): kind for kind in reversed(kinds)}.values())[::-1]

    def _tiers(self, role: str, limits: EngineLimits) -> Sequence[PrefixTier | None]:
        """Return where prefixes may lie for a role: on the device alone where they are small."""
        stored, tiers = self.serving.requests.stored_tokens, tiers_of(self.serving, self.profile)
        if stored <= SMALL * limits.cache_blocks * limits.block_size and self.base_choice.prefixes == tiers[0]:
            return tiers[:1]
        return best_tiers(self.step, self.serving.requests, tiers) if role != "decode" else (tiers[0], tiers[-1])

    @cached_property
    def _closed(self) -> InstanceKind:
        """The instance under its own limits and no others."""
        kind = self.known[self.base_choice]
        return replace(kind, loosest=kind.model, loosest_prefixes=kind.prefixes)


def _of_each_draft(models: Sequence[InstanceModel]) -> tuple[InstanceModel, ...]:
    """Return an instance for each length of drafts; none where there is one."""
    by_steps = {id(each.steps): each for each in models}
    return tuple(by_steps.values()) if len(by_steps) > 1 else ()


def _not_measured(request: PlanRequest, serving: Serving, layouts: list[ServingLayout]) -> ConfigError:
    """Return the error of a profile that has other steps of the model than any that is asked for."""
    profile, model = request.cluster.profile, request.model
    points = () if profile is None else profile.serving_steps
    known = {
        f"{layout_title(point.layout)} in {point.weights}": None for point in points if point.content == model.content
    }
    types = f" in {serving.weights}" if serving.weights else ""
    option = f" --weights {serving.weights}" if serving.weights else ""
    return ConfigError(
        f"the profile has steps of {model.name}, and none of {', '.join(map(layout_title, layouts))}{types}",
        details=(f"measured: {', '.join(known)}",),
        help=f"ask for what was measured, or measure more: meshwright profile --model MODEL --serve{option}",
    )


def _min_weight_bytes(model: ModelSpec, layout: ServingLayout, weights: WeightDtype) -> float:
    """Return weights that a device has at least, without building the layout: everything cut over all of its devices."""
    return model.num_params * BYTES_OF[weights] / layout.num_devices


def _instance_model(
    step: StepCosts,
    profile: EngineProfile,
    limits: EngineLimits,
    layout: ServingLayout,
    timed: StepCosts | MeasuredSteps,
    fetch_s: float,
) -> InstanceModel:
    overhead, request = profile.overhead, profile.request
    return InstanceModel(
        steps=timed,
        host=Host(
            overlapped=overhead.overlapped,
            step_s=overhead.step_s,
            row_s=overhead.row_s,
            device_s=overhead.device_s,
            draft_row_s=overhead.draft_row_s * (getattr(timed, "tokens_per_step", 1.0) > 1),
            eager_s=overhead.eager_kernel_s
            * step_kernels(step.instance.model, step.instance.weights, step.instance.experts),
            graph_rows=float(max(limits.graph_sizes, default=0)),
            request_s=request.fixed_s + 2 * request.way_s,
            token_s=request.token_s,
        ),
        lanes=layout.attention_dp * layout.pp,
        max_batch=max(limits.max_batch // layout.pp, 1),
        max_batched_tokens=limits.max_batched_tokens,
        chunk=limits.chunk or math.inf,
        cache_tokens=limits.cache_blocks * limits.block_size / layout.pp,
        prefill_first=profile.scheduler.policy == "prefill_first",
        tokens_per_step=getattr(timed, "tokens_per_step", 1.0),
        fetch_s_per_token=layout.pp * fetch_s,
        reserves_output=profile.admission.reserve_new == 1 and profile.admission.reserve_running == 1,
    )


def _link_bytes_per_s(cluster: ClusterSpec) -> float:
    """Return what one device sends to another instance: over the outermost link, which instances are sure to share."""
    link = cluster.levels[-1].link
    sharing = {"device": 1, "host": cluster.largest_node, "node": cluster.largest_node}[link.shared_by]
    return link.bandwidth_bytes_per_s * min(link.efficiency.p2p, 1.0) / sharing


def mix_of(serving: Serving, prefixes: PrefixTier | None = "device", only: int | None = None) -> Mix:
    """Return the classes of a load as the steady state takes them, with their prefixes at a place."""
    return Mix.of(serving.requests, only=only, prefixes=prefixes or "none" if serving.prefix_cache else "none")
