"""Idle devices and rounded batches: taken where a sequence takes less time, and said in the plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
from meshwright.cli.meeting import meeting_of_used
from meshwright.engines.registry import export
from meshwright.planner import cheapest, pareto, plan
from meshwright.planner.plan import _is_settled, plan_as_requested
from meshwright.planner.request import PlanRequest
from meshwright.planner.tasks.training import build_alternative
from meshwright.planner.variants import _rounded_batches, min_device_s, resized
from meshwright.runtime.job.rendezvous import Rendezvous
from meshwright.schema import ClusterSpec, ConfigError, ModelSpec, Offer, TrainingPlan, Workload
from meshwright.schema.errors import RuntimeMismatchError

MODEL = ModelSpec.named("llama-3.1-8b")
WORK = Workload(seq_len=8192, global_batch_size=1024)
MEGATRON = WORK.replace(engine="megatron")


def on(cluster: str, work: Workload = WORK, **options: object) -> TrainingPlan:
    return plan(MODEL, ClusterSpec.parse(cluster), work, **options)


@pytest.mark.long
def test_counts_that_divide_well_are_planned_as_they_are() -> None:
    for cluster in ("8xH100-SXM-80GB", "64xH100-SXM-80GB"):
        assert on(cluster).requested is None


def test_an_even_layout_that_is_the_fastest_settles_how_many_devices_are_used() -> None:
    request = PlanRequest.create(MODEL, ClusterSpec.parse("8xH100-SXM-80GB"), WORK.replace(global_batch_size=12))
    uneven, even = (
        plan_as_requested(replace(request, fixed={"tp": tp, "pp": 1, "cp": 1, "micro_batch_size": 1})) for tp in (1, 2)
    )
    assert (uneven.is_even, even.is_even) == (False, True)
    assert not _is_settled(request, uneven)
    fastest = build_alternative(even.layout, even.estimate, uneven.estimate)
    assert _is_settled(request, uneven.replace(fastest=fastest))


@pytest.mark.long
def test_more_devices_that_do_not_divide_are_never_slower() -> None:
    for engine in (WORK, MEGATRON):
        before = None
        for count in (12, 13, 14):
            found = on(f"1x{count}xH100-SXM-80GB", engine)
            assert before is None or found.estimate.step_time_s <= before
            before = found.estimate.step_time_s


def test_idle_devices_are_said() -> None:
    found = on("296xH100-SXM-80GB", MEGATRON)  # 37 nodes: nothing that Megatron runs divides by 37
    assert found.requested is not None
    assert (found.requested.num_devices, found.requested.num_nodes, found.requested.step_time_s) == (296, 37, None)
    assert found.num_idle_devices == 296 - found.layout.world_size > 0
    assert found.notes[0].startswith(f"{found.num_idle_devices} devices of 296 stay idle")
    assert TrainingPlan.model_validate_json(found.model_dump_json()) == found


@pytest.mark.long
def test_a_plan_with_idle_devices_is_that_of_the_smaller_cluster() -> None:
    found = on("88xH100-SXM-80GB", MEGATRON)
    assert found.requested is not None and found.requested.step_time_s is not None
    assert found.estimate.step_time_s < found.requested.step_time_s
    request = PlanRequest.create(MODEL, ClusterSpec.parse("88xH100-SXM-80GB"), MEGATRON)
    assert plan_as_requested(request).estimate.step_time_s == found.requested.step_time_s
    smaller = PlanRequest.create(MODEL, resized(request.cluster, found.cluster.num_nodes), MEGATRON)
    assert plan_as_requested(smaller).layout == found.layout


@pytest.mark.parametrize(
    "cluster",
    ["1x5xH100-SXM-80GB", *(pytest.param(f"{n}xH100-SXM-80GB", marks=pytest.mark.long) for n in (24, 64))],
)
def test_no_plan_takes_less_than_perfect_scaling(cluster: str) -> None:
    for work in (WORK, MEGATRON):
        request = PlanRequest.create(MODEL, ClusterSpec.parse(cluster), work)
        least_s = min_device_s(request) * 1024 / request.cluster.num_devices
        assert least_s <= plan_as_requested(request).estimate.step_time_s


@pytest.mark.long
def test_a_batch_is_rounded_within_its_tolerance_where_that_pays() -> None:
    exact, rounded = on("80xH100-SXM-80GB"), on("80xH100-SXM-80GB", batch_tolerance=0.05)
    batch = rounded.workload.global_batch_size
    assert batch != 1024 and abs(batch - 1024) <= 0.05 * 1024
    assert rounded.requested is not None and rounded.requested.global_batch_size == 1024
    assert rounded.estimate.step_time_s / batch < exact.estimate.step_time_s / 1024
    assert "--batch-tolerance" in rounded.notes[0]


@pytest.mark.long
def test_other_engines_get_the_rounded_batch() -> None:
    found = on("296xH100-SXM-80GB", MEGATRON, batch_tolerance=0.2)
    batch = found.workload.global_batch_size
    assert found.cluster.num_devices == 296 and batch % found.layout.dp == 0
    assert str(batch) in str(export(found, "megatron"))


@pytest.mark.parametrize(("tolerance", "expected"), [(0.0, []), (0.0001, [])])
def test_no_room_for_another_batch(tolerance: float, expected: list[int]) -> None:
    request = PlanRequest.create(MODEL, ClusterSpec.parse("24xH100-SXM-80GB"), WORK, batch_tolerance=tolerance)
    assert _rounded_batches(request) == expected


def test_rounded_batches_are_shared_evenly() -> None:
    request = PlanRequest.create(MODEL, ClusterSpec.parse("80xH100-SXM-80GB"), WORK, batch_tolerance=0.05)
    batches = _rounded_batches(request)
    assert batches[0] == 1040  # by all 80
    assert all(any(batch % (80 >> k) == 0 for k in range(5)) for batch in batches)


def test_what_a_tolerance_is_not_for_is_refused() -> None:
    cluster = ClusterSpec.parse("8xH100-SXM-80GB")
    with pytest.raises(ConfigError, match="one global batch"):
        pareto(MODEL, cluster, WORK, batch_tolerance=0.1)
    with pytest.raises(ConfigError, match="one global batch"):
        cheapest(MODEL, [Offer.from_cluster(cluster, price_per_device_hour=1.0)], WORK, batch_tolerance=0.1)
    with pytest.raises(ConfigError, match="batch_tolerance"):
        plan("llama-3.1-8b", cluster, prompt_len=8, generate_len=8, batch_tolerance=0.1)
    with pytest.raises(ConfigError, match="batch_tolerance 1"):
        on("8xH100-SXM-80GB", batch_tolerance=1.0)


def test_idle_nodes_do_not_join_the_job() -> None:
    found = on("88xH100-SXM-80GB", MEGATRON)
    used = found.cluster.num_nodes
    job = Rendezvous(nnodes=11, node_rank=0, endpoint="host:1")
    meeting = meeting_of_used(found, job)
    assert meeting is not None and meeting.nnodes == used
    assert meeting_of_used(found, Rendezvous(nnodes=11, node_rank=used, endpoint="host:1")) is None
    assert meeting_of_used(found, Rendezvous(nnodes=used, endpoint="host:1")) == Rendezvous(
        nnodes=used, endpoint="host:1"
    )
    with pytest.raises(RuntimeMismatchError, match="which one it is"):
        meeting_of_used(found, Rendezvous(nnodes=11, endpoint="host:1"))
