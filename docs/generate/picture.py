"""docs/picture.svg: a step of a plan pass by pass, and the memory of each stage, from the tool's own answer.

Legible at 400 pixels, where a letter is 12 pixels high. Colours follow the reader's light or dark theme.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from meshwright.planner import plan
from meshwright.planner.timeline import timeline
from meshwright.schema import ClusterSpec, ModelSpec, TrainingPlan, Workload
from meshwright.schema.trace import Slice
from meshwright.schema.units import GIB, format_seconds

MODEL, CLUSTER, BATCH, SEQ_LEN, FIXED = "llama-3.1-70b", "64xH100-SXM-80GB", 16, 8192, {"pp": 4}

WIDTH, MARGIN, FONT = 800, 24, 24
LEFT, STEP_RIGHT, MEMORY_LEFT, MEMORY_RIGHT = 118, 530, 566, 776
ROW, GAP, TOP = 44, 14, 150

KINDS = {
    "F": ("forward", "forward"),
    "BW": ("backward", "backward"),
    "B": ("backward", "backward"),
    "W": ("weights", "weights"),
}
PARTS = {
    "states": ("parameters", "gradients", "optimizer", "unsharded"),
    "activations": ("activations", "logits"),
    "temporary": ("temporary",),
}

STYLE = """
text { font: 24px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328 }
.title { font-weight: 600 } .quiet { fill: #59636e } .page { fill: #ffffff } .line { stroke: #59636e; stroke-width: 2 }
.forward { fill: #0072b2 } .backward { fill: #e69f00 } .weights { fill: #f0e442 } .other { fill: #8c959f }
.states { fill: #009e73 } .activations { fill: #56b4e9 } .temporary { fill: #8c959f } .limit { stroke: #d55e00; stroke-width: 4 }
.full { fill: #d55e00 }
@media (prefers-color-scheme: dark) {
text { fill: #f0f6fc } .quiet { fill: #9198a1 } .page { fill: #0d1117 } .line { stroke: #9198a1 }
.forward { fill: #3d9bd6 } .other, .temporary { fill: #656c76 } .limit { stroke: #ff8a3d }
.full { fill: #ff8a3d }
}"""


def drawing() -> str:
    """The picture of the request above."""
    workload = Workload(seq_len=SEQ_LEN, global_batch_size=BATCH)
    return svg(plan(ModelSpec.named(MODEL), ClusterSpec.parse(CLUSTER), workload, fixed=FIXED))


def svg(best: TrainingPlan) -> str:
    """A plan of several stages as a picture."""
    steps = timeline(best)
    num_rows = len(steps.ranks)
    bottom = TOP + num_rows * (ROW + GAP)
    height = bottom + 152
    body = [
        f'<rect class="page" width="{WIDTH}" height="{height}" rx="12"/>',
        *_title(best),
        *(_text(LEFT - 10, TOP + rank * (ROW + GAP) + 31, f"rank {rank}", anchor="end") for rank in range(num_rows)),
        *_passes(steps.slices, steps.step_time_s),
        *_memory(best),
        *_below(best, bottom),
        *_legend(steps.slices, bottom + 86),
    ]
    label = f"A training step of {best.model.name} on the {num_rows} ranks of a pipeline, and the memory of each"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">'
    return "\n".join([head, f"<style>{STYLE}\n</style>", *body, "</svg>"]) + "\n"


def _title(best: TrainingPlan) -> list[str]:
    group = best.cluster.groups[0]
    found = best.estimate
    return [
        _text(MARGIN, 42, f"{best.model.name} on {best.cluster.num_devices} x {group.device.name}", "title"),
        _text(MARGIN, 78, str(best.layout).split(" zero")[0].split(" micro")[0], "quiet"),
        _text(LEFT, TOP - 22, f"one step: {format_seconds(found.step_time_s)}"),
        _text(MEMORY_LEFT, TOP - 22, "memory, GiB"),
    ]


def _passes(slices: Sequence[Slice], step_s: float) -> list[str]:
    """One path a kind: rectangles of all its passes."""
    scale = (STEP_RIGHT - LEFT) / step_s
    paths: dict[str, list[str]] = {}
    for piece in slices:
        style = KINDS[piece.kind][0] if piece.kind in KINDS else "other"
        x, width = LEFT + scale * piece.start_s, max(scale * piece.seconds - 0.6, 0.4)
        y = TOP + piece.rank * (ROW + GAP)
        paths.setdefault(style, []).append(f"M{x:.1f} {y}h{width:.1f}v{ROW}h-{width:.1f}z")
    return [f'<path class="{style}" d="{"".join(parts)}"/>' for style, parts in paths.items()]


def _memory(best: TrainingPlan) -> list[str]:
    scale = (MEMORY_RIGHT - MEMORY_LEFT) / best.estimate.budget_bytes
    drawn = []
    for rank, stage in enumerate(best.estimate.stages):
        x, y = float(MEMORY_LEFT), TOP + rank * (ROW + GAP)
        for style, names in PARTS.items():
            width = scale * sum(getattr(stage.memory_bytes, name) for name in names)
            drawn.append(f'<rect class="{style}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW}"/>')
            x += width
    bottom = TOP + len(best.estimate.stages) * (ROW + GAP)
    drawn.append(f'<path class="limit" d="M{MEMORY_RIGHT} {TOP - 6}V{bottom - GAP + 6}"/>')
    return drawn


def _below(best: TrainingPlan, bottom: int) -> list[str]:
    """The ends of both scales."""
    limit = f"{best.estimate.budget_bytes / GIB:.0f}"
    return [
        f'<path class="line" d="M{LEFT} {bottom}H{STEP_RIGHT}M{MEMORY_LEFT} {bottom}H{MEMORY_RIGHT}"/>',
        _text(LEFT, bottom + 28, "0", "quiet"),
        _text(STEP_RIGHT, bottom + 28, format_seconds(best.estimate.step_time_s), "quiet", anchor="end"),
        _text(MEMORY_LEFT, bottom + 28, "0", "quiet"),
        _text(MEMORY_RIGHT, bottom + 28, limit, "quiet", anchor="end"),
    ]


def _legend(slices: Sequence[Slice], y: int) -> list[str]:
    """What the colours of the passes mean, and below it those of the memory."""
    passes = {KINDS[piece.kind][1]: KINDS[piece.kind][0] for piece in slices if piece.kind in KINDS}
    memory = {"states": "states", "activations": "activations", "temporary": "temporary"}
    return [*_row(y, {**passes, "update and rest": "other"}), *_row(y + 40, {**memory, "all there is": "full"})]


def _row(y: int, named: dict[str, str]) -> list[str]:
    x, drawn = float(MARGIN), []
    for name, style in named.items():
        drawn += [f'<rect class="{style}" x="{x:.0f}" y="{y - 19}" width="22" height="22"/>', _text(x + 30, y, name)]
        x += 30 + 13 * len(name) + 22
    return drawn


def _text(x: float, y: float, words: str, style: str = "", anchor: str = "start") -> str:
    about = f' class="{style}"' if style else ""
    side = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{x:.0f}" y="{y:.0f}"{about}{side}>{escape(words)}</text>'
