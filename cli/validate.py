"""`meshwright validate` and `calibrate`: predictions against measured runs, and a machine's profile corrected by its own runs."""

from __future__ import annotations

import io
import json as json_module
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..schema.errors import ConfigError
from ..schema.units import counted, format_percent, format_seconds
from .options import JsonOption, Mode, OptionModel, ProfileOptions, command, option
from .terminal import Table, headed_table, show, show_answer

if TYPE_CHECKING:
    from ..schema import Calibration, ClusterSpec
    from ..validation import Prediction, RunRow
    from ..validation.run_calibration import PlanRun
    from ..validation.score import OverallScore, SourceScore, TimeScore
    from ..validation.table_calibration import CalibrationScore

NOT_SELECTED = "not selected by --source, --split or --part"


class ScoreOptions(OptionModel):
    """Which rows are scored, and how."""

    source: tuple[str, ...] = option((), "only this source_set; repeatable.", metavar="NAME")
    split: str | None = option(None, "only rows of this split.", metavar="NAME")
    part: Literal["fit", "held-out"] | None = option(
        None, "only the half that coefficients were chosen on (fit), or only the other (held-out)."
    )
    groups: Path | None = option(
        None, "table with a column decision_group: score the choice in these groups only.", metavar="GROUPS.csv"
    )
    by: str | None = option(
        None, "also list errors by fields of the layout, e.g. tp,micro_batch or tp,pp,chunks.", metavar="NAMES"
    )
    calibrate: Path | None = option(
        None, "runs that correct the model for their device first; they are not scored themselves.", metavar="RUNS.csv"
    )
    calibration_runs: int | None = option(
        None, "cross-validate --calibrate: correct with N runs of a source, score its others.", ge=1
    )
    plot: Path | None = option(None, "scatter of predicted against measured.", metavar="FILE.png")


class TableOptions(OptionModel):
    """What the lines of the table are."""

    serve: bool = option(False, "the table has load tests of serving engines: predict TTFT and TPOT of each.")


SERVING = Mode(
    name="--serve",
    when=lambda values: values["serve"],
    takes=(TableOptions,),
    why="scores load tests of serving engines",
)


@command(SERVING, Mode(takes=(TableOptions, ScoreOptions)))
def validate(
    runs: Annotated[
        Path, typer.Argument(metavar="RUNS.csv", help="Measured runs, one a line (docs/accuracy.md has the columns).")
    ],
    table: TableOptions,
    options: ScoreOptions | None,
    json: JsonOption = False,
) -> None:
    """Predict every run of a table and score the predictions, by source. Needs no GPU.

    With --serve the table has load tests of serving engines (docs/serving.md has the columns).
    """
    if options is None:
        from .show.serving_points import show_serving_scores

        show_serving_scores(runs, as_json=json)
        return
    from ..validation import predict, read_groups, read_runs, score_by, score_groups, score_overall, score_sources
    from ..validation.stalls import stalled
    from ..validation.table_calibration import calibrate_by_device, cross_validate

    names = read_groups(options.groups) if options.groups else None
    fields = _fields(options.by)
    if options.plot:
        _pyplot()
    rows = read_runs(runs)
    selected = _select(rows, options, runs)
    calibration_rows = read_runs(options.calibrate) if options.calibrate else []
    calibrations = calibrate_by_device(calibration_rows) if options.calibrate else {}
    for device, calibration in calibrations.items():
        typer.echo(f"calibration of {device}: {calibration.ratios}", err=True)
    used = {row.id for row in calibration_rows}  # not scored themselves
    selected = [replace(row, flag="calibration") if row.id in used else row for row in selected]
    predictions = predict(selected, {device: fitted.of_run for device, fitted in calibrations.items()})
    choices = score_groups(selected, predictions, names)
    scores = score_sources(selected, predictions, choices)
    overall, parts = score_overall(scores.values()), score_by(selected, predictions, fields) if fields else {}
    crossed = cross_validate(selected, options.calibration_runs) if options.calibration_runs else {}
    if options.plot:
        _save_plot(options.plot, selected, predictions)
    if json:
        by_id = {row.id: prediction for row, prediction in zip(selected, predictions, strict=True)}
        stalled_ids = {row.id for row, has_stalled in zip(selected, stalled(selected), strict=True) if has_stalled}
        document = {
            "rows": [_row(row, by_id.get(row.id), has_stalled=row.id in stalled_ids) for row in rows],
            "sources": {source: asdict(score) for source, score in scores.items()},
            "all": asdict(overall),
            "groups": {name: asdict(choice) for name, choice in choices.items()},
            "by": [{**dict(zip(("source", *fields), key, strict=True)), **asdict(part)} for key, part in parts.items()],
            "calibrations": {device: fitted.ratios.model_dump() for device, fitted in calibrations.items()},
            "cross_validation": {source: asdict(score) for source, score in crossed.items()},
        }
        typer.echo(json_module.dumps(document, indent=1))
        return
    tables = [
        time_table(scores, overall),
        choice_table(scores, overall),
        memory_table(scores),
        fit_table(scores, overall),
    ]
    show(*(table for table in tables if any(table.sections)))
    if parts:
        show(parts_table(parts, fields))
    if crossed:
        show(calibration_table(crossed, options.calibration_runs or 0))
    if any(score.skipped or score.approximated or score.assumed for score in scores.values()):
        show(notes_table(scores))
    typer.echo("next: meshwright validate with --json for every row", err=True)


