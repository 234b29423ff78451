"""The structure of a user's module: its row of blocks, what comes before and after it, and pipeline stages cut from it.

The blocks are those of the longest ModuleList. In a model of `transformers` the base model holds them; what it has before them
(embeddings) belongs to the first pipeline stage, what comes after (the last norm) and the head to the last one. A stage is the
model itself, in which layers of other stages let everything through: names stay those of the unsplit model, lists keep their
length (models look at a layer's index), and the model's own forward runs, so that positions and masks are made on every stage.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...schema.errors import RuntimeMismatchError
from ..loss import cross_entropy
from ..models.decoder import shell


@dataclass(frozen=True)
class Structure:
    """Names in a module.

    Attributes:
        blocks: path of the ModuleList; empty where there is none.
        base: path of the module that holds the blocks' list and runs them (empty: the module itself).
        before, after: children of the base with parameters, in order, before and after the blocks.
        embedding, head: paths of the token embedding and of the output projection; None where the module names none.
        is_transformers: whether the module is a PreTrainedModel.
    """

    blocks: str
    base: str
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    embedding: str | None = None
    head: str | None = None
    is_transformers: bool = False

    def blocks_of(self, module: nn.Module) -> list[nn.Module]:
        """Return the blocks; none where the module has no ModuleList."""
        blocks = module.get_submodule(self.blocks) if self.blocks else ()
        return list(blocks)  # type: ignore[call-overload]

    def is_tied(self, module: nn.Module) -> bool:
        """Tell whether embedding and head are one parameter."""
        if self.embedding is None or self.head is None:
            return False
        weights = [getattr(module.get_submodule(name), "weight", None) for name in (self.embedding, self.head)]
        return weights[0] is not None and weights[0] is weights[1]


def find_structure(module: nn.Module) -> Structure:
    """Find the blocks of a module, what comes before and after them, its embedding and its head."""
    path = _longest_list(module)
    base = path.rpartition(".")[0]
    before: list[str] = []
    after: list[str] = []
    place = before
    for name, child in module.get_submodule(base).named_children():
        if name == path.rpartition(".")[2]:
            place = after
        elif any(True for _ in child.parameters()):
            place.append(name)
    return Structure(
        path,
        base,
        tuple(before),
        tuple(after),
        _path_of(module, _call(module, "get_input_embeddings")),
        _path_of(module, _call(module, "get_output_embeddings")),
        is_transformers=is_transformers(module),
    )


def is_transformers(module: object) -> bool:
    """Tell whether it is a PreTrainedModel, without importing transformers where nothing else has."""
    return any(cls.__name__ == "PreTrainedModel" for cls in type(module).__mro__)


def require_decoder(module: nn.Module, structure: Structure, what: str) -> None:
    """Refuse what only works on a decoder with a head."""
    if not (structure.is_transformers and structure.head and structure.blocks and structure.embedding):
        raise RuntimeMismatchError(
            f"{what} needs a decoder of transformers with an embedding, a list of layers and a head; "
            f"{type(module).__name__} is {'none' if structure.is_transformers else 'a plain module'}",
            help="plan without it, or build the plan's model with parallelize(None, plan)",
        )


def _longest_list(module: nn.Module) -> str:
    lists = {name: len(child) for name, child in module.named_modules() if isinstance(child, nn.ModuleList) and name}
    # The experts of a block are a list as well.
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    return max(outer, key=lambda name: lists[name], default="")


def _call(module: nn.Module, method: str) -> Any:
    function = getattr(module, method, None)
    try:
        return function() if callable(function) else None
    except (NotImplementedError, AttributeError):
        return None


def _path_of(module: nn.Module, child: Any) -> str | None:
    if child is None:
        return None
    return next((name for name, candidate in module.named_modules() if candidate is child), None)


class Skipped(nn.Module):
    """A layer of another stage: hands its first argument on."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        # What a model may look up of a layer before it calls it: the kind of its attention.
        vars(self).update({k: v for k, v in vars(layer).items() if isinstance(v, str | int) and not k.startswith("_")})

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the hidden states as they are."""
        return hidden


class Nothing(nn.Module):
    """An embedding of another stage: adds nothing."""

    def forward(self, idxs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return zero [], whatever is looked up."""
        return torch.zeros((), device=idxs.device)


def stage_module(model: nn.Module, structure: Structure, layer_idxs: Collection[int]) -> nn.Module:
    """Return a model with these layers only, counted as in ``ModelSpec.iter_layers``; its modules are the given one's."""
    part = shell(model)
    parent = part
    for name in structure.base.split(".") if structure.base else ():
        child = shell(parent.get_submodule(name))
        parent.add_module(name, child)
        parent = child
    blocks = structure.blocks_of(model)
    stage_blocks = [block if idx + 1 in layer_idxs else Skipped(block) for idx, block in enumerate(blocks)]
    parent.add_module(structure.blocks.rpartition(".")[2], nn.ModuleList(stage_blocks))
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
    forward_all, base = part.forward, part.get_submodule(structure.base)

    def forward(inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        given = {"input_ids": inputs} if is_first else {"inputs_embeds": inputs}
        if not is_last:
            hidden: Tensor = base(**given, use_cache=False).last_hidden_state
            return hidden
        logits: Tensor = forward_all(**given, use_cache=False).logits
        return logits if targets is None else cross_entropy(logits, targets)

    part.forward = forward  # type: ignore[method-assign]


def next_token_loss(module: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss [1] of the next tokens, of an unsplit module that makes logits of tokens."""
    out = module(inputs)
    logits = out if isinstance(out, Tensor) else out.logits
    return cross_entropy(logits, targets)
