"""Show plans, estimates, costs and Pareto fronts as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from ...schema import GenerationPlan, Plan, TrainingPlan
from ...schema.units import format_bytes, format_count, format_seconds
from ..terminal import add_notes, add_search, bar, figures_table, headed_table, model_title
from .generation import generation_table

if TYPE_CHECKING:
    from ...schema import (
        ClusterSpec,
        CostSummary,
        Layout,
        ModelSpec,
        OffloadSchedule,
        ParetoPoint,
        SizeTried,
        Stage,
        TrainingEstimate,
        Workload,
    )

MAX_STAGE_ROWS = 16

TIME_TITLES = {
    "compute": "compute",
    "recompute": "recompute",
    "tp": "tensor parallel, exposed",
    "cp": "context parallel, exposed",
    "ep": "tokens to experts and back",
    "dp": "data parallel, exposed",
    "pp": "stage transfers",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer",
    "offload": "waiting for the host",
}


def plan_tables(plan: Plan) -> Iterator[Table]:
    """Yield the tables of a plan of any task; where a task has none of its own, the figures of its estimate by their units."""
    if isinstance(plan, GenerationPlan):
        yield generation_table(plan)
    elif isinstance(plan, TrainingPlan):
        yield plan_table(plan)
        if plan.cost is not None:
            yield cost_table(plan.cost, plan.workload.tokens_per_step)
        if plan.pareto:
            yield pareto_table(plan.pareto)
    else:
        yield task_table(plan)


def task_table(plan: Plan) -> Table:
    """Show what every plan has: the phases of its task, what was chosen, the figures of its estimate, its search and its notes."""
    table = figures_table(model_title(plan.model, plan.cluster))
    for phase in plan.task.phases:
        table.add_row(f"[bold]{phase.name}", f"{phase.num_passes} x", f"{phase.tokens} tokens", "")
    table.add_section()
    for name in [name for name in type(plan).model_fields if name not in (*Plan.model_fields, plan.task_field)]:
        table.add_row(f"[bold]{name.replace('_', ' ')}", "", "", escape(str(getattr(plan, name))))
    units = {"_s": format_seconds, "_bytes": format_bytes}
    for name, value in plan.estimate:
        unit = next((unit for unit in units if name.endswith(unit) and not name.endswith("_per_s")), "")
        if isinstance(value, int | float):
            table.add_row(
                f"[bold]{name.removesuffix(unit).replace('_', ' ')}", units.get(unit, format_count)(value), "", ""
            )
    if plan.search is not None:
        add_search(table, plan.search, f"{plan.search.evaluated} evaluated, {plan.search.pruned} excluded by bounds")
    add_notes(table, plan)
    return table


def plan_table(plan: TrainingPlan) -> Table:
    """Show everything a reader needs to judge a plan."""
    table = estimate_table(plan.model, plan.cluster, plan.workload, plan.layout, plan.estimate)
    _add_stages(table, plan)
    if plan.offload is not None:
        add_offload(table, plan.stages[0], plan.offload)
    if (search := plan.search) is not None:
        grouped = f" ({search.pruned_in_groups} of them by those of their degrees)" if search.pruned_in_groups else ""
        price = plan.price_of_simplicity
        simpler = f"; simpler for {100 * price:.2g} % of time" if price > 0 else ""
        effort = f"{search.evaluated} layouts evaluated, {search.pruned} excluded by bounds{grouped}"
        add_search(table, search, effort, simpler)
    if plan.alternatives:
        table.add_section()
        table.add_row("[bold]runner-ups", "step time", "memory", "why not")
        for other in plan.alternatives:
            memory = format_bytes(other.peak_reserved_bytes)
            table.add_row(f"  {other.layout}", format_seconds(other.step_time_s), memory, other.reason)
    add_notes(table, plan)
    return table


def estimate_table(
    model: ModelSpec, cluster: ClusterSpec, workload: Workload, layout: Layout, estimate: TrainingEstimate
) -> Table:
    """Show layout, step time and what it consists of, throughput, and memory against the budget."""
    table = figures_table(model_title(model, cluster))
    _add_layout(table, workload, layout)
    _add_time(table, estimate)
    _add_memory(table, cluster, estimate)
    return table


def _add_layout(table: Table, workload: Workload, layout: Layout) -> None:
    microbatches = layout.num_microbatches(workload.global_batch_size)
    table.add_row("[bold]layout", "", "", f"[bold]{layout}")
    table.add_row(
        "  batch",
        f"{workload.global_batch_size} x {workload.seq_len}",
        workload.precision,
        f"{_counted(microbatches, 'micro-batch', 'es')} of {_counted(layout.micro_batch_size, 'sequence')} on "
        + (f"each of {layout.dp} data-parallel ranks" if layout.dp > 1 else "the one data-parallel rank"),
    )


def _counted(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{plural if number != 1 else ''}"


def _add_time(table: Table, estimate: TrainingEstimate) -> None:
    table.add_section()
    interval = estimate.step_time_interval_s
    between = f"between {format_seconds(interval.low)} and {format_seconds(interval.high)}"
    table.add_row("[bold]step time", f"[bold]{format_seconds(estimate.step_time_s)}", "", between)
    for name, title in TIME_TITLES.items():
        seconds = getattr(estimate.breakdown_s, name)
        if seconds > 0:
            share = seconds / estimate.step_time_s
            table.add_row(f"  {title}", format_seconds(seconds), f"{100 * share:.1f} %", bar(share))
    per_device = f"{estimate.tokens_per_s_per_device:,.0f} tokens/s per device"
    table.add_row(
        "[bold]throughput",
        f"{format_count(estimate.tokens_per_s)} tok/s",
        f"MFU {100 * estimate.mfu:.1f} %",
        per_device,
    )


def _add_memory(table: Table, cluster: ClusterSpec, estimate: TrainingEstimate) -> None:
    table.add_section()
    total, reserved = estimate.budget_bytes + cluster.reserved_bytes, cluster.reserved_bytes
    verdict = "[green]fits" if estimate.fits else "[red]does not fit"
    budget = (
        f"{verdict}[/]: needs up to {format_bytes(estimate.required_bytes)} of {format_bytes(estimate.budget_bytes)}"
    )
    table.add_row(
        "[bold]memory per device",
        f"[bold]{format_bytes(estimate.peak_allocated_bytes)}",
        f"{100 * estimate.peak_allocated_bytes / estimate.budget_bytes:.0f} %",
        f"{budget} = {format_bytes(total)} - {format_bytes(reserved)} reserved",
    )
    for name, size in estimate.memory_bytes.model_dump().items():
        if size:
            share = size / estimate.budget_bytes
            table.add_row(f"  {name}", format_bytes(size), f"{100 * share:.1f} %", bar(share))


def add_offload(table: Table, stage: Stage, schedule: OffloadSchedule) -> None:
    """Add what lies where, what moves, and what a little more of each resource would save."""
    table.add_section()
    down, up = format_bytes(schedule.to_host_bytes), format_bytes(schedule.to_device_bytes)
    table.add_row("[bold]offload", format_bytes(schedule.host_bytes), "a node", f"{down} down, {up} up a step and rank")
    for name, title in (("activations", "activations of"), ("boundary", "inputs of recomputed")):
        count = sum(stage.offload_of(idx) == name for idx in stage.layer_idxs)
        if count:
            table.add_row(
                f"  {title}", _counted(count, "block"), "", f"{schedule.prefetch_layers} ahead on the way back"
            )
    for layers, what in (
        (schedule.host_optimizer_layers, "updated by the host"),
        (schedule.streamed_optimizer_layers, "states streamed to the device"),
        (schedule.streamed_parameter_layers, "parameters live on the host"),
        (schedule.storage_optimizer_layers, f"states in {schedule.storage_path}"),
    ):
        if layers:
            table.add_row(f"  {what}", _counted(len(layers), "layer"), "", escape(_ranges(layers)))
    values = schedule.worth
    device_s, link_s = values.device_s_per_gib, values.to_host_s_per_gb_per_s + values.to_device_s_per_gb_per_s
    table.add_row("  1 GiB more of each device", f"-{format_seconds(device_s)}", "", "saved a step, at the margin")
    table.add_row("  1 GB/s more both ways", f"-{format_seconds(link_s)}", "", "")
    bound = f"at least {format_seconds(schedule.bound_s)} with this layout"
    table.add_row("  schedule", format_seconds(schedule.simulated_s), f"gap {100 * schedule.gap:.2g} %", bound)


def _ranges(layers: tuple[int, ...]) -> str:
    """Return layers as ``0-3, 7``."""
    runs: list[list[int]] = []
    for idx in layers:
        if runs and runs[-1][-1] == idx - 1:
            runs[-1].append(idx)
        else:
            runs.append([idx])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _add_stages(table: Table, plan: TrainingPlan) -> None:
    """Add a row a stage; with model chunks the mean time of its rank's stages and the memory of its rank."""
    num_stages, chunks = len(plan.stages), plan.layout.num_model_chunks
    if num_stages == 1:
        return
    table.add_section()
    table.add_row("[bold]stages", "per micro-batch", "memory", "layers")
    half = MAX_STAGE_ROWS // 2
    for s, (stage, rank) in enumerate(zip(plan.stages, plan.rank_of_stage, strict=True)):
        if num_stages > MAX_STAGE_ROWS and half <= s < num_stages - half:
            if s == half:
                table.add_row("  ...", "", "", f"{num_stages - MAX_STAGE_ROWS} more, all in plan.json")
            continue
        costs = plan.estimate.stages[rank]
        table.add_row(
            f"  stage {s}" + (f" on rank {rank}" if chunks > 1 else ""),
            format_seconds((costs.forward_s + costs.backward_s) / chunks),
            format_bytes(costs.memory_bytes.total),
            _stage_layers(stage, plan.model) + (f" on {costs.device}" if costs.device else ""),
        )


