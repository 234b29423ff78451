"""The deaths of ranks: what a rank records of its own, and which of several is the cause of a failed job.

When a rank dies its peers soon fail too, in the middle of a collective, and the launcher ends those that remain: one of these
deaths is the cause. They are looked at in this order: a rank killed by a signal that the launcher did not send; a rank with an
exception of its own; a rank that aborted; a rank that had to be killed because it no longer answered, where the others report
only that they waited for it; a rank that lost a connection. Within a kind the earliest.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
import traceback
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from ...schema import MeshwrightError
from ...schema import errors as our_errors
from ...schema.units import format_bytes

_TRACE_LINES = 12
_TITLE_CHARACTERS = 200
_LOG_TAIL_LINES = 200
"""Lines of a rank's log that are searched for the kind of its failure; fewer are shown."""

_LOST_PEER = re.compile(
    r"connection (was )?(likely )?(closed|reset|refused)|closed by peer|broken pipe|socket closed|DistNetworkError|"
    r"remote process exited|ncclRemoteError|ncclSystemError|connectFullMesh",
    re.IGNORECASE,
)
_WAITED = re.compile(r"timed ?out|timeout|watchdog caught collective", re.IGNORECASE)
_COMMUNICATION_ERRORS = ("RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError", "ConnectionError")
_OUT_OF_MEMORY = re.compile(
    r"MemoryError|bad_alloc|out of memory|not enough memory|can't allocate memory|annot allocate memory|"
    r"failed to map segment|can't start new thread|Thread creation failed|pthread_create failed"
)
"""How the interpreter, the loader, torch and its libraries say that memory ran out."""


def is_out_of_memory(text: str) -> bool:
    """Tell whether an error or a line of a log says that memory ran out."""
    return _OUT_OF_MEMORY.search(text) is not None


class DeathKind(IntEnum):
    """Kinds of death, the likeliest cause first."""

    KILLED = 0
    RAISED = 1
    ABORTED = 2
    WAITED = 3
    LOST_PEER = 4


FOLLOWING = {
    DeathKind.WAITED: "waited in vain for another rank",
    DeathKind.LOST_PEER: "lost the connection to another rank",
}
"""Kinds that follow from another rank's death."""


