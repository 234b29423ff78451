"""Start one process per device of this node through torchrun's elastic agent, and say in one message why a job failed.

On several nodes every node runs the same command; the agents meet at a rendezvous. Without a node rank they number
themselves (backend c10d); with one, the plan's order of nodes holds (backend static).

What the launcher does when a scheduler asks the job to end (SIGTERM).

A training run that keeps checkpoints is let finish its step and write a last one: the ranks get the signal too, agree on the step,
save and end by themselves. After a grace time, or a second signal, they are ended as by any other signal.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ...profilers.machine import cpu_rank_environment, environment, num_cores
from ...profilers.run.faults import RankDeath, explain_failure
from ...schema import MeshwrightError, NodeGroup, Plan
from ...schema.errors import InterruptedRunError, NodesNotMetError
from .machine import check_machine, local_group, memory_line
from .rendezvous import Rendezvous, interface_of, is_endpoint_local, local_address
from .watch import FOLDER_VARIABLE, STOPPED_FILE, Watch, watching
from .worker import Job

_SHUTDOWN_S = 5
"""How long ranks may take to end after a signal, before they are killed."""


_LOG_TAIL_LINES = 200
"""Lines of a rank's log that are searched for the kind of its failure; fewer are shown."""


_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


_AGENT_LOGGER = "torch.distributed.elastic"


def launch(plan: Plan, job: Job, *, rendezvous: Rendezvous | None = None) -> None:
    """Run a job on this node's devices to its end; returns when every rank has ended well.

    Call it from the main thread: signals to this process end the ranks. Log lines of the built-in training's ranks are
    kept for the error message; a user's script writes to this process's own streams.

    Raises:
        RuntimeMismatchError: this machine is not what the plan is for.
        NodesNotMetError: not all nodes came.
        MeshwrightError: a rank failed, or a signal ended the job. No process is left behind.
    """
    rendezvous = rendezvous or Rendezvous()
    group = local_group(plan, nnodes=rendezvous.nnodes, node_rank=rendezvous.node_rank)
    check_machine(plan, group)
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder, _agent_messages() as signalled, _own_signals():
        job_path, progress = Path(folder) / "job.json", Path(folder) / "progress"
        job.save(job_path)
        progress.mkdir()
        redirects = Std.NONE if job.script else Std.ALL
        logs = DefaultLogsSpecs(f"{folder}/ranks", redirects=redirects)
        stopping = Stopping(job.grace_s, progress, has_checkpoints=_has_checkpoints(job))
        run = elastic_launch(_config(rendezvous, group.devices_per_node, logs, stopping.agent_signals), sys.executable)
        variables = {**_worker_environment(job, group), **_network(rendezvous), FOLDER_VARIABLE: str(progress)}
        watch = Watch()
        try:
            with environment(variables), watching(progress, watch, job.hang_timeout_s), stopping.listening():
                run("-u", "-m", f"{__package__}.worker", str(job_path))
            stopping.raise_if_stopped()
        except ChildFailedError as error:
            _end_process_groups(error.failures.values())
            stopping.raise_if_stopped()
            deaths = [
                _death(rank, failure, Path(folder), watch, by_launcher=failure.pid in signalled)
                for rank, failure in error.failures.items()
            ]
            ranks = range(plan.layout.world_size) if rendezvous.nnodes == 1 else ()
            ended_well = [rank for rank in ranks if rank not in error.failures]
            memory = memory_line(plan, torch.device("cpu")) if group.device.vendor == "cpu" else ""
            raise explain_failure(
                deaths, world_size=plan.layout.world_size, ended_well=ended_well, memory=memory
            ) from None
        except (SignalException, KeyboardInterrupt) as error:
            received = error.sigval if isinstance(error, SignalException) else signal.SIGINT
            raise InterruptedRunError(received) from None
        except (RendezvousError, DistError) as error:
            has_begun = any(Path(folder).glob("ranks/*/attempt_0/0"))
            raise (_lost_nodes(error) if has_begun else _not_met(rendezvous, error)) from None


def _has_checkpoints(job: Job) -> bool:
    return not job.script and job.options.checkpoint_dir is not None


