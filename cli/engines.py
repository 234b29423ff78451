"""`meshwright export`, `import` and `compare`: a plan in the words of another engine, and a present configuration as a layout."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from .inputs import JsonOption
from .terminal import exit_on_error

if TYPE_CHECKING:
    from ..engines import Imported
    from ..schema import Estimate, Layout, OffloadSchedule, Plan

ConfigurationArgument = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        help="torchtitan's .toml or .py, a script with Megatron-LM's options, DeepSpeed's .json, Accelerate's or NeMo's .yaml.",
    ),
]
FromOption = Annotated[
    str | None, typer.Option("--from", metavar="ENGINE", help="Whose it is, where its content leaves that open.")
]


def export(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.json that `meshwright plan` wrote.")],
    to: Annotated[
        str, typer.Option(metavar="ENGINE", help="torchtitan, megatron, nemo, deepspeed, accelerate or kubernetes.")
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where the files go. Default: a folder named as the engine.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Write a plan as the engine's own configuration, or as the manifest of a job on Kubernetes.

    What the engine cannot run is refused with the reason (exit code 2); what its configuration has no words for is listed.
    """
    with exit_on_error():
        from ..engines import export as make_export
        from ..schema import Plan

        made = make_export(Plan.load(plan), to)
        paths = made.write(out or Path(to))
        if json:
            typer.echo(made.model_dump_json(indent=2))
        else:
            for path in paths:
                typer.echo(path)
        for line in made.not_expressed:
            typer.echo(f"not in the configuration: {line}", err=True)
        for line in made.to_set:
            typer.echo(f"yours to set: {line}", err=True)
        typer.echo(f"next: cd {out or to} && {made.command}", err=True)


def import_configuration(
    file: ConfigurationArgument,
    engine: FromOption = None,
    num_devices: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Ranks of the job, where the file does not say.")
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="MODEL", help="Needed where the file counts layers.")] = None,
    json: JsonOption = False,
) -> None:
    """Read an engine's configuration as a layout, in the form that `--layout` and `--fix` take. Nothing of the file is run."""
    with exit_on_error():
        from ..engines import read_configuration
        from ..schema import ModelSpec
        from ..schema.layout import format_assignments

        found = read_configuration(
            file, engine=engine, num_devices=num_devices, model=ModelSpec.resolve(model) if model else None
        )
        if json:
            typer.echo(found.model_dump_json(indent=2))
        else:
            typer.echo(format_assignments(_said(found.layout)))
        _tell(found)
        typer.echo(
            "next: meshwright estimate MODEL --cluster C --layout ... costs it, meshwright compare sets it beside a plan",
            err=True,
        )


def compare(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="A configuration as `meshwright import` reads it, or another plan.json."),
    ],
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.json of the same model and cluster.")],
    engine: FromOption = None,
    json: JsonOption = False,
) -> None:
    """Set a present configuration, or another plan, beside a plan: what it costs with the plan's model, cluster and batch."""
    with exit_on_error():
        from ..planner import compare as make_comparison
        from ..schema import Plan
        from .show.explain import side_by_side
        from .show.plan import show

        given = Plan.load(plan)
        present = _planned(file, given) if _is_plan(file) else _configured(file, engine, given)
        comparison = make_comparison(given, present.layout, present.estimate, schedule=present.schedule)
        if json:
            typer.echo(comparison.model_dump_json(indent=2))
        else:
            title, columns = f"{file} beside {plan}", [(present.name, comparison)]
            show(side_by_side(title, given.layout, given.estimate.step_time_s, columns))
        if present.read is not None:
            _tell(present.read)
        for line in present.notes:
            typer.echo(f"note: {line}", err=True)
        typer.echo(_summary(present.estimate.step_time_s / given.estimate.step_time_s), err=True)


def _summary(slower: float) -> str:
    if slower == 1:
        return "both take the same time"
    return (
        f"the plan takes {100 / slower:.1f} % of its time"
        if slower > 1
        else f"it takes {100 * slower:.1f} % of the plan's time"
    )


class _Present(NamedTuple):
    """What stands beside a plan: its name in the table, its layout and costs, in what it differs otherwise, how it was read, and
    its offload schedule.
    """

    name: str
    layout: Layout
    estimate: Estimate
    notes: list[str]
    read: Imported | None = None
    schedule: OffloadSchedule | None = None


def _configured(file: Path, engine: str | None, given: Plan) -> _Present:
    from ..engines import read_configuration
    from ..planner import estimate

    found = read_configuration(file, engine=engine, num_devices=given.cluster.num_devices, model=given.model)
    costs = estimate(given.model, given.cluster, given.workload, found.layout)
    return _Present(found.engine, found.layout, costs, _other_workload(found, given), found)


def _planned(file: Path, given: Plan) -> _Present:
    from ..planner.plan import estimate_with_schedule
    from ..planner.request import OffloadRequest
    from ..schema import Plan

    other = Plan.load(file)
    differing = [name for name in ("model", "cluster", "workload") if getattr(other, name) != getattr(given, name)]
    if not differing:
        return _Present("the other plan", other.layout, other.estimate, [], schedule=other.offload)
    costs, scheduled = estimate_with_schedule(
        given.model, given.cluster, given.workload, other.layout, offload=OffloadRequest.of(other)
    )
    note = f"{file} is for another {' and '.join(differing)}; its layout is costed with the plan's"
    schedule = None if scheduled is None else scheduled.schedule
    return _Present("the other plan", other.layout, costs, [note], schedule=schedule)


def _is_plan(file: Path) -> bool:
    from ..schema.base import read_json

    if file.suffix != ".json":
        return False
    content = read_json(file)
    return isinstance(content, dict) and {"schema_version", "layout"} <= content.keys()


def _said(layout: Layout) -> dict[str, object]:
    """Fields that differ from what a layout of these degrees has by itself."""
    degrees = layout.model_dump(exclude_defaults=True)
    return {name: value for name, value in degrees.items() if value != 1 or name == "zero_stage"}


def _tell(found: Imported) -> None:
    for line in found.assumed:
        typer.echo(f"assumed: {line}", err=True)
    if found.ignored:
        typer.echo(f"says nothing about the layout: {', '.join(found.ignored)}", err=True)


def _other_workload(found: Imported, plan: Plan) -> list[str]:
    """Where the configuration's own workload is another than the plan's."""
    work = plan.workload
    theirs = {"global_batch_size": found.global_batch_size, "seq_len": found.seq_len, "precision": found.precision}
    return [
        f"{name} is {value} in the configuration; both are costed with the plan's {getattr(work, name)}"
        for name, value in theirs.items()
        if value is not None and value != getattr(work, name)
    ]
