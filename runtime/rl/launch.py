"""Run a post-training plan on this machine: check it, start a process for each device of its pools, say why a job failed."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from ...profilers.machine import cpu_rank_environment, num_cores
from ...profilers.run.faults import explain_failure
from ...profilers.run.processes import NodeJob, program, run_ranks
from ...schema.errors import ConfigError, InterruptedRunError, RuntimeMismatchError
from ...schema.rl_plan import RlPlan
from ..job.rendezvous import Rendezvous, meet
from ..serving.instance import require_servable
from . import worker
from .copies import require_run, why_not_run
from .prompts import read_prompts
from .rewards import split_name
from .run import RlJob, RlOptions


def run_rl(
    plan: RlPlan, options: RlOptions, *, report: str | Path | None = None, timeout_s: float = 600.0
) -> list[dict[str, Any]]:
    """Run a plan on this machine and return what its steps report; raises like `launch_rl`.

    Args:
        report: file that each step appends a JSON object to.
        timeout_s: how long a rank may wait for another one.
    """
    with tempfile.TemporaryDirectory(prefix="meshwright-rl-") as name:
        folder = Path(name)
        plan.save(folder / "rl.json")
        path = folder / "steps.jsonl" if report is None else Path(report).resolve()
        done = _num_lines(path)
        launch_rl(plan, RlJob(plan=str(folder / "rl.json"), options=options, report=str(path), timeout_s=timeout_s))
        return [json.loads(line) for line in path.read_bytes().splitlines()[done:]]


def _num_lines(path: Path) -> int:
    """Return the lines of a report so far.

    Raises:
        ConfigError: no report can be there.
    """
    try:
        return len(path.read_bytes().splitlines()) if path.exists() else 0
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None


def launch_rl(plan: RlPlan, job: RlJob) -> None:
    """Run a job to its end; return when every rank has ended well.

    Raises:
        ConfigError: the prompts or the reward function are not there.
        RuntimeMismatchError: this version or this machine does not run the plan.
        MeshwrightError: a rank failed. No process is left behind.
    """
    require_runnable(plan)
    require_island(plan, job.options)
    read_prompts(job.options.prompts, plan.post_training)
    split_name(job.options.reward)
    count = sum(pool.num_devices for pool in plan.pools)
    threads = str(max(1, num_cores() // count))
    with meet(Rendezvous()) as meeting, tempfile.TemporaryDirectory(prefix="meshwright-rl-") as name:
        folder = Path(name)
        job.save(folder / "job.json")
        chosen = {each: os.environ.get(each, threads) for each in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        ranks = NodeJob(
            command=program(worker.__name__, folder / "job.json"), folder=folder, num_ranks=count,
            world_size=count, variables={**chosen, **cpu_rank_environment(), **meeting.variables},
        )  # fmt: skip
        end = run_ranks(ranks)
        if end.received:
            raise InterruptedRunError(end.received)
        if end.deaths:
            raise explain_failure(end.deaths, world_size=count, ended_well=end.ended_well)


def require_island(plan: RlPlan, options: RlOptions) -> None:
    """Refuse a folder for islands that there are not, and islands without one.

    Raises:
        ConfigError: with what the plan says.
    """
    islands = plan.post_training.islands
    if (options.exchange is None) != (islands == 1):
        given = "no exchange" if options.exchange is None else f"exchange {options.exchange}"
        raise ConfigError(
            f"the plan has {islands} island{'s' * (islands > 1)}, and there is {given}",
            help="--exchange FOLDER and --island are for plans of several islands, and needed there",
        )
    if options.island >= islands:
        raise ConfigError(f"island {options.island} of {islands}", help=f"--island 0 to {islands - 1}")


def require_runnable(plan: RlPlan) -> None:
    """Refuse a plan that this version does not run; every reason is named.

    Raises:
        RuntimeMismatchError: with them.
    """
    work, lacking = plan.post_training, list[str]()
    if not plan.cluster.weakest_device.backend.is_host:
        lacking.append(
            f"it is for {plan.cluster.weakest_device.name}: this version runs post-training on CPUs (--cluster local)"
        )
    if plan.cluster.num_nodes > 1:
        lacking.append(f"it is for {plan.cluster.num_nodes} nodes: this version runs on one")
    generator = plan.copy_of("generator")
    assert generator.serving is not None
    if work.staleness not in (0, 1):
        lacking.append(f"staleness {work.staleness:g}: this version runs 0 and 1")
    if work.fetches > 1:
        lacking.append(f"samples are fetched in {work.fetches} parts: this version scores all of a step together")
    if work.staleness and plan.pools[generator.pool].roles != ("generator",):
        lacking.append("weights may be a step old, and the generator's pool has other copies, which would wait for it")
    layout = generator.serving.layout
    if (work.staleness or work.oversample > 1) and layout.pp * layout.attention_dp > 1:
        lacking.append("log-probabilities of drawn tokens are noted by instances of one stage and one attention rank")
    if "reward" in work.roles:
        lacking.append("rewards come from a model: here they come from a function")
    if not work.precision.startswith("fp32"):
        lacking.append(f"precision {work.precision}: the ranks of a CPU train in fp32")
    for copy in plan.copies:
        if copy.training is not None:
            lacking += why_not_run(copy.role, copy.training)
        if copy.is_offloaded:
            lacking.append(f"the {copy.role} lies on the host between its calls: states stay where they are here")
    require_run(lacking)
    try:
        require_servable(work.model_of("generator"), generator.serving, is_single=False)
    except RuntimeMismatchError as error:
        require_run([error.message, *error.details])
