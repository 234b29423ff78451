"""A model that a user names on the command line, and a batch of what it takes: ``my_package.module:Model``, ``batch.py``.

Both are code of the user's own, which is imported as Python imports it, with the current folder on the path.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...schema.errors import ConfigError
from ...schema.model import ModelSpec
from ...schema.profile import LayerPoint
from ..modules import profile_module
from .layer_times import time_layers
from .trials import first_line

BATCH_NAME = "sample_batch"

DEGREES = (2, 4, 8)
"""Of tensor parallelism, for which operators are placed: those of one node."""


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
    try:
        with torch.device("meta"):
            model = _load_model(text)
    except (RuntimeError, NotImplementedError):
        model = _load_model(text)  # looks at numbers as it is built
    try:
        spec = profile_module(model, batch, tp=DEGREES)
    except ConfigError:
        raise
    except Exception as error:  # the model's own code, which may raise anything
        raise ConfigError(
            f"{text} does not run on the sample batch: {type(error).__name__}: {first_line(error)}",
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
            f"{text} does not run on the sample batch: {type(error).__name__}: {first_line(error)}",
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
            raise ConfigError(f"{text} does not run: {type(error).__name__}: {first_line(error)}") from None
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
        value = value()
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping | list | tuple):
        return value
    raise ConfigError(
        f"{text}: {BATCH_NAME} is a {type(value).__name__}, not a tensor, a sequence or a mapping of tensors"
    )


def _load_model(text: str) -> nn.Module:
    made = _load(text, "a model")
    try:
        model = made if isinstance(made, nn.Module) or not callable(made) else made()
    except (RuntimeError, NotImplementedError):
        raise
    except Exception as error:  # the user's own code
        raise ConfigError(
            f"{text}() fails: {type(error).__name__}: {first_line(error)}",
            help="name a function without arguments that returns it",
        ) from None
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
        raise ConfigError(f"cannot import {name}: {type(error).__name__}: {first_line(error)}") from None
    finally:
        sys.path.pop(0)
    for part in path.split("."):
        if not hasattr(value, part):
            raise ConfigError(f"{name} has no {path}")
        value = getattr(value, part)
    return value
