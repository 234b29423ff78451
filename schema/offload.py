"""OffloadSchedule: what a step keeps in the host's memory or on storage, tensor by tensor, and what it is predicted to move.

Layers are named by their index in ``ModelSpec.iter_layers()``; the parameters of a layer are the shards that one rank owns. With
p bytes of a master parameter (fp32 under mixed precision), as many of its gradient, and o bytes of its optimizer states:

| a layer in | on the device | on the host | moves |
|---|---|---|---|
| none of the lists | p, gradient, o | | |
| host_optimizer_layers | p, gradient | copy of p, gradient, o | gradient down before the update, p up after it, once a step |
| streamed_optimizer_layers | p, gradient | o | o up before and down after the device's update, once a step |
| streamed_parameter_layers | while gathered | p, gradient, o | p up before every gather, gradient down after every backward |
| storage_optimizer_layers | as above | o on storage | o read before and written after the update; also in another list |
"""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from .base import Frozen, NonNegativeFloat, NonNegativeInt, PositiveInt
from .schedules import SCHEDULES

if TYPE_CHECKING:
    from .training_plan import TrainingPlan

LayerOffload = Literal["none", "activations", "boundary"]
"""What of a block waits for its backward pass in the host's memory: nothing; all tensors that autograd saves in its forward pass
(none of which is a parameter); or, of a block that recomputes fully, the input that its checkpoint keeps."""

Layers = tuple[NonNegativeInt, ...]


class OffloadMarginalValues(Frozen):
    """Seconds a step that a little more of a resource saves: duals of the schedule's linear program; zero where it does not bind.

    Attributes:
        device_s_per_gib: one more GiB of each device's memory.
        host_s_per_gib: one more GiB of host memory for each rank.
        to_host_s_per_gb_per_s, to_device_s_per_gb_per_s: a link faster by 1e9 bytes per second for each rank.
    """

    device_s_per_gib: NonNegativeFloat = 0.0
    host_s_per_gib: NonNegativeFloat = 0.0
    to_host_s_per_gb_per_s: NonNegativeFloat = 0.0
    to_device_s_per_gb_per_s: NonNegativeFloat = 0.0


class OffloadLimits(Frozen):
    """Limits of what a search may move away from the devices, and where to (`--offload`).

    Attributes:
        kinds: auto: everything.
        host_memory_bytes: of one node; None: as the cluster says.
        storage_path, storage_bytes: a folder of each node's drives and what may be written there; None: no storage.
    """

    kinds: Literal["auto", "activations", "optimizer", "params"] = "auto"
    host_memory_bytes: NonNegativeFloat | None = None
    storage_path: str | None = None
    storage_bytes: NonNegativeFloat = 0.0


