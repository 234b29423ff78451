"""`meshwright apply`: run a plan on this machine, or this machine's share of it; `meshwright tokens` makes its data.

A job goes on by itself: after a fault from the last checkpoint, and on what remains of the cluster.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from ..runtime.training.options import TrainOptions, prepare_options, why_not_continued
from ..schema import ConfigError, TrainingPlan
from ..schema.engine_facts import require_our_engine
from ..schema.errors import (
    InfeasibleError,
    InterruptedRunError,
    MeshwrightError,
    NodesNotMetError,
    RuntimeMismatchError,
)
from .options import Mode, OptionModel, ProfileOptions, command, option

if TYPE_CHECKING:
    from ..runtime.job.rendezvous import Rendezvous
    from ..runtime.job.worker import Job
    from ..schema import ClusterSpec

_BETWEEN_S = 1.0
"""Between two tries to meet."""


class ApplyCommand(TyperCommand):
    """Options end at the script: what follows it is the script's, even where it looks like ours."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse, with ``--`` put before the script."""
        idx = self._script_idx(args)
        return super().parse_args(ctx, [*args[:idx], "--", *args[idx:]])

    def _script_idx(self, args: list[str]) -> int:
        """Return the index of the second positional argument, or the end."""
        valued = {name for param in self.params if not getattr(param, "is_flag", True) for name in param.opts}
        positionals = idx = 0
        while idx < len(args) and args[idx] != "--":
            is_option = args[idx].startswith("-") and len(args[idx]) > 1
            positionals += not is_option
            if positionals == 2:
                return idx
            idx += 2 if args[idx] in valued else 1
        return min(idx, len(args))


class JobOptions(OptionModel):
    """How the ranks of a job are started and watched."""

    nnodes: int | None = option(
        None,
        "nodes of the job; run the same command on each, with the same secret in MESHWRIGHT_SECRET. Default: those of Slurm's "
        "step, else 1.",
    )
    node_rank: int | None = option(
        None, "position of this node in the plan's cluster, if it matters.", needs=("nnodes",)
    )
    rdzv_endpoint: str | None = option(None, "where the nodes meet.", metavar="HOST:PORT", needs=("nnodes",))
    rdzv_id: str | None = option(None, "name of the job at that place.", metavar="NAME", needs=("nnodes",))
    collective_timeout_s: float = option(600.0, "how long a rank waits for another.", metavar="S")
    hang_timeout_s: float = option(
        10.0, "a rank that keeps others waiting longer (and for ten steps) is ended; 0: never.", metavar="S"
    )
    grace_s: float = option(
        25.0, "on SIGTERM: how long a step and a last checkpoint may take; 0: end at once.", metavar="S"
    )
    max_restarts: int = option(
        0, "go on from the last checkpoint so many times after a rank failed.", ge=0, needs=("checkpoint_dir",)
    )
    replan: bool = option(False, "plan again where nodes or devices are not those of the plan.")

    def rendezvous(self) -> Rendezvous:
        """Return where the nodes meet: as typed, as Slurm says, or nowhere because there is one node.

        Raises:
            ConfigError: several nodes without a place or a secret, or a node that is none of them.
        """
        from ..runtime.job.gate import secret_of
        from ..runtime.job.rendezvous import Rendezvous, slurm_rendezvous

        if self.nnodes is None and (slurm := slurm_rendezvous(os.environ)) is not None:
            return slurm
        place = Rendezvous(
            nnodes=1 if self.nnodes is None else self.nnodes,
            node_rank=self.node_rank,
            endpoint=self.rdzv_endpoint,
            run_id=self.rdzv_id,
        )
        return place if place.nnodes == 1 else replace(place, secret=secret_of(os.environ))


class RunOutput(OptionModel):
    """What the built-in training reports."""

    metrics: Path | None = option(None, "for the JSON lines of the run.")
    as_json: bool = option(False, "one JSON object a step, and a last one, on stdout.", name="--json")


