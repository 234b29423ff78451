"""Plans on clusters with a measured bandwidth matrix: never worse than as listed, bounded from below, executable."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from meshwright.cost_models.stage.bounds import uniform_time_bounds
from meshwright.cost_models.stage.step import estimate_step
from meshwright.cost_models.stage.table import CostTable
from meshwright.planner import expand, plan, search
from meshwright.planner.rank_map import best_case, in_order, node_order
from meshwright.planner.request import PlanRequest
from meshwright.planner.space import build_space
from meshwright.planner.tasks.training import device_of_rank
from meshwright.runtime.mesh import require_ascending
from meshwright.schema import ClusterSpec, ModelSpec, TrainingEstimate, Workload


def with_matrix(spec: str, matrix: np.ndarray) -> ClusterSpec:
    return ClusterSpec.parse(spec).replace(bandwidth_matrix=tuple(map(tuple, matrix.tolist())))


def alternating(num_nodes: int, fast: float = 20e9, slow: float = 1e9) -> np.ndarray:
    """Two racks whose nodes are listed by turns; links between the racks are slow."""
    rack = np.arange(num_nodes) % 2
    return np.where(rack[:, None] == rack[None, :], fast, slow)


SPEC = ModelSpec.named("llama-3.2-1b")


@pytest.mark.long
def test_replicas_are_gathered_in_racks() -> None:
    """The pipeline crosses the slow links once, and the data-parallel groups stay inside a rack."""
    cluster = with_matrix("4x2xA100-SXM-80GB/ib200", alternating(4))
    workload = Workload(seq_len=2048, global_batch_size=32)
    found = plan(SPEC, cluster, workload, fixed={"pp": 2, "dp_shard": 4})
    assert [device // 2 for device in found.rank_map[::2]] in ([0, 2, 1, 3], [1, 3, 0, 2])
    listed = expand.expand(
        CostTable.from_layouts(
            SPEC, workload, cluster, build_space(PlanRequest(SPEC, cluster, workload, {"pp": 2, "dp_shard": 4})).batch
        ),
        0,
    )
    assert found.estimate.step_time_s <= listed.estimate.step_time_s
    assert not any("bandwidth matrix" in note for note in found.notes)


@pytest.mark.parametrize("seed", range(9))
def test_no_map_beats_the_bound_and_the_found_one_is_never_worse_than_as_listed(seed: int) -> None:
    """Brute force over all orders of four or five nodes."""
    rng = np.random.default_rng(seed)
    num_nodes = int(rng.integers(4, 6))
    rates = rng.choice([1e9, 3e9, 20e9], (num_nodes, num_nodes)) * rng.uniform(0.9, 1.1, (num_nodes, num_nodes))
    cluster = with_matrix(f"{num_nodes}x2xA100-SXM-80GB/ib200", rates)
    engine = "fsdp2" if seed % 2 else "megatron"
    workload = Workload(seq_len=2048, global_batch_size=num_nodes * 12, engine=engine)
    batch = build_space(
        PlanRequest(SPEC, cluster, workload, {"recompute": ("none", "selective", "full")[seed % 3]})
    ).batch
    rows = rng.choice(len(batch), size=5, replace=False)
    batch = batch.select(np.sort(rows))
    spec = SPEC if seed % 3 else ModelSpec.named("qwen2.5-7b")
    bounds = uniform_time_bounds(CostTable.from_layouts(spec, workload, best_case(cluster), batch))
    costs = CostTable.from_layouts(spec, workload, cluster, batch)
    orders = list(itertools.permutations(range(num_nodes)))
    for idx in range(len(batch)):
        found = expand.expand(costs, idx)
        row = batch.select(np.array([idx]))

        def cost(
            order: tuple[int, ...], cut: tuple[int, ...] = found.boundaries, row=row, spec=spec
        ) -> TrainingEstimate:
            there = CostTable.from_layouts(spec, workload, in_order(cluster, order), row)
            return estimate_step(there, 0, cut)

        some = [orders[i] for i in rng.choice(len(orders), size=8, replace=False)]
        times = [cost(order).step_time_s for order in some]
        assert bounds[idx] <= min(times) * (1 + 1e-9)
        assert bounds[idx] <= found.estimate.step_time_s * (1 + 1e-9)
        assert found.estimate.step_time_s <= cost(orders[0]).step_time_s * (1 + 1e-9)
        assert found.estimate.step_time_s == pytest.approx(cost(found.nodes or orders[0]).step_time_s)


@pytest.mark.long
def test_search_equals_expanding_every_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "REL_GAP", 0.0)
    cluster = with_matrix("4x2xA100-SXM-80GB/ib200", alternating(4))
    workload = Workload(seq_len=1024, global_batch_size=16)
    part = {"micro_batch_size": 2, "recompute": "none", "cp": 1, "num_model_chunks": 1}
    space = build_space(PlanRequest(SPEC, cluster, workload, part, runnable=True))
    costs = CostTable.from_layouts(SPEC, workload, cluster, space.batch)
    times = [expand.expand(costs, idx).estimate for idx in range(len(space.batch))]
    found = search.search(PlanRequest(SPEC, cluster, workload), space)
    assert found.feasible[0].estimate.step_time_s == min(e.step_time_s for e in times if e.fits)
    assert found.bound_s <= found.feasible[0].estimate.step_time_s


@pytest.mark.long
def test_maps_are_those_that_the_runtime_executes() -> None:
    """torch sorts the ranks of a group: devices ascend along dp_shard and tp, whatever the matrix."""
    rng = np.random.default_rng(0)
    moved = 0
    for _ in range(6):
        cluster = with_matrix("8x2xA100-SXM-80GB/ib200", rng.choice([1e9, 5e9, 20e9], (8, 8)))
        workload = Workload(seq_len=1024, global_batch_size=64)
        batch = build_space(
            PlanRequest(SPEC, cluster, workload, {"micro_batch_size": 1, "recompute": "none"}, runnable=True)
        ).batch
        costs = CostTable.from_layouts(SPEC, workload, cluster, batch)
        for idx in rng.choice(len(batch), size=4, replace=False):
            nodes = node_order(costs, int(idx), expand.expand(costs, int(idx)).boundaries)
            rank_map = device_of_rank(cluster, nodes)
            moved += rank_map != tuple(range(16))
            require_ascending(batch.layout(int(idx)), rank_map)
            assert torch.tensor(rank_map).sort().values.tolist() == list(range(16))
    assert moved


def test_nodes_that_ranks_do_not_fill_stay_as_listed() -> None:
    """Three ranks of a replica on nodes of two: some replica lies on two nodes, and moving nodes would tear it apart."""
    cluster = with_matrix("6x2xA100-SXM-80GB/ib200", alternating(6))
    workload = Workload(seq_len=1024, global_batch_size=12)
    batch = build_space(PlanRequest(SPEC, cluster, workload, {"dp_shard": 3, "tp": 1, "pp": 1}, runnable=True)).batch
    costs = CostTable.from_layouts(SPEC, workload, cluster, batch)
    assert node_order(costs, 0, expand.expand(costs, 0).boundaries) == ()
