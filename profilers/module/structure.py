"""The parts of a user's module by name, and the module cut into pipeline stages.

The blocks are those of the longest ModuleList, or of the container that a trace names. In a model of `transformers` the base model
holds them; what it has before them (embeddings) belongs to the first pipeline stage, what comes after (the last norm) and the head
to the last one. A stage is the model itself, in which layers of other stages let everything through: names stay those of the
unsplit model, lists keep their length (models look at a layer's index), and the model's own forward runs, so that positions and
masks are made on every stage.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

_Module = TypeVar("_Module", bound=nn.Module)


@dataclass(frozen=True)
class Structure:
    """Names in a module.

    Attributes:
        blocks: path of the ModuleList; empty where there is none.
        base: path of the module that holds the blocks' list and runs them (empty: the module itself).
        before, after: children of the base with parameters, in order, before and after the blocks.
        embedding, head: paths of the token embedding and of the output projection; None where the module names none.
        is_tied: embedding and head are one parameter.
    """

    blocks: str
    base: str
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    embedding: str | None = None
    head: str | None = None
    is_tied: bool = False
    is_transformers: bool = False

    def blocks_of(self, module: nn.Module) -> list[nn.Module]:
        """Return the blocks; none where the module has no ModuleList."""
        return list(module.get_submodule(self.blocks).children()) if self.blocks else []


def find_structure(module: nn.Module, container: str | None = None) -> Structure:
    """Find the blocks of a module (the children of ``container``), what comes before and after them, its embedding and its head."""
    lists = {name: len(child) for name, child in module.named_modules() if isinstance(child, nn.ModuleList) and name}
    # The experts of a block are a list as well.
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    path = max(outer, key=lambda name: lists[name], default="") if container is None else container
    base, _, blocks = path.rpartition(".")
    before, after = list[str](), list[str]()
    place = before
    for name, child in module.get_submodule(base).named_children():
        if name == blocks:
            place = after
        elif has_parameters(child):
            place.append(name)
    embedding, head = _named(module, "get_input_embeddings"), _named(module, "get_output_embeddings")
    weights = [getattr(module.get_submodule(end), "weight", None) for end in (embedding, head) if end is not None]
    is_tied = len(weights) == 2 and weights[0] is not None and weights[0] is weights[1]
    # transformers is not imported where nothing else has.
    is_transformers = any(cls.__name__ == "PreTrainedModel" for cls in type(module).__mro__)
    return Structure(path, base, tuple(before), tuple(after), embedding, head, is_tied, is_transformers)


def caching_configs(module: nn.Module) -> list[Any]:
    """Return the configurations in a model of transformers that ask for caches of keys and values; parts may have their own."""
    configs = {id(config): config for part in module.modules() if (config := getattr(part, "config", None)) is not None}
    return [config for config in configs.values() if getattr(config, "use_cache", False) is True]


def shell(module: _Module) -> _Module:
    """Return another module with the same children, that may lose some of them and get hooks of its own."""
    other = copy.copy(module)
    for name, value in vars(module).items():
        if isinstance(value, dict):
            vars(other)[name] = copy.copy(value)
    return other


def has_parameters(module: nn.Module) -> bool:
    """Return whether a module or a part of it has any."""
    return any(True for _ in module.parameters())


def _named(module: nn.Module, method: str) -> str | None:
    """Return the path of the module that a method of another returns; None where it returns none."""
    function = getattr(module, method, None)
    try:
        child = function() if callable(function) else None
    except (NotImplementedError, AttributeError):
        return None
    return next((name for name, candidate in module.named_modules() if child is not None and candidate is child), None)


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
        part.set_submodule(structure.head, nn.Identity())
    elif 0 not in layer_idxs and structure.is_tied:
        assert structure.head is not None
        head = shell(model.get_submodule(structure.head))
        head.weight = nn.Parameter(head.weight.detach().clone())
        part.set_submodule(structure.head, head)
    return part


def run_as_stage(
    part: nn.Module,
    structure: Structure,
    layer_idxs: Collection[int],
    num_layers: int,
    loss_fn: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> None:
    """Let a part be called as a pipeline calls its stages: tokens or hidden states to hidden states, logits or the loss [1]."""
    is_first, is_last = 0 in layer_idxs, num_layers - 1 in layer_idxs
    forward_all, base = part.forward, part.get_submodule(structure.base)

    def forward(inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        given = {"input_ids": inputs} if is_first else {"inputs_embeds": inputs}
        if not is_last:
            hidden: Tensor = base(**given, use_cache=False).last_hidden_state
            return hidden
        logits: Tensor = forward_all(**given, use_cache=False).logits
        return logits if targets is None or loss_fn is None else loss_fn(logits, targets)

    part.forward = forward  # type: ignore[method-assign]
