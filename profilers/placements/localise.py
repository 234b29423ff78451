"""An operator's arguments on one rank: tensors in their forms, and sizes written in its arguments as they are there.

An export writes sizes as numbers: ``view(x, [2, 16, 32])``. On a rank some of them are smaller. A *variant* says which: none;
``out:d``, a list of sizes is that of the output, of which dimension d is cut; or the positions of numbers divided by the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

MAX_SIZE = 2**31
"""Numbers above it mean "to the end"."""


def _weight_norm(direction: Tensor, length: Tensor, dim: int = 0) -> Tensor:
    return direction * (length / torch.norm_except_dim(direction, 2, dim))


_IN_PLACE_OF: dict[Any, Any] = {
    torch.ops.aten._weight_norm.default: _weight_norm,
    torch.ops.aten.view.default: torch.ops.aten.reshape.default,
    torch.ops.aten._unsafe_view.default: torch.ops.aten.reshape.default,
}
"""Views of a rank's part, which may lie otherwise in memory than the whole value does, are copies where they must be; the kernel
of weight norms writes beyond its output where the sizes of its inputs do not fit."""


class Call:
    """One call of an operator: its tensors by position, in the order in which they stand in its arguments.

    Attributes:
        target: the operator; producers: the nodes that make its tensors; numbers: sizes and other integers, by position.
    """

    def __init__(self, node: fx.Node) -> None:
        self.target: Callable[..., Any] = _without_writing(node)
        self._leaves, self._spec = tree_flatten((tuple(node.args), dict(node.kwargs)), is_leaf=_is_leaf)
        self._tensor_idxs = [idx for idx, leaf in enumerate(self._leaves) if isinstance(leaf, fx.Node)]
        self.producers: list[fx.Node] = [self._leaves[idx] for idx in self._tensor_idxs]
        self.numbers = {
            idx: leaf for idx, leaf in enumerate(self._leaves) if isinstance(leaf, int) and not isinstance(leaf, bool)
        }
        self._lists = _lists(node)
        self.name = str(self.target if isinstance(self.target, torch._ops.OpOverload) else node.target)
        self._is_double = False

    @property
    def static(self) -> str:
        """Return what of the call are no tensors, as text."""
        return f"{[leaf for leaf in self._leaves if not isinstance(leaf, fx.Node)]} {self._tensor_idxs}"

    def variants(self, out_shape: Sequence[int] | None, num_ranks: int) -> list[str]:
        """Return the variants that may be right where some input is cut."""
        variants = [""]
        sizes = {idx: n for idx, n in self.numbers.items() if 1 < n < MAX_SIZE and n % num_ranks == 0}
        if out_shape is not None and any(len(idxs) == len(out_shape) for idxs in self._lists):
            variants += [f"out:{dim}" for dim, size in enumerate(out_shape) if size % num_ranks == 0]
        groups = [[idx] for idx in sizes] + [[idx for idx in idxs if idx in sizes] for idxs in self._lists]
        groups.append(list(sizes))
        variants += [",".join(map(str, group)) for group in groups if group]
        return list(dict.fromkeys(variants))

    def run(self, tensors: Sequence[Any], variant: str, num_ranks: int, out_shape: Sequence[int] | None = None) -> Any:
        """Run the operator on tensors in place of its own."""
        leaves = list(self._leaves)
        for idx, tensor in zip(self._tensor_idxs, tensors, strict=True):
            leaves[idx] = tensor
        if variant.startswith("out:"):
            assert out_shape is not None
            idxs = next(idxs for idxs in self._lists if len(idxs) == len(out_shape))
            for dim, (idx, size) in enumerate(zip(idxs, out_shape, strict=True)):
                leaves[idx] = size // num_ranks if dim == int(variant[4:]) else size
        elif variant:
            for idx in map(int, variant.split(",")):
                leaves[idx] //= num_ranks
        args, kwargs = tree_unflatten(leaves, self._spec)
        made = self.target(*args, **kwargs)
        return tree_map(_doubled, made) if self._is_double else made

    def resized(self, sizes: Mapping[int, int]) -> Call:
        """Return the call with other numbers in the place of some."""
        changed = object.__new__(Call)
        vars(changed).update(vars(self))
        changed.numbers = {idx: sizes.get(n, n) for idx, n in self.numbers.items()}
        changed._leaves = [changed.numbers.get(idx, leaf) for idx, leaf in enumerate(self._leaves)]
        return changed

    def with_changed(self, name: str, value: Any) -> Call | None:
        """Return the call with an argument of that name set; None where the operator has none."""
        schema = getattr(self.target, "_schema", None)
        names = [argument.name for argument in schema.arguments] if schema is not None else []
        if name not in names:
            return None
        args, kwargs = tree_unflatten(list(self._leaves), self._spec)
        position = names.index(name)
        if len(args) > position:
            args = (*args[:position], value, *args[position + 1 :])
        else:
            kwargs = {**kwargs, name: value}
        changed = object.__new__(Call)
        vars(changed).update(vars(self))
        changed._leaves, changed._spec = tree_flatten((args, kwargs), is_leaf=_is_leaf)
        changed._tensor_idxs = [idx for idx, leaf in enumerate(changed._leaves) if isinstance(leaf, fx.Node)]
        return changed

    def in_double(self) -> Call:
        """Return the call with fp64 where its arguments say a type of fewer bits, and for what it makes of integers."""
        changed = object.__new__(Call)
        vars(changed).update(vars(self))
        changed._leaves = [in_double(leaf) if isinstance(leaf, torch.dtype) else leaf for leaf in self._leaves]
        changed._is_double = True
        return changed

    def on_device(self, device: torch.device) -> Call:
        """Return the call with another device where its arguments say one."""
        changed = object.__new__(Call)
        vars(changed).update(vars(self))
        changed._leaves = [device if isinstance(leaf, torch.device) else leaf for leaf in self._leaves]
        return changed

    def argument(self, name: str) -> Any:
        """Return an argument by name, or its default; None where the operator has none."""
        schema = getattr(self.target, "_schema", None)
        args, kwargs = tree_unflatten(list(self._leaves), self._spec)
        for position, argument in enumerate(schema.arguments if schema is not None else ()):
            if argument.name == name:
                return (
                    args[position]
                    if len(args) > position
                    else kwargs.get(name, getattr(argument, "default_value", None))
                )
        return None


def is_inexact(dtype: torch.dtype) -> bool:
    """Return whether a type is of real or complex numbers, which round and may have gradients, not of integers or booleans."""
    return dtype.is_floating_point or dtype.is_complex


def in_double(dtype: torch.dtype) -> torch.dtype:
    """Return a type of numbers with 64 bits each; others as they are."""
    return torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else dtype


def _doubled(value: Any) -> Any:
    return value.to(in_double(value.dtype)) if isinstance(value, Tensor) else value


def _without_writing(node: fx.Node) -> Callable[..., Any]:
    """Return the operator that returns what one that writes into a value would write: nobody else reads it (export.py)."""
    target: Any = _IN_PLACE_OF.get(node.target, node.target)
    schema = getattr(target, "_schema", None)
    written = node.args[0] if node.args else None
    if schema is None or not schema.is_mutable or (isinstance(written, fx.Node) and written.op == "placeholder"):
        return target  # type: ignore[no-any-return]
    packet = getattr(torch.ops.aten, schema.name.removeprefix("aten::").removesuffix("_"), None)
    return getattr(packet, schema.overload_name or "default", target)


def _is_leaf(value: Any) -> bool:
    return isinstance(value, torch.Size)


def _lists(node: fx.Node) -> list[list[int]]:
    """Return the positions of the numbers of each list of numbers in the arguments."""
    counter = iter(range(10**6))
    numbered = tree_map(lambda _: next(counter), (tuple(node.args), dict(node.kwargs)), is_leaf=_is_leaf)
    lists: list[list[int]] = []

    def walk(value: Any, positions: Any) -> None:
        if (
            isinstance(value, list | tuple)
            and value
            and all(isinstance(v, int) and not isinstance(v, bool) for v in value)
        ):
            lists.append(list(positions))
        elif isinstance(value, list | tuple):
            for inner, idx in zip(value, positions, strict=True):
                walk(inner, idx)
        elif isinstance(value, dict):
            for key, inner in value.items():
                walk(inner, positions[key])

    walk((tuple(node.args), dict(node.kwargs)), numbered)
    return lists


def tensors_of(value: Any) -> list[Tensor]:
    """Return what an operator puts out as a list of tensors."""
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]
