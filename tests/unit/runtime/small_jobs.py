"""Jobs of a second or two: plans of a tiny byte-level model, one rank inside the test process, processes that should be gone."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import psutil
import pytest
from meshwright.runtime.training.options import TrainOptions
from meshwright.runtime.training.train import train
from meshwright.schema import Layout, TrainingPlan, Workload
from meshwright.schema.units import GB
from plans import cpu_cluster, make_plan, tiny_model

WORKLOAD = Workload(seq_len=32, global_batch_size=4, precision="fp32")


def small_plan(layout: Layout | None = None, **model: Any) -> TrainingPlan:
    """A plan of four sequences a step for this machine's CPU."""
    return make_plan(tiny_model(**{"num_blocks": 2, "vocab_size": 256, **model}), layout or Layout(), workload=WORKLOAD)


def plan_elsewhere(
    *, num_devices: int = 2, num_nodes: int = 1, device: str | None = None, layout: Layout | None = None
) -> TrainingPlan:
    """A plan for more nodes, or for a GPU; by itself data-parallel."""
    cluster = cpu_cluster(num_devices)
    group = cluster.groups[0].replace(num_nodes=num_nodes, devices_per_node=num_devices // num_nodes)
    if device is not None:
        group = group.replace(device=group.device.replace(name=device, vendor="nvidia", memory_bytes=80 * GB))
    return small_plan(layout or Layout(dp_replicate=num_devices)).replace(cluster=cluster.replace(groups=(group,)))


def train_here(
    monkeypatch: pytest.MonkeyPatch, plan: TrainingPlan, options: TrainOptions, report: Path
) -> list[dict[str, Any]]:
    """Train a plan of one rank in this process; the records it reports."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    train(plan, options, report=report)
    return read_lines(report)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(records: list[dict[str, Any]]) -> list[float]:
    """Of the steps, in order."""
    return [record["loss"] for record in records if "step" in record]


def assert_gone(processes: list[psutil.Process]) -> None:
    """No process of the list is alive."""
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive
