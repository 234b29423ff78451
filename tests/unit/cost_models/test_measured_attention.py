"""Attention points correct attention of their shape, and nothing that is far from it."""

from __future__ import annotations

import pytest
from meshwright.cost_models.hardware.collectives import collective_s
from meshwright.planner import estimate
from meshwright.schema import ClusterSpec, Layout, Workload
from meshwright.schema.profile import AttentionPoint, CollectivePoint, Machine, MatmulPoint, Profile
from numpy import array
from plans import cpu_cluster, tiny_model

MODEL = tiny_model(num_blocks=4, vocab_size=256, num_heads=4, num_kv_heads=4, head_dim=8)
WORKLOAD = Workload(seq_len=64, global_batch_size=8, precision="fp32")


def cluster(*points: AttentionPoint) -> ClusterSpec:
    machine = Machine(device="cpu", num_devices=2, host_memory_bytes=2**34, backend="gloo", torch="2", python="3.11")
    profile = Profile(
        machine=machine, created="2026-01-01", duration_s=1.0, memory_bandwidth_bytes_per_s=1e10,
        device_memory_bytes=2**33, attention=points,
        matmuls=(MatmulPoint(dtype="fp32", m=64, n=64, k=64, time_s=1e-4),),
        collectives=(CollectivePoint(op="p2p", group_size=2, size_bytes=64, time_s=1e-4),),
    )  # fmt: skip
    return cpu_cluster(2).replace(profile=profile)


def point(time_s: float, **shape: object) -> AttentionPoint:
    known = {"dtype": "fp32", "batch": 4, "seq_len": 64, "num_heads": 4, "num_kv_heads": 4, "head_dim": 8}
    return AttentionPoint(**{**known, **shape}, time_s=time_s)


def forward_s(*points: AttentionPoint) -> float:
    layout = Layout(dp_replicate=2, micro_batch_size=4)
    return estimate(MODEL, cluster(*points), WORKLOAD, layout).stages[0].forward_s


def test_attention_of_the_measured_shape_takes_the_measured_time() -> None:
    assert forward_s(point(0.3)) - forward_s(point(0.1)) == pytest.approx(4 * 0.2)


def test_other_dtypes_and_the_other_direction_change_nothing() -> None:
    plain = forward_s()
    assert forward_s(point(0.5, dtype="bf16")) == plain
    assert forward_s(point(0.5, direction="backward")) == plain


def test_far_shapes_count_less_and_less() -> None:
    """A hundred times slower than modelled at ever longer sequences: what is left of it at our shape falls off."""
    near, far, farther = (forward_s(point(0.1, seq_len=64 * f, batch=4)) for f in (1, 16, 256))
    assert near > far
    assert abs(farther - forward_s()) < 0.5 * abs(near - forward_s())


def test_collectives_are_read_from_the_points_of_their_own_number_of_ranks() -> None:
    points = tuple(
        CollectivePoint(op="all_reduce", group_size=group, size_bytes=size, time_s=group * size * 1e-9)
        for group in (2, 4)
        for size in (2**16, 2**20)
    )
    base = cpu_cluster(4)
    level = base.levels[0].model_copy(update={"link": base.levels[0].link.replace(measured=points)})
    machine = base.replace(levels=(level,))
    seconds = collective_s("all_reduce", 2.0**18, array([2, 4]), array([1, 1]), machine)
    assert seconds == pytest.approx([2 * 2**18 * 1e-9, 4 * 2**18 * 1e-9])
