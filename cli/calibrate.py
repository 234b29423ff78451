"""`meshwright calibrate`: what runs measured, folded into the machine's profile."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..schema.errors import ConfigError
from .inputs import JsonOption, ProfileOptions, read_profiled_cluster
from .options import command

if TYPE_CHECKING:
    from ..schema import ClusterSpec


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
    from .show import show
    from .show.validation import runs_table

    if len(files) % 2:
        raise ConfigError("plans and metrics come in pairs: PLAN METRICS [PLAN METRICS ...]")
    runs = [read_run(*pair) for pair in zip(files[::2], files[1::2], strict=True)]
    cluster = _profiled_cluster(runs[0].plan.cluster, profile)
    assert cluster.profile is not None
    calibration = calibrate_from_runs(runs, cluster)
    cluster.profile.replace(calibration=calibration, content_sha256="").sealed().save(out)
    if json:
        typer.echo(calibration.model_dump_json(indent=2))
    else:
        show(runs_table(runs, cluster, calibration))
        typer.echo(str(calibration))
    typer.echo(f"wrote {out}; next: meshwright plan MODEL --profile {out} ...", err=True)


def _profiled_cluster(planned: ClusterSpec, profile: ProfileOptions) -> ClusterSpec:
    """Return the plan's cluster with the devices of a profile, or with its own profile."""
    from ..profilers.profiled_cluster import with_measured_devices

    if profile.profile is None:
        if planned.profile is None:
            raise ConfigError(
                "the plan was made from data sheets", help="add --profile FILE, from `meshwright profile`"
            )
        return planned
    measured = read_profiled_cluster(profile.profile, allow_foreign=profile.allow_foreign_profile)
    return measured if measured.num_devices == planned.num_devices else with_measured_devices(planned, measured)
