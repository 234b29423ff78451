"""Running a user's module on fake tensors: without caches of keys and values, and with the shapes that torch does not know."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ...schema.errors import ConfigError
from ..measure.traced import shape_unknown_to_torch
from .structure import caching_configs

_LOG = logging.getLogger("torch._subclasses.fake_tensor")


MAX_CALLS = 25_000
"""Of torch in one forward pass: a hundred blocks make some 10,000, recurrences written as a loop over 4,096 tokens millions."""


class _Shapes(TorchDispatchMode):
    """Makes the result of operators whose shape torch cannot tell."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = shape_unknown_to_torch(func, args, kwargs or {})
        return func(*args, **(kwargs or {})) if result is None else result


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
def on_fakes(module: nn.Module, mode: FakeTensorMode) -> Iterator[None]:
    """Run what is inside on fake tensors; a model of transformers keeps no keys and values, which every call would add to."""
    level = _LOG.level
    with ExitStack() as stack:
        _LOG.setLevel(logging.CRITICAL)  # it writes what it raises as well
        stack.callback(_LOG.setLevel, level)
        for config in caching_configs(module):
            config.use_cache = False
            stack.callback(setattr, config, "use_cache", True)
        stack.enter_context(mode)
        stack.enter_context(_Shapes())
        stack.enter_context(_Limit())
        yield
