"""Blocks by half-batches over tp, against one rank; tolerances as in test_parity."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from harness import Outcome, by_world_size
from meshwright.schema import Layout
from plans import gpt2_model
from test_parity import BF16, MODELS, Setup, require_equal, run

ADDED = {"by halves gpt": gpt2_model(num_blocks=3)}


@dataclasses.dataclass(frozen=True)
class ByHalves(Setup):
    """A setup of these models."""

    model: str = "five rich"


def halves(**fields: object) -> Layout:
    return Layout(tp_halves=True, **{"tp": 2, "micro_batch_size": 2, **fields})  # type: ignore[arg-type]


REFERENCES = tuple(Setup(name, Layout(micro_batch_size=2), model=name) for name in ("five rich", "five tied", *ADDED))
TWO = (
    ByHalves("full", halves(recompute="full")),
    ByHalves("selective", halves(recompute="selective", sequence_parallel=False)),
    ByHalves("gpt", halves(), model="by halves gpt"),
    ByHalves("prefetch 2", Layout(dp_shard=2, zero_stage=3, micro_batch_size=2, prefetch=2)),
    ByHalves("bf16", halves(), model="five tied", workload=BF16),
)
FOUR = (
    ByHalves("zero 3", halves(dp_shard=2, recompute="full", prefetch=2)),
    ByHalves("pp", halves(pp=2, sequence_parallel=False)),
    ByHalves("replicas", halves(dp_replicate=2)),
    ByHalves("tp 4", halves(tp=4, dp_shard=1), model="by halves gpt"),
)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    MODELS.update(ADDED)
    return {name: ranks[0] for name, ranks in run(REFERENCES, tmp_path_factory.mktemp("reference")).items()}


@pytest.mark.parametrize("setups", by_world_size(TWO, FOUR, quick=("selective", "prefetch 2")))
def test_half_batches_train_as_one_rank_does(
    setups: tuple[Setup, ...], references: dict[str, Outcome], tmp_path: Path
) -> None:
    require_equal(setups, run(setups, tmp_path), references)
