"""Run a plan on this node: check the machine, meet the other nodes, start one process for each device, and say why a job failed.

On several nodes every node runs the same command. A training run that keeps checkpoints is let finish its step and write a last one
when a scheduler asks the job to end (SIGTERM): the ranks get the signal too, agree on the step, save and end by themselves.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import torch

from ...profilers.machine import cpu_rank_environment, num_cores
from ...profilers.run.faults import cause_of, explain_failure
from ...profilers.run.processes import JobEnd, NodeJob, program, run_ranks
from ...schema import ConfigError, NodeGroup, TrainingPlan
from ...schema.errors import InterruptedRunError
from ...schema.preflight import PreflightReport
from ..supervision.supervisor import Scale, Supervisor
from ..training.save_schedule import PAST
from . import worker
from .events import JobEvent, OnEvent
from .machine import check_machine, local_group, memory_line
from .preflight import compare_nodes
from .rendezvous import Meeting, Rendezvous, meet
from .watch import FOLDER_VARIABLE, STOPPED_FILE, Watch
from .worker import Job


def launch(
    plan: TrainingPlan,
    job: Job,
    *,
    rendezvous: Rendezvous | None = None,
    on_event: OnEvent = lambda _: None,
    scale: Scale | None = None,
) -> None:
    """Run a job on this node's devices to its end; return when every rank has ended well.

    Call it from the main thread: signals to this process end the ranks. Log lines of the built-in training's ranks are stored for
    the error message; a user's script writes to this process's own streams.

    Raises:
        RuntimeMismatchError: this machine is not what the plan is for.
        NodesNotMetError: not all nodes came.
        MeshwrightError: a rank failed, or a signal ended the job. No process is left behind.
    """
    rendezvous = rendezvous or Rendezvous()
    nodes = processes_of_nodes(plan, job.spares)
    node_rank = 0 if rendezvous.store_only else rendezvous.node_rank
    group = local_group(plan, nnodes=rendezvous.nnodes, node_rank=node_rank, spares=job.spares)
    if rendezvous.store_only:
        _require_going_on(job)
        nodes.append(range(nodes[-1].stop, nodes[-1].stop))
    else:
        check_machine(plan, group)
    try:
        with meet(rendezvous) as meeting, tempfile.TemporaryDirectory(prefix="meshwright-") as name:
            folder, progress = Path(name), Path(name) / "progress"
            progress.mkdir()
            job.save(folder / "job.json")
            report = (
                _compared(plan, job, meeting, nodes, on_event) if job.preflight_s and not meeting.is_return else None
            )
            has_checkpoints = not job.script and job.options.checkpoint_dir is not None
            local = nodes[meeting.node_rank]
            ranks = NodeJob(
                command=program(worker.__name__, folder / "job.json"),
                folder=folder,
                num_ranks=len(local),
                first_rank=local.start,
                world_size=nodes[-1].stop,
                node_rank=meeting.node_rank,
                variables={**_variables(job, group), **meeting.variables, FOLDER_VARIABLE: str(progress)},
                captures_output=not job.script,
                grace_s=job.grace_s if has_checkpoints or (job.goes_on and rendezvous.nnodes > 1) else 0.0,
                starts=1 + meeting.is_return,
            )
            watch = Watch(progress, job.hang_timeout_s)
            if job.goes_on:
                fallbacks = [TrainingPlan.load(file) for file in job.fallbacks]
                slow = () if report is None else report.slow_ranks
                supervisor = Supervisor(
                    meeting, plan, fallbacks, nodes, watch, restarts=job.restart_ranks, slow=slow, on_event=on_event,
                    scale=scale, needs_all=job.regions == "restart",
                )  # fmt: skip
                with supervisor.telling_its_end():
                    end = run_ranks(ranks, supervisor.look, supervisor)
                    _require_good_end(end, ranks, plan, watch, on_event)
                    if rendezvous.store_only and supervisor.ended_early:
                        raise InterruptedRunError(signal.SIGTERM)
                    if (job.regions or not meeting.is_host) and not end.ended_well:
                        raise explain_failure(end.outlived, world_size=ranks.world_size)
                return
            end = run_ranks(ranks, watch.look)
            _require_good_end(end, ranks, plan, watch, on_event)
    except KeyboardInterrupt:  # while the nodes met
        raise InterruptedRunError(signal.SIGINT) from None


def _require_going_on(job: Job) -> None:
    """Refuse a job in which a machine without ranks has no part."""
    if not job.goes_on:
        raise ConfigError(
            "--store-only is for a training that goes on without a node that is lost", help="plan --tolerate N"
        )
    if job.preflight_s:
        raise ConfigError(
            "--preflight compares nodes, of which the machine with the store is none", help="leave it out"
        )


def processes_of_nodes(plan: TrainingPlan, spares: int) -> list[range]:
    """Return the numbers of each node's processes; spares are nodes behind those of the plan, or processes of a single one."""
    sizes = [group.devices_per_node for group in plan.cluster.groups for _ in range(group.num_nodes)]
    sizes = [sizes[0] + spares] if len(sizes) == 1 else [*sizes, *sizes[:1] * spares]
    ends = list(accumulate(sizes))
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def _compared(
    plan: TrainingPlan, job: Job, meeting: Meeting, nodes: Sequence[range], on_event: OnEvent
) -> PreflightReport:
    """Compare the ranks, and tell which are slow and what becomes of them."""
    if len(plan.cluster.groups) > 1:
        raise ConfigError(f"the nodes of {plan.cluster.name} differ: they are no peers", help="leave out --preflight")
    backend = plan.cluster.weakest_device.backend.collectives
    threads = {name: value for name, value in _variables(job, plan.cluster.groups[0]).items() if "THREADS" in name}
    report = compare_nodes(meeting, nodes, backend, seconds=job.preflight_s, variables=threads)
    causes = report.sentences()
    if causes:
        num_training = max(len(report.slow_ranks) - (nodes[-1].stop - plan.layout.world_size), 0)
        causes += (
            "they stand by"
            if not num_training
            else f"no spares for {num_training} of them: they train with the others",
        )
    on_event(JobEvent(event="compared", ranks=report.slow_ranks, causes=causes, report=report))
    return report


def _variables(job: Job, group: NodeGroup) -> dict[str, str]:
    now_s = time.time()
    threads = str(max(1, num_cores() // group.devices_per_node))
    chosen = {name: os.environ.get(name, threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    memory = cpu_rank_environment() if group.device.backend.is_host else {}
    return {**chosen, **memory, "MESHWRIGHT_PLAN": job.plan, PAST: f"{job.restarts} {job.begun_s or now_s} {now_s}"}


def _require_good_end(end: JobEnd, ranks: NodeJob, plan: TrainingPlan, watch: Watch, on_event: OnEvent) -> None:
    """Raise where a rank failed, or the ranks ended on request, here or on another node."""
    stopped = watch.folder / STOPPED_FILE
    if stopped.exists() or end.received:
        step = int(stopped.read_text()) if stopped.exists() else None
        raise InterruptedRunError(end.received or signal.SIGTERM, checkpoint_step=step)
    if end.deaths:
        deaths = [watch.completed(death, death.rank - ranks.first_rank) for death in end.deaths]
        ended_well = end.ended_well if ranks.num_ranks == ranks.world_size else ()
        memory = memory_line(plan, torch.device("cpu")) if plan.cluster.weakest_device.backend.is_host else ""
        error = explain_failure(deaths, world_size=ranks.world_size, ended_well=ended_well, memory=memory)
        on_event(JobEvent(event="lost", ranks=(cause_of(deaths).rank,), causes=(error.message,)))
        raise error
