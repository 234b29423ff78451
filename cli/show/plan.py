"""Show plans, estimates, costs and Pareto fronts as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ...cost_models.stage.step import has_power_limits, step_energy_j
from ...schema import GenerationPlan, Plan, RlPlan, ServingPlan, TrainingPlan
from ...schema.units import counted, format_bytes, format_count, format_joules, format_percent, format_seconds
from ..markup import plain
from ..terminal import Table, add_notes, add_search, figures_table, headed_table, model_title
from .generation import generation_table

if TYPE_CHECKING:
    from ...schema import (
        Alternative,
        Certificate,
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
    from ...schema.local_updates import LocalUpdates

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
    elif isinstance(plan, ServingPlan):
        from .serving import serving_tables

        yield from serving_tables(plan)
    elif isinstance(plan, RlPlan):
        from .rl import rl_tables

        yield from rl_tables(plan)
    elif isinstance(plan, TrainingPlan):
        yield plan_table(plan)
        if plan.cost is not None:
            yield cost_table(plan.cost, plan.workload.tokens_per_step)
            yield money_table(plan.cost)
        if plan.pareto:
            yield pareto_table(plan.pareto)
    else:
        yield task_table(plan)


def task_table(plan: Plan) -> Table:
    """Show what every plan has: the phases of its task, what was chosen, the figures of its estimate, its search and its notes."""
    table = figures_table(model_title(plan.model, plan.cluster))
    for phase in plan.task.phases:
        table.add_row(f"[bold]{phase.name}", f"{phase.num_passes} x", f"{phase.tokens} tokens")
    table.add_section()
    for name in [name for name in type(plan).model_fields if name not in (*Plan.model_fields, plan.task_field)]:
        table.add_row(f"[bold]{name.replace('_', ' ')}", "", "", plain(str(getattr(plan, name))))
    units = {"_s": format_seconds, "_bytes": format_bytes}
    for name, value in plan.estimate:
        unit = next((unit for unit in units if name.endswith(unit) and not name.endswith("_per_s")), "")
        if isinstance(value, int | float):
            table.add_row(f"[bold]{name.removesuffix(unit).replace('_', ' ')}", units.get(unit, format_count)(value))
    if plan.search is not None:
        add_search(table, plan.search, _effort(plan.search))
    add_notes(table, plan)
    return table


def plan_table(plan: TrainingPlan) -> Table:
    """Show everything a reader needs to judge a plan."""
    table = estimate_table(plan.model, plan.cluster, plan.workload, plan.layout, plan.estimate, shares=plan.shares)
    _add_stages(table, plan)
    if plan.offload is not None:
        add_offload(table, plan.stages[0], plan.offload)
    if plan.local_updates is not None:
        _add_islands(table, plan.local_updates)
    if plan.search is not None:
        add_search(table, plan.search, _effort(plan.search))
    if plan.fastest is not None:
        table.add_section()
        table.add_row("[bold]fastest by prediction", *_alternative(plan.fastest))
    if plan.alternatives:
        table.add_section()
        table.add_row("[bold]runner-ups", "step time", "memory")
    for idx, other in enumerate(plan.alternatives, 1):
        table.add_row(f"  runner-up {idx}", *_alternative(other))
    add_notes(table, plan)
    return table


def _alternative(other: Alternative) -> tuple[str, str, str]:
    """Return the cells of a layout that was not taken: its time and memory, and why."""
    words = f"{plain(str(other.layout))}\n{plain(other.reason)}"
    return format_seconds(other.step_time_s), format_bytes(other.peak_reserved_bytes), words


def _effort(search: Certificate) -> str:
    return f"{counted(search.evaluated, 'layout')} evaluated, {search.pruned:,} ruled out by bounds,"


def estimate_table(
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: Workload,
    layout: Layout,
    estimate: TrainingEstimate,
    *,
    shares: Sequence[int] = (),
) -> Table:
    """Show step time and memory, the layout with unlike ``shares``, what the step consists of, and memory against the budget."""
    table = figures_table(model_title(model, cluster))
    add_headline(table, estimate)
    _add_layout(table, workload, layout, shares)
    _add_time(table, estimate)
    if has_power_limits(cluster):
        energy_j, step_tokens = step_energy_j(estimate, cluster), estimate.tokens_per_s * estimate.step_time_s
        table.add_row(
            "energy", format_joules(energy_j), "", f"{energy_j / step_tokens:.3g} J a token, of the devices alone"
        )
    _add_memory(table, cluster, estimate)
    return table


def add_headline(table: Table, estimate: TrainingEstimate) -> None:
    """Add what a reader looks for first: the time of a step with what it gives, and whether it fits."""
    rate = f"{estimate.tokens_per_s_per_device:,.0f} tokens/s per device, MFU {format_percent(estimate.mfu)}"
    table.add_row("[bold]step time", f"[bold]{format_seconds(estimate.step_time_s)}", "", rate)
    verdict = "[green]fits" if estimate.fits else "[red]does not fit"
    budget = (
        f"{verdict}[/]: needs up to {format_bytes(estimate.required_bytes)} of {format_bytes(estimate.budget_bytes)}"
    )
    table.add_row("[bold]memory per device", f"[bold]{format_bytes(estimate.peak_allocated_bytes)}", "", budget)


def _add_layout(table: Table, workload: Workload, layout: Layout, shares: Sequence[int]) -> None:
    table.add_section()
    microbatches = layout.num_microbatches(workload.global_batch_size)
    table.add_row("[bold]layout", "", "", f"[bold]{plain(str(layout))}")
    ranks = f"each of {layout.dp} data-parallel ranks" if layout.dp > 1 else "the one data-parallel rank"
    up_to = "up to " if workload.global_batch_size % (layout.dp * layout.micro_batch_size) else ""
    passes = counted(microbatches, "micro-batch", "micro-batches")
    dealt = f"{up_to}{passes} of {counted(layout.micro_batch_size, 'sequence')} on {ranks}"
    if shares:
        dealt = f"{min(shares)} to {max(shares)} on {ranks}, in micro-batches of {layout.micro_batch_size}"
    sequences = f"{counted(workload.global_batch_size, 'sequence')} of {counted(workload.seq_len, 'token')}"
    if (lengths := workload.lengths) is not None:
        sequences = f"{counted(workload.global_batch_size, 'sequence')} of {lengths.lengths[0]:,} to {lengths.lengths[-1]:,} tokens"
        dealt = "dealt anew in each step (meshwright batch)"
    table.add_row("[bold]batch", "", "", f"{sequences} in {workload.precision}: {dealt}")


def _add_time(table: Table, estimate: TrainingEstimate) -> None:
    table.add_section()
    interval = estimate.step_time_interval_s
    between = f"between {format_seconds(interval.low)} and {format_seconds(interval.high)}, nine times in ten"
    table.add_row("[bold]where the time goes", format_seconds(estimate.step_time_s), "", between)
    for name, title in TIME_TITLES.items():
        seconds = getattr(estimate.breakdown_s, name)
        if seconds > 0:
            share = seconds / estimate.step_time_s
            table.add_row(f"  {title}", format_seconds(seconds), format_percent(share), share=share)
    table.add_row("[bold]throughput", format_count(estimate.tokens_per_s), "", "tokens/s on all devices together")


def _add_memory(table: Table, cluster: ClusterSpec, estimate: TrainingEstimate) -> None:
    table.add_section()
    total, reserved = estimate.budget_bytes + cluster.reserved_bytes, cluster.reserved_bytes
    table.add_row(
        "[bold]where the memory goes",
        format_bytes(estimate.peak_allocated_bytes),
        format_percent(estimate.peak_allocated_bytes / estimate.budget_bytes, 0),
        f"of {format_bytes(estimate.budget_bytes)} = {format_bytes(total)} - {format_bytes(reserved)} reserved",
    )
    for name, size in estimate.memory_bytes.model_dump().items():
        if size:
            share = size / estimate.budget_bytes
            table.add_row(f"  {name}", format_bytes(size), format_percent(share), share=share)


def add_offload(table: Table, stage: Stage, schedule: OffloadSchedule) -> None:
    """Add what lies where, what moves, and what a little more of each resource would save."""
    table.add_section()
    down, up = format_bytes(schedule.to_host_bytes), format_bytes(schedule.to_device_bytes)
    moved = f"of host memory a node; each rank moves {down} down and {up} up in a step"
    table.add_row("[bold]offload", format_bytes(schedule.host_bytes), "", moved)
    for name, title in (("activations", "activations of"), ("boundary", "inputs of recomputed")):
        count = sum(stage.offload_of(idx) == name for idx in stage.layer_idxs)
        if count:
            ahead = f"fetched back {counted(schedule.prefetch_layers, 'block')} ahead"
            table.add_row(f"  {title}", counted(count, "block"), "", ahead)
    for layers, what in (
        (schedule.host_optimizer_layers, "updated by the host"),
        (schedule.streamed_optimizer_layers, "states streamed to the device"),
        (schedule.streamed_parameter_layers, "parameters live on the host"),
        (schedule.storage_optimizer_layers, f"states in {schedule.storage_path}"),
    ):
        if layers:
            table.add_row(f"  {what}", counted(len(layers), "layer"), "", plain(_ranges(layers)))
    values = schedule.worth
    device_s, link_s = values.device_s_per_gib, values.to_host_s_per_gb_per_s + values.to_device_s_per_gb_per_s
    table.add_row("  1 GiB more of each device", _saving(device_s), "", "a step, at the margin")
    table.add_row("  1 GB/s more both ways", _saving(link_s), "", "a step, at the margin")
    proof = f"within {format_percent(schedule.gap)} of {format_seconds(schedule.bound_s)}, the least that this layout allows"
    table.add_row("  step when simulated", format_seconds(schedule.simulated_s), "", proof)


def _add_islands(table: Table, updates: LocalUpdates) -> None:
    """Add the regions in the order of the ring, and what crosses from each to the next."""
    table.add_section()
    often = "after each step" if updates.steps == 1 else f"every {updates.steps} steps"
    fragments = f" in {updates.fragments} fragments" if updates.fragments > 1 else ""
    late = f", taken over {counted(updates.delay_steps, 'step')} later" if updates.delay_steps else ""
    waited = f"waited for them, {format_seconds(updates.exchange_s)} each"
    table.add_row("[bold]regions", "step time", "", f"sums {often}{fragments}, {updates.bits} bits a number{late}")
    for idx in updates.ring:
        island = updates.islands[idx]
        share = f"{counted(island.sequences, 'sequence')} of each batch on {counted(island.replicas, 'replica')}"
        table.add_row(f"  {plain(island.region)}", format_seconds(island.step_s), "", share)
    table.add_row(
        "  sums",
        format_seconds(updates.waited_s),
        "",
        f"of {updates.steps} steps {waited}" if updates.waited_s else "hidden",
    )
    price = f", {updates.usd:.2g} USD for all regions" if updates.usd else ""
    table.add_row(
        "  sent by each region", format_bytes(updates.sent_bytes), "", f"in {counted(updates.steps, 'step')}{price}"
    )


def _saving(seconds: float) -> str:
    return f"-{format_seconds(seconds)}" if seconds > 0 else "nothing"


def _ranges(layers: Sequence[int]) -> str:
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
    table.add_row("[bold]stages", "time", "memory", "both passes of one micro-batch")
    half = MAX_STAGE_ROWS // 2
    for s, (stage, rank) in enumerate(zip(plan.stages, plan.rank_of_stage, strict=True)):
        if num_stages > MAX_STAGE_ROWS and half <= s < num_stages - half:
            if s == half:
                table.add_row(
                    "  ...", "", "", f"{counted(num_stages - MAX_STAGE_ROWS, 'more stage')}, all in the plan file"
                )
            continue
        costs = plan.estimate.stages[rank]
        table.add_row(
            f"  stage {s}" + (f" on rank {rank}" if chunks > 1 else ""),
            format_seconds((costs.forward_s + costs.backward_s) / chunks),
            format_bytes(costs.memory_bytes.total),
            _stage_layers(stage, plan) + (f" on {costs.device}" if costs.device else ""),
        )


def _stage_layers(stage: Stage, plan: TrainingPlan) -> str:
    layers, half_blocks = list(plan.staged_model.iter_layers()), plan.layout.half_blocks
    idxs = [idx for idx in stage.layer_idxs if layers[idx].kind == "block"]
    per_block = 2 if half_blocks else 1
    blocks = tuple(dict.fromkeys((idx - 1) // per_block for idx in idxs))
    names = []
    if idxs:
        size = len(idxs) / per_block
        number = counted(len(blocks), "block") if size == len(blocks) else f"{size:g} blocks"
        lacks = [
            text
            for text, is_cut in (
                (f"{blocks[0]} without attention", half_blocks and idxs[0] % 2 == 0),
                (f"{blocks[-1]} without feed-forward part", half_blocks and idxs[-1] % 2 == 1),
            )
            if is_cut
        ]
        names = [f"{number} ({'; '.join((_ranges(blocks), *lacks))})"]
    if stage.first_layer_idx == 0:
        names.insert(0, "embedding")
    if plan.degrees_by_stage:
        names.insert(0, f"tp {stage.tp or plan.layout.tp}")
    names += [layers[idx].kind for idx in stage.layer_idxs if layers[idx].kind in ("head", "mtp")]
    return ", ".join(names)


_STYLES = {"chosen": "[bold green]", "on the front": "[bold]", "dearer": "", "not examined": "[yellow]"}


def cost_table(cost: CostSummary, tokens_per_step: int) -> Table:
    """Show every size that was tried: what it costs, and why it was not chosen."""
    title_word = "cheapest" if cost.objective == "cost" else f"least {cost.objective}"
    title = f"{title_word}: {counted(cost.num_nodes, 'node')} of {cost.offer}"
    has_prices, has_energy = cost.price_per_hour is not None, cost.joules_per_token is not None
    prices = ("USD/h", "USD/1e9 tokens") if has_prices else ()
    columns = ("", "nodes", *prices[:1], "step", "tokens/s", *prices[1:], *(["J/token"] if has_energy else []), "")
    table = headed_table(title, *columns)
    for group in _grouped(cost.sizes):
        row = _size_row(group, tokens_per_step)
        table.add_row(*(row[name] for name in columns[:-1]), row["verdict"])
    return table


def money_table(cost: CostSummary) -> Table:
    """Show what the chosen size costs, and what the search for it proved."""
    table = Table("", ("", "" if cost.price_per_hour is None else "USD", ""))
    if cost.price_per_hour is not None:
        table.add_row("[bold]rent", f"{cost.price_per_hour:,.2f}", "an hour")
        table.add_row("[bold]a step", f"{cost.usd_per_step:,.4g}")
        table.add_row("[bold]1e9 tokens", f"{cost.usd_per_billion_tokens:,.2f}")
    if cost.joules_per_token is not None:
        table.add_row("[bold]energy", "", f"{cost.joules_per_token:.3g} J a token, of the devices alone")
    if cost.total is not None and cost.tokens is not None and cost.hours is not None:
        table.add_row("[bold]whole run", f"{cost.total:,.0f}", f"for {cost.tokens:.3g} tokens in {cost.hours:,.1f} h")
    if cost.goodput < 1:
        lost = "of the time makes progress that stays: money and hours count what spot nodes lose"
        table.add_row("[bold]goodput", "", f"{format_percent(cost.goodput, 1)} {lost}")
    examined = counted(len(cost.sizes), "size")
    if cost.num_mixtures:
        examined += f", {counted(cost.num_mixtures, 'mixture')} bounded"
    took = f"{examined} in {format_seconds(cost.search_s)}"
    table.add_row("[bold]search", "", f"[bold]{cost.verdict}[/]: {took}")
    return table


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


def _size_row(group: Sequence[SizeTried], tokens_per_step: int) -> dict[str, str]:
    first, last = group[0], group[-1]
    style = _STYLES.get(first.outcome, "[dim]")
    reasons = {size.reason for size in group}
    verdict = f"{style}{first.outcome}{'[/]' if style else ''} {plain(reasons.pop()) if len(reasons) == 1 else ''}"
    row = dict.fromkeys(("USD/h", "step", "tokens/s", "USD/1e9 tokens", "J/token"), "") | {"": plain(first.offer)}
    if len(group) > 1:
        prices = [size.usd_per_million_tokens for size in group if size.usd_per_million_tokens]
        usd = f">= {1000 * min(prices):,.2f}" if prices else ""
        return row | {"nodes": f"{first.num_nodes}-{last.num_nodes}", "USD/1e9 tokens": usd, "verdict": verdict}
    if first.host_bytes:
        verdict += f" with {format_bytes(first.host_bytes)} of host memory a node"
    known_s, price = first.step_time_s or first.bound_s, first.usd_per_million_tokens
    lower, upper = (">= ", "<= ") if first.is_bound else ("", "")
    return row | {
        "nodes": str(first.num_nodes),
        "USD/h": f"{first.price_per_hour:,.2f}" if first.price_per_hour else "",
        "step": lower + format_seconds(known_s) if known_s else "",
        "tokens/s": upper + format_count(tokens_per_step / known_s) if known_s else "",
        "USD/1e9 tokens": lower + f"{1000 * price:,.2f}" if price else "",
        "J/token": f"{first.joules_per_token:.3g}" if first.joules_per_token else "",
        "verdict": verdict,
    }


def pareto_table(points: Sequence[ParetoPoint]) -> Table:
    """Show layouts that no other beats in both time and memory, fastest first; with the host memory that some offload to."""
    offloads = any(point.host_bytes for point in points)
    columns = ["step", "tokens/s", "needs", *(["host"] if offloads else []), "gap", "layout"]
    title = "time against memory: each layout is the fastest that needs no more"
    table = headed_table(title, *columns, text=("layout",))
    for point in points:
        gap = max(0.0, 1 - point.bound_s / point.step_time_s)
        table.add_row(
            format_seconds(point.step_time_s),
            format_count(point.tokens_per_s),
            format_bytes(point.required_bytes),
            *([format_bytes(point.host_bytes) if point.host_bytes else ""] if offloads else []),
            format_percent(gap),
            plain(str(point.layout)),
        )
    return table
