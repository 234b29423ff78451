"""Show a job beside the best plan: what was read, what both cost, and which settings to change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import RenderableType

from ...schema.units import counted, format_bytes, format_percent, format_seconds
from ..markup import plain
from ..terminal import Table, figures_table, headed_table, model_title
from .plan import TIME_TITLES

if TYPE_CHECKING:
    from ...engines.launch.compared import Difference, JobComparison
    from ...engines.launch.flags import Change
    from ...engines.launch.job import Job
    from ...schema import ClusterSpec

MAX_VALUE = 60
"""Characters of a value."""

MAX_NAMES = 12
"""Settings that say nothing about cost and are named on the screen; --json has all."""


def job_tables(answer: JobComparison, cluster: ClusterSpec) -> Iterator[RenderableType]:
    """Yield what to print: what the file says, both steps beside each other, and the changes."""
    yield understood(answer.job, cluster)
    yield _both_steps(answer)
    yield _changes(answer)


def understood(job: Job, cluster: ClusterSpec) -> Table:
    """Return what was read, with the place of each setting, and what was not."""
    title = f"{job.source} as it is read: {model_title(job.model, cluster)}"
    table = headed_table(title, "setting", "value", "where", text=("setting", "value", "where"))
    for fact in job.facts:
        where = fact.place + (f" ({fact.variable})" if fact.variable else "")
        table.add_row(plain(fact.setting), plain(fact.value) or "on", plain(where))
    for title, lines in (
        ("assumed", job.assumed),
        ("not modelled", job.unmodelled),
        ("not followed", job.undecided),
        ("not known", [", ".join(job.unknown)] if job.unknown else []),
        ("no cost", [_named(job.ignored)] if job.ignored else []),
    ):
        table.add_section()
        for line in lines:
            table.add_row(f"[bold]{title}", "", plain(line))
    return table


def _named(names: tuple[str, ...]) -> str:
    listed = ", ".join(names[:MAX_NAMES])
    return listed + (f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else "")


def _both_steps(answer: JobComparison) -> Table:
    job, plan, work = answer.job, answer.plan, answer.job.workload
    table = figures_table("", 2)
    table.add_row("", "[bold]your job", "[bold]best plan", f"for {work.engine}'s kernels and buffers")
    estimates = (answer.estimate, plan.estimate)
    table.add_row(
        "[bold]step time",
        *(f"[bold]{format_seconds(each.step_time_s)}" for each in estimates),
        _verdict(answer.difference),
    )
    intervals = (each.step_time_interval_s for each in estimates)
    ends = [f"{format_seconds(each.low)} to {format_seconds(each.high)}" for each in intervals]
    table.add_row("  90 % interval", "", "", f"{ends[0]}; the plan {ends[1]}")
    table.add_row("  tokens/s per device", *(f"{each.tokens_per_s_per_device:,.0f}" for each in estimates))
    table.add_row("  MFU", *(format_percent(each.mfu) for each in estimates))
    for name, title in TIME_TITLES.items():
        values = [getattr(each.breakdown_s, name) for each in estimates]
        if any(values):
            table.add_row(f"  {title}", *(format_seconds(value) if value else "0" for value in values))
    table.add_section()
    fits = ["[green]fits" if each.fits else "[red]does not fit" for each in estimates]
    table.add_row("[bold]memory per device", *fits, f"of {format_bytes(plan.estimate.budget_bytes)}")
    table.add_row("  needed, with margin", *(format_bytes(each.required_bytes) for each in estimates))
    for name in type(plan.estimate.memory_bytes).model_fields:
        values = [getattr(each.memory_bytes, name) for each in estimates]
        if any(values):
            table.add_row(f"  {name}", *(format_bytes(value) if value else "0" for value in values))
    table.add_section()
    table.add_row("[bold]layout", "", "", "")
    table.add_row("  your job", "", "", plain(str(job.layout)))
    table.add_row("  best plan", "", "", plain(str(plan.layout)))
    if plan.search is not None:
        table.add_row("  proved", "", "", f"{plan.search.verdict}, of what {work.engine} runs")
    return table


def _verdict(difference: Difference) -> str:
    if difference.lost_fraction <= 0:
        return "no plan that was found is faster"
    low, high = (1 - 1 / end for end in (difference.ratio_interval.low, difference.ratio_interval.high))
    between = f"90 % interval {format_percent(low)} to {format_percent(high)}"
    return f"you lose {format_percent(difference.lost_fraction)} here ({between})"


def _changes(answer: JobComparison) -> Table:
    if not answer.steps:
        return figures_table("nothing to change: the job is as fast as the best plan", 0)
    count = len(answer.steps)
    saved = 1 - answer.steps[-1].estimate.step_time_s / answer.estimate.step_time_s
    if answer.estimate.fits:
        of_all = min(saved / answer.difference.lost_fraction, 1.0) if answer.difference.lost_fraction > 0 else 1.0
        part = f"{format_percent(of_all, 0)} of what the plan saves"
        title = f"change {counted(count, 'thing')}: {format_percent(saved)} less time, {part}"
    else:
        title = f"change {counted(count, 'thing')} so that it fits"
    table = figures_table(title, 1)
    if answer.job.engine != answer.job.workload.engine == "deepspeed":
        table.add_row(
            "[bold]note",
            "",
            "spelled as Megatron-LM does; Megatron-DeepSpeed has older names for some of these options",
        )
    for idx, step in enumerate(answer.steps, 1):
        gain = "" if step.difference.lost_fraction <= 0 else f"saves {format_percent(step.difference.lost_fraction)}"
        fits = "" if step.estimate.fits else ", does not fit yet"
        table.add_row(f"[bold]{idx}.", format_seconds(step.estimate.step_time_s), f"{gain}{fits}")
        for change in step.changes:
            for line in _diff(change):
                table.add_row("", "", line)
        table.add_section()
    return table


def _diff(change: Change) -> Iterator[str]:
    """Yield the lines of a change, as a diff has them."""
    if change.before is None and change.after is None:
        text = change.setting.removeprefix("in the training script: ")
        yield f"{'in your script' if change.place == 'your script' else change.place}: {plain(text)}"
        return
    where = f"   {change.place}" if change.place else ""
    if change.variable and change.after is not None:
        yield f"[red]- {plain(f'{change.variable}={change.before}')}[/]{plain(where)} ({plain(change.setting)})"
        yield f"[green]+ {plain(f'{change.variable}={change.after}')}"
        return
    if change.before is not None and (change.place or change.after is None):  # what the file does not say is a default
        yield f"[red]- {plain(f'{change.setting} {_shown(change.before)}'.rstrip())}[/]{plain(where)}"
    if change.after is not None:
        yield f"[green]+ {plain(f'{change.setting} {_shown(change.after)}'.rstrip())}"


def _shown(value: str) -> str:
    """Return a value, of a long cut into stages their number."""
    if len(value) <= MAX_VALUE or "|" not in value:
        return value
    return f"({value.count('|') + 1} stages: meshwright export writes them)"
