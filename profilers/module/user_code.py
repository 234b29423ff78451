"""A model that a user names on the command line, and a batch of what it takes: ``my_package.module:Model``, ``batch.py``.

Both are code of the user's own, which is imported as Python imports it, with the current folder on the path.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from ...schema.errors import ConfigError
from ...schema.model import ModelSpec
from ...schema.profile import LayerPoint
from ..modules import profile_module
from .layer_times import time_layers
from .trials import cause, failure

BATCH_NAME = "sample_batch"

DEGREES = (2, 4, 8)
"""Of tensor parallelism, for which operators are placed: those of one node."""

MANY = 2**31
"""Parameters that are not made one by one, which takes minutes where they are drawn at random."""


def profile_user_model(text: str, sample_batch: str | None, *, seq_len: int | None = None) -> ModelSpec:
    """Return the spec of a user's model, as `profile_module` makes it of the model and a batch.

    Args:
        text: ``module:name`` of a class without arguments, of a function that returns a module, or of a module itself.
        sample_batch: ``FILE.py`` that defines ``sample_batch``, or ``module:name``: the arguments of one call (a tensor, a
            sequence, or a mapping by name), or a function that returns them.
        seq_len: what the workload says of its sequences, which must be what the batch has.

    Raises:
        ConfigError: one of them cannot be loaded or traced; the message has the user's own error.
    """
    if sample_batch is None:
        raise ConfigError(
            f"{text}: what it is called with is not known",
            help=f"add --sample-batch batch.py, a file that defines {BATCH_NAME}: a tensor, or a mapping of tensors by name",
        )
    batch = load_batch(sample_batch)
    model = _load_model(text, on_meta=True)
    try:
        spec = profile_module(model, batch, tp=DEGREES)
    except ConfigError:
        raise
    except Exception as error:  # the model's own code, which may raise anything
        raise ConfigError(
            f"{text} does not run on the sample batch: {failure(model, error)}",
            help="call it once on this batch in Python; what it computes may not depend on the values of its input",
        ) from None
    if seq_len is not None and spec.traced_len != seq_len:
        raise ConfigError(
            f"--seq-len {seq_len}: a sample of {sample_batch} has {spec.traced_len} tokens (places, or pixels, of the first block)",
            help=f"use --seq-len {spec.traced_len}, or give a batch of such sequences",
        )
    return spec


def time_user_model(
    text: str, sample_batch: str, *, micro_batches: Sequence[int], cpu_seconds: bool
) -> tuple[LayerPoint, ...]:
    """Return measured seconds of the layers of a user's model, given as for `profile_user_model`, on the CPU."""
    batch, model = load_batch(sample_batch), _load_model(text)
    try:
        spec = profile_module(model, batch)
        return time_layers(model, batch, spec, micro_batches=micro_batches, cpu_seconds=cpu_seconds)
    except ConfigError:
        raise
    except Exception as error:  # the model's own code
        raise ConfigError(
            f"{text} does not run on the sample batch: {failure(model, error)}",
            help="call it and its backward pass once on this batch in Python",
        ) from None


def load_batch(text: str) -> Any:
    """Return the arguments of one call: a mapping by name, or a list."""
    if text.endswith(".py"):
        if not Path(text).is_file():
            raise ConfigError(f"cannot read {text}: there is no such file")
        sys.path.insert(0, str(Path.cwd()))
        try:
            value = runpy.run_path(text).get(BATCH_NAME)
        except Exception as error:  # the user's own code
            raise ConfigError(f"{text} does not run: {cause(error)}") from None
        finally:
            sys.path.pop(0)
        if value is None:
            raise ConfigError(
                f"{text} does not define {BATCH_NAME}",
                help=f"e.g. {BATCH_NAME} = {{'input_ids': torch.zeros(2, 128).long()}}",
            )
    else:
        value = _load(text, "a sample batch")
    if callable(value) and not isinstance(value, torch.Tensor):
        try:
            value = value()
        except Exception as error:  # the user's own code
            raise ConfigError(f"{text}: {BATCH_NAME}() fails: {cause(error)}") from None
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping | list | tuple):
        return value
    raise ConfigError(
        f"{text}: {BATCH_NAME} is a {type(value).__name__}, not a tensor, a sequence or a mapping of tensors"
    )


def _load_model(text: str, *, on_meta: bool = False) -> nn.Module:
    model = made = _load(text, "a model")
    if not isinstance(made, nn.Module) and callable(made):
        try:
            model = _built_on_meta(made) if on_meta else made()
        except Exception as error:  # the user's own code
            asks = isinstance(error, TypeError) and "argument" in str(error)
            raise ConfigError(
                f"{text}() fails: {cause(error)}",
                help="name a function without arguments that returns it" if asks else "call it once in Python",
            ) from None
    return _module(text, model)


def _built_on_meta(make: Callable[[], object]) -> object:
    """Return what a function makes, with parameters on the meta device; what needs their values is built with them.

    Buffers have values, which code may look at, but in large models, whose parameters may be computed with the values of others.
    """
    with suppress(Exception):
        with torch.device("meta"):
            model = make()
        if isinstance(model, nn.Module) and sum(map(torch.numel, model.parameters())) > MANY:
            return model
    with suppress(Exception), _parameters_on_meta():
        return make()
    return make()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Let parameters lose their values where modules get them: a model takes the memory of its largest one. Buffers keep theirs."""
    register, on_meta = nn.Module.register_parameter, WeakIdKeyDictionary()

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta and not is_lazy(parameter):
            if parameter not in on_meta:  # tied ones stay one
                on_meta[parameter] = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
            parameter = on_meta[parameter]
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _module(text: str, model: object) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{text} is no torch.nn.Module but a {type(model).__name__}")
    return model


def _load(text: str, what: str) -> Any:
    name, _, path = text.partition(":")
    if not name or not path:
        raise ConfigError(f"{text} names {what} neither as a file .py nor as module:name")
    sys.path.insert(0, str(Path.cwd()))
    try:
        value: Any = importlib.import_module(name)
    except Exception as error:  # the user's own code, or none
        raise ConfigError(f"cannot import {name}: {cause(error)}") from None
    finally:
        sys.path.pop(0)
    for part in path.split("."):
        if not hasattr(value, part):
            raise ConfigError(f"{name} has no {path}")
        value = getattr(value, part)
    return value
