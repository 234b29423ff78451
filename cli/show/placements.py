"""Show the placements of a user's module: operators with the forms of their values, what conversions cost, what stays whole."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType

from ...schema import TrainingPlan
from ...schema.errors import ConfigError
from ...schema.placements import UnitPlacement
from ...schema.traced import CodeFacts
from ...schema.units import counted, format_percent, format_seconds
from ..markup import plain
from ..terminal import Table

MAX_CONVERSIONS = 12
"""Rows of a unit; the longest come first."""


def placement_tables(plan: TrainingPlan) -> Iterator[RenderableType]:
    """Yield the tables of a plan's degree of tensor parallelism; of the smallest placed one where the plan has none.

    Raises:
        ConfigError: nothing is placed.
    """
    code = plan.model.code
    if code is None or not code.placements:
        raise ConfigError(
            f"{plan.model.name} has no placements",
            help="they are made of code that does not say how it is split: meshwright plan module:Model --sample-batch ...",
        )
    degree = plan.layout.tp if plan.layout.tp in code.placed_degrees else code.placed_degrees[0]
    for placement in code.placements:
        if placement.num_ranks == degree:
            yield from _of_unit(placement)
    yield _unplaced(code, degree)


def _of_unit(placement: UnitPlacement) -> Iterator[RenderableType]:
    first, count = placement.paths[0], len(placement.paths)
    gap = 1 - placement.bound_s / placement.objective_s if placement.objective_s else 0.0
    title = (
        f"{first}{f' and {count - 1} more' if count > 1 else ''}"
        f"{', in evaluation' if placement.in_evaluation else ''}, tp {placement.num_ranks}: "
        f"{format_percent(placement.local_params / max(placement.num_params, 1))} of the parameters on a rank, "
        f"gap {format_percent(gap)}"
    )
    table = Table(title, ("operator", "reads", "makes"), text_columns=(0, 1, 2))
    for path, form in placement.parameters:
        table.add_row(plain(path), "", form)
    table.add_section()
    for line, signature in zip(placement.described, placement.signatures, strict=True):
        name, target, *_ = line.split(" ")
        ins, _, outs = signature.partition(";")[0].partition(">")
        table.add_row(f"{plain(name)} [dim]{plain(target)}", ins.replace(",", " "), outs.replace(",", " "))
    yield table
    moved = Table("conversions, forward and backward", ("value", "from", "to", "time"), text_columns=(0, 1, 2))
    for name, source, target, seconds in placement.conversions[:MAX_CONVERSIONS]:
        moved.add_row(plain(name), source, target, format_seconds(seconds))
    if placement.conversions:
        yield moved


def _unplaced(code: CodeFacts, degree: int) -> Table:
    table = Table(
        f"whole on every rank of tp {degree}: {counted(len(code.unplaced), 'unit')}", ("unit", "why"), words=True
    )
    for unit in code.unplaced:
        table.add_row(plain(unit.path), plain(unit.why))
    return table
