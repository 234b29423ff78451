"""An explanation as tables: what binds, head-room of the stages, what more is worth, and other layouts line by line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ...schema.units import format_bytes, format_count, format_seconds
from . import bar, cluster_title
from .plan import MAX_STAGE_ROWS, TIME_TITLES, add_offload

if TYPE_CHECKING:
    from ...planner.explain.explanation import Comparison, Explanation, StageHeadroom, WhyNot
    from ...schema import Layout, Plan

HOST_TITLES = {
    "host_bytes": "host memory of a node",
    "storage_bytes": "storage of a node",
    "to_host_bytes": "to the host, a step and rank",
    "to_device_bytes": "to the device",
}

SAME = 1e-6
"""Of a part: sums in another order differ by less."""

MAX_COLUMNS = 4
"""Runner-ups side by side."""


def explanation_tables(plan: Plan, found: Explanation) -> Iterator[RenderableType]:
    """What to print: the asked comparison, or everything else."""
    if found.why_not is not None:
        yield from _why_not(found, found.why_not)
        return
    yield _summary(plan, found)
    if found.policies:
        policies = [(policy.name, policy) for policy in found.policies]
        title = "the same layout under uniform policies: difference to the plan"
        yield side_by_side(title, found.layout, found.step_time_s, policies)
        yield Text("\n".join(f"  {policy.name}: {policy.reason}" for policy in found.policies))
    others = [other for other in found.runner_ups if other.fits] + [o for o in found.runner_ups if not o.fits]
    if others:
        titles = [f"runner-up {i + 1}" for i in range(len(others))]
        shown = list(zip(titles, others[:MAX_COLUMNS], strict=False))
        yield side_by_side("runner-ups: difference to the plan", found.layout, found.step_time_s, shown)
        yield Text("\n".join(f"  {name}: {other.reason}" for name, other in shown))


def _table(title: str, columns: int) -> Table:
    table = Table(
        title=Text(title, style="bold"), title_justify="left", show_header=False, box=box.SIMPLE, pad_edge=False
    )
    table.add_column(min_width=26, overflow="fold")
    for _ in range(columns):
        table.add_column(justify="right", no_wrap=True)
    return table


def _summary(plan: Plan, found: Explanation) -> Table:
    title = f"{plan.model.name} ({format_count(plan.model.num_params)}) on {cluster_title(plan.cluster)}"
    table = _table(title, 2)
    table.add_column(overflow="fold")
    table.add_row("[bold]plan", format_seconds(found.step_time_s), "", f"[bold]{found.layout}")
    table.add_section()
    table.add_row("[bold]what binds", "costs or saves", "of the step", "")
    for binding in found.binds:
        if binding.seconds is None:
            table.add_row(f"  {binding.resource}", "?", "", escape(binding.text))
            continue
        share = binding.seconds / found.step_time_s
        where = f"{bar(share)} {escape(binding.text)}"
        table.add_row(f"  {binding.resource}", format_seconds(binding.seconds), f"{100 * share:.1f} %", where)
    _add_stages(table, found.stages, found.budget_bytes)
    if plan.offload is not None:
        add_offload(table, plan.stages[0], plan.offload)
    table.add_section()
    table.add_row("[bold]step time saved by", "this layout", "the best layout", "which is then")
    for gain in found.worth:
        best = "" if gain.best_s is None else _saved(gain.best_s, found.step_time_s)
        then = "" if gain.best is None else str(gain.best)
        table.add_row(f"  {gain.change}", _saved(gain.kept_s, found.step_time_s), best, then)
    for note in found.notes:
        table.add_section()
        table.add_row("[bold]note", "", "", escape(note))
    return table


def _add_stages(table: Table, stages: Sequence[StageHeadroom], budget_bytes: int) -> None:
    """The stages with the least head-room, in the order of the pipeline."""
    table.add_section()
    table.add_row("[bold]memory of stages", "required", "free", f"of {format_bytes(budget_bytes)}")
    tightest = sorted(stages, key=lambda stage: stage.free_bytes)[:MAX_STAGE_ROWS]
    for stage in sorted(tightest, key=lambda stage: stage.stage_idx):
        table.add_row(
            f"  stage {stage.stage_idx}",
            format_bytes(stage.required_bytes),
            format_bytes(stage.free_bytes),
            f"most: {stage.largest} {format_bytes(stage.largest_bytes)}; {format_seconds(stage.busy_s)} a micro-batch"
            + (f" on {stage.device}" if stage.device else ""),
        )
    if len(tightest) < len(stages):
        table.add_row("  ...", "", "", f"{len(stages) - len(tightest)} more with more head-room")


def _why_not(found: Explanation, answer: WhyNot) -> Iterator[RenderableType]:
    asked = answer.asked + (f" (and {answer.kept}, as the plan had to)" if answer.kept else "")
    verdict = {
        "same": "the plan has it",
        "slower": "it is slower",
        "faster": "it is faster",
        "too_large": "nothing with it fits",
        "excluded": "nothing with it can be executed",
        "stopped": "not answered in time",
    }[answer.status]
    yield Text(f"why not {asked}: {verdict}", style="bold")
    yield Text("\n".join(f"  {reason}" for reason in answer.reasons))
    if answer.best is not None:
        yield side_by_side("line by line", found.layout, found.step_time_s, [("with it", answer.best)])


def side_by_side(title: str, layout: Layout, step_time_s: float, named: Sequence[tuple[str, Comparison]]) -> Table:
    """The plan's layout and others, one row a part, one column a layout: its figure less the plan's."""
    others = [other for _, other in named]
    table = _table(title, 1 + len(others))
    table.add_row("", "[bold]plan", *(f"[bold]{name}" for name, _ in named))
    names = [name for name in type(layout).model_fields if any(name == n for o in others for n, _, _ in o.fields)]
    for name in names:
        theirs = ({n: value for n, _, value in other.fields}.get(name, "") for other in others)
        table.add_row(f"  {name}", escape(str(getattr(layout, name))), *(escape(value) for value in theirs))
    table.add_section()
    table.add_row(
        "[bold]step time",
        format_seconds(step_time_s),
        *(_slower(o) for o in others),
    )
    _add_parts(table, [o.time_s for o in others], TIME_TITLES, format_seconds)
    table.add_section()
    table.add_row("[bold]memory", "", *("fits" if o.fits else "[red]does not fit" for o in others))
    _add_parts(table, [o.memory_bytes for o in others], {}, format_bytes)
    if any(other.host_bytes for other in others):
        table.add_section()
        table.add_row("[bold]offload")
        _add_parts(table, [o.host_bytes for o in others], HOST_TITLES, format_bytes)
    return table


def _slower(other: Comparison) -> str:
    return f"{100 * other.slower_fraction:+.1f} %" if other.slower_fraction else "="


def _add_parts(
    table: Table,
    parts: Sequence[dict[str, tuple[float, float, float]]] | Sequence[dict[str, tuple[int, int, int]]],
    titles: dict[str, str],
    shown: Callable[[float], str],
) -> None:
    for name in dict.fromkeys(name for lines in parts for name in lines):
        mine = next(lines[name][0] for lines in parts if name in lines)
        differences = (_signed(lines[name], shown) if name in lines else "" for lines in parts)
        table.add_row(f"  {titles.get(name, name)}", shown(mine) if mine else "0", *differences)


def _signed(line: tuple[float, float, float], shown: Callable[[float], str]) -> str:
    mine, other, value = line
    return "=" if abs(value) <= SAME * max(mine, other) else ("+" if value > 0 else "-") + shown(abs(value))


def _saved(seconds: float, of_s: float) -> str:
    return "nothing" if seconds == 0 else f"{format_seconds(seconds)}  {100 * seconds / of_s:5.2f} %"
