"""Faults of a real training job, and what goes on after them; the process table is looked at afterwards."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from meshwright.profilers.machine import num_cores
from meshwright.runtime.training.options import list_checkpoints
from meshwright.schema import Layout
from small_jobs import assert_gone, read_lines, small_plan
from test_apply import finish, saved, start, training_ranks

pytestmark = [pytest.mark.job, pytest.mark.long, pytest.mark.skipif(num_cores() < 2, reason="two ranks need two cores")]
WAIT_S = 120
FOREVER = "1000000"


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Also where a test fails."""
    yield
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "meshwright.cli" in child.cmdline() or "meshwright.runtime.job.worker" in child.cmdline():
                child.kill()


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def by_rank(ranks: list[psutil.Process]) -> dict[str, psutil.Process]:
    return {rank.environ()["RANK"]: rank for rank in ranks}


def steps_of(metrics: Path) -> list[int]:
    return [record["step"] for record in read_lines(metrics) if "step" in record]


def test_killed_job_goes_on_stops_when_asked_and_resumes_on_what_is_left(tmp_path: Path) -> None:
    """kill -9 on a rank, restart from the last checkpoint, SIGTERM with a last checkpoint, one core instead of two."""
    metrics, folder = tmp_path / "metrics.jsonl", tmp_path / "checkpoints"
    plan = saved(small_plan(Layout(dp_replicate=2)), tmp_path)
    common = ("--checkpoint-dir", str(folder), "--metrics", str(metrics))
    often = ("--checkpoint-every", "2", "--max-restarts", "1")
    run = start("--steps", FOREVER, *often, *common, plan)
    first = training_ranks(run, metrics)
    until(lambda: list_checkpoints(folder))
    by_rank(first)["1"].kill()
    assert_gone(first)
    done = len(steps_of(metrics))
    until(lambda: len(steps_of(metrics)) > done + 3)
    second = psutil.Process(run.pid).children(recursive=True)
    assert len(second) == 2
    run.send_signal(signal.SIGTERM)
    code, _, messages = finish(run)
    assert_gone(second)
    assert code == 128 + signal.SIGTERM
    assert "rank 1 of 2 was killed by signal 9 (SIGKILL)" in messages
    assert "restart 1 of 1" in messages
    last = steps_of(metrics)[-1]
    assert f"the checkpoint of step {last} is whole" in messages
    assert list_checkpoints(folder)[-1].name == f"step-{last:08d}"
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # the command inherits it
    try:
        left = start("--steps", str(last + 2), "--resume", "--replan", *common, plan)
    finally:
        os.sched_setaffinity(0, cores)
    code, _, messages = finish(left)
    assert code == 0, messages
    assert "planned again for" in messages
    assert steps_of(metrics)[-2:] == [last + 1, last + 2]


def test_suspended_rank_and_full_disk_end_the_job_with_the_last_checkpoint_whole(tmp_path: Path) -> None:
    """First no rank may write more than 64 KiB to a file, as on a disk that is full; then one is stopped."""
    metrics, folder = tmp_path / "metrics.jsonl", tmp_path / "checkpoints"
    plan = saved(small_plan(Layout(dp_replicate=2)), tmp_path)
    options = (
        "--steps",
        FOREVER,
        "--checkpoint-every",
        "5",
        "--checkpoint-dir",
        str(folder),
        "--metrics",
        str(metrics),
    )
    run = start(*options, plan)
    ranks = training_ranks(run, metrics)
    until(lambda: list_checkpoints(folder))
    for rank in ranks:
        resource.prlimit(rank.pid, resource.RLIMIT_FSIZE, (65536, 65536))
    code, _, messages = finish(run)
    assert_gone(ranks)
    assert code == 1
    assert "error: cannot write the checkpoint" in messages
    assert "are free there" in messages
    assert [path for path in folder.iterdir() if path.name.startswith(".")] == []
    kept = list_checkpoints(folder)[-1]

    metrics.unlink()
    run = start(*options, "--resume", plan)
    ranks = training_ranks(run, metrics)
    assert steps_of(metrics)[0] == int(kept.name[-8:]) + 1
    by_rank(ranks)["0"].send_signal(signal.SIGSTOP)
    code, _, messages = finish(run)
    assert_gone(ranks)
    assert code == 1
    assert "rank 0 of 2 was suspended (a stop signal?) and was killed" in messages
