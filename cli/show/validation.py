"""Show scores of predictions: a table for times, one for memory, one for calibration, one for what was assumed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from ...schema.units import format_seconds
from ..terminal import headed_table

if TYPE_CHECKING:
    from ...schema import Calibration, ClusterSpec
    from ...validation.run_calibration import PlanRun
    from ...validation.score import MemoryScore, SourceScore
    from ...validation.table_calibration import CalibrationScore


def time_table(scores: dict[str, SourceScore]) -> Table:
    """Show errors of the step time, rank correlation, coverage and regret of each source."""
    table = headed_table(
        "step time, predicted against measured", "source", "rows", "scored", "skipped", "C/flag", "MAPE", "median ratio",
        "bias", "rank corr.", "in interval", "groups", "regret mean", "median", "max",
        text=("source",), wraps=True,
    )  # fmt: skip
    for source, score in scores.items():
        counts = (str(score.rows), str(score.scored), str(sum(score.skipped.values())), str(score.unscored))
        time, regret = score.time, score.regret
        times = ("-",) * 5
        if time:
            rank = "-" if time.spearman is None else f"{time.spearman:.3f}"
            bias, coverage = _percent(time.bias, sign=True), _percent(time.coverage)
            times = (_percent(time.mape), f"{time.median_ratio:.2f}", bias, rank, coverage)
        regrets = (
            (str(regret.count), *map(_percent, (regret.mean, regret.median, regret.max))) if regret else ("-",) * 4
        )
        table.add_row(source or "(none)", *counts, *times, *regrets)
    return table


def memory_table(scores: dict[str, SourceScore]) -> Table:
    """Show errors of the peak by kind of measurement, out-of-memory recall and false alarms of each source."""
    table = headed_table(
        "memory, predicted against measured", "source", "kind", "rows", "MAPE", "bias", "in interval", "failed",
        "recalled", "ran", "false alarms", text=("source",), wraps=True,
    )  # fmt: skip
    for source, score in scores.items():
        fit = score.fit
        verdicts = [str(fit.failed), _percent(fit.recall), str(fit.ran), _percent(fit.false_alarms)]
        shown = source or "(none)"
        kinds: dict[str, MemoryScore | None] = dict(score.memory) or {"-": None}
        for kind, memory in kinds.items():
            errors = ("-",) * 3
            if memory:
                errors = (_percent(memory.mape), _percent(memory.bias, sign=True), _percent(memory.coverage))
            table.add_row(shown, kind, str(memory.count) if memory else "-", *errors, *verdicts)
            shown, verdicts = "", [""] * 4
    return table


def notes_table(scores: dict[str, SourceScore]) -> Table:
    """Say why rows were skipped, what stands in for what, which defaults were taken."""
    title = "scored-quality rows by reason (C or flagged rows are predicted, not scored)"
    table = headed_table(title, "source", "what", "rows", "reason", text=("source", "what", "reason"))
    for source, score in scores.items():
        shown = source or "(none)"
        for what in ("skipped", "approximated", "assumed"):
            for reason, count in getattr(score, what).items():
                table.add_row(shown, what, str(count), reason)
                shown = ""
    return table


def _percent(value: float | None, *, sign: bool = False) -> str:
    if value is None:
        return "-"
    return f"{100 * value:+.1f} %" if sign else f"{100 * value:.1f} %"


def calibration_table(scores: dict[str, CalibrationScore], num_runs: int) -> Table:
    """Show the mean error without and with a few calibration runs of the same source and device."""
    table = headed_table(
        f"step time with {num_runs} runs of the same source as calibration, draw by draw",
        "source", "device", "draws", "rows", "MAPE without", "with", "worst draw", "bias with", "memory without", "with",
        text=("source", "device"), wraps=True,
    )  # fmt: skip
    for source, score in scores.items():
        times = (_percent(score.mape_before), _percent(score.mape_after), _percent(score.worst_after))
        memory = (_percent(score.memory_before), _percent(score.memory_after))
        table.add_row(
            source or "(none)", score.device, str(score.draws), str(score.rows), *times,
            _percent(score.bias_after, sign=True), *memory,
        )  # fmt: skip
    return table


def runs_table(runs: Sequence[PlanRun], cluster: ClusterSpec, calibration: Calibration) -> Table:
    """Compare the step times of runs with their predictions, without a calibration and with this one."""
    from ...schema import Calibration
    from ...validation.run_calibration import reestimate

    table = headed_table("step time of the runs", "layout", "measured", "predicted", "calibrated", text=("layout",))
    clusters = [cluster.replace(calibration=ratios) for ratios in (Calibration(), calibration)]
    for run in runs:
        predicted = [reestimate(run.plan, changed).step_time_s for changed in clusters]
        table.add_row(str(run.plan.layout), *map(format_seconds, (run.step_time_s, *predicted)))
    return table
