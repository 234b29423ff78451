"""Stages with a tensor-parallel degree each, against one rank; tolerances as in test_parity.

Every stage has as many ranks; where tp grows, data-parallel groups join: hidden states are dealt out anew between them.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from harness import Outcome, by_world_size
from meshwright.schema import Layout, TrainingPlan
from plans import gpt2_model, tiny_model
from test_parity import BF16, MODELS, Setup, require_equal, run


@dataclasses.dataclass(frozen=True)
class Staged(Setup):
    """A setup whose stages have these degrees."""

    model: str = "five rich"
    tps: tuple[int, ...] = ()

    @property
    def plan(self) -> TrainingPlan:
        plan = super().plan
        stages = tuple(stage.replace(tp=tp) for stage, tp in zip(plan.stages, self.tps, strict=True))
        return TrainingPlan(**{**{name: getattr(plan, name) for name in TrainingPlan.model_fields}, "stages": stages})


ADDED = {"staged gpt": gpt2_model(num_blocks=4), "staged": tiny_model(num_kv_heads=4)}
REFERENCES = tuple(Setup(name, Layout(micro_batch_size=2), model=name) for name in ("five rich", "five tied", *ADDED))
FOUR = (
    Staged("tp 2, dp 2", Layout(pp=2, dp_shard=2), tps=(2, 1), saves=True),
    Staged("dp 2, tp 2", Layout(pp=2, dp_shard=2), tps=(1, 2)),
    Staged("zb-h1", Layout(pp=2, dp_shard=2, schedule="zb-h1"), tps=(2, 1)),
    Staged("gpipe full", Layout(pp=2, dp_shard=2, schedule="gpipe", recompute="full"), tps=(1, 2)),
    Staged("replicas", Layout(pp=2, dp_replicate=2), tps=(2, 1)),
    Staged("halves", Layout(pp=2, dp_shard=2, half_blocks=True, recompute="selective"), tps=(2, 1)),
    Staged("bf16", Layout(pp=2, dp_shard=2), tps=(2, 1), workload=BF16),
    Staged("rank map", Layout(pp=2, dp_shard=2), tps=(1, 2), rank_map=(2, 3, 0, 1)),
    Setup("resumed without", Layout(pp=2, dp_shard=2), model="five rich", resumes="tp 2, dp 2"),
    Staged("resumed with", Layout(pp=2, dp_shard=2), tps=(1, 2), resumes="tp 2, dp 2"),
)
QUICK = ("tp 2, dp 2", "dp 2, tp 2", "resumed without")
SIX = (Staged("three stages, tied", Layout(pp=3, dp_shard=2), model="staged gpt", tps=(1, 2, 1)),)
EIGHT = (
    Staged("tp 4, dp 4", Layout(pp=2, dp_shard=4), model="staged", tps=(4, 1)),
    Staged("dp 4, tp 4", Layout(pp=2, dp_shard=4, schedule="zb-h1"), model="staged", tps=(1, 4)),
    Staged("tp 2 and 4", Layout(pp=2, tp=2, dp_shard=2), model="staged", tps=(2, 4)),
)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    MODELS.update(ADDED)
    return {name: ranks[0] for name, ranks in run(REFERENCES, tmp_path_factory.mktemp("reference")).items()}


@pytest.mark.parametrize("setups", by_world_size(FOUR, SIX, EIGHT, long_from=6, quick=QUICK))
def test_stages_of_different_degrees_train_as_one_rank_does(
    setups: tuple[Setup, ...], references: dict[str, Outcome], tmp_path: Path
) -> None:
    require_equal(setups, run(setups, tmp_path), references)
