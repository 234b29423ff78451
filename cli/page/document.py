"""One self-contained page about a plan: what it is, where its step goes, why no other layout, which rank lies where.

The template draws everything as HTML and SVG; its script only points, selects and copies. Nothing is loaded from elsewhere, which
the page's own policy forbids too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from ...cost_models.stage.step import has_power_limits, step_energy_j
from ...planner import explain
from ...planner.request import Deadline
from ...planner.timeline import timeline
from ...schema import ConfigError, MeshwrightError, Plan, RlPlan, ServingPlan, TrainingPlan
from ...schema.base import write_atomically
from ...schema.local_updates import slowest_island
from ...schema.trace import chrome_trace
from ...schema.units import counted, format_bytes, format_count, format_joules, format_seconds
from ..terminal import cluster_title, spinner, stopping_on_interrupt
from . import glossary
from .command import command_of
from .groups import group_map
from .offload import expert_copies, offload_strips
from .pipeline import pipeline_panels
from .roofline import roofline_figure
from .step import layout_rows, memory_rows, step_rows

if TYPE_CHECKING:
    from ...planner.explain.report import Explanation
    from ...planner.explain.serving import ServingExplanation

FOLDER = Path(__file__).parent


def write_report(plan: Plan, html: Path | None, trace: Path | None, *, explain_limit_s: float) -> None:
    """Write the page and the trace that are asked for, each file in full or not at all.

    Args:
        explain_limit_s: for explaining the plan in the page; with 0 it is not.

    Raises:
        ConfigError: a file cannot be written, or the plan has no step to draw.
    """
    if isinstance(plan, ServingPlan):
        _write_serving_report(plan, html, trace, explain_limit_s=explain_limit_s)
        return
    if isinstance(plan, RlPlan):
        if trace is not None:
            raise ConfigError(
                "--trace: a post-training step is drawn in the page", help="meshwright report --report FILE"
            )
        if html is not None:
            write_atomically(html, rl_page(plan))
            typer.echo(f"wrote {html}", err=True)
        return
    if not isinstance(plan, TrainingPlan):
        raise ConfigError(f"a plan of {plan.task_name} is not drawn", help="meshwright explain says what is in it")
    if plan.local_updates is not None:  # a step of which is that of each region by itself
        plan = slowest_island(plan)
    if html is not None:
        explanation = None
        if explain_limit_s > 0:
            deadline = Deadline(explain_limit_s)
            with spinner("explaining the plan for its page"), stopping_on_interrupt(deadline):
                explanation = explain(plan, deadline=deadline)
        write_atomically(html, page(plan, explanation))
        typer.echo(f"wrote {html}", err=True)
    if trace is not None:
        write_atomically(trace, json.dumps(chrome_trace(plan, timeline(plan))))
        typer.echo(f"wrote {trace}; open it in ui.perfetto.dev", err=True)


def _write_serving_report(plan: ServingPlan, html: Path | None, trace: Path | None, *, explain_limit_s: float) -> None:
    """Write the page of a serving plan."""
    from ...planner.explain.serving import explain_serving

    if trace is not None:
        raise ConfigError(
            "--trace: a serving plan has no one step", help="meshwright replay says what every instance does"
        )
    explanation = None
    if explain_limit_s > 0:
        deadline = Deadline(explain_limit_s)
        with spinner("explaining the plan for its page"), stopping_on_interrupt(deadline):
            explanation = explain_serving(plan, deadline=deadline)
    if html is not None:
        write_atomically(html, serving_page(plan, explanation))
        typer.echo(f"wrote {html}", err=True)


def serving_page(plan: ServingPlan, explanation: ServingExplanation | None = None) -> str:
    """Return the page of a serving plan as HTML."""
    from .serving import serving_page_data

    return str(template("serving.html.j2").render(serving_page_data(plan, explanation)))


def rl_page(plan: RlPlan) -> str:
    """Return the page of a post-training plan as HTML."""
    from .rl import rl_page_data

    return str(template("serving.html.j2").render(rl_page_data(plan)))


def page(plan: TrainingPlan, explanation: Explanation | None = None) -> str:
    """Return the page as HTML."""
    return template("page.html.j2").render(page_data(plan, explanation))


def fragment(plan: TrainingPlan, explanation: Explanation | None = None) -> str:
    """Return the page's content, for a page that holds several."""
    return template("plan.html.j2").render(page_data(plan, explanation))


