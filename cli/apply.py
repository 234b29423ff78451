"""`meshwright apply`: run a plan on this machine, or this machine's share of it; `meshwright tokens` makes its data.

A job goes on by itself: after a fault from the last checkpoint, and on what remains of the cluster.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from ..runtime.training.options import TrainOptions, prepare_options, why_not_continued
from ..schema import ConfigError, TrainingPlan
from ..schema.base import require_writable
from ..schema.engine_facts import require_our_engine
from ..schema.errors import InfeasibleError, RuntimeMismatchError
from .following import following
from .meeting import MeetingOptions, meeting_of_used
from .options import Mode, OptionModel, ProfileOptions, command, option

if TYPE_CHECKING:
    from ..runtime.supervision.supervisor import Scale
    from ..schema import ClusterSpec


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
    preflight: bool = option(
        False,
        "compare the ranks for ten seconds first, and name those that are slower than their peers; spares take their places.",
    )  # fmt: skip

    def settings(self) -> dict[str, Any]:
        """Return what these say of the job."""
        return {
            "timeout_s": self.collective_timeout_s, "hang_timeout_s": self.hang_timeout_s, "grace_s": self.grace_s,
            "max_restarts": self.max_restarts, "preflight": self.preflight,
        }  # fmt: skip


class RunOutput(OptionModel):
    """What the built-in training reports."""

    metrics: Path | None = option(None, "for the JSON lines of the run.")
    as_json: bool = option(False, "one JSON object a step, and a last one, on stdout.", name="--json")


class FaultHandling(OptionModel):
    """What a training does when a rank dies."""

    on_fault: Literal["continue", "restart"] | None = option(
        None,
        "continue: the others go on at once, under a plan for what is left; restart: --max-restarts. Default: continue where the "
        "plan has fallbacks (plan --tolerate) and nothing is in the way, or regions that train by themselves.",
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
    store_only: bool = option(
        False,
        "hold the store at --rdzv-endpoint on this machine, which is none of the nodes and should outlive them; it trains nothing.",
    )
    scale: Path | None = option(
        None, "policy of `meshwright scale`: how many machines train, of those that are there; events say what to hold."
    )
    available: Path | None = option(
        None, "file with the number of machines that the spot pool has now. Default: all that are there are its.",
        needs=("scale",),
    )  # fmt: skip

    def settings(self) -> dict[str, Any]:
        """Return what the runtime's settings say of it."""
        return self.model_dump(exclude={"scale", "available", "store_only"})


SCRIPT = Mode(
    name="a script of your own",
    when=lambda values: bool(values["script"]),
    takes=(MeetingOptions, JobOptions, ProfileOptions),
    why="does its own training",
    fix="put options of the script after it: meshwright apply plan.json SCRIPT --option",
)
BUILT_IN = Mode(takes=(MeetingOptions, JobOptions, ProfileOptions, TrainOptions, RunOutput, FaultHandling))


@command(SCRIPT, BUILT_IN)
def apply(
    plan: Annotated[Path, typer.Argument(help="Plan file, from `meshwright plan --out`.", show_default=False)],
    training: TrainOptions | None,
    output: RunOutput | None,
    faults: FaultHandling | None,
    meeting: MeetingOptions,
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
    from ..runtime.job import apply as run
    from .show.run import shown_run

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
        rendezvous = meeting.rendezvous()
        if faults is not None and faults.store_only:
            rendezvous = replace(rendezvous, store_only=True)
        elif not spares:
            rendezvous = meeting_of_used(loaded, rendezvous)
        if rendezvous is None:
            used = f"the plan uses {loaded.cluster.num_nodes} of {meeting.nnodes} nodes"
            typer.echo(f"node {meeting.node_rank} stays idle: {used}", err=True)
            return
        settings = job.settings()
        if job.replan:
            settings["replan"] = partial(_replanned_aloud, nnodes=rendezvous.nnodes)
        if training is None or output is None or faults is None:
            with shown_run() as on_record:
                run(path, rendezvous=rendezvous, on_record=on_record, script=tuple(script or ()), **settings)
            return
        prepared = _prepared(training, loaded, is_only_node=rendezvous.nnodes == 1)
        if prepared.robust_sum is not None:
            typer.echo(
                f"--robust-sum {prepared.robust_sum}: losses are not those of the plain mean of gradients", err=True
            )
        if prepared.recover is not None:
            typer.echo(
                "--recover neighbours: after a loss for good, losses are not those of a run without faults", err=True
            )
        plans = _fallbacks(loaded, prepared, faults)
        with shown_run(
            training.steps, metrics=output.metrics, append=training.resume, as_json=output.as_json
        ) as on_record:
            run(
                path, prepared, rendezvous=rendezvous, fallbacks=plans, on_record=on_record,
                scale=_following(loaded, prepared, faults), **faults.settings(), **settings,
            )  # fmt: skip
    if prepared.trace is not None and Path(prepared.trace).exists():
        typer.echo(
            f"wrote {training.trace}; open it in ui.perfetto.dev, next to that of `meshwright report --trace`", err=True
        )


def _following(plan: TrainingPlan, options: TrainOptions, faults: FaultHandling) -> Scale | None:
    """Return what says how many machines to hold; None without a policy."""
    if faults.scale is None:
        return None
    checkpoints = None if options.checkpoint_dir is None else Path(options.checkpoint_dir)
    return following(faults.scale, plan, faults.available, checkpoints=checkpoints, resumes=options.resume)


def _fallbacks(plan: TrainingPlan, options: TrainOptions, faults: FaultHandling) -> Sequence[TrainingPlan]:
    """Return the plans for fewer devices, under which a training goes on; made now where it is to and they were not.

    Raises:
        InfeasibleError: nothing fits on fewer devices.
    """
    reasons = why_not_continued(plan, options)
    if faults.on_fault is None and not faults.spares and plan.fallbacks and reasons:
        typer.echo(f"a fault ends the job, or restarts it (--max-restarts): {'; '.join(reasons)}", err=True)
    if plan.fallbacks or reasons or faults.on_fault != "continue":
        return plan.fallbacks
    from ..planner.fallbacks import fallbacks, num_units

    plans, reason = fallbacks(plan, num_units(plan.cluster) - 1)
    if not plans and not faults.spares:
        raise InfeasibleError("no plan for fewer devices: this training cannot go on", details=(reason,))
    return plans


def _prepared(options: TrainOptions, plan: TrainingPlan, *, is_only_node: bool) -> TrainOptions:
    """Return the options of the built-in training as its ranks take them.

    Raises:
        ConfigError: an option does not go with the plan or this machine.
    """
    if options.count_memory and not plan.cluster.weakest_device.backend.is_host:
        raise ConfigError("--count-memory is for CPUs: GPUs count their memory themselves", help="leave it out")
    trace = None if options.trace is None else Path(options.trace).resolve()
    if trace is not None and is_only_node:
        require_writable(trace)
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


def _replanned_aloud(plan: TrainingPlan, path: Path, *, nnodes: int) -> tuple[TrainingPlan, Path]:
    smaller, target = replanned(plan, path, nnodes=nnodes)
    if smaller is not plan:
        typer.echo(f"planned again for {smaller.cluster.name}: {smaller.layout}; wrote {target}", err=True)
    return smaller, target


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
