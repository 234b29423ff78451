"""`meshwright apply`: run a plan on this machine, or this machine's share of it; `meshwright tokens` makes its data."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from ..schema import ConfigError, Plan
from ..schema.runnable import require_our_engine
from .inputs import ForeignOption, ProfileOption
from .show.run import running_report
from .terminal import exit_on_error


class ApplyCommand(TyperCommand):
    """Options end at the script: what follows it is the script's, even where it looks like ours."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse, with ``--`` put before the script."""
        place = self._script_place(args)
        return super().parse_args(ctx, [*args[:place], "--", *args[place:]])

    def _script_place(self, args: list[str]) -> int:
        """Position of the second positional argument, or the end."""
        valued = {name for param in self.params if not getattr(param, "is_flag", True) for name in param.opts}
        positionals = idx = 0
        while idx < len(args) and args[idx] != "--":
            is_option = args[idx].startswith("-") and len(args[idx]) > 1
            positionals += not is_option
            if positionals == 2:
                return idx
            idx += 2 if args[idx] in valued else 1
        return min(idx, len(args))


def apply(
    plan: Annotated[Path, typer.Argument(help="Plan file, from `meshwright plan --out`.", show_default=False)],
    script: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCRIPT ARGS", help="Your own script; MESHWRIGHT_PLAN names the plan in its environment."
        ),
    ] = None,
    *,
    steps: Annotated[int, typer.Option(help="Steps of the whole run.")] = 20,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH",
            help="Text file or folder, or token files (`meshwright tokens`); repeatable. Default: Python's own sources.",
        ),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="FILE", help="tokenizer.json for text, or its folder. Default: bytes.")
    ] = None,
    restart_data: Annotated[
        bool, typer.Option("--restart-data", help="With --resume: begin the order of other data anew.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the weights and of the order of the data.")] = 0,
    learning_rate: Annotated[float, typer.Option(help="At its highest, after a linear warm-up.")] = 3e-4,
    schedule: Annotated[
        Literal["cosine", "linear", "constant"], typer.Option(help="Of the learning rate, down to a tenth.")
    ] = "cosine",
    warmup_steps: Annotated[int | None, typer.Option(help="Default: a tenth of the steps.")] = None,
    router_bias_rate: Annotated[
        float, typer.Option(help="How far a step moves sigmoid routers towards even loads; 0: not at all.")
    ] = 1e-3,
    compile_blocks: Annotated[
        bool, typer.Option("--compile", help="torch.compile each block, where the plan allows it.")
    ] = False,
    checkpoint_dir: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Folder for checkpoints; shared by all nodes.")
    ] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(help="Steps between checkpoints. Default: one at the end.")
    ] = None,
    keep_checkpoints: Annotated[int, typer.Option(help="How many of the newest stay.")] = 2,
    checkpoint_beside: Annotated[
        bool, typer.Option("--checkpoint-beside", help="Write checkpoints beside the next steps; takes host memory.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint, if there is one.")
    ] = False,
    weights: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Hugging Face safetensors to start from.", show_default=False)
    ] = None,
    save_weights: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER", help="New folder for weights in Hugging Face's layout at the end; shared by all nodes."
        ),
    ] = None,
    save_adapters: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="For trained adapters at the end, as peft reads them.", show_default=False),
    ] = None,
    zeroth_order: Annotated[
        bool,
        typer.Option("--zeroth-order", help="Train by two forward passes, without backward passes and their memory."),
    ] = False,
    metrics: Annotated[Path | None, typer.Option(metavar="FILE", help="For the JSON lines of the run.")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE.json",
            help="One measured step for ui.perfetto.dev, in the form that `plan --trace` gives the predicted one.",
        ),
    ] = None,
    count_memory: Annotated[
        bool,
        typer.Option("--count-memory", help="On CPUs: count the bytes of all tensors until the second step is over."),
    ] = False,
    nnodes: Annotated[
        int | None,
        typer.Option(help="Nodes of the job; run the same command on each. Default: those of Slurm's step, else 1."),
    ] = None,
    node_rank: Annotated[
        int | None, typer.Option(help="Place of this node in the plan's cluster, if it matters.")
    ] = None,
    rdzv_endpoint: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Where the nodes meet.")] = None,
    rdzv_id: Annotated[str | None, typer.Option(metavar="NAME", help="Of the job at that place.")] = None,
    collective_timeout_s: Annotated[float, typer.Option(help="How long a rank waits for another.")] = 600.0,
    hang_timeout_s: Annotated[
        float, typer.Option(help="A rank that keeps others waiting longer (and for ten steps) is ended; 0: never.")
    ] = 10.0,
    grace_s: Annotated[
        float, typer.Option(help="On SIGTERM: how long a step and a last checkpoint may take; 0: end at once.")
    ] = 25.0,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="Go on from the last checkpoint so many times after a rank failed.")
    ] = 0,
    replan: Annotated[
        bool, typer.Option("--replan", help="Plan again where nodes or devices are not those of the plan.")
    ] = False,
    profile: ProfileOption = None,
    allow_foreign_profile: ForeignOption = False,
    json_output: Annotated[
        bool, typer.Option("--json", help="One JSON object a step, and a last one, on stdout.")
    ] = False,
) -> None:
    """Run a plan: train its model for a few steps and compare with the prediction, or run your own script under it."""
    with exit_on_error(), _predicted_by(plan, profile, allow_foreign=allow_foreign_profile) as (plan, loaded):
        require_our_engine(loaded.workload)
        from ..runtime.job.rendezvous import Rendezvous, slurm_rendezvous
        from ..runtime.job.worker import Job
        from ..runtime.training.options import TrainOptions
        from ..runtime.training.prepare import prepare_options
        from .restarts import Restarts, run_job

        given = (nnodes, node_rank, rdzv_endpoint, rdzv_id)
        told = slurm_rendezvous(os.environ) if given == (None,) * len(given) else None
        rendezvous = told or Rendezvous(
            nnodes=1 if nnodes is None else nnodes, node_rank=node_rank, endpoint=rdzv_endpoint, run_id=rdzv_id
        )  # fmt: skip
        options = TrainOptions(
            steps=steps, data=tuple(data or ()), seed=seed, learning_rate=learning_rate, checkpoint_dir=checkpoint_dir,
            checkpoint_every=checkpoint_every, resume=resume, tokenizer=tokenizer, restart_data=restart_data,
            schedule=schedule, warmup_steps=warmup_steps, router_bias_rate=router_bias_rate, compile_blocks=compile_blocks,
            keep_checkpoints=keep_checkpoints, checkpoint_beside=checkpoint_beside, weights=weights, save_weights=save_weights,
            save_adapters=save_adapters, zeroth_order=zeroth_order, trace=None if trace is None else str(trace.resolve()),
            count_memory=count_memory,
        )  # fmt: skip
        job = Job(
            plan=str(plan.resolve()), options=options, timeout_s=collective_timeout_s, hang_timeout_s=hang_timeout_s,
            grace_s=grace_s, script=tuple(script or ()),
        )  # fmt: skip
        run = functools.partial(
            run_job, rendezvous=rendezvous, restarts=Restarts(max_restarts, replan),
            say=functools.partial(typer.echo, err=True),
        )  # fmt: skip
        if script:
            _refuse_training_options(
                script[0], data, checkpoint_dir, checkpoint_every, resume, metrics, json_output, tokenizer,
                compile_blocks, checkpoint_beside, restart_data, weights, save_weights,
                save_adapters, zeroth_order, trace, count_memory,
            )  # fmt: skip
            run(loaded, job)
            return
        if trace is not None and rendezvous.nnodes == 1 and not os.access(trace.resolve().parent, os.W_OK):
            raise ConfigError(f"cannot write {trace}: its folder is not there, or may not be written")
        if max_restarts and not checkpoint_dir:
            raise ConfigError("--max-restarts goes on from a checkpoint", help="add --checkpoint-dir DIR")
        job = job.replace(options=prepare_options(loaded, options))
        with running_report(steps, metrics=metrics, append=resume, as_json=json_output) as report:
            run(loaded, job.replace(report=str(report)))
        if trace is not None and trace.exists():
            typer.echo(
                f"wrote {trace}; open it in ui.perfetto.dev, beside that of `meshwright report --trace`", err=True
            )


