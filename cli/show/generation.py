"""Show a plan for generation as a table."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ...schema.units import counted, format_bytes, format_percent, format_seconds
from ..terminal import Table, add_notes, add_search, figures_table, model_title

if TYPE_CHECKING:
    from ...schema.generation import GenerationPlan, PhaseEstimate

CACHE_TITLES = {
    "device": "on the device",
    "host_attended": "on the host, which attends",
    "host_copied": "on the host, copied up in each pass",
    "storage_attended": "on storage, the host attends",
    "storage_copied": "on storage, copied up in each pass",
    "drive_attended": "on storage, the drives attend",
}
STATE_TITLES = {"device": "on the device", "host": "on the host", "storage": "on storage"}


def generation_table(plan: GenerationPlan) -> Table:
    """Show throughput and memory, batch, times and what binds them, where things lie, and what more of each resource gives."""
    table = figures_table(f"{model_title(plan.model, plan.cluster)}: generation")
    _add_headline(table, plan)
    _add_times(table, plan)
    _add_positions(table, plan)
    _add_budgets(table, plan)
    _add_marginal_values(table, plan)
    _add_batches_searched(table, plan)
    return table


def _add_headline(table: Table, plan: GenerationPlan) -> None:
    """Add what a reader looks for first, and the batch that gives it."""
    estimate, generation = plan.estimate, plan.generation
    rate = "tokens/s generated, over prefill and decoding"
    table.add_row("[bold]throughput", f"[bold]{estimate.tokens_per_s:,.4g}", "", rate)
    used, budget = estimate.device_bytes, estimate.device_budget_bytes
    share = format_percent(used / budget, 0) if budget else ""
    of_budget = f"of {format_bytes(budget)}" if budget else ""
    table.add_row("[bold]memory per device", f"[bold]{format_bytes(used)}", share, of_budget)
    table.add_section()
    batches = f"{counted(plan.num_device_batches, 'batch', 'batches')} of {counted(plan.device_batch_size, 'sequence')}"
    tokens = f"{generation.prompt_len:,} + {generation.generate_len:,} tokens each, in {generation.precision}"
    table.add_row("[bold]batch", "", "", f"{counted(plan.batch_size, 'sequence')}: {batches} a block, {tokens}")
    if plan.cluster.num_devices > 1:
        across = f" across {plan.tp // plan.cluster.largest_node} nodes" if plan.tp > plan.cluster.largest_node else ""
        table.add_row(
            "[bold]replicas", "", "", f"{plan.replicas} with tp {plan.tp}{across}, each with blocks of its own"
        )


def _add_times(table: Table, plan: GenerationPlan) -> None:
    estimate = plan.estimate
    table.add_section()
    latency = "from the prompts to the last token of the last sequence"
    table.add_row("[bold]latency", format_seconds(estimate.latency_s), "", latency)
    for phase in estimate.phases:
        seconds = phase.passes * phase.seconds_per_pass
        passes = f"{counted(phase.passes, 'pass', 'passes')} of {format_seconds(phase.seconds_per_pass)}"
        share = format_percent(seconds / estimate.latency_s) if estimate.latency_s else ""
        table.add_row(f"  {phase.name}", format_seconds(seconds), share, f"{passes}: {_busy(phase)}")


def _busy(phase: PhaseEstimate) -> str:
    """Say what binds, and how busy the others are."""
    shares = {name: seconds / phase.seconds_per_pass for name, seconds in phase.busy_s.items()}
    others = sorted((name for name in shares if name != phase.binds), key=lambda name: -shares[name])
    rest = [f"{name} {format_percent(shares[name], 0)}" for name in others if shares[name] >= 0.005][:3]
    text = f"[bold]{phase.binds}[/] binds" + (f"; busy: {', '.join(rest)}" if rest else "")
    if phase.all_reduce is None:
        return text
    return f"{text}; sums by {phase.all_reduce.algorithm} {format_seconds(phase.all_reduce.seconds_per_pass)}"


def _add_positions(table: Table, plan: GenerationPlan) -> None:
    table.add_section()
    layers = plan.model.num_layers
    arrive = "read" if plan.cluster.weakest_device.backend.is_host else "copied up"
    away = Counter(host=len(plan.host_layers), storage=len(plan.storage_layers))
    table.add_row("[bold]weights", counted(layers - away.total(), "layer"), "", "on the device")
    for place in ("host", "storage"):
        if away[place]:
            where = f"on {'the ' * (place == 'host')}{place}, {arrive} in each pass"
            table.add_row("", counted(away[place], "layer"), "", where)
    for title, shares, titles in (
        ("keys and values", plan.cache, CACHE_TITLES),
        ("hidden states", plan.states, STATE_TITLES),
    ):
        for name, where in titles.items():
            share = getattr(shares, name)
            if share >= 5e-4:
                table.add_row(f"[bold]{title}" if title else "", format_percent(share), "", where)
                title = ""


def _add_budgets(table: Table, plan: GenerationPlan) -> None:
    e = plan.estimate
    table.add_section()
    for title, used, budget in (
        ("device memory", e.device_bytes, e.device_budget_bytes),
        ("host memory of a node", e.host_bytes, e.host_budget_bytes),
        ("storage of a node", e.storage_bytes, e.storage_budget_bytes),
    ):
        if budget:
            share = used / budget
            of_budget = f"of {format_bytes(budget)}"
            table.add_row(f"[bold]{title}", format_bytes(used), format_percent(share, 0), of_budget, share=share)
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
        "1 GB/s more attention in the drives": values.drive_attention_per_gb_per_s,
    }
    shown = {name: value for name, value in rows.items() if value > 1e-4 * best}
    if not shown:
        return
    table.add_section()
    for name, value in shown.items():
        table.add_row(f"  {name}", f"+{value:,.3g}", format_percent(value / best), "tokens/s at the margin, same batch")


def _add_batches_searched(table: Table, plan: GenerationPlan) -> None:
    if (search := plan.search) is not None:
        gap = plan.estimate.gap
        rounding = f"; whole layers cost this batch {format_percent(gap)}" if gap >= 5e-4 else ""
        effort = f"{counted(search.bounded, 'batch', 'batches')} bounded, {search.evaluated:,} solved,"
        add_search(table, search, effort, rounding)
    if plan.alternatives:
        table.add_section()
        table.add_row("[bold]runner-ups", "tokens/s", "latency")
        for idx, other in enumerate(plan.alternatives, 1):
            batch = f"{other.num_device_batches} x {counted(other.device_batch_size, 'sequence')}, tp {other.tp}"
            rate, latency = f"{other.tokens_per_s:,.4g}", format_seconds(other.latency_s)
            table.add_row(f"  runner-up {idx}", rate, latency, batch)
    add_notes(table, plan)
