"""One rank of `meshwright profile`: ``python -m meshwright.runtime.profiling.worker TASK.json``, or torchrun's or Slurm's process.

The command starts such processes itself, or is one where torchrun or srun started it.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from ...profilers.run.protocol import ProfileTask
from ...profilers.run.rank import Tell, run_rank
from ...profilers.run.worker import serve
from ...schema.profile import Profile
from .steps import steps_with_model


def measure_as_rank(task: ProfileTask, tell: Tell) -> Profile | None:
    """Measure as this rank of a running job; the first rank returns the profile."""
    _take_names_from_slurm()
    return run_rank(task, steps_with_model, tell)


def leave() -> NoReturn:
    """End this rank without tearing the interpreter down: gloo's threads were seen to abort that."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _take_names_from_slurm() -> None:
    """Torchrun's variables from srun's, where there are none: the first host of the list is the meeting place."""
    names = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}
    for ours, theirs in names.items():
        if theirs in os.environ:
            os.environ.setdefault(ours, os.environ[theirs])
    if "SLURM_JOB_ID" in os.environ:
        hosts = os.environ.get("SLURM_STEP_NODELIST", os.environ.get("SLURM_JOB_NODELIST", "localhost"))
        os.environ.setdefault("MASTER_ADDR", first_host(hosts))
        os.environ.setdefault("MASTER_PORT", str(20000 + int(os.environ["SLURM_JOB_ID"]) % 20000))


def first_host(hosts: str) -> str:
    """First name of Slurm's list: ``gpu[07-09,12],cpu1`` begins with gpu07."""
    name, bracket, rest = hosts.partition(",")[0].partition("[")
    return name + rest.rstrip("]").split("-")[0] if bracket else name


if __name__ == "__main__":
    serve(ProfileTask.load(sys.argv[1]), steps_with_model)
