"""`meshwright calibrate`: what runs measured, folded into the machine's profile."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .inputs import ForeignOption, JsonOption
from .terminal import exit_on_error

if TYPE_CHECKING:
    from ..schema import ClusterSpec
    from ..validation.run_calibration import PlanRun


def calibrate(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="PLAN METRICS ...", help="A plan and what `apply --metrics` wrote of it; several pairs."
        ),
    ],
    *,
    profile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The machine's profile. Default: the one in the first plan.")
    ] = None,
    allow_foreign_profile: ForeignOption = False,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the profile goes.")] = Path("profile.json"),
    json: JsonOption = False,
) -> None:
    """Correct a profile by runs: steps that took longer in compute or communication than predicted, memory that was more.

    The corrections replace those of an earlier calibration: give all runs that should count.
    """
    with exit_on_error():
        from ..schema import ConfigError
        from ..validation.run_calibration import calibrate_from_runs, read_run

        if len(files) % 2:
            raise ConfigError("plans and metrics come in pairs: PLAN METRICS [PLAN METRICS ...]")
        runs = [read_run(*pair) for pair in zip(files[::2], files[1::2], strict=True)]
        cluster = _cluster(runs[0].plan.cluster, profile, allow_foreign=allow_foreign_profile)
        assert cluster.profile is not None
        found = calibrate_from_runs(runs, cluster)
        cluster.profile.replace(calibration=found, content_sha256="").sealed().save(out)
        if json:
            typer.echo(found.model_dump_json(indent=2))
        else:
            _show(runs, cluster, cluster.replace(calibration=found))
            typer.echo(str(found))
        typer.echo(f"wrote {out}; next: meshwright plan MODEL --profile {out} ...", err=True)


def _cluster(planned: ClusterSpec, profile: Path | None, *, allow_foreign: bool) -> ClusterSpec:
    """The plan's cluster with the devices of a profile, or with its own profile."""
    from ..profilers.files import load_profile
    from ..profilers.profiled_cluster import profiled_cluster, with_measured_devices
    from ..schema import ConfigError

    if profile is None:
        if planned.profile is None:
            raise ConfigError(
                "the plan was made from data sheets", help="add --profile FILE, from `meshwright profile`"
            )
        return planned
    found, problems = load_profile(profile, allow_foreign=allow_foreign)
    for problem in problems:
        typer.echo(f"foreign profile {profile}: {problem}", err=True)
    measured = profiled_cluster(found)
    return measured if measured.num_devices == planned.num_devices else with_measured_devices(planned, measured)


def _show(runs: list[PlanRun], before: ClusterSpec, after: ClusterSpec) -> None:
    from rich import box
    from rich.table import Table

    from ..schema import Calibration
    from ..schema.units import format_seconds
    from ..validation.run_calibration import reestimate
    from .show.plan import show

    table = Table(title="step time of the runs", title_justify="left", box=box.SIMPLE, pad_edge=False)
    table.add_column("layout")
    for name in ("measured", "predicted", "calibrated"):
        table.add_column(name, justify="right")
    plain = before.replace(calibration=Calibration())
    for run in runs:
        seconds = [reestimate(run.plan, cluster).step_time_s for cluster in (plain, after)]
        table.add_row(str(run.plan.layout), *(format_seconds(s) for s in (run.step_time_s, *seconds)))
    show(table)
