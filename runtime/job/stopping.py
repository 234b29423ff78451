"""What the launcher does when a scheduler asks the job to end (SIGTERM).

A training run that keeps checkpoints is let finish its step and write a last one: the ranks get the signal too, agree on the step,
save and end by themselves. After a grace time, or a second signal, they are ended as by any other signal.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
from torch.distributed.elastic.multiprocessing import SignalException

from ...schema.errors import InterruptedRunError

STOPPED_FILE = "stopped"
"""Written by the ranks into the launcher's folder: the step of the checkpoint with which they ended because they were asked to."""

_AGENT_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")


class Stopping:
    """One job's answer to SIGTERM.

    Args:
        grace_s: how long ranks may take to finish a step and save.
        folder: where they say that they did.
        has_checkpoints: otherwise the signal ends the ranks at once.
    """

    def __init__(self, grace_s: float, folder: Path, *, has_checkpoints: bool) -> None:
        self._grace_s = grace_s
        self._file = folder / STOPPED_FILE
        self._is_patient = has_checkpoints and grace_s > 0
        self._timer: threading.Timer | None = None

    @property
    def agent_signals(self) -> str:
        """Signals that torch's agent handles, in its notation; it ends the ranks on them."""
        return ",".join(name for name in _AGENT_SIGNALS if name != "SIGTERM" or not self._is_patient)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handle SIGTERM here."""
        if not self._is_patient:
            yield
            return
        before = signal.signal(signal.SIGTERM, self._receive)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)
            if self._timer is not None:
                self._timer.cancel()

    def raise_if_stopped(self) -> None:
        """After the ranks have ended.

        Raises:
            InterruptedRunError: they were asked to, here or on another node.
        """
        step = self._file.read_text() if self._file.exists() else None
        if step is not None or self._timer is not None:
            raise InterruptedRunError(signal.SIGTERM, checkpoint_step=None if step is None else int(step))

    def _receive(self, number: int, _: object) -> None:
        if self._timer is not None:
            raise SignalException(f"Process {os.getpid()} got signal: {number}", sigval=signal.Signals(number))
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                child.send_signal(signal.SIGTERM)
        self._timer = threading.Timer(self._grace_s, os.kill, (os.getpid(), signal.SIGTERM))
        self._timer.daemon = True
        self._timer.start()