def _config(rendezvous: Rendezvous, nproc_per_node: int, logs: DefaultLogsSpecs, signals: str) -> LaunchConfig:
    is_static = rendezvous.node_rank is not None and rendezvous.nnodes > 1
    settings: dict[str, Any] = {"timeout": rendezvous.timeout_s}
    if is_static:
        settings["rank"] = rendezvous.node_rank
    elif rendezvous.nnodes > 1:
        settings |= {"join_timeout": rendezvous.timeout_s, "read_timeout": rendezvous.timeout_s}
        is_host = is_endpoint_local(rendezvous.endpoint or "")
        settings |= {} if is_host is None else {"is_host": is_host}
    options: dict[str, Any] = {"shutdown_timeout": _SHUTDOWN_S, "signals_to_handle": signals}
    known = {field.name for field in fields(LaunchConfig)}
    return LaunchConfig(
        min_nodes=rendezvous.nnodes,
        max_nodes=rendezvous.nnodes,
        nproc_per_node=nproc_per_node,
        run_id=rendezvous.run_id or ("meshwright" if rendezvous.nnodes > 1 else uuid.uuid4().hex),
        rdzv_backend="static" if is_static else "c10d",
        rdzv_endpoint=rendezvous.endpoint or "localhost:0",
        rdzv_configs=settings,
        local_addr=_address(rendezvous),
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=logs,
        **{name: value for name, value in options.items() if name in known},  # torch 2.11 has no such option
    )


def _worker_environment(job: Job, group: NodeGroup) -> dict[str, str]:
    threads = str(max(1, num_cores() // group.devices_per_node))
    chosen = {name: os.environ.get(name, threads) for name in _THREAD_VARIABLES}
    memory = cpu_rank_environment() if group.device.vendor == "cpu" else {}
    return {**chosen, **memory, "MESHWRIGHT_PLAN": job.plan}


def _address(rendezvous: Rendezvous) -> str | None:
    return "localhost" if rendezvous.nnodes == 1 else local_address(rendezvous.endpoint or "")


def _network(rendezvous: Rendezvous) -> dict[str, str]:
    """The interface for gloo's connections: by itself it takes that of the machine's name, which may be the loopback."""
    address = _address(rendezvous)
    interface = interface_of(address) if rendezvous.nnodes > 1 and address else None
    return {_GLOO_INTERFACE: interface} if interface and _GLOO_INTERFACE not in os.environ else {}


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Give back the signal handlers that the agent replaces."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _SignalledProcesses(logging.Handler):
    """Collects the processes that the agent ends itself, from its log: ``Sending process %s closing signal %s``."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.pids: set[int] = set()

    def emit(self, record: logging.LogRecord) -> None:
        if str(record.msg).startswith("Sending process") and isinstance(record.args, tuple):
            self.pids.add(int(str(record.args[0])))


@contextlib.contextmanager
def _agent_messages() -> Iterator[set[int]]:
    """Keep the agent's own messages off the terminal; yields the processes it says it ends."""
    logger = logging.getLogger(_AGENT_LOGGER)
    handler, propagate = _SignalledProcesses(), logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield handler.pids
    finally:
        logger.propagate = propagate
        logger.removeHandler(handler)


def _end_process_groups(failures: Iterable[ProcessFailure]) -> None:
    """Kill what a dead rank had started; each rank leads a process group of its own."""
    for failure in failures:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(failure.pid, signal.SIGKILL)


def _death(rank: int, failure: ProcessFailure, folder: Path, watch: Watch, *, by_launcher: bool) -> RankDeath:
    message = failure.error_file_data.get("message")
    report = message if isinstance(message, dict) else {}
    extra = report.get("extraInfo", {})
    trace = extra.get("py_callstack", "").rstrip().splitlines() or _log_tail(folder, failure.local_rank)
    if failure.pid in watch.hung:
        trace = list(watch.hung[failure.pid])
    return RankDeath(
        rank=rank,
        exit_code=failure.exitcode,
        ended_by_launcher=by_launcher,
        time_s=float(extra.get("time_s", failure.timestamp)),
        error=report.get("message", ""),
        trace=tuple(trace[-_LOG_TAIL_LINES:]),
        payload=extra.get("meshwright"),
        was_suspended=failure.pid in watch.suspended,
        was_hung=failure.pid in watch.hung,
    )


def _log_tail(folder: Path, local_rank: int) -> list[str]:
    logs = sorted(folder.glob(f"ranks/*/attempt_0/{local_rank}/stderr.log"))
    text = logs[0].read_text(encoding="utf-8", errors="replace") if logs else ""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("Extension modules: ")]
    return lines[-_LOG_TAIL_LINES:]


def _lost_nodes(error: Exception) -> MeshwrightError:
    return MeshwrightError(
        "the connection to the other nodes of the job was lost",
        details=(_first_line(error),),
        help="the cause is on another node: see the messages there",
    )


def _not_met(rendezvous: Rendezvous, error: Exception) -> NodesNotMetError:
    return NodesNotMetError(
        f"the {rendezvous.nnodes} nodes of the job did not meet at {rendezvous.endpoint or 'localhost'}",
        details=(_first_line(error),),
        help="start the same command on every node, with the same --rdzv-endpoint and --rdzv-id; is the port open?",
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


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
