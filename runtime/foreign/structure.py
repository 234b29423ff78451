"""What a module consists of: its row of blocks, and what stands before and after it.

The blocks are those of the longest ModuleList. In a model of `transformers` the base model holds them; what it has before them
(embeddings) belongs to the first pipeline stage, what comes after (the last norm) and the head to the last one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from ...schema.errors import RuntimeMismatchError


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
        """The blocks; none where the module has no ModuleList."""
        found = module.get_submodule(self.blocks) if self.blocks else ()
        return list(found)  # type: ignore[call-overload]

    def is_tied(self, module: nn.Module) -> bool:
        """Whether embedding and head are one parameter."""
        if self.embedding is None or self.head is None:
            return False
        weights = [getattr(module.get_submodule(name), "weight", None) for name in (self.embedding, self.head)]
        return weights[0] is not None and weights[0] is weights[1]


def structure_of(module: nn.Module) -> Structure:
    """Look a module through."""
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
    """Whether it is a PreTrainedModel, without importing transformers where nothing else has."""
    return any(cls.__name__ == "PreTrainedModel" for cls in type(module).__mro__)


def require_decoder(module: nn.Module, structure: Structure, what: str) -> None:
    """Refuse what only works on a decoder with a head.

    Raises:
        RuntimeMismatchError: with the reason.
    """
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
    found = getattr(module, method, None)
    try:
        return found() if callable(found) else None
    except (NotImplementedError, AttributeError):
        return None


def _path_of(module: nn.Module, child: Any) -> str | None:
    if child is None:
        return None
    return next((name for name, candidate in module.named_modules() if candidate is child), None)
