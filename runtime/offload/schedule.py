"""The offload schedule of a plan on one rank: whose activations travel, where optimizer states lie, what streams in."""

from __future__ import annotations

import re

import torch
from torch import nn

from ...schema.model import ModelSpec
from ...schema.offload import OffloadSchedule
from ...schema.training_plan import TrainingPlan
from ...schema.units import format_bytes
from ..models.decoder import Decoder
from ..models.layers import local_tensor
from ..training.metrics import OffloadRecord
from .activations import ActivationOffload
from .copies import Copies
from .optimizer import Place, Placement


class HostOffload:
    """One rank's traffic with its host: what the plan says, and the streams, buffers and counts of all copies."""

    def __init__(self, plan: TrainingPlan, device: torch.device) -> None:
        assert plan.offload is not None
        self.schedule: OffloadSchedule = plan.offload
        self.copies = Copies(device)
        self.activations = ActivationOffload(self.copies, prefetch_layers=self.schedule.prefetch_layers)
        self._model, self._num_microbatches = plan.model, plan.num_microbatches

    def placements(self, module: Decoder) -> dict[nn.Parameter, Placement]:
        """Return where optimizer states of this rank lie that do not lie with their parameter in memory."""
        schedule = self.schedule
        place_of_layer: dict[int, Place] = {
            # Only the states: streamed parameters are on the host anyway.
            **dict.fromkeys(schedule.storage_optimizer_layers, "own"),
            **dict.fromkeys(schedule.host_optimizer_layers, "host"),
            **dict.fromkeys(schedule.streamed_optimizer_layers, "streamed"),
        }
        stored = {*schedule.storage_optimizer_layers}
        layers = {parameter: layer_of(name, self._model) for name, parameter in module.named_parameters()}
        return {
            parameter: Placement(place_of_layer[layer], is_stored=layer in stored)
            for parameter, layer in layers.items()
            if layer in place_of_layer
        }

    def report(self, module: Decoder) -> OffloadRecord:
        """Return what moved since the last report, next to the plan's figures, which are of the rank that moves most.

        What `fully_shard` moves for streamed parameters follows from its rule: the shard comes up before the forward and the
        backward pass of each micro-batch, its gradient goes down after it.
        """
        traffic, schedule, warnings = self.copies.traffic.take(), self.schedule, list[str]()
        streams = {*schedule.streamed_parameter_layers}
        shards = [p for name, p in module.named_parameters() if layer_of(name, self._model) in streams]
        streamed_bytes = self._num_microbatches * sum(local_tensor(shard.detach()).nbytes for shard in shards)
        if traffic.unpinned_bytes:
            warnings.append(
                f"{format_bytes(traffic.unpinned_bytes)} of host buffers could not be pinned: their copies do not run beside "
                "compute; raise the limit of locked memory (ulimit -l), or offload less"
            )
        return OffloadRecord(
            to_host_bytes=traffic.to_host_bytes + streamed_bytes,
            to_device_bytes=traffic.to_device_bytes + 2 * streamed_bytes,
            read_bytes=traffic.read_bytes,
            stored_bytes=traffic.stored_bytes,
            planned_to_host_bytes=schedule.to_host_bytes,
            planned_to_device_bytes=schedule.to_device_bytes,
            host_bytes=self.copies.host_bytes,
            warnings=warnings,
        )


def layer_of(name: str, model: ModelSpec) -> int:
    """Return the index in ``ModelSpec.iter_layers`` of the layer that a parameter of the decoder belongs to."""
    if block := re.match(r"model\.layers\.(\d+)\.", name):
        return int(block[1]) + 1
    return 0 if name.startswith("model.embed_") else model.num_layers - 1
