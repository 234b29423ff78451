"""Stage and LayerSlots: which layers, and which experts of a layer, lie where, and what becomes of each layer's activations."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from .base import Frozen, NonNegativeInt, PositiveInt
from .layout import Recompute
from .offload import LayerOffload


class Stage(Frozen):
    """Layers ``first_layer_idx .. first_layer_idx + num_layers - 1`` of ``TrainingPlan.staged_model.iter_layers()``.

    Attributes:
        recompute: of every block, unless ``layer_recompute`` has one for each layer (what has no block ignores it).
        tp: ranks that share each of its layers, where these are not the layout's: a multiple, with as many fewer data-parallel
            ranks and as many times larger micro-batches, so that every stage has as many ranks and passes.
        layer_offload: what of each layer's activations waits on the host (schema/offload.py), where any does: of blocks without
            recompute what autograd saves, of blocks with full recompute their inputs. Selective recompute keeps its tensors where
            torch's hooks do not see them.
    """

    first_layer_idx: NonNegativeInt
    num_layers: PositiveInt
    recompute: Recompute = "none"
    tp: PositiveInt | None = None
    layer_recompute: tuple[Recompute, ...] = ()
    layer_offload: tuple[LayerOffload, ...] = ()

    @model_validator(mode="after")
    def _one_for_each_layer(self) -> Self:
        if len(self.layer_recompute) not in (0, self.num_layers):
            raise ValueError(f"layer_recompute has {len(self.layer_recompute)} entries for {self.num_layers} layers")
        if len(self.layer_offload) not in (0, self.num_layers):
            raise ValueError(f"layer_offload has {len(self.layer_offload)} entries for {self.num_layers} layers")
        needed: dict[LayerOffload, Recompute] = {"activations": "none", "boundary": "full"}
        for idx, offload in zip(self.layer_idxs, self.layer_offload, strict=False):
            if offload != "none" and self.recompute_of(idx) != needed[offload]:
                raise ValueError(
                    f"layer {idx} offloads its {offload}, which needs recompute {needed[offload]}; it has "
                    f"{self.recompute_of(idx)}"
                )
        return self

    def recompute_of(self, layer_idx: int) -> Recompute:
        """Return what a layer recomputes, given its index in ``ModelSpec.iter_layers()``."""
        return self.layer_recompute[layer_idx - self.first_layer_idx] if self.layer_recompute else self.recompute

    def offload_of(self, layer_idx: int) -> LayerOffload:
        """Return which activations of a layer wait on the host, given its index in ``ModelSpec.iter_layers()``."""
        return self.layer_offload[layer_idx - self.first_layer_idx] if self.layer_offload else "none"

    @property
    def layer_idxs(self) -> range:
        """Indices into ``ModelSpec.iter_layers()``."""
        return range(self.first_layer_idx, self.first_layer_idx + self.num_layers)


class LayerSlots(Frozen):
    """Placement of the experts of one layer: slots counted rank by rank along ep, an expert in one or several of them.

    Attributes:
        experts: expert of each slot.
        shares: part of its expert's tokens that each slot takes; those of one expert add up to 1.
    """

    experts: tuple[NonNegativeInt, ...] = Field(min_length=1)
    shares: tuple[float, ...]

    @model_validator(mode="after")
    def _shares_add_up(self) -> Self:
        if len(self.shares) != len(self.experts) or any(not 0 <= share <= 1 + 1e-9 for share in self.shares):
            raise ValueError(f"{len(self.experts)} slots need as many shares between 0 and 1")
        taken = dict.fromkeys(self.experts, 0.0)
        for expert, share in zip(self.experts, self.shares, strict=True):
            taken[expert] += share
        if set(taken) != set(range(len(taken))):
            raise ValueError(f"the slots must hold each of the experts 0..{max(taken)}")
        wrong = next((expert for expert, share in taken.items() if abs(share - 1) > 1e-6), None)
        if wrong is not None:
            raise ValueError(f"the shares of expert {wrong} add up to {taken[wrong]:g}, not 1")
        return self
