"""`meshwright validate`: our predictions against a table of measured runs."""

from __future__ import annotations

import json as json_module
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from .errors import exit_on_error
from .inputs import JsonOption

if TYPE_CHECKING:
    from rich.table import Table

    from ..planner.validation import Prediction, RunRow
    from ..planner.validation.score import GroupScore, MemoryScore, SourceScore

Part = Literal["fit", "held-out"]
NOT_SELECTED = "not selected by --source, --split or --part"


def validate(
    runs: Annotated[
        Path, typer.Argument(metavar="RUNS.csv", help="Measured runs, one a line (docs/accuracy.md has the columns).")
    ],
    groups: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Table with a column decision_group: score our choice in each.")
    ] = None,
    source: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Only this source_set; repeatable.")] = None,
    split: Annotated[str | None, typer.Option(metavar="NAME", help="Only rows of this split.")] = None,
    part: Annotated[
        Part | None,
        typer.Option(help="Only the half that coefficients were chosen on (fit), or only the other (held-out)."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Scatter of predicted against measured.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Predict every run of a table and score the predictions, by source. Needs no GPU."""
    with exit_on_error():
        from ..planner.validation import predict, read_groups, read_runs, score_groups, score_sources
        from .tables import show

        names = read_groups(groups) if groups else []
        if plot:
            _pyplot()
        rows = read_runs(runs)
        selected = _select(rows, source or [], split, part, runs)
        predictions = predict(selected)
        choices = score_groups(selected, predictions, names)
        scores = score_sources(selected, predictions, choices)
        if plot:
            _save_plot(plot, selected, predictions)
        if json:
            typer.echo(json_module.dumps(_document(rows, selected, predictions, scores, choices), indent=1))
            return
        show(_time_table(scores))
        show(_memory_table(scores))
        show(_notes_table(scores))
        typer.echo("next: meshwright validate with --json for every row", err=True)


def _select(rows: list[RunRow], sources: list[str], split: str | None, part: Part | None, path: Path) -> list[RunRow]:
    """Rows of the wanted sources, split and part.

    Raises:
        ConfigError: nothing is left, with what there is.
    """
    from ..schema import ConfigError

    for names, found, option in (
        (sources, {row.source_set for row in rows}, "--source"),
        ([split] if split else [], {row.split for row in rows}, "--split"),
    ):
        unknown = [name for name in names if name not in found]
        if unknown:
            known = ", ".join(sorted(name for name in found if name)) or "none"
            raise ConfigError(f"{path} has no rows of {option} {unknown[0]}", help=f"it has: {known}")
    wanted = [row for row in rows if (not sources or row.source_set in sources) and (not split or row.split == split)]
    chosen = [row for row in wanted if part in (None, row.part)]
    if not chosen:
        raise ConfigError(f"{path} has no rows that are of that --source, --split and --part at once")
    return chosen


def _document(
    rows: list[RunRow],
    selected: list[RunRow],
    predictions: list[Prediction],
    scores: dict[str, SourceScore],
    choices: dict[str, GroupScore],
) -> dict[str, Any]:
    by_id = {row.id: prediction for row, prediction in zip(selected, predictions, strict=True)}
    return {
        "rows": [_row(row, by_id.get(row.id)) for row in rows],
        "sources": {source: asdict(score) for source, score in scores.items()},
        "groups": {name: asdict(choice) for name, choice in choices.items()},
    }


def _row(row: RunRow, prediction: Prediction | None) -> dict[str, Any]:
    estimate = prediction.estimate if prediction else None
    inputs = prediction.inputs if prediction else None
    return {
        "id": row.id,
        "step_time_s": estimate.step_time_s if estimate else None,
        "peak_allocated_bytes": estimate.peak_allocated_bytes if estimate else None,
        "peak_reserved_bytes": estimate.peak_reserved_bytes if estimate else None,
        "fits": estimate.fits if estimate else None,
        "skipped": prediction.skipped if prediction else NOT_SELECTED,
        "approximated": list(inputs.approximated) if inputs else [],
        "scored": row.is_scored and estimate is not None,
    }


def _time_table(scores: dict[str, SourceScore]) -> Table:
    table = _table(
        "step time, predicted against measured", "source", "rows", "scored", "skipped", "C/flag", "MAPE", "median ratio",
        "bias", "rank corr.", "in interval", "groups", "regret mean", "median", "max",
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


def _memory_table(scores: dict[str, SourceScore]) -> Table:
    table = _table(
        "memory, predicted against measured",
        "source",
        "kind",
        "rows",
        "MAPE",
        "bias",
        "failed",
        "recalled",
        "ran",
        "false alarms",
    )
    for source, score in scores.items():
        fit = score.fit
        verdicts = [str(fit.failed), _percent(fit.recall), str(fit.ran), _percent(fit.false_alarms)]
        shown = source or "(none)"
        kinds: dict[str, MemoryScore | None] = dict(score.memory) or {"-": None}
        for kind, memory in kinds.items():
            errors = (_percent(memory.mape), _percent(memory.bias, sign=True)) if memory else ("-", "-")
            table.add_row(shown, kind, str(memory.count) if memory else "-", *errors, *verdicts)
            shown, verdicts = "", [""] * 4
    return table


def _notes_table(scores: dict[str, SourceScore]) -> Table:
    """Why rows were skipped, what stands in for what, which defaults were taken."""
    table = _table(
        "scored-quality rows by reason (C or flagged rows are predicted, not scored)",
        "source",
        "what",
        "rows",
        "reason",
    )
    for source, score in scores.items():
        shown = source or "(none)"
        parts = {"skipped": score.skipped, "approximated": score.approximated, "assumed": score.assumed}
        for what, counts in parts.items():
            for reason, count in counts.items():
                table.add_row(shown, what, str(count), reason)
                shown = ""
    table.columns[1].justify = table.columns[3].justify = "left"
    return table


def _table(title: str, *columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(*columns, title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _percent(value: float | None, *, sign: bool = False) -> str:
    if value is None:
        return "-"
    return f"{100 * value:+.1f} %" if sign else f"{100 * value:.1f} %"


def _pyplot() -> Any:
    """matplotlib, drawing to files.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        from ..schema import ConfigError

        raise ConfigError(
            "--plot needs matplotlib, which is not installed", help="pip install 'meshwright[plot]'"
        ) from None
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def _save_plot(path: Path, rows: Sequence[RunRow], predictions: Sequence[Prediction]) -> None:
    """One log-log panel per source: scored rows, the diagonal, and a factor of two either side."""
    from ..schema import ConfigError

    points: dict[str, list[tuple[float, float]]] = {}
    for row, prediction in zip(rows, predictions, strict=True):
        if prediction.estimate and row.measured_s and row.is_scored:
            points.setdefault(row.source_set, []).append((row.measured_s, prediction.estimate.step_time_s))
    if not points:
        raise ConfigError("nothing to plot: no row has both a measured and a predicted time")
    pyplot = _pyplot()
    num_columns = min(4, len(points))
    num_rows = -(-len(points) // num_columns)
    figure, panels = pyplot.subplots(num_rows, num_columns, figsize=(4 * num_columns, 4 * num_rows), squeeze=False)
    for panel, (source, pairs) in zip(panels.flat, points.items(), strict=False):
        measured, predicted = zip(*pairs, strict=True)
        ends = [min(*measured, *predicted), max(*measured, *predicted)]
        panel.loglog(measured, predicted, ".", markersize=4, alpha=0.5)
        for factor, style in ((1.0, "k-"), (2.0, "k:"), (0.5, "k:")):
            panel.plot(ends, [factor * end for end in ends], style, linewidth=0.8)
        panel.set(title=f"{source} ({len(pairs)})", xlabel="measured, s", ylabel="predicted, s")
    for panel in list(panels.flat)[len(points) :]:
        panel.set_visible(False)
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write {path}: {error}") from None
    finally:
        pyplot.close(figure)
