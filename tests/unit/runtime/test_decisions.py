"""What the launcher with the store decides, report by report, with a clock of the test's own."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.runtime.job.launch import processes_of_nodes
from meshwright.runtime.job.rendezvous import Meeting
from meshwright.runtime.supervision import decisions
from meshwright.runtime.supervision.decisions import BROKEN_S, SILENT_S, Decisions
from meshwright.runtime.supervision.generations import Report
from meshwright.schema import Layout
from small_jobs import plan_elsewhere, small_plan
from test_local_updates import islands_plan

STEP_S = 0.3


class Job:
    """Decisions over three nodes of two ranks, with plans for 6, 4 and 2 devices; node 0 has the store."""

    def __init__(self, patch: pytest.MonkeyPatch, *, spares: int = 0, sizes: Sequence[int] = (4, 2)) -> None:
        self.now_s, self.beating = 0.0, {1, 2}
        patch.setattr(decisions, "time", SimpleNamespace(monotonic=lambda: self.now_s, time=lambda: 0.0))
        self.meeting = Meeting(0, {}, dist.HashStore())
        num_nodes, layout = 3 - spares, Layout(dp_replicate=3 - spares, tp=2)
        plan = plan_elsewhere(num_devices=2 * num_nodes, num_nodes=num_nodes, layout=layout)
        fewer = [small_plan(Layout(dp_replicate=size // 2, tp=2)) for size in sizes if size < 2 * num_nodes]
        self.decisions = Decisions(self.meeting, plan, fewer, processes_of_nodes(plan, spares))
        self.board = self.decisions.board

    def passes(self, seconds: float) -> None:
        for _ in range(round(seconds / STEP_S)):
            self.now_s += STEP_S
            for node in self.beating:
                self.board.beat(node)
            self.decisions.look()

    def tells(self, *ranks: int, node: int = 1, **what: bool) -> None:
        self.board.tell(Report(node=node, ranks=ranks, cause="died", **what))
        self.passes(STEP_S)

    @property
    def absent(self) -> list[int]:
        return [node for node in range(3) if self.meeting.is_absent(node)]

    @property
    def members(self) -> tuple[int, ...]:
        return self.decisions.generation.active


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(monkeypatch)


def test_a_death_on_another_node_begins_a_generation_of_complete_nodes(job: Job) -> None:
    job.tells(1, node=0)
    assert job.members == (2, 3, 4, 5)
    assert job.board.read(1).cause == "died"
    job.tells(4, 5, node=2)
    assert job.members == (2, 3)
    assert job.decisions.generation.members == (2, 3, 0)


def test_a_silent_node_is_lost_after_its_time_and_sooner_where_connections_are_closed(job: Job) -> None:
    job.passes(1)
    job.beating = {2}
    job.passes(SILENT_S - 1)
    assert job.decisions.generation.number == 0
    job.passes(2)
    assert job.members == (0, 1, 4, 5)
    assert job.absent == [1]
    job.board.mark("broken", 1)
    job.beating = set()
    job.passes(BROKEN_S + 1)
    assert job.members == (0, 1)
    assert job.decisions.generation.cause.startswith("node 2 of 3 said nothing for 3")


def test_time_in_which_the_launcher_itself_stood_still_makes_nobody_silent(job: Job) -> None:
    job.passes(1)
    job.now_s += 100
    job.decisions.look()
    assert job.decisions.generation.number == 0


def test_ranks_that_come_back_are_taken_in_when_the_step_has_ended(job: Job) -> None:
    job.tells(2, 3, leaves=True)
    assert (job.members, job.absent) == ((0, 1, 4, 5), [1])
    for rank in (2, 3):
        assert not job.board.is_marked("invited", 1)
        job.board.arrive(rank)
        job.passes(1)
    assert job.members == (0, 1, 4, 5)
    assert job.board.is_marked("invited", 1)
    job.board.mark("requested", 1)
    job.passes(1)
    assert job.members == tuple(range(6))
    assert job.decisions.generation.cause == "ranks 2, 3 came back"


def test_a_spare_node_stands_by_until_one_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, spares=1)
    assert (job.members, job.decisions.generation.members) == ((0, 1, 2, 3), tuple(range(6)))
    job.tells(5, node=2)  # one that stands by
    assert job.decisions.generation.number == 0
    job.tells(0, node=0)
    assert job.members == (2, 3, 1, 4)  # no node is complete besides


def test_what_nobody_survives_ends_the_job_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, sizes=(4,))
    job.tells(2)
    job.tells(4, 5, node=2)
    assert job.decisions.is_over
    assert job.board.end_reason() == "died, and there is no plan for 3 of 6 ranks"
    job = Job(monkeypatch)
    job.tells(2, is_final=True)
    assert (job.board.end_reason(), job.decisions.generation.number) == ("died", 0)


def test_ranks_that_are_not_wanted_stand_by_from_the_next_step_on(job: Job) -> None:
    job.decisions.limit = 5
    job.passes(1)
    assert job.decisions.generation.number == 0
    assert job.board.is_marked("invited", 0)
    job.board.mark("requested", 0)
    job.passes(1)
    assert (job.members, job.decisions.generation.members) == ((0, 1, 2, 3), tuple(range(6)))
    assert job.decisions.generation.cause == "4 ranks are to train"
    job.decisions.limit = 0  # the fewest for which there is a plan
    job.tells(4, 5, node=2)  # that stand by
    job.board.mark("requested", 1)
    job.passes(1)
    assert job.members == (0, 1)
    job.tells(0, 1, node=0)  # others take their place
    assert job.members == (2, 3)


def test_a_job_that_is_done_loses_nobody(job: Job) -> None:
    job.board.finish()
    job.beating = set()
    job.passes(3 * SILENT_S)
    job.tells(2)
    assert job.decisions.generation.number == 0


@settings(max_examples=30, deadline=None)
@given(events=st.lists(st.tuples(st.sampled_from(["dies", "returns", "node"]), st.integers(0, 5)), max_size=12))
def test_members_are_those_that_live(events: list[tuple[str, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        job, alive = Job(patch), set(range(6))
        for kind, rank in events:
            node = [2 * (rank // 2), 2 * (rank // 2) + 1]
            lost = [rank] if kind == "dies" else node
            if kind == "returns" and rank not in alive:
                job.board.arrive(rank)
                alive.add(rank)
            elif kind != "returns" and len(alive - set(lost)) >= 2:
                job.tells(*lost, node=rank // 2)
                alive -= set(lost)
            job.passes(STEP_S)
            number = job.decisions.generation.number
            if job.board.is_marked("invited", number):
                job.board.mark("requested", number)
                job.passes(STEP_S)
                assert set(job.decisions.generation.members) == alive
            assert set(job.members) <= alive
            assert len(job.members) == 2 * (len(alive) // 2)
        numbers = [each.number for each in job.board.after(-1)]
        assert numbers == list(range(len(numbers)))


def test_a_node_that_is_about_to_be_taken_away_stands_by_in_the_next_generation(job: Job) -> None:
    job.tells(2, 3, is_notice=True)
    assert (job.members, job.board.is_marked("invited", 0)) == (tuple(range(6)), True)
    job.board.mark("requested", 0)
    job.passes(STEP_S)
    assert (job.members, job.decisions.generation.members) == ((0, 1, 4, 5), (0, 1, 4, 5, 2, 3))
    job.tells(2, 3, leaves=True)
    assert (job.decisions.generation.number, job.absent) == (1, [1])
    for rank in (2, 3):
        job.board.arrive(rank)
    job.passes(STEP_S)
    assert job.board.is_marked("invited", 1)


def test_notices_that_leave_no_plan_ask_all_to_save(job: Job) -> None:
    for node in (1, 2):
        job.tells(2 * node, 2 * node + 1, node=node, is_notice=True)
    assert job.board.is_marked("invited", 0)
    assert not job.board.is_marked("stopping", 0)
    job.tells(0, 1, node=0, is_notice=True)
    assert job.board.is_marked("stopping", 0)
    job.tells(0, 1, node=0)  # one that did not wait
    assert job.decisions.is_over


def decide_over_islands(*, needs_all: bool = False) -> Decisions:
    """Decisions over islands of two, one and two ranks."""
    plan = islands_plan(Layout(dp_replicate=5), (2, 1, 2), (2, 2, 2), steps=2)
    return Decisions(
        Meeting(0, {}, dist.HashStore()), plan, (), [range(2), range(2, 3), range(3, 5)], needs_all=needs_all
    )


def died(decisions: Decisions, *ranks: int) -> tuple[int, ...]:
    decisions.take(Report(node=0, ranks=ranks, cause="died"))
    return decisions.generation.members


def back(decisions: Decisions, *ranks: int) -> None:
    for rank in ranks:
        decisions.board.arrive(rank)
    decisions.look()


def test_an_island_lives_and_dies_as_one_and_comes_back_complete_at_a_sum() -> None:
    decisions = decide_over_islands()
    board = decisions.board
    assert died(decisions, 3) == (0, 1, 2)
    assert died(decisions, 4) == (0, 1, 2) and decisions.generation.number == 1  # the rest of the island
    back(decisions, 3)
    assert not board.is_marked("invited", 1)
    back(decisions, 4)
    assert board.is_marked("invited", 1)
    assert died(decisions, 2) == (0, 1)  # in the middle of a sum: those who wait are not let in
    decisions.look()
    assert board.is_marked("invited", 2)
    board.mark("requested", 2)
    decisions.look()
    assert decisions.generation.members == (0, 1, 3, 4) and decisions.generation.cause == "ranks 3, 4 came back"
    assert died(decisions, 0, 1) == (3, 4)
    died(decisions, 3)
    assert decisions.is_over


def test_an_island_that_dies_again_while_it_waits_changes_nothing() -> None:
    decisions = decide_over_islands()
    died(decisions, 3, 4)
    back(decisions, 3)
    assert died(decisions, 3) == (0, 1, 2) and decisions.generation.number == 1
    back(decisions, 4)
    assert not decisions.board.is_marked("invited", 1)
    back(decisions, 3)
    assert decisions.board.is_marked("invited", 1)


def test_islands_that_need_each_other_end_together() -> None:
    decisions = decide_over_islands(needs_all=True)
    died(decisions, 2)
    assert decisions.is_over and "died" in decisions.board.end_reason()