@dataclass(frozen=True, kw_only=True)
class RankDeath:
    """How one rank ended.

    Attributes:
        exit_code: negative for a signal.
        ended_by_launcher: it was alive when the first failure was seen.
        time_s: when it failed, seconds since the epoch; 0 where it left no record.
        error: one line, ``TypeError: ...``; empty where the process could not record it.
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
        """Classify this death by itself."""
        name = self.error.partition(":")[0].rpartition(".")[2]
        text = self.error if self.error else "\n".join(self.trace)
        if self.exit_code != -signal.SIGKILL and (not self.error or name in _COMMUNICATION_ERRORS):
            if _WAITED.search(text):
                return DeathKind.WAITED
            if _LOST_PEER.search(text):
                return DeathKind.LOST_PEER
        if self.exit_code == -signal.SIGABRT:
            return DeathKind.ABORTED
        return DeathKind.KILLED if self.exit_code < 0 else DeathKind.RAISED

    @property
    def ran_out_of_memory(self) -> bool:
        """Tell whether memory ran out, as the rank says or as a kill that nobody ordered suggests."""
        if self.exit_code == -signal.SIGKILL:
            return not (self.was_suspended or self.was_hung or self.ended_by_launcher)
        return is_out_of_memory(self.error) or any(is_out_of_memory(line) for line in self.trace[-3:])


def cause_of(deaths: Iterable[RankDeath]) -> RankDeath:
    """Return the death that the others follow from."""
    deaths = tuple(deaths)
    by_themselves = [death for death in deaths if not death.ended_by_launcher]
    return min(by_themselves or deaths[:1], key=lambda death: (death.kind, death.time_s))


def explain_failure(
    deaths: Iterable[RankDeath], *, world_size: int, ended_well: Sequence[int] = (), memory: str = ""
) -> MeshwrightError:
    """Return the error of a job that failed: one rank, what happened to it, the last lines it wrote.

    Args:
        deaths: of the ranks of this node, those ended by the launcher included.
        ended_well: ranks of this node that had already ended without an error.
        memory: predicted against available memory, for a rank that the kernel may have killed for want of it.
    """
    deaths = tuple(deaths)
    cause = cause_of(deaths)
    is_follower = cause.kind in FOLLOWING
    silent = [death for death in deaths if death.ended_by_launcher and death.exit_code == -signal.SIGKILL]
    if is_follower and silent:
        return MeshwrightError(
            f"rank {silent[0].rank} of {world_size} stopped answering and was killed",
            details=(f"rank {cause.rank} waited for it: {cause.error}",),
            help="look for a process that is suspended, swapping or stuck in a device call on that rank",
        )
    if cause.payload is not None:
        kind = getattr(our_errors, cause.payload["kind"], MeshwrightError)
        error: MeshwrightError = kind(
            cause.payload["message"], details=tuple(cause.payload["details"]), help=cause.payload["help"]
        )
        return error
    title = f"rank {cause.rank} of {world_size} {_ending(cause)}"
    if is_follower:
        early = (f"rank {_listed(ended_well)} had already ended, without an error",) if ended_well else ()
        return MeshwrightError(
            title, details=early, help="the cause is on another rank or node: see the messages there"
        )
    details = list(cause.trace[:_TRACE_LINES] if cause.was_hung else cause.trace[-_TRACE_LINES:])
    if followers := [death.rank for death in deaths if not death.ended_by_launcher and death.kind in FOLLOWING]:
        details.append(f"rank {_listed(followers)} then lost the connection to it")
    if memory and cause.exit_code == -signal.SIGKILL and not (cause.was_suspended or cause.was_hung):
        details.append(memory)
    return MeshwrightError(title, details=tuple(details), help=_advice(cause))


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(str(rank) for rank in sorted(ranks))


def _ending(death: RankDeath) -> str:
    reported = f": {death.error[:_TITLE_CHARACTERS]}" if death.error else ""
    if death.kind in FOLLOWING:
        return f"{FOLLOWING[death.kind]}{reported}"
    if death.was_suspended:
        return "was suspended (a stop signal?) and was killed"
    if death.was_hung:
        return (
            "stopped making steps while the others waited for it, and was killed; it was here (innermost call first):"
        )
    if death.exit_code < 0:
        known = {int(number): number.name for number in signal.Signals}
        return f"was killed by signal {-death.exit_code} ({known.get(-death.exit_code, 'unknown')})"
    return f"failed{reported}" if reported else f"ended with exit code {death.exit_code}"


def _advice(death: RankDeath) -> str | None:
    if death.was_hung:
        return "is a file system it reads from gone? --hang-timeout-s 0 lets ranks take any time"
    if death.exit_code == -signal.SIGKILL and not death.was_suspended:
        return "someone killed it, or the kernel did for want of memory: see `dmesg | tail`"
    if is_out_of_memory(death.error):
        return "plan again with a smaller memory budget, or with recompute=full or a smaller micro_batch_size fixed"
    return None


# --- records ---------------------------------------------------------------------------------------------------------


def record_error(path: Path, error: BaseException, *, hidden_files: Collection[str] = ()) -> None:
    """Write what a launcher is to know of an exception, as JSON: nothing is unpickled.

    Args:
        hidden_files: source files whose frames at the start of the traceback are left out.
    """
    lines = str(error).strip().splitlines() or [""]
    first = error.__traceback__
    while first is not None and first.tb_frame.f_code.co_filename in hidden_files:
        first = first.tb_next
    trace = traceback.format_exception(type(error), error, first or error.__traceback__)
    record: dict[str, Any] = {
        "error": f"{type(error).__name__}: {lines[0]}",
        "trace": "".join(trace).rstrip().splitlines(),
        "time_s": time.time(),
    }
    if isinstance(error, MeshwrightError):
        fields = {"message": error.message, "details": list(error.details), "help": error.help}
        record["payload"] = {"kind": type(error).__name__, **fields}
    path.write_text(json.dumps(record), encoding="utf-8")


def _recorded(record: Path) -> dict[str, Any]:
    """Return what a rank recorded; where the disk was full, that it was."""
    try:
        content = json.loads(record.read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else {}
    except ValueError:
        free = format_bytes(shutil.disk_usage(record.parent).free)
        return {
            "error": f"what it would say found no room in {record.parent.parent}, where {free} are free (TMPDIR is another place)"
        }


def read_death(rank: int, exit_code: int, *, ended_by_launcher: bool, record: Path, log: Path) -> RankDeath:
    """Return the death of a rank from what it recorded, or else from the end of its log; either file may be absent."""
    recorded = _recorded(record) if record.exists() else {}
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("Extension modules: ")]
    return RankDeath(
        rank=rank,
        exit_code=exit_code,
        ended_by_launcher=ended_by_launcher,
        time_s=recorded.get("time_s", 0.0),
        error=recorded.get("error", ""),
        trace=tuple((recorded.get("trace") or lines)[-_LOG_TAIL_LINES:]),
        payload=recorded.get("payload"),
    )
