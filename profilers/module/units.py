"""The units of a module that are placed one by one: its repeated blocks, and modules with parameters outside of these.

A unit reads and puts out whole values (form I), so that everything between units is the user's own code and runs as it is. Units of
one kind (class, sizes, settings, and what they are called with) share a placement.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from .structure import caching_configs


@dataclass
class Unit:
    """A module that is traced by itself.

    Attributes:
        call: arguments of its first call in the sample run, with gradients as there or in a later call.
        read_outside: those of its parameters that other code reads, which stay whole.
        stores: an attribute in which its code keeps a tensor of a call; empty: none.
    """

    path: str
    module: nn.Module
    call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    num_calls: int = 0
    read_outside: set[str] = field(default_factory=set)
    stores: str = ""

    @property
    def kind(self) -> str:
        """A text that equal units have in common; positions in a list do not count."""
        shapes = [(name, tuple(p.shape), p.requires_grad) for name, p in self.module.named_parameters()]
        settings = [
            (name, key, value)
            for name, part in self.module.named_modules()
            for key, value in sorted(vars(part).items())
            if is_setting(value) and not key.startswith("_") and not key.endswith(("_idx", "_id"))
        ]
        return (
            f"{type(self.module).__qualname__} {shapes} {settings} {sorted(self.read_outside)} {described(self.call)}"
        )


def is_setting(value: Any) -> bool:
    """Say whether an attribute of a module is a number or text by which its code may compute."""
    return isinstance(value, str | int | float) or (isinstance(value, tuple | list) and all(map(is_setting, value)))


def described(call: Any) -> str:
    """Return the structure, shapes and constants of a call."""
    leaves, spec = tree_flatten(call)
    texts = [
        f"{tuple(leaf.shape)} {leaf.dtype} {leaf.requires_grad}" if isinstance(leaf, Tensor) else repr(leaf)
        for leaf in leaves
    ]
    return f"{texts} {spec}"


def find_units(module: nn.Module) -> list[Unit]:
    """Return the units, outermost first: children of lists and sequences, and modules that have parameters of their own."""
    return [Unit(path, unit) for path, unit in _walk("", module)]


def _walk(path: str, module: nn.Module, *, is_listed: bool = False) -> Iterator[tuple[str, nn.Module]]:
    children = list(module.named_children())
    is_list = isinstance(module, nn.ModuleList | nn.ModuleDict)
    if not any(True for _ in module.parameters()):
        return
    is_chain = isinstance(module, nn.Sequential) and not any(
        True for child in module.children() for _ in child.children()
    )
    is_owner = any(True for _ in module.parameters(recurse=False))
    if path and not is_list and (((is_listed or is_owner) and not _holds_lists(module)) or not children or is_chain):
        yield path, module
        return
    for name, child in children:
        yield from _walk(
            f"{path}.{name}" if path else name, child, is_listed=is_list or isinstance(module, nn.Sequential)
        )


def _holds_lists(module: nn.Module) -> bool:
    """Return whether a module holds lists of modules that are no leaves: a stage of blocks, not a block of layers."""
    return any(
        isinstance(part, nn.ModuleList) and any(any(True for _ in child.children()) for child in part)
        for part in module.modules()
    )


class _Watch(TorchFunctionMode):
    """Notes which parameters of units are read while none of their units runs."""

    def __init__(self, owners: Mapping[int, tuple[Unit, str]], running: list[Unit]) -> None:
        super().__init__()
        self._owners, self._running = owners, running

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        # Of what is got of a parameter, only a tensor (its transpose) has its values.
        is_fact = getattr(func, "__name__", "") == "__get__" and not isinstance(made, Tensor)
        if not self._running and not is_fact:
            for leaf in tree_leaves((args, kwargs)):
                if id(leaf) in self._owners:
                    unit, name = self._owners[id(leaf)]
                    unit.read_outside.add(name)
        return made


def sample_run(
    module: nn.Module, units: Sequence[Unit], args: Sequence[Any], kwargs: Mapping[str, Any], *, each: bool = False
) -> None:
    """Run a module once and note what its units are called with, and what of theirs is read outside of them.

    Parameters on the meta device are given values where their unit runs.

    Args:
        each: run every unit, with all parameters there, as one may be read outside of its unit. Unset, one of a kind that has run
            puts out what that one did: most models stand this, and 48 blocks take as long as one.
    """
    running, values = list[Unit](), Values()
    inside = {part for unit in units for part in unit.module.modules()}
    values.give(part for part in module.modules() if each or part not in inside)
    owners = {id(p): (unit, name) for unit in units for name, p in unit.module.named_parameters()}
    outputs: dict[str, Any] = {}
    with ExitStack() as stack:
        for config in caching_configs(module):
            config.use_cache = False
            stack.callback(setattr, config, "use_cache", True)
        for unit in units:

            def enter(_: nn.Module, given: Any, named: Any, unit: Unit = unit) -> None:
                running.append(unit)
                unit.num_calls += 1
                if unit.call is None:
                    unit.call = tree_map(copied, (given, named))
                else:
                    _add_gradients(unit.call, (given, named))

            def leave(*_: Any) -> None:
                running.pop()

            def run(*given: Any, unit: Unit = unit, forward: Any = unit.module.forward, **named: Any) -> Any:
                kind = "" if each or unit.num_calls != 1 else unit.kind
                if kind and kind in outputs:
                    return tree_map(_cloned, outputs[kind])
                values.give(unit.module.modules())
                owners.update({id(p): (unit, name) for name, p in unit.module.named_parameters()})
                made = forward(*given, **named)
                if kind:
                    outputs[kind] = made
                return made

            stack.callback(_restore, unit.module, vars(unit.module).get("forward"))
            unit.module.forward = run
            stack.callback(unit.module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(unit.module.register_forward_hook(leave).remove)
        stack.enter_context(_Watch(owners, running))
        module(*args, **kwargs)


def _restore(module: nn.Module, forward: Any) -> None:
    del module.forward
    if forward is not None:
        module.forward = forward


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _add_gradients(call: Any, later: Any) -> None:
    """Mark what has a gradient in a later call: the first one of a recurrence is on zeros."""
    leaves, spec = tree_flatten(call)
    others, other_spec = tree_flatten(later)
    for leaf, other in zip(leaves, others, strict=True) if spec == other_spec else ():
        if isinstance(leaf, Tensor) and isinstance(other, Tensor) and other.requires_grad and leaf.dtype == other.dtype:
            leaf.requires_grad_()


def copied(value: Any) -> Any:
    """Return a copy of a tensor that is a leaf with the same flag, laid out as a graph is traced at run time."""
    if not isinstance(value, Tensor):
        return value
    copy = value.detach().clone(memory_format=torch.contiguous_format)
    return copy.requires_grad_(value.requires_grad)


class Values:
    """Gives what is on the meta device values on the CPU, for trials: parameters random ones, buffers ones; tied ones stay one."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self._made: dict[int, tuple[Tensor, Tensor]] = {}

    def give(self, parts: Iterable[nn.Module]) -> None:
        """Change the tensors of modules, not of what is inside of these, in place."""
        for part in parts:
            for tensors in (part._parameters, part._buffers):
                for name, tensor in tensors.items():
                    if tensor is None or not tensor.is_meta:
                        continue
                    if id(tensor) not in self._made:
                        self._made[id(tensor)] = tensor, self._valued(tensor)
                    tensors[name] = self._made[id(tensor)][1]

    def _valued(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            return torch.ones_like(tensor, device="cpu")
        drawn = torch.empty_like(tensor, device="cpu").normal_(0, 0.05, generator=self._generator)
        return nn.Parameter(drawn, tensor.requires_grad)