class FaultHandling(OptionModel):
    """What a training does when a rank dies."""

    on_fault: Literal["continue", "restart"] | None = option(
        None,
        "continue: the others go on at once, under a plan for what is left; restart: --max-restarts. Default: continue where the "
        "plan has fallbacks (plan --tolerate) and nothing is in the way.",
    )
    spares: int = option(
        0,
        "nodes, or devices of a single one, that stand by: they train once others are lost. --nnodes counts them.",
        ge=0,
    )
    restart_ranks: int = option(
        0, "start a dead rank anew, so many times on each node; it is taken in at a step's end, once there is a plan for it.",
        ge=0,
    )  # fmt: skip


SCRIPT = Mode(
    name="a script of your own",
    when=lambda values: bool(values["script"]),
    takes=(JobOptions, ProfileOptions),
    why="does its own training",
    fix="put options of the script after it: meshwright apply plan.json SCRIPT --option",
)
BUILT_IN = Mode(takes=(JobOptions, ProfileOptions, TrainOptions, RunOutput, FaultHandling))


@command(SCRIPT, BUILT_IN)
def apply(
    plan: Annotated[Path, typer.Argument(help="Plan file, from `meshwright plan --out`.", show_default=False)],
    training: TrainOptions | None,
    output: RunOutput | None,
    faults: FaultHandling | None,
    job: JobOptions,
    profile: ProfileOptions,
    script: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCRIPT ARGS", help="Your own script; MESHWRIGHT_PLAN names the plan in its environment."
        ),
    ] = None,
) -> None:
    """Run a plan: train its model for a few steps and compare with the prediction, or run your own script under it."""
    from ..runtime.job.worker import Job
    from .show.run import running_report

    if script and not Path(script[0]).is_file():
        raise ConfigError(f"no such script: {script[0]}")
    with _predicted_by(plan, profile, documents=training is not None and training.documents) as (path, loaded):
        require_our_engine(loaded.workload.engine)
        if lacking := loaded.why_not_applied(is_user_model=bool(script)):
            raise RuntimeMismatchError(
                "`meshwright apply` cannot run this plan",
                details=lacking,
                help="meshwright export may write it for an engine"
                if loaded.model.code is None
                else "add the script that builds the model and calls parallelize: meshwright apply PLAN SCRIPT",
            )
        spares = 0 if faults is None else faults.spares
        meeting = job.rendezvous() if spares else _meeting_of_used(loaded, job.rendezvous())
        if meeting is None:
            typer.echo(
                f"node {job.node_rank} stays idle: the plan uses {loaded.cluster.num_nodes} of {job.nnodes} nodes",
                err=True,
            )
            return
        work = Job(
            plan=str(path.resolve()), timeout_s=job.collective_timeout_s, hang_timeout_s=job.hang_timeout_s,
            grace_s=job.grace_s, script=tuple(script or ()),
        )  # fmt: skip
        if training is None or output is None or faults is None:
            run_job(loaded, work, meeting, job)
            return
        prepared = _prepared(training, loaded, is_only_node=meeting.nnodes == 1)
        if prepared.robust_sum is not None:
            typer.echo(
                f"--robust-sum {prepared.robust_sum}: losses are not those of the plain mean of gradients", err=True
            )
        with (
            _fallback_files(loaded, prepared, faults) as fallbacks,
            running_report(
                training.steps, metrics=output.metrics, append=training.resume, as_json=output.as_json
            ) as report,
        ):
            work = work.replace(
                options=prepared, report=str(report), fallbacks=fallbacks, spares=spares,
                restart_ranks=faults.restart_ranks,
            )  # fmt: skip
            run_job(loaded, work, meeting, job)
    if prepared.trace is not None and Path(prepared.trace).exists():
        typer.echo(
            f"wrote {training.trace}; open it in ui.perfetto.dev, next to that of `meshwright report --trace`", err=True
        )


