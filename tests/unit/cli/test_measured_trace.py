"""The measured step as a timeline: the form of the predicted one, laid over what the clock of the run says."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from meshwright.cost_models.pipeline.orders import Action
from meshwright.planner.timeline import timeline
from meshwright.profilers.machine import num_cores
from meshwright.runtime.training.step_clock import (
    NEIGHBOUR,
    REST,
    SUMS,
    StepSpan,
    _RankStep,
    step_slices,
    step_starts_s,
)
from meshwright.schema import Layout
from meshwright.schema.trace import DATA_PARALLEL, STREAMS, chrome_trace, measured_trace
from small_jobs import read_lines, small_plan
from test_apply import finish, in_process, saved, start

LAYOUTS = {
    "pipeline": Layout(pp=2, micro_batch_size=1, schedule="zb-h1"),
    "sharded data": Layout(dp_shard=2, micro_batch_size=1),
}


def of_kind(trace: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == kind]


def passes(trace: dict[str, Any], pid: int) -> list[tuple[str, str, int]]:
    """Names and kinds of a process's passes and their stages, in the order in which they began."""
    found = [event for event in of_kind(trace, "X") if event["pid"] == pid and "args" in event]
    return [(e["name"], e["cat"], e["args"]["stage"]) for e in sorted(found, key=lambda e: e["ts"])]


@pytest.mark.long
@pytest.mark.skipif(num_cores() < 2, reason="two ranks need two cores")
@pytest.mark.parametrize("name", LAYOUTS)
def test_measured_step_lies_over_the_predicted_one(tmp_path: Path, name: str) -> None:
    plan, metrics = small_plan(LAYOUTS[name]), tmp_path / "metrics.jsonl"
    options = ("--steps", "4", "--trace", str(tmp_path / "trace.json"), "--metrics", str(metrics))
    code, _, messages = finish(start(*options, saved(plan, tmp_path)))
    assert code == 0, messages
    assert "trace.json; open it in ui.perfetto.dev" in messages
    trace, predicted = json.loads((tmp_path / "trace.json").read_text()), chrome_trace(plan, timeline(plan))
    assert of_kind(trace, "M") == of_kind(predicted, "M")
    assert [passes(trace, pid) for pid in (0, 1)] == [passes(predicted, pid) for pid in (0, 1)]
    about = trace["otherData"]
    reported = next(record for record in read_lines(metrics) if record.get("step") == about["step"] == 3)
    assert about["step_time_s"] == reported["step_time_s"]
    for pid in (0, 1):
        for thread in range(len(STREAMS)):
            row = sorted(
                (e for e in of_kind(trace, "X") if (e["pid"], e["tid"]) == (pid, thread)), key=lambda e: e["ts"]
            )
            assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in pairwise(row)), "one thing at a time"
            assert all(e["ts"] >= 1e6 * about["starts_s"][pid] for e in row)
        assert {"optimizer", REST} <= {e["name"] for e in of_kind(trace, "X") if e["pid"] == pid}
    ends = [max(e["ts"] + e["dur"] for e in of_kind(trace, "X") if e["pid"] == pid) for pid in (0, 1)]
    assert min(about["starts_s"]) == 0
    assert ends[0] == pytest.approx(1e6 * (about["starts_s"][0] + about["step_time_s"]), rel=1e-6)
    whole = {(e["args"]["stage"], e["name"]): e for e in of_kind(trace, "X") if "args" in e}
    for i in range(plan.num_microbatches if plan.layout.pp > 1 else 0):  # what a stage takes was made before
        made, taken = whole[0, f"F{i}"], whole[1, f"F{i}"]
        assert made["ts"] + made["dur"] <= taken["ts"]


def test_what_waits_are_called_and_what_is_left_out() -> None:
    pieces = [
        StepSpan("data", -0.2, -0.1),
        StepSpan("communication", 0.1, 0.2, is_wait=True),
        StepSpan("forward", 0.0, 0.3, Action(0, "F", 0)),
        StepSpan("pipeline_wait", 0.3, 0.5, is_wait=True),
        StepSpan("communication", 0.50, 0.50005, is_wait=True),
        StepSpan("backward", 0.5, 0.7, Action(0, "BW", 0)),
        StepSpan("pipeline_wait", 0.75, 0.8, is_wait=True),
        StepSpan("optimizer", 0.85, 0.95),
    ]
    found = step_slices(pieces, small_plan(Layout(pp=2)), 1, 1.0)
    waits = [(piece.kind, piece.start_s) for piece in found if piece.stream == "communication"]
    assert waits == [(DATA_PARALLEL, 0.1), (NEIGHBOUR, 0.3), (SUMS, 0.75)]
    rest = [(piece.start_s, piece.seconds) for piece in found if piece.kind == REST]
    assert rest == [(0.7, pytest.approx(0.15)), (0.95, pytest.approx(0.05))]
    skipped = step_slices(pieces[:-1], small_plan(Layout(pp=2)), 1, 1.0)  # gradients that overflowed: no update
    assert [(piece.start_s, piece.seconds) for piece in skipped if piece.kind == REST] == [(0.7, pytest.approx(0.3))]


def test_clocks_of_two_machines_meet_at_the_barrier() -> None:
    told = [
        _RankStep(2, "b", 1000.00, 1000.03, []),
        _RankStep(0, "a", 5.01, 5.02, []),
        _RankStep(1, "a", 5.00, 5.04, []),
    ]
    assert step_starts_s(told) == pytest.approx([0.0, 0.02, 0.01])


def test_of_many_ranks_the_one_that_computed_longest_stands_for_its_stage() -> None:
    plan = small_plan(Layout(dp_replicate=4, pp=4), num_blocks=4)
    pieces = [[StepSpan("forward", 0.0, 0.1 + 0.01 * (rank == 6), Action(0, "F", 0))] for rank in range(16)]
    by_rank = [step_slices(own, plan, rank, 0.5) for rank, own in enumerate(pieces)]
    trace = measured_trace(plan, by_rank, starts_s=[0.0] * 16, step=3, step_time_s=0.5)
    assert trace["otherData"]["ranks"] == [0, 6, 8, 12]
    drawn = [e["args"]["name"] for e in of_kind(trace, "M") if e["name"] == "process_name"]
    assert drawn[1] == "pipeline rank 1 (ranks 4..7)"
    assert [e["dur"] for e in of_kind(trace, "X") if e["pid"] == 1 and "args" in e] == [pytest.approx(0.11e6)]


def test_trace_of_a_script_or_into_no_folder_is_refused(tmp_path: Path) -> None:
    plan = saved(small_plan(), tmp_path)
    code, messages = in_process("--trace", str(tmp_path / "no" / "trace.json"), plan)
    assert code == 2
    assert "its folder is not there" in messages
    (tmp_path / "train.py").write_text("")
    code, messages = in_process("--trace", str(tmp_path / "trace.json"), plan, str(tmp_path / "train.py"))
    assert code == 2
    assert "--trace" in messages
