"""A measured layer has the measured time, between measured sizes the model gives the shape, and others are left alone."""

from __future__ import annotations

import pytest
from meshwright.planner import estimate, plan
from meshwright.profilers.files import require_layers_of_engine
from meshwright.schema import ClusterSpec, Layout, ModelSpec, ProfileError, Workload
from meshwright.schema.profile import CollectivePoint, LayerPoint, Machine, MatmulPoint, Profile
from plans import cpu_cluster, tiny_model

MODEL = tiny_model(num_blocks=4, vocab_size=256)
WORKLOAD = Workload(seq_len=64, global_batch_size=8, precision="fp32")
BLOCK = MODEL.block_runs[0][0]


def cluster(*points: LayerPoint) -> ClusterSpec:
    machine = Machine(device="cpu", num_devices=2, host_memory_bytes=2**34, backend="gloo", torch="2", python="3.11")
    profile = Profile(
        machine=machine, created="2026-01-01", duration_s=1.0, memory_bandwidth_bytes_per_s=1e10,
        device_memory_bytes=2**33, layers=points,
        matmuls=(MatmulPoint(dtype="fp32", m=64, n=64, k=64, time_s=1e-4),),
        collectives=(CollectivePoint(op="p2p", group_size=2, size_bytes=64, time_s=1e-4),),
    )  # fmt: skip
    return cpu_cluster(2).replace(profile=profile)


def point(direction: str, time_s: float, *, model: ModelSpec = MODEL, **fields: object) -> LayerPoint:
    known = {"layer": BLOCK, "hidden_dim": model.hidden_dim, "micro_batch_size": 2, "seq_len": 64, "dtype": "fp32"}
    return LayerPoint(**{**known, "direction": direction, "time_s": time_s, **fields})


def stage_s(machine: ClusterSpec, **layout: object) -> tuple[float, float]:
    chosen = Layout(**{"pp": 2, "micro_batch_size": 2, **layout})
    first = estimate(MODEL, machine, WORKLOAD, chosen).stages[0]
    return first.forward_s, first.backward_s


def test_measured_size_has_the_measured_time() -> None:
    plain = stage_s(cluster())
    blocks = {forward: stage_s(cluster(point("forward", forward), point("backward", 5.0)))[0] for forward in (1.0, 3.0)}
    num_blocks = (blocks[3.0] - blocks[1.0]) / 2.0
    assert num_blocks == pytest.approx(round(num_blocks))  # a stage of so many blocks, each as measured
    assert blocks[1.0] - num_blocks < plain[0]  # beside them the embedding alone
    backward = [stage_s(cluster(point("backward", s)))[1] for s in (5.0, 6.0)]
    assert backward[1] - backward[0] == pytest.approx(round(num_blocks))


def test_one_direction_measured_leaves_the_other_to_the_model() -> None:
    assert stage_s(cluster(point("forward", 1.0)))[1] == stage_s(cluster())[1]


def test_between_measured_sizes_the_ratio_is_interpolated() -> None:
    def blocks_s(micro_batch_size: int, *points: LayerPoint) -> float:
        return stage_s(cluster(*points), micro_batch_size=micro_batch_size)[0]

    small, large = point("forward", 1.0, micro_batch_size=1), point("forward", 1.0, micro_batch_size=4)
    at_small, at_large = (blocks_s(1, small), blocks_s(4, large))
    both = [blocks_s(size, small, large) for size in (1, 2, 4, 8)]
    assert both[0] == pytest.approx(at_small)
    assert both[2] == pytest.approx(at_large)
    assert both[0] * 0.9 < both[1] < both[2] * 1.5
    assert both[3] > both[2]  # beyond: the model's shape with the ratio of the largest


def test_between_measured_lengths_the_ratio_is_interpolated() -> None:
    def blocks_s(seq_len: int, *points: LayerPoint) -> float:
        workload, layout = (
            WORKLOAD.replace(seq_len=seq_len, global_batch_size=32),
            Layout(pp=2, micro_batch_size=128 // seq_len),
        )
        return estimate(MODEL, cluster(*points), workload, layout).stages[0].forward_s

    short, long = (
        point("forward", seconds, micro_batch_size=128 // seq_len, seq_len=seq_len)
        for seq_len, seconds in ((16, 1.0), (64, 9.0))
    )
    alone = blocks_s(16, short), blocks_s(64, long)
    assert (blocks_s(16, short, long), blocks_s(64, short, long)) == pytest.approx(alone)
    assert alone[0] * 1.5 < blocks_s(32, short, long) < alone[1] / 1.5
    assert blocks_s(8, short, long) == pytest.approx(alone[0], rel=0.05)  # shorter ones as the shortest
    assert blocks_s(128, short, long) == blocks_s(128)  # of longer ones nothing is known


@pytest.mark.parametrize(
    "other", [{"seq_len": 128}, {"hidden_dim": 999}, {"dtype": "bf16"}, {"recompute": "full"}, {"engine": "megatron"}]
)
def test_points_of_something_else_change_nothing(other: dict[str, object]) -> None:
    assert stage_s(cluster(point("forward", 9.0, **other))) == stage_s(cluster())


def test_layers_of_another_engine_count_for_it_and_are_refused_for_others() -> None:
    """Used where the plan is for the engine they ran under; never left out in silence."""
    megatron = WORKLOAD.replace(engine="megatron", optimizer="adamw")

    def forward_s(machine: ClusterSpec) -> float:
        return estimate(MODEL, machine, megatron, Layout(pp=2, micro_batch_size=2)).stages[0].forward_s

    measured = cluster(point("forward", 9.0, engine="megatron"))
    assert forward_s(measured) > 9.0 > forward_s(cluster())
    assert measured.profile is not None
    require_layers_of_engine(measured.profile, MODEL, megatron)
    with pytest.raises(ProfileError, match="measured under megatron, the plan is for fsdp2"):
        require_layers_of_engine(measured.profile, MODEL, WORKLOAD)
    both = cluster(point("forward", 9.0, engine="megatron"), point("forward", 9.0))
    assert both.profile is not None
    require_layers_of_engine(both.profile, MODEL, WORKLOAD)
    other = cluster(point("forward", 9.0, engine="megatron", hidden_dim=999))
    assert other.profile is not None
    require_layers_of_engine(other.profile, MODEL, WORKLOAD)  # of another model


def test_a_plan_says_that_layers_of_another_engine_are_not_used() -> None:
    def notes(*points: LayerPoint) -> str:
        return "; ".join(plan(MODEL, cluster(*points), WORKLOAD).notes)

    ours, theirs = point("forward", 1.0), point("forward", 1.0, engine="megatron")
    assert "measured under megatron: not used" in notes(theirs)
    assert "not used for this engine" not in notes(ours, theirs)
