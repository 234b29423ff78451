"""A rank of a comparison, one of which (``SLOW``: WORK RANK) does its work twice, or waits before each message that it sends."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from meshwright.profilers.run import preflight
from meshwright.profilers.run.processes import serve_rank
from meshwright.runtime.job import preflight as launching

MESSAGE_S = 0.05


def twice(make: Callable[..., Callable[[], float]]) -> Callable[..., Callable[[], float]]:
    def made(*arguments: Any) -> Callable[[], float]:
        once = make(*arguments)
        return lambda: once() + once()

    return made


def late(send: Callable[..., Any]) -> Callable[..., Any]:
    def send_late(*arguments: Any) -> Any:
        time.sleep(MESSAGE_S)
        return send(*arguments)

    return send_late


def serve() -> None:
    """Do the program's work."""
    work, rank = os.environ["SLOW"].split()
    if rank == os.environ["RANK"]:
        if work == "link":
            dist.send = late(dist.send)
        else:
            name = {"compute": "product", "memory": "stream"}[work]
            setattr(preflight, name, twice(getattr(preflight, name)))
    preflight.main()


def use(slow: str, patch: Any, *, seconds: float) -> None:
    """Let `compare_nodes` start such ranks."""
    patch.setenv("SLOW", slow)
    patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    patch.setattr(launching, "ranks_program", SimpleNamespace(__name__=Path(__file__).stem))
    patch.setattr(launching, "PREFLIGHT_S", seconds)


if __name__ == "__main__":
    serve_rank(serve)
