"""Jobs that go on by themselves: after a fault from the last checkpoint, and on what is left of the cluster."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..runtime.job.launch import Rendezvous
    from ..runtime.job.worker import Job
    from ..schema import Plan

_BETWEEN_S = 1.0
"""Between two tries to meet."""


@dataclass(frozen=True)
class Restarts:
    """What may be done about a fault.

    Attributes:
        most: how many times a job is started again.
        replan: before each start, plan again where nodes or devices are not those of the plan.
    """

    most: int = 0
    replan: bool = False


def run_job(plan: Plan, job: Job, rendezvous: Rendezvous, *, restarts: Restarts, say: Callable[[str], None]) -> None:
    """Launch a job, again after each fault of a rank as often as allowed; bad input, a plan that this machine cannot run and
    signals to the launcher end it.

    On several nodes every launcher sees the fault and does the same; they meet again under the next name.

    Raises:
        MeshwrightError: of the last attempt.
    """
    from ..schema.errors import ConfigError, InfeasibleError, InterruptedRunError, MeshwrightError, RuntimeMismatchError

    for attempt in range(restarts.most + 1):
        if attempt:
            job = job.replace(options=job.options.replace(resume=True, restart_data=False))
        if restarts.replan:
            plan, job = _replanned(plan, job, rendezvous.nnodes, say)
        try:
            _launch(plan, job, _of_attempt(rendezvous, attempt), until_s=_patience_s(rendezvous, attempt))
            return
        except (ConfigError, InfeasibleError, InterruptedRunError, RuntimeMismatchError):
            raise
        except MeshwrightError as error:
            if attempt == restarts.most:
                raise
            say(f"{error}\nrestart {attempt + 1} of {restarts.most}")


def _launch(plan: Plan, job: Job, rendezvous: Rendezvous, *, until_s: float) -> None:
    """Launch a job; where nodes do not meet, again until a time of the monotonic clock.

    After a fault the node that holds the meeting place closes it and opens it anew. A node that is back earlier comes to the old
    one and is thrown out.
    """
    from ..runtime.job.launch import launch
    from ..schema.errors import NodesNotMetError

    while True:
        try:
            launch(plan, job, rendezvous=rendezvous)
            return
        except NodesNotMetError:
            if time.monotonic() > until_s:
                raise
            time.sleep(_BETWEEN_S)


def _patience_s(rendezvous: Rendezvous, attempt: int) -> float:
    """Until when to wait for nodes that come back; a first attempt waits as long as the rendezvous itself."""
    return time.monotonic() + rendezvous.timeout_s if attempt and rendezvous.nnodes > 1 else -math.inf


def _replanned(plan: Plan, job: Job, nnodes: int, say: Callable[[str], None]) -> tuple[Plan, Job]:
    from .replan import replanned

    found, path = replanned(plan, Path(job.plan), nnodes=nnodes)
    if found is not plan:
        say(f"planned again for {found.cluster.name}: {found.layout}; wrote {path}")
    return found, job.replace(plan=str(path))


def _of_attempt(rendezvous: Rendezvous, attempt: int) -> Rendezvous:
    """Nodes that come late must not meet those of the attempt before."""
    if not attempt or rendezvous.nnodes == 1:
        return rendezvous
    return replace(rendezvous, run_id=f"{rendezvous.run_id or 'meshwright'}-{attempt}")