def _stage_layers(stage: Stage, model: ModelSpec) -> str:
    layers = list(model.iter_layers())
    idxs = [idx for idx in stage.layer_idxs if layers[idx].kind == "block"]
    names = [f"{len(idxs)} blocks ({idxs[0] - 1}-{idxs[-1] - 1})"]
    if stage.first_layer_idx == 0:
        names.insert(0, "embedding")
    names += [layers[idx].kind for idx in stage.layer_idxs if layers[idx].kind in ("head", "mtp")]
    return ", ".join(names)


_STYLES = {"chosen": "[bold green]", "on the front": "[bold]", "dearer": "", "not examined": "[yellow]"}


def cost_table(cost: CostSummary, tokens_per_step: int) -> Table:
    """Show what is rented, what it costs, and every size that was tried."""
    title = f"cheapest: {cost.num_nodes} nodes of {cost.offer}"
    table = headed_table(title, "", "nodes", "USD/h", "step", "tok/s", "USD/1e9 tok", "")
    for group in _grouped(cost.sizes):
        table.add_row(*_size_row(group, tokens_per_step))
    table.add_section()
    for title, value, note in _money_rows(cost):
        table.add_row(f"[bold]{title}", "", "", "", "", value, note)
    return table


def _money_rows(cost: CostSummary) -> Iterator[tuple[str, str, str]]:
    yield "rent", f"{cost.price_per_hour:,.2f}", "USD/h"
    yield "a step", f"{cost.usd_per_step:,.4g}", "USD"
    yield "1e9 tokens", f"{cost.usd_per_billion_tokens:,.2f}", "USD"
    if cost.total is not None and cost.tokens is not None and cost.hours is not None:
        yield "whole run", f"{cost.total:,.0f}", f"USD for {cost.tokens:.3g} tokens in {cost.hours:,.1f} h"
    note = f"gap {100 * cost.gap:.2g} %, {len(cost.sizes)} sizes in {format_seconds(cost.search_s)}"
    yield "search", cost.status, note


