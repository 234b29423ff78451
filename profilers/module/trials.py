"""What can be done with a user's module: how tensor parallelism splits it, and whether `fully_shard` takes it."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import is_lazy

from ...schema.errors import RuntimeMismatchError
from .split_rules import Rule, checked_rules
from .structure import Structure

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]), "<frozen", "importlib", "runpy")
"""Parts of the paths of files that are no user's: torch's, ours, Python's own that import others."""


def fake_twin(module: nn.Module, mode: FakeTensorMode, dtype: torch.dtype | None = None) -> nn.Module:
    """Return a copy of a module whose parameters and buffers are fake tensors on the CPU, tied where the module's are.

    Args:
        dtype: of its parameters; unset, theirs.
    """
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        with mode:
            is_trained = isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
            fake = torch.empty(tensor.shape, dtype=dtype if dtype and is_trained else tensor.dtype, device="cpu")
            memo[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
    return copy_of(module, memo)


def copy_of(module: nn.Module, memo: Mapping[int, Any] | None = None) -> nn.Module:
    """Return a copy of a module that shares with it what of its attributes cannot be copied: locks, files, registered operators."""
    known = dict(memo or {})
    with suppress(Exception):
        return copy.deepcopy(module, dict(known))
    for part in module.modules():
        for value in vars(part).values():
            try:
                copy.deepcopy(value, dict(known))
            except Exception:  # whatever the user's objects say
                if not isinstance(value, dict):  # parts and tensors, which are copied one by one
                    known[id(value)] = value
    return copy.deepcopy(module, known)


class Attributes(NamedTuple):
    """What a part of a module had in its attributes at some time."""

    path: str
    part: nn.Module
    values: dict[str, Any]


def attributes_of(module: nn.Module) -> list[Attributes]:
    """Return the attributes of all parts of a module as they are now."""
    return [Attributes(path, part, dict(vars(part))) for path, part in module.named_modules()]


def stored_since(before: Sequence[Attributes]) -> list[tuple[Attributes, str]]:
    """Return the names of attributes that have got a tensor since, each with what its part had before."""
    return [
        (each, name)
        for each in before
        for name, value in vars(each.part).items()
        if isinstance(value, Tensor) and value is not each.values.get(name)
    ]


class SplitFacts(NamedTuple):
    """How tensor parallelism splits a module: the rule of each path, the widths that it must divide, and why not."""

    rules: Mapping[str, Rule]
    widths: tuple[int, ...] = ()
    not_split: str = ""
    not_along_sequence: str = ""


def split_facts(module: Any, structure: Structure) -> SplitFacts:
    """Return how tensor parallelism splits a module as its base_model_tp_plan says; an untied head of a decoder by output."""
    name = type(module).__name__
    if not structure.is_transformers:
        return SplitFacts({}, not_split=f"the code of {name}, a plain module, does not say how its layers are split")
    try:
        rules = checked_rules(module)
    except RuntimeMismatchError as error:
        return SplitFacts({}, not_split=error.message)
    config = module.config.get_text_config()
    heads = (getattr(config, key, None) for key in ("num_attention_heads", "num_key_value_heads"))
    widths = {count for count in heads if isinstance(count, int)}
    for path, rule in rules.items():
        if rule != "heads_norm":
            layer = module.get_submodule(path)
            widths.add(layer.out_features if rule in ("by_output", "gathered") else layer.in_features)
    inside = {path.rpartition(".")[0] for path in rules}
    loose = [
        path for path, parameter in module.get_submodule(structure.blocks).named_parameters(f"{structure.blocks}")
        if parameter.ndim > 1 and not any(path.startswith(f"{parent}.") for parent in inside)
    ]  # fmt: skip
    not_along = f"{loose[0]} of {name} may mix tokens, of which every rank would have a part" if loose else ""
    if not (structure.head and structure.embedding):
        not_along = f"{name} names no head or no embedding, between which the sequence would be cut"
    head = None if structure.is_tied or structure.head is None else module.get_submodule(structure.head)
    if isinstance(head, nn.Linear) and structure.head is not None:
        rules = {**rules, structure.head: "gathered"}
    return SplitFacts(rules, tuple(sorted(widths)), not_along_sequence=not_along)


def why_not_sharded(module: nn.Module, read_outside: Sequence[str]) -> str:
    """Return why `fully_shard` does not take a module; ``read_outside``: parameters of blocks that are read outside of them."""
    name = type(module).__name__
    scalars = [path for path, parameter in module.named_parameters() if parameter.ndim == 0]
    if scalars:
        return (
            f"{scalars[0]} of {name} is a scalar, of which torch's fully_shard has no part to give (make its shape [1])"
        )
    if read_outside:
        return (
            f"{name} reads {read_outside[0]} outside of its block's forward pass, where fully_shard has not gathered it"
        )
    return ""


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its class."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def why_not_traced(module: nn.Module) -> str:
    """Return why a module cannot be run without values; empty where it may be."""
    for path, parameter in module.named_parameters():
        if is_lazy(parameter):
            return f"{path} has no shape before the first call: let the function that makes the module call it once"
    for path, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            return f"{path} makes sparse gradients, which ranks do not reduce: build it with sparse=False"
    return ""


def cause(error: Exception) -> str:
    """Return where in a user's own code an error comes from, its class and the first line of its message."""
    frames = traceback.extract_tb(error.__traceback__)
    of_user = [frame for frame in frames if not any(part in frame.filename for part in _LIBRARIES)]
    where = f" ({Path(of_user[-1].filename).name}, line {of_user[-1].lineno})" if of_user else ""
    message = first_line(error)
    name = type(error).__name__
    return f"{name}{where}" if message == name else f"{name}: {message}{where}"


def failure(module: nn.Module, error: Exception) -> str:
    """Return which part of a module an error comes from, and its cause."""
    names = {part: name for name, part in module.named_modules()}
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    parts = [part for frame in frames if isinstance(part := frame.f_locals.get("self"), nn.Module) and names.get(part)]
    where = f"in {names[parts[-1]]} ({type(parts[-1]).__name__}): " if parts else ""
    return f"{where}{cause(error)}"
