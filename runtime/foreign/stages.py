"""Pipeline stages of a decoder of transformers: the model itself, in which layers of other stages let everything through.

Names stay those of the whole model, lists keep their length (models look at a layer's index), and the model's own forward runs:
positions and masks are made on every stage.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from ..loss import cross_entropy
from ..models.decoder import shell
from .structure import Structure


class Skipped(nn.Module):
    """A layer of another stage: hands its first argument on."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        # What a model may look up of a layer before it calls it: the kind of its attention.
        vars(self).update({k: v for k, v in vars(layer).items() if isinstance(v, str | int) and not k.startswith("_")})

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The hidden states as they are."""
        return hidden


class Nothing(nn.Module):
    """An embedding of another stage: adds nothing."""

    def forward(self, idxs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Zero [], whatever is looked up."""
        return torch.zeros((), device=idxs.device)


def part_of(model: nn.Module, structure: Structure, layer_idxs: Collection[int]) -> nn.Module:
    """A model with these layers only, counted as in ``ModelSpec.iter_layers``; its modules are the given one's."""
    part = shell(model)
    parent = part
    for name in structure.base.split(".") if structure.base else ():
        child = shell(parent.get_submodule(name))
        parent.add_module(name, child)
        parent = child
    blocks = structure.blocks_of(model)
    own = [block if idx + 1 in layer_idxs else Skipped(block) for idx, block in enumerate(blocks)]
    parent.add_module(structure.blocks.rpartition(".")[2], nn.ModuleList(own))
    if 0 not in layer_idxs:
        for name in structure.before:
            parent.add_module(name, Nothing())
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Dropout):
                parent.add_module(name, nn.Identity())  # the first stage has dropped out already
    if len(blocks) + 1 not in layer_idxs:
        for name in structure.after:
            parent.add_module(name, Skipped(parent.get_submodule(name)))
        assert structure.head is not None
        owner, _, name = structure.head.rpartition(".")
        part.get_submodule(owner).add_module(name, nn.Identity())
    elif 0 not in layer_idxs and structure.is_tied(model):
        assert structure.head is not None
        head = copy.copy(model.get_submodule(structure.head))
        vars(head)["_parameters"] = {**vars(head)["_parameters"]}
        head.weight = nn.Parameter(head.weight.detach().clone())
        owner, _, name = structure.head.rpartition(".")
        part.get_submodule(owner).add_module(name, head)
    return part


def run_as_stage(part: nn.Module, structure: Structure, layer_idxs: Collection[int], num_layers: int) -> None:
    """Let a part be called as a pipeline calls its stages: tokens or hidden states to hidden states or the loss [1]."""
    is_first, is_last = 0 in layer_idxs, num_layers - 1 in layer_idxs
    whole, base = part.forward, part.get_submodule(structure.base)

    def forward(inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        given = {"input_ids": inputs} if is_first else {"inputs_embeds": inputs}
        if not is_last:
            hidden: Tensor = base(**given, use_cache=False).last_hidden_state
            return hidden
        logits: Tensor = whole(**given, use_cache=False).logits
        return logits if targets is None else cross_entropy(logits, targets)

    part.forward = forward  # type: ignore[method-assign]


def loss_of(module: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean loss [1] of the next tokens, of a whole module that makes logits of tokens."""
    out = module(inputs)
    logits = out if isinstance(out, Tensor) else out.logits
    return cross_entropy(logits, targets)
