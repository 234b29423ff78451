"""Bytes of the tensors that are alive while code runs on fake tensors: no memory is used, every allocation is counted.

Logical bytes: what tensors hold, without an allocator's rounding and fragments.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten


class LiveBytes(TorchDispatchMode):
    """Counts storages from their creation to their death; open it inside a FakeTensorMode. Final.

    Attributes:
        current: bytes alive now; ``peak``: most since the last `reset_peak`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current = 0
        self.peak = 0
        self._alive: dict[int, tuple[weakref.ref[Any], int]] = {}

    def track(self, tensors: Iterable[Any]) -> None:
        """Count tensors that were made before."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                self._track(tensor.untyped_storage())

    def reset_peak(self) -> None:
        """Look for the peak from here on."""
        self.peak = self.current

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = _of_fake(func, args, kwargs)
        if result is None:
            result = func(*args, **kwargs)
        self.track(tree_leaves(result))
        return result

    def _track(self, storage: Any) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self._alive:
            self._resize(key, size)
            return
        self._alive[key] = weakref.ref(storage, lambda _: self._free(key)), size
        self._grow(size)

    def _resize(self, key: int, size: int) -> None:
        reference, known = self._alive[key]
        if size != known:
            self._alive[key] = reference, size
            self._grow(size - known)

    def _free(self, key: int) -> None:
        self.current -= self._alive.pop(key)[1]

    def _grow(self, size: int) -> None:
        self.current += size
        self.peak = max(self.peak, self.current)


def _of_fake(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """What torch cannot tell of fake tensors; None for all else.

    The length of a count depends on the data; those of a router's tokens are below the length that it asks for. The shape of a
    grouped product is only known to torch in bf16.
    """
    if not args or not isinstance(args[0], FakeTensor):
        return None
    first = args[0]
    if func is _aten.bincount.default:
        least = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
        return first.new_empty(least, dtype=torch.int64) if least else None
    if func is _aten._grouped_mm.default and first.dtype != torch.bfloat16:
        second, ends = args[1], args[2] if len(args) > 2 else kwargs["offs"]
        if first.dim() == second.dim() == 2:
            return first.new_empty(len(ends), first.shape[0], second.shape[1])
        return first.new_empty(first.shape[0], second.shape[-1])
    return None
