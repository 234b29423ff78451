"""Which rank is at fault when a job fails.

When a rank dies its peers soon fail too, in the middle of a collective, and the launcher ends those that are left: of
all these deaths one is the cause. Looked at in this order: a rank killed by a signal that the launcher did not send; a
rank with an exception of its own; a rank that aborted; a rank that had to be killed because it no longer answered, where
the others report only that they waited for it; a rank that lost a connection. Within a kind the earliest.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from ...schema import MeshwrightError
from ...schema import errors as our_errors

_TRACE_LINES = 12
_TITLE_CHARACTERS = 200

_LOST_PEER = re.compile(
    r"connection (was )?(likely )?(closed|reset|refused)|closed by peer|broken pipe|socket closed|DistNetworkError|"
    r"remote process exited|ncclRemoteError|ncclSystemError|connectFullMesh",
    re.IGNORECASE,
)
_WAITED = re.compile(r"timed ?out|timeout|watchdog caught collective", re.IGNORECASE)
_COMMUNICATION_ERRORS = ("RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError", "ConnectionError")


class DeathKind(IntEnum):
    """Kinds of death, the likeliest cause first."""

    KILLED = 0
    RAISED = 1
    ABORTED = 2
    WAITED = 3
    LOST_PEER = 4


@dataclass(frozen=True, kw_only=True)
class RankDeath:
    """How one rank ended.

    Attributes:
        exit_code: negative for a signal.
        ended_by_launcher: it was alive when the first failure was seen.
        time_s: when it failed, seconds since the epoch.
        error: one line, ``TypeError: ...``; empty where the process could not report.
        trace: traceback or the last lines of its log.
        payload: fields of a MeshwrightError.
        was_suspended: the launcher found it suspended and killed it.
        was_hung: the launcher found that the other ranks waited for it, and killed it; ``trace`` says where it was.
    """

    rank: int
    exit_code: int
    ended_by_launcher: bool
    time_s: float
    error: str = ""
    trace: tuple[str, ...] = ()
    payload: Mapping[str, Any] | None = None
    was_suspended: bool = False
    was_hung: bool = False

    @property
    def kind(self) -> DeathKind:
        """What this death looks like by itself."""
        name = self.error.partition(":")[0].rpartition(".")[2]
        text = self.error if self.error else "\n".join(self.trace)
        if not self.error or name in _COMMUNICATION_ERRORS:
            if self.exit_code != -signal.SIGKILL and _WAITED.search(text):
                return DeathKind.WAITED
            if self.exit_code != -signal.SIGKILL and _LOST_PEER.search(text):
                return DeathKind.LOST_PEER
        if self.exit_code == -signal.SIGABRT:
            return DeathKind.ABORTED
        return DeathKind.KILLED if self.exit_code < 0 else DeathKind.RAISED


def explain_failure(
    deaths: Iterable[RankDeath], *, world_size: int, ended_well: Sequence[int] = (), memory: str = ""
) -> MeshwrightError:
    """The error of a job that failed: one rank, what happened to it, the last lines it wrote.

    Args:
        deaths: of the ranks of this node, those ended by the launcher included.
        ended_well: ranks of this node that had already ended without an error.
        memory: predicted against available memory, for a rank that the kernel may have killed for want of it.
    """
    deaths = tuple(deaths)
    own = sorted((d for d in deaths if not d.ended_by_launcher), key=lambda d: (d.kind, d.time_s)) or list(deaths)
    cause = own[0]
    silent = [d for d in deaths if d.ended_by_launcher and d.exit_code == -signal.SIGKILL]
    if cause.kind in (DeathKind.WAITED, DeathKind.LOST_PEER) and silent:
        return _explain_silent(silent[0], cause, world_size)
    if cause.payload is not None:
        return _rebuild(cause.payload)
    title = f"rank {cause.rank} of {world_size} {_ending(cause)}"
    if cause.kind in (DeathKind.WAITED, DeathKind.LOST_PEER):
        early = (f"rank {_listed(ended_well)} had already ended, without an error",) if ended_well else ()
        return MeshwrightError(
            title, details=early, help="the cause is on another rank or node: see the messages there"
        )
    details = tuple(cause.trace[:_TRACE_LINES] if cause.was_hung else cause.trace[-_TRACE_LINES:])
    others = [d.rank for d in own[1:] if d.kind in (DeathKind.WAITED, DeathKind.LOST_PEER)]
    if others:
        details = (*details, f"rank {_listed(others)} then lost the connection to it")
    if memory and cause.exit_code == -signal.SIGKILL and not (cause.was_suspended or cause.was_hung):
        details = (*details, memory)
    return MeshwrightError(title, details=details, help=_advice(cause))


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(str(rank) for rank in sorted(ranks))


def _explain_silent(silent: RankDeath, witness: RankDeath, world_size: int) -> MeshwrightError:
    return MeshwrightError(
        f"rank {silent.rank} of {world_size} stopped answering and was killed",
        details=(f"rank {witness.rank} waited for it: {witness.error}",),
        help="look for a process that is suspended, swapping or stuck in a device call on that rank",
    )


def _ending(death: RankDeath) -> str:
    reported = f": {death.error[:_TITLE_CHARACTERS]}" if death.error else ""
    if death.kind is DeathKind.WAITED:
        return f"waited in vain for another rank{reported}"
    if death.kind is DeathKind.LOST_PEER:
        return f"lost the connection to another rank{reported}"
    if death.was_suspended:
        return "was suspended (a stop signal?) and was killed"
    if death.was_hung:
        return (
            "stopped making steps while the others waited for it, and was killed; it was here (innermost call first):"
        )
    if death.exit_code < 0:
        return f"was killed by signal {-death.exit_code} ({_signal_name(-death.exit_code)})"
    return f"failed{reported}" if reported else f"ended with exit code {death.exit_code}"


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in {int(known) for known in signal.Signals} else "unknown"


def _advice(death: RankDeath) -> str | None:
    if death.was_hung:
        return "is a file system it reads from gone? --hang-timeout-s 0 lets ranks take any time"
    if death.exit_code == -signal.SIGKILL and not death.was_suspended:
        return "someone killed it, or the kernel did for want of memory: see `dmesg | tail`"
    if "OutOfMemoryError" in death.error or "out of memory" in death.error.lower():
        return "plan again with a smaller memory budget, or with recompute=full or a smaller micro_batch_size fixed"
    return None


def error_payload(error: MeshwrightError) -> dict[str, Any]:
    """A MeshwrightError as JSON, to cross the process boundary without pickle."""
    return {
        "kind": type(error).__name__,
        "message": error.message,
        "details": list(error.details),
        "help": error.help,
    }


def _rebuild(payload: Mapping[str, Any]) -> MeshwrightError:
    kind = getattr(our_errors, payload["kind"], MeshwrightError)
    return kind(payload["message"], details=tuple(payload["details"]), help=payload["help"])
