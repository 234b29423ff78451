"""Engine instances that a serving plan may consist of: every layout of every kind of device, costed (kinds.py)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ...cost_models.serving.attention_ffn import MICRO_BATCHES, SplitCosts
from ...cost_models.serving.engine import EngineProfile
from ...cost_models.serving.host_experts import exact_share, num_routed_params, require_experts
from ...cost_models.serving.measured_steps import MeasuredEngine, measured_weights
from ...cost_models.serving.memory import serving_memory
from ...cost_models.serving.mix import Mix
from ...cost_models.serving.nano_batches import can_split, with_nano_batches
from ...cost_models.serving.prefixes import tiers_of
from ...cost_models.serving.shares import SharedSteps
from ...cost_models.serving.speculation import check_drafts
from ...cost_models.serving.step import StepCosts
from ...cost_models.serving.tables import ROWS
from ...schema import ClusterSpec, ConfigError, ModelSpec
from ...schema.serving import BYTES_OF, CacheDtype, PrefixTier, Serving, ServingLayout, WeightDtype
from ...schema.serving_plan import layout_title
from ...schema.units import format_bytes
from ..request import PlanRequest
from .kinds import InstanceBase, InstanceKind
from .layouts import check_requests, check_sharing, layouts, split_layouts, ways_of
from .limits import MAX_SHARES, fixed_choice, shares_of

DECODING_ROWS = ROWS[(ROWS >= 1) & (ROWS <= 1024)]
"""Of an attention rank, over which numbers of micro-batches are compared."""


@dataclass
class ServingSpace:
    """All kinds of instances of a request.

    Attributes:
        kinds: those that fit; split: those with feed-forward parts on devices of their own, which only decode.
        too_large: layouts that do not, with the reason.
        unmeasured: layouts that the profile lacks, which has others of the model: measured and computed seconds are not compared.
    """

    kinds: list[InstanceKind] = field(default_factory=list)
    split: list[InstanceKind] = field(default_factory=list)
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
        check_requests(request.model, serving)
        check_split(request.fixed, serving)
        profile = EngineProfile.named(serving.engine, serving.engine_version).scheduled(serving.scheduler)
        if serving.speculate is not None:
            check_drafts(request.model, serving.speculate)
        if serving.experts_on_host is not None:
            require_experts(request.model, cluster)
        check_sharing(request, serving, parts)
        seen = 0
        of_split = {key: value for key, value in request.fixed.items() if key in ServingLayout.model_fields}
        degrees = {key: value for key, value in of_split.items() if key != "ffn_devices"}
        for index, part in enumerate(parts):
            for layout in layouts(request.model, part, serving, fixed_tp=degrees.get("tp", 1)):
                if any(getattr(layout, key) != value for key, value in degrees.items()):
                    continue
                ways = list(ways_of(layout, request, serving))
                seen += bool(ways)
                request.deadline.require("costing the layouts of engine instances")
                if ways:
                    space._add(request, serving, profile, index, part, layout, ways)
        if "afd" in serving.modes:
            space._add_split_kinds(request, serving, profile, parts, of_split)
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
        weights, cache = _dtypes(serving, cluster, model)
        if (min_bytes := _min_weight_bytes(model, layout, weights, serving)) > device.memory_bytes:
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
            model, cluster, layout, weights=weights, cache=cache, known=known, adapters=serving.adapters,
            kernels=profile.kernels,
        )  # fmt: skip
        base_choice = replace(fixed_choice(request.fixed, serving), micro_batches=None)
        budgets = dict.fromkeys((base_choice, base_choice.with_least_budget()))
        if serving.nano_batches and can_split(layout):
            step = with_nano_batches(step)
        shares = tuple(dict.fromkeys(exact_share(model, layout, share) for share in shares_of(serving)))
        for eighths in ways:
            shared = None if eighths is None else SharedSteps.build(step, eighths, known=known)
            reason = ""
            for (idx, share), each, tier in itertools.product(enumerate(shares), budgets, tiers_of(serving, profile)):
                base = InstanceBase(
                    serving, profile, part, cluster, layout, step, weights, cache, measured,
                    replace(each, prefixes=tier, on_host=share), known, shares=shares[idx : idx + MAX_SHARES], shared=shared,
                )  # fmt: skip
                kind, why = base.kind(base.base_choice)
                if kind is not None:
                    self.kinds.append(kind)
                    break
                reason = why if serving.experts_on_host is not None else reason or why
            else:
                if (layout, reason) not in self.too_large:  # of another share of the device it is the same
                    self.too_large.append((layout, reason))

    def _add_split_kinds(
        self,
        request: PlanRequest,
        serving: Serving,
        profile: EngineProfile,
        parts: Sequence[ClusterSpec],
        degrees: Mapping[str, int],
    ) -> None:
        """Add instances that decode with feed-forward parts on devices of their own, of the same kind or another.

        Raises:
            ConfigError: a fixed degree that no such layout has.
        """
        seen, fixed = 0, fixed_choice(request.fixed, serving)
        in_flight = MICRO_BATCHES if fixed.micro_batches is None else (fixed.micro_batches,)
        for (i, of_attention), (j, of_ffn) in itertools.product(enumerate(parts), repeat=2):
            weights, cache = _dtypes(serving, of_attention, request.model)
            known = self._known.setdefault(i, {}), self._known.setdefault(j, {})
            for layout in split_layouts(request.model, (of_attention, of_ffn), fixed_tp=degrees.get("tp", 1)):
                if any(getattr(layout, key) != value for key, value in degrees.items()):
                    continue
                seen += 1
                request.deadline.require("costing the layouts of instances with feed-forward devices")
                if (reason := _split_lacks(request.model, (of_attention, of_ffn), layout, weights)) is not None:
                    self.too_large.append((layout, reason))
                    continue
                step = SplitCosts.split(
                    request.model, (of_attention, of_ffn), layout, weights=weights, cache=cache, known=known,
                    adapters=serving.adapters, kernels=profile.kernels,
                )  # fmt: skip
                for tier in tiers_of(serving, profile):
                    # A pool that decodes has prefixes on the device, or requests bring copies.
                    place: PrefixTier | None = "none" if tier in ("host", "storage") else tier
                    choice = replace(
                        fixed, prefixes=place, micro_batches=best_in_flight(step, serving, profile, in_flight)
                    )
                    base = InstanceBase(
                        serving, profile, i, of_attention, layout, step, weights, cache, None, choice, {}, micro_batches=in_flight,
                        clusters=(of_attention, of_ffn), ffn_part=None if i == j else j,
                    )  # fmt: skip
                    kind, reason = base.kind(choice)
                    if kind is not None:
                        self.split.append(kind)
                        break
                else:
                    self.too_large.append((layout, reason or ""))
        if not seen and serving.modes == ("afd",):
            fixed_text = ", ".join(f"{key}={value}" for key, value in request.fixed.items())
            raise ConfigError(
                f"no instance of {request.model.name} on {request.cluster.name} has feed-forward parts on devices of their own"
                + (f" and {fixed_text}" if fixed_text else ""),
                help="that takes two devices, a model with feed-forward parts, and pp=1",
            )


def best_in_flight(step: SplitCosts, serving: Serving, profile: EngineProfile, in_flight: Sequence[int]) -> int:
    """Return the micro-batches with which most requests of those that a cache holds decode within the limit on a token.

    It is what a search begins with; all others are tried, and its bound is of the quickest for each step.
    """
    mix, rates_of = mix_of(serving), []
    per_row = mix.cached_steps / mix.decode_steps if mix.decode_steps else 0.0
    limit_s = min((limit.seconds for limit in serving.limits if limit.metric == "tpot"), default=np.inf)
    for count in in_flight:
        steps = step.with_micro_batches(count)
        memory = serving_memory(steps, profile, request_len=float(serving.requests.longest))
        seconds = steps.seconds(DECODING_ROWS, DECODING_ROWS * per_row)
        holds = (DECODING_ROWS * per_row <= memory.cache_tokens) & (seconds <= limit_s)
        rates_of.append((float(np.max(DECODING_ROWS / seconds, where=holds, initial=0.0)), -count))
    return -max(rates_of)[1]


def check_split(fixed: Mapping[str, Any], serving: Serving) -> None:
    """Raise an error where degrees of feed-forward devices are fixed and none are planned."""
    if names := [name for name in ("ffn_devices", "micro_batches") if name in fixed and "afd" not in serving.modes]:
        raise ConfigError(
            f"{', '.join(names)}: instances have them whose feed-forward parts are on devices of their own",
            help="add --modes afd",
        )


def _dtypes(serving: Serving, cluster: ClusterSpec, model: ModelSpec) -> tuple[WeightDtype, CacheDtype]:
    """Return the types of weights and cache; where nothing is said, 16 bits that the device computes in."""
    peaks = cluster.weakest_device.peak_flops_per_s
    default: WeightDtype = "fp16" if peaks.bf16 is None and peaks.fp16 is not None else "bf16"
    weights: WeightDtype = serving.weights or measured_weights(cluster, model) or default
    cache: CacheDtype = serving.cache or ("fp32" if weights == "fp32" else "fp16" if weights == "fp16" else "bf16")
    return weights, cache


def _split_lacks(
    model: ModelSpec, clusters: tuple[ClusterSpec, ClusterSpec], layout: ServingLayout, weights: WeightDtype
) -> str | None:
    """Return why weights do not fit however they are cut over all devices of an instance; None where they may."""
    total = layout.stage_devices * clusters[0].weakest_device.memory_bytes
    total += layout.ffn_devices * clusters[1].weakest_device.memory_bytes
    if (min_bytes := model.num_params * BYTES_OF[weights]) > total:
        return f"weights of {format_bytes(min_bytes)} exceed the {format_bytes(total)} of all its devices"
    return None


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


def _min_weight_bytes(model: ModelSpec, layout: ServingLayout, weights: WeightDtype, serving: Serving) -> float:
    """Return weights that a device has at least, without building the layout: everything cut over all of its devices.

    Of experts that may lie with the host nothing counts.
    """
    params = model.num_params - (num_routed_params(model) if serving.experts_on_host is not None else 0)
    return params * BYTES_OF[weights] / layout.num_devices


def mix_of(serving: Serving, prefixes: PrefixTier | None = "device", only: int | None = None) -> Mix:
    """Return the classes of a load as the steady state takes them, with their prefixes at a place."""
    return Mix.of(serving.requests, only=only, prefixes=prefixes or "none" if serving.prefix_cache else "none")
