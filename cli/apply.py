"""`meshwright apply`: run a plan on this machine, or this machine's share of it; `meshwright tokens` makes its data."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from ..runtime.training.options import TrainOptions
from ..schema import ConfigError, TrainingPlan
from ..schema.runnable import require_our_engine
from .options import Mode, OptionModel, ProfileOptions, command, option

if TYPE_CHECKING:
    from ..runtime.job.rendezvous import Rendezvous
    from ..runtime.job.worker import Job


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
        None, "nodes of the job; run the same command on each. Default: those of Slurm's step, else 1."
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
            ConfigError: several nodes without a place, or a node that is none of them.
        """
        from ..runtime.job.rendezvous import Rendezvous, slurm_rendezvous

        if self.nnodes is None and (slurm := slurm_rendezvous(os.environ)) is not None:
            return slurm
        return Rendezvous(
            nnodes=1 if self.nnodes is None else self.nnodes,
            node_rank=self.node_rank,
            endpoint=self.rdzv_endpoint,
            run_id=self.rdzv_id,
        )


class RunOutput(OptionModel):
    """What the built-in training reports."""

    metrics: Path | None = option(None, "for the JSON lines of the run.")
    as_json: bool = option(False, "one JSON object a step, and a last one, on stdout.", name="--json")


SCRIPT = Mode(
    name="a script of your own",
    when=lambda values: bool(values["script"]),
    takes=(JobOptions, ProfileOptions),
    why="does its own training",
    fix="put options of the script after it: meshwright apply plan.json SCRIPT --option",
)
BUILT_IN = Mode(takes=(JobOptions, ProfileOptions, TrainOptions, RunOutput))


@command(SCRIPT, BUILT_IN)
def apply(
    plan: Annotated[Path, typer.Argument(help="Plan file, from `meshwright plan --out`.", show_default=False)],
    training: TrainOptions | None,
    output: RunOutput | None,
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
    from .restarts import Restarts, run_job

    if script and not Path(script[0]).is_file():
        raise ConfigError(f"no such script: {script[0]}")
    with _predicted_by(plan, profile) as (path, loaded):
        require_our_engine(loaded.workload)
        rendezvous = job.rendezvous()
        work = Job(
            plan=str(path.resolve()), timeout_s=job.collective_timeout_s, hang_timeout_s=job.hang_timeout_s,
            grace_s=job.grace_s, script=tuple(script or ()),
        )  # fmt: skip
        run = functools.partial(
            run_job, rendezvous=rendezvous, restarts=Restarts(job.max_restarts, job.replan),
            say=functools.partial(typer.echo, err=True),
        )  # fmt: skip
        if training is None or output is None:
            run(loaded, work)
        else:
            _train(loaded, work, training, output, run, is_only_node=rendezvous.nnodes == 1)


def _train(
    plan: TrainingPlan,
    job: Job,
    options: TrainOptions,
    output: RunOutput,
    run: Callable[[TrainingPlan, Job], None],
    *,
    is_only_node: bool,
) -> None:
    """Run the built-in training and show what it reports."""
    from ..runtime.training.options import prepare_options
    from .show.run import running_report

    if options.count_memory and not plan.cluster.weakest_device.backend.is_host:
        raise ConfigError("--count-memory is for CPUs: GPUs count their memory themselves", help="leave it out")
    trace = None if options.trace is None else Path(options.trace).resolve()
    if trace is not None and is_only_node and not os.access(trace.parent, os.W_OK):
        raise ConfigError(f"cannot write {options.trace}: its folder is not there, or may not be written")
    prepared = prepare_options(plan, options.replace(trace=None if trace is None else str(trace)))
    with running_report(options.steps, metrics=output.metrics, append=options.resume, as_json=output.as_json) as report:
        run(plan, job.replace(options=prepared, report=str(report)))
    if trace is not None and trace.exists():
        typer.echo(
            f"wrote {options.trace}; open it in ui.perfetto.dev, next to that of `meshwright report --trace`", err=True
        )


@contextlib.contextmanager
def _predicted_by(path: Path, profile: ProfileOptions) -> Iterator[tuple[Path, TrainingPlan]]:
    """Yield a plan file and its plan; with a profile a copy whose prediction is what the profile says of the same layout.

    Raises:
        ConfigError, ProfileError: as for `plan --profile`, or the profile has another number of devices.
    """
    plan = TrainingPlan.load(path)
    cluster = profile.profiled_cluster()
    if cluster is None:
        yield path, plan
        return
    from ..validation.run_calibration import reestimate

    if cluster.num_devices != plan.cluster.num_devices:
        raise ConfigError(
            f"{profile.profile} is of {cluster.num_devices} devices, the plan is for {plan.cluster.num_devices}"
        )
    predicted = plan.replace(cluster=cluster, estimate=reestimate(plan, cluster))
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        copy = Path(folder) / "plan.json"
        predicted.save(copy)
        yield copy, predicted


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
