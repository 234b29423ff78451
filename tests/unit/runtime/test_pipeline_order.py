"""Which passes a plan's pipeline runs and on which rank; that they train as one rank does is in tests/parity."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from meshwright.cost_models.pipeline import orders
from meshwright.cost_models.pipeline.orders import to_torch_csv
from meshwright.cost_models.pipeline.simulation import pipeline_order
from meshwright.schema import ConfigError, Layout, TrainingPlan, Workload
from meshwright.schema.schedules import SCHEDULE_NAMES

sys.path.insert(0, str(Path(__file__).parents[2] / "parity"))
from plans import make_plan, tiny_model

WORKLOAD = Workload(seq_len=16, global_batch_size=8, precision="fp32")


def plan_for(schedule: str, chunks: int = 1, *, order: tuple[str, ...] = (), **degrees: int) -> TrainingPlan:
    layout = Layout(**{"pp": 2, **degrees}, num_model_chunks=chunks, schedule=schedule, micro_batch_size=2)
    return make_plan(tiny_model(num_blocks=9), layout, workload=WORKLOAD, pipeline_order=order)


@pytest.mark.parametrize("schedule", [name for name in SCHEDULE_NAMES if name != "synthesised"])
def test_every_named_schedule_runs_every_pass_once(schedule: str) -> None:
    plan = plan_for(schedule, 2 if schedule in ("zb-v", "v-half", "v-min") else 1, pp=4)
    passes = [action for row in pipeline_order(plan) for action in row]
    halves = [(a.stage, half, a.micro_batch) for a in passes for half in ("BW" if a.kind == "BW" else a.kind)]
    expected = {(s, kind, i) for s in range(len(plan.stages)) for kind in "FBW" for i in range(4)}
    assert len(halves) == len(expected)
    assert set(halves) == expected


@pytest.mark.parametrize(
    ("schedule", "chunks", "ranks"),
    [("1f1b", 1, (0, 1)), ("zb-h1", 3, (0, 1) * 3), ("zb-v", 2, (0, 1, 1, 0))],
)
def test_chunks_go_round_or_down_and_up(schedule: str, chunks: int, ranks: tuple[int, ...]) -> None:
    assert plan_for(schedule, chunks).rank_of_stage == ranks


def test_own_order_places_its_stages() -> None:
    lines = tuple(to_torch_csv(orders.zb_v(2, 4)[::-1]).splitlines())
    plan = plan_for("synthesised", 2, order=lines)
    assert plan.rank_of_stage == (1, 0, 0, 1)
    assert pipeline_order(plan) == orders.zb_v(2, 4)[::-1]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (("0F0,0B0,1F0", "1B0"), r"its stages are on ranks \[\[0\], \[0, 1\]\]"),
        (("0F0,0F1,0B0", "1F0,1B0,1F1,1B1"), "of the .* passes"),
        (("0F0,0B0,0F1,0B1,0F2,0B2,0F3,0B3", "1F1,1B1,1F0,1B0,1F2,1B2,1F3,1B3"), "deadlocks"),
        (("0F0,0F1,0B1,0B0,0F2,0B2,0F3,0B3", "1F1,1B1,1F0,1B0,1F2,1B2,1F3,1B3"), r"order \[1, 0, 2, 3\]"),
    ],
)
def test_own_order_that_cannot_run_is_refused(lines: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pipeline_order(plan_for("synthesised", order=lines))


def test_schedule_without_a_form_in_chunks_is_refused() -> None:
    with pytest.raises(ConfigError, match="zb-h2 is not defined for 2 model chunks"):
        pipeline_order(plan_for("zb-h2", 2))
