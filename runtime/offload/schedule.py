"""The offload schedule of a plan on one rank: whose activations travel, where optimizer states lie, what streams in."""

from __future__ import annotations

import re

import torch
from torch import nn

from ...schema.model import ModelSpec
from ...schema.offload import OffloadSchedule
from ...schema.training_plan import Stage, TrainingPlan
from ...schema.units import format_bytes
from ..models.decoder import Decoder
from ..models.layers import local_tensor
from ..training.metrics import OffloadRecord
from .activations import ActivationOffload
from .copies import Copies, Pin, Traffic
from .optimizer import Place, Placement

_BLOCK = re.compile(r"model\.layers\.(\d+)\.")


class HostOffload:
    """One rank's traffic with its host: what the plan says, and the streams, buffers and counts of all copies."""

    def __init__(
        self, plan: TrainingPlan, device: torch.device, *, pin: Pin | None = None, smallest_bytes: int | None = None
    ) -> None:
        assert plan.offload is not None
        self.schedule: OffloadSchedule = plan.offload
        self.copies = Copies(device, pin=pin)
        self._model, self._num_microbatches = plan.model, plan.num_microbatches
        self._activations = ActivationOffload(
            self.copies, prefetch_layers=self.schedule.prefetch_layers, smallest_bytes=smallest_bytes
        )

    def apply_activations(self, part: Decoder, stage: Stage) -> None:
        """Wrap the blocks whose activations wait on the host; after `apply_recompute` and before `fully_shard`."""
        self._activations.apply(part, stage.offload_of)

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

    def take_traffic(self, module: Decoder) -> Traffic:
        """Return what moved in a step, with what `fully_shard` moved for streamed parameters.

        That is not counted but follows from its rule: the shard comes up before the forward and the backward pass of each
        micro-batch, its gradient goes down after it.
        """
        traffic = self.copies.traffic.take()
        streams = {*self.schedule.streamed_parameter_layers}
        shards = [p for name, p in module.named_parameters() if layer_of(name, self._model) in streams]
        shard_bytes = sum(local_tensor(parameter.detach()).nbytes for parameter in shards)
        traffic.to_device_bytes += 2 * self._num_microbatches * shard_bytes
        traffic.to_host_bytes += self._num_microbatches * shard_bytes
        return traffic

    def report(self, module: Decoder) -> OffloadRecord:
        """Return what moved since the last report, next to the plan's figures, which are of the rank that moves most."""
        traffic, schedule = self.take_traffic(module), self.schedule
        warnings = []
        if traffic.unpinned_bytes:
            warnings.append(
                f"{format_bytes(traffic.unpinned_bytes)} of host buffers could not be pinned: their copies do not run beside "
                "compute; raise the limit of locked memory (ulimit -l), or offload less"
            )
        return OffloadRecord(
            to_host_bytes=traffic.to_host_bytes,
            to_device_bytes=traffic.to_device_bytes,
            read_bytes=traffic.read_bytes,
            stored_bytes=traffic.stored_bytes,
            planned_to_host_bytes=schedule.to_host_bytes,
            planned_to_device_bytes=schedule.to_device_bytes,
            host_bytes=self.copies.pool.total_bytes,
            warnings=warnings,
        )


def layer_of(name: str, model: ModelSpec) -> int:
    """Return the index in ``ModelSpec.iter_layers`` of the layer that a parameter of the decoder belongs to."""
    block = _BLOCK.match(name)
    if block is not None:
        return int(block[1]) + 1
    return 0 if name.startswith("model.embed_") else model.num_layers - 1
