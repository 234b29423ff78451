"""The smallest set of changes of a job: exact over the sets that are tried, in steps that each gain."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from meshwright.planner import estimate, plan
from meshwright.planner.explain.changes import (
    BEST_SWITCHES,
    ENOUGH,
    MAX_CHANGES,
    NEARLY,
    Changes,
    Variant,
    variant_plan,
)
from meshwright.planner.request import Deadline, PlanRequest
from meshwright.schema import ClusterSpec, Layout, ModelSpec, Workload

MODEL = ModelSpec.named("llama-3.1-8b")
CLUSTER = ClusterSpec.parse("16xH100-SXM-80GB")
JOBS = {
    "recompute and tp": (Layout(tp=4, dp_shard=4, zero_stage=1, recompute="full"), True),
    "unsharded, no overlap": (Layout(tp=2, pp=2, dp_replicate=4, sequence_parallel=False), False),
    "does not fit": (Layout(dp_replicate=16), True),
    "deep pipeline": (Layout(pp=8, dp_shard=2, zero_stage=1), True),
}


def changes_of(name: str) -> tuple[Changes, list[tuple[Layout, Workload]]]:
    layout, overlap = JOBS[name]
    workload = Workload(seq_len=4096, global_batch_size=64, engine="megatron", overlap=overlap)
    before = Variant(layout=layout, workload=workload, estimate=estimate(MODEL, CLUSTER, workload, layout))
    best = plan(MODEL, CLUSTER, workload.replace(**BEST_SWITCHES), top=3)
    targets = [(best.layout, best.workload), *((other.layout, best.workload) for other in best.alternatives)]
    return Changes(PlanRequest(MODEL, CLUSTER, workload), before), targets


def in_tiers(*quick: str, without: str = "") -> list[Any]:
    """Names of jobs, of which the short tier has the quick ones."""
    marks = {name: [] if name in quick else [pytest.mark.long] for name in JOBS if name != without}
    return [pytest.param(name, marks=marks[name]) for name in marks]


@pytest.mark.parametrize("name", in_tiers("recompute and tp", "does not fit"))
def test_steps_gain_and_their_estimates_are_those_of_the_cost_model(name: str) -> None:
    changes, targets = changes_of(name)
    steps = changes.steps(targets)
    assert 1 <= len(steps) <= MAX_CHANGES
    for step in steps:
        assert step.estimate == estimate(MODEL, CLUSTER, step.workload, step.layout) and step.estimate.fits
        assert step.layout.world_size == CLUSTER.num_devices
    before = changes.before.estimate
    times = [before.step_time_s] * before.fits + [step.estimate.step_time_s for step in steps]
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize("name", in_tiers("deep pipeline", without="does not fit"))
def test_no_set_of_as_many_changes_is_faster_and_fewer_do_not_suffice(name: str) -> None:
    changes, targets = changes_of(name)
    last = changes.steps(targets)[-1]
    everything = [*targets, *changes._neighbours()]
    best: dict[int, float] = {}
    for target in everything:
        units = changes._units(target)
        for count in range(1, MAX_CHANGES + 1):
            for chosen in itertools.combinations(units, count):
                made = changes.variant(target, chosen)
                if made is not None and made.estimate.fits:
                    best[count] = min(made.estimate.step_time_s, best.get(count, made.estimate.step_time_s))
    before_s, fastest_s = changes.before.estimate.step_time_s, min(best.values())
    enough_s = before_s - ENOUGH * (before_s - fastest_s)
    count = min(number for number, seconds in best.items() if seconds <= enough_s * (1 + NEARLY))
    assert last.estimate.step_time_s <= best[count] * (1 + 2 * NEARLY)


def test_degrees_fill_the_devices_and_keep_the_jobs_way_of_sharding() -> None:
    changes, _ = changes_of("deep pipeline")
    target = Layout(tp=2, dp_shard=8, zero_stage=1, micro_batch_size=2), changes.before.workload
    made = changes.variant(target, ("pp",))
    assert made is not None and made.layout == Layout(dp_shard=16, zero_stage=1)
    made = changes.variant(target, ("tp", "micro_batch_size"))
    assert made is not None and made.layout == Layout(tp=2, pp=8, micro_batch_size=2)
    assert {name for name, *_ in made.changed} >= {"tp", "micro_batch_size", "dp_shard"}


def test_what_a_rule_excludes_is_no_variant() -> None:
    changes, _ = changes_of("deep pipeline")
    assert changes.variant((Layout(tp=16, dp_shard=1), changes.before.workload), ("tp",)) is None


def test_after_the_deadline_nothing_is_tried() -> None:
    changes, targets = changes_of("deep pipeline")
    changes.deadline = Deadline()
    changes.deadline.stop()
    assert changes.steps(targets) == () and not changes.known


def test_a_variant_is_a_plan_of_its_layout() -> None:
    changes, _ = changes_of("recompute and tp")
    made = variant_plan(changes.request, changes.before)
    assert made.layout == changes.before.layout and made.estimate == changes.before.estimate
