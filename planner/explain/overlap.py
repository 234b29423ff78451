"""What overlap is worth to a plan: what communication within layers adds to its step, and what every mode would make of it.

A mode that the engine has and the plan has not is estimated in its place, with the stages as they are, or refused by the rule that
forbids it. By half-batches each kind of layer is told by itself: (V1) to (V5) of cost_models/layer/overlap.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from ...cost_models.layer.operators import CostInputs
from ...cost_models.layer.overlap import is_chosen, supported
from ...cost_models.layer.passes import passes_in_mode
from ...schema import Layout, TrainingPlan
from ...schema.layout_rules import ENGINE_RULES, broken_rules, problem_on
from ...schema.layout_table import RECOMPUTES
from ...schema.units import format_seconds
from ..planned_stages import costed_stages, reestimate

MODES = {"tp_overlap": "tp", "tp_halves": "tp", "ep_overlap": "ep"}
"""Switches that let communication within layers run with compute, and the part of the step that it adds to."""

_TENSOR_PARALLEL = ("tp_overlap", "tp_halves")

_NAMES = {"tp": "tensor parallelism", "ep": "experts"}


def value_of_overlap(plan: TrainingPlan, step_s: float) -> Iterator[str]:
    """Yield what communication within layers adds to the step, and what each mode that the plan has not would change.

    ``step_s`` is the plan's step, estimated by this version.
    """
    engine, added = plan.workload.engine_facts, plan.estimate.breakdown_s.model_dump()
    for axis in ("tp", "ep"):
        modes = [name for name, of_axis in MODES.items() if of_axis == axis and name in engine.switches]
        if not (modes and added[axis] > 0):
            continue
        others = [_other(plan, name, step_s) for name in modes if not getattr(plan.layout, name)]
        if plan.layout.tp_halves and axis == "tp":
            others += _by_kind(plan)
        share = f"{format_seconds(added[axis])} of communication of {_NAMES[axis]} adds to the step ({added[axis] / step_s:.1%})"
        yield "; ".join([f"overlap: {share}, no mode can save more", *others])


def _other(plan: TrainingPlan, name: str, step_s: float) -> str:
    switches = dict.fromkeys(_TENSOR_PARALLEL, False) if name in _TENSOR_PARALLEL else {}
    layout = plan.layout.replace(**{**switches, name: True})
    if broken := _broken(plan, layout):
        return f"{name}=true cannot be: {broken[0]}"
    other_s = reestimate(plan.replace(layout=layout, unhalved_layers=()), plan.cluster).step_time_s
    change = 100 * (other_s / step_s - 1)
    return f"with {name}=true it would take {abs(change):.1f} % {'longer' if change >= 0 else 'less'}"


def _broken(plan: TrainingPlan, layout: Layout) -> tuple[str, ...]:
    problem = problem_on(plan.model, plan.workload, plan.cluster)
    return broken_rules(layout, problem, (*ENGINE_RULES, *(plan.workload.engine_facts.rules or ())))


def _by_kind(plan: TrainingPlan) -> Iterator[str]:
    """Yield what a micro-batch takes in each kind of layer that may run by half-batches, by what it recomputes, in either mode."""
    costs = costed_stages(plan).costs
    first, layers = costs.layouts.select(np.zeros(1, dtype=np.int64)), list(plan.model.iter_layers())
    recomputes = {idx: stage.recompute_of(idx) for stage in plan.stages for idx in stage.layer_idxs}
    counts = Counter((layer, recomputes[idx]) for idx, layer in enumerate(layers))
    for (kind, recompute), count in counts.items():
        layouts = first.replace(recompute=np.full_like(first.recompute, RECOMPUTES.index(recompute)))
        inputs = CostInputs(hidden_dim=plan.model.hidden_dim, layouts=layouts, scenario=costs.scenario)
        if not supported(kind, inputs).all() or not is_chosen(inputs):
            continue
        halved, entire = (float(passes_in_mode(kind, inputs, by_halves=on).busy_s[0]) for on in (True, False))
        what = "" if recompute == "none" else f", {recompute} recompute"
        yield (
            f"{count} x {format_seconds(halved)} by half-batches{what}, {format_seconds(entire)} entire "
            f"({'+' if halved > entire else '-'}{100 * abs(halved / entire - 1):.1f} %)"
        )
