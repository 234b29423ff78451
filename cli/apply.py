"""``meshwright apply``: run a plan on this machine, or this machine's part of it."""

from __future__ import annotations

import _thread
import contextlib
import functools
import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from typer.core import TyperCommand

from ..schema import ConfigError, MeshwrightError, Plan
from ..schema.rules import require_our_engine
from ..schema.units import format_bytes, format_count, format_seconds
from .errors import exit_on_error
from .inputs import ForeignOption, ProfileOption

_LOG_LINES = 20
"""Lines of progress for a whole run where standard error is not a terminal."""


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
            help="Text file or folder, or token files (`meshwright tokens`); repeatable. Default: Python's own sources."
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
    checkpoint_dir: Annotated[str | None, typer.Option(help="Folder for checkpoints; shared by all nodes.")] = None,
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
        str | None, typer.Option(help="Folder of Hugging Face safetensors to start from.", show_default=False)
    ] = None,
    save_weights: Annotated[
        str | None,
        typer.Option(help="New folder for weights in Hugging Face's layout at the end; shared by all nodes."),
    ] = None,
    save_adapters: Annotated[
        str | None, typer.Option(help="Folder for trained adapters at the end, as peft reads them.", show_default=False)
    ] = None,
    zeroth_order: Annotated[
        bool,
        typer.Option("--zeroth-order", help="Train by two forward passes, without backward passes and their memory."),
    ] = False,
    metrics: Annotated[Path | None, typer.Option(help="File for the JSON lines of the run.")] = None,
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
    rdzv_endpoint: Annotated[str | None, typer.Option(help="HOST:PORT where the nodes meet.")] = None,
    rdzv_id: Annotated[str | None, typer.Option(help="Name of the job at that place.")] = None,
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
        from ..runtime.job.launch import Rendezvous
        from ..runtime.job.slurm import slurm_rendezvous
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
        with _report(steps, metrics=metrics, append=resume, as_json=json_output) as report:
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
    from ..planner.run_calibration import estimate_again
    from .inputs import read_cluster

    cluster = read_cluster(None, profile, allow_foreign=allow_foreign)
    assert not isinstance(cluster, str)
    if cluster.num_devices != loaded.cluster.num_devices:
        raise ConfigError(
            f"{profile} is of {cluster.num_devices} devices, the plan is for {loaded.cluster.num_devices}"
        )
    predicted = loaded.replace(cluster=cluster, estimate=estimate_again(loaded, cluster))
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


@contextlib.contextmanager
def _report(steps: int, *, metrics: Path | None, append: bool, as_json: bool) -> Iterator[Path]:
    """A file for the ranks to write to; what appears in it is shown, printed and copied as it comes."""
    from ..runtime.training.metrics import MetricsWriter, follow

    writer, screen, finished = MetricsWriter(metrics, append=append), _Screen(steps), threading.Event()

    def handle(record: dict[str, Any]) -> None:
        writer.write(record)
        if as_json:
            typer.echo(json.dumps(record))
        screen.show(record)

    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder, screen, ThreadPoolExecutor(1) as pool:
        path = Path(folder) / "report.jsonl"
        reader = pool.submit(_for_each, handle, follow(path, finished))
        try:
            yield path
        except MeshwrightError:
            finished.set()
            reader.result()  # raises what the run was ended for, where it was this
            raise
        finally:
            finished.set()
        reader.result()
    writer.close()
    screen.show_comparison()


def _for_each(handle: Callable[[dict[str, Any]], None], records: Iterator[dict[str, Any]]) -> None:
    """Handle each record; if that fails (a full disk, a closed pipe) end the run."""
    try:
        for record in records:
            handle(record)
    except OSError as error:
        _thread.interrupt_main()
        raise MeshwrightError(f"cannot write the metrics of the run: {error.strerror}") from None


class _Screen:
    """Progress and result of a run on standard error: a bar on a terminal, now and then a line elsewhere."""

    def __init__(self, steps: int) -> None:
        self._console = Console(stderr=True)
        self._steps = steps
        self._comparison: dict[str, Any] | None = None
        self._progress = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn(),
            console=self._console, disable=not self._console.is_terminal,
        )  # fmt: skip
        self._task = self._progress.add_task("starting", total=steps)

    def __enter__(self) -> None:
        self._progress.start()

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def show(self, record: dict[str, Any]) -> None:
        """One line of the report."""
        if "step" not in record:
            self._comparison = record
            return
        step = record["step"]
        text = (
            f"loss {record['loss']:.4f}  {format_seconds(record['step_time_s'])}/step  "
            f"{format_count(record['tokens_per_s'])} tokens/s"
        )
        self._progress.update(self._task, completed=step, description=text)
        if not self._console.is_terminal and step % max(1, self._steps // _LOG_LINES) == 0:
            self._console.print(f"step {step}/{self._steps}  {text}", highlight=False, soft_wrap=True)

    def show_comparison(self) -> None:
        """The table of prediction and measurement, where this node has them."""
        if self._comparison is None:
            return
        predicted, measured, ratio = (self._comparison[name] for name in ("predicted", "measured", "ratio"))
        title = f"predicted and measured, median of {measured['steps'] - measured['warmup_steps']} steps"
        table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
        table.add_column("")
        for name in ("predicted", "measured", "measured / predicted"):
            table.add_column(name, justify="right")
        for title, key, show in (
            ("step time", "step_time_s", format_seconds),
            ("tokens/s", "tokens_per_s", format_count),
            ("peak memory", "peak_reserved_bytes", format_bytes),
        ):
            table.add_row(title, show(predicted[key]), show(measured[key]), f"{ratio[key]:.2f}")
            if key == "step_time_s":
                _add_parts(table, predicted.get("parts_s", {}), measured.get("parts_s", {}))
        self._console.print(table)
        for slow in measured.get("stragglers", ()):
            self._console.print(_straggler_line(slow, measured["ranks"]), highlight=False, soft_wrap=True)


_PARTS = {
    "compute": "forward and backward",
    "communication": "exposed communication",
    "pipeline_wait": "waiting for stages",
    "optimizer": "update",
    "other": "clipping, loss, the rest",
    "data": "data, beside the step",
    "preempted": "of these without a core",
}


def _add_parts(table: Table, predicted: dict[str, float], measured: dict[str, float]) -> None:
    """Rows of the busiest rank's parts; what takes less than a thousandth of a millisecond is left out."""
    for name, title in _PARTS.items():
        expected, found = predicted.get(name), measured.get(name)
        if found is None or max(expected or 0.0, found) < 1e-6:
            continue
        ratio = f"{found / expected:.2f}" if expected else ""
        table.add_row(f"  {title}", "" if expected is None else format_seconds(expected), format_seconds(found), ratio)


def _straggler_line(slow: dict[str, Any], ranks: list[dict[str, Any]]) -> str:
    stage = next(rank["stage_idx"] for rank in ranks if rank["rank"] == slow["rank"])
    return (
        f"slow: rank {slow['rank']} (stage {stage}) computes {100 * slow['slower_fraction']:.0f} % longer than its peers, "
        f"by chance once in {1 / slow['chance']:,.0f} runs"
    )
