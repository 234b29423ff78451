"""`meshwright export` and `import`: a plan in the words of another engine, and an engine's configuration as a layout."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..engines import TARGETS
from .inputs import JsonOption, PlanArgument
from .options import command

if TYPE_CHECKING:
    from ..engines import Imported
    from ..schema import Layout


@command()
def export(
    plan: PlanArgument,
    to: Annotated[str, typer.Option(metavar="ENGINE", help=f"{', '.join(TARGETS[:-1])} or {TARGETS[-1]}.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where the files go. Default: a folder named as the engine.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Write a plan as the engine's own configuration, or as the manifest of a job on Kubernetes.

    What the engine cannot run is refused with the reason (exit code 2); what its configuration has no words for is listed.
    """
    from ..engines import export as make_export
    from ..schema import Plan

    exported = make_export(Plan.load(plan), to)
    paths = exported.write(out or Path(to))
    if json:
        typer.echo(exported.model_dump_json(indent=2))
    else:
        for path in paths:
            typer.echo(path)
    for line in exported.not_expressed:
        typer.echo(f"not in the configuration: {line}", err=True)
    for line in exported.to_set:
        typer.echo(f"yours to set: {line}", err=True)
    typer.echo(f"next: cd {out or to} && {exported.command}", err=True)


@command()
def import_configuration(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="torchtitan's .toml or .py, a script with Megatron-LM's options, DeepSpeed's .json, Accelerate's or NeMo's .yaml.",
        ),
    ],
    engine: Annotated[
        str | None, typer.Option("--from", metavar="ENGINE", help="Whose it is, where its content leaves that open.")
    ] = None,
    num_devices: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Ranks of the job, where the file does not say.")
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="MODEL", help="Needed where the file counts layers.")] = None,
    json: JsonOption = False,
) -> None:
    """Read an engine's configuration as a layout, in the form that `--layout` and `--fix` take. Nothing of the file is run."""
    from ..engines import read_configuration
    from ..schema import ModelSpec
    from ..schema.layout import format_assignments

    spec = ModelSpec.resolve(model) if model else None
    imported = read_configuration(file, engine=engine, num_devices=num_devices, model=spec)
    if json:
        typer.echo(imported.model_dump_json(indent=2))
    else:
        typer.echo(format_assignments(_fields_to_type(imported.layout)))
    tell_assumptions(imported)
    typer.echo(
        "next: meshwright estimate MODEL --cluster C --layout ... costs it, meshwright compare sets it next to a plan",
        err=True,
    )


def tell_assumptions(imported: Imported) -> None:
    """Say on stderr what a configuration left open, and which of its settings are not about the layout."""
    for line in imported.assumed:
        typer.echo(f"assumed: {line}", err=True)
    if imported.ignored:
        typer.echo(f"says nothing about the layout: {', '.join(imported.ignored)}", err=True)


def _fields_to_type(layout: Layout) -> dict[str, object]:
    """Return the fields that differ from what a layout of these degrees has by itself."""
    fields = layout.model_dump(exclude_defaults=True)
    return {name: value for name, value in fields.items() if value != 1 or name == "zero_stage"}
