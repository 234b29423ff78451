"""What needs no ranks: the budget's shares, groups and pairs of ranks, merging, who is slow, bytes on fake tensors, storage."""

from __future__ import annotations

import json
import os
import random
from itertools import combinations
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from meshwright.profilers.measure import links
from meshwright.profilers.measure.host import check_folder, measure_storage
from meshwright.profilers.measure.links import GroupAxis, axes_of, axis_groups, tournament
from meshwright.profilers.measure.timing import Bench, Timing, summarise_samples
from meshwright.profilers.measure.traced import LiveBytes
from meshwright.profilers.run import across_ranks
from meshwright.profilers.run.across_ranks import COMPARISON, merge_points, merge_rounds
from meshwright.profilers.run.comparison import compared_ratios, local_cores, pinned, sign_chance
from meshwright.profilers.run.rank import Budget
from meshwright.schema import ConfigError
from meshwright.schema.profile import PairPoint
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import checkpoint

# --- the budget --------------------------------------------------------------------------------------------------


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_time_that_a_step_leaves_goes_to_the_later_ones():
    clock = Clock()
    budget = Budget(10.0, [1, 1, 2], clock=clock)
    assert budget.share_s(0) == pytest.approx(2.5)
    clock.now += 0.5
    assert budget.share_s(1) == pytest.approx(9.5 / 3)
    clock.now += 9.0  # far more than its share
    assert budget.share_s(2) == pytest.approx(0.5)
    clock.now += 3.0
    assert budget.share_s(2) == 0


def test_start_up_and_reserve_come_off_the_budget():
    clock = Clock()
    budget = Budget(10.0, [1], started_s=97.0, reserve_s=1.0, clock=clock)
    assert budget.remaining_s() == pytest.approx(6.0)
    assert Budget(10.0, [1, 0], started_s=0.0, clock=clock).share_s(0) == 0
    assert Budget(10.0, [1, 0], clock=clock).share_s(1) == 0


@given(
    st.lists(st.floats(0, 10), min_size=1, max_size=8),
    st.lists(st.floats(0, 1), min_size=8, max_size=8),
    st.floats(0.1, 100),
)
def test_steps_that_keep_to_their_shares_keep_the_budget(values, fractions, total):
    clock = Clock()
    budget = Budget(total, values, clock=clock)
    for i in range(len(values)):
        clock.now += budget.share_s(i) * fractions[i]
    assert clock.now - 100.0 <= total * (1 + 1e-9)


class LonelyBench(Bench):
    """A rank without others, whose calls pass a clock's time."""

    def __init__(self, clock: Clock, **options) -> None:
        super().__init__(torch.device("cpu"), 0.02, clock=clock, **options)

    def agree(self, value: float) -> float:
        return value


def test_samples_may_have_a_clock_of_their_own():
    """What a rank waits is no CPU second of it, but goes from the budget."""
    clock, processor = Clock(), Clock()
    bench = LonelyBench(clock, sample_clock=processor)
    bench.start_budget(1.0)

    def call() -> None:
        clock.now += 0.4
        processor.now += 0.001

    assert bench.measure(call).time_s == pytest.approx(0.001)
    assert not bench.has_time(0.5, "another one")


def call_of(clock: Clock, seconds: float):
    """A call that takes so long."""

    def call() -> None:
        clock.now += seconds

    return call


@given(
    factor=st.floats(0.2, 20),
    budget_s=st.floats(1, 20),
    calls=st.lists(st.floats(1e-4, 0.5), min_size=1, max_size=40),
)
def test_points_are_begun_only_where_they_end_in_time(factor, budget_s, calls):
    """However much slower a machine is than expected: one point, of which nothing was known, may be late, not the next ones."""
    clock = Clock()
    bench = LonelyBench(clock, pace=factor)
    bench.start_budget(budget_s)
    begun, end_s = 0, clock.now + budget_s
    for i, call_s in enumerate(calls):
        if bench.has_time(bench.point_s(call_s), f"point {i}"):
            bench.measure(call_of(clock, factor * call_s))
            begun += 1
    assert clock.now <= end_s
    left_out = len(calls) - begun
    why = bench.end_budget()
    assert bool(why) == bool(left_out)
    assert left_out < 2 or f"and {left_out - 1} more" in why


