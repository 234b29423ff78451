"""A thorough measurement with two gloo ranks of tiny sizes, run once; a rank that has more to do is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from meshwright.profilers.measure.timing import Bench
from meshwright.profilers.run.joining import require_memory
from meshwright.profilers.run.launching import _read_error, launch_ranks, refuse
from meshwright.profilers.run.rank import require_same_machine
from meshwright.profilers.run.task import ALL_PARTS, Progress, Task
from meshwright.schema import MeshwrightError, ModelSpec, Profile, ProfileError
from meshwright.schema.profile_points import LayerPoint

WORKER = "tiny_rank"
MODEL = ModelSpec.named("smollm2-135m")
TINY = MODEL.replace(
    layers=tuple(
        run.replace(layer=run.layer.replace(vocab_size=256)) if run.layer.kind != "block" else run.replace(count=3)
        for run in MODEL.layers
    )
)


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Task:
    folder = tmp_path_factory.mktemp("profile")
    return Task(
        backend="gloo",
        budget_s=300.0,  # never reached: the sizes are tiny
        parts=ALL_PARTS,
        is_thorough=True,
        num_rounds=1,
        sample_s=0.0005,
        num_layers=1,
        model=TINY.model_dump_json(),
        seq_len=32,
        storage_path=str(folder),
        out=str(folder / "profile.json"),
        foreign_load_fraction=0.0,
    )


@pytest.fixture(scope="module")
def heard() -> list[Progress]:
    return []


@pytest.fixture(scope="module")
def profile(task, heard, tests_on_path) -> Profile:
    return launch_ranks(WORKER, task, 2, on_progress=heard.append)


@pytest.fixture(scope="module")
def tests_on_path():
    """Ranks find the worker beside this file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
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
    saved = {m.recompute: m.saved_bytes for m in profile.layer_memory if m.layer == block and m.tp == 1}
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
    for op in ("all_reduce", "all_gather", "p2p"):
        small, large = sorted((p for p in profile.collectives if p.op == op), key=lambda p: p.size_bytes)
        assert large.time_s > small.time_s


def test_overlap_takes_at_least_the_longest_stream(profile):
    for point in profile.overlaps:
        assert set(point.streams) == {"collective", "compute"}
        # Streams alone and together are measured one after the other: on a shared core either may be disturbed.
        assert point.together_s > 0.3 * max(point.alone_s)


def test_progress_names_what_is_measured(profile, heard):
    assert {progress.part for progress in heard} <= {*ALL_PARTS}
    assert len({progress.what for progress in heard}) > 1


def test_finished_profile_resumes_with_what_it_lacks(profile, task, tests_on_path):
    """A part that is missing is measured; the others stay as they are."""
    lacking = profile.replace(
        parts=tuple(part for part in profile.parts if part.name != "host"), cpu_adam=(), content_sha256=""
    )
    lacking.save(task.out)
    again = launch_ranks(WORKER, replace(task, resume=True), 2)
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
    refuse(replace(task, folder=str(tmp_path)), refused)
    error = _read_error(tmp_path / "error.json")
    assert (type(error), str(error)) == (ProfileError, str(refused))


def test_rank_that_takes_longer_is_named(task, tests_on_path):
    busy = replace(task, storage_path="busy", parts=("compute",), out="")
    profile = launch_ranks(WORKER, busy, 2)
    assert "rank 1" in {slow.name for slow in profile.slow if slow.what == "compute"}
    assert "rank 0" not in {slow.name for slow in profile.slow}
    assert profile.ranks[1].compute_ratio > 1.1 > profile.ranks[0].compute_ratio


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
