"""`meshwright validate` and `calibrate`: predictions against measured runs, and a machine's profile corrected by its own runs."""

from __future__ import annotations

import io
import json as json_module
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..schema.errors import ConfigError
from .options import JsonOption, OptionModel, ProfileOptions, command, option
from .terminal import show, show_answer

if TYPE_CHECKING:
    from ..schema import Calibration, ClusterSpec
    from ..validation import Prediction, RunRow
    from ..validation.score import GroupScore, SourceScore
    from ..validation.table_calibration import CalibrationScore

Part = Literal["fit", "held-out"]
NOT_SELECTED = "not selected by --source, --split or --part"


class RowOptions(OptionModel):
    """Which rows are scored."""

    source: tuple[str, ...] = option((), "only this source_set; repeatable.", metavar="NAME")
    split: str | None = option(None, "only rows of this split.", metavar="NAME")
    part: Part | None = option(
        None, "only the half that coefficients were chosen on (fit), or only the other (held-out)."
    )


@command()
def validate(
    runs: Annotated[
        Path, typer.Argument(metavar="RUNS.csv", help="Measured runs, one a line (docs/accuracy.md has the columns).")
    ],
    selection: RowOptions,
    groups: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Table with a column decision_group: score our choice in each.")
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            metavar="RUNS.csv",
            help="Runs that correct the model for their device first; they are not scored themselves.",
        ),
    ] = None,
    calibration_runs: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Cross-validate --calibrate: correct with N runs of a source, score its others."
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Scatter of predicted against measured.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Predict every run of a table and score the predictions, by source. Needs no GPU."""
    from ..validation import predict, read_groups, read_runs, score_groups, score_sources
    from ..validation.table_calibration import cross_validate
    from .show.validation import calibration_table, memory_table, notes_table, time_table

    names = read_groups(groups) if groups else []
    if plot:
        _pyplot()
    rows = read_runs(runs)
    calibrations, selected = _calibrations(calibrate, _select(rows, selection, runs))
    predictions = predict(selected, calibrations)
    choices = score_groups(selected, predictions, names)
    scores = score_sources(selected, predictions, choices)
    crossed = cross_validate(selected, calibration_runs) if calibration_runs else {}
    if plot:
        _save_plot(plot, selected, predictions)
    if json:
        document = _document(rows, selected, predictions, scores, choices)
        typer.echo(json_module.dumps(document | _calibration_document(calibrations, crossed), indent=1))
        return
    show(time_table(scores))
    show(memory_table(scores))
    if crossed:
        show(calibration_table(crossed, calibration_runs or 0))
    show(notes_table(scores))
    typer.echo("next: meshwright validate with --json for every row", err=True)


def _select(rows: list[RunRow], selection: RowOptions, path: Path) -> list[RunRow]:
    """Return the rows of the requested sources, split and part.

    Raises:
        ConfigError: there are none, with what there is.
    """
    sources, split, part = selection.source, selection.split, selection.part
    for names, known, flag in (
        (sources, {row.source_set for row in rows}, "--source"),
        ((split,) if split else (), {row.split for row in rows}, "--split"),
    ):
        unknown = [name for name in names if name not in known]
        if unknown:
            listed = ", ".join(sorted(name for name in known if name)) or "none"
            raise ConfigError(f"{path} has no rows of {flag} {unknown[0]}", help=f"it has: {listed}")
    selected = [
        row
        for row in rows
        if (not sources or row.source_set in sources) and (not split or row.split == split) and part in (None, row.part)
    ]
    if not selected:
        raise ConfigError(f"{path} has no rows that are of that --source, --split and --part at once")
    return selected


def _calibrations(path: Path | None, selected: list[RunRow]) -> tuple[dict[str, Calibration], list[RunRow]]:
    """Return calibrations by device, and the rows; those that were calibrated on are marked, so that they are not scored."""
    from dataclasses import replace

    from ..validation import read_runs
    from ..validation.table_calibration import calibrate_by_device

    if path is None:
        return {}, selected
    runs = read_runs(path)
    calibrations = calibrate_by_device(runs)
    for device, calibration in calibrations.items():
        typer.echo(f"calibration of {device}: {calibration}", err=True)
    used = {row.id for row in runs}
    return calibrations, [replace(row, flag="calibration") if row.id in used else row for row in selected]


def _calibration_document(calibrations: dict[str, Calibration], crossed: dict[str, CalibrationScore]) -> dict[str, Any]:
    return {
        "calibrations": {device: calibration.model_dump() for device, calibration in calibrations.items()},
        "cross_validation": {source: asdict(score) for source, score in crossed.items()},
    }


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


def _pyplot() -> Any:
    """Return matplotlib, drawing to files.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        raise ConfigError(
            "--plot needs matplotlib, which is not installed", help="pip install 'meshwright[plot]'"
        ) from None
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def _save_plot(path: Path, rows: Sequence[RunRow], predictions: Sequence[Prediction]) -> None:
    """Draw one log-log panel per source: scored rows, the diagonal, and a factor of two either side."""
    from ..schema.base import write_atomically

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
    drawn = io.BytesIO()
    try:
        figure.savefig(drawn, dpi=120, format=path.suffix[1:] or None)
    except ValueError as error:
        raise ConfigError(f"cannot write {path}: {error}") from None
    finally:
        pyplot.close(figure)
    write_atomically(path, drawn.getvalue())


@command()
def calibrate(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="PLAN METRICS ...", help="A plan and what `apply --metrics` wrote of it; several pairs."
        ),
    ],
    profile: ProfileOptions,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the profile goes.")] = Path("profile.json"),
    json: JsonOption = False,
) -> None:
    """Correct a profile by runs: steps that took longer in compute or communication than predicted, memory that was more.

    The corrections replace those of an earlier calibration: give all runs that should count. Without --profile the one in the
    first plan is corrected.
    """
    from ..validation.run_calibration import calibrate_from_runs, read_run
    from .show.validation import runs_table

    if len(files) % 2:
        raise ConfigError("plans and metrics come in pairs: PLAN METRICS [PLAN METRICS ...]")
    runs = [read_run(*pair) for pair in zip(files[::2], files[1::2], strict=True)]
    cluster = _profiled_cluster(runs[0].plan.cluster, profile)
    assert cluster.profile is not None
    calibration = calibrate_from_runs(runs, cluster)
    cluster.profile.replace(calibration=calibration, content_sha256="").sealed().save(out)
    show_answer(calibration, runs_table(runs, cluster, calibration), as_json=json)
    if not json:
        typer.echo(str(calibration))
    typer.echo(f"wrote {out}; next: meshwright plan MODEL --profile {out} ...", err=True)


def _profiled_cluster(planned: ClusterSpec, profile: ProfileOptions) -> ClusterSpec:
    """Return the plan's cluster with the devices of a profile, or with its own profile."""
    from ..profilers.profiled_cluster import with_measured_devices

    measured = profile.profiled_cluster()
    if measured is None:
        if planned.profile is None:
            raise ConfigError(
                "the plan was made from data sheets", help="add --profile FILE, from `meshwright profile`"
            )
        return planned
    return measured if measured.num_devices == planned.num_devices else with_measured_devices(planned, measured)