@contextlib.contextmanager
def _fallback_files(plan: TrainingPlan, options: TrainOptions, faults: FaultHandling) -> Iterator[tuple[str, ...]]:
    """Yield files of the plans for fewer devices, under which a training goes on; none where a fault ends it.

    Raises:
        RuntimeMismatchError: it is to go on and cannot.
        InfeasibleError: nothing fits on fewer devices.
    """
    on_fault = "continue" if faults.on_fault is None and faults.spares else faults.on_fault
    if on_fault == "restart" and (faults.spares or faults.restart_ranks):
        raise ConfigError(
            "--spares and --restart-ranks are for a training that goes on without a rank that dies",
            help="leave them out, or say --on-fault continue",
        )
    if on_fault == "restart" or (on_fault is None and not plan.fallbacks):
        if faults.restart_ranks:
            raise ConfigError("--restart-ranks needs --on-fault continue, or a plan with fallbacks (plan --tolerate)")
        yield ()
        return
    if reasons := why_not_continued(plan, options):
        if on_fault == "continue":
            raise RuntimeMismatchError(
                "this training cannot go on without a rank that dies", details=reasons, help="say --on-fault restart"
            )
        typer.echo(f"a fault ends the job, or restarts it (--max-restarts): {'; '.join(reasons)}", err=True)
        yield ()
        return
    plans = plan.fallbacks
    if not plans and faults.on_fault == "continue":
        from ..planner.fallbacks import fallbacks, num_units

        plans, reason = fallbacks(plan, num_units(plan.cluster) - 1)
        if not plans and not faults.spares:
            raise InfeasibleError("no plan for fewer devices: this training cannot go on", details=(reason,))
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        files = [Path(folder) / f"{each.layout.world_size}.json" for each in plans]
        for each, file in zip(plans, files, strict=True):
            each.save(file)
        yield tuple(map(str, files))


def _meeting_of_used(plan: TrainingPlan, rendezvous: Rendezvous) -> Rendezvous | None:
    """Return where the nodes that a plan uses meet, of all that it was asked for; None on a node that it leaves idle.

    Raises:
        RuntimeMismatchError: a node does not know which one it is.
    """
    used = plan.cluster.num_nodes
    idle = {node for pool in plan.left_out for node in pool.nodes}
    described = used + len(idle) if idle else used if plan.requested is None else plan.requested.num_nodes
    if rendezvous.nnodes != described or described == used:
        return rendezvous
    if rendezvous.node_rank is None:
        raise RuntimeMismatchError(
            f"the plan uses {used} of {rendezvous.nnodes} nodes, so each must know which one it is",
            help=f"add --node-rank, or run on {used} nodes only",
        )
    nodes = [node for node in range(described) if node not in idle][:used]
    if rendezvous.node_rank not in nodes:
        return None
    return replace(rendezvous, nnodes=used, node_rank=nodes.index(rendezvous.node_rank))


def _prepared(options: TrainOptions, plan: TrainingPlan, *, is_only_node: bool) -> TrainOptions:
    """Return the options of the built-in training as its ranks take them.

    Raises:
        ConfigError: an option does not go with the plan or this machine.
    """
    if options.count_memory and not plan.cluster.weakest_device.backend.is_host:
        raise ConfigError("--count-memory is for CPUs: GPUs count their memory themselves", help="leave it out")
    trace = None if options.trace is None else Path(options.trace).resolve()
    if trace is not None and is_only_node and not os.access(trace.parent, os.W_OK):
        raise ConfigError(f"cannot write {options.trace}: its folder is not there, or may not be written")
    return prepare_options(plan, options.replace(trace=None if trace is None else str(trace)))


@contextlib.contextmanager
def _predicted_by(path: Path, profile: ProfileOptions, *, documents: bool) -> Iterator[tuple[Path, TrainingPlan]]:
    """Yield a plan file and its plan; with a profile a copy whose prediction is what the profile says of the same layout.

    Args:
        documents: the plan must say what documents cost, by the same prediction.

    Raises:
        ConfigError, ProfileError: as for `plan --profile`, or the profile has another number of devices.
    """
    plan = TrainingPlan.load(path)
    cluster = profile.profiled_cluster()
    if cluster is None and not (documents and plan.batches is None):
        yield path, plan
        return
    predicted = plan
    if cluster is not None:
        from ..planner.planned_stages import reestimate

        if cluster.num_devices != plan.cluster.num_devices:
            raise ConfigError(
                f"{profile.profile[0]} is of {cluster.num_devices} devices, the plan is for {plan.cluster.num_devices}"
            )
        predicted = plan.replace(cluster=cluster, estimate=reestimate(plan, cluster))
    if documents:
        from ..planner.batch import with_length_costs
        from ..runtime.training.options import require_documents

        require_documents(predicted)
        predicted = with_length_costs(predicted)
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        copy = Path(folder) / "plan.json"
        predicted.save(copy)
        yield copy, predicted


