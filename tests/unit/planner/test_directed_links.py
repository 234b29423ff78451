"""Bandwidth that differs by direction: the order as listed is kept where it is good, and costed when asked for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from meshwright.cli.main import app
from meshwright.planner.expand import expand_layout
from meshwright.planner.request import PlanRequest
from meshwright.schema import ClusterSpec, Layout, ModelSpec, Workload
from typer.testing import CliRunner

SPEC, WORKLOAD = ModelSpec.named("llama-3.2-1b"), Workload(seq_len=2048, global_batch_size=32)
LAYOUT = Layout(dp_shard=8, micro_batch_size=2)


def one_way(num_nodes: int, order: list[int]) -> ClusterSpec:
    """Nodes whose links are fast from each one to the next in this order, and slow otherwise."""
    matrix = np.full((num_nodes, num_nodes), 1e9)
    matrix[order, [*order[1:], order[0]]] = 20e9
    cluster = ClusterSpec.parse(f"{num_nodes}x2xA100-SXM-80GB/ib200")
    return cluster.replace(bandwidth_matrix=tuple(map(tuple, matrix.tolist())))


def step_s(cluster: ClusterSpec, **how: bool) -> float:
    return expand_layout(PlanRequest(SPEC, cluster, WORKLOAD), LAYOUT, **how).step_time_s


def test_a_ring_that_is_fast_as_listed_is_as_fast_as_all_links() -> None:
    uniform = one_way(4, [0, 1, 2, 3]).replace(bandwidth_matrix=((20e9,) * 4,) * 4)
    assert step_s(one_way(4, [0, 1, 2, 3])) == pytest.approx(step_s(uniform))
    # torch sorts the members of a group, so that nodes listed otherwise stay so within it.
    assert step_s(one_way(4, [0, 2, 1, 3])) > 1.2 * step_s(uniform)


def test_estimate_as_listed_and_mapped() -> None:
    """Replicas of a whole node each may be listed in any order: the map finds the ring, as listed there is none."""
    layout = Layout(dp_replicate=4, dp_shard=2, zero_stage=1, micro_batch_size=2)
    cluster = one_way(4, [0, 2, 1, 3])
    request = PlanRequest(SPEC, cluster, WORKLOAD)
    mapped, listed = expand_layout(request, layout), expand_layout(request, layout, as_listed=True)
    assert listed.nodes == ()
    assert mapped.step_time_s <= listed.step_time_s


def test_command_estimates_as_listed(tmp_path: Path) -> None:
    rows = [list(row) for row in one_way(4, [0, 2, 1, 3]).bandwidth_matrix or ()]
    path = tmp_path / "cluster.toml"
    path.write_text(
        f'name = "one-way"\nbandwidth_matrix = {json.dumps(rows)}\n[[groups]]\ndevice = "A100-SXM-80GB"\nnum_nodes = 4\n'
    )
    command = [
        "estimate",
        "llama-3.2-1b",
        "--cluster",
        str(path),
        "--global-batch-size",
        "64",
        "--seq-len",
        "1024",
        "--json",
    ]
    seconds = []
    for more in ([], ["--as-listed"]):
        result = CliRunner().invoke(app, [*command, "--layout", "pp=4,dp_shard=8,micro_batch_size=1", *more])
        assert result.exit_code == 0, result.output
        seconds.append(json.loads(result.stdout)["step_time_s"])
    assert seconds[0] <= seconds[1]
