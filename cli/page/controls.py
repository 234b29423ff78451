"""What the studio's controls ask for, and the plan that answers it, with the figures that two plans are compared by.

A what-if changes the cluster before it is planned for: the rate of the outermost link, the memory of each device, its price.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from ...cost_models.stage.step import has_power_limits, step_energy_j
from ...planner import plan as fastest
from ...planner.explain.marginal_values import with_bandwidth, with_memory
from ...planner.request import Deadline
from ...schema import ClusterSpec, ModelSpec, TrainingPlan
from ...schema.base import Count, Frozen, NonNegativeFloat
from ...schema.engine_facts import OWN_ENGINE, Engine
from ...schema.layout import parse_assignments
from ...schema.task import Workload
from ...schema.units import format_bytes, format_count, format_seconds
from ..plan_options import TrainingOptions

if TYPE_CHECKING:
    from ...solvers.branch_and_bound import OnProgress

Factor = Annotated[float, Field(ge=0.1, le=10)]
Text = Annotated[str, Field(max_length=300)]

TIME_LIMIT_S = 30.0
"""A search that takes longer is shown with what it has until then, and its gap."""


class Controls(Frozen):
    """A state of the controls.

    Attributes:
        precision: empty: the best one that the devices have.
        fix: layout fields to keep, as in `--fix`.
        headroom_percent: of each device's budget, to be left free.
        bandwidth: times the rate of the outermost link; memory: times that of each device.
        price_per_hour: USD for one device; 0: as the catalogue says.
    """

    model: Text
    cluster: Text
    global_batch_size: Count
    seq_len: Count
    engine: Engine = OWN_ENGINE
    precision: Text = ""
    fix: Text = ""
    headroom_percent: Annotated[float, Field(ge=0, le=50)] = 0.0
    bandwidth: Factor = 1.0
    memory: Factor = 1.0
    price_per_hour: NonNegativeFloat = 0.0

    @classmethod
    def of_plan(cls, plan: TrainingPlan) -> Controls:
        """Return the controls that ask for a plan again, as far as they can."""
        work = plan.workload
        return cls(
            model=plan.model.name,
            cluster=plan.cluster.name,
            global_batch_size=work.global_batch_size,
            seq_len=work.seq_len,
            engine=work.engine,
            precision=work.precision,
            fix=plan.provenance.fixed,
        )

    def plan(self, deadline: Deadline, on_progress: OnProgress | None = None) -> TrainingPlan:
        """Return the fastest plan; raises like `planner.plan`."""
        model, cluster = ModelSpec.resolve(self.model.strip()), self.changed(ClusterSpec.parse(self.cluster.strip()))
        defaults = {name: _default(name) for name in TrainingOptions.model_fields if name in Workload.model_fields}
        given = {"global_batch_size": self.global_batch_size, "seq_len": self.seq_len, "engine": self.engine}
        options = TrainingOptions(**(defaults | given))
        workload = options.workload(model, cluster, self.precision or None)
        fixed = parse_assignments(self.fix)
        return fastest(model, cluster, workload, fixed=fixed, deadline=deadline, on_progress=on_progress)

    def changed(self, cluster: ClusterSpec) -> ClusterSpec:
        """Return the cluster with what the controls change of it."""
        if self.bandwidth != 1:
            outermost = len(cluster.levels) - 1
            rate = cluster.levels[outermost].link.bandwidth_bytes_per_s
            cluster = with_bandwidth(cluster, outermost, (self.bandwidth - 1) * rate)
        if self.memory != 1:
            cluster = with_memory(cluster, int((self.memory - 1) * cluster.weakest_device.memory_bytes))
        if self.headroom_percent:
            cluster = cluster.with_budget(int((1 - self.headroom_percent / 100) * cluster.memory_budget_bytes))
        return cluster

    def usd_per_billion_tokens(self, plan: TrainingPlan) -> float | None:
        """Return what 1e9 tokens cost at the price of the controls, or else of the catalogue; None without one."""
        price = plan.cluster.price_per_hour
        if self.price_per_hour:
            price = self.price_per_hour * plan.cluster.num_devices
        return None if price is None else price / 3600 / plan.estimate.tokens_per_s * 1e9


def _default(name: str) -> Any:
    return Workload.model_fields[name].get_default(call_default_factory=True)


def figures(plan: TrainingPlan, controls: Controls) -> list[dict[str, Any]]:
    """Return what two plans are compared by: name, text, the number behind it, and whether less of it is better."""
    return [
        {"name": name, "text": text, "value": value, "less": less}
        for name, text, value, less in _figures(plan, controls)
    ]


def _figures(plan: TrainingPlan, controls: Controls) -> Iterator[tuple[str, str, float | None, bool]]:
    costs = plan.estimate
    yield "step", format_seconds(costs.step_time_s), costs.step_time_s, True
    yield "tokens/s", format_count(costs.tokens_per_s), costs.tokens_per_s, False
    yield "MFU", f"{100 * costs.mfu:.1f} %", costs.mfu, False
    need = costs.required_bytes or costs.peak_reserved_bytes
    yield "memory", format_bytes(need), float(need), True
    usd = controls.usd_per_billion_tokens(plan)
    yield "USD for 1e9 tokens", "no price" if usd is None else f"{usd:,.0f}", usd, True
    if has_power_limits(plan.cluster):
        joules = step_energy_j(costs, plan.cluster) / plan.workload.tokens_per_step
        yield "J a token", f"{joules:.3g}", joules, True
    yield "model", plan.model.name, None, True
    what_if = {"link": controls.bandwidth, "memory": controls.memory}
    changes = [f"{name} x {factor:.2g}" for name, factor in what_if.items() if factor != 1]
    yield "cluster", ", ".join([controls.cluster, *changes]), None, True
    yield "batch", f"{plan.workload.global_batch_size:,} x {plan.workload.seq_len:,}", None, True
    yield "engine", plan.workload.engine, None, True
    yield "layout", str(plan.layout), None, True


def progress(evaluated: int, incumbent_s: float | None, bound_s: float) -> dict[str, Any]:
    """Return a state of the search as the page shows it."""
    gap = 1.0 if incumbent_s is None else max(0.0, 1 - bound_s / incumbent_s)
    return {
        "kind": "progress",
        "evaluated": evaluated,
        "incumbent": "" if incumbent_s is None else format_seconds(incumbent_s),
        "bound": format_seconds(bound_s) if math.isfinite(bound_s) else "",
        "gap": round(100 * gap, 2),
    }
