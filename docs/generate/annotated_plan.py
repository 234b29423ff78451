"""docs/plan.svg: what `meshwright plan` prints, with a number on each part that docs/reading-a-plan.md explains."""

from __future__ import annotations

import io
from html import escape

from meshwright.cli.show.plan import plan_tables
from meshwright.planner import plan
from meshwright.schema import TrainingPlan
from rich.console import Console

MODEL, CLUSTER, BATCH, SEQ_LEN = "llama-3.1-70b", "256xH100-SXM-80GB", 1024, 8192

PARTS = (
    "step time", "memory per device", "layout", "batch", "where the time goes", "where the memory goes", "search",
    "runner-ups", "note",
)  # fmt: skip
"""First words of the lines that get a number, from the top."""

COLUMNS, LINE, LETTER, MARGIN = 92, 19, 8.43, 44

STYLE = """
text { font: 14px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; fill: #1f2328; white-space: pre }
.page { fill: #ffffff } .dot { fill: #0072b2 } .number { fill: #ffffff; font-weight: 700; text-anchor: middle }
@media (prefers-color-scheme: dark) {
text { fill: #f0f6fc } .page { fill: #0d1117 } .dot { fill: #3d9bd6 } .number { fill: #0d1117 } }"""


def drawing() -> str:
    """The picture of the plan of the request above."""
    return svg(plan(MODEL, CLUSTER, global_batch_size=BATCH, seq_len=SEQ_LEN))


def svg(best: TrainingPlan) -> str:
    """The printed form of a plan, numbered."""
    console = Console(file=io.StringIO(), width=COLUMNS, record=True)
    for table in plan_tables(best):
        console.print(table)
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    width, height = MARGIN + COLUMNS * LETTER + 12, len(lines) * LINE + 28
    numbers = {part: number for number, part in enumerate(PARTS, start=1)}
    body = []
    for row, line in enumerate(lines):
        y = 24 + row * LINE
        body.append(f'<text x="{MARGIN}" y="{y}">{escape(line)}</text>')
        part = next((part for part in numbers if line.startswith(f" {part}  ")), None)
        if part is not None:
            body.append(f'<circle class="dot" cx="22" cy="{y - 5}" r="9"/>')
            body.append(f'<text class="number" x="22" y="{y}">{numbers.pop(part)}</text>')
    assert not numbers, f"no line of the plan begins with {', '.join(numbers)}"
    title = f"What meshwright plan prints for {best.model.name} on {best.cluster.name}"
    return "\n".join((
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" role="img" aria-label="{escape(title)}">',
        f"<title>{escape(title)}</title><style>{STYLE}</style>",
        f'<rect class="page" width="{width:.0f}" height="{height}"/>',
        *body,
        "</svg>\n",
    ))  # fmt: skip
