"""A thorough measurement with two gloo ranks of tiny sizes, run once; a rank that has more to do is named."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from meshwright.profilers.machine import busy_fraction
from meshwright.profilers.measure.timing import Bench
from meshwright.profilers.run.comparison import allowed_cores
from meshwright.profilers.run.faults import RankDeath, explain_failure, read_death, record_error
from meshwright.profilers.run.processes import JobEnd
from meshwright.profilers.run.protocol import (
    ALL_PARTS,
    ProfileProgress,
    ProfileTask,
    launch_ranks,
    profile_failure,
    read_profile,
)
from meshwright.profilers.run.rank import require_memory, require_same_machine
from meshwright.schema import MeshwrightError, ModelSpec, Profile, ProfileError
from meshwright.schema.profile import LayerPoint
from tiny_rank import tiny_steps
from warm_ranks import forked_ranks

MODEL = ModelSpec.named("smollm2-135m")
TINY = MODEL.replace(
    layers=tuple(
        run.replace(layer=run.layer.replace(vocab_size=256)) if run.layer.kind != "block" else run.replace(count=3)
        for run in MODEL.layers
    )
)


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> ProfileTask:
    folder = tmp_path_factory.mktemp("profile")
    return ProfileTask(
        backend="gloo",
        budget_s=10_000.0,  # no share of it is ever reached: the sizes are tiny
        parts=ALL_PARTS,
        num_rounds=1,
        sample_s=0.0005,
        num_layers=1,
        model=TINY.model_dump_json(),
        seq_len=32,
        documents=True,
        storage_path=str(folder),
        out=str(folder / "profile.json"),
        foreign_load_fraction=0.0,
    )


@pytest.fixture(scope="module")
def heard() -> list[ProfileProgress]:
    return []


@pytest.fixture(scope="module")
def profile(task, heard, forked) -> Profile:
    return launch_ranks(tiny_steps, task, 2, on_progress=heard.append)


@pytest.fixture(scope="module", autouse=True)
def forked() -> Iterator[None]:
    with forked_ranks():
        yield


def test_every_part_is_measured_and_written(profile, task):
    assert {part.name: part.state for part in profile.parts}.keys() == set(ALL_PARTS)
    assert all(part.num_points for part in profile.parts)
    for field in ("matmuls", "grouped_matmuls", "attention", "elementwise", "layers", "layer_memory", "step_memory"):
        assert getattr(profile, field), field
    for field in ("collectives", "pairs", "cpu_adam", "storage", "overlaps"):
        assert getattr(profile, field), field
    assert Profile.load(task.out) == profile
    assert profile.content_sha256 and not profile.is_altered
    assert profile.duration_s <= task.budget_s == profile.budget_s
    assert profile.allocator.context_bytes > 50 * 2**20  # the interpreter with torch
    assert len(profile.ranks) == 2 and profile.provenance.hosts


def test_what_the_host_has_no_device_for_says_so(profile):
    (host,) = (part for part in profile.parts if part.name == "host")
    assert "host memory" in host.reason
    assert not profile.host_copies


def test_layers_cover_kinds_shards_and_recompute(profile):
    block = TINY.block_runs[0][0]
    points = {(p.layer.kind, p.tp, p.recompute, p.direction): p for p in profile.layers}
    assert {key[0] for key in points} == {"block", "head", "embedding"}
    assert isinstance(points["block", 1, "full", "backward"], LayerPoint)
    assert points["block", 1, "none", "forward"].layer == block
    assert {(p.seq_len, p.micro_batch_size) for p in profile.layers} == {
        (32, 1),
        (8, 4),
        (8, 1),
        (2, 16),
        (2, 1),
    }  # tiny_rank: no larger ones
    of_block = (m for m in profile.layer_memory if m.layer == block and m.tp == 1 and m.seq_len == 32)
    saved = {m.recompute: m.saved_bytes for m in of_block}
    assert saved["full"] < saved["selective"] < saved["none"]
    assert saved["full"] == 4 * 32 * TINY.hidden_dim  # the output alone: the input belongs to the layer before


def test_step_memory_holds_the_states(profile):
    for step in profile.step_memory:
        assert step.parameter_bytes == 4 * TINY.num_params
        assert step.optimizer_bytes >= 2 * step.parameter_bytes
        assert step.backward_peak_bytes > step.parameter_bytes + step.optimizer_bytes
    peaks = {step.recompute: step.forward_peak_bytes for step in profile.step_memory}
    assert peaks["full"] < peaks["none"]


def test_larger_messages_take_longer(profile):
    sizes = {op: sorted((p for p in profile.collectives if p.op == op), key=lambda p: p.size_bytes) for op in
             ("all_reduce", "all_gather", "p2p")}  # fmt: skip
    # On a machine with other work any one of them may be disturbed: the three together are not.
    assert sum(large.time_s for _, large in sizes.values()) > sum(small.time_s for small, _ in sizes.values())


def test_overlap_takes_at_least_the_longest_stream(profile):
    for point in profile.overlaps:
        assert set(point.streams) == {"collective", "compute"}
        # Streams alone and together are measured one after the other: on a shared core either may be disturbed.
        assert point.together_s > 0.3 * max(point.alone_s)


def test_progress_names_what_is_measured(profile, heard):
    assert {progress.part for progress in heard} <= {*ALL_PARTS}
    assert len({progress.what for progress in heard}) > 1


def test_finished_profile_resumes_with_what_it_lacks(profile, task):
    """A part that is missing is measured; the others stay as they are."""
    lacking = profile.replace(
        parts=tuple(part for part in profile.parts if part.name != "host"), cpu_adam=(), content_sha256=""
    )
    lacking.save(task.out)
    again = launch_ranks(tiny_steps, replace(task, resume=True), 2)
    assert again.matmuls == profile.matmuls
    assert again.layers == profile.layers
    assert again.allocator == profile.allocator
    assert again.cpu_adam
    assert {part.name for part in again.parts} == set(ALL_PARTS)


def test_profile_of_another_machine_is_not_resumed(profile, task):
    with pytest.raises(ProfileError, match="another machine") as caught:
        require_same_machine(profile, profile.machine.replace(torch="1.0"), Path(task.out))
    assert "1.0 here" in str(caught.value)


def test_what_a_rank_refuses_reaches_the_launcher(tmp_path, task):
    refused = ProfileError("no", details=("because",), help="do")
    record_error(tmp_path / "error.json", refused)
    death = read_death(0, 1, ended_by_launcher=False, record=tmp_path / "error.json", log=tmp_path / "rank.log")
    error = profile_failure(JobEnd(deaths=(death,)), 2)
    assert (type(error), str(error)) == (ProfileError, str(refused))
    assert str(explain_failure([death], world_size=2)) == str(refused)


def test_record_that_found_no_room_says_so(tmp_path: Path) -> None:
    (tmp_path / "error.json").write_text("")
    death = read_death(0, 1, ended_by_launcher=False, record=tmp_path / "error.json", log=tmp_path / "rank.log")
    assert f"found no room in {tmp_path.parent}" in str(explain_failure([death], world_size=2))


def test_rank_that_takes_longer_is_named(task):
    busy = replace(task, storage_path="busy", parts=("compute",), out="")
    profile = launch_ranks(tiny_steps, busy, 2)
    assert "rank 1" in {slow.name for slow in profile.slow if slow.what == "compute"}
    assert "rank 0" not in {slow.name for slow in profile.slow}
    assert profile.ranks[1].compute_ratio > 1.1 > profile.ranks[0].compute_ratio


@pytest.fixture
def idle_cores() -> list[int]:
    """Two cores that nothing else uses."""
    cores = sorted(allowed_cores())
    if len(cores) < 2:
        pytest.skip("one rank a core needs two cores")
    if (load := busy_fraction()) > 0.15:
        pytest.skip(f"other work uses {100 * load:.0f} % of the cores: who is slowed down by it is chance")
    return cores


def test_rank_that_shares_its_core_is_named(task, idle_cores):
    """A loop that keeps to the core of rank 1; without it nobody is named."""
    parts = replace(task, parts=("compute",), out="")
    assert [slow for slow in launch_ranks(tiny_steps, parts, 2).slow if slow.what == "compute"] == []
    code = f"import os\nos.sched_setaffinity(0, {{{idle_cores[1]}}})\nwhile True: pass"
    loop = subprocess.Popen([sys.executable, "-c", code])
    try:
        for _ in range(3):  # work that started after `idle_cores` may slow rank 0 as well
            profile = launch_ranks(tiny_steps, parts, 2)
            if named := [slow.name for slow in profile.slow if slow.what == "compute"]:
                break
    finally:
        loop.kill()
        loop.wait()
    assert named == ["rank 1"]
    assert profile.ranks[1].compute_ratio > 1.5


class FullMachine(Bench):
    """One rank on a machine whose memory is taken."""

    def free_bytes(self, *, on_host: bool = False) -> int:
        return 100 * 2**20

    def gather(self, value):
        return [value]


def test_memory_that_is_nearly_full_ends_the_measurement_with_a_message():
    with pytest.raises(MeshwrightError, match="too little memory is free") as caught:
        require_memory(FullMachine(torch.device("cpu"), 0.01))
    assert caught.value.exit_code == 1
    assert "100.0 MiB" in str(caught.value) and "help:" in str(caught.value)


@pytest.mark.job
def test_process_without_room_for_a_rank_is_told_before_anything_starts(tmp_path):
    """A limit on address space, as `ulimit -v` sets it."""
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30));"
        "from meshwright.cli.main import main; main()"
    )
    command = [sys.executable, "-c", code, "profile", "--budget-s", "5", "--out", str(tmp_path / "profile.json")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "ulimit -v" in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def death(rank: int, code: int, words: tuple[str, ...]) -> RankDeath:
    return RankDeath(rank=rank, exit_code=code, ended_by_launcher=False, time_s=0.0, trace=words)


@pytest.mark.parametrize(
    ("code", "words"), [(1, ("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory",)), (-9, ())]
)
def test_rank_that_runs_out_of_memory_is_a_message_for_the_user(code, words):
    error = profile_failure(JobEnd(deaths=(death(1, code, words),)), 2)
    assert type(error) is MeshwrightError and error.exit_code == 1
    assert "memory ran out" in str(error) and "--ranks" in str(error)
    assert type(profile_failure(JobEnd(deaths=(death(0, 1, ("KeyError: 1",)),)), 2)) is ProfileError


def test_time_that_is_over_keeps_what_there_is(task, profile, tmp_path):
    """Ranks that are late are ended; what they had by then is written, sealed, with the parts that are missing."""
    late = replace(task, folder=str(tmp_path), out=str(tmp_path / "out.json"), budget_s=3.0)
    with pytest.raises(MeshwrightError, match="the 3 s were over") as caught:
        read_profile(late, JobEnd(is_late=True), 2)
    assert caught.value.exit_code == 1 and "--budget-s" in str(caught.value)
    profile.replace(parts=profile.parts[:1], content_sha256="").save(tmp_path / "profile.json")
    kept = read_profile(late, JobEnd(is_late=True), 2)
    assert kept.matmuls == profile.matmuls and not kept.is_altered and kept.content_sha256
    assert {part.name: part.state for part in kept.parts[1:]} == dict.fromkeys(ALL_PARTS[1:], "skipped")
    assert Profile.load(tmp_path / "out.json") == kept


def test_ranks_that_outlast_the_time_are_ended(task):
    """A twentieth of a second is not enough to start."""
    begin = time.time()
    with pytest.raises(MeshwrightError, match="before there was anything to keep"):
        launch_ranks(tiny_steps, replace(task, budget_s=0.3, started_at=begin, finish_s=0.25, out=""), 2)
