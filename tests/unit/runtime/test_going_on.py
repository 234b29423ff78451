"""Jobs that go on when ranks are killed: the steps that follow are those of a run without faults."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import rank_with_faults
import torch
import torch.distributed as dist
from meshwright.runtime.job import JobEvent, apply, machine
from meshwright.runtime.job.launch import launch
from meshwright.runtime.job.run import write_event
from meshwright.runtime.job.worker import Job
from meshwright.runtime.supervision import survivor as survivor_module
from meshwright.runtime.supervision.copies import PeerCopies
from meshwright.runtime.supervision.exchange import Exchange
from meshwright.runtime.supervision.generations import Board, Generation
from meshwright.runtime.supervision.holdings import Piece, missing, packed_size, unpacked
from meshwright.runtime.supervision.membership import Membership
from meshwright.runtime.supervision.neighbours import layer_of, means_of_neighbours
from meshwright.runtime.supervision.supervisor import Hold, Scale, Supervisor
from meshwright.runtime.supervision.survivor import ReplacedError, Survivor
from meshwright.runtime.training.checkpoint import TrainingProgress
from meshwright.runtime.training.metrics import MetricsWriter, last_step, read_new_records
from meshwright.runtime.training.options import TrainOptions, prepare_options, why_not_continued
from meshwright.schema import Layout, MeshwrightError, TrainingPlan, Workload
from meshwright.schema.shares import state_copies
from plans import make_plan, tiny_model
from small_jobs import assert_gone, losses, read_lines, train_here
from warm_ranks import PRELOADED

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


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder whose files say where ranks die (rank_with_faults.py)."""
    folder = tmp_path / "faults"
    folder.mkdir()
    rank_with_faults.use(folder, monkeypatch)
    monkeypatch.setattr(machine, "num_cores", lambda: 4)
    return folder


def go_on(
    plan: TrainingPlan,
    faults: Path,
    *deaths: str,
    fewer: Sequence[TrainingPlan] = FEWER,
    options: TrainOptions | None = None,
    scale: Scale | None = None,
    **job: Any,
) -> Any:
    """Train on four ranks, some of which die; what they report."""
    folder = faults.parent
    for name in deaths:
        (faults / name).touch()
    files = []
    for each in (plan, *fewer):
        files.append(str(folder / f"{each.layout.world_size}.json"))
        each.save(files[-1])
    chosen = prepare_options(plan, (options or TrainOptions()).replace(steps=STEPS))
    work = Job(
        plan=files[0], options=chosen, report=str(folder / "report"), timeout_s=60, fallbacks=tuple(files[1:]), **job
    )
    before = psutil.Process().children(recursive=True)
    try:
        launch(plan, work, on_event=lambda event: write_event(work, event), scale=scale)
    finally:
        assert_gone([each for each in psutil.Process().children(recursive=True) if is_new_rank(each, before)])
    return read_lines(folder / "report")


def is_new_rank(process: psutil.Process, before: Sequence[psutil.Process]) -> bool:
    """A process that the job started, and no server of forks."""
    try:
        return process not in before and process.parent().pid != os.getpid()
    except psutil.NoSuchProcess:
        return False


def causes_of(records: Sequence[dict[str, Any]]) -> list[str]:
    return [cause for record in records if record.get("event") == "went on" for cause in record["causes"]]


@pytest.mark.long
@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize(
    ("name", "deaths"),
    [
        ("replicas", ("die-3-0", "die-5-2")),
        ("sharded, with copies", ("die-4-3",)),
        ("pipeline", ("die-3-1",)),
        ("tensor", ("die-3-2",)),
    ],
)
def test_killed_ranks_leave_the_losses_as_they_would_have_been(
    name: str, deaths: tuple[str, ...], expected: list[float], faults: Path
) -> None:
    """The first case loses the rank that reports, and then another; each process is gone at the end."""
    records = go_on(FOUR[name], faults, *deaths)
    assert [record["step"] for record in records if "step" in record] == list(range(1, STEPS + 1))
    # Sums of shards and of replicas have another order.
    assert losses(records) == pytest.approx(expected, rel=1e-5)
    ranks = [death.rpartition("-")[2] for death in deaths]
    assert causes_of(records) == [f"rank {rank} of 4 was killed by signal 9 (SIGKILL)" for rank in ranks]
    assert records[-1]["measured"]["steps"] < STEPS  # of the last layout alone