def test_pace_is_learned_from_the_points():
    """Expected of an idle machine and eight times as slow: after the first points no further one is late."""
    clock = Clock()
    bench = LonelyBench(clock)
    bench.start_budget(5.0)
    end_s = clock.now + 5.0
    while bench.has_time(bench.point_s(0.02), "a point"):
        bench.measure(call_of(clock, 0.16))
    assert end_s - 8 * 1.5 * bench.point_s(0.02) < clock.now <= end_s


def test_time_that_is_over_leaves_one_sample():
    clock = Clock()
    bench = LonelyBench(clock)
    bench.start_budget(1.0)
    bench.measure(call_of(clock, 10.0))
    assert clock.now == 100.0 + 2 * 10.0  # one to warm up and one that counts


def test_what_is_left_out_is_said_with_its_seconds():
    bench = LonelyBench(Clock())
    bench.start_budget(1.0)
    assert not bench.has_time(3.0, "a large product")
    assert not bench.has_time(2.0, "another one")
    assert bench.end_budget() == "no time for a large product (3 s expected) and 1 more"
    bench.start_budget(1.0)
    assert bench.end_budget() == ""


# --- groups and pairs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_nodes", "size"), [(1, 1), (1, 2), (1, 8), (2, 4), (3, 6), (4, 1)])
def test_groups_of_an_axis_hold_every_rank_once(num_nodes, size):
    for axis in axes_of(num_nodes, size):
        groups = axis_groups(axis, num_nodes * size)
        assert sorted(rank for group in groups for rank in group) == list(range(num_nodes * size))
        assert {len(group) for group in groups} == {axis.size}
        inside = all(len({rank // size for rank in group}) == 1 for group in groups)
        across = all(len({rank // size for rank in group}) == num_nodes for group in groups)
        assert inside or across


def test_counterparts_of_nodes_are_at_a_distance():
    assert axis_groups(GroupAxis(2, 4), 8) == [(0, 4), (1, 5), (2, 6), (3, 7)]


@pytest.mark.parametrize("number", range(1, 9))
def test_every_two_meet_once_in_disjoint_pairs(number):
    rounds = tournament(number)
    assert sorted(pair for one in rounds for pair in one) == list(combinations(range(number), 2))
    for one in rounds:
        ranks = [rank for pair in one for rank in pair]
        assert len(set(ranks)) == len(ranks)


def test_rounds_pair_counterparts_of_nodes_and_ranks_of_a_node():
    met = [pair for one in links.rounds_of(2, 2) for pair in one]
    assert sorted(met) == [(0, 1), (0, 2), (1, 3), (2, 3)]


def test_node_matrix_needs_every_pair_and_takes_the_largest_message():
    points = [
        PairPoint(first_rank=a, second_rank=a + 2, size_bytes=size, time_s=size / rate)
        for a in range(2)
        for size, rate in ((1000, 1e6), (10**6, 2e9))
    ]
    assert links.node_matrix(points, 2, 2) == ((0.0, 2e9), (2e9, 0.0))
    assert links.node_matrix(points, 3, 2) is None
    assert links.node_matrix((), 1, 2) is None


# --- merging and who is slow ---------------------------------------------------------------------------------------


def test_median_over_ranks_that_took_part():
    point = {"op": "p2p", "size_bytes": 8}
    ranks = [[{**point, "time_s": t, "spread": t / 10}] for t in (1.0, 5.0, 2.0)] + [[{**point, "time_s": None}]]
    assert merge_points(ranks) == ({**point, "time_s": 2.0, "spread": 0.5},)
    assert merge_points([[{**point, "time_s": None}]]) == ()


def test_quieter_of_two_rounds_is_kept():
    rounds = [{"a": [{"n": 1, "time_s": 3.0}, {"n": 2, "time_s": None}]}, {"a": [{"n": 1, "time_s": 2.0}]}]
    assert merge_rounds(rounds) == {"a": [{"n": 1, "time_s": 2.0}, {"n": 2, "time_s": None}]}


def test_spread_is_the_middle_half_over_the_median():
    assert summarise_samples([1.0, 2.0, 3.0, 4.0, 100.0]) == (3.0, pytest.approx(2 / 3))
    assert summarise_samples([2.0]) == (2.0, 0.0)


def ranks_of(*slowness: float) -> list[dict]:
    """Four products; each rank takes so many times as long."""
    return [
        {"matmuls": [{"m": m, "time_s": s * m * 1e-6 * (1 + 0.01 * ((m + rank) % 3))} for m in (1, 2, 3, 4)]}
        for rank, s in enumerate(slowness)
    ]


@pytest.mark.parametrize(("slowness", "names"), [((1, 1), []), ((1, 2), ["rank 1"]), ((1, 1, 1.4, 1), ["rank 2"])])
def test_slow_rank_is_named(slowness, names):
    count = len(slowness)
    reports, found = across_ranks.rank_reports(ranks_of(*slowness), ["cpu"] * count, [0] * count, ["host"])
    assert [item.name for item in found] == names
    assert len(reports) == count


def compared(*factors: float, number: int = 18) -> list[dict]:
    """Repetitions of ranks that take so many times as long, each of them disturbed now and then."""
    return [
        {COMPARISON: [{"what": "compute", "repetition": i, "time_s": time_s} for i, time_s in enumerate(times)]}
        for times in disturbed(*factors, number=number)
    ]


def disturbed(*factors: float, number: int) -> list[list[float]]:
    return [[f * (5.0 if (i + 3 * r) % 7 == 0 else 1.0) for i in range(number)] for r, f in enumerate(factors)]


@pytest.mark.parametrize(("factors", "names"), [((1, 1), []), ((1, 2), ["rank 1"]), ((1, 1, 1.3, 1), ["rank 2"])])
def test_rank_slower_at_most_repetitions_is_named(factors, names):
    count = len(factors)
    reports, found = across_ranks.rank_reports(compared(*factors), ["cpu"] * count, [0] * count, ["host"])
    assert [item.name for item in found] == names
    assert [report.compute_ratio > 1.1 for report in reports] == [factor > 1.1 for factor in factors]


def test_few_repetitions_name_nobody():
    assert across_ranks.rank_reports(compared(1, 2, number=6), ["cpu"] * 2, [0, 0], ["host"])[1] == ()


@pytest.mark.parametrize(("factors", "spread", "slow"), [
    ((1, 1.07, 1, 1), 0.005, [1]),  # beyond 5 % and three MADs
    ((1, 1.04, 1, 1), 0.005, []),  # not beyond 5 %
    ((1, 1.07, 1, 1), 0.2, []),  # within three MADs of what peers differ by
    ((1, 1), 0.05, []),
    ((1, 2), 0.05, [1]),  # of two the slower one
])  # fmt: skip
def test_outliers_are_beyond_three_mads_and_five_percent(
    factors: tuple[float, ...], spread: float, slow: list[int]
) -> None:
    generator = random.Random(0)
    times = [[factor * (1 + spread * generator.uniform(-1, 1)) for _ in range(60)] for factor in factors]
    assert [rank for rank, ratio in enumerate(compared_ratios(times, 1.05)) if ratio.is_slow] == slow


def test_chance_of_the_sign_test_is_that_of_a_coin():
    assert sign_chance(0, 5) == 1.0
    assert sign_chance(5, 5) == 1 / 32
    assert sign_chance(4, 5) == 6 / 32


def test_cores_of_ranks_are_disjoint_and_given_back():
    allowed = frozenset({3, 5, 7, 8, 9})
    assert [local_cores(allowed, rank, 2) for rank in range(2)] == [{3, 5}, {7, 8}]
    assert local_cores(allowed, 0, 6) == frozenset()
    before = os.sched_getaffinity(0)
    one = frozenset({min(before)})
    with pinned(one) as is_pinned:
        assert is_pinned and os.sched_getaffinity(0) == one
    assert os.sched_getaffinity(0) == before
    with pinned(frozenset()) as is_pinned:
        assert not is_pinned


def test_slow_node_is_named_instead_of_its_ranks():
    hosts = ["a", "b", "c"]
    _, found = across_ranks.rank_reports(ranks_of(1, 1, 2, 2, 1, 1), ["gpu"] * 6, [0, 0, 1, 1, 2, 2], hosts)
    assert [(item.kind, item.name) for item in found] == [("node", "node b")]
    _, found = across_ranks.rank_reports(ranks_of(1, 1, 2, 1, 1, 1), ["gpu"] * 6, [0, 0, 1, 1, 2, 2], hosts)
    assert [item.name for item in found] == ["rank 2 on b"]


def test_slow_link_is_named_and_a_node_whose_links_are_all_slow():
    def found(slow_pairs):
        points = [
            {
                "first_rank": a,
                "second_rank": b,
                "size_bytes": 8,
                "spread": 0.0,
                "time_s": 3.0 if (a, b) in slow_pairs else 1.0,
            }
            for a, b in combinations(range(4), 2)
        ]
        by_rank = [{"pairs": points}, {}, {}, {}]
        return [item.name for item in across_ranks.rank_reports(by_rank, ["gpu"] * 4, [0, 1, 2, 3], list("wxyz"))[1]]

    assert found([]) == []
    assert found([(1, 2)]) == ["link x - y"]
    assert found([(0, 1), (1, 2), (1, 3)]) == ["node x"]


# --- bytes on fake tensors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True])
def test_live_bytes_agree_with_torchs_memory_tracker(recompute):
    def peaks(tracker_kind):
        with FakeTensorMode():
            layers = torch.nn.ModuleList(
                torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
                for _ in range(3)
            )
            hidden = torch.randn(32, 64, requires_grad=True)
            tracker = tracker_kind()
            if isinstance(tracker, MemTracker):
                tracker.track_external(layers, hidden)
            else:
                tracker.track([*layers.parameters(), hidden])
            with tracker:
                out = hidden
                for layer in layers:
                    out = checkpoint(layer, out, use_reentrant=False) if recompute else layer(out)
                out.sum().backward()
            if isinstance(tracker, MemTracker):
                (snapshot,) = tracker.get_tracker_snapshot("peak").values()
                return snapshot["Total"]
            return tracker.peak

    assert peaks(LiveBytes) == peaks(MemTracker)


def test_live_bytes_follow_allocation_and_release():
    with LiveBytes() as live:
        a = torch.zeros(1000, dtype=torch.uint8)
        view = a[10:]
        assert live.current == 1000
        b = torch.zeros(500, dtype=torch.uint8)
        del a, b
        assert (live.current, live.peak) == (1000, 1500)
        del view
        assert live.current == 0
        live.reset_peak()
        assert live.peak == 0


# --- storage ---------------------------------------------------------------------------------------------------------


def test_storage_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr("meshwright.profilers.measure.host.FILE_BYTES", (2**20,))
    bench = SimpleNamespace(
        agree=lambda x: x,
        agree_min=lambda x: x,
        has_time=lambda *_: True,
        measure=lambda call, calls: (call(), Timing(1.0, 0.0))[1],
        say=lambda what: None,
    )
    points = measure_storage(bench, str(tmp_path), 1)
    assert [point["operation"] for point in points] == ["write", "read"]
    assert list(tmp_path.iterdir()) == []
    json.dumps(points)


def test_storage_path_must_be_a_folder_to_write_to(tmp_path):
    with pytest.raises(ConfigError, match="no such folder"):
        check_folder(str(tmp_path / "none"))
