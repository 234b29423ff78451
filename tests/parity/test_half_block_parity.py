"""Stages that end between attention and feed-forward part of a block, against one rank; tolerances as in test_parity.

Five blocks are ten halves: 5 + 5 on two stages cut the third block, 3 + 3 + 4 on three the second and the fourth. Checkpoints go on
under entire blocks, and those of entire blocks under halves.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from harness import Outcome, by_world_size
from meshwright.schema import Layout
from meshwright.schema.layers import MoE
from plans import gpt2_model, tiny_model
from test_parity import BF16, MODELS, Setup, require_equal, run

ADDED = {
    "halved gpt": gpt2_model(num_blocks=3),
    "halved experts": tiny_model(num_blocks=3, experts=MoE(num_experts=8, top_k=2, ffn_dim=32)),
}


@dataclasses.dataclass(frozen=True)
class Halved(Setup):
    """A setup of these models."""

    model: str = "five rich"


def halves(pp: int = 2, micro_batch_size: int = 2, **fields: object) -> Layout:
    return Layout(pp=pp, micro_batch_size=micro_batch_size, half_blocks=True, **fields)  # type: ignore[arg-type]


REFERENCES = tuple(Setup(name, Layout(micro_batch_size=2), model=name) for name in ("five rich", "five tied", *ADDED))
TWO = (
    Halved("pp 2", halves(), saves=True),
    Halved("gpipe", halves(schedule="gpipe"), model="halved gpt"),
    Halved("zb-h1", halves(schedule="zb-h1")),
    Halved("full", halves(recompute="full")),
    Halved("selective", halves(recompute="selective")),
    Halved("mixed", halves(recompute="mixed"), blocks_per_stage=(3, 7)),
    Halved("experts selective", halves(recompute="selective"), model="halved experts"),
    Halved("one half", halves(), blocks_per_stage=(1, 9)),
    Halved("own model", halves(), own_model=True),
    Halved("bf16", halves(), model="five tied", workload=BF16),
    Halved("entire blocks", Layout(pp=2, micro_batch_size=2), saves=True),
    Halved("halves resumed as blocks", Layout(dp_shard=2, micro_batch_size=2), resumes="pp 2"),
    Halved("blocks resumed as halves", halves(schedule="zb-h1"), resumes="entire blocks"),
)
QUICK = ("pp 2", "zb-h1", "mixed", "experts selective", "halves resumed as blocks")
THREE = (
    Halved("pp 3", halves(pp=3)),
    Halved("pp 3 zb-h1", halves(pp=3, schedule="zb-h1"), rank_map=(1, 2, 0)),
    Halved("pp 3 gpt", halves(pp=3, recompute="full"), model="halved gpt", blocks_per_stage=(1, 2, 3)),
)
FOUR = (
    Halved("tp", halves(tp=2)),
    Halved("tp zb-h1", halves(tp=2, sequence_parallel=False, schedule="zb-h1"), model="halved gpt"),
    Halved("tp selective", halves(tp=2, recompute="selective")),
    Halved("cp", halves(cp=2)),
    Halved("zero 1", halves(dp_shard=2, recompute="full")),
    Halved(
        "zero 1 zb-h1 bf16", halves(dp_shard=2, schedule="zb-h1", micro_batch_size=1), model="five tied", workload=BF16
    ),
    Halved("replicas", halves(dp_replicate=2)),
    Halved("ep", halves(dp_shard=2, ep=2), model="halved experts"),
    Halved("ep over tp", halves(tp=2, ep=2), model="halved experts"),
)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    MODELS.update(ADDED)
    return {name: ranks[0] for name, ranks in run(REFERENCES, tmp_path_factory.mktemp("reference")).items()}


@pytest.mark.parametrize("setups", by_world_size(TWO, THREE, FOUR, quick=QUICK))
def test_half_blocks_train_as_one_rank_does(
    setups: tuple[Setup, ...], references: dict[str, Outcome], tmp_path: Path
) -> None:
    require_equal(setups, run(setups, tmp_path), references)
