"""Engine instances as a plan may have them: a layout on one kind of device (or two) with its steps, memory and limits.

`InstanceBase` has what is costed once; `InstanceKind` is one of it under limits, drafts, micro-batches, and places for prefixes
and experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ...cost_models.serving.attention_ffn import SplitCosts
from ...cost_models.serving.dispatch import step_kernels
from ...cost_models.serving.engine import EngineProfile
from ...cost_models.serving.host_experts import why_host_lacks, with_experts_on_host
from ...cost_models.serving.instance_model import Host, InstanceModel
from ...cost_models.serving.measured_steps import MeasuredEngine, MeasuredSteps
from ...cost_models.serving.memory import ServingMemory, serving_memory
from ...cost_models.serving.nano_batches import split_rows_of
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
from ...cost_models.serving.speculation import with_drafts
from ...cost_models.serving.step import StepCosts
from ...schema import ClusterSpec
from ...schema.host_experts import ExpertsOnHost
from ...schema.serving import CacheDtype, EngineLimits, Pool, PrefixTier, Role, Serving, ServingLayout, WeightDtype
from ...schema.speculation import Speculation
from .limits import SMALL, LimitChoice, choices


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
        micro_batches: of an instance with feed-forward devices; ffn_part, ffn_stock: their device pool and its devices, where these
            are unlike those of attention.
        experts_on_host: the share of its experts that lie with the host; None: none do.
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
    base: InstanceBase
    speculate: Speculation | None = None
    prefixes: PrefixTier | None = None
    loosest_prefixes: PrefixTier | None = None
    micro_batches: int | None = None
    ffn_part: int | None = None
    ffn_stock: int = 0
    experts_on_host: ExpertsOnHost | None = None
    shared: SharedSteps | None = None

    def variants(self, role: str, max_rows: float) -> list[InstanceKind]:
        """Return the instance under the limits that may be best in a role (planner/serving/limits.py)."""
        return self.base.variants(role, max_rows)

    @property
    def size(self) -> int:
        """Devices of an instance."""
        return self.layout.num_devices

    @property
    def uses(self) -> dict[int, int]:
        """Devices of an instance by device pool."""
        if self.ffn_part is None:
            return {self.part: self.size}
        return {self.part: self.layout.stage_devices, self.ffn_part: self.layout.ffn_devices}

    @property
    def stocks(self) -> dict[int, int]:
        """Devices of its device pools."""
        return {self.part: self.stock} | ({} if self.ffn_part is None else {self.ffn_part: self.ffn_stock})

    def count_within(self, used: Mapping[int, int]) -> int:
        """Return the instances that the stock holds beside devices that are used, by device pool."""
        return min((self.stocks[part] - used.get(part, 0)) // size for part, size in self.uses.items())

    @property
    def max_count(self) -> int:
        """Instances that the stock holds."""
        return self.count_within({})

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
            ffn_device=None if self.ffn_part is None else self.base.clusters[1].weakest_device.name,
            micro_batches=self.micro_batches,
            host_prefix_bytes=round(host_bytes(self.step, self.base.serving.requests, self.prefixes)),
            experts_on_host=self.experts_on_host, host_expert_bytes=round(self.step.host_weight_bytes),
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class InstanceBase:
    """An instance whose limits are still open; base_choice: the limits of its engine, or those asked for.

    Attributes:
        micro_batches: that may be in flight, of an instance with feed-forward devices; clusters: of attention and of those;
            ffn_part: their device pool, where they are unlike.
        shares: of each layer's experts that may lie with the host; shared: steps of both phases on parts of the devices.
    """

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
    known: dict[LimitChoice, InstanceKind] = field(default_factory=dict)
    drafting: dict[int, StepCosts] = field(default_factory=dict)
    micro_batches: Sequence[int] = ()
    clusters: tuple[ClusterSpec, ...] = ()
    ffn_part: int | None = None
    shares: Sequence[float] = ()
    by_share: dict[float, StepCosts] = field(default_factory=dict)
    shared: SharedSteps | None = None

    def kind(self, choice: LimitChoice) -> tuple[InstanceKind | None, str]:
        """Return the instance under limits; None where its memory does not hold a request, and why."""
        if choice in self.known:
            return self.known[choice], ""
        device, profile, serving = self.cluster.weakest_device, self.profile, self.serving
        step = self._steps(choice)
        memory = serving_memory(
            step, profile, request_len=float(serving.requests.longest), max_batch=choice.max_batch,
            max_batched_tokens=choice.max_batched_tokens, processes=1 if self.shared is None else 2,
        )  # fmt: skip
        if why := memory.reason or why_host_lacks(step):
            return None, why
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
        price = self._usd_per_hour()
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
            usd_per_hour=price,
            sent_s_per_token=step.cache_bytes_per_token / _link_bytes_per_s(self.cluster),
            base=self,
            speculate=serving.speculate.replace(draft_tokens=choice.drafted)
            if serving.speculate and choice.drafted
            else None,
            prefixes=choice.prefixes,
            loosest_prefixes=choice.prefixes if choice != self.base_choice else tiers_of(serving, profile)[0],
            micro_batches=choice.micro_batches,
            ffn_part=self.ffn_part,
            ffn_stock=0 if self.ffn_part is None else self.clusters[1].num_devices,
            experts_on_host=self._experts_on_host(choice.on_host),
            shared=self.shared,
        )
        return self.known[choice], ""

    def _usd_per_hour(self) -> float | None:
        """Return the price of an instance."""
        price = self.cluster.weakest_device.price_per_hour
        if self.ffn_part is None:
            return None if price is None else price * self.layout.num_devices
        other = self.clusters[1].weakest_device.price_per_hour
        return (
            None
            if price is None or other is None
            else price * self.layout.stage_devices + other * self.layout.ffn_devices
        )

    def _steps(self, choice: LimitChoice) -> StepCosts:
        """Return the steps of the instance with a share of its experts on the host, drafts, or so many micro-batches."""
        drafted = choice.drafted
        if choice.on_host:
            return self._steps_with_host(choice.on_host)
        if choice.micro_batches is not None:
            assert isinstance(self.step, SplitCosts)
            if choice.micro_batches not in self.drafting:
                self.drafting[choice.micro_batches] = self.step.with_micro_batches(choice.micro_batches)
            return self.drafting[choice.micro_batches]
        if drafted not in self.drafting:
            assert self.serving.speculate is not None or not drafted
            self.drafting[drafted] = (
                with_drafts(self.step, self.serving.speculate, drafted, known=self.planes)
                if drafted and self.serving.speculate is not None
                else self.step
            )
        return self.drafting[drafted]

    def _experts_on_host(self, share: float) -> ExpertsOnHost | None:
        requested = self.serving.experts_on_host
        return requested.replace(share=share) if requested is not None and share else None

    def _steps_with_host(self, share: float) -> StepCosts:
        if share not in self.by_share:
            placed = self._experts_on_host(share)
            assert placed is not None
            self.by_share[share] = with_experts_on_host(self.step, placed)
        return self.by_share[share]

    def _loosest(self, model: InstanceModel, limits: EngineLimits, choice: LimitChoice) -> InstanceModel:
        """Return what no choice of limits is better than; limits that were chosen are what they are."""
        if choice != self.base_choice:
            return model
        role = "decode" if self.micro_batches else "agg"
        others = [other for other in self._choices(role, limits, self.base_choice, math.inf) if other != choice]
        kinds = [kind for other in others if (kind := self.kind(other)[0]) is not None]
        models = [model, *(kind.model for kind in kinds)]
        return replace(
            model,
            max_batched_tokens=max(each.max_batched_tokens for each in models),
            chunk=min(min(each.chunk, each.max_batched_tokens) for each in models),
            cache_tokens=max(each.cache_tokens for each in models),
            fetch_s_per_token=0.0,
            others=_of_each_steps(models),
        )

    def variants(self, role: str, max_rows: float) -> list[InstanceKind]:
        """Return the instance under the limits that may be best in a role, the engine's own first."""
        limits, base = self.known[self.base_choice].limits, self.base_choice
        if role == "decode" and base.prefixes in ("host", "storage"):  # nothing is fetched: requests bring copies
            base = replace(base, prefixes="none")
        first = self._closed if base == self.base_choice else self.kind(base)[0]
        others = (choice for choice in self._choices(role, limits, base, max_rows) if choice != base)
        kinds = [kind for kind in (first, *(self.kind(choice)[0] for choice in others)) if kind is not None]
        by_choice = {
            (kind.limits, kind.speculate, kind.prefixes, kind.micro_batches, kind.experts_on_host): kind
            for kind in reversed(kinds)
        }
        return list(by_choice.values())[::-1]

    def _choices(self, role: str, limits: EngineLimits, base: LimitChoice, max_rows: float) -> Iterator[LimitChoice]:
        tiers = self._tiers(role, limits)
        return choices(role, limits, self.serving, base, max_rows, tiers, self.shares, self.micro_batches)

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


def _of_each_steps(models: Sequence[InstanceModel]) -> tuple[InstanceModel, ...]:
    """Return an instance for each length of drafts, number of micro-batches or share of experts; none where there is one."""
    by_steps = {id(each.steps): each for each in models}
    return tuple(by_steps.values()) if len(by_steps) > 1 else ()


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
            * step_kernels(step.instance.model, step.instance.weights, step.instance.experts)
            * getattr(step, "micro_batches", 1),
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
