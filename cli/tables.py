"""Plans and estimates as one right-aligned table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rich import box
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ..cost_models.pipeline_simulation import placement
from ..schema.layout_facts import V_SCHEDULES
from ..schema.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from ..schema import ClusterSpec, Estimate, Layout, ModelSpec, OffloadSchedule, Plan, Stage, Workload

BAR_WIDTH = 20
MAX_STAGE_ROWS = 16
PIPE_WIDTH = 140

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


def show(renderable: RenderableType) -> None:
    """Print on stdout; a pipe or a narrow terminal still gets whole columns."""
    console = Console(soft_wrap=False)
    console = console if console.is_terminal else Console(width=max(console.width, PIPE_WIDTH))
    console.print(renderable)


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


def figures_table(title: str) -> Table:
    """An empty table of rows: what it is, two figures, and words about them."""
    table = Table(
        title=Text(title, style="bold"), title_justify="left", show_header=False, box=box.SIMPLE, pad_edge=False
    )
    table.add_column(min_width=26, overflow="fold")
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def cluster_title(cluster: ClusterSpec) -> str:
    """Devices and links in a line."""
    groups = ", ".join(f"{group.num_devices} x {group.device.name}" for group in cluster.groups)
    links = " + ".join(level.link.name for level in cluster.levels) if cluster.num_devices > 1 else ""
    return f"{groups} ({links})" if links else groups


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
    style: Literal["loop", "wave"] = "wave" if layout.schedule in V_SCHEDULES else "loop"
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


def bar(share: float) -> str:
    """A bar of BAR_WIDTH for the whole."""
    return "[cyan]" + "#" * max(0, min(BAR_WIDTH, round(BAR_WIDTH * share))) + "[/]"
