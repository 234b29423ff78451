"""Show a plan for generation as a table."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ...schema.units import format_bytes, format_seconds
from ..terminal import add_notes, add_search, bar, figures_table, model_title

if TYPE_CHECKING:
    from rich.table import Table

    from ...schema.generation import GenerationPlan, PhaseEstimate

CACHE_TITLES = {
    "device": "on the device",
    "host_attended": "on the host, which attends",
    "host_copied": "on the host, copied up in each pass",
    "storage_attended": "on storage, the host attends",
    "storage_copied": "on storage, copied up in each pass",
}
STATE_TITLES = {"device": "on the device", "host": "on the host", "storage": "on storage"}


def generation_table(plan: GenerationPlan) -> Table:
    """Show batch, times with what binds them, where things lie, memory, and what more of each resource would give."""
    table = figures_table(f"{model_title(plan.model, plan.cluster)}: generation")
    _add_batch(table, plan)
    _add_times(table, plan)
    _add_positions(table, plan)
    _add_budgets(table, plan)
    _add_marginal_values(table, plan)
    _add_batches_searched(table, plan)
    return table


def _add_batch(table: Table, plan: GenerationPlan) -> None:
    generation = plan.generation
    table.add_row(
        "[bold]batch",
        f"[bold]{plan.batch_size}",
        generation.precision,
        f"{plan.num_device_batches} batches of {plan.device_batch_size} sequences a block, "
        f"{generation.prompt_len} + {generation.generate_len} tokens each",
    )
    if plan.cluster.num_devices > 1:
        table.add_row("  replicas", str(plan.replicas), f"tp {plan.tp}", "each with blocks of its own")


def _add_times(table: Table, plan: GenerationPlan) -> None:
    estimate = plan.estimate
    table.add_section()
    table.add_row(
        "[bold]throughput", f"[bold]{estimate.tokens_per_s:,.4g} tok/s", "", "generated, over prefill and decoding"
    )
    table.add_row("[bold]latency", format_seconds(estimate.latency_s), "", "from the prompts to the last token of all")
    for phase in estimate.phases:
        passes = f"{phase.passes} x {format_seconds(phase.seconds_per_pass)}"
        table.add_row(f"  {phase.name}", format_seconds(phase.passes * phase.seconds_per_pass), passes, _busy(phase))


def _busy(phase: PhaseEstimate) -> str:
    """Say what binds, and how busy the others are."""
    shares = {name: seconds / phase.seconds_per_pass for name, seconds in phase.busy_s.items()}
    others = sorted((name for name in shares if name != phase.binds), key=lambda name: -shares[name])
    rest = [f"{name} {100 * shares[name]:.0f} %" for name in others if shares[name] >= 0.005][:3]
    return f"[bold]{phase.binds}[/] binds" + (f"; {', '.join(rest)}" if rest else "")


def _add_positions(table: Table, plan: GenerationPlan) -> None:
    table.add_section()
    layers = plan.model.num_layers
    away = Counter(host=len(plan.host_layers), storage=len(plan.storage_layers))
    table.add_row("[bold]weights", f"{layers - away.total()} layers", "", "on the device")
    for place in ("host", "storage"):
        if away[place]:
            table.add_row("", f"{away[place]} layers", "", f"on {'the ' * (place == 'host')}{place}, up in each pass")
    for title, shares, titles in (
        ("keys and values", plan.cache, CACHE_TITLES),
        ("hidden states", plan.states, STATE_TITLES),
    ):
        for name, where in titles.items():
            share = getattr(shares, name)
            if share >= 5e-4:
                table.add_row(f"[bold]{title}" if title else "", f"{100 * share:.1f} %", "", where)
                title = ""


def _add_budgets(table: Table, plan: GenerationPlan) -> None:
    e = plan.estimate
    table.add_section()
    for title, used, budget in (
        ("memory per device", e.device_bytes, e.device_budget_bytes),
        ("host memory per node", e.host_bytes, e.host_budget_bytes),
        ("storage per node", e.storage_bytes, e.storage_budget_bytes),
    ):
        if budget:
            share = used / budget
            table.add_row(
                f"[bold]{title}", format_bytes(used), f"{100 * share:.0f} %", f"{bar(share)} of {format_bytes(budget)}"
            )
        elif used:
            table.add_row(f"[bold]{title}", format_bytes(used), "", "no limit known")


def _add_marginal_values(table: Table, plan: GenerationPlan) -> None:
    values, best = plan.worth, plan.estimate.tokens_per_s
    rows = {
        "1 GiB more of each device": values.device_per_gib,
        "1 GiB more of the host": values.host_per_gib,
        "1 GiB more storage": values.storage_per_gib,
        "1 GB/s more of the link": values.link_per_gb_per_s,
        "1 GB/s more storage": values.storage_per_gb_per_s,
        "1 GB/s more attention there": values.host_attention_per_gb_per_s,
    }
    shown = {name: value for name, value in rows.items() if value > 1e-4 * best}
    if not shown:
        return
    table.add_section()
    for name, value in shown.items():
        table.add_row(f"  {name}", f"+{value:,.3g} tok/s", f"{100 * value / best:.2g} %", "at the margin, same batch")


def _add_batches_searched(table: Table, plan: GenerationPlan) -> None:
    if (search := plan.search) is not None:
        rounding = f"; with layers in parts this batch would be {100 * plan.estimate.gap:.2g} % quicker"
        add_search(table, search, f"{search.bounded} batches bounded, {search.evaluated} solved", rounding)
    if plan.alternatives:
        table.add_section()
        table.add_row("[bold]runner-ups", "tok/s", "latency", "")
        for other in plan.alternatives:
            batch = f"{other.num_device_batches} x {other.device_batch_size} sequences, tp {other.tp}"
            table.add_row("", f"{other.tokens_per_s:,.4g}", format_seconds(other.latency_s), batch)
    add_notes(table, plan)
