"""Show plans, estimates, costs and Pareto fronts as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ...cost_models.pipeline.simulation import placement
from ...schema.schedules import SCHEDULES
from ...schema.units import format_bytes, format_count, format_seconds
from . import bar, cluster_title, figures_table

if TYPE_CHECKING:
    from ...schema import (
        ClusterSpec,
        CostSummary,
        Estimate,
        Layout,
        ModelSpec,
        OffloadSchedule,
        ParetoPoint,
        Plan,
        SizeTried,
        Stage,
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


def plan_table(plan: Plan) -> Table:
    """Everything a reader needs to judge a plan."""
    table = estimate_table(plan.model, plan.cluster, plan.workload, plan.layout, plan.estimate)
    _add_stages(table, plan)
    if plan.offload is not None:
        add_offload(table, plan.stages[0], plan.offload)
    if plan.search:
        table.add_section()
        search = plan.search
        table.add_row(
            "[bold]search",
            search.status,
            f"gap {100 * search.gap:.2g} %",
            f"{search.evaluated} layouts evaluated, {search.pruned} excluded by bounds"
            + (f" ({search.pruned_in_groups} of them by those of their degrees)" if search.pruned_in_groups else "")
            + f", {format_seconds(search.search_s)}"
            + (f"; simpler for {100 * plan.price_of_simplicity:.2g} % of time" if plan.price_of_simplicity > 0 else ""),
        )
    if plan.alternatives:
        table.add_section()
        table.add_row("[bold]runner-ups", "step time", "memory", "why not")
        for other in plan.alternatives:
            memory = format_bytes(other.peak_reserved_bytes)
            table.add_row(f"  {other.layout}", format_seconds(other.step_time_s), memory, other.reason)
    if plan.notes:
        table.add_section()
    for note in plan.notes:
        table.add_row("[bold]note", "", "", escape(note))
    return table


def estimate_table(
    model: ModelSpec, cluster: ClusterSpec, workload: Workload, layout: Layout, estimate: Estimate
) -> Table:
    """Layout, step time and its parts, throughput, memory and its parts against the budget."""
    title = f"{model.name} ({format_count(model.num_params)}) on {cluster_title(cluster)}"
    table = figures_table(title)
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


def _add_time(table: Table, estimate: Estimate) -> None:
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


def _add_memory(table: Table, cluster: ClusterSpec, estimate: Estimate) -> None:
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
    """What lies where, what moves, and what a little more of each resource would save."""
    table.add_section()
    per_step = (
        f"{format_bytes(schedule.to_host_bytes)} down, {format_bytes(schedule.to_device_bytes)} up a step and rank"
    )
    table.add_row("[bold]offload", format_bytes(schedule.host_bytes), "a node", per_step)
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
    worth = schedule.worth
    table.add_row(
        "  1 GiB more of each device", f"-{format_seconds(worth.device_s_per_gib)}", "", "saved a step, at the margin"
    )
    both = worth.to_host_s_per_gb_per_s + worth.to_device_s_per_gb_per_s
    table.add_row("  1 GB/s more both ways", f"-{format_seconds(both)}", "", "")
    gap = f"gap {100 * schedule.gap:.2g} %"
    table.add_row(
        "  schedule",
        format_seconds(schedule.simulated_s),
        gap,
        f"at least {format_seconds(schedule.bound_s)} with this layout",
    )


def _ranges(layers: tuple[int, ...]) -> str:
    """``0-3, 7``."""
    runs: list[list[int]] = []
    for idx in layers:
        if runs and runs[-1][-1] == idx - 1:
            runs[-1].append(idx)
        else:
            runs.append([idx])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _add_stages(table: Table, plan: Plan) -> None:
    """One row a stage; with model chunks the mean time of its rank's and the memory of its rank."""
    stages, model, ranks = plan.stages, plan.model, plan.estimate.stages
    if len(stages) == 1:
        return
    table.add_section()
    table.add_row("[bold]stages", "per micro-batch", "memory", "layers")
    layout = plan.layout
    style = SCHEDULES[layout.schedule].placement_of(layout.num_model_chunks)
    rank_of_stage = placement(layout.pp, layout.num_model_chunks, style)
    for s, stage in enumerate(stages):
        if len(stages) > MAX_STAGE_ROWS and MAX_STAGE_ROWS // 2 <= s < len(stages) - MAX_STAGE_ROWS // 2:
            if s == MAX_STAGE_ROWS // 2:
                table.add_row("  ...", "", "", f"{len(stages) - MAX_STAGE_ROWS} more, all in plan.json")
            continue
        cost, on_rank = ranks[rank_of_stage[s]], f" on rank {rank_of_stage[s]}" if layout.num_model_chunks > 1 else ""
        memory = format_bytes(cost.memory_bytes.total)
        table.add_row(
            f"  stage {s}{on_rank}",
            format_seconds((cost.forward_s + cost.backward_s) / plan.layout.num_model_chunks),
            memory,
            _stage_layers(stage, model) + (f" on {cost.device}" if cost.device else ""),
        )


