"""docs/tour.md: one plan followed through the files that make it, with the figures of every step."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from markdown import table
from meshwright.cost_models.stage.bounds import memory_bounds, quick_time_bounds, time_bounds
from meshwright.planner.request import PlanRequest
from meshwright.planner.space import build_space
from meshwright.planner.tasks.training import plan_layout, search_layouts
from meshwright.schema import ClusterSpec, ModelSpec, Workload
from meshwright.schema.units import GIB

ROOT = Path(__file__).resolve().parents[2]

MODEL, CLUSTER, GLOBAL_BATCH_SIZE, SEQ_LEN = "llama-3.1-8b", "8xH100-SXM-80GB", 64, 8192

MAX_FILES, MAX_LINES = 22, 4050
"""What can be read in an afternoon of four hours, at 1,000 lines an hour."""


class Stop(NamedTuple):
    """A file, the names in it to read (none: all of it), and what happens there; ``{...}`` are figures of the example."""

    path: str
    names: tuple[str, ...]
    text: str


STOPS = (
    Stop(
        "schema/model.py",
        ("ModelSpec",),
        "`ModelSpec.named` reads the published config.json. {model} is a run-length list of layers: an embedding, {num_blocks} "
        "equal blocks, a head; {num_params:,} parameters, to the last one.",
    ),
    Stop(
        "schema/cluster.py",
        ("ClusterSpec",),
        "`ClusterSpec.parse` makes one node of eight {device} of the text, joined by NVLink: one link level, {budget:.1f} GiB of "
        "each device that a plan may use.",
    ),
    Stop(
        "schema/task.py",
        ("Phase", "Workload"),
        "A step is one phase with a backward pass: {global_batch_size} sequences of {seq_len} tokens in bf16, AdamW.",
    ),
    Stop(
        "schema/layout.py",
        ("Degrees", "LayoutField", "Layout"),
        "The annotated fields of `Layout` are the table of parallel axes and choices. What follows from "
        "them, such as how many ranks "
        "share gradients, is stated once in `Degrees`, for one layout and for arrays of layouts.",
    ),
    Stop(
        "schema/layout_rules.py",
        ("ProblemFacts", "Rule"),
        "What cannot be executed: named predicates that work on numbers and on arrays, each with its reason. Here {excluded} "
        "combinations fall to {num_rules} rules, such as `{rule}`.",
    ),
    Stop(
        "planner/plan.py",
        ("plan", "plan_training"),
        "The method in the order in which it happens. Everything below is called from here.",
    ),
    Stop(
        "planner/space.py",
        ("DegreeGroups", "Space", "build_space", "_Sieve", "_grouped", "Pool", "Frontier"),
        "{num_layouts:,} layouts pass the rules, in {num_groups} groups that share their degrees. Row {row} "
        "of the pool is followed "
        "from here: `{row_layout}`.",
    ),
    Stop(
        "schema/layout_table.py",
        ("LayoutTable",),
        "The layouts as arrays, one entry each. They differ in {num_layouts:,} ways, but in only {num_cases} "
        "of them differs what one "
        "layer does with one micro-batch (`LayoutTable.within_layer`).",
    ),
    Stop(
        "cost_models/layer/operators.py",
        (),
        "A block is a list of operators with shapes: products, attention, what is bound by memory.",
    ),
    Stop(
        "cost_models/hardware/compute.py",
        ("operator_time",),
        "Seconds of an operator on a device: a calibrated roofline times a learned residual.",
    ),
    Stop(
        "cost_models/layer/layer.py",
        ("LayerCost", "within_layer_cost", "with_data_parallel"),
        "Operators, host, communication, parameters and saved tensors of a layer added up, for every case at "
        "once. A block of our "
        "row: {forward_ms:.2f} ms forward, {backward_ms:.2f} ms backward, {gather_ms:.2f} ms to gather over data.",
    ),
    Stop(
        "cost_models/stage/table.py",
        ("CostTable",),
        "The costs of every kind of layer under every layout; what a step adds to their sum is in per_step.py.",
    ),
    Stop(
        "cost_models/stage/bounds.py",
        (
            "quick_time_bounds",
            "uniform_time_bounds",
            "pipeline_work",
            "slowest_stage_s",
            "memory_bounds",
        ),
        "Without cutting a layout into stages: our row takes at least {quick_s:.3f} s by its work alone, "
        "{bound_s:.3f} s by its full "
        "bound, and {bound_gib:.1f} GiB.",
    ),
    Stop(
        "solvers/branch_and_bound.py",
        ("Node", "Leaf", "Step", "Problem", "Stop", "Answer", "Search"),
        "The one best-first loop of all searches. It ends when no open bound is below the incumbent.",
    ),
    Stop(
        "planner/search.py",
        ("Scouts", "LayoutProblem", "search"),
        "The layouts as a problem of that loop: {evaluated} of {num_layouts:,} are expanded, {pruned:,} "
        "excluded by their bounds.",
    ),
    Stop(
        "planner/expand.py",
        ("Candidate", "expand", "expand_fitting", "_expand_as_listed"),
        "A layout becomes a candidate: its layers are cut into stages ({stages}), its ranks mapped to devices, its step costed.",
    ),
    Stop(
        "solvers/stages/splits.py",
        ("StageSplitInstance", "solve_stages", "check_stages"),
        "The cut, exactly: a dynamic program whose answer `check_stages` verifies without knowing the method.",
    ),
    Stop(
        "cost_models/stage/memory.py",
        ("stage_memory", "required_bytes"),
        "Bytes of a stage: {memory}; {required:.1f} GiB with what the allocator reserves, of {budget:.1f}.",
    ),
    Stop(
        "cost_models/stage/step.py",
        ("estimate_step", "pipeline_s", "estimate_from_terms"),
        "Seconds of the step: {step_s:.3f}, between {low_s:.2f} and {high_s:.2f}: {breakdown}.",
    ),
    Stop(
        "planner/tasks/training.py",
        ("search_layouts", "build_plan", "plan_layout"),
        "A plain layout that may be as fast as the fastest is taken: {plan_layout}, {plan_s:.3f} s, with its certificate: "
        "objective {objective_s:.3f} s, no layout below {proved_s:.3f} s.",
    ),
    Stop(
        "schema/training_plan.py",
        ("TrainingEstimate", "TrainingPlan"),
        "The document that `plan` writes and every other command reads.",
    ),
    Stop(
        "runtime/parallelize_model.py",
        (),
        "On the cluster: each axis of the plan is applied to the model by one function of its own file, in order.",
    ),
)


@cache
def figures() -> dict[str, Any]:
    """Plan the example; return the figures that the page shows."""
    model, cluster = ModelSpec.named(MODEL), ClusterSpec.parse(CLUSTER)
    request = PlanRequest.create(model, cluster, Workload(seq_len=SEQ_LEN, global_batch_size=GLOBAL_BATCH_SIZE))
    space = build_space(request)
    result = search_layouts(request, space, runner_ups=4)
    plan, costs = plan_layout(request, result, top=4), result.costs
    chosen = next(c for c in result.feasible if c.layout(costs.layouts) == plan.layout)
    row, block = chosen.idx, next(kind for kind, layer in enumerate(costs.kinds) if layer.is_block)
    cost, estimate = costs.by_kind[block], plan.estimate
    excluded = {name: count for name, count in space.excluded.items() if count}
    terms = {name: seconds for name, seconds in estimate.breakdown_s.model_dump().items() if seconds > 0}
    memory = {name: size for name, size in estimate.memory_bytes.model_dump().items() if size > 0}
    return {
        "model": MODEL,
        "num_blocks": model.num_blocks,
        "num_params": model.num_params,
        "device": cluster.weakest_device.name,
        "budget": cluster.memory_budget_bytes / GIB,
        "global_batch_size": GLOBAL_BATCH_SIZE,
        "seq_len": SEQ_LEN,
        "excluded": sum(excluded.values()),
        "num_rules": len(excluded),
        "rule": max(excluded, key=lambda name: excluded[name]),
        "num_layouts": len(space),
        "num_groups": len(space.groups or ()),
        "row": row,
        "row_layout": costs.layouts.layout(row),
        "num_cases": len(costs.by_case[block].forward_s),
        "forward_ms": 1e3 * cost.forward_s[row],
        "backward_ms": 1e3 * cost.backward_s[row],
        "gather_ms": 1e3 * cost.gather_s[row],
        "quick_s": quick_time_bounds(costs)[row],
        "bound_s": time_bounds(costs)[row],
        "bound_gib": memory_bounds(costs)[row] / GIB,
        "evaluated": plan.search.evaluated,
        "pruned": plan.search.pruned,
        "stages": "one stage of all of them" if plan.layout.pp == 1 else f"{len(plan.stages)} stages",
        "memory": ", ".join(f"{name} {size / GIB:.1f} GiB" for name, size in memory.items()),
        "required": estimate.required_bytes / GIB,
        "step_s": estimate.step_time_s,
        "low_s": estimate.step_time_interval_s.low,
        "high_s": estimate.step_time_interval_s.high,
        "breakdown": ", ".join(f"{name} {seconds:.3f}" for name, seconds in terms.items()),
        "plan_layout": f"`{plan.layout}`",
        "plan_s": estimate.step_time_s,
        "objective_s": plan.search.objective,
        "proved_s": plan.search.bound,
    }


def num_lines(stop: Stop) -> int:
    """Count the lines that a stop asks to read: the head of the file and the named definitions, or all of it.

    Raises:
        LookupError: the file does not define a name.
    """
    text = (ROOT / stop.path).read_text()
    body = ast.parse(text).body
    if not stop.names:
        return len(text.splitlines())
    defined = {node.name: node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    if missing := set(stop.names) - defined.keys():
        raise LookupError(f"{stop.path} does not define {', '.join(sorted(missing))}")
    nodes = [body[0], *(defined[name] for name in stop.names)]
    return sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in nodes)


def page() -> str:
    """Return the page."""
    command = f"meshwright plan {MODEL} --cluster {CLUSTER} --global-batch-size {GLOBAL_BATCH_SIZE} --seq-len {SEQ_LEN}"
    rows = []
    for idx, stop in enumerate(STOPS, 1):
        what = ", ".join(f"`{name}`" for name in stop.names) or "all of it"
        rows.append((str(idx), f"[{stop.path}](../{stop.path})", what, str(num_lines(stop))))
    lines = [
        "# A tour of the code",
        "",
        f"One plan, followed through the {len(STOPS)} files that make it: {sum(map(num_lines, STOPS)):,} "
        "lines, an afternoon. Have "
        "[the glossary](glossary.md) next to you; every formula is in [method](method.md).",
        "",
        "```bash",
        command,
        "```",
        "",
        "Nouns come first (`schema/`), then the method from above (`planner/`), what it asks for "
        "(`cost_models/`, `solvers/`), and what "
        "runs the answer (`runtime/`). The figures below are those of this command, written by `make docs`.",
        "",
        *table(("", "file", "read", "lines"), rows),
        "",
    ]
    for idx, stop in enumerate(STOPS, 1):
        lines += [f"{idx}. **{stop.path}** {stop.text.format(**figures())}"]
    lines += [
        "",
        "From here: a rule is in `schema/layout_rules.py`, what an engine does in `schema/engine_facts.py`, a cost in the folder "
        "of what it is a cost of, a "
        "problem in `solvers/`, an axis in the file of `runtime/` that has its name, a command in `cli/`. "
        "What another engine is told "
        "is one file in `engines/`.",
    ]
    return "\n".join(lines)
