"""Offload schedules on the front of time and memory, and among the sizes that can be rented."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from meshwright.planner import cheapest, pareto, plan
from meshwright.planner.pareto import SCHEDULE_STEP_FRACTION
from meshwright.planner.request import Deadline, OffloadRequest, PlanRequest
from meshwright.planner.tasks.offload import search_offload
from meshwright.schema import ClusterSpec, InfeasibleError, ModelSpec, Offer, ParetoPoint, Workload
from meshwright.schema.units import GIB

MODEL = ModelSpec.named("llama-3.2-1b")
ONE = ClusterSpec.parse("1xH100-SXM-80GB")
TIGHT = ONE.replace(reserved_bytes=ONE.weakest_device.memory_bytes - 26 * GIB)
STEP = Workload(seq_len=2048, global_batch_size=2)
HOST = OffloadRequest(host_memory_bytes=100 * GIB)


@cache
def front(*, offload: bool) -> tuple[ParetoPoint, ...]:
    return pareto(MODEL, TIGHT, STEP, offload=HOST if offload else None)


@pytest.mark.long
def test_each_point_needs_less_and_takes_longer_and_no_bound_is_above_what_was_found() -> None:
    points = front(offload=True)
    assert len(points) > 3
    for faster, slower in pairwise(points):
        assert faster.step_time_s < slower.step_time_s and faster.required_bytes > slower.required_bytes
    for point in points:
        assert point.required_bytes <= point.cap_bytes
        within = [p.step_time_s for p in (*points, *front(offload=False)) if p.required_bytes <= point.cap_bytes]
        assert point.bound_s <= min(within) * (1 + 1e-9)
        assert bool(point.host_bytes) == (point.layout.offload == "scheduled")


@pytest.mark.long
def test_no_layout_without_a_schedule_beats_the_front_and_schedules_reach_below_it() -> None:
    points, plain = front(offload=True), front(offload=False)
    for other in plain:
        assert any(
            p.step_time_s <= other.step_time_s * (1 + 1e-4) and p.required_bytes <= other.required_bytes for p in points
        )
    least = min(point.required_bytes for point in plain)
    assert any(point.host_bytes and point.required_bytes < least for point in points)


def test_a_point_with_a_schedule_is_what_that_much_memory_gives() -> None:
    point = front(offload=True)[-1]
    capped = PlanRequest(MODEL, TIGHT.with_budget(point.cap_bytes), STEP, runnable=True, offload=HOST)
    again = search_offload(capped, effort="rounded")
    assert again is not None and again.estimate.step_time_s == pytest.approx(point.step_time_s)
    lower = point.required_bytes - 1.01 * SCHEDULE_STEP_FRACTION * TIGHT.memory_budget_bytes
    with pytest.raises(InfeasibleError):
        search_offload(replace(capped, cluster=TIGHT.with_budget(int(lower))))


def test_time_that_is_over_leaves_the_front_without_schedules() -> None:
    over = Deadline(60)
    points = pareto(MODEL, TIGHT, STEP, offload=HOST, deadline=over, on_progress=lambda *_: over.stop())
    assert all(not point.host_bytes for point in points)


SMALL = ONE.weakest_device.memory_bytes - 14 * GIB
OFFER = Offer.from_cluster(ClusterSpec.parse("2x1xH100-SXM-80GB").replace(reserved_bytes=SMALL), name="singles")


@pytest.mark.long
def test_the_cheapest_size_is_that_of_searching_every_size_with_schedules() -> None:
    found = cheapest(MODEL, (OFFER,), STEP, offload=HOST)
    assert pareto(MODEL, OFFER.with_size(1), STEP) == ()  # nothing fits without
    usd = {}
    for nodes in OFFER.sizes:
        cluster = OFFER.with_size(nodes)
        best = plan(MODEL, cluster, STEP, offload=HOST, top=0)
        usd[nodes] = best.estimate.step_time_s * (cluster.price_per_hour or math.nan) / 3600
    assert found.cost is not None
    assert found.cost.usd_per_step == pytest.approx(min(usd.values()), rel=0.02)
    assert found.cost.num_nodes == min(usd, key=usd.__getitem__)
    by_nodes = {size.num_nodes: size for size in found.cost.sizes}
    assert by_nodes[1].outcome != "does not fit"
    assert found.offload is None or by_nodes[found.cost.num_nodes].host_bytes == found.offload.host_bytes
    assert found.cost.bound_usd_per_million_tokens <= found.cost.usd_per_million_tokens


@pytest.mark.long
def test_one_size_that_only_a_schedule_fits_has_a_price() -> None:
    alone = Offer.from_cluster(ONE.replace(reserved_bytes=SMALL), name="one")
    found = cheapest(MODEL, (alone,), STEP, offload=HOST)
    assert found.offload is not None and found.cost is not None
    assert found.cost.sizes[0].host_bytes == found.offload.host_bytes > 0
    assert found.provenance.offload is not None and found.provenance.offload.host_memory_bytes == 100 * GIB
    fast = found.workload.tokens_per_step / found.estimate.step_time_s
    with pytest.raises(InfeasibleError, match="reaches"):
        cheapest(MODEL, (alone,), STEP, offload=HOST, min_tokens_per_s=1.5 * fast)
