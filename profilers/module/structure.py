"""The parts of a user's module by name.

The blocks are those of the longest ModuleList, or of the container that a trace names. In a model of `transformers` the base model
holds them, embeddings before them and the last norm behind.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

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

    def paths_of(self, module: nn.Module) -> list[str]:
        """Return the paths of the blocks."""
        names = module.get_submodule(self.blocks).named_children() if self.blocks else ()
        return [f"{self.blocks}.{name}" for name, _ in names]


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
    other: _Module = object.__new__(
        type(module)
    )  # copy.copy refuses modules with parametrizations, as weight_norm makes them
    other.__setstate__(
        {name: copy.copy(value) if isinstance(value, dict) else value for name, value in vars(module).items()}
    )
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
