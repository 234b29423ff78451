"""The replayed step of a plan."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from meshwright.planner import plan
from meshwright.planner.timeline import timeline
from meshwright.planner.trace import chrome_trace
from meshwright.schema import ClusterSpec, ConfigError, ModelSpec, Plan, Workload

MODEL = ModelSpec.named("llama-3.1-8b")
CLUSTER = ClusterSpec.parse("16xH100-SXM-80GB")
WORKLOAD = Workload(seq_len=4096, global_batch_size=64)


def made(**fixed: Any) -> Plan:
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


def test_mixed_clusters_have_none(tmp_path: Any) -> None:
    path = tmp_path / "mixed.toml"
    path.write_text(
        'name = "mixed"\n[[groups]]\ndevice = "H100-SXM-80GB"\nnum_nodes = 1\n[[groups]]\ndevice = "A100-SXM-80GB"\nnum_nodes = 1\n'
    )
    found = plan(MODEL, ClusterSpec.parse(str(path)), WORKLOAD, fixed={"pp": 2, "micro_batch_size": 1})
    with pytest.raises(ConfigError, match="several kinds of nodes"):
        timeline(found)
