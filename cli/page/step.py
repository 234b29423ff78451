"""Where the step goes, how sure that is, other layouts next to the plan, and memory: rows of bars for the page's template.

Every position and length is a percentage of the row, so that the page needs no width.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from ...planner.step_parts import step_parts
from ...schema.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from ...planner.explain.report import Explanation
    from ...schema import TrainingPlan


class Part(NamedTuple):
    """A row of the step: its group, its title, and the text that explains it."""

    group: str
    title: str
    text: str


PARTS = {
    "products_ideal": Part("useful", "products at the peak", "FLOPs of matrix products at the rate of the data sheet"),
    "attention_ideal": Part(
        "useful", "attention at the peak", "FLOPs of attention at that rate, its scores counted once"
    ),
    "products_loss": Part(
        "kernels", "products below the peak", "what matrix products take beyond that: their shapes, their clocks"
    ),
    "attention_loss": Part(
        "kernels", "attention below the peak", "what attention takes beyond that, scores made again included"
    ),
    "memory_bound": Part(
        "kernels", "memory-bound kernels", "norms, activations, rotary embeddings, residual sums, the loss"
    ),
    "parameter_copies": Part(
        "kernels", "copies of parameters", "casts, copies and sums of parameters and gradients between uses"
    ),
    "dispatch": Part("waiting", "waiting for dispatch", "the device is idle until the host launches the next kernel"),
    "host_copies": Part("waiting", "copies of activations", "copies to the host and back that outlast the passes"),
    "recompute": Part("kernels", "recompute", "activations made again in the backward pass"),
    "tp": Part("links", "tensor parallel", "exposed collectives within layers"),
    "cp": Part("links", "context parallel", "exposed exchange of keys and values"),
    "ep": Part("links", "tokens to experts", "tokens sent to their experts and back"),
    "dp": Part("links", "data parallel", "exposed gathering of parameters and reduction of gradients"),
    "pp": Part("links", "stage transfers", "activations and gradients between stages"),
    "bubble": Part("waiting", "pipeline bubble", "ranks that wait while the pipeline fills and drains"),
    "offload": Part("waiting", "waiting for the host", "copies from and to the host that nothing hides"),
    "optimizer": Part("kernels", "optimizer", "the update of the parameters"),
}
"""Parts of `step_parts` in the order of the page: from the arithmetic that a model needs to all that is added to it."""

GROUPS = {
    "useful": "arithmetic at the peak",
    "kernels": "lost in kernels",
    "links": "communication",
    "waiting": "waiting",
}

MINUS = "\N{MINUS SIGN}"
_LEADING_PERCENT = re.compile(r"^[+-][0-9.]+ %: ")
"""With which a reason begins; the row says it already."""

MIN_SHARE = 5e-4
"""Parts of the step below this are left out."""


def step_rows(plan: TrainingPlan) -> dict[str, Any]:
    """Return the parts of the step as bars that follow one another, and their sums by group."""
    parts, total = step_parts(plan), plan.estimate.step_time_s
    rows: list[dict[str, Any]] = []
    before = 0.0
    sums = dict.fromkeys(GROUPS, 0.0)
    for name, part in PARTS.items():
        seconds = parts.pop(name, 0.0)
        sums[part.group] += seconds / total
        if seconds >= MIN_SHARE * total:
            bar = {"left": 100 * before / total, "width": 100 * seconds / total}
            rows.append(part._asdict() | bar | {"time": format_seconds(seconds), "share": 100 * seconds / total})
        before += seconds
    assert not parts, f"the page has no row for {sorted(parts)}"
    return {
        "rows": rows,
        "total": format_seconds(total),
        "groups": [{"name": name, "title": title, "share": 100 * sums[name]} for name, title in GROUPS.items()],
    }


def layout_rows(plan: TrainingPlan, explanation: Explanation | None) -> dict[str, Any]:
    """Return the plan, its interval, its runner-ups and its front on one axis of seconds, each with its reason."""
    costs = plan.estimate
    interval = costs.step_time_interval_s
    rows = [(str(plan.layout), costs.step_time_s, costs.peak_reserved_bytes, "the plan", "plan")]
    rows += [(str(o.layout), o.step_time_s, o.peak_reserved_bytes, o.reason, "other") for o in plan.alternatives]
    margin = (costs.required_bytes or costs.peak_reserved_bytes) / costs.peak_reserved_bytes
    rows += [
        (
            str(point.layout),
            point.step_time_s,
            int(point.required_bytes / margin),
            "on the front: the fastest that needs no more memory",
            "front",
        )
        for point in plan.pareto
        if point.layout != plan.layout
    ]
    low = min(interval.low, *(seconds for _, seconds, *_ in rows))
    high = max(interval.high, *(seconds for _, seconds, *_ in rows))
    margin_s = 0.04 * (high - low)

    def position(seconds: float) -> float:
        return 100 * (seconds - low + margin_s) / (high - low + 2 * margin_s)

    lines = {str(each.layout): each for each in explanation.runner_ups} if explanation is not None else {}
    return {
        "band": {"left": position(interval.low), "width": position(interval.high) - position(interval.low)},
        "low": format_seconds(interval.low),
        "high": format_seconds(interval.high),
        "at": position(costs.step_time_s),
        "rows": [
            {
                "layout": layout,
                "at": position(seconds),
                "time": format_seconds(seconds),
                "difference": "" if kind == "plan" else _difference(seconds / costs.step_time_s - 1),
                "memory": format_bytes(memory),
                "reason": _LEADING_PERCENT.sub("", reason),
                "kind": kind,
                "lines": list(_differences(lines[layout])) if layout in lines and kind == "other" else [],
            }
            for layout, seconds, memory, reason, kind in rows
        ],
    }


def _difference(fraction: float) -> str:
    if abs(fraction) < 5e-4:
        return "as fast"
    return f"{'+' if fraction > 0 else MINUS}{100 * abs(fraction):.1f} %"


def _differences(other: Any) -> Iterator[tuple[str, str, str, str]]:
    """Yield what differs between the plan and another layout: name, of the plan, of the other, difference."""
    for name, ours, theirs in other.fields:
        yield name, ours, theirs, ""
    for values, show in ((other.time_s, format_seconds), (other.memory_bytes, format_bytes)):
        for name, (ours, theirs, difference) in values.items():
            if abs(difference) > 5e-3 * max(abs(ours), abs(theirs)):
                sign = "+" if difference > 0 else MINUS
                yield name, show(ours), show(theirs), sign + show(abs(difference))


MEMORY_TEXTS = {
    "parameters": "the shard that the device owns",
    "gradients": "held between the backward pass and the update",
    "optimizer": "states of the owned shard",
    "unsharded": "gathered or cast copies of parameters",
    "activations": "saved for the backward pass, of all micro-batches in flight",
    "logits": "logits and their gradient on the last stage",
    "temporary": "communication buffers and the working set of one layer",
}

MAX_STAGES = 32
"""Stages that have a row of memory each; of more, evenly many."""


def memory_rows(plan: TrainingPlan) -> dict[str, Any]:
    """Return the memory of one device of each stage against its budget; stages that are equal share a row."""
    costs = plan.estimate
    margin = (costs.required_bytes or costs.peak_reserved_bytes) / max(costs.peak_allocated_bytes, 1)
    of_budget = 100 * margin / costs.budget_bytes
    rows: list[dict[str, Any]] = []
    for s, stage in enumerate(costs.stages):
        if rows and rows[-1]["stage"] == (stage.memory_bytes, stage.device):
            rows[-1]["last"] = s
            continue
        rows.append({"first": s, "last": s, "stage": (stage.memory_bytes, stage.device)})
    if len(rows) > MAX_STAGES:
        rows = [rows[round(k * (len(rows) - 1) / (MAX_STAGES - 1))] for k in range(MAX_STAGES)]
    return {
        "terms": [
            {"name": name, "text": text, "size": format_bytes(getattr(costs.memory_bytes, name))}
            for name, text in MEMORY_TEXTS.items()
            if getattr(costs.memory_bytes, name)
        ],
        "rows": [
            {
                "title": _stage_title(row, len(costs.stages)),
                "need": format_bytes(margin * row["stage"][0].total),
                "bars": [
                    {"name": name, "width": of_budget * size, "size": format_bytes(size)}
                    for name in MEMORY_TEXTS
                    if (size := getattr(row["stage"][0], name))
                ],
            }
            for row in rows
        ],
        "budget": format_bytes(costs.budget_bytes),
        "margin": f"{margin:.2f}",
    }


def _stage_title(row: dict[str, Any], num_stages: int) -> str:
    device = f" on {row['stage'][1]}" if row["stage"][1] else ""
    if num_stages == 1:
        return "every device"
    first, last = row["first"], row["last"]
    return (f"rank {first} of the pipeline" if first == last else f"ranks {first}\N{EN DASH}{last}") + device
