"""One self-contained page about a plan: figures, and every assumption with its source. It needs no network."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ...schema.base import write_atomically
from ...schema.errors import ConfigError
from ...schema.units import format_bytes, format_count, format_seconds
from ..terminal import cluster_title

if TYPE_CHECKING:
    from ...schema import TrainingPlan

TEMPLATE = Path(__file__).with_name("report.html.j2")
"""The page; its data are those of `page_data`."""


def write_report(plan: TrainingPlan, html: Path | None, trace: Path | None) -> None:
    """Write the page and the trace that are asked for, each file in full or not at all.

    Raises:
        ConfigError: a file cannot be written, plotly is missing, or the step of the plan has no timeline.
    """
    from ...planner.timeline import timeline
    from ...schema.trace import chrome_trace

    if html is not None:
        write_atomically(html, page(plan))
        typer.echo(f"wrote {html}", err=True)
    if trace is not None:
        write_atomically(trace, json.dumps(chrome_trace(plan, timeline(plan))))
        typer.echo(f"wrote {trace}; open it in ui.perfetto.dev", err=True)


def page(plan: TrainingPlan) -> str:
    """Return the page as HTML.

    Raises:
        ConfigError: plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError:
        raise ConfigError(
            "the report is drawn by plotly, which is not installed", help='pip install "meshwright[report]"'
        ) from None
    from jinja2 import Environment

    template = Environment(autoescape=True, keep_trailing_newline=True).from_string(
        TEMPLATE.read_text(encoding="utf-8")
    )
    return template.render(plotly=get_plotlyjs(), **page_data(plan))


def page_data(plan: TrainingPlan) -> dict[str, Any]:
    """Return what the template is filled with."""
    from .figures import figures

    sections, drawn = [], {}
    for number, (title, figure, text) in enumerate(figures(plan)):
        name = f"figure-{number}"
        if figure is not None:
            drawn[name] = figure
        sections.append({"title": title, "id": name, "figure": figure is not None, "text": text})
    return {
        "title": f"{plan.model.name} on {cluster_title(plan.cluster)}",
        "layout": str(plan.layout),
        "facts": list(_facts(plan)),
        "sections": sections,
        "assumptions": list(_assumptions(plan)),
        "figures": json.dumps(drawn).replace("</", "<\\/"),  # a closing tag inside the data would end the script
    }


def _facts(plan: TrainingPlan) -> Iterator[tuple[str, str, str]]:
    """Yield the cards: what it is, its value, and what else there is to say."""
    costs, work = plan.estimate, plan.workload
    interval = costs.step_time_interval_s
    between = f"{format_seconds(interval.low)} to {format_seconds(interval.high)}"
    yield "step time", format_seconds(costs.step_time_s), between
    yield "throughput", f"{format_count(costs.tokens_per_s)} tokens/s", f"MFU {100 * costs.mfu:.1f} %"
    yield "reserved peak", format_bytes(costs.peak_reserved_bytes), f"budget {format_bytes(costs.budget_bytes)}"
    yield "model", format_count(plan.model.num_params), f"{plan.model.num_blocks} blocks"
    yield "batch", f"{work.global_batch_size} x {work.seq_len}", f"{plan.num_microbatches} micro-batches"
    if plan.offload is not None:
        down, up = format_bytes(plan.offload.to_host_bytes), format_bytes(plan.offload.to_device_bytes)
        yield "host memory a node", format_bytes(plan.offload.host_bytes), f"{down} down, {up} up a step"
    if (search := plan.search) is not None:
        effort = f"{search.status}, {search.evaluated} layouts costed, {search.pruned} pruned"
        yield "search", f"gap {100 * search.gap:.2f} %", effort


def _assumptions(plan: TrainingPlan) -> Iterator[tuple[str, str, str]]:
    """Yield what the figures rest on, and where it is from."""
    work, made = plan.workload, plan.provenance
    yield "model", plan.model.architecture, plan.model.source or "given by the user"
    for group in plan.cluster.groups:
        device = group.device
        peaks = device.peak_flops_per_s.model_dump().items()
        rates = ", ".join(f"{name} {value / 1e12:.4g} TFLOP/s" for name, value in peaks if value)
        memory = f"{format_bytes(device.memory_bytes)} at {device.memory_bandwidth_bytes_per_s / 1e9:.4g} GB/s"
        yield device.name, f"{rates}; {memory}", device.source or "given by the user"
    for level in plan.cluster.levels:
        link = level.link
        rate = f"{link.bandwidth_bytes_per_s / 1e9:.4g} GB/s, {1e6 * link.latency_s:.3g} us"
        yield link.name, f"{rate}, {level.domain_size} devices", link.source or "given by the user"
    yield "workload", f"{work.precision}, {work.optimizer}, for {work.engine}", "given by the user"
    yield from (("note", note, "") for note in plan.notes)
    yield "made by", f"Meshwright {made.meshwright}, {made.created}", f"inputs {made.inputs_sha256[:12]}"
