"""Which rank the launcher takes for hung."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from meshwright.profilers.machine import num_cores
from meshwright.runtime.job import watch as watch_module
from meshwright.runtime.job.launch import launch
from meshwright.runtime.job.watch import (
    Heartbeat,
    ProgressFile,
    Watch,
    is_stalled,
    is_waiting,
    main_stack,
    read_heartbeat,
)
from meshwright.runtime.job.worker import Job
from meshwright.schema import Layout, MeshwrightError
from small_jobs import small_plan

TORCH = "/usr/lib/python3/site-packages/torch"
HANG = """
import os, time
import torch, torch.distributed as dist
from meshwright.runtime.job.watch import ProgressFile
dist.init_process_group("gloo")
progress = ProgressFile()
def read_the_data():
    time.sleep(600)
for step in range(100):
    dist.all_reduce(torch.ones(4))
    progress.beat(step + 1)
    if step == 3 and os.environ["RANK"] == "1":
        read_the_data()
"""


@pytest.mark.skipif(num_cores() < 2, reason="two ranks need two cores")
@pytest.mark.usefixtures("warm_ranks")
def test_hung_rank_is_named_with_the_place_where_it_is(tmp_path: Path) -> None:
    plan = small_plan(Layout(dp_replicate=2))
    plan.save(tmp_path / "plan.json")
    (tmp_path / "hang.py").write_text(HANG)
    job = Job(plan=str(tmp_path / "plan.json"), script=(str(tmp_path / "hang.py"),), hang_timeout_s=0.5)
    with pytest.raises(MeshwrightError, match="rank 1 of 2 stopped making steps while the others waited") as caught:
        launch(plan, job)
    assert "in read_the_data" in caught.value.details[0]


def test_a_suspended_rank_is_killed_also_where_it_stands_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All members take part when the next generation begins."""
    monkeypatch.setattr(watch_module, "SUSPENDED_S", 0.0)
    process = subprocess.Popen(["sleep", "60"])
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    Watch(tmp_path).look({3: process.pid}, standing_by=[3])
    assert process.wait() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("beats", "stalled"),
    [
        ([Heartbeat(5, 90.0, 0.5), Heartbeat(5, 91.0, 0.5)], False),  # within ten seconds
        ([Heartbeat(5, 80.0, 0.5), Heartbeat(5, 81.0, 0.5)], True),
        ([Heartbeat(5, 80.0, 3.0), Heartbeat(5, 81.0, 0.5)], False),  # within ten of the longest steps
        ([Heartbeat(5, 80.0, 0.5), Heartbeat(6, 99.0, 0.5)], False),
        ([Heartbeat(5, 80.0, 0.5), Heartbeat(5, 0.0, 0.5)], False),  # one of them is saving
        ([Heartbeat(1, 80.0, 0.0), Heartbeat(1, 80.0, 0.0)], False),  # how long a step takes is not known
        ([Heartbeat(5, 80.0, 0.5), None], False),
    ],
)
def test_ranks_are_stalled_when_all_of_them_stopped(beats: Sequence[Heartbeat | None], stalled: bool) -> None:
    assert is_stalled(beats, 100.0) is stalled


@pytest.mark.parametrize(
    ("frames", "waiting"),
    [
        ([f'File "{TORCH}/distributed/distributed_c10d.py", line 3091 in all_reduce'], True),
        (
            [f'File "{TORCH}/_ops.py", line 1 in __call__', f'File "{TORCH}/distributed/_functional_collectives.py"'],
            True,
        ),
        ([f'File "{TORCH}/autograd/graph.py", line 869 in _engine_run_backward'], True),
        ([f'File "{TORCH}/nn/modules/linear.py", line 134 in forward'], False),
        (
            ['File "/usr/lib/python3/threading.py", line 327 in wait', 'File "/usr/lib/python3/concurrent/_base.py"'],
            False,
        ),
        ([], False),
    ],
)
def test_rank_inside_a_collective_waits(frames: Sequence[str], waiting: bool) -> None:
    assert is_waiting(frames) is waiting


def test_main_thread_is_the_last_of_a_dump() -> None:
    first, last = '  File "a", line 1 in f\n', '  File "b", line 2 in g\n  File "c", line 3 in h\n'
    dump = f"Thread 1 (most recent call first):\n{first}\nThread 2 (most recent call first):\n{last}"
    assert main_stack(dump) == ('File "b", line 2 in g', 'File "c", line 3 in h')
    assert main_stack("") == ()


def test_progress_is_read_by_another_process_and_rests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_PROGRESS", str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert read_heartbeat(tmp_path, 3) is None
    progress = ProgressFile()
    progress.beat(101)
    progress.beat(102)
    beat = read_heartbeat(tmp_path, 3)
    assert beat is not None
    assert (beat.steps, beat.time_s > 0, beat.longest_s >= 0) == (2, True, True)
    assert Watch(tmp_path).num_steps == 102
    progress.rest()
    rested = read_heartbeat(tmp_path, 3)
    assert rested is not None
    assert rested.time_s == 0
    os.kill(os.getpid(), signal.SIGUSR1)
    assert "test_progress_is_read" in (tmp_path / "3.stacks").read_text()


def test_a_rank_that_is_started_anew_is_not_judged_by_the_one_before(tmp_path: Path) -> None:
    """It answers no signal before it has begun: the first one would end it."""
    (tmp_path / "0").write_bytes(watch_module._RECORD.pack(5, 1.0, 0.1, 5))
    watch, rank = Watch(tmp_path, 1.0), subprocess.Popen(["sleep", "60"])
    try:
        watch.forget(0)
        watch.look({0: rank.pid})
        assert watch.num_steps == 0 and rank.poll() is None
    finally:
        rank.kill()
        rank.wait()