def _stage_layers(stage: Stage, model: ModelSpec) -> str:
    layers = list(model.iter_layers())
    idxs = [idx for idx in stage.layer_idxs if layers[idx].kind == "block"]
    parts = [f"{len(idxs)} blocks ({idxs[0] - 1}-{idxs[-1] - 1})"]
    if stage.first_layer_idx == 0:
        parts.insert(0, "embedding")
    parts += [layers[idx].kind for idx in stage.layer_idxs if layers[idx].kind in ("head", "mtp")]
    return ", ".join(parts)


_STYLES = {"chosen": "[bold green]", "on the front": "[bold]", "dearer": "", "not examined": "[yellow]"}


def cost_table(cost: CostSummary, tokens_per_step: int) -> Table:
    """What is rented, what it costs, and every size that was tried."""
    table = _columns(
        f"cheapest: {cost.num_nodes} nodes of {cost.offer}", ["", "nodes", "USD/h", "step", "tok/s", "USD/1e9 tok", ""]
    )
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
    """Sizes in order; runs of one offer that the bounds alone decided, for one reason, together."""
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
    verdict = f"{style}{first.outcome}{'[/]' if style else ''}"
    if len(group) > 1:
        least = min((size.usd_per_million_tokens for size in group if size.usd_per_million_tokens), default=None)
        usd = f">= {1000 * least:,.2f}" if least else ""
        return (
            escape(first.offer),
            f"{first.num_nodes}-{last.num_nodes}",
            "",
            "",
            "",
            usd,
            f"{verdict} {_reason(group)}",
        )
    known_s = first.step_time_s or first.bound_s
    sign = ">= " if first.is_bound else ""
    return (
        escape(first.offer),
        str(first.num_nodes),
        f"{first.price_per_hour:,.2f}",
        sign + format_seconds(known_s) if known_s else "",
        ("<= " if first.is_bound else "") + format_count(tokens_per_step / known_s) if known_s else "",
        sign + f"{1000 * first.usd_per_million_tokens:,.2f}" if first.usd_per_million_tokens else "",
        f"{verdict} {_reason(group)}" + _offloaded(first),
    )


def _offloaded(size: SizeTried) -> str:
    return f" with {format_bytes(size.host_bytes)} of host memory a node" if size.host_bytes else ""


def _reason(group: Sequence[SizeTried]) -> str:
    reasons = {size.reason for size in group}
    return escape(reasons.pop()) if len(reasons) == 1 else ""


def pareto_table(points: Sequence[ParetoPoint]) -> Table:
    """Layouts that no other one beats in both time and memory, fastest first; with the host memory that some offload to."""
    offloads = any(point.host_bytes for point in points)
    table = _columns(
        "time against memory: each layout is the fastest that needs no more",
        ["step", "tok/s", "needs", *(["host"] if offloads else []), "gap", "layout"],
    )
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


def _columns(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=Text(title, style="bold"), title_justify="left", box=box.SIMPLE, pad_edge=False)
    for i, name in enumerate(columns):
        is_text = name in ("", "layout")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=not is_text or i == 0, overflow="fold")
    return table