def _select(rows: list[RunRow], options: ScoreOptions, path: Path) -> list[RunRow]:
    """Return the rows of the requested sources, split and part.

    Raises:
        ConfigError: there are none, with what there is.
    """
    sources, split, part = options.source, options.split, options.part
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


ESTIMATED = (
    "step_time_s", "step_time_interval_s", "breakdown_s", "mfu", "tokens_per_s_per_device", "peak_allocated_bytes",
    "peak_reserved_bytes", "peak_device_bytes", "required_bytes", "budget_bytes", "memory_interval_bytes", "memory_bytes",
    "fits",
)  # fmt: skip
"""Fields of the estimate in the JSON; peaks are what tensors take, the allocator holds, the driver counts, and a plan requires."""


def _fields(text: str | None) -> tuple[str, ...]:
    """Return the names in a comma-separated list.

    Raises:
        ConfigError: one of them is no field that errors can be listed by.
    """
    from ..validation.score import FIELDS

    names = tuple(name.strip() for name in (text or "").split(",") if name.strip())
    if unknown := [name for name in names if name not in FIELDS]:
        raise ConfigError(f"--by has no field {unknown[0]!r}", help=f"fields are {', '.join(FIELDS)}")
    return names


def _row(row: RunRow, prediction: Prediction | None, *, has_stalled: bool) -> dict[str, Any]:
    estimate = prediction.estimate if prediction else None
    inputs = prediction.inputs if prediction else None
    estimated = estimate.model_dump(mode="json") if estimate else {}
    return {
        "id": row.id,
        "measured_s": inputs.measured_s if inputs else row.measured_s,
        **{name: estimated.get(name) for name in ESTIMATED},
        "layout": inputs.layout.model_dump(mode="json", exclude_defaults=True) if inputs else None,
        "stalled": has_stalled,
        "skipped": prediction.skipped if prediction else NOT_SELECTED,
        "assumed": list(inputs.assumed) if inputs else [],
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
        if prediction.estimate and prediction.measured_s and row.is_scored:
            points.setdefault(row.source_set, []).append((prediction.measured_s, prediction.estimate.step_time_s))
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


def time_table(scores: dict[str, SourceScore], overall: OverallScore) -> Table:
    """Show errors and intervals of the step time by source, runs that stalled apart, and the intervals of all sources alike."""
    table = headed_table(
        "step time, predicted against measured", "source", "scored", "skip", "timed", "MAPE", "ratio", "bias", "inside",
        "width", text=("source",),
    )  # fmt: skip
    for source, score in scores.items():
        counts = (str(score.scored), str(sum(score.skipped.values())))
        table.add_row(source or "(none)", *counts, *_time_cells(score.time))
        if score.stalled:
            table.add_row("  stalled", "", "", *_time_cells(score.stalled))
    if overall.coverage is not None and overall.width is not None and len(scores) > 1:
        table.add_section()
        table.add_row("alike", *("",) * 6, _percent(overall.coverage), f"{overall.width:.2f}")
    return table


def _time_cells(time: TimeScore | None) -> tuple[str, ...]:
    if time is None:
        return ("-",) * 6
    errors = (_percent(time.mape), f"{time.median_ratio:.2f}", _percent(time.bias, sign=True))
    return (str(time.count), *errors, _percent(time.coverage), f"{time.width:.2f}")


def choice_table(scores: dict[str, SourceScore], overall: OverallScore) -> Table:
    """Show the regret of choosing in decision groups, by us and by simpler rules, how well their order is predicted, and gains.

    A gain is that of our choice over the mean of its group: as promised, and as measured.
    """
    table = headed_table(
        "choice: what the chosen layout costs over the best measured one", "source", "groups", "ours", "worst",
        "plainer", "naive", "random", "rank", "promised", "gained", text=("source",),
    )  # fmt: skip
    for source, score in scores.items():
        if choice := score.regret:
            regrets = map(_percent, (choice.mean, choice.max, choice.plain, choice.naive, choice.random))
            rank = "-" if choice.rank is None else f"{choice.rank:.2f}"
            gains = (_percent(gain, sign=True) for gain in (choice.predicted_gain, choice.measured_gain))
            table.add_row(source or "(none)", str(choice.count), *regrets, rank, *gains)
    if overall.regret is not None and overall.num_groups > 1:
        table.add_section()
        rules = (overall.plain, overall.naive, overall.random)
        table.add_row("alike", str(overall.num_groups), _percent(overall.regret), "", *map(_percent, rules))
    return table


def memory_table(scores: dict[str, SourceScore]) -> Table:
    """Show errors of the peak by kind of measurement."""
    table = headed_table(
        "memory, predicted against measured", "source", "kind", "rows", "MAPE", "bias", "inside",
        text=("source", "kind"), num_keys=2,
    )  # fmt: skip
    for source, score in scores.items():
        shown = source or "(none)"
        for kind, memory in score.memory.items():
            errors = (_percent(memory.mape), _percent(memory.bias, sign=True), _percent(memory.coverage))
            table.add_row(shown, kind, str(memory.count), *errors)
            shown = ""
    return table


def fit_table(scores: dict[str, SourceScore], overall: OverallScore) -> Table:
    """Show runs that ran and are refused (false alarms), and runs that failed for memory and are not (misses)."""
    table = headed_table("runs that fit", "source", "ran", "false alarms", "failed", "misses", text=("source",))
    named = [(source or "(none)", score.fit) for source, score in scores.items()]
    for source, fit in named:
        table.add_row(source, str(fit.ran), str(fit.alarms), str(fit.failed), str(fit.misses))
    if len(scores) > 1:
        table.add_section()
        table.add_row("sum", str(overall.ran), str(overall.alarms), str(overall.failed), str(overall.misses))
    return table


def parts_table(parts: dict[tuple[object, ...], TimeScore], fields: tuple[str, ...]) -> Table:
    """Show errors of the step time by source and fields of the layout."""
    table = headed_table(
        f"step time by {', '.join(fields)}", "source", *fields, "rows", "MAPE", "ratio", "bias", "inside",
        text=("source",), num_keys=1 + len(fields),
    )  # fmt: skip
    shown = None
    for (source, *values), time in parts.items():
        count, mape, ratio, bias, coverage, _ = _time_cells(time)
        name = "" if source == shown else str(source) or "(none)"
        table.add_row(name, *map(str, values), count, mape, ratio, bias, coverage)
        shown = source
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
    return format_percent(value, sign=sign)


def calibration_table(scores: dict[str, CalibrationScore], num_runs: int) -> Table:
    """Show the mean error without and with a few calibration runs of the same source and device."""
    table = headed_table(
        f"step time with {counted(num_runs, 'run')} of the same source as calibration, draw by draw",
        "source", "device", "draws", "rows", "MAPE without", "with", "worst draw", "bias with", "memory without", "with",
        text=("source", "device"), num_keys=2,
    )  # fmt: skip
    for source, score in scores.items():
        times = (_percent(score.mape_before), _percent(score.mape_after), _percent(score.worst_after))
        memory = (_percent(score.memory_before), _percent(score.memory_after))
        table.add_row(
            source or "(none)", score.device, str(score.draws), str(score.rows), *times,
            _percent(score.bias_after, sign=True), *memory,
        )  # fmt: skip
    return table


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


def runs_table(runs: Sequence[PlanRun], cluster: ClusterSpec, calibration: Calibration) -> Table:
    """Compare the step times of runs with their predictions, without a calibration and with this one."""
    from ..planner.planned_stages import reestimate
    from ..schema import Calibration
    from .markup import plain

    table = headed_table("step time of the runs", "measured", "predicted", "calibrated", "layout", text=("layout",))
    clusters = [cluster.replace(calibration=ratios) for ratios in (Calibration(), calibration)]
    for run in runs:
        predicted = [reestimate(run.plan, changed).step_time_s for changed in clusters]
        table.add_row(*map(format_seconds, (run.step_time_s, *predicted)), plain(str(run.plan.layout)))
    return table
