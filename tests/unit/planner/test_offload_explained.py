"""explain() of plans with an offload schedule: parts of the plan, differences of bounds, uniform policies, and other layouts."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
from meshwright.cli.page.document import page_data
from meshwright.planner import compare, explain, plan
from meshwright.planner.explain.offload import NO_OFFLOAD, POLICIES
from meshwright.planner.explain.report import Explanation
from meshwright.planner.explain.why_not import WhyNot
from meshwright.planner.request import Deadline, OffloadRequest, PlanRequest
from meshwright.planner.tasks.offload import search_offload
from meshwright.planner.tasks.offload_problem import choice_of_plan, problem_of_plan
from meshwright.planner.timeline import timeline
from meshwright.schema import ClusterSpec, ModelSpec, TrainingPlan, Workload
from meshwright.schema.trace import chrome_trace
from meshwright.schema.units import GIB

MODEL = ModelSpec.named("llama-3.2-1b")
ONE = ClusterSpec.parse("1xH100-SXM-80GB")
TIGHT = ONE.replace(reserved_bytes=ONE.weakest_device.memory_bytes - 16 * GIB)
STEP = Workload(seq_len=4096, global_batch_size=2)
HOST = OffloadRequest(host_memory_bytes=100 * GIB)


@cache
def made(cluster: ClusterSpec = TIGHT, request: OffloadRequest = HOST) -> TrainingPlan:
    found = plan(MODEL, cluster, STEP, offload=request, top=2)
    assert found.offload is not None
    return found


@cache
def explained() -> Explanation:
    return explain(made())


def why_not(**wanted: object) -> WhyNot:
    answer = explain(made(), why_not=wanted).why_not
    assert answer is not None
    return answer


def test_the_schedule_of_a_plan_is_costed_as_the_search_did() -> None:
    again, estimate = problem_of_plan(made()).estimate, made().estimate
    assert again.step_time_s == pytest.approx(estimate.step_time_s, rel=1e-12)
    assert again.memory_bytes == estimate.memory_bytes
    choice, schedule = choice_of_plan(made()), made().offload
    assert schedule is not None
    assert choice.parameters.sum() == len(schedule.streamed_parameter_layers)
    assert not any("estimated by itself" in note for note in explained().notes)


def test_everything_that_binds_is_named_with_its_constraint() -> None:
    found = explained()
    seconds = [binding.seconds or 0.0 for binding in found.binds]
    assert seconds == sorted(seconds, reverse=True)
    by_name = {binding.resource: binding for binding in found.binds}
    assert {"compute", "optimizer", "memory", "host_memory", "host_link"} <= by_name.keys()
    assert "(C3)" in by_name["host_link"].text and "(C7)" in by_name["host_memory"].text
    memory, host = by_name["memory"].seconds, by_name["host_link"].seconds
    assert memory is not None and memory > 0  # 1.2 B parameters need more than 16 GiB
    assert host is not None and host > 0
    assert found.offload == made().offload


def test_more_of_a_resource_is_worth_what_the_duals_say_at_the_margin() -> None:
    gains = {gain.resource: gain for gain in explained().worth}
    schedule = made().offload
    assert schedule is not None
    # A whole GiB is worth no more than the margin says, as the optimum of a linear program is convex in its right-hand side; the
    # allocator's margin takes a part of it.
    margin = schedule.worth.device_s_per_gib
    assert 0.3 * margin < gains["memory"].kept_s <= 1.02 * margin
    assert gains["host_memory"].kept_s == pytest.approx(schedule.worth.host_s_per_gib, abs=1e-6)
    for name in ("memory", "unlimited_memory", "host_memory", "host_link", "compute"):
        best_s = gains[name].best_s
        assert gains[name].kept_s >= 0 and best_s is not None and best_s >= 0
    assert gains["unlimited_memory"].kept_s >= gains["memory"].kept_s


@pytest.mark.long
def test_a_host_that_binds_is_worth_more_of() -> None:
    request = OffloadRequest(host_memory_bytes=int(7.5 * GIB))
    gains = {gain.resource: gain.kept_s for gain in explain(made(TIGHT, request)).worth}
    assert gains["host_memory"] > 0


def test_no_uniform_policy_is_faster_than_the_schedule() -> None:
    found = explained()
    assert [policy.name for policy in found.policies] == [NO_OFFLOAD, *(policy.name for policy in POLICIES)]
    by_name = {policy.name: policy for policy in found.policies}
    for policy in found.policies:
        assert not policy.fits or policy.slower_fraction >= 0
        assert policy.fits or "does not fit" in policy.reason
        assert policy.step_time_s == pytest.approx(sum(line[1] for line in policy.time_s.values()))
    assert not by_name[NO_OFFLOAD].fits and "(C6)" in by_name[NO_OFFLOAD].reason
    assert any(policy.fits for policy in found.policies)


@pytest.mark.long
def test_policies_that_the_host_is_too_small_for_say_so() -> None:
    found = explain(made(TIGHT, OffloadRequest(host_memory_bytes=8 * GIB)))
    assert any("(C7)" in policy.reason for policy in found.policies)


def test_runner_ups_are_other_layouts_with_their_schedules() -> None:
    found = explained()
    assert made().alternatives
    assert [other.layout for other in found.runner_ups] == [other.layout for other in made().alternatives]
    for other, again in zip(made().alternatives, found.runner_ups, strict=True):
        assert other.layout != made().layout and other.step_time_s >= made().estimate.step_time_s
        # Schedules of runner-ups are rounded, not exact: the search that made the plan and this one round apart.
        assert again.step_time_s == pytest.approx(other.step_time_s, rel=0.01)


@pytest.mark.long
def test_why_not_completes_with_and_without_a_schedule() -> None:
    other = {1: 2, 2: 1}[made().layout.micro_batch_size]
    answer = why_not(micro_batch_size=other)
    assert answer.status == "slower" and answer.best is not None
    runnable = PlanRequest.from_plan(made()).runnable
    alone = search_offload(PlanRequest(MODEL, TIGHT, STEP, {"micro_batch_size": other}, runnable, HOST))
    assert alone is not None and answer.best.step_time_s == pytest.approx(alone.estimate.step_time_s)
    nothing = why_not(offload="none")
    assert nothing.status == "too_large" and nothing.best is not None and not nothing.best.fits
    assert why_not(offload="scheduled").status == "same"


def test_why_not_of_a_schedule_beside_a_plan_that_needs_none() -> None:
    far_host = ONE.replace(groups=(ONE.groups[0].replace(host_link_bytes_per_s=2e9),))
    plain = plan(MODEL, far_host, STEP)
    answer = explain(plain, why_not={"offload": "scheduled"}).why_not
    assert answer is not None and answer.best is not None
    assert answer.status == "slower" and answer.best.layout.offload == "scheduled"


def test_plans_of_older_versions_are_explained_within_what_their_schedule_was_given() -> None:
    fixed = "offload=scheduled"
    old = made().replace(provenance=made().provenance.replace(offload=None, fixed=fixed))
    request = PlanRequest.from_plan(old)
    assert request.fixed == {} and request.offload is not None
    assert request.offload.host_memory_bytes == pytest.approx(100 * GIB, rel=1e-6)
    assert explain(old, why_not={"offload": "none"}).why_not is not None


def test_time_that_is_over_leaves_searches_out_and_says_so() -> None:
    over = Deadline(60)
    over.stop()
    found = explain(made(), deadline=over)
    assert all(gain.best_s is None for gain in found.worth) and found.policies
    assert any("time limit" in note for note in found.notes)


def test_the_timeline_is_the_simulated_step() -> None:
    steps = timeline(made())
    assert steps.step_time_s == pytest.approx(made().estimate.step_time_s, rel=1e-9)
    passes = [(p.kind, p.layer, p.micro_batch) for p in steps.slices if p.kind in ("F", "BW")]
    assert len(set(passes)) == len(passes) == 2 * MODEL.num_layers * made().num_microbatches
    for stream in {piece.stream for piece in steps.slices}:
        mine = sorted((p for p in steps.slices if p.stream == stream), key=lambda p: p.start_s)
        assert all(a.start_s + a.seconds <= b.start_s + 1e-9 for a, b in pairwise(mine)), "one thing at a time"
    moved = {p.kind for p in steps.slices if p.stream == "copies to the host" and p.micro_batch >= 0}
    stage = made().stages[0]
    assert ("activations" in moved) == any(stage.offload_of(idx) == "activations" for idx in stage.layer_idxs)
    trace = chrome_trace(made(), steps)
    named = {e["tid"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert {e["tid"] for e in trace["traceEvents"] if e["ph"] == "X"} <= named


def test_the_page_draws_every_layer_and_the_whole_step() -> None:
    drawn = page_data(made())
    strips = {strip["name"]: strip["cells"] for strip in drawn["offload"]["strips"]}
    assert [len(cells) for cells in strips.values()] == [MODEL.num_layers] * 3
    schedule = made().offload
    assert schedule is not None
    on_device = {idx for idx, (_, text) in enumerate(strips["parameters"]) if text == "on the device"}
    assert on_device == set(range(MODEL.num_layers)) - set(schedule.streamed_parameter_layers)
    assert sum(group["share"] for group in drawn["parts"]["groups"]) == pytest.approx(100)
    assert "copies to the host" in drawn["pipeline"]["rows"]


def test_compared_plans_have_lines_of_what_lies_on_the_host() -> None:
    less = made(TIGHT, OffloadRequest(host_memory_bytes=8 * GIB))
    assert less.offload is not None and made().offload is not None
    lines = compare(made(), less.layout, less.estimate, schedule=less.offload).host_bytes
    assert lines["host_bytes"][:2] == (made().offload.host_bytes, less.offload.host_bytes)
