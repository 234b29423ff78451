"""Data-parallel ranks of unlike speed: shares equal brute force, faster ranks take more, and the plan is costed again as it was."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from meshwright.cost_models.stage.replicas import (
    has_unlike_replicas,
    micro_batch_seconds,
    micro_batches,
    replicas_of_pools,
    replicas_s,
)
from meshwright.cost_models.stage.table import CostTable
from meshwright.planner import estimate, plan
from meshwright.planner.expand import expand_fitting
from meshwright.planner.planned_stages import reestimate
from meshwright.planner.step_parts import step_parts
from meshwright.planner.timeline import timeline
from meshwright.schema import ClusterSpec, Layout, ModelSpec, TrainingPlan, Workload
from meshwright.schema.layout_table import LayoutTable

KINDS = ("A100-SXM-40GB", "V100-SXM2-32GB", "H100-SXM-80GB", "L40S")


def cluster_of(tmp_path: Path, nodes: dict[str, int], per_node: int = 2) -> ClusterSpec:
    groups = (
        f'[[groups]]\ndevice = "{kind}"\nnum_nodes = {n}\ndevices_per_node = {per_node}\n' for kind, n in nodes.items()
    )
    path = tmp_path / "cluster.toml"
    path.write_text('name = "unlike"\n' + "".join(groups))
    return ClusterSpec.parse(str(path))


def table(cluster: ClusterSpec, batch_size: int, *layouts: Layout, engine: str = "fsdp2") -> CostTable:
    workload = Workload(seq_len=512, global_batch_size=batch_size, precision="fp16-mixed", engine=engine)
    rows = LayoutTable.from_layouts(layouts, batch_size)
    return CostTable.from_layouts(ModelSpec.named("gpt2"), workload, cluster, rows)


@pytest.mark.parametrize("seed", range(10))
def test_shares_are_those_of_trying_them_all(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    kinds = rng.choice(KINDS, size=2 + seed % 2, replace=False)
    nodes = {str(kind): int(rng.integers(1, 3)) for kind in kinds}
    cluster = cluster_of(tmp_path, nodes)
    dp, size = cluster.num_devices, int(rng.choice([1, 2]))
    batch_size = size * int(rng.integers(dp, 4 * dp))
    costs = table(cluster, batch_size, Layout(dp_replicate=dp, micro_batch_size=size))
    assert has_unlike_replicas(costs).tolist() == [True]
    seconds, replicas = micro_batch_seconds(costs)[:, 0], replicas_of_pools(costs)[:, 0]
    options = itertools.product(range(1, batch_size // size + 1), repeat=len(nodes))
    enough = (np.array(m) for m in options if np.dot(m, replicas) >= batch_size // size)
    best = min(float(np.max(m * seconds)) for m in enough)
    assert replicas_s(costs)[0] == pytest.approx(best, rel=1e-9)
    taken = np.array(micro_batches(costs, 0))
    assert taken.sum() * size == batch_size
    assert taken.min() >= 1
    assert np.max(taken * np.repeat(seconds, replicas)) <= best * (1 + 1e-9)


def test_a_layout_with_unlike_shares_is_faster_and_never_slower_than_its_bound(tmp_path: Path) -> None:
    cluster = cluster_of(tmp_path, {"A100-SXM-40GB": 1, "V100-SXM2-32GB": 1})
    layouts = [Layout(dp_replicate=4, micro_batch_size=4), Layout(dp_shard=4, zero_stage=1, micro_batch_size=4)]
    layouts.append(Layout(dp_replicate=2, tp=2, micro_batch_size=4))
    costs = table(cluster, 128, *layouts)
    for idx, layout in enumerate(layouts):
        candidate = expand_fitting(costs, idx)
        assert candidate is not None
        assert sum(candidate.shares) == 128
        fast, slow = candidate.shares[0], candidate.shares[-1]
        assert fast > slow
        even = cluster.replace(groups=(cluster.groups[1].replace(num_nodes=2, levels=()),))
        weakest = estimate("gpt2", even, costs.workload, layout)
        host_bound = layout.tp > 1  # a small model's operators, split once more
        assert candidate.step_time_s < (1.0 if host_bound else 0.8) * weakest.step_time_s


@pytest.mark.parametrize(
    ("layout", "engine"),
    [
        (Layout(dp_shard=4, micro_batch_size=4), "fsdp2"),  # gathers in every pass
        (Layout(dp_replicate=4, micro_batch_size=4), "megatron"),  # as many micro-batches on all ranks
        (Layout(pp=2, dp_replicate=2, micro_batch_size=4), "fsdp2"),  # stages on pools
        (Layout(tp=4, micro_batch_size=4), "fsdp2"),  # a rank over both
    ],
)
def test_other_layouts_have_even_shares(layout: Layout, engine: str, tmp_path: Path) -> None:
    cluster = cluster_of(tmp_path, {"A100-SXM-40GB": 1, "V100-SXM2-32GB": 1})
    costs = table(cluster, 128, layout, engine=engine)
    assert not has_unlike_replicas(costs)[0]
    candidate = expand_fitting(costs, 0)
    assert candidate is not None and candidate.shares == ()


def test_a_plan_says_who_takes_what_and_costs_the_same_again(tmp_path: Path) -> None:
    cluster = cluster_of(tmp_path, {"A100-SXM-40GB": 1, "V100-SXM2-32GB": 1}, per_node=4)
    workload = Workload(seq_len=512, global_batch_size=256, precision="fp16-mixed")
    found = plan("gpt2", cluster, workload, fixed={"dp_replicate": 8}, top=0)
    assert len(found.shares) == 8 and sum(found.shares) == 256
    assert min(found.shares[:4]) > max(found.shares[4:])
    assert any("take sequences as they are fast" in note for note in found.notes)
    assert reestimate(found, found.cluster).step_time_s == pytest.approx(found.estimate.step_time_s, rel=1e-9)
    assert sum(step_parts(found).values()) == pytest.approx(found.estimate.step_time_s, rel=1e-9)
    assert timeline(found).step_time_s == pytest.approx(
        found.estimate.step_time_s, rel=0.01
    )  # copies on the faster device
    path = tmp_path / "plan.json"
    found.save(path)
    assert TrainingPlan.load(path) == found
    bound_s = found.search.bound_s if found.search is not None else 0.0
    assert bound_s <= found.estimate.step_time_s * (1 + 1e-9)
