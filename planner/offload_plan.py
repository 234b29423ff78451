"""A plan's own offload schedule as a problem and a choice (solvers/offload_instance.py): to cost, compare and draw it again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..cost_models.layouts import LayoutBatch
from ..cost_models.option_costs import OptionCosts
from ..cost_models.space_costs import SpaceCosts
from ..schema import ClusterSpec, Estimate, Layout, Plan
from ..schema.model import Block
from ..solvers.offload_instance import Choice, Instance
from ..solvers.offload_simulation import simulate
from .offload_costs import OFFLOAD_OF, RECOMPUTE_OF, estimate_of, instances_of
from .offload_request import OffloadRequest


@dataclass(frozen=True)
class Scheduled:
    """Costs of the plan's layout (row 0), its problem, and what its schedule chooses."""

    options: OptionCosts
    instance: Instance
    choice: Choice
    prefetch: int

    @property
    def estimate(self) -> Estimate:
        """What this version says of the plan's schedule."""
        found = simulate(self.instance, self.choice, prefetch=self.prefetch)
        return estimate_of(self.options, 0, self.instance, self.choice, found)


def scheduled(plan: Plan) -> Scheduled:
    """The schedule of a plan that has one."""
    schedule, request = plan.offload, OffloadRequest.of(plan)
    assert schedule is not None and request is not None
    options, choice = options_of(plan, plan.cluster), choice_of(plan)
    problems = instances_of(options, 0, request)
    return Scheduled(options, problems[-1 if choice.parameters.any() else 0], choice, schedule.prefetch_layers)


def options_of(plan: Plan, cluster: ClusterSpec) -> OptionCosts:
    """Costs of the plan's layout on a cluster (row 0), whatever its blocks recompute."""
    layout = free_of_schedule(plan.layout)
    batch = LayoutBatch.of([layout], plan.workload.global_batch_size)
    return OptionCosts.of(SpaceCosts.of(plan.model, plan.workload, cluster, batch))


def free_of_schedule(layout: Layout) -> Layout:
    """A layout with neither an offload schedule nor one recompute for all blocks."""
    return layout.replace(offload="none", recompute="mixed")


def choice_of(plan: Plan) -> Choice:
    """What a plan's stage and schedule say of each layer."""
    schedule, stage = plan.offload, plan.stages[0]
    assert schedule is not None
    layers = list(plan.model.iter_layers())
    said = list(zip(RECOMPUTE_OF, OFFLOAD_OF, strict=True))
    options = [
        said.index((stage.recompute_of(idx), stage.offload_of(idx))) if isinstance(layer, Block) else 0
        for idx, layer in enumerate(layers)
    ]
    named = (
        schedule.host_optimizer_layers,
        schedule.streamed_optimizer_layers,
        schedule.streamed_parameter_layers,
        schedule.storage_optimizer_layers,
    )
    masks = [np.isin(np.arange(len(layers)), np.array(idxs, dtype=np.int64)) for idxs in named]
    return Choice(
        option=np.array(options, dtype=np.int64),
        host_optimizer=masks[0],
        streamed_optimizer=masks[1],
        parameters=masks[2],
        storage=masks[3],
    )
