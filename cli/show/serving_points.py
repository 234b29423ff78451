"""`meshwright validate --serve`: load tests of serving engines, predicted and scored."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import typer

from ...schema.units import format_percent
from ...validation.serving import predict_serving, read_serving
from ...validation.serving_score import ChoiceScore, MetricScore, ServingScore, score_serving
from ..terminal import Table, headed_table, show


def show_serving_scores(path: Path, *, as_json: bool) -> None:
    """Predict every row of a table of load tests; print rows and scores as JSON, or the scores as tables."""
    rows = read_serving(path)
    predictions = predict_serving(rows)
    scores = score_serving(rows, predictions)
    if as_json:
        listed = [
            {"id": row.id, **asdict(prediction), "scored": row.is_scored}
            for row, prediction in zip(rows, predictions, strict=True)
        ]
        document = {"rows": listed, "scores": {name: asdict(score) for name, score in scores.items()}}
        typer.echo(json.dumps(document, indent=1))
        return
    show(_errors(scores), _choices(scores))
    typer.echo("next: meshwright validate --serve with --json for every row", err=True)


def _errors(scores: dict[str, ServingScore]) -> Table:
    table = headed_table(
        "load tests, predicted against measured", "rows of", "rows", "answered", "fits", "TPOT mean", "median", "ratio", "rank",
        "TTFT mean", "median", "ratio", "rank", text=("rows of",),
    )  # fmt: skip
    for name, score in scores.items():
        counts = (str(score.count), str(score.answered), format_percent(score.fits))
        table.add_row(name, *counts, *_cells(score.tpot), *_cells(score.ttft))
    return table


def _cells(score: MetricScore | None) -> tuple[str, ...]:
    if score is None:
        return ("-",) * 4
    rank = "-" if score.rank is None else f"{score.rank:.2f}"
    return format_percent(score.mean), format_percent(score.median), f"{score.ratio:.2f}", rank


def _choices(scores: dict[str, ServingScore]) -> Table:
    table = headed_table(
        "most tokens a second and device within a limit on TPOT", "rows of", "choices", "limit met", "lost, mean", "90 %",
        "cautious: met", "lost, mean", "90 %", text=("rows of",),
    )  # fmt: skip
    for name, score in scores.items():
        if score.choices:
            table.add_row(name, str(score.choices.count), *_shares(score.choices), *_shares(score.cautious))
    return table


def _shares(choices: ChoiceScore | None) -> tuple[str, ...]:
    if choices is None:
        return ("-",) * 3
    return tuple(map(format_percent, (choices.met, choices.lost_mean, choices.lost_p90)))
