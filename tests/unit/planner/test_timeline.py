"""The replayed step of a plan."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from meshwright.planner import plan
from meshwright.planner.timeline import timeline
from meshwright.schema import ClusterSpec, ModelSpec, TrainingPlan, Workload
from meshwright.schema.trace import chrome_trace

MODEL = ModelSpec.named("llama-3.1-8b")
CLUSTER = ClusterSpec.parse("16xH100-SXM-80GB")
WORKLOAD = Workload(seq_len=4096, global_batch_size=64)


def made(**fixed: Any) -> TrainingPlan:
    return plan(MODEL, CLUSTER, WORKLOAD, fixed=fixed, runnable=False)


@pytest.mark.parametrize(
    "fixed",
    [
        {"pp": 1},
        {"pp": 4, "num_model_chunks": 1, "recompute": "mixed", "schedule": "1f1b"},
        {"pp": 4, "num_model_chunks": 2, "schedule": "1f1b", "recompute": "full"},
        {"pp": 4, "schedule": "zb-h1", "num_model_chunks": 1, "recompute": "none"},
        {"pp": 4, "schedule": "zb-v", "recompute": "none"},
    ],
    ids=str,
)
def test_the_step_ends_when_the_estimate_says(fixed: dict[str, Any]) -> None:
    found = made(**fixed)
    steps = timeline(found)
    assert steps.step_time_s == pytest.approx(found.estimate.step_time_s, rel=1e-9)
    stages = found.layout.pp * found.layout.num_model_chunks
    passes = [piece for piece in steps.slices if piece.micro_batch >= 0]
    assert {(p.stage, p.micro_batch) for p in passes if p.kind == "F"} == {
        (s, i) for s in range(stages) for i in range(found.num_microbatches)
    }
    for rank in range(found.layout.pp):
        mine = sorted((p for p in steps.slices if p.rank == rank), key=lambda p: p.start_s)
        assert all(a.start_s + a.seconds <= b.start_s + 1e-9 for a, b in pairwise(mine)), "one thing at a time"
    begins = {(p.kind, p.stage, p.micro_batch): p for p in passes}
    for (kind, stage, micro_batch), piece in begins.items():
        if kind == "F" and stage:
            before = begins["F", stage - 1, micro_batch]
            assert before.start_s + before.seconds <= piece.start_s + 1e-9


def test_trace_is_what_viewers_open() -> None:
    found = made(pp=4, num_model_chunks=1)
    trace = json.loads(json.dumps(chrome_trace(found, timeline(found))))
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {r: f"pipeline rank {r} (ranks {4 * r}..{4 * r + 3})" for r in range(4)}
    assert all(event["dur"] > 0 and event["ts"] >= 0 for event in slices)
    last = max(event["ts"] + event["dur"] for event in slices)
    assert last == pytest.approx(1e6 * found.estimate.step_time_s, rel=1e-9)


def test_up_to_eight_ranks_are_drawn_one_by_one() -> None:
    found = plan(
        MODEL,
        ClusterSpec.parse("8xH100-SXM-80GB"),
        WORKLOAD,
        fixed={"pp": 2, "num_model_chunks": 1, "recompute": "full"},
    )
    events = chrome_trace(found, timeline(found))["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == [f"rank {r}" for r in range(8)]
    drawn = [
        [(e["name"], e["ts"], e.get("args")) for e in events if e["ph"] == "X" and e["pid"] == r] for r in range(8)
    ]
    assert drawn[0] == drawn[1] == drawn[3]
    assert drawn[4] == drawn[7] != drawn[0]
    assert [{args["stage"] for _, _, args in rank if args} for rank in (drawn[0], drawn[7])] == [{0}, {1}]


MIXED = """name = "mixed"
[[groups]]
device = "H100-SXM-80GB"
num_nodes = 1
[[groups]]
device = "A100-SXM-80GB"
num_nodes = 1
"""


@pytest.mark.parametrize(
    ("fixed", "on_parts"),
    [
        ({"pp": 2, "micro_batch_size": 1, "schedule": "1f1b", "recompute": "full", "num_model_chunks": 1}, True),
        ({"pp": 4, "micro_batch_size": 1, "schedule": "gpipe", "recompute": "full", "num_model_chunks": 1}, True),
        ({"pp": 4, "micro_batch_size": 1, "schedule": "zb-h1", "recompute": "none", "num_model_chunks": 1}, False),
        ({"pp": 1, "micro_batch_size": 1, "recompute": "full"}, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("measured_links", [False, True])
def test_step_on_a_mixed_cluster_ends_when_the_estimate_says(
    tmp_path: Path, fixed: dict[str, Any], on_parts: bool, measured_links: bool
) -> None:
    path = tmp_path / "mixed.toml"
    path.write_text(MIXED)
    cluster = ClusterSpec.parse(str(path))
    if measured_links:
        cluster = cluster.replace(bandwidth_matrix=((2e11, 1e10), (2e10, 2e11)))
    found = plan(MODEL, cluster, WORKLOAD, fixed=fixed)
    assert all(stage.device for stage in found.estimate.stages) == on_parts
    steps = timeline(found)
    assert steps.step_time_s == pytest.approx(found.estimate.step_time_s, rel=1e-9)
    if on_parts:  # the slower device's stage takes longer a layer
        seconds = {p.stage: p.seconds for p in steps.slices if p.kind == "F"}
        a_layer = [seconds[s] / stage.num_layers for s, stage in enumerate(found.stages)]
        devices = [stage.device for stage in found.estimate.stages]
        slow = [s for s, d in zip(a_layer, devices, strict=True) if d.startswith("A100")]
        assert min(slow) > max(s for s, d in zip(a_layer, devices, strict=True) if d.startswith("H100"))
