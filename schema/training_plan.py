"""TrainingPlan: layout, stages, rank map, estimate and runner-ups of a training step."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from .base import Frozen, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from .batch import LengthCosts
from .errors import ConfigError
from .layers import Block, Layer
from .layout import SWITCHES, Layout
from .layout_rules import broken_rules, problem_on
from .local_updates import LocalUpdates, why_islands_do_not_suit
from .model import ModelSpec
from .offers import CostSummary, ParetoPoint
from .offload import OffloadSchedule, why_not_offloadable
from .plan import Estimate, Plan, PlanProvenance
from .runnable import why_not_runnable, why_not_trainable
from .schedules import SCHEDULES, placement
from .shares import dealt_by_speed, even_shares
from .stage_degrees import layout_with_tp, why_not_by_stage
from .stages import LayerSlots, Stage
from .task import Workload
from .units import format_bytes, format_seconds

_STAGE_OF_PASS = re.compile(r"([0-9]{1,9})[FIWB]")
"""A pass in a line of an order, as in ``0F3``."""


class Interval(Frozen):
    """A nominal 90 % interval."""

    low: NonNegativeFloat
    high: NonNegativeFloat


class TimeBreakdown(Frozen):
    """Parts of one step on the critical path, seconds; they sum to the step time.

    Attributes:
        compute: forward and backward of the busiest stage over its micro-batches, copies and sums of parameters and gradients.
        recompute: forward work done again in the backward pass.
        tp: exposed tensor-parallel communication.
        cp: exposed exchange of keys and values between context-parallel ranks.
        ep: tokens sent to their experts and back.
        dp: exposed gathering of parameters and reduction of gradients.
        pp: exposed transfers between stages.
        bubble: waiting for other stages while the pipeline fills and drains.
        optimizer: the update of the parameters.
        offload: waiting for copies from and to the host.
    """

    compute: NonNegativeFloat
    recompute: NonNegativeFloat
    tp: NonNegativeFloat
    cp: NonNegativeFloat = 0.0
    ep: NonNegativeFloat = 0.0
    dp: NonNegativeFloat
    pp: NonNegativeFloat
    bubble: NonNegativeFloat
    optimizer: NonNegativeFloat
    offload: NonNegativeFloat = 0.0

    @property
    def total(self) -> float:
        """Seconds of one step."""
        return float(sum(getattr(self, name) for name in type(self).model_fields))


class MemoryBreakdown(Frozen):
    """Parts of the allocated peak of one device, bytes; they sum to the peak.

    Attributes:
        parameters: the shard this device owns (fp32 master copies under mixed precision).
        gradients: what is held between the backward pass and the update.
        optimizer: optimizer states of the owned shard.
        unsharded: gathered or cast copies of parameters.
        activations: saved for the backward pass, for all micro-batches in flight.
        logits: logits and their gradient on the last stage.
        temporary: communication buffers and the working set of one layer.
    """

    parameters: NonNegativeInt
    gradients: NonNegativeInt
    optimizer: NonNegativeInt
    unsharded: NonNegativeInt
    activations: NonNegativeInt
    logits: NonNegativeInt
    temporary: NonNegativeInt

    @property
    def total(self) -> int:
        """Allocated peak, bytes."""
        return int(sum(getattr(self, name) for name in type(self).model_fields))


class StageEstimate(Frozen):
    """One pipeline stage: seconds of one micro-batch and the peak of one of its devices.

    ``device`` says on which part of a mixed cluster it lies; empty: every rank is costed as the weakest device.
    """

    forward_s: NonNegativeFloat
    backward_s: NonNegativeFloat
    memory_bytes: MemoryBreakdown
    device: str = ""


class TrainingEstimate(Estimate):
    """Predicted seconds and bytes of a layout.

    Attributes:
        mfu: model FLOPs (no recompute) over the peak of all devices.
        peak_allocated_bytes: of the fullest device; reserved adds the caching allocator's slack, device (nvidia-smi) the
            context and communication buffers outside the allocator.
        memory_interval_bytes: nominal 90 % interval of the allocated peak; the other two vary by the same ratios.
        required_bytes: what must be within ``budget_bytes``: the reserved peak times the engine's margin, a decision threshold
            (few runs that fit are called too large) and not the interval's upper end.
        fits: ``required_bytes`` is within ``budget_bytes``.
        stages: one entry per pipeline stage.
    """

    step_time_s: PositiveFloat
    step_time_interval_s: Interval
    tokens_per_s_per_device: PositiveFloat
    mfu: NonNegativeFloat
    peak_allocated_bytes: PositiveInt
    peak_reserved_bytes: PositiveInt
    peak_device_bytes: NonNegativeInt = 0
    memory_interval_bytes: Interval
    required_bytes: NonNegativeInt = 0
    budget_bytes: PositiveInt
    fits: bool
    breakdown_s: TimeBreakdown
    memory_bytes: MemoryBreakdown
    stages: tuple[StageEstimate, ...] = Field(min_length=1)


class Alternative(Frozen):
    """A layout that was not chosen, and why."""

    layout: Layout
    step_time_s: PositiveFloat
    peak_reserved_bytes: PositiveInt
    peak_device_bytes: NonNegativeInt = 0
    reason: str


class LeftOut(Frozen):
    """Devices of the described cluster that a plan leaves out because it is faster without them.

    Attributes:
        devices, zone, num_devices: which ones: a device pool of the cluster.
        nodes: where they stand in that cluster; the plan's is the others, in their order.
        step_time_s: of the best layout that was found with them; None where none fits.
        reason: what they would cost.
    """

    devices: str
    zone: str = ""
    num_devices: PositiveInt
    nodes: tuple[NonNegativeInt, ...] = ()
    step_time_s: PositiveFloat | None = None
    reason: str


class Requested(Frozen):
    """What was asked for, where a plan is for fewer devices or another batch because that takes less time for a sequence.

    Attributes:
        cluster, num_devices, num_nodes, global_batch_size: of the request; the plan's cluster is its first nodes, or the first
            devices of its only node.
        step_time_s: of the plan for exactly that; None where there is none.
    """

    cluster: str
    num_devices: PositiveInt
    num_nodes: PositiveInt
    global_batch_size: PositiveInt
    step_time_s: PositiveFloat | None = None


class TrainingPlan(Plan):
    """A layout for a model on a cluster, complete enough to run.

    Attributes:
        rank_map: ``rank_map[rank]`` is the device (node-major index in the cluster) that runs ``rank``; ranks count
            tp fastest, then cp, dp_shard, dp_replicate, pp.
        stages: in the order of the model; with model chunks each rank holds several (Layout.num_model_chunks).
        fastest: the fastest layout by prediction, where a plainer one was taken that may be as fast; None: it is the plan's.
        batches: what sequences of unequal lengths cost, where batches are of such (docs/batch.md).
        shares: sequences of each data-parallel rank in a step, where they are not as even as possible (schema/shares.py).
        unhalved_layers: layers, counted as in ``ModelSpec.iter_layers``, that run entire micro-batches where the layout says
            ``tp_halves``: half-batches would take longer there.
        expert_slots: one entry for each block with experts, in order, where these do not stand once and in order; needs ep > 1.
        pipeline_order: under the synthesised schedule the passes of each rank of a pipeline, one line a rank, in the
            ``compute_only`` form of torch's schedule CSV (cost_models/pipeline/orders.py); empty otherwise.
        offload: what lies on the host or on storage, where the layout's offload is ``scheduled``; None otherwise.
        local_updates: how regions train, where they do not sum up gradients each step (schema/local_updates.py); each is then one
            or several of the layout's replicas.
        left_out: devices of the cluster that was asked for; ``cluster`` is what remains of it.
        requested: what was asked for, where the plan leaves devices idle or has another batch; None: exactly this.
        cost: money, where the plan is the cheapest of several sizes (planner/cheapest.py).
        fallbacks: plans for 1, 2, .. lost nodes, or devices of a single node, where they were asked for.
        pareto: layouts that no other one beats in both time and memory, fastest first, where they were asked for.
    """

    task_field: ClassVar[str] = "workload"
    task_name: ClassVar[str] = "training"

    workload: Workload
    layout: Layout
    stages: tuple[Stage, ...]
    rank_map: tuple[NonNegativeInt, ...]
    estimate: TrainingEstimate
    fastest: Alternative | None = None
    alternatives: tuple[Alternative, ...] = ()
    batches: LengthCosts | None = Field(default=None, exclude_if=lambda value: value is None)
    shares: tuple[PositiveInt, ...] = ()
    unhalved_layers: tuple[NonNegativeInt, ...] = Field(default=(), exclude_if=lambda value: not value)
    expert_slots: tuple[LayerSlots, ...] = ()
    pipeline_order: tuple[str, ...] = ()
    offload: OffloadSchedule | None = None
    local_updates: LocalUpdates | None = Field(default=None, exclude_if=lambda value: value is None)
    left_out: tuple[LeftOut, ...] = ()
    requested: Requested | None = None
    cost: CostSummary | None = None
    pareto: tuple[ParetoPoint, ...] = ()
    fallbacks: tuple[TrainingPlan, ...] = ()
    provenance: PlanProvenance

    @property
    def summary(self) -> dict[str, str]:
        """Return the layout, its step time and its memory."""
        cost = self.estimate
        low_s, high_s = cost.step_time_interval_s.low, cost.step_time_interval_s.high
        return super().summary | {
            "layout": str(self.layout),
            "step time": f"{format_seconds(cost.step_time_s)} ({format_seconds(low_s)} to {format_seconds(high_s)})",
            "rate": f"{cost.tokens_per_s_per_device:,.0f} tokens/s per device, {cost.mfu:.1%} MFU",
            "memory": f"{format_bytes(cost.required_bytes)} of {format_bytes(cost.budget_bytes)}",
        }

    def why_not_applied(self, *, is_user_model: bool = False) -> tuple[str, ...]:
        """Return why `meshwright apply` of this version does not run the plan, with a model of the user's own or with the plan's.

        Machine and data are not looked at: an empty answer means that the right ones are all it takes.
        """
        cluster, workload = self.cluster, self.workload
        if not workload.engine_facts.is_own_runtime:
            return (f"it is for {workload.engine}",)
        if is_user_model and self.local_updates is not None:
            return ("its regions train by themselves, which only the built-in training does",)
        lacking = why_not_trainable(workload) if is_user_model else why_not_runnable(self.model, workload)
        problem = problem_on(self.model, workload, cluster)
        lacking = tuple(f"this version does not train {text}" for text in lacking)
        moved = () if self.offload is None else why_not_offloadable(self)
        return (*cluster.why_not_driven, *lacking, *moved, *broken_rules(self.layout, problem))

    @property
    def price_of_simplicity(self) -> float:
        """Share by which the plan's step is predicted to be longer than the fastest layout's: the plan may be a simpler one."""
        if self.search is None:
            return 0.0
        return max(0.0, self.estimate.step_time_s / self.search.objective_s - 1)

    @model_validator(mode="before")
    @classmethod
    def _read_switches(cls, data: Any) -> Any:
        """Read documents of older versions, whose workload has what is the layout's."""
        if not isinstance(data, dict) or not all(isinstance(data.get(key), dict) for key in ("workload", "layout")):
            return data
        moved = {name: data["workload"][name] for name in SWITCHES if name in data["workload"]}
        workload = {name: value for name, value in data["workload"].items() if name not in moved}
        return {**data, "workload": workload, "layout": {**moved, **data["layout"]}} if moved else data

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        layout = self.layout
        if len(self.stages) != layout.pp * layout.num_model_chunks:
            raise ValueError(f"{len(self.stages)} stages for pp {layout.pp} x {layout.num_model_chunks} chunks")
        ends = [0, *(stage.first_layer_idx + stage.num_layers for stage in self.stages)]
        num_layers = self.staged_model.num_layers
        if ends[:-1] != [stage.first_layer_idx for stage in self.stages] or ends[-1] != num_layers:
            raise ValueError(f"the stages must cover layers 0..{num_layers - 1} once and in order")
        if layout.world_size != self.cluster.num_devices:
            raise ValueError(
                f"the layout has {layout.world_size} ranks, the cluster {self.cluster.num_devices} devices"
            )
        if sorted(self.rank_map) != list(range(layout.world_size)):
            raise ValueError(f"rank_map must name each of the {layout.world_size} devices once")
        if len(self.pipeline_order) != (layout.pp if SCHEDULES[layout.schedule].is_given else 0):
            raise ValueError(
                f"schedule {layout.schedule} over {layout.pp} ranks with {len(self.pipeline_order)} lines of an order"
            )
        choices = {
            stage.recompute_of(idx) for stage in self.stages for idx in stage.layer_idxs if stage.layer_recompute
        }
        if choices and layout.recompute != "mixed":
            raise ValueError(f"recompute differs from layer to layer, the layout says {layout.recompute} for all")
        self._check_shares()
        self._check_slots()
        self._check_degrees()
        self._check_offload()
        if self.local_updates is not None and (why := why_islands_do_not_suit(self, self.local_updates)):
            raise ValueError(why)
        return self

    def _check_shares(self) -> None:
        layout, batch = self.layout, self.workload.global_batch_size
        unit = layout.micro_batch_size if layout.pp > 1 else 1
        if batch < layout.dp * unit or batch % unit:
            raise ValueError(
                f"a batch of {batch} sequences has no share for each of {layout.dp} data-parallel ranks in whole units of {unit}"
            )
        if self.shares and (len(self.shares), sum(self.shares)) != (layout.dp, batch):
            raise ValueError(
                f"{len(self.shares)} shares of {sum(self.shares)} sequences, the batch has {batch} for dp {layout.dp}"
            )
        if any(share % unit for share in self.shares):
            raise ValueError(f"over {layout.pp} stages shares are whole micro-batches of {unit} sequences")

    def _check_offload(self) -> None:
        if (self.layout.offload == "scheduled") != (self.offload is not None):
            have = "no offload schedule" if self.offload is None else "an offload schedule"
            raise ValueError(f"{have} with offload {self.layout.offload}: offload=scheduled and a schedule go together")
        layers = list(self.staged_model.iter_layers())
        for stage in self.stages:
            for idx in stage.layer_idxs:
                if stage.offload_of(idx) == "none":
                    continue
                if self.offload is None or not layers[idx].is_block:
                    why = "is no block" if self.offload is not None else "has no offload schedule to belong to"
                    raise ValueError(f"layer_offload {stage.offload_of(idx)} of layer {idx}, which {why}")
        if self.offload is not None:
            beyond = max(self.offload.off_device_layers, default=0)
            if beyond >= len(layers):
                raise ValueError(f"the offload schedule names layer {beyond} of {len(layers)}")

    def _check_slots(self) -> None:
        if not self.expert_slots:
            return
        blocks = [layer.experts for layer in self.model.iter_layers() if layer.is_block and layer.experts]
        if self.layout.ep == 1 or len(self.expert_slots) != len(blocks):
            raise ValueError(
                f"expert_slots for {len(self.expert_slots)} layers with ep {self.layout.ep}: needs ep > 1 and the "
                f"{len(blocks)} layers with experts"
            )
        for idx, (slots, moe) in enumerate(zip(self.expert_slots, blocks, strict=True)):
            if len(slots.experts) % self.layout.ep or len(set(slots.experts)) != moe.num_experts:
                raise ValueError(
                    f"expert_slots[{idx}]: {len(slots.experts)} slots with {len(set(slots.experts))} experts do not hold "
                    f"{moe.num_experts} experts on {self.layout.ep} ranks"
                )

    def is_by_halves(self, layer_idx: int) -> bool:
        """Tell whether a layer takes micro-batches by half-batches, given its index in ``ModelSpec.iter_layers()``."""
        if not self.layout.tp_halves or layer_idx in self.unhalved_layers:
            return False
        layer = self._layers[layer_idx]
        return isinstance(layer, Block) and layer.runs_in_halves

    @cached_property
    def _layers(self) -> tuple[Layer, ...]:
        return tuple(self.model.iter_layers())

    def layout_of_stage(self, stage_idx: int) -> Layout:
        """Return the layout as one stage has it: with its own tp, data-parallel ranks and micro-batches."""
        return layout_with_tp(self.layout, self.stages[stage_idx].tp or self.layout.tp)

    @property
    def degrees_by_stage(self) -> bool:
        """Tell whether stages differ in tp from the layout."""
        return any(stage.tp not in (None, self.layout.tp) for stage in self.stages)

    def _check_degrees(self) -> None:
        if not self.degrees_by_stage:
            return
        degrees, batch = [stage.tp or self.layout.tp for stage in self.stages], self.workload.global_batch_size
        if why_not := why_not_by_stage(
            self.layout, degrees, global_batch_size=batch, is_tied=self.model.tie_embeddings
        ):
            raise ValueError(why_not)

    @property
    def staged_model(self) -> ModelSpec:
        """The model whose layers the stages hold: that of the plan, or with half blocks its halves."""
        return self.model.staged(half_blocks=self.layout.half_blocks)

    @property
    def rank_of_stage(self) -> tuple[int, ...]:
        """Position along pp of each stage: where the schedule places it, or where the plan's own order runs it.

        Raises:
            ConfigError: a stage of a synthesised order is on no rank or on several.
        """
        pp, chunks = self.layout.pp, self.layout.num_model_chunks
        if not self.pipeline_order:
            return placement(pp, chunks, SCHEDULES[self.layout.schedule].placement_of(chunks))
        on_rank = [{int(stage) for stage in _STAGE_OF_PASS.findall(row)} for row in self.pipeline_order]
        holders = [[r for r, stages in enumerate(on_rank) if s in stages] for s in range(len(self.stages))]
        if any(len(ranks) != 1 for ranks in holders):
            raise ConfigError(
                f"the plan's pipeline_order runs each stage on one rank; its stages are on ranks {holders}"
            )
        return tuple(ranks[0] for ranks in holders)

    @property
    def batch_shares(self) -> tuple[int, ...]:
        """Sequences of each data-parallel rank in a step."""
        return self.shares or even_shares(self.layout, self.workload.global_batch_size)

    def dealt_by(self, seconds: Sequence[float]) -> Self:
        """Return the plan with shares for data-parallel ranks of unlike speed: a throttled node, a shared one.

        The estimate stays that of ranks that are all as fast as planned.

        Args:
            seconds: that each data-parallel rank takes for a sequence, measured or relative.

        Raises:
            ConfigError: they are not one positive number for each data-parallel rank.
        """
        if len(seconds) != self.layout.dp or not all(0 < each < math.inf for each in seconds):
            raise ConfigError(
                f"{len(seconds)} speeds for {self.layout.dp} data-parallel ranks: give positive seconds of each"
            )
        unit = self.layout.micro_batch_size if self.layout.pp > 1 else 1
        return self.replace(shares=dealt_by_speed(self.workload.global_batch_size, seconds, unit))

    @property
    def is_even(self) -> bool:
        """Every data-parallel rank takes as many micro-batches of one size."""
        return (
            self.workload.global_batch_size % (self.layout.dp * self.layout.micro_batch_size) == 0 and not self.shares
        )

    @property
    def num_idle_devices(self) -> int:
        """Devices of what was asked for that the plan does not use."""
        return 0 if self.requested is None else self.requested.num_devices - self.cluster.num_devices

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of one step on the data-parallel rank that has most."""
        return -(-max(self.batch_shares) // self.layout.micro_batch_size)
