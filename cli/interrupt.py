"""Ctrl-C: at any moment of this program it ends without a traceback.

While a command works, Ctrl-C is a KeyboardInterrupt, with which it ends what it has started (terminal.py). Before and after that,
while modules are imported and the interpreter ends, there is nothing to undo, and the process leaves at once.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT


def leave_now(_received: int, _frame: FrameType | None) -> None:
    """End the process."""
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


@contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C be a KeyboardInterrupt inside, where the process is this program's own."""
    is_ours = signal.getsignal(signal.SIGINT) is leave_now
    if is_ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, leave_now)
