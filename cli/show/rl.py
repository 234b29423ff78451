"""Show a post-training plan: its step, its pools and copies, the calls of a step as bars, runner-ups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...schema.units import counted, format_bytes, format_percent, format_seconds
from ..markup import plain
from ..terminal import Table, add_notes, add_search, figures_table, headed_table, model_title

if TYPE_CHECKING:
    from ...schema.rl_plan import RlPlan

BAR = 40
"""Characters of the bars of a step."""


def rl_tables(plan: RlPlan) -> Iterator[Table]:
    """Yield the step, its calls in time, and the runner-ups."""
    yield _step(plan)
    yield _timeline(plan)
    if plan.alternatives:
        yield _alternatives(plan)


def _step(plan: RlPlan) -> Table:
    cost, work = plan.estimate, plan.post_training
    table = figures_table(f"{model_title(plan.model, plan.cluster)}: {work.algorithm}")
    words = f"{work.samples:,} responses, {counted(work.updates, 'update')}; {cost.samples_per_s:.4g} responses/s"
    table.add_row("[bold]step", f"[bold]{format_seconds(cost.step_time_s)}", "", words)
    if cost.in_flight > 1:
        table.add_row(
            "  one sample", format_seconds(cost.path_s), "", f"{cost.in_flight:.3g} steps are under way at once"
        )
    table.add_row("  tokens/s per device", f"{cost.tokens_per_s_per_device:,.0f}", "", "prompts and responses")
    for idx, (pool, busy_s) in enumerate(zip(plan.pools, cost.busy_s, strict=True)):
        table.add_section()
        share = format_percent(min(busy_s / cost.step_time_s, 1.0), 0)
        last = pool.first_device + pool.num_devices - 1
        table.add_row(
            f"[bold]pool {idx + 1}", f"[bold]{pool.num_devices}", share, f"busy; devices {pool.first_device} to {last}"
        )
        for copy in (copy for copy in plan.copies if copy.pool == idx):
            where = "on the hosts between its calls, " if copy.is_offloaded else ""
            of_states = f"{where}{format_bytes(copy.state_bytes)} of states a device" if copy.state_bytes else "weights"
            words = f"[bold]{plain(copy.layout)}[/]; {of_states}, {format_bytes(copy.live_bytes)} in a call"
            table.add_row(f"  {copy.role}", "", "", words)
    table.add_section()
    table.add_row("[bold]why", "", "", plain(plan.reason))
    if plan.search is not None:
        effort = f"{plan.search.evaluated} pairs of a model and a size costed, {plan.search.pruned} excluded"
        add_search(table, plan.search, effort)
    add_notes(table, plan)
    return table


def _timeline(plan: RlPlan) -> Table:
    table = headed_table("one step that waits for itself", "call", "pool", "begins", "takes", "", text=("call", ""))
    total = plan.waiting_s
    rows = [(call.start_s, call.name.replace("_", " "), call.pool, call.seconds) for call in plan.calls]
    rows += [(move.start_s, move.what, move.pool, move.seconds) for move in plan.moves if move.seconds > 0.001 * total]
    for start_s, name, pool, seconds in sorted(rows, key=lambda row: (row[0], row[2])):
        first = round(BAR * start_s / total)
        bar = " " * first + "█" * max(round(BAR * (start_s + seconds) / total) - first, 1)
        table.add_row(name, str(pool + 1), format_seconds(start_s), format_seconds(seconds), bar)
    return table


def _alternatives(plan: RlPlan) -> Table:
    table = headed_table("runner-ups", "pools", "step", "why not", text=("pools", "why not"))
    for other in plan.alternatives:
        table.add_row(plain(other.title), format_seconds(other.step_time_s), plain(other.reason))
    return table