class OffloadSchedule(Frozen):
    """Placement of states and parameters of layers, transfers of activations, and their predicted cost.

    What blocks do with their activations stands in ``Stage.layer_offload``. Copies of a direction go one after the other on a
    stream of their own: down as soon as the block's forward pass is over, up again in the order of the backward passes.

    Attributes:
        host_optimizer_layers: updated by the host's processors.
        streamed_optimizer_layers: updated by the device; layer by layer, the states of the next ones come while one is updated.
        streamed_parameter_layers: live on the host altogether, which also updates them (FSDP2's CPUOffloadPolicy for the block).
        storage_optimizer_layers: of the host's and the streamed ones, those whose states lie in ``storage_path``.
        storage_path: a folder of the node's drives.
        prefetch_layers: offloaded blocks whose tensors may be back on the device, or on their way, before their backward pass; one
            is what the runtime needs, more use memory to hide copies that last longer than a block's backward pass.
        host_bytes: pinned or pageable host memory of one node, all of its ranks together.
        host_budget_bytes: what the planner was allowed there; None: it knew no limit.
        storage_bytes: of one node.
        to_host_bytes, to_device_bytes: moved in a step by one rank (the one with most), each tensor storage once.
        step_time_s: of the schedule as rounded to whole layers and re-solved; simulated_s: of the same schedule in the event
            simulation; bound_s: no schedule for this layout is faster; gap: (step_time_s - bound_s) / step_time_s.
    """

    host_optimizer_layers: Layers = ()
    streamed_optimizer_layers: Layers = ()
    streamed_parameter_layers: Layers = ()
    storage_optimizer_layers: Layers = ()
    storage_path: str | None = None
    prefetch_layers: PositiveInt = 1
    host_bytes: NonNegativeInt = 0
    host_budget_bytes: PositiveInt | None = None
    storage_bytes: NonNegativeInt = 0
    to_host_bytes: NonNegativeInt = 0
    to_device_bytes: NonNegativeInt = 0
    step_time_s: NonNegativeFloat = 0.0
    simulated_s: NonNegativeFloat = 0.0
    bound_s: NonNegativeFloat = 0.0
    gap: NonNegativeFloat = 0.0
    worth: OffloadMarginalValues = Field(default_factory=OffloadMarginalValues)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        kinds = {
            "host_optimizer_layers": self.host_optimizer_layers,
            "streamed_optimizer_layers": self.streamed_optimizer_layers,
            "streamed_parameter_layers": self.streamed_parameter_layers,
        }
        for name, layers in (*kinds.items(), ("storage_optimizer_layers", self.storage_optimizer_layers)):
            if list(layers) != sorted(set(layers)):
                raise ValueError(f"{name} must name layers once and in order")
        named = [idx for layers in kinds.values() for idx in layers]
        twice = next((idx for idx, count in Counter(named).items() if count > 1), None)
        if twice is not None:
            both = " and ".join(name for name, layers in kinds.items() if twice in layers)
            raise ValueError(f"layer {twice} is in {both}: it can be in one of them only")
        on_device = sorted({*self.storage_optimizer_layers} - {*named})
        if on_device:
            raise ValueError(f"storage_optimizer_layers has layer {on_device[0]}, whose states are on the device")
        if self.storage_optimizer_layers and self.storage_path is None:
            raise ValueError("storage_optimizer_layers need a storage_path")
        if self.host_budget_bytes is not None and self.host_bytes > self.host_budget_bytes:
            raise ValueError(f"host_bytes {self.host_bytes} are more than host_budget_bytes {self.host_budget_bytes}")
        return self

    @property
    def off_device_layers(self) -> frozenset[int]:
        """Layers whose optimizer states are not on the device."""
        return frozenset(self.host_optimizer_layers + self.streamed_optimizer_layers + self.streamed_parameter_layers)


def why_not_offloadable(plan: TrainingPlan) -> tuple[str, ...]:
    """Return ``reason [name]`` of everything in a plan's offload schedule that torch or this version cannot execute."""
    schedule, layout, optimizer = plan.offload, plan.layout, plan.workload.optimizer
    if schedule is None:
        return ()
    reasons = []
    away = schedule.host_optimizer_layers + schedule.streamed_optimizer_layers + schedule.storage_optimizer_layers
    if optimizer != "adamw" and away:
        reasons.append(f"states of {optimizer} away from the device, where AdamW's can be   [offload_optimizer]")
    if schedule.storage_optimizer_layers and not hasattr(os, "posix_fallocate"):
        reasons.append(
            "states in a file on a system that cannot reserve its space (posix_fallocate)   [offload_storage]"
        )
    streamed = {*schedule.streamed_parameter_layers}
    if streamed and layout.zero_stage not in (0, 3):
        reasons.append(
            f"streamed parameters under zero_stage {layout.zero_stage}, which gathers them once a step: they would never leave; "
            "use zero_stage 3   [streamed_parameters_zero_stage]"
        )
    if streamed and layout.pp > 1 and SCHEDULES[layout.schedule].splits_backward:
        reasons.append(
            f"streamed parameters under schedule {layout.schedule}: between a backward pass and its weight pass they must stay "
            "gathered   [streamed_parameters_split_backward]"
        )
    if plan.model.tie_embeddings and len(streamed & {0, plan.model.num_layers - 1}) == 1:
        reasons.append(
            "the embedding or the head streamed without the other, which has the same parameter   [streamed_parameters_tied]"
        )
    return tuple(reasons)
