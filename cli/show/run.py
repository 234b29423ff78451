"""Show a run while it goes on: progress on standard error, JSON lines, and at the end prediction against measurement."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ...schema.units import format_bytes, format_count, format_percent, format_seconds
from ..terminal import Table, headed_table

_LOG_LINES = 20
"""Lines of progress for an entire run where standard error is not a terminal."""


@contextlib.contextmanager
def shown_run(
    steps: int = 0, *, metrics: Path | None = None, append: bool = False, as_json: bool = False
) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yield what takes the lines of a run's report as they come: they are shown, printed and copied."""
    from ...runtime.training.metrics import MetricsWriter

    writer, screen = MetricsWriter(metrics, append=append), Screen(steps)

    def handle(record: dict[str, Any]) -> None:
        writer.write(record)
        if as_json:
            typer.echo(json.dumps(record))
        screen.show(record)

    with screen.progress:
        yield handle
    writer.close()
    screen.show_comparison()


class Screen:
    """Progress and result of a run on standard error: a bar on a terminal, now and then a line elsewhere."""

    def __init__(self, steps: int) -> None:
        self._console = Console(stderr=True)
        self._steps = steps
        self._comparison: dict[str, Any] | None = None
        self.progress = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn(),
            console=self._console, disable=not steps or not self._console.is_terminal,
        )  # fmt: skip
        self._task = self.progress.add_task("starting", total=steps)

    def show(self, record: dict[str, Any]) -> None:
        """Show one line of the report."""
        if "event" in record:
            from ...runtime.job import JobEvent

            if text := JobEvent(**record).sentence():
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
        table = headed_table(title, "", "predicted", "measured", "ratio")
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