def _grouped(sizes: Sequence[SizeTried]) -> Iterator[list[SizeTried]]:
    """Yield sizes in order; runs of one offer that only the bounds decided, for one reason, together."""
    group: list[SizeTried] = []
    for size in sizes:
        alike = group and (size.offer, size.outcome) == (group[0].offer, group[0].outcome)
        if group and not (alike and size.step_time_s is None and group[0].step_time_s is None):
            yield group
            group = []
        group.append(size)
    if group:
        yield group


def _size_row(group: Sequence[SizeTried], tokens_per_step: int) -> tuple[str, ...]:
    first, last = group[0], group[-1]
    style = _STYLES.get(first.outcome, "[dim]")
    reasons = {size.reason for size in group}
    verdict = f"{style}{first.outcome}{'[/]' if style else ''} {escape(reasons.pop()) if len(reasons) == 1 else ''}"
    if len(group) > 1:
        prices = [size.usd_per_million_tokens for size in group if size.usd_per_million_tokens]
        usd = f">= {1000 * min(prices):,.2f}" if prices else ""
        return escape(first.offer), f"{first.num_nodes}-{last.num_nodes}", "", "", "", usd, verdict
    if first.host_bytes:
        verdict += f" with {format_bytes(first.host_bytes)} of host memory a node"
    known_s, price = first.step_time_s or first.bound_s, first.usd_per_million_tokens
    lower, upper = (">= ", "<= ") if first.is_bound else ("", "")
    return (
        escape(first.offer),
        str(first.num_nodes),
        f"{first.price_per_hour:,.2f}",
        lower + format_seconds(known_s) if known_s else "",
        upper + format_count(tokens_per_step / known_s) if known_s else "",
        lower + f"{1000 * price:,.2f}" if price else "",
        verdict,
    )


def pareto_table(points: Sequence[ParetoPoint]) -> Table:
    """Show layouts that no other beats in both time and memory, fastest first; with the host memory that some offload to."""
    offloads = any(point.host_bytes for point in points)
    columns = ["step", "tok/s", "needs", *(["host"] if offloads else []), "gap", "layout"]
    title = "time against memory: each layout is the fastest that needs no more"
    table = headed_table(title, *columns, text=("layout",))
    for point in points:
        gap = max(0.0, 1 - point.bound_s / point.step_time_s)
        table.add_row(
            format_seconds(point.step_time_s),
            format_count(point.tokens_per_s),
            format_bytes(point.required_bytes),
            *([format_bytes(point.host_bytes) if point.host_bytes else ""] if offloads else []),
            f"{100 * gap:.2g} %" if gap > 1e-9 else "0 %",
            str(point.layout),
        )
    return table
