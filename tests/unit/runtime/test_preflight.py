"""Ranks are compared before a job: one that is slower than its peers is named, and stands by where there is a spare."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import slow_rank
import torch.distributed as dist
from meshwright.cli.main import app
from meshwright.profilers.run.preflight import rounds_of_two
from meshwright.runtime.job import JobEvent, apply, machine
from meshwright.runtime.job.preflight import compare_nodes
from meshwright.runtime.job.rendezvous import Meeting, Rendezvous, meet
from meshwright.runtime.supervision.decisions import Decisions
from meshwright.runtime.training.options import TrainOptions
from meshwright.schema import ConfigError, Layout, TrainingPlan, Workload
from meshwright.schema.preflight import PreflightReport
from meshwright.schema.profile import RankReport, SlowComponent
from plans import make_plan, tiny_model
from small_jobs import losses, train_here
from typer.testing import CliRunner

BATCH = Workload(seq_len=32, global_batch_size=12, precision="fp32")


def plan_of(**layout: int) -> TrainingPlan:
    return make_plan(tiny_model(num_blocks=2, vocab_size=256), Layout(**layout), workload=BATCH)


@pytest.fixture
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "num_cores", lambda: 4)


def compared(num_ranks: int, slow: str, patch: pytest.MonkeyPatch, *, seconds: float = 1.0) -> PreflightReport:
    slow_rank.use(slow, patch, seconds=seconds)
    with meet(Rendezvous()) as meeting:
        return compare_nodes(meeting, [range(num_ranks)], "gloo", seconds=seconds)


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize(
    "work",
    [
        "compute",
        "nothing",
        pytest.param("memory", marks=pytest.mark.long),
        pytest.param("link", marks=pytest.mark.long),
    ],
)
def test_a_rank_that_takes_longer_is_named_and_no_other(work: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks, more than there are cores here: what they compute is counted by the seconds of a processor."""
    report = compared(4, f"{work} {-1 if work == 'nothing' else 2}", monkeypatch)
    named = {(each.what, rank) for each in report.slow for rank in each.ranks if each.what in (work, "compute")}
    assert named == (set() if work == "nothing" else {(work, 2)})
    assert len(report.ranks) == 4
    if work == "compute":
        assert report.ranks[2].compute_ratio == pytest.approx(2, rel=0.5)
        assert "rank 2 multiplies" in report.sentences()[0]


@pytest.mark.usefixtures("warm_ranks")
def test_the_command_names_the_slow_rank_and_ends_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_rank.use("compute 2", monkeypatch, seconds=0.1)
    result = CliRunner().invoke(app, ["doctor", "--nodes", "--ranks", "3", "--json"])
    assert result.exit_code == 1, result.output
    report = PreflightReport.model_validate_json(result.stdout)
    assert 2 in report.slow_ranks
    assert "rank 2 multiplies" in result.stderr


@pytest.mark.long
@pytest.mark.usefixtures("warm_ranks", "many_cores")
def test_a_slow_rank_stands_by_and_what_happens_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three ranks train, the one that computes twice is the spare; losses are those of one rank."""
    slow_rank.use("compute 1", monkeypatch, seconds=1.0)
    options, heard, records = TrainOptions(steps=3), list[JobEvent](), list[dict]()
    expected = losses(train_here(monkeypatch, plan_of(), options, tmp_path / "report"))
    result = apply(
        plan_of(dp_replicate=2), options, on_fault="continue", spares=1, preflight=True, on_event=heard.append,
        on_record=records.append,
    )  # fmt: skip
    assert [event.event for event in heard] == ["compared", "began"]
    assert heard[0].ranks == (1,)
    assert heard[0].causes[-1] == "they stand by"
    assert heard[1].ranks == (0, 2)
    assert losses(records) == pytest.approx(expected, rel=1e-5)
    assert result is not None
    assert result["measured"]["steps"] == 3


@pytest.fixture
def store() -> Iterator[dist.Store]:
    return dist.HashStore()


@pytest.mark.parametrize(
    ("nodes", "slow", "active"),
    [
        ((range(5),), (1, 3), (0, 2, 4, 1)),
        ((range(2), range(2, 4), range(4, 6)), (1,), (2, 3, 4, 5)),
        ((range(2), range(2, 4), range(4, 6)), (0, 3), (4, 5, 1, 0)),  # one spare node for two slow ones
    ],
)
def test_slow_ranks_come_last(
    nodes: Sequence[range], slow: tuple[int, ...], active: tuple[int, ...], store: dist.Store
) -> None:
    decisions = Decisions(Meeting(0, {}, store), plan_of(dp_replicate=4), (), nodes, slow)
    assert decisions.generation.active == active


@pytest.mark.parametrize("nodes", [(3,), (4,), (5,), (2, 2), (3, 3), (1, 1, 1), (2, 2, 2, 2)])
def test_each_rank_exchanges_with_two_others_of_its_kind(nodes: tuple[int, ...]) -> None:
    rounds, size, num_ranks = rounds_of_two(nodes), nodes[0], sum(nodes)
    partners = {
        rank: [sum(pair) - rank for pairs in rounds for pair in pairs if rank in pair] for rank in range(num_ranks)
    }
    expected = min(2, (len(nodes) if len(nodes) > 2 else size) - 1)
    for rank, others in partners.items():
        assert len(set(others)) == len(others) >= expected
        assert all((other // size == rank // size) == (len(nodes) < 3) for other in others)
    for pairs in rounds:
        assert len({rank for pair in pairs for rank in pair}) == 2 * len(pairs)


def test_one_rank_has_no_peers_and_a_report_says_who_is_slow() -> None:
    refused = CliRunner().invoke(app, ["doctor", "--nodes", "--ranks", "1"])
    assert refused.exit_code == 2
    assert "no peers" in refused.output
    refused = CliRunner().invoke(app, ["doctor", "--ranks", "2"])
    assert refused.exit_code == 2
    assert "--nodes" in refused.output
    with pytest.raises(ConfigError, match="--spares"):
        apply(plan_of(), on_fault="restart", spares=1)
    slow = SlowComponent(kind="rank", name="rank 1", what="link", ratio=3.0, noise=0.04, ranks=(1,))
    ranks = tuple(RankReport(rank=rank, node=0, device="cpu") for rank in range(2))
    report = PreflightReport(seconds=1, repetitions=9, hosts=("a",), ranks=ranks, slow=(slow,))
    assert report.slow_ranks == (1,)
    assert report.sentences() == ("rank 1 exchanges 3.00 times as long as its peers, which differ by 4.0 %",)
    assert "none is slower" in JobEvent(event="compared", report=report.replace(slow=())).sentence()
