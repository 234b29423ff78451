"""Ctrl-C during a search: the first one ends the search with the best so far, the second one ends the command."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from ..planner.deadline import Deadline


@contextmanager
def stopping_on_interrupt(deadline: Deadline) -> Iterator[None]:
    """While open, Ctrl-C stops ``deadline``; once more, or where there is no answer yet, it is a KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    from ..schema import SolverLimitError

    def stop(received: int, frame: FrameType | None) -> None:
        if deadline.is_stopped:
            raise KeyboardInterrupt
        deadline.stop()
        typer.echo("stopping with the best so far; Ctrl-C again to leave at once", err=True)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    except SolverLimitError as error:
        if deadline.is_stopped:
            typer.echo(str(error), err=True)
            raise KeyboardInterrupt from None
        raise
    finally:
        signal.signal(signal.SIGINT, before)
