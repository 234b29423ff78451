"""Plans over regions: every choice of islands compared, islands of unlike size, what explain says, and what is refused."""

from __future__ import annotations

import itertools

import pytest
from meshwright.engines import exportable
from meshwright.planner import plan
from meshwright.planner.explain.regions import region_values
from meshwright.planner.plan import plan_as_requested
from meshwright.planner.regions import IslandProblem
from meshwright.planner.request import Deadline, PlanRequest
from meshwright.schema import ClusterSpec, ConfigError, NodeGroup, TrainingPlan
from meshwright.schema.cluster_files import usual_levels
from meshwright.schema.local_updates import SyncLimits, plan_of_island, slowest_island, with_sync_every
from meshwright.schema.regions import RegionLink, joining_link

BATCH, SEQ_LEN = 96, 1024


def regions(nodes: tuple[int, ...] = (1, 1), gbit: float = 1.0, rtt_s: float = 0.05) -> ClusterSpec:
    """Nodes of two A100 each; links from region 0 are twice as fast as others."""
    parsed = ClusterSpec.parse("2x2xA100-SXM-40GB")
    names = [f"r{i}" for i in range(len(nodes))]
    links = tuple(
        RegionLink(
            src=a, dst=b, round_trip_s=rtt_s, line_bytes_per_s=gbit * 125e6 * (2 if "r0" in (a, b) else 1), usd_per_gb=0.05,
            streams=64,
        )
        for a, b in itertools.permutations(names, 2)
    )  # fmt: skip
    group = parsed.groups[0].model_dump()
    levels = [tuple(usual_levels([({**group, "num_nodes": n}, ENTRY)])) for n in nodes]
    groups = tuple(
        NodeGroup(**{**group, "num_nodes": n, "zone": name, "levels": own})
        for name, n, own in zip(names, nodes, levels, strict=True)
    )
    return ClusterSpec(
        name="regions", groups=groups, region_links=links,
        levels=(parsed.levels[0], {"link": joining_link(links, names), "domain_size": 2 * sum(nodes)}),
    )  # fmt: skip


ENTRY = {
    "scaleup": "nvlink3", "scaleout": "ib200", "scaleup_domain": 8, "devices_per_node": 8,
}  # fmt: skip


def planned(cluster: ClusterSpec, *, max_local_steps: int = 64, max_delay_steps: int = 0) -> TrainingPlan:
    limits = SyncLimits(max_local_steps=max_local_steps, max_delay_steps=max_delay_steps)
    answer = plan("gpt2", cluster, global_batch_size=BATCH, seq_len=SEQ_LEN, local_updates=limits)
    assert isinstance(answer, TrainingPlan)
    return answer


@pytest.fixture(scope="module")
def three() -> TrainingPlan:
    return planned(regions((1, 1, 2)))


@pytest.mark.long
def test_no_other_choice_of_islands_is_faster(three: TrainingPlan) -> None:
    cluster = regions((1, 1, 2))
    request = PlanRequest.create(three.model, cluster, three.workload, local_updates=SyncLimits())
    problem = IslandProblem(request, SyncLimits(), plan_as_requested)
    steps_s = {used: joined.step_s for used in problem.choices if (joined := problem.joined(used)) is not None}
    assert len(steps_s) == 7
    assert three.estimate.step_time_s == pytest.approx(min(steps_s.values()))
    assert all(
        problem.close_bound_s(used) <= seconds * (1 + 1e-9) for used, seconds in steps_s.items() if len(used) > 1
    )
    assert three.search is not None and three.search.bound_s <= three.search.objective_s


def test_islands_of_unlike_size_share_the_batch_and_the_layout(three: TrainingPlan) -> None:
    updates = three.local_updates
    assert updates is not None
    assert [island.replicas for island in updates.islands] == [1, 1, 2]
    assert sum(island.sequences for island in updates.islands) == BATCH == sum(three.batch_shares)
    slowest_s = max(island.step_s for island in updates.islands)
    expected_s = slowest_s + updates.waited_s / updates.steps
    assert three.estimate.step_time_s == pytest.approx(expected_s)
    islands = [plan_of_island(three, i) for i in range(3)]
    assert [island.layout.world_size for island in islands] == [2, 2, 4]
    assert [sum(island.batch_shares) for island in islands] == [island.sequences for island in updates.islands]
    assert slowest_island(three).estimate.step_time_s == pytest.approx(slowest_s)
    assert TrainingPlan.model_validate_json(three.model_dump_json()) == three


def test_fast_links_need_no_local_steps_and_slow_ones_no_region() -> None:
    fast = planned(regions((1, 1), gbit=4000, rtt_s=1e-5))
    assert fast.local_updates is None or fast.local_updates.steps <= 4
    slow = planned(regions((1, 1), gbit=0.001), max_local_steps=4)
    assert slow.local_updates is None and slow.cluster.num_devices == 2
    assert [pool.zone for pool in slow.left_out] in (["r0"], ["r1"])


@pytest.mark.long
def test_more_local_steps_or_a_later_sum_are_never_slower() -> None:
    cluster = regions((1, 1), gbit=0.2)
    steps_s = [planned(cluster, max_local_steps=n).search.objective_s for n in (4, 16, 64)]  # type: ignore[union-attr]
    late = planned(cluster, max_local_steps=16, max_delay_steps=8)
    assert steps_s == sorted(steps_s, reverse=True)
    assert late.search is not None and late.search.objective_s <= steps_s[1] * (1 + 1e-9)


@pytest.mark.long
def test_explain_says_what_links_and_regions_are_worth(three: TrainingPlan) -> None:
    values = {value.change: value.step_time_s for value in region_values(three, Deadline(30.0))}
    planned_s = three.estimate.step_time_s
    more = [seconds for change, seconds in values.items() if "more" in change]
    assert len(more) == 3 and all(seconds is not None and seconds <= planned_s for seconds in more)
    least_s = next(seconds for change, seconds in values.items() if change.startswith("no sums"))
    assert least_s is not None and all(seconds is not None and least_s <= seconds for seconds in more)
    without = [seconds for change, seconds in values.items() if change.startswith("without")]
    assert len(without) == 3 and all(seconds is not None and seconds > planned_s for seconds in without)


def test_sums_after_other_steps_change_what_is_waited_for(three: TrainingPlan) -> None:
    updates = three.local_updates
    assert updates is not None
    often = with_sync_every(three, 1)
    slowest_s = max(island.step_s for island in updates.islands)
    assert often.estimate.step_time_s == pytest.approx(slowest_s + updates.waited_s)
    with pytest.raises(ConfigError, match="C2"):
        late = three.replace(local_updates=updates.replace(steps=4, delay_steps=3))
        with_sync_every(late, 2)


def test_what_local_updates_do_not_suit_is_refused(three: TrainingPlan) -> None:
    with pytest.raises(ConfigError, match="do not suit") as error:
        plan("gpt2", "2x2xA100-SXM-40GB", global_batch_size=8, seq_len=256, local_updates=SyncLimits())
    assert "stand in no regions" in error.value.details[0]
    assert all(reason is not None and "sums" in reason for reason in exportable(three).values())
    document = three.model_dump()
    document["local_updates"]["islands"][0]["sequences"] += 1
    with pytest.raises(ConfigError, match="batch"):
        TrainingPlan(**document)
