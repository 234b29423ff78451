"""Show a run while it goes on: progress on standard error, JSON lines, and at the end prediction against measurement."""

from __future__ import annotations

import _thread
import contextlib
import json
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ...schema import MeshwrightError
from ...schema.units import format_bytes, format_count, format_percent, format_seconds
from ..terminal import Table, headed_table

_LOG_LINES = 20
"""Lines of progress for an entire run where standard error is not a terminal."""


@contextlib.contextmanager
def running_report(steps: int, *, metrics: Path | None, append: bool, as_json: bool) -> Iterator[Path]:
    """Yield a file for the ranks to write to; what appears in it is shown, printed and copied as it comes."""
    from ...runtime.training.metrics import MetricsWriter, read_new_records

    writer, screen, finished = MetricsWriter(metrics, append=append), Screen(steps), threading.Event()

    def handle(record: dict[str, Any]) -> None:
        writer.write(record)
        if as_json:
            typer.echo(json.dumps(record))
        screen.show(record)

    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder, screen.progress, ThreadPoolExecutor(1) as pool:
        path = Path(folder) / "report.jsonl"
        reader = pool.submit(_for_each, handle, read_new_records(path, finished))
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
        ignores = signal.getsignal(signal.SIGINT) == signal.SIG_IGN  # as shells let jobs in the background do
        _thread.interrupt_main(signal.SIGTERM if ignores else signal.SIGINT)
        raise MeshwrightError(f"cannot write the metrics of the run: {error.strerror}") from None


class Screen:
    """Progress and result of a run on standard error: a bar on a terminal, now and then a line elsewhere."""

    def __init__(self, steps: int) -> None:
        self._console = Console(stderr=True)
        self._steps = steps
        self._comparison: dict[str, Any] | None = None
        self.progress = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn(),
            console=self._console, disable=not self._console.is_terminal,
        )  # fmt: skip
        self._task = self.progress.add_task("starting", total=steps)

    def show(self, record: dict[str, Any]) -> None:
        """Show one line of the report."""
        if "event" in record:
            causes, seconds = "; ".join(record["causes"]), format_seconds(record["seconds"])
            ranks = f"{record['ranks']} ranks go on with {record['layout']}"
            text = f"{causes}: {ranks}, step {record['before_step']} done {seconds} after"
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)
            return
        if "note" in record:
            self._console.print(record["note"], highlight=False, markup=False, soft_wrap=True)
            return
        if "step" not in record:
            self._comparison = record
            return
        step = record["step"]
        text = (
            f"loss {record['loss']:.4f}  {format_seconds(record['step_time_s'])}/step  "
            f"{format_count(record['tokens_per_s'])} tokens/s"
        )
        self.progress.update(self._task, completed=step, description=text)
        if not self._console.is_terminal and step % max(1, self._steps // _LOG_LINES) == 0:
            self._console.print(f"step {step}/{self._steps}  {text}", highlight=False, soft_wrap=True)

    def show_comparison(self) -> None:
        """Show the table of prediction and measurement, where this node has them."""
        if self._comparison is None:
            return
        predicted, measured, ratio = (self._comparison[name] for name in ("predicted", "measured", "ratio"))
        title = f"predicted and measured, median of {measured['steps'] - measured['warmup_steps']} steps"
        table = headed_table(title, "", "predicted", "measured", "measured / predicted")
        rows = [
            ("step time", "step_time_s", format_seconds),
            ("tokens/s", "tokens_per_s", format_count),
            ("peak memory", "peak_reserved_bytes", format_bytes),
        ]
        if measured["peak_allocated_bytes"] != measured["peak_reserved_bytes"]:
            rows.append(("  of which tensors", "peak_allocated_bytes", format_bytes))
        for title, key, show in rows:
            table.add_row(title, show(predicted[key]), show(measured[key]), f"{ratio[key]:.2f}")
            if key == "step_time_s":
                _add_time_terms(table, predicted.get("parts_s", {}), measured.get("parts_s", {}))
        self._console.print(table)
        for slow in measured.get("stragglers", ()):
            stage = next(rank["stage_idx"] for rank in measured["ranks"] if rank["rank"] == slow["rank"])
            line = (
                f"slow: rank {slow['rank']} (stage {stage}) computes {format_percent(slow['slower_fraction'], 0)} longer than its "
                f"peers, by chance once in {1 / slow['chance']:,.0f} runs"
            )
            self._console.print(line, highlight=False, soft_wrap=True)


_TIME_TERMS = {
    "compute": "forward and backward",
    "communication": "exposed communication",
    "pipeline_wait": "waiting for stages",
    "optimizer": "update",
    "other": "clipping, loss, the rest",
    "data": "data, next to the step",
    "preempted": "of these without a core",
}


def _add_time_terms(table: Table, predicted: dict[str, float], measured: dict[str, float]) -> None:
    """Add rows of the busiest rank's time; what takes less than a thousandth of a millisecond is left out."""
    for name, title in _TIME_TERMS.items():
        expected_s, actual_s = predicted.get(name), measured.get(name)
        if actual_s is None or max(expected_s or 0.0, actual_s) < 1e-6:
            continue
        expected = "" if expected_s is None else format_seconds(expected_s)
        ratio = f"{actual_s / expected_s:.2f}" if expected_s else ""
        table.add_row(f"  {title}", expected, format_seconds(actual_s), ratio)
