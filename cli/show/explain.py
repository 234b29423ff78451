"""Show an explanation: what binds, headroom of the stages, what more of a resource saves, and other layouts line by line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType

from ...schema.units import counted, format_bytes, format_percent, format_seconds
from ..markup import plain
from ..terminal import Table, figures_table, model_title
from .plan import MAX_STAGE_ROWS, TIME_TITLES, add_headline, add_offload

if TYPE_CHECKING:
    from ...planner.explain.report import Explanation, Part, StageHeadroom
    from ...planner.explain.why_not import Comparison, WhyNot
    from ...schema import Layout, TrainingPlan

HOST_TITLES = {
    "host_bytes": "host memory of a node",
    "storage_bytes": "storage of a node",
    "to_host_bytes": "to the host, per rank and step",
    "to_device_bytes": "back to the device",
}

SAME = 1e-6
"""Of a term: sums in another order differ by less."""

MAX_COLUMNS = 4
"""Runner-ups side by side."""


def part_tables(plan: TrainingPlan, part: Part) -> Iterator[RenderableType]:
    """Yield what to print of a part: the comparison that was asked for, or what it adds to everything before it."""
    explanation = part.explanation
    match part.name:
        case "why_not":
            assert explanation.why_not is not None
            yield from _why_not(explanation, explanation.why_not)
        case "binds":
            if explanation.regions:
                yield _regions(plan, explanation)
            yield _binds(plan, explanation)
        case "runner_ups":
            yield from _others(explanation)
        case "worth":
            yield _values(explanation)


def _others(explanation: Explanation) -> Iterator[RenderableType]:
    layout, step_time_s = explanation.layout, explanation.step_time_s
    if explanation.policies:
        policies = [(policy.name, policy) for policy in explanation.policies]
        title = "the same layout under uniform policies: difference to the plan"
        yield side_by_side(title, layout, step_time_s, policies)
        yield _reasons(policies)
    others = sorted(explanation.runner_ups, key=lambda other: not other.fits)[:MAX_COLUMNS]
    if others:
        named = [(f"runner-up {idx}", other) for idx, other in enumerate(others, 1)]
        yield side_by_side("runner-ups: difference to the plan", layout, step_time_s, named)
        yield _reasons(named)


def _binds(plan: TrainingPlan, explanation: Explanation) -> Table:
    step_time_s = explanation.step_time_s
    table = figures_table(model_title(plan.model, plan.cluster))
    add_headline(table, plan.estimate)
    table.add_row("[bold]layout", "", "", f"[bold]{plain(str(explanation.layout))}")
    table.add_section()
    table.add_row("[bold]what binds", "time", "share", "of a step: spent, or to be saved without the limit")
    for binding in explanation.binds:
        if binding.seconds is None:
            table.add_row(f"  {binding.resource}", "", "", plain(binding.text))
            continue
        share = binding.seconds / step_time_s
        figures = format_seconds(binding.seconds), format_percent(share)
        table.add_row(f"  {binding.resource}", *figures, plain(binding.text), share=share)
    _add_headroom(table, explanation.stages, explanation.budget_bytes)
    if plan.offload is not None:
        add_offload(table, plan.stages[0], plan.offload)
    return table


def _regions(plan: TrainingPlan, explanation: Explanation) -> Table:
    planned_s = plan.estimate.step_time_s
    table = figures_table("between regions")
    table.add_row("[bold]a step takes", format_seconds(planned_s), "", "as planned, sums between regions included")
    for value in explanation.regions:
        if value.step_time_s is None:
            table.add_row(f"  {value.change}", "", "", plain(value.note))
            continue
        change = value.step_time_s / planned_s - 1
        table.add_row(f"  {value.change}", format_seconds(value.step_time_s), f"{100 * change:+.1f} %", "")
    return table


def _values(explanation: Explanation) -> Table:
    step_time_s = explanation.step_time_s
    table = figures_table("")
    table.add_row("[bold]what more would save", "time", "share", "with this layout; then with the best one")
    for value in explanation.worth:
        best = ""
        if value.best_s is not None:
            best = f"with the best layout {_saved(value.best_s, step_time_s)}"
            best += f": {plain(str(value.best))}" if value.best else ""
        saved = value.kept_s > 0
        figures = (
            (format_seconds(value.kept_s), format_percent(value.kept_s / step_time_s)) if saved else ("nothing", "")
        )
        table.add_row(f"  {value.change}", *figures, best)
    table.add_section()
    for note in explanation.notes:
        table.add_row("[bold]note", "", "", plain(note))
    return table


def _add_headroom(table: Table, stages: Sequence[StageHeadroom], budget_bytes: int) -> None:
    """Add the stages with the least headroom, in the order of the pipeline."""
    table.add_section()
    table.add_row("[bold]memory of stages", "needed", "free", f"of {format_bytes(budget_bytes)} on each device")
    tightest = sorted(stages, key=lambda stage: stage.free_bytes)[:MAX_STAGE_ROWS]
    for stage in sorted(tightest, key=lambda stage: stage.stage_idx):
        table.add_row(
            f"  stage {stage.stage_idx}",
            format_bytes(stage.required_bytes),
            format_bytes(stage.free_bytes),
            f"largest: {stage.largest} {format_bytes(stage.largest_bytes)}; busy for {format_seconds(stage.busy_s)} a micro-batch"
            + (f" on {stage.device}" if stage.device else ""),
        )
    if len(tightest) < len(stages):
        table.add_row("  ...", "", "", f"{counted(len(stages) - len(tightest), 'more stage')} with more headroom")


_VERDICTS = {
    "same": "the plan has it",
    "slower": "it is slower",
    "faster": "it is faster",
    "too_large": "nothing with it fits",
    "excluded": "nothing with it can be executed",
    "stopped": "not answered in time",
}


def _why_not(explanation: Explanation, answer: WhyNot) -> Iterator[RenderableType]:
    fields = answer.asked + (f" (and {answer.kept}, as the plan had to)" if answer.kept else "")
    table = figures_table(f"why not {fields}: {_VERDICTS[answer.status]}", 0)
    for reason in answer.reasons:
        table.add_row("", plain(reason))
    yield table
    if answer.best is not None:
        yield side_by_side("line by line", explanation.layout, explanation.step_time_s, [("with it", answer.best)])


def _reasons(named: Sequence[tuple[str, Comparison]]) -> Table:
    table = figures_table("", 0)
    for name, other in named:
        table.add_row(f"[bold]{name}", plain(other.reason))
    return table


def side_by_side(title: str, layout: Layout, step_time_s: float, named: Sequence[tuple[str, Comparison]]) -> Table:
    """Show the plan's layout and others: a row for each term, a column for each layout with its figure less the plan's."""
    others = [other for _, other in named]
    table = Table(title, ("", "plan", *(name for name, _ in named)), words=False, num_keys=2)
    values = [{name: value for name, _, value in other.fields} for other in others]
    for name in type(layout).model_fields:
        if any(name in fields for fields in values):
            theirs = (plain(fields.get(name, "")) for fields in values)
            table.add_row(f"  {name}", plain(str(getattr(layout, name))), *theirs)
    table.add_section()
    slower = (format_percent(o.slower_fraction, sign=True) if o.slower_fraction else "=" for o in others)
    table.add_row("[bold]step time", format_seconds(step_time_s), *slower)
    _add_terms(table, [other.time_s for other in others], TIME_TITLES, format_seconds)
    table.add_section()
    table.add_row("[bold]memory", "", *("fits" if other.fits else "[red]does not fit" for other in others))
    _add_terms(table, [other.memory_bytes for other in others], {}, format_bytes)
    if any(other.host_bytes for other in others):
        table.add_section()
        table.add_row("[bold]offload")
        _add_terms(table, [other.host_bytes for other in others], HOST_TITLES, format_bytes)
    return table


Terms = Mapping[str, tuple[float, float, float]] | Mapping[str, tuple[int, int, int]]
"""Name -> (the plan's, the other's, difference)."""


def _add_terms(table: Table, terms: Sequence[Terms], titles: Mapping[str, str], show: Callable[[float], str]) -> None:
    for name in dict.fromkeys(name for lines in terms for name in lines):
        planned = next(lines[name][0] for lines in terms if name in lines)
        differences = (_signed(lines[name], show) if name in lines else "" for lines in terms)
        table.add_row(f"  {titles.get(name, name)}", show(planned) if planned else "0", *differences)


def _signed(line: tuple[float, float, float], show: Callable[[float], str]) -> str:
    planned, other, difference = line
    if abs(difference) <= SAME * max(planned, other):
        return "="
    return ("+" if difference > 0 else "-") + show(abs(difference))


def _saved(seconds: float, of_s: float) -> str:
    return "nothing" if seconds == 0 else f"{format_seconds(seconds)} ({format_percent(seconds / of_s)})"
