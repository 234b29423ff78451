"""A user's own training script, rehearsed: stopped after its second update.

The script runs as under `apply`, in this process: what starts and ends a job does nothing, for there is one already; `parallelize`
takes the model to the meta device, splits it and goes on with fake tensors. Everything else is the script's own.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ...schema.errors import ConfigError
from .. import parallelize_model
from ..parallel_model import ParallelModel

STEPS = 2


class _EnoughError(BaseException):
    """The script has done its steps; no `except Exception` of its own stops this."""


def run_script(
    script: tuple[str, ...],
    environment: Mapping[str, str],
    *,
    on_split: Callable[[Any], object],
    on_model: Callable[[ParallelModel], object],
    on_update: Callable[[torch.optim.Optimizer], object],
) -> None:
    """Run a script and its arguments until its second update, or to its end.

    Args:
        on_split: of `parallelize`.
        on_model: told the model that it returns.
        on_update: told the optimizer after its first update.

    Raises:
        ConfigError: there is no such script, or it calls no `parallelize`.
    """
    if not Path(script[0]).is_file():
        raise ConfigError(f"no such script: {script[0]}")
    original, models, updates = parallelize_model.parallelize, list[ParallelModel](), list[int]()

    def parallelize(model: nn.Module | None, *args: Any, **kwargs: Any) -> ParallelModel:
        if model is not None:
            model.to("meta")
        kwargs["device"] = torch.device("cpu")
        models.append(original(model, *args, **{**kwargs, "weights": None}, on_split=on_split))
        on_model(models[-1])
        return models[-1]

    def count(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        updates.append(1)
        if len(updates) == STEPS:
            raise _EnoughError
        on_update(optimizer)

    hook = register_optimizer_step_post_hook(count)
    try:
        with (
            mock.patch.object(parallelize_model, "parallelize", parallelize),
            mock.patch.object(dist, "init_process_group", lambda *_, **__: None),
            mock.patch.object(dist, "destroy_process_group", lambda *_, **__: None),
            mock.patch.dict(os.environ, environment),
            _as_program(script),
            contextlib.suppress(_EnoughError),
        ):
            runpy.run_path(script[0], run_name="__main__")
    finally:
        hook.remove()
    if not models:
        raise ConfigError(
            f"{script[0]} calls no parallelize(model, plan)",
            help="meshwright rehearse PLAN rehearses the plan's own model",
        )


@contextlib.contextmanager
def _as_program(script: tuple[str, ...]) -> Iterator[None]:
    """Let Python's path and arguments be those of the script; what it prints goes to stderr."""
    path = [str(Path(script[0]).resolve().parent), *sys.path[0 if sys.flags.safe_path else 1 :]]
    with (
        mock.patch.object(sys, "argv", list(script)),
        mock.patch.object(sys, "path", path),
        contextlib.redirect_stdout(sys.stderr),
    ):
        yield