@cache
def template(name: str) -> Any:
    """Return a template of this folder, with the functions that templates call."""
    made = Environment(
        autoescape=True,
        loader=FileSystemLoader(FOLDER),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.globals |= {
        "source": lambda name: Markup((FOLDER / name).read_text("utf-8")),
        "meaning": glossary.meaning,
        "meaning_of_field": glossary.meaning_of_field,
    }
    return made.get_template(name)


def page_data(plan: TrainingPlan, explanation: Explanation | None = None) -> dict[str, Any]:
    """Return what the template is filled with."""
    command, unsaid = command_of(plan)
    panels = _drawn(partial(pipeline_panels, plan))
    groups = group_map(plan)
    script = {"map": groups.pop("script"), "panels": panels.pop("script", [])}
    return {
        "title": f"{plan.model.name} on {cluster_title(plan.cluster)}",
        "model": plan.model.name,
        "cluster": cluster_title(plan.cluster),
        "layout": str(plan.layout).split(),
        "step": format_seconds(plan.estimate.step_time_s),
        "interval": [
            format_seconds(s) for s in (plan.estimate.step_time_interval_s.low, plan.estimate.step_time_interval_s.high)
        ],
        "facts": list(_facts(plan)),
        "parts": _drawn(partial(step_rows, plan)),
        "why": None if explanation is None else _explained(explanation),
        "layouts": layout_rows(plan, explanation),
        "memory": memory_rows(plan),
        "pipeline": panels,
        "map": groups,
        "roofline": _drawn(partial(roofline_figure, plan)),
        "offload": None if plan.offload is None else offload_strips(plan, plan.offload),
        "experts": expert_copies(plan) if plan.expert_slots else None,
        "assumptions": list(_assumptions(plan)),
        "notes": plan.notes,
        "command": command,
        "unsaid": unsaid,
        "glossary": sorted((glossary.TERMS | glossary.PAGE_TERMS).items(), key=lambda item: item[0].lower()),
        "data": Markup(json.dumps(script, separators=(",", ":")).replace("<", "\\u003c")),
    }


def _drawn(draw: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what a function draws, or why this version cannot draw it."""
    try:
        return draw()
    except MeshwrightError as error:
        return {"error": error.message}


def _facts(plan: TrainingPlan) -> Iterator[dict[str, str]]:
    """Yield the figures at the top: what it is, its value, and what else there is to say."""

    def fact(name: str, value: str, more: str = "", term: str = "") -> dict[str, str]:
        return {"name": name, "value": value, "more": more, "tip": glossary.meaning(term)}

    costs, work = plan.estimate, plan.workload
    per_device = f"{costs.tokens_per_s_per_device:,.0f} a device"
    yield fact("throughput", f"{format_count(costs.tokens_per_s)} tokens/s", per_device)
    yield fact("MFU", f"{100 * costs.mfu:.1f} %", "of the peak of all devices", "MFU")
    need = costs.required_bytes or costs.peak_reserved_bytes
    yield fact(
        "memory", format_bytes(need), f"{100 * need / costs.budget_bytes:.0f} % of {format_bytes(costs.budget_bytes)}"
    )
    batches = f"{'' if plan.is_even else 'up to '}{counted(plan.num_microbatches, 'micro-batch', 'micro-batches')} on each rank"
    yield fact("batch", f"{work.global_batch_size:,} \N{MULTIPLICATION SIGN} {work.seq_len:,}", batches, "micro-batch")
    yield fact("model", format_count(plan.model.num_params), f"{plan.model.num_blocks} blocks")
    if plan.offload is not None:
        down, up = format_bytes(plan.offload.to_host_bytes), format_bytes(plan.offload.to_device_bytes)
        yield fact(
            "host memory a node", format_bytes(plan.offload.host_bytes), f"{down} down, {up} up a step", "offload"
        )
    if has_power_limits(plan.cluster):
        energy_j = step_energy_j(costs, plan.cluster)
        step = f"{format_joules(energy_j)} a step, of the devices alone"
        yield fact("energy", f"{energy_j / work.tokens_per_step:.3g} J a token", step)
    if plan.cost is not None and plan.cost.price_per_hour is not None:
        price = f"{plan.cost.price_per_hour:,.2f} USD/h, {counted(plan.cost.num_nodes, 'node')}"
        yield fact("1e9 tokens", f"{plan.cost.usd_per_billion_tokens:,.0f} USD", price)
    if (search := plan.search) is not None:
        effort = f"{search.evaluated:,} layouts costed, {search.pruned:,} excluded by bounds"
        yield fact("proved gap", f"{100 * search.gap:.2f} %", effort, "optimality gap")


def _explained(explanation: Explanation) -> dict[str, Any]:
    """Return what binds, what more of each resource saves, and what the reader should know."""
    total = explanation.step_time_s
    largest = max((binding.seconds or 0.0 for binding in explanation.binds), default=0.0) or 1.0
    return {
        "binds": [
            {
                "resource": binding.resource,
                "text": binding.text,
                "time": "" if binding.seconds is None else format_seconds(binding.seconds),
                "width": 100 * (binding.seconds or 0.0) / largest,
            }
            for binding in explanation.binds
        ],
        "values": [
            {
                "change": value.change,
                "kept": _saving(value.kept_s, total),
                "best": "" if value.best_s is None else _saving(value.best_s, total),
                "layout": "" if value.best is None else str(value.best),
            }
            for value in explanation.worth
        ],
        "policies": [
            (str(other.layout), other.reason, format_seconds(other.step_time_s)) for other in explanation.policies
        ],
        "notes": explanation.notes,
    }


def _saving(seconds: float, total_s: float) -> str:
    if abs(seconds) < 1e-6 * total_s:
        return "nothing"
    sign = "" if seconds > 0 else "\N{MINUS SIGN}"
    return f"{sign}{format_seconds(abs(seconds))} ({100 * seconds / total_s:.2f} %)"


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
    yield "made by", f"Meshwright {made.meshwright}, {made.created}", f"inputs {made.inputs_sha256[:12]}"
