"""Batches that do not divide: every axis with shares that differ by rank, against one rank; tolerances as in test_parity.

Of seven sequences two ranks take 4 and 3, three ranks 3, 2 and 2, four ranks 2, 2, 2 and 1; ranks of other speed as `shares` says.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from harness import by_world_size
from meshwright.schema import Layout, TrainingPlan
from test_parity import BF16, WORKLOAD, Setup, require_equal, run

SEVEN = WORKLOAD.replace(global_batch_size=7)


@dataclass(frozen=True)
class Shared(Setup):
    """A setup with seven sequences in a step, dealt as evenly as possible or as ``shares`` say."""

    workload: object = SEVEN
    shares: tuple[int, ...] = ()

    @property
    def plan(self) -> TrainingPlan:
        return super().plan.replace(shares=self.shares)


REFERENCES = tuple(
    Shared(name, Layout(micro_batch_size=7), model=name) for name in ("rich", "five", "five tied", "experts", "latent")
)
TWO = (
    Shared("zero 1", Layout(dp_shard=2, zero_stage=1, micro_batch_size=2), model="rich"),
    Shared("zero 2", Layout(dp_shard=2, zero_stage=2, micro_batch_size=2), model="rich"),
    Shared("zero 3", Layout(dp_shard=2, micro_batch_size=2), model="rich"),
    Shared("zero 3, pass of one rank", Layout(dp_shard=2), model="rich", shares=(2, 5)),
    Shared("zero 3 bf16", Layout(dp_shard=2), workload=BF16.replace(global_batch_size=7), model="five"),
    Shared("zero 1, unlike speeds", Layout(dp_shard=2, zero_stage=1), model="rich", shares=(6, 1)),
    Shared("replicas", Layout(dp_replicate=2, micro_batch_size=4), model="rich"),
    Shared("replicas, unlike speeds", Layout(dp_replicate=2), model="rich", shares=(5, 2)),
    Shared(
        "replicas bf16, unlike speeds", Layout(dp_replicate=2), workload=BF16.replace(global_batch_size=7), model="five",
        shares=(2, 5),
    ),
    Shared("ep", Layout(dp_shard=2, ep=2, micro_batch_size=2), model="experts"),
    Shared("ep, unlike speeds", Layout(dp_replicate=2, ep=2), model="experts", shares=(1, 6)),
    Shared("latent ep", Layout(dp_shard=2, ep=2, micro_batch_size=2), model="latent"),
    Shared("pp", Layout(pp=2), model="five tied"),
    Shared("tp", Layout(tp=2, micro_batch_size=4), model="rich"),
    Shared("cp", Layout(cp=2, micro_batch_size=4), model="rich"),
)  # fmt: skip
THREE = (
    Shared("zero 3 of three", Layout(dp_shard=3, micro_batch_size=3), model="rich"),
    Shared("replicas of three", Layout(dp_replicate=3), model="rich"),
)
FOUR = (
    Shared("hsdp", Layout(dp_replicate=2, dp_shard=2), model="five"),
    Shared("zero 3 tp", Layout(dp_shard=2, tp=2, micro_batch_size=2), model="rich"),
    Shared("zero 3 cp", Layout(dp_shard=2, cp=2, micro_batch_size=2), model="rich"),
    Shared("replicas of pp", Layout(pp=2, dp_replicate=2), model="five tied"),
    Shared("pp zero 1, gpipe", Layout(pp=2, dp_shard=2, schedule="gpipe"), model="five tied", shares=(5, 2)),
    Shared("zb-v", Layout(pp=2, num_model_chunks=2, schedule="zb-v", dp_shard=2), model="five tied"),
    Shared("ep of four", Layout(dp_shard=4, ep=2), model="experts"),
)
QUICK = (
    "zero 2", "zero 3", "zero 1, unlike speeds", "replicas bf16, unlike speeds", "ep, unlike speeds", "pp", "cp",
    "hsdp", "zero 3 tp",
)  # fmt: skip


@pytest.mark.parametrize("setups", by_world_size(TWO, THREE, FOUR, long_from=5, quick=QUICK))
def test_uneven_shares_train_as_one_rank_does(setups: tuple[Shared, ...], tmp_path: Path) -> None:
    for name in ("reference", "ranks"):
        (tmp_path / name).mkdir()
    models = {setup.model for setup in setups}
    references = run(tuple(r for r in REFERENCES if r.model in models), tmp_path / "reference")
    outcomes = run(setups, tmp_path / "ranks")
    require_equal(setups, outcomes, {name: ranks[0] for name, ranks in references.items()})


def test_a_checkpoint_goes_on_under_other_shares(tmp_path: Path) -> None:
    even = Shared("of four and three", Layout(dp_shard=2, micro_batch_size=2), model="rich", saves=True)
    other = replace(even, name="of one and six", shares=(1, 6), saves=False, resumes="of four and three")
    (tmp_path / "one").mkdir()
    references = run((REFERENCES[0],), tmp_path / "one")
    outcomes = run((even, other), tmp_path)
    require_equal((even, other), outcomes, {name: ranks[0] for name, ranks in references.items()})
