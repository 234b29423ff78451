"""The smallest set of changes that brings a job that runs close to the best plan: exact over sets of up to three changes.

Sets: U the changes (groups of fields that are one switch to a user) in which a target differs from the job; targets are the plan
and its runner-ups, and the job with another micro-batch or recompute. Every set of at most MAX_CHANGES elements of U gives a
layout, data parallelism filling the devices, which the cost model estimates where the rules allow it. The answer is the smallest
number of changes whose best layout has ENOUGH of the gain of all, in the order in which each is worth most.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...schema import ConfigError, Layout, TrainingEstimate, TrainingPlan, Workload
from ...schema.base import Frozen
from ...schema.layout_rules import ENGINE_RULES, broken_rules, problem_on
from ...schema.layout_table import RECOMPUTES
from ..expand import expand_layout
from ..layer_modes import with_modes
from ..request import Deadline, PlanRequest
from ..tasks.training import device_of_rank, stage_of_layers

MAX_CHANGES = 3
ENOUGH = 0.9
"""Of the gain that the best set has."""
SMALLEST_GAIN = 0.002
"""Of the step: a change that saves less is none."""

NEARLY = 0.005
"""Step times that differ by less are alike."""

_GROUPS = (
    ("dp_replicate", "dp_shard", "zero_stage", "gradient_shard", "optimizer_shard"),
    ("cp", "cp_ulysses"), ("ep", "etp"), ("schedule", "num_model_chunks"), ("recompute", "recompute_fraction"),
    ("offload", "offload_fraction", "offload_activations", "offload_to"),
)  # fmt: skip
"""Fields that are one switch to a user; every other field is one by itself."""

_OF_WORK = ("overlap", "attention")
"""Switches of the engine that a user sets, besides those of a layout."""

BEST_SWITCHES = {"overlap": True, "attention": "flash"}
"""What a plan takes for them."""


class Variant(Frozen):
    """A job with some of its switches changed.

    Attributes:
        changed: (field, before, after) of every field that differs.
    """

    layout: Layout
    workload: Workload
    estimate: TrainingEstimate
    changed: tuple[tuple[str, str, str], ...] = ()


def variant_plan(request: PlanRequest, variant: Variant) -> TrainingPlan:
    """Return a variant as a plan, its stages as even as memory allows."""
    model, cluster, layout = request.model, request.cluster, variant.layout
    chosen = expand_layout(replace(request, task=variant.workload), layout)
    recomputes = [RECOMPUTES[option] for option in chosen.options]
    is_block = [layer.is_block for layer in model.staged(half_blocks=layout.half_blocks).iter_layers()]
    spans = itertools.pairwise(chosen.boundaries)
    stages = tuple(stage_of_layers(first, recomputes[first:end], is_block[first:end]) for first, end in spans)
    if layout.recompute == "mixed" and len(set(chosen.options)) == 1:
        layout = layout.replace(recompute=recomputes[0])
    plan = TrainingPlan(
        model=model,
        cluster=cluster,
        workload=variant.workload,
        layout=layout,
        stages=stages,
        rank_map=device_of_rank(cluster, chosen.nodes),
        estimate=chosen.estimate,
        provenance=request.provenance(),
    )
    return with_modes(plan)


@dataclass
class Changes:
    """The search for one job.

    Attributes:
        before: the job; its estimate.
    """

    request: PlanRequest
    before: Variant
    deadline: Deadline = field(default_factory=Deadline)
    known: dict[tuple[Layout, Workload], TrainingEstimate | None] = field(default_factory=dict)

    def steps(self, targets: Sequence[tuple[Layout, Workload]]) -> tuple[Variant, ...]:
        """Return the variants along the smallest set of changes that has most of the gain, each with one change more."""
        best: dict[int, tuple[Variant, tuple[Layout, Workload], tuple[str, ...]]] = {}
        for target in dict.fromkeys((*targets, *self._neighbours())):
            units = self._units(target)
            for count in range(1, MAX_CHANGES + 1):
                for chosen in itertools.combinations(units, count):
                    if self.deadline.is_over:
                        break
                    made = self.variant(target, chosen)
                    if made is not None and made.estimate.fits and _is_better(made, best.get(count)):
                        best[count] = made, target, chosen
        if not best:
            return ()
        fastest_s = min(variant.estimate.step_time_s for variant, *_ in best.values())
        before_s = self.before.estimate.step_time_s if self.before.estimate.fits else math.inf
        for count in sorted(best):
            variant, target, chosen = best[count]
            saved = before_s - variant.estimate.step_time_s
            if saved <= SMALLEST_GAIN * min(before_s, variant.estimate.step_time_s):
                continue
            if variant.estimate.step_time_s - fastest_s <= (1 - ENOUGH) * min(before_s - fastest_s, fastest_s):
                return self._in_order(target, chosen)
        return ()

    def variant(self, target: tuple[Layout, Workload], chosen: Sequence[str]) -> Variant | None:
        """Return the job with the chosen changes of a target; None where a rule excludes it."""
        made = self._composed(target, chosen)
        if made is None:
            return None
        if made not in self.known:
            self.known[made] = self._estimate(*made)
        estimate = self.known[made]
        if estimate is None:
            return None
        before = self.before.layout.model_dump() | self.before.workload.model_dump(include=set(_OF_WORK))
        after = made[0].model_dump() | made[1].model_dump(include=set(_OF_WORK))
        changed = tuple((name, str(before[name]), str(after[name])) for name in after if before[name] != after[name])
        return Variant(layout=made[0], workload=made[1], estimate=estimate, changed=changed)

    def _estimate(self, layout: Layout, workload: Workload) -> TrainingEstimate | None:
        problem = problem_on(self.request.model, workload, self.request.cluster)
        rules = (*ENGINE_RULES, *(workload.engine_facts.rules or ()))
        if broken_rules(layout, problem, rules):
            return None
        try:
            return expand_layout(replace(self.request, task=workload), layout).estimate
        except ConfigError:
            return None

    def _units(self, target: tuple[Layout, Workload]) -> tuple[str, ...]:
        """Return the changes in which a target differs, each by the name of its first field."""
        layout, workload = target
        units = [
            next((group[0] for group in _GROUPS if name in group), name)
            for name in Layout.model_fields
            if getattr(layout, name) != getattr(self.before.layout, name) and not self._follows(name, layout)
        ]
        units += [name for name in _OF_WORK if getattr(workload, name) != getattr(self.before.workload, name)]
        return tuple(dict.fromkeys(units))

    def _follows(self, name: str, target: Layout) -> bool:
        """Return whether a field differs only because another one does: shards that fill the devices, a switch of a degree of 1."""
        before = self.before.layout
        if name in _GROUPS[0]:
            return _sharding(before) == _sharding(target)
        return name == "sequence_parallel" and 1 in (before.tp, target.tp)

    def _composed(self, target: tuple[Layout, Workload], chosen: Sequence[str]) -> tuple[Layout, Workload] | None:
        before, (after, work) = self.before.layout, target
        names = {name for unit in chosen for name in next((g for g in _GROUPS if unit in g), (unit,))}
        fields: dict[str, Any] = before.model_dump() | {
            name: getattr(after, name) for name in names if name in Layout.model_fields
        }
        if fields["tp"] == 1 or before.tp == 1:
            fields["sequence_parallel"] = after.sequence_parallel and fields["tp"] > 1
        if fields["cp"] == 1:
            fields["cp_ulysses"] = 1
        if fields["pp"] == 1:
            fields |= {"num_model_chunks": 1, "schedule": "1f1b", "vocabulary": "ends"}
        rest = fields["tp"] * fields["cp"] * fields["pp"]
        devices = self.request.cluster.num_devices
        if devices % rest:
            return None
        fields |= _shards(after if "dp_shard" in names else before, devices // rest, fields["cp"])
        if fields["num_model_chunks"] > 1 and fields["zero_stage"] > 1:
            return None
        changed = {name: getattr(work, name) for name in chosen if name in _OF_WORK}
        try:
            return Layout(**fields), self.before.workload.replace(**changed)
        except ConfigError:
            return None

    def _neighbours(self) -> Iterator[tuple[Layout, Workload]]:
        """Yield the job with one switch of another value, whether or not the plan has it."""
        layout, workload = self.before.layout, self.before.workload
        for size in (1, 2, 4, 8):
            yield layout.replace(micro_batch_size=size), workload
        for recompute in ("none", "selective", "full"):
            if layout.recompute != "mixed":
                yield layout.replace(recompute=recompute, recompute_fraction=1.0), workload

    def _in_order(self, target: tuple[Layout, Workload], chosen: tuple[str, ...]) -> tuple[Variant, ...]:
        """Return the variants on the way to a set of changes; what is no gain by itself comes with what follows."""
        ways = []
        for order in itertools.permutations(chosen):
            *between, last = (self.variant(target, order[:count]) for count in range(1, len(order) + 1))
            assert last is not None
            way, slowest_s = [], self.before.estimate.step_time_s if self.before.estimate.fits else math.inf
            for each in between:
                step_s = math.inf if each is None or not each.estimate.fits else each.estimate.step_time_s
                if each is not None and last.estimate.step_time_s < step_s < slowest_s * (1 - SMALLEST_GAIN):
                    way.append(each)
                    slowest_s = step_s
            ways.append((*way, last))
        return min(ways, key=lambda way: (-len(way), [each.estimate.step_time_s for each in way]))


def _is_better(made: Variant, best: tuple[Variant, Any, Any] | None) -> bool:
    """Return whether a variant is faster; of two alike the first is kept, which is on the way to the plan."""
    return best is None or made.estimate.step_time_s < best[0].estimate.step_time_s * (1 - NEARLY)


def _sharding(layout: Layout) -> tuple[object, ...]:
    """Return how states are sharded, whatever the degree of data parallelism."""
    is_unsharded = layout.dp_shard * layout.cp == 1 or layout.zero_stage == 0
    replicas = 1 if layout.dp_replicate == 1 else "all" if layout.dp_shard == 1 else layout.dp_replicate
    if layout.dp == 1:
        return ()
    return ("whole",) if is_unsharded else (replicas, layout.zero_stage, layout.gradient_shard, layout.optimizer_shard)


def _shards(model_layout: Layout, dp: int, cp: int) -> Mapping[str, Any]:
    """Return the fields that shard ``dp`` data-parallel ranks as another layout does its own."""
    replicate = model_layout.dp_replicate if model_layout.dp_shard > 1 and dp % model_layout.dp_replicate == 0 else 1
    if model_layout.dp_shard == 1 and model_layout.dp > 1:
        replicate = dp
    shard = dp // replicate
    stage = model_layout.zero_stage if shard * cp > 1 else 0
    levels = model_layout.has_levels and replicate > 1
    return {
        "dp_replicate": replicate,
        "dp_shard": shard,
        "zero_stage": stage,
        "gradient_shard": model_layout.gradient_shard if levels else 1,
        "optimizer_shard": model_layout.optimizer_shard if levels else 1,
    }
