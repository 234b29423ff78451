"""Timed layers of a user's module: which points there are, and that plans take their seconds."""

from __future__ import annotations

import pytest
import torch
from meshwright.planner import plan
from meshwright.profilers import profile_module, time_layers
from meshwright.schema import ClusterSpec, ConfigError, Workload
from meshwright.schema.profile import LayerPoint, Machine, Profile
from plans import cpu_cluster
from torch import Tensor, nn

NUM_BLOCKS, SAMPLES, LENGTH = 3, 4, 8
VOCABULARY = 8192
"""Embedding and head take several times as long as the blocks, so that what is outside of these is more than noise."""


class Model(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(NUM_BLOCKS)]
        )
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def with_points(points: tuple[LayerPoint, ...], num_ranks: int = 1) -> ClusterSpec:
    """CPU ranks with a profile of nothing but layers."""
    machine = Machine(
        device="cpu", num_devices=num_ranks, host_memory_bytes=2**34, backend="gloo", torch="2", python="3"
    )
    profile = Profile(
        machine=machine,
        created="",
        duration_s=1.0,
        memory_bandwidth_bytes_per_s=1e10,
        device_memory_bytes=2**33,
        layers=points,
    )
    return cpu_cluster(num_ranks).replace(profile=profile)


INPUTS = [torch.zeros(SAMPLES, LENGTH, dtype=torch.long)]


def test_each_kind_of_layer_has_a_point_for_each_pass_and_micro_batch() -> None:
    model = Model()
    points = time_layers(model, INPUTS, profile_module(model, INPUTS), micro_batches=(1, 4))
    kinds = [(point.layer.kind, point.direction, point.micro_batch_size) for point in points]
    assert sorted(kinds) == sorted(
        (kind, direction, size)
        for kind in ("embedding", "block", "head")
        for direction in ("forward", "backward")
        for size in (1, 4)
    )
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("tp", [(), (2,)], ids=["counted", "placed"])
def test_a_plan_takes_the_seconds_of_timed_layers(tp: tuple[int, ...]) -> None:
    model = Model()
    spec = profile_module(model, INPUTS, tp=tp)
    seconds = {"forward": 0.25, "backward": 0.5}
    points = tuple(
        point.replace(time_s=seconds[point.direction])
        for point in time_layers(model, INPUTS, spec, micro_batches=(SAMPLES,))
    )
    workload = Workload(seq_len=LENGTH, global_batch_size=SAMPLES, precision="fp32")
    found = plan(spec, with_points(points), workload, fixed={"micro_batch_size": SAMPLES, "recompute": "none"})
    assert found.estimate.breakdown_s.compute == pytest.approx((NUM_BLOCKS + 2) * 0.75, rel=1e-3)


def test_a_module_without_values_is_refused() -> None:
    with torch.device("meta"):
        model = Model()
    spec = profile_module(model, INPUTS)
    with pytest.raises(ConfigError, match="on meta"):
        time_layers(model, INPUTS, spec)
