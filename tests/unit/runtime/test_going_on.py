"""Jobs that go on when ranks are killed: the steps that follow are those of a run without faults."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from meshwright.runtime.job import machine
from meshwright.runtime.job.launch import launch
from meshwright.runtime.job.worker import Job
from meshwright.runtime.supervision.generations import Board, Generation
from meshwright.runtime.supervision.holdings import Piece, missing, packed_size, unpacked
from meshwright.runtime.supervision.supervisor import Supervisor
from meshwright.runtime.training.metrics import last_step
from meshwright.runtime.training.options import TrainOptions, prepare_options, why_not_continued
from meshwright.schema import Layout, MeshwrightError, TrainingPlan, Workload
from meshwright.schema.shares import state_copies
from plans import make_plan, tiny_model
from small_jobs import assert_gone, losses, read_lines, train_here

STEPS = 9
BATCH = Workload(seq_len=32, global_batch_size=12, precision="fp32")


def plan_of(**layout: Any) -> TrainingPlan:
    return make_plan(tiny_model(num_blocks=2, vocab_size=256), Layout(**layout), workload=BATCH)


FOUR = {
    "replicas": plan_of(dp_replicate=4),
    "sharded, with copies": plan_of(dp_shard=4, zero_stage=3),
    "pipeline": plan_of(pp=2, dp_replicate=2),
    "tensor": plan_of(tp=2, dp_replicate=2),
}
FEWER = (plan_of(dp_replicate=3), plan_of(dp_replicate=2))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses without faults, of one rank."""
    with pytest.MonkeyPatch.context() as patch:
        options = TrainOptions(steps=STEPS)
        return losses(train_here(patch, plan_of(), options, tmp_path_factory.mktemp("one") / "report"))


def go_on(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    plan: TrainingPlan,
    kills: Mapping[int, int],
    *,
    number: int,
    **options: Any,
) -> list[dict[str, Any]]:
    """Train on four ranks, of which some get a signal once so many steps are reported; what they report."""
    files = []
    for each in (plan, *FEWER):
        files.append(str(folder / f"{each.layout.world_size}.json"))
        each.save(files[-1])
    report, left, seen = folder / "report", dict(kills), set[int]()
    look = Supervisor.look

    def look_and_kill(supervisor: Supervisor, pids: Mapping[int, int]) -> None:
        seen.update(pids.values())
        for step, rank in list(left.items()):
            if last_step(report) >= step:
                os.kill(pids[rank], number)
                del left[step]
        look(supervisor, pids)

    monkeypatch.setattr(Supervisor, "look", look_and_kill)
    monkeypatch.setattr(machine, "num_cores", lambda: 4)
    chosen = prepare_options(plan, TrainOptions(steps=STEPS, **options))
    job = Job(plan=files[0], options=chosen, report=str(report), timeout_s=60, fallbacks=tuple(files[1:]))
    try:
        launch(plan, job)
    finally:
        assert_gone([psutil.Process(pid) for pid in seen if psutil.pid_exists(pid)])
    return read_lines(report)


@pytest.mark.long
@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize(
    ("name", "kills"),
    [("replicas", {3: 0, 5: 2}), ("sharded, with copies", {4: 3}), ("pipeline", {3: 1}), ("tensor", {3: 2})],
)
def test_killed_ranks_leave_the_losses_as_they_would_have_been(
    name: str, kills: dict[int, int], expected: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first case loses the rank that reports, and then another; each process is gone at the end."""
    records = go_on(monkeypatch, tmp_path, FOUR[name], kills, number=signal.SIGKILL)
    assert [record["step"] for record in records if "step" in record] == list(range(1, STEPS + 1))
    # Sums of shards and of replicas have another order.
    assert losses(records) == pytest.approx(expected, rel=1e-5)
    causes = [cause for record in records if "event" in record for cause in record["causes"]]
    assert causes == [f"rank {rank} of 4 was killed by signal 9 (SIGKILL)" for rank in kills.values()]
    assert records[-1]["measured"]["steps"] < STEPS  # of the last layout alone


@pytest.mark.long
@pytest.mark.usefixtures("warm_ranks")
def test_states_that_nobody_holds_end_the_job_with_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours of a sharded job die together, one with the copies of the other."""
    plan = FOUR["sharded, with copies"]
    look = Supervisor.look

    def both(supervisor: Supervisor, pids: Mapping[int, int]) -> None:
        if supervisor._dead and 2 in pids:
            os.kill(pids[2], signal.SIGKILL)
        look(supervisor, pids)

    monkeypatch.setattr(Supervisor, "look", both)
    with pytest.raises(MeshwrightError, match="too many ranks are gone") as caught:
        go_on(monkeypatch, tmp_path, plan, {4: 1}, number=signal.SIGKILL)
    assert "dp_replicate" in (caught.value.help or "")


def test_copies_of_states() -> None:
    assert [state_copies(plan) for plan in FOUR.values()] == [4, 1, 2, 2]
    assert state_copies(plan_of(tp=2)) == state_copies(plan_of(pp=2)) == 1


def test_what_cannot_go_on_says_why() -> None:
    plan = FOUR["replicas"]
    assert not why_not_continued(plan, TrainOptions())
    assert "zeroth-order" in why_not_continued(plan, TrainOptions(zeroth_order=True))[0]


def test_generations_are_read_as_text() -> None:
    """A value that would run code if it were unpickled is no generation."""
    store = dist.HashStore()
    board = Board(store)
    first = Generation(number=0, members=(0, 1), plan="plan.json", num_active=2)
    board.publish(first)
    board.publish(first.replace(number=1, members=(1,), num_active=1, cause="rank 0 died"))
    assert board.read(0) == first
    assert [generation.cause for generation in board.after(0)] == ["rank 0 died"]
    assert not board.after(1)
    board.store.set("generation/2", b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(ValueError, match="JSON"):
        board.after(0)


def pieces(shapes: Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]]) -> list[Piece]:
    return [Piece(name, offsets, sizes, (4, 2), "float32") for name, offsets, sizes in shapes]


def test_missing_parts_are_found_and_buffers_are_cut_at_their_pieces() -> None:
    halves = pieces([("w", (0, 0), (2, 2)), ("w", (2, 0), (2, 2))])
    assert not missing({"w": (4, 2)}, [*halves, halves[0]])
    assert missing({"w": (4, 2), "b": (3,)}, halves[:1]) == ["w", "b"]
    values = [torch.arange(4.0).view(2, 2), torch.arange(4.0, 8.0).view(2, 2)]
    buffer = torch.cat([value.view(-1).view(torch.uint8) for value in values])
    assert len(buffer) == packed_size(halves)
    assert all(a.equal(b) for a, b in zip(unpacked(halves, buffer), values, strict=True))
    odd = Piece("b", (0,), (1,), (1,), "uint8")
    shifted = unpacked([odd, *halves], torch.cat([torch.zeros(1, dtype=torch.uint8), buffer]))
    assert all(a.equal(b) for a, b in zip(shifted[1:], values, strict=True))


def test_last_step_of_a_report(tmp_path: Path) -> None:
    report = tmp_path / "report"
    assert last_step(report) == 0
    report.write_text("".join(json.dumps(line) + "\n" for line in ({"step": 3}, {"event": "went on"})))
    assert last_step(report) == 3