@pytest.mark.long
@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize(
    ("spares", "restarts", "causes", "events"),
    [
        (
            1,
            0,
            ["rank 1 of 3 was killed by signal 9 (SIGKILL)"],
            [("began", [0, 1]), ("lost", [1]), ("began", [0, 2]), ("went on", [0, 2])],
        ),
        (
            0,
            1,
            ["rank 1 of 2 was killed by signal 9 (SIGKILL)", "rank 1 came back"],
            [
                ("began", [0, 1]),
                ("lost", [1]),
                ("began", [0]),
                ("went on", [0]),
                ("returned", [1]),
                ("began", [0, 1]),
                ("went on", [0, 1]),
            ],
        ),
    ],
)
def test_a_spare_rank_takes_the_place_of_a_dead_one_or_that_is_started_anew(
    spares: int, restarts: int, causes: list[str], events: list[tuple[str, list[int]]], expected: list[float], faults: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    look = Supervisor.look

    def waiting(supervisor: Supervisor, pids: Mapping[int, int]) -> None:
        if (faults / "waits-1").exists() and (faults / "stop-5").exists():
            (faults / "takes-in").touch()
            (faults / "stop-5").unlink()
        look(supervisor, pids)

    if restarts:
        monkeypatch.setattr(Supervisor, "look", waiting)
        (faults / "stop-5").touch()
    records = go_on(
        plan_of(dp_replicate=2), faults, "die-3-1", fewer=(plan_of(),), spares=spares, restart_ranks=restarts,
        hang_timeout_s=0.0, options=TrainOptions(checkpoint_dir=str(faults.parent / "checkpoints"), checkpoint_every=2),
    )  # fmt: skip
    assert losses(records) == pytest.approx(expected, rel=1e-5)
    assert causes_of(records) == causes
    assert [
        (record["event"], record["ranks"]) for record in records if record.get("event", "checkpoint") != "checkpoint"
    ] == events


@pytest.mark.long
@pytest.mark.usefixtures("warm_ranks")
def test_ranks_that_a_policy_does_not_want_stand_by_from_a_step_on_and_are_taken_in_again(
    expected: list[float], faults: Path
) -> None:
    (faults / "takes-in").touch()
    (faults / "stop-5").touch()

    def scale(steps: int, num_devices: int) -> Hold:
        assert num_devices == 2
        if steps >= 4 and (faults / "stop-5").exists():
            (faults / "takes-in").touch()
            (faults / "stop-5").unlink()
        return Hold(0, 1, 1) if (faults / "stop-5").exists() else Hold(1, 1, 2)

    records = go_on(plan_of(dp_replicate=2), faults, fewer=(plan_of(),), scale=scale)
    assert losses(records) == pytest.approx(expected, rel=1e-5)
    assert causes_of(records) == ["1 ranks are to train", "2 ranks are to train"]
    began = [record["ranks"] for record in records if record.get("event") == "began"]
    assert began == [[0, 1], [0], [0, 1]]
    held = [(record["spot"], record["demand"]) for record in records if record.get("event") == "hold"]
    assert held == [(0, 1), (1, 1)]


@pytest.mark.long
@pytest.mark.usefixtures("warm_ranks")
def test_a_thread_that_comes_back_after_another_took_its_place_does_nothing_more(
    expected: list[float], faults: Path
) -> None:
    """Rank 0 is away in step 5, in which rank 1 dies, until the job is at step 7 with the spare."""
    os.mkfifo(faults / "stuck-5-0")
    records = go_on(plan_of(dp_replicate=2), faults, "die-5-1", fewer=(plan_of(),), spares=1)
    assert [record["step"] for record in records if "step" in record] == list(range(1, STEPS + 1))
    assert losses(records) == pytest.approx(expected, rel=1e-5)
    assert causes_of(records) == ["rank 1 of 3 was killed by signal 9 (SIGKILL)"]


@pytest.mark.long
@pytest.mark.usefixtures("warm_ranks")
def test_a_death_before_anybody_has_read_the_checkpoint_does_not_lose_it(expected: list[float], faults: Path) -> None:
    options = TrainOptions(checkpoint_dir=str(faults.parent / "checkpoints"), checkpoint_every=4)
    two, one = plan_of(dp_shard=2, zero_stage=3), (plan_of(),)
    with pytest.raises(MeshwrightError, match="killed by signal 9"):
        go_on(two, faults, "die-6-0", "die-6-1", fewer=one, options=options)
    (faults.parent / "report").unlink()
    records = go_on(two, faults, "die-0-1", fewer=one, options=options.replace(resume=True))
    assert [record["step"] for record in records if "step" in record] == list(range(5, STEPS + 1))
    assert losses(records) == pytest.approx(expected[4:], rel=1e-5)


@pytest.mark.long
@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize(
    ("deaths", "fewer"),
    [
        (("die-5-1", "die-5-2"), FEWER),
        (("die-2-1", "die-7-0", "die-7-2"), (plan_of(dp_shard=2, zero_stage=3), plan_of())),
    ],
)
def test_states_that_nobody_holds_end_the_job_with_one_message(
    deaths: tuple[str, ...], fewer: tuple[TrainingPlan, ...], faults: Path
) -> None:
    """Neighbours of a sharded job die together, one with the copies of the other; or all but one that stands by since step 1."""
    with pytest.raises(MeshwrightError, match="too many ranks are gone") as caught:
        go_on(FOUR["sharded, with copies"], faults, *deaths, fewer=fewer)
    assert "dp_replicate" in (caught.value.help or "")


@pytest.mark.parametrize("code", [0, 1])
def test_a_process_whose_main_thread_never_comes_back_ends_with_the_job(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that has gone on in its place ends it, well or with its error."""

    def drive(survivor: Survivor) -> None:
        if code:
            raise MeshwrightError("lost")

    monkeypatch.setattr(survivor_module, "STUCK_S", 0.01)
    monkeypatch.setattr(Survivor, "drive", drive)
    monkeypatch.setattr(Survivor, "follow", lambda *_, **__: None)
    if not (child := os.fork()):
        survivor = Survivor.__new__(Survivor)
        survivor.run, survivor._is_behind, survivor._outcome = None, False, Future()
        survivor._handover, survivor._is_following, survivor._is_updating = threading.Lock(), False, False
        survivor._driver = threading.current_thread()
        threading.Timer(0.02, survivor.take_over).start()
        for _ in range(2):
            with suppress(ReplacedError):
                time.sleep(60)
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code


def test_a_thread_that_was_replaced_raises_when_it_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the outcome of the other, which is the job's, and the states are the other's to change."""
    survivor = Survivor.__new__(Survivor)
    survivor.run, survivor._is_behind, survivor._outcome = None, False, Future()
    survivor._handover, survivor._is_following, survivor._is_updating = threading.Lock(), False, False
    monkeypatch.setattr(survivor_module, "exit_now", lambda _: None)
    monkeypatch.setattr(survivor_module, "STUCK_S", 0.0)
    monkeypatch.setattr(Survivor, "follow", lambda survivor, *_, **__: setattr(survivor, "_is_following", False))
    reached, (reads, writes) = list[str](), os.pipe()

    def train(survivor: Survivor) -> None:
        is_second = threading.current_thread() is not first
        if not is_second:
            os.read(reads, 1)  # in C, where nothing reaches it
            reached.append("first")
        survivor.before_update()
        os.write(writes, b"1")
        assert not survivor.take_over()  # while states change
        first.join(0.1)
        reached.append("second")

    monkeypatch.setattr(Survivor, "_train", train)
    first = threading.Thread(target=survivor.drive)
    survivor._driver = first
    first.start()
    time.sleep(0.05)
    assert survivor.take_over()
    first.join()
    survivor._driver.join()  # it ends the process unless it finds what this test has put in the place of that
    assert reached == ["second"]


def test_a_generation_that_was_entered_is_not_counted_twice() -> None:
    """In a process of its own, as a rank is: the thread that watches ends with it, and torch may abort where a store goes first."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=_enter_the_second_of_two)
    process.start()
    process.join()
    assert process.exitcode == 0


def _enter_the_second_of_two() -> None:
    """Two begin at once: the driver enters the second while the thread that watches wakes for the first."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    board, first = Board(store), Generation(number=0, members=(0, 1, 2), num_active=3)
    board.publish(first)
    membership = Membership("localhost", store.port, 0, 5.0)
    membership.begin(lambda: True)
    with membership._lock:
        board.publish(first.replace(number=1, members=(0, 1), num_active=2))
        board.publish(first.replace(number=2, members=(0,), num_active=1))
        time.sleep(0.1)
        membership.generation = board.read(2)
        membership._noticed = 2
    time.sleep(0.1)
    membership.check()
    os._exit(0)


def test_two_copies_stay_until_every_rank_has_the_later_one() -> None:
    """One of two ranks has not waited for the second copy when the other dies: the first is complete on both."""
    store = dist.HashStore()
    copies = list[PeerCopies | None]([None, None])
    states = [{Piece("w", (rank,), (1,), (2,), "float32"): torch.zeros(1)} for rank in range(2)]

    def begin(rank: int) -> None:
        members = SimpleNamespace(
            position=rank, store=store,
            group=lambda name, position, size: dist.ProcessGroupGloo(
                dist.PrefixStore(name, store), position, size, timedelta(seconds=5)
            ),
        )  # fmt: skip
        copies[rank] = PeerCopies(
            Exchange(members, "active", 2), generation=0, every=1, mtbf_s=1e6, stride=1, live=states[rank]
        )

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(begin, range(2)))
    for step in (1, 2):
        for rank, each in enumerate(copies):
            assert each is not None
            next(iter(states[rank].values())).fill_(10 * rank + step)
            each.copy(TrainingProgress(step=step), 0.0)
        for each in copies[: 3 - step]:
            assert each is not None
            each.settle()
    held = [{each.progress.step: each.tensors for each in of_rank.holdings()} for of_rank in copies if of_rank]
    assert [sorted(each) for each in held] == [[1, 2], [1]]
    assert [float(tensor) for tensor in held[0][1].values()] == [1.0, 11.0]


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
    first = Generation(number=0, members=(0, 1), num_active=2)
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
    moment = replace(halves[0], name="optimizer.w.exp_avg")
    assert missing({"w": (4, 2)}, [*halves, moment]) == [moment.name]
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


def test_a_line_that_a_full_disk_cut_short_is_passed_over(tmp_path: Path) -> None:
    report, finished = tmp_path / "report", threading.Event()
    report.write_text('{"step": 3}\n{"step": 4, "lo')
    for step in (4, 5):
        writer = MetricsWriter(report, append=True)
        writer.write({"step": step})
        writer.close()
    assert last_step(report) == 5
    finished.set()
    assert [record["step"] for record in read_new_records(report, finished)] == [3, 4, 5]


@pytest.mark.long
@pytest.mark.usefixtures("warm_ranks")
def test_a_job_that_starts_again_tells_what_it_lost_and_where_it_went_on(
    expected: list[float], faults: Path, tmp_path: Path
) -> None:
    """Steps after the last checkpoint are done again; what a callback raises ends the run."""
    (faults / "die-5-1").touch()
    heard, records = list[JobEvent](), list[dict[str, Any]]()
    settings = {"steps": 6, "checkpoint_dir": str(tmp_path / "checkpoints"), "checkpoint_every": 2, "max_restarts": 1}
    apply(plan_of(dp_replicate=2), on_event=heard.append, on_record=records.append, **settings)
    told = [(event.event, event.ranks, event.after_step) for event in heard]
    assert told == [
        ("checkpoint", (), 2), ("checkpoint", (), 4), ("lost", (1,), None), ("restarted", (), None), ("checkpoint", (), 6),
    ]  # fmt: skip
    assert heard[3].sentence().endswith("restart 1 of 1")
    assert "rank 1 of 2 was killed by signal 9 (SIGKILL)" in heard[2].causes[0]
    assert [record["step"] for record in records if "step" in record] == [1, 2, 3, 4, 5, 6]
    assert losses(records)[:2] == pytest.approx(expected[:2], rel=0.1)  # another schedule of the learning rate

    def refuse(event: JobEvent) -> None:
        raise ValueError("no room")

    with pytest.raises(ValueError, match="no room"):
        apply(
            plan_of(dp_replicate=2),
            steps=50,
            checkpoint_dir=str(tmp_path / "more"),
            checkpoint_every=1,
            on_event=refuse,
        )


def test_a_lost_layer_is_the_mean_of_those_next_to_it() -> None:
    """Layers 1 and 2 of four are lost; of the ends, and where the neighbours lie otherwise, nothing is made up."""
    needed = {f"model.layers.{i}.w": (4, 2) for i in range(4)} | {"model.norm.w": (2,)}
    held = [Piece(name, (0,) * len(size), tuple(size), tuple(size), "float32") for name, size in needed.items()]
    alive = [piece for piece in held if layer_of(piece.name) not in (1, 2)]
    moments = [replace(alive[0], name=f"optimizer.model.layers.{i}.w.exp_avg") for i in (0, 3)]
    means = means_of_neighbours(needed, [*alive, *moments])
    assert means["model.layers.1.w"] == means["model.layers.2.w"] == ("model.layers.0.w", "model.layers.3.w")
    assert means["optimizer.model.layers.2.w.exp_avg"] == (moments[0].name, moments[1].name)
    assert not means_of_neighbours(needed, [piece for piece in held if layer_of(piece.name) != 3])
    assert not means_of_neighbours(needed, [piece for piece in held if layer_of(piece.name) is not None])
    halves = pieces([("model.layers.3.w", (0, 0), (2, 2)), ("model.layers.3.w", (2, 0), (2, 2))])
    assert not means_of_neighbours(needed, [*(piece for piece in alive if layer_of(piece.name) != 3), *halves])


@pytest.mark.long
@pytest.mark.usefixtures("warm_ranks")
def test_layers_that_nobody_holds_are_recovered_from_their_neighbours(faults: Path) -> None:
    """Two stages in the middle of four die together, one with the copy of the other: refused, or their neighbours' mean."""
    model = tiny_model(num_blocks=4, vocab_size=256)
    four = make_plan(model, Layout(pp=4), workload=BATCH)
    fewer = (make_plan(model, Layout(pp=2), workload=BATCH),)
    records = go_on(four, faults, "die-5-1", "die-5-2", fewer=fewer, options=TrainOptions(recover="neighbours"))
    assert [record["step"] for record in records if "step" in record] == list(range(1, STEPS + 1))
    assert any(cause.startswith("layers 1, 2 are the mean of their neighbours") for cause in causes_of(records))
    before, after = losses(records)[3:5]
    assert after == pytest.approx(before, rel=0.05)  # no layer is anew or no number
