"""Plans of many micro-batches, rehearsed with few of them and with a round more: every further one adds as much as those do.

A pipeline of p stages holds the activations of no more micro-batches than 4 p ask for (cost_models/pipeline/in_flight.py); beyond,
each has buffers of its own that stay for the step, and sends and computes what the others do. Not so under gpipe.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...schema.rehearsal import CollectiveCount, Rehearsal, RehearsedKind
from ...schema.schedules import SCHEDULES
from ...schema.training_plan import TrainingPlan


def with_few_passes(plan: TrainingPlan) -> tuple[TrainingPlan, TrainingPlan] | None:
    """Return the plan with enough micro-batches and with a round more; None where it has not many more, or they are not alike."""
    pp = plan.layout.pp
    enough = max(4 * pp, 8)
    is_alike = plan.is_even and not plan.pipeline_order and plan.offload is None and plan.workload.has_backward
    all_first = pp > 1 and SCHEDULES[plan.layout.schedule].all_forward_first
    if plan.num_microbatches <= 2 * (enough + pp) or not is_alike or all_first:
        return None
    each = plan.layout.dp * plan.layout.micro_batch_size
    few, more = (
        plan.replace(workload=plan.workload.replace(global_batch_size=count * each)) for count in (enough, enough + pp)
    )
    return few, more


@dataclass(frozen=True)
class Extrapolation:
    """From what a plan does with two numbers of micro-batches to what it does with all of them."""

    few: TrainingPlan
    more: TrainingPlan
    plan: TrainingPlan

    def of(self, few: Rehearsal, more: Rehearsal) -> Rehearsal:
        """Return the rehearsal of the plan; of one that fails, that of the few."""
        if not (few.runs and more.runs):
            return few
        kinds = tuple(self._kind(a, b) for a, b in zip(few.kinds, more.kinds, strict=True))
        fits = all(kind.peak_reserved_bytes <= more.budget_bytes for kind in kinds)
        note = f"{self.more.num_microbatches} of {self.plan.num_microbatches} micro-batches, the others as those do"
        names = sorted(few.time_parts | more.time_parts)
        parts = {name: self._sum_s(few.time_parts.get(name, 0.0), more.time_parts.get(name, 0.0)) for name in names}
        return more.replace(kinds=kinds, fits=fits, notes=(*more.notes, note), time_parts=parts)

    def _sum_s(self, few: float, more: float) -> float:
        rounds = (self.plan.num_microbatches - self.more.num_microbatches) / self.plan.layout.pp
        return more + (more - few) * rounds

    def _number(self, few: int, more: int) -> int:
        return round(self._sum_s(few, more))

    def _kind(self, few: RehearsedKind, more: RehearsedKind) -> RehearsedKind:
        allocated = self._number(few.peak_allocated_bytes, more.peak_allocated_bytes)
        added = allocated - more.peak_allocated_bytes  # the allocator's rounding is no part of what a round adds
        worst = None
        if few.worst_allocated_bytes is not None and more.worst_allocated_bytes is not None:
            worst = self._number(few.worst_allocated_bytes, more.worst_allocated_bytes)
        return more.replace(
            peak_allocated_bytes=allocated, peak_reserved_bytes=more.peak_reserved_bytes + added,
            expandable_reserved_bytes=more.expandable_reserved_bytes + added, worst_allocated_bytes=worst,
            memory_bytes={
                name: max(0, self._number(few.memory_bytes.get(name, 0), size)) for name, size in more.memory_bytes.items()
            },
            collectives=tuple(self._sum(a, b) for a, b in zip(few.collectives, more.collectives, strict=True)),
            flops=self._number(few.flops, more.flops), allocations=self._number(few.allocations, more.allocations),
        )  # fmt: skip

    def _sum(self, few: CollectiveCount, more: CollectiveCount) -> CollectiveCount:
        predicted = few.predicted_bytes, more.predicted_bytes
        return more.replace(
            count=self._number(few.count, more.count), bytes=self._number(few.bytes, more.bytes),
            predicted_bytes=None if predicted[0] is None or predicted[1] is None else self._number(*predicted),
        )  # fmt: skip
