"""The program of each rank of a job, started by `launch`: ``python -m meshwright.runtime.job.worker job.json``.

Either the built-in training or a user's own script, with the plan's path in ``MESHWRIGHT_PLAN`` and torchrun's
variables (``RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT``) in the environment.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Literal

from pydantic import Field

from ...profilers.run.processes import serve_rank
from ...schema import ConfigError, TrainingPlan
from ...schema.base import Document
from ..training.options import TrainOptions

OnFault = Literal["continue", "restart"]


class Job(Document):
    """The work of the ranks of one node.

    Attributes:
        plan: absolute path.
        report: file that the reporting rank appends its metrics to.
        timeout_s: how long a collective may wait for a rank.
        hang_timeout_s: no rank of a training run is taken for hung before this time without a step; 0: never.
        grace_s: how long ranks may take for a last checkpoint after SIGTERM.
        fallbacks: files of plans for fewer devices, under which the training goes on when ranks die.
        regions: what becomes of a job whose regions train by themselves when one of them is gone; None: it is another job.
        spares: nodes, or ranks of a single node, that stand by; without them and fallbacks a death ends the job.
        restart_ranks: how often this node starts a dead rank anew, all together.
        preflight_s: how long to compare the ranks before; 0: not.
        restarts, begun_s: how often the job has started again, and when it began, seconds of the epoch; 0: now.
        script: a user's script and its arguments; empty for the built-in training.
    """

    plan: str
    options: TrainOptions = TrainOptions()
    report: str | None = None
    timeout_s: float = Field(default=600.0, gt=0, le=10**7)
    hang_timeout_s: float = Field(default=10.0, ge=0)
    grace_s: float = Field(default=25.0, ge=0)
    fallbacks: tuple[str, ...] = ()
    regions: OnFault | None = None
    spares: int = Field(default=0, ge=0)
    restart_ranks: int = Field(default=0, ge=0)
    preflight_s: float = Field(default=0.0, ge=0)
    restarts: int = Field(default=0, ge=0)
    begun_s: float = Field(default=0.0, ge=0)
    script: tuple[str, ...] = ()

    @property
    def goes_on(self) -> bool:
        """A death does not end the job as long as there is a plan for those who are left, as a supervisor decides."""
        return bool(self.fallbacks or self.spares or self.regions)


def main() -> None:
    """Do the job named on the command line in this process."""
    job = Job.load(sys.argv[1])
    if not job.script and job.goes_on and job.regions is None:
        from ..supervision.survivor import train_through_faults

        train_through_faults(job.options, report=job.report, timeout_s=job.timeout_s)
        return
    if not job.script:
        from ..training.train import train

        train(TrainingPlan.load(job.plan), job.options, report=job.report, timeout_s=job.timeout_s)
        return
    script, *arguments = job.script
    if not Path(script).is_file():
        raise ConfigError(f"no such script: {script}")
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    serve_rank(main)