def run_job(plan: TrainingPlan, job: Job, rendezvous: Rendezvous, options: JobOptions) -> None:
    """Launch a job, again after each fault of a rank as often as allowed; bad input, a plan that this machine cannot run and
    signals to the launcher end it.

    On several nodes every launcher sees the fault and does the same; they meet again under the next name, so that nodes that come
    late do not meet those of the attempt before.

    Raises:
        MeshwrightError: of the last attempt.
    """
    for attempt in range(options.max_restarts + 1):
        until_s, place = 0.0, rendezvous
        if attempt:
            job = job.replace(options=job.options.replace(resume=True, restart_data=False))
        if attempt and rendezvous.nnodes > 1:
            place = replace(rendezvous, run_id=f"{rendezvous.run_id or 'meshwright'}-{attempt}")
            until_s = time.monotonic() + rendezvous.timeout_s
        if options.replan:
            planned, (plan, path) = plan, replanned(plan, Path(job.plan), nnodes=rendezvous.nnodes)
            job = job.replace(plan=str(path))
            if plan is not planned:
                typer.echo(f"planned again for {plan.cluster.name}: {plan.layout}; wrote {path}", err=True)
        try:
            _launch(plan, job, place, until_s=until_s)
            return
        except (ConfigError, InfeasibleError, InterruptedRunError, RuntimeMismatchError):
            raise
        except MeshwrightError as error:
            if attempt == options.max_restarts:
                raise
            typer.echo(f"{error}\nrestart {attempt + 1} of {options.max_restarts}", err=True)


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


def replanned(plan: TrainingPlan, path: Path, *, nnodes: int) -> tuple[TrainingPlan, Path]:
    """Return the plan and its file, or where this job's machines are not those of the plan, another one and its file.

    Looked at are the number of nodes, and how many devices this one has: fewer than the plan counts on, and all nodes are taken
    to have as many.

    Raises:
        ConfigError: the plan's nodes differ from each other, so that it is not known which remain.
        InfeasibleError: nothing fits on what remains.
    """
    if plan.cluster.weakest_device.backend.is_host:
        from ..profilers.machine import num_cores as count_devices
    else:
        from torch.cuda import device_count as count_devices
    cluster = remaining_cluster(plan.cluster, nnodes=nnodes, devices_here=count_devices())
    if cluster is None:
        return plan, path
    from ..planner.fallbacks import plan_on

    smaller = plan_on(plan, cluster)
    target = path.with_name(f"{path.stem}.{cluster.num_devices}-devices.json")
    smaller.save(target)
    return smaller, target


def remaining_cluster(cluster: ClusterSpec, *, nnodes: int, devices_here: int) -> ClusterSpec | None:
    """Return the cluster with so many nodes, and no more devices in each than there are; None where that is the cluster itself.

    Raises:
        ConfigError: its nodes are not all alike.
    """
    from ..schema.offers import with_devices_per_node, with_nodes

    lacks_devices = any(devices_here < group.devices_per_node for group in cluster.groups)
    if nnodes == cluster.num_nodes and not lacks_devices:
        return None
    if len(cluster.groups) > 1:
        raise ConfigError(f"the nodes of {cluster.name} differ: it is not known which remain", help="plan again")
    resized = with_nodes(cluster, nnodes)
    return with_devices_per_node(resized, devices_here) if lacks_devices else resized


@command()
def tokens(
    text: Annotated[list[str], typer.Argument(metavar="TEXT", help="Text files and folders.", show_default=False)],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the ids are written, a .bin file.")],
    tokenizer: Annotated[
        str | None, typer.Option(metavar="FILE", help="tokenizer.json, or a folder that holds one. Default: bytes.")
    ] = None,
    end_token: Annotated[
        str | None, typer.Option(metavar="TOKEN", help="Put this token of the tokenizer after every file.")
    ] = None,
) -> None:
    """Make a token file for `meshwright apply --data` from text."""
    from ..runtime.training.data_files import find_text, make_token_file

    if out.suffix != ".bin":
        raise ConfigError(f"--out {out}: token files end in .bin")
    count = make_token_file(find_text(text), out, tokenizer=tokenizer, end_token=end_token)
    typer.echo(f"wrote {out} with {count} tokens; next: meshwright apply plan.json --data {out}", err=True)
