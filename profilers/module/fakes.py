"""Running a user's module on fake tensors: without caches of keys and values, and with the shapes that torch does not know.

Integers and booleans that follow from the sample (indices, masks, sizes of images) are computed for real next to the fake ones, so
that code that looks at them runs as it does. What looks at numbers that depend on weights cannot.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ...schema.errors import ConfigError
from ..measure.traced import shape_unknown_to_torch
from .structure import caching_configs

_LOG = logging.getLogger("torch._subclasses.fake_tensor")


MAX_CALLS = 25_000
"""Of torch in one forward pass: a hundred blocks make some 10,000, recurrences written as a loop over 4,096 tokens millions."""


MAX_KNOWN = 2**20
"""Entries of integers and booleans that are computed for real."""

_BY_VALUE = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default)
_UNWRITTEN = (
    torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default, torch.ops.aten.new_empty.default,
    torch.ops.aten.empty_strided.default, torch.ops.aten.new_empty_strided.default,
)  # fmt: skip
"""What makes tensors whose values are whatever lay in memory."""

_READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)


def know(fake: Tensor, value: Tensor) -> Tensor:
    """Return a fake tensor whose values are known where they are few integers or booleans."""
    is_real = not value.is_meta and not isinstance(value, FakeTensor)
    if is_real and not value.is_floating_point() and value.numel() <= MAX_KNOWN:
        vars(fake)["_known"] = value
    return fake


def _known(tensor: Tensor) -> Tensor | None:
    if not isinstance(tensor, FakeTensor):
        return None if tensor.is_floating_point() or tensor.is_meta or tensor.numel() > MAX_KNOWN else tensor
    value = vars(tensor).get("_known")
    return value if isinstance(value, Tensor) else tensor.constant


class _Shapes(TorchDispatchMode):
    """Makes the result of operators whose shape torch cannot tell, and follows integers and booleans."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = shape_unknown_to_torch(func, args, kwargs)
        if result is not None:
            return result
        leaves, spec = tree_flatten((args, kwargs))
        if func in _BY_VALUE:  # indices where a mask is true, in its stead
            per_dim = [list(_indices(index)) for index in args[1]]
            args = (args[0], [index for indices in per_dim for index in indices], *args[2:])
        known = [_known(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        is_known = func not in _UNWRITTEN and not any(
            value is None and leaf is not None for value, leaf in zip(known, leaves, strict=True)
        )
        if is_known and func in _READS:
            value = _for_real(func, tree_unflatten(known, spec))
            return know(torch.empty(value.shape, dtype=value.dtype), value) if isinstance(value, Tensor) else value
        result = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, FakeTensor)]
        if not made or any(t.is_floating_point() or t.is_complex() or t.numel() > MAX_KNOWN for t in made):
            return result
        values = tree_leaves(_for_real(func, tree_unflatten(known, spec))) if is_known else [None] * len(made)
        for fake, value in zip(made, values, strict=False):
            vars(fake)["_known"] = value
        return result


def _for_real(func: Any, call: Any) -> Any:
    args, kwargs = call
    with _disable_current_modes():
        return func(*args, **kwargs)


def _indices(index: Any) -> Iterator[Any]:
    value = _known(index) if isinstance(index, Tensor) else None
    if value is None or value.dtype != torch.bool:
        yield index
    else:
        with _disable_current_modes():
            indices = value.nonzero().unbind(1)
        yield from indices


class _Limit(TorchFunctionMode):
    """Ends what has no end; here and not below, where an exception may meet code of torch that takes none."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._count += 1
        if self._count == MAX_CALLS:  # once: what restores modes while the stack is unwound must not raise
            raise ConfigError(
                f"its forward pass calls torch more than {MAX_CALLS:,} times: loops of Python, as a recurrence token by token",
                help="trace it with a package that has a kernel for it, or with shorter sequences",
            )
        return func(*args, **(kwargs or {}))


@contextmanager
def without_caches(module: nn.Module) -> Iterator[None]:
    """Let a model of transformers keep no keys and values inside, which every call would add to."""
    with ExitStack() as stack:
        for config in caching_configs(module):
            config.use_cache = False
            stack.callback(setattr, config, "use_cache", True)
        yield


def batch_norms(module: nn.Module) -> dict[str, nn.Module]:
    """Return the parts that normalise by the statistics of a batch, by path."""
    return {path: part for path, part in module.named_modules() if isinstance(part, _BatchNorm) and part.training}


@contextmanager
def of_one_sample(module: nn.Module) -> Iterator[list[nn.Module]]:
    """Let batch norms that get one value of a channel, of which there are no statistics, use those that they keep; yield them."""
    evaluated = list[nn.Module]()

    def enter(norm: nn.Module, args: tuple[Tensor, ...]) -> None:
        if args[0].numel() == args[0].shape[1] and getattr(norm, "track_running_stats", False):
            evaluated.append(norm.eval())

    with ExitStack() as stack:
        for norm in batch_norms(module).values():
            stack.enter_context(norm.register_forward_pre_hook(enter))
            stack.enter_context(norm.register_forward_hook(lambda norm, *_: norm.train() and None))
        yield evaluated


@contextmanager
def on_fakes(module: nn.Module, mode: FakeTensorMode) -> Iterator[None]:
    """Run what is inside on fake tensors, without caches of keys and values."""
    level = _LOG.level
    with ExitStack() as stack:
        _LOG.setLevel(logging.CRITICAL)  # it writes what it raises as well
        stack.callback(_LOG.setLevel, level)
        stack.enter_context(without_caches(module))
        stack.enter_context(mode)
        stack.enter_context(_Shapes())
        stack.enter_context(_Limit())
        yield
