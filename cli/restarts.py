"""Run jobs that go on by themselves: after a fault from the last checkpoint, and on what remains of the cluster."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..schema.errors import (
    ConfigError,
    InfeasibleError,
    InterruptedRunError,
    MeshwrightError,
    NodesNotMetError,
    RuntimeMismatchError,
)

if TYPE_CHECKING:
    from ..runtime.job.rendezvous import Rendezvous
    from ..runtime.job.worker import Job
    from ..schema import ClusterSpec, TrainingPlan


_BETWEEN_S = 1.0
"""Between two tries to meet."""

RETAINED_FIELDS = frozenset({"recompute", "sequence_parallel", "micro_batch_size", "offload_fraction"})
"""Of the layout's fields that the plan had to keep: those that do not say how many devices share something."""


@dataclass(frozen=True)
class Restarts:
    """What may be done about a fault.

    Attributes:
        max_restarts: how many times a job is started again.
        replan: before each start, plan again where nodes or devices are not those of the plan.
    """

    max_restarts: int = 0
    replan: bool = False


def run_job(
    plan: TrainingPlan, job: Job, rendezvous: Rendezvous, *, restarts: Restarts, say: Callable[[str], None]
) -> None:
    """Launch a job, again after each fault of a rank as often as allowed; bad input, a plan that this machine cannot run and
    signals to the launcher end it.

    On several nodes every launcher sees the fault and does the same; they meet again under the next name.

    Raises:
        MeshwrightError: of the last attempt.
    """
    for attempt in range(restarts.max_restarts + 1):
        if attempt:
            job = job.replace(options=job.options.replace(resume=True, restart_data=False))
        if restarts.replan:
            plan, job = _replan(plan, job, rendezvous.nnodes, say)
        try:
            _launch(plan, job, _of_attempt(rendezvous, attempt), until_s=_patience_s(rendezvous, attempt))
            return
        except (ConfigError, InfeasibleError, InterruptedRunError, RuntimeMismatchError):
            raise
        except MeshwrightError as error:
            if attempt == restarts.max_restarts:
                raise
            say(f"{error}\nrestart {attempt + 1} of {restarts.max_restarts}")


def _launch(plan: TrainingPlan, job: Job, rendezvous: Rendezvous, *, until_s: float) -> None:
    """Launch a job; where nodes do not meet, again until a time of the monotonic clock.

    After a fault the node that holds the meeting place closes it and opens it anew. A node that is back earlier comes to the old
    one and is thrown out.
    """
    from ..runtime.job.launch import launch

    while True:
        try:
            launch(plan, job, rendezvous=rendezvous)
            return
        except NodesNotMetError:
            if time.monotonic() > until_s:
                raise
            time.sleep(_BETWEEN_S)


def _patience_s(rendezvous: Rendezvous, attempt: int) -> float:
    """Return until when to wait for nodes that come back; a first attempt waits as long as the rendezvous itself."""
    return time.monotonic() + rendezvous.timeout_s if attempt and rendezvous.nnodes > 1 else -math.inf


def _replan(plan: TrainingPlan, job: Job, nnodes: int, say: Callable[[str], None]) -> tuple[TrainingPlan, Job]:
    current, path = replanned(plan, Path(job.plan), nnodes=nnodes)
    if current is not plan:
        say(f"planned again for {current.cluster.name}: {current.layout}; wrote {path}")
    return current, job.replace(plan=str(path))


def _of_attempt(rendezvous: Rendezvous, attempt: int) -> Rendezvous:
    """Return a meeting place of its own for each attempt: nodes that come late must not meet those of the attempt before."""
    if not attempt or rendezvous.nnodes == 1:
        return rendezvous
    return replace(rendezvous, run_id=f"{rendezvous.run_id or 'meshwright'}-{attempt}")


def replanned(plan: TrainingPlan, path: Path, *, nnodes: int) -> tuple[TrainingPlan, Path]:
    """Return the plan and its file, or where this job's machines are not those of the plan, another one and its file.

    Looked at are the number of nodes, and how many devices this one has: fewer than the plan counts on, and all nodes are taken
    to have as many.

    Raises:
        ConfigError: the plan's nodes differ from each other, so that it is not known which remain.
        InfeasibleError: nothing fits on what remains.
    """
    cluster = remaining_cluster(plan.cluster, nnodes=nnodes, devices_here=_devices_here(plan))
    if cluster is None:
        return plan, path
    from ..planner import plan as make_plan
    from ..planner.request import OffloadRequest
    from ..schema.layout import parse_assignments

    fixed = {name: value for name, value in parse_assignments(plan.provenance.fixed).items() if name in RETAINED_FIELDS}
    offload = OffloadRequest.from_plan(plan)
    try:
        smaller = make_plan(plan.model, cluster, plan.workload, fixed=fixed, runnable=True, offload=offload)
    except (InfeasibleError, ConfigError):
        if not fixed:
            raise
        smaller = make_plan(plan.model, cluster, plan.workload, runnable=True, offload=offload)
    target = path.with_name(f"{path.stem}.{cluster.num_devices}-devices.json")
    smaller.save(target)
    return smaller, target


def remaining_cluster(cluster: ClusterSpec, *, nnodes: int, devices_here: int) -> ClusterSpec | None:
    """Return the cluster with so many nodes, and no more devices in each than there are; None where that is the cluster itself.

    Raises:
        ConfigError: its nodes are not all alike.
    """
    from ..schema.offers import with_nodes

    lacks_devices = any(devices_here < group.devices_per_node for group in cluster.groups)
    if nnodes == cluster.num_nodes and not lacks_devices:
        return None
    if len(cluster.groups) > 1:
        raise ConfigError(f"the nodes of {cluster.name} differ: it is not known which remain", help="plan again")
    resized = with_nodes(cluster, nnodes) if nnodes != cluster.num_nodes else cluster
    return _with_devices(resized, devices_here) if lacks_devices else resized


def _with_devices(cluster: ClusterSpec, devices: int) -> ClusterSpec:
    """Return the cluster with so many devices in each node; links within a node join all of them."""
    group = cluster.groups[0]
    per_node = group.devices_per_node
    sizes: dict[int, object] = {}
    for level in cluster.levels:
        size = level.domain_size * devices // per_node if level.domain_size > per_node else devices
        sizes.setdefault(size, level.replace(domain_size=size))
    return cluster.replace(
        name=f"{cluster.name}, {devices} devices in each node",
        groups=(group.replace(devices_per_node=devices, levels=()),),
        levels=tuple(sizes.values()),
    )


def _devices_here(plan: TrainingPlan) -> int:
    from ..profilers.machine import num_cores

    if plan.cluster.weakest_device.backend.is_host:
        return num_cores()
    import torch

    return torch.cuda.device_count()
