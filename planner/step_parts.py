"""What a plan's step is spent on: its terms of the estimate, with compute taken apart (cost_models/layer/parts.py)."""

from __future__ import annotations

from ..cost_models.stage.parts import compute_parts
from ..schema import TrainingPlan
from .planned_stages import costed_stages


def step_parts(plan: TrainingPlan) -> dict[str, float]:
    """Return the seconds of each part of a plan's step by name: ComputeParts, then the other fields of TimeBreakdown.

    They sum to the step of the plan. Where another version made the plan and costs its compute differently, the parts of compute
    are those of this version, scaled to the plan's.

    Raises:
        ConfigError: this version cannot cost the plan's layout.
    """
    terms, stages = plan.estimate.breakdown_s, costed_stages(plan)
    parts = compute_parts(stages.costs, 0, stages.boundaries, stages.pool_of_stage)
    scale = terms.compute / sum(parts)
    others = {name: getattr(terms, name) for name in type(terms).model_fields if name != "compute"}
    return {name: scale * seconds for name, seconds in parts._asdict().items()} | others