@contextlib.contextmanager
def _predicted_by(plan: Path, profile: Path | None, *, allow_foreign: bool) -> Iterator[tuple[Path, Plan]]:
    """A plan file and its plan; with a profile a copy whose prediction is what the profile says of the same layout and stages.

    Raises:
        ConfigError, ProfileError: as for `plan --profile`, or the profile has another number of devices.
    """
    loaded = Plan.load(plan)
    if profile is None:
        yield plan, loaded
        return
    from ..validation.run_calibration import reestimate
    from .inputs import read_cluster

    cluster = read_cluster(None, profile, allow_foreign=allow_foreign)
    assert not isinstance(cluster, str)
    if cluster.num_devices != loaded.cluster.num_devices:
        raise ConfigError(
            f"{profile} is of {cluster.num_devices} devices, the plan is for {loaded.cluster.num_devices}"
        )
    predicted = loaded.replace(cluster=cluster, estimate=reestimate(loaded, cluster))
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        path = Path(folder) / "plan.json"
        predicted.save(path)
        yield path, predicted


def _refuse_training_options(script: str, *values: object) -> None:
    if not Path(script).is_file():
        raise ConfigError(f"no such script: {script}")
    if any(values):
        raise ConfigError(
            "--data, --checkpoint-dir, --checkpoint-every, --resume, --weights, --save-weights, --save-adapters, --metrics, "
            f"--trace and --json are for the built-in training; {script} does its own",
            help=f"put options of the script after it: meshwright apply plan.json {script} --option",
        )


def tokens(
    text: Annotated[list[str], typer.Argument(metavar="TEXT", help="Text files and folders.", show_default=False)],
    *,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the ids are written, a .bin file.")],
    tokenizer: Annotated[
        str | None, typer.Option(metavar="FILE", help="tokenizer.json, or a folder that holds one. Default: bytes.")
    ] = None,
    end_token: Annotated[
        str | None, typer.Option(metavar="TOKEN", help="Put this token of the tokenizer after every file.")
    ] = None,
) -> None:
    """Make a token file for `meshwright apply --data` from text."""
    with exit_on_error():
        from ..runtime.data.text import find_text, make_token_file
        from ..schema import ConfigError

        if out.suffix != ".bin":
            raise ConfigError(f"--out {out}: token files end in .bin")
        count = make_token_file(find_text(text), out, tokenizer=tokenizer, end_token=end_token)
        typer.echo(f"wrote {out} with {count} tokens; next: meshwright apply plan.json --data {out}", err=True)
