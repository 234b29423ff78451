"""Profiles: files of older versions load, a finished one knows when it was altered, all kinds of points survive JSON."""

from __future__ import annotations

import pytest
from meshwright.schema import ConfigError, ModelSpec, Profile
from meshwright.schema.profile import LayerPoint, Machine, MatmulPoint, OverlapPoint, ProfileSection

MACHINE = Machine(
    device="a cpu", num_devices=2, host_memory_bytes=2**34, backend="gloo", torch="2.13.0", python="3.11.2"
)
OLD = """{"schema_version": 1, "created": "2026-01-01T00:00:00+00:00", "duration_s": 9.5, "foreign_load_fraction": 0.1,
"machine": {"device": "a cpu", "num_devices": 2, "host_memory_bytes": 17179869184, "backend": "gloo", "torch": "2.13.0",
"python": "3.11.2", "driver": "2 ranks on 2 cores"}, "memory_bandwidth_bytes_per_s": 1e10, "device_memory_bytes": 8589934592,
"matmuls": [{"dtype": "fp32", "m": 8, "n": 8, "k": 8, "time_s": 1e-6}],
"collectives": [{"op": "p2p", "group_size": 2, "size_bytes": 1024, "time_s": 1e-5}]}"""


@pytest.fixture
def profile() -> Profile:
    block = ModelSpec.named("smollm2-135m").block_runs[0][0]
    return Profile(
        machine=MACHINE,
        created="2026-01-01T00:00:00+00:00",
        duration_s=9.5,
        memory_bandwidth_bytes_per_s=1e10,
        device_memory_bytes=2**33,
        matmuls=(MatmulPoint(dtype="fp32", m=8, n=9, k=10, time_s=1e-6, which="weight_gradient", spread=0.02),),
        layers=(
            LayerPoint(
                layer=block,
                hidden_dim=576,
                micro_batch_size=1,
                seq_len=128,
                dtype="bf16",
                direction="forward",
                time_s=1e-3,
            ),
        ),
        overlaps=(
            OverlapPoint(
                streams=("compute", "to_host"), alone_s=(1e-3, 2e-3), together_s=2.5e-3, matmul=(8, 8, 8), dtype="fp32"
            ),
        ),
        parts=(ProfileSection(name="storage", state="skipped", duration_s=0, num_points=0, reason="no --nvme"),),
    )


def test_file_of_an_older_version_loads(tmp_path):
    (tmp_path / "old.json").write_text(OLD)
    old = Profile.load(tmp_path / "old.json")
    assert old.matmuls[0].which == "forward"
    assert old.collectives[0].concurrent_groups == old.machine.num_nodes == 1
    assert not old.is_altered
    assert old.parts == ()


def test_profile_survives_its_file_and_keeps_its_seal(tmp_path, profile):
    profile.sealed().save(tmp_path / "profile.json")
    loaded = Profile.load(tmp_path / "profile.json")
    assert loaded == profile.sealed()
    assert not loaded.is_altered


def test_altered_profile_is_noticed(profile):
    sealed = profile.sealed()
    assert sealed.replace(machine=MACHINE.replace(device="NVIDIA H100 80GB HBM3")).is_altered
    assert sealed.replace(matmuls=()).is_altered
    assert not profile.is_altered  # never sealed: it cannot tell


def test_streams_of_an_overlap_are_at_least_two():
    with pytest.raises(ConfigError, match="streams"):
        OverlapPoint(streams=("compute",), alone_s=(1,), together_s=1, matmul=(8, 8, 8), dtype="fp32")
