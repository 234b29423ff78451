"""GenerationPlan: placement of weights, keys and values, and hidden states while text is generated, with predicted costs.

An estimate: nothing of this version serves a model. Layers are named by their index in ``ModelSpec.iter_layers()``.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from .base import Frozen
from .plan import Estimate, Plan
from .task import Generation
from .units import format_bytes, format_seconds

Share = Annotated[float, Field(ge=0, le=1)]
Layers = tuple[NonNegativeInt, ...]
SumAlgorithm = Literal["ring", "star", "exchange"]

_SUM = 1e-6
"""Shares may miss one by this: rounding of the linear program."""


class _Shares(Frozen):
    @model_validator(mode="after")
    def _add_up(self) -> Self:
        total = sum(getattr(self, name) for name in type(self).model_fields)
        if abs(total - 1) > _SUM:
            raise ValueError(f"the shares sum to {total}, not to 1")
        return self


class CacheShares(_Shares):
    """Shares of keys and values by where they lie and who attends to them; they sum to one.

    Attributes:
        device: on the device.
        host_attended, storage_attended: on the host or on storage; the host's processors attend.
        host_copied, storage_copied: there too; copied to the device in every pass.
        drive_attended: on storage; the drives themselves attend (InstInfer, arXiv:2409.04992).
    """

    device: Share
    host_attended: Share = 0.0
    host_copied: Share = 0.0
    storage_attended: Share = 0.0
    storage_copied: Share = 0.0
    drive_attended: Share = Field(default=0.0, exclude_if=lambda value: value == 0)


class StateShares(_Shares):
    """Shares of a block's hidden states by where they lie between two layers; they sum to one."""

    device: Share
    host: Share = 0.0
    storage: Share = 0.0


class AllReduces(Frozen):
    """Sums of a replica's devices that cross machines: the algorithm that is quickest (cost_models/hardware/all_reduce.py).

    Attributes:
        seconds_per_pass: of all batches of a block, a part of the seconds of compute.
    """

    algorithm: SumAlgorithm
    seconds_per_pass: NonNegativeFloat


class PhaseEstimate(Frozen):
    """Passes that take the same: the prefill, or a part of the decoding.

    Attributes:
        context: tokens that a sequence has on average in these passes.
        busy_s: seconds of a pass that each resource is busy; the longest is the pass.
        binds: which that is.
        all_reduce: how sums cross machines; None where none does, or a library has its own.
    """

    name: str
    passes: PositiveInt
    context: PositiveFloat
    seconds_per_pass: PositiveFloat
    busy_s: dict[str, NonNegativeFloat]
    binds: str
    all_reduce: AllReduces | None = Field(default=None, exclude_if=lambda value: value is None)


class GenerationMarginalValues(Frozen):
    """Tokens a second that a little more of a resource is worth, at the margin: duals of the linear program for this batch.

    Attributes:
        device_per_gib: one more GiB of each device's memory; host_per_gib, storage_per_gib: of a node's.
        link_per_gb_per_s: 1e9 bytes per second more in each direction for each rank; storage_per_gb_per_s,
            host_attention_per_gb_per_s, drive_attention_per_gb_per_s: for each node.
    """

    device_per_gib: NonNegativeFloat = 0.0
    host_per_gib: NonNegativeFloat = 0.0
    storage_per_gib: NonNegativeFloat = 0.0
    link_per_gb_per_s: NonNegativeFloat = 0.0
    storage_per_gb_per_s: NonNegativeFloat = 0.0
    host_attention_per_gb_per_s: NonNegativeFloat = 0.0
    drive_attention_per_gb_per_s: NonNegativeFloat = Field(default=0.0, exclude_if=lambda value: value == 0)


class GenerationEstimate(Estimate):
    """Predicted seconds and bytes of a generation plan.

    Attributes:
        prefill_s, decode_s: of one block; latency_s: both, from the prompts to the last token of all of its sequences.
        tokens_per_s: generated, over ``latency_s``, all replicas together.
        device_bytes: of one device; host_bytes, storage_bytes: of one node.
        bound_tokens_per_s: no placement of this batch, in integer layers or not, is better; gap: (bound - tokens_per_s) / bound.
    """

    prefill_s: PositiveFloat
    decode_s: NonNegativeFloat
    latency_s: PositiveFloat
    device_bytes: NonNegativeInt
    device_budget_bytes: PositiveInt
    host_bytes: NonNegativeInt
    host_budget_bytes: PositiveInt | None = None
    storage_bytes: NonNegativeInt = 0
    storage_budget_bytes: NonNegativeInt = 0
    bound_tokens_per_s: PositiveFloat
    gap: NonNegativeFloat
    phases: tuple[PhaseEstimate, ...] = Field(min_length=1)


class GenerationAlternative(Frozen):
    """A runner-up: the best batch of its shape among those that were solved."""

    tp: PositiveInt
    device_batch_size: PositiveInt
    num_device_batches: PositiveInt
    tokens_per_s: PositiveFloat
    latency_s: PositiveFloat


class GenerationPlan(Plan):
    """The answer of ``meshwright plan --infer``.

    Attributes:
        tp: devices that hold the model together; replicas: how many such groups the cluster has, each with batches of its own.
        device_batch_size: sequences that are computed at once; num_device_batches: of those in a block, which go through a layer
            one after the other while its weights are there.
        host_layers, storage_layers: layers whose weights come from there in every pass; all others stay on the device.
        search: its candidates are batches, ``bounded`` by linear programs and ``evaluated`` with integer layers.
        cache, states: of the keys and values, and of the hidden states.
        latency_limit_s: what was asked; None: throughput alone.
    """

    task_field: ClassVar[str] = "generation"
    task_name: ClassVar[str] = "generation"

    generation: Generation
    tp: PositiveInt = 1
    replicas: PositiveInt = 1
    device_batch_size: PositiveInt
    num_device_batches: PositiveInt
    host_layers: Layers = ()
    storage_layers: Layers = ()
    cache: CacheShares
    states: StateShares
    estimate: GenerationEstimate
    worth: GenerationMarginalValues = Field(default_factory=GenerationMarginalValues)
    alternatives: tuple[GenerationAlternative, ...] = ()
    latency_limit_s: PositiveFloat | None = None

    @model_validator(mode="after")
    def _layers_exist(self) -> Self:
        for name in ("host_layers", "storage_layers"):
            layers = getattr(self, name)
            if list(layers) != sorted(set(layers)) or (layers and layers[-1] >= self.model.num_layers):
                raise ValueError(f"{name} must name layers of the model once and in order")
        both = {*self.host_layers} & {*self.storage_layers}
        if both:
            raise ValueError(f"layer {min(both)} is in host_layers and in storage_layers")
        return self

    @property
    def summary(self) -> dict[str, str]:
        """Return the batch, its rate and its memory."""
        cost = self.estimate
        return super().summary | {
            "layout": f"{self.replicas} x tp={self.tp}, {self.num_device_batches} x {self.device_batch_size} sequences on each",
            "rate": f"{cost.tokens_per_s:,.1f} tokens/s",
            "latency": format_seconds(cost.latency_s),
            "memory": f"{format_bytes(cost.device_bytes)} of {format_bytes(cost.device_budget_bytes)}",
        }

    @property
    def batch_size(self) -> int:
        """Sequences of a block, on each replica."""
        return self.device_batch_size * self.num_device_batches
