"""One self-contained page about a plan: figures, and every assumption with its source. It needs no network."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ...schema.errors import ConfigError
from ...schema.units import format_bytes, format_count, format_seconds
from .figures import figures
from .plan import cluster_title

if TYPE_CHECKING:
    from ...schema import Plan


STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #ffffff; --faint: #6a737d; --line: #d8dee4; --card: #f6f8fa; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --paper: #0d1117; --faint: #8d96a0; --line: #30363d; --card: #161b22; }
}
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto; padding: 1rem;
  max-width: 1200px; overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; margin: 0.5rem 0; } h2 { font-size: 1.1rem; margin: 2rem 0 0.3rem; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 0.6rem; margin: 1rem 0; }
.fact { background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: 0.5rem 0.7rem; }
.fact b { display: block; font-size: 1.15rem; } .fact span, .below { color: var(--faint); font-size: 0.85rem; }
section { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 0.9rem; }
td:first-child { overflow-wrap: normal; }
td, th { border-bottom: 1px solid var(--line); padding: 0.25rem 0.5rem; text-align: left; vertical-align: top; }
code { background: var(--card); padding: 0 0.25rem; border-radius: 3px; }
.figure { width: 100%; min-height: 240px; }
"""


SCRIPT = """
const dark = window.matchMedia('(prefers-color-scheme: dark)');
function themed(layout) {
  const ink = getComputedStyle(document.documentElement).getPropertyValue('--ink').trim();
  const line = getComputedStyle(document.documentElement).getPropertyValue('--line').trim();
  const axis = {gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true};
  return Object.assign({}, layout, {
    paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)', font: {color: ink, size: 12}, autosize: true,
    margin: {l: 50, r: 16, t: 40, b: 50}, legend: {orientation: 'h', y: 1.02, yanchor: 'bottom'},
    xaxis: Object.assign({}, layout.xaxis, axis), yaxis: Object.assign({}, layout.yaxis, axis)});
}
function draw() {
  for (const [id, figure] of Object.entries(FIGURES))
    Plotly.react(id, figure.data, themed(figure.layout), {responsive: true, displaylogo: false});
}
draw();
dark.addEventListener('change', draw);
"""


def page(plan: Plan) -> str:
    """The page as HTML.

    Raises:
        ConfigError: plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError:
        raise ConfigError(
            "the report is drawn by plotly, which is not installed", help='pip install "meshwright[report]"'
        ) from None

    sections, data = [], {}
    for number, (title, figure, text) in enumerate(figures(plan)):
        name = f"figure-{number}"
        if figure is not None:
            figure.update_layout(template="none")
            data[name] = json.loads(figure.to_json())
        holder = f'<div class="figure" id="{name}"></div>' if figure is not None else ""
        below = f'<p class="below">{escape(text)}</p>' if text else ""
        sections.append(f"<section><h2>{escape(title)}</h2>{holder}{below}</section>")
    # A closing tag inside the data would end the script.
    numbers = json.dumps(data).replace("</", "<\\/")
    title = f"{plan.model.name} on {cluster_title(plan.cluster)}"
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
            f"<h1>{escape(title)}</h1><p><code>{escape(str(plan.layout))}</code></p>",
            _facts(plan),
            *sections,
            _assumptions(plan),
            f"<script>{get_plotlyjs()}</script>",
            f"<script>const FIGURES = {numbers};{SCRIPT}</script>",
            "</body></html>\n",
        ]
    )


def _facts(plan: Plan) -> str:
    found = plan.estimate
    between = f"{format_seconds(found.step_time_interval_s.low)} to {format_seconds(found.step_time_interval_s.high)}"
    facts = [
        ("step time", format_seconds(found.step_time_s), between),
        ("throughput", f"{format_count(found.tokens_per_s)} tokens/s", f"MFU {100 * found.mfu:.1f} %"),
        ("reserved peak", format_bytes(found.peak_reserved_bytes), f"budget {format_bytes(found.budget_bytes)}"),
        ("model", format_count(plan.model.num_params), f"{plan.model.num_blocks} blocks"),
        (
            "batch",
            f"{plan.workload.global_batch_size} x {plan.workload.seq_len}",
            f"{plan.num_microbatches} micro-batches",
        ),
    ]
    if plan.offload is not None:
        moved = (
            f"{format_bytes(plan.offload.to_host_bytes)} down, {format_bytes(plan.offload.to_device_bytes)} up a step"
        )
        facts.append(("host memory a node", format_bytes(plan.offload.host_bytes), moved))
    if plan.search is not None:
        gap = f"gap {100 * plan.search.gap:.2f} %"
        facts.append(
            (
                "search",
                gap,
                f"{plan.search.status}, {plan.search.evaluated} layouts costed, {plan.search.pruned} pruned",
            )
        )
    cards = (
        f'<div class="fact"><span>{escape(name)}</span><b>{escape(value)}</b><span>{escape(more)}</span></div>'
        for name, value, more in facts
    )
    return f'<div class="facts">{"".join(cards)}</div>'


def _assumptions(plan: Plan) -> str:
    """What the figures rest on, each with where it is from."""
    rows: list[tuple[str, str, str]] = [("model", plan.model.architecture, plan.model.source or "given by the user")]
    for group in plan.cluster.groups:
        device = group.device
        rates = ", ".join(
            f"{name} {value / 1e12:.4g} TFLOP/s"
            for name, value in device.peak_flops_per_s.model_dump().items()
            if value
        )
        memory = f"{format_bytes(device.memory_bytes)} at {device.memory_bandwidth_bytes_per_s / 1e9:.4g} GB/s"
        rows.append((device.name, f"{rates}; {memory}", device.source or "given by the user"))
    for level in plan.cluster.levels:
        link = level.link
        text = (
            f"{link.bandwidth_bytes_per_s / 1e9:.4g} GB/s, {1e6 * link.latency_s:.3g} us, {level.domain_size} devices"
        )
        rows.append((link.name, text, link.source or "given by the user"))
    rows.append(
        (
            "workload",
            f"{plan.workload.precision}, {plan.workload.optimizer}, for {plan.workload.engine}",
            "given by the user",
        )
    )
    rows += [("note", note, "") for note in plan.notes]
    made = plan.provenance
    rows.append(("made by", f"Meshwright {made.meshwright}, {made.created}", f"inputs {made.inputs_sha256[:12]}"))
    cells = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<section><h2>What this rests on</h2><table><tr><th></th><th>taken</th><th>from</th></tr>{cells}</table></section>"


def write_report(plan: Plan, html: Path | None, trace: Path | None) -> None:
    """Write what is asked for, each file whole or not at all.

    Raises:
        ConfigError: a file cannot be written, plotly is missing, or the step of the plan has no timeline.
    """
    from ...planner.timeline import timeline
    from ...schema.base import write_atomically
    from ...schema.trace import chrome_trace

    if html is not None:
        write_atomically(html, page(plan))
        typer.echo(f"wrote {html}", err=True)
    if trace is not None:
        write_atomically(trace, json.dumps(chrome_trace(plan, timeline(plan))))
        typer.echo(f"wrote {trace}; open it in ui.perfetto.dev", err=True)
