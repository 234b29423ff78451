"""Bytes of the tensors that are alive while code runs on fake tensors: no memory is used, every allocation is counted.

Logical bytes: what tensors hold, without an allocator's rounding and fragments.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
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
        min_length = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
        if func is _aten.bincount.default and min_length:
            # Its length depends on the data; the experts of a router's tokens are below the length that it asks for.
            result = args[0].new_empty(min_length, dtype=torch.int64)
        else:
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
