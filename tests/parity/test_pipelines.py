"""Every pipeline schedule, with one stage or several a rank, against one rank; tolerances as in test_parity.

Some schedules get too few micro-batches to fill the pipeline. Checkpoints are resumed under other schedules.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from harness import Outcome, by_world_size
from meshwright.cost_models.pipeline import orders
from meshwright.cost_models.pipeline.orders import to_torch_csv
from meshwright.schema import Layout, Workload
from meshwright.schema.layers import MoE
from plans import tiny_model
from test_parity import BF16, MODELS, SGD, WORKLOAD, Setup, require_equal, run

STEPS = 10
ADDED = {
    "deep": tiny_model(num_blocks=9, tied=True),
    "deep sgd": tiny_model(num_blocks=7, tied=True),
    "deep experts": tiny_model(num_blocks=4, experts=MoE(num_experts=8, top_k=2, ffn_dim=32)),
}


def zb_v_from_the_last_rank(num_ranks: int, num_microbatches: int) -> tuple[str, ...]:
    """A V whose first and last stages lie on the last rank."""
    return tuple(to_torch_csv(orders.zb_v(num_ranks, num_microbatches)[::-1]).splitlines())


@dataclasses.dataclass(frozen=True)
class Piped(Setup):
    """A setup of these models; two micro-batches at a time unless a layout says otherwise."""

    model: str = "five tied"


@dataclasses.dataclass(frozen=True)
class LongRun(Setup):
    """Ten steps without momentum: Adam's division by small roots would magnify rounding from step to step."""

    model: str = "deep sgd"
    workload: Workload = SGD
    num_steps: int = STEPS


def v(schedule: str, **degrees: int) -> Layout:
    return Layout(pp=degrees.pop("pp", 2), num_model_chunks=2, schedule=schedule, **degrees)


REFERENCES = tuple(
    Setup(
        name,
        Layout(micro_batch_size=2),
        model=name,
        workload=SGD if "sgd" in name else WORKLOAD,
        num_steps=STEPS if "sgd" in name else 3,
    )
    for name in ("five rich", "five tied", *ADDED)
)
TWO = (
    Piped("zb-h1", Layout(pp=2, micro_batch_size=2, schedule="zb-h1")),
    LongRun("ten steps of zb-h1", Layout(pp=2, micro_batch_size=2, schedule="zb-h1")),
    LongRun("ten steps of chunks", Layout(pp=2, num_model_chunks=3, micro_batch_size=2)),
    LongRun("ten steps of zb-v", v("zb-v", micro_batch_size=2)),
    Piped("zb-h1 of two micro-batches", Layout(pp=2, micro_batch_size=4, schedule="zb-h1"), model="five rich"),
    Piped("zb-h2", Layout(pp=2, micro_batch_size=2, schedule="zb-h2"), model="five rich", rank_map=(1, 0)),
    Piped("chunks", Layout(pp=2, num_model_chunks=2, micro_batch_size=2), saves=True),
    Piped("chunks gpipe", v("gpipe", micro_batch_size=2), rank_map=(1, 0)),
    Piped("chunks zb", v("zb-h1", micro_batch_size=2), model="five rich"),
    Piped("four chunks", Layout(pp=2, num_model_chunks=4), model="deep", blocks_per_stage=(1, 1, 2, 1, 1, 1, 1, 1)),
    Piped("zb-v", v("zb-v", micro_batch_size=2), saves=True),
    Piped("zb-v of two micro-batches", v("zb-v", micro_batch_size=4), model="five rich"),
    Piped("zb-v bf16", v("zb-v"), workload=BF16),
    Piped("v-half", v("v-half", micro_batch_size=2), model="five rich", rank_map=(1, 0)),
    Piped("v-min", v("v-min"), blocks_per_stage=(2, 1, 1, 1)),
    Piped("own model, zb-v", v("zb-v", micro_batch_size=2), own_model=True),
    Piped("synthesised", v("synthesised", micro_batch_size=2), pipeline_order=zb_v_from_the_last_rank(2, 4)),
    Piped("chunks resumed as zb-v", v("zb-v", micro_batch_size=2), resumes="chunks"),
    Piped("zb-v resumed as zero 3", Layout(dp_shard=2, micro_batch_size=2), resumes="zb-v"),
)
QUICK = (
    "zb-h1", "zb-h2", "ten steps of zb-v", "chunks", "four chunks", "v-half", "synthesised", "chunks resumed as zb-v",
)  # fmt: skip
FOUR = (
    Piped("pp 4 zb-h1", Layout(pp=4, schedule="zb-h1"), rank_map=(1, 3, 0, 2)),
    Piped("pp 4 chunks", Layout(pp=4, num_model_chunks=2), model="deep"),
    Piped("pp 4 chunks zb", v("zb-h1", pp=4), model="deep", rank_map=(1, 3, 0, 2)),
    Piped("pp 4 zb-v", v("zb-v", pp=4), model="deep", rank_map=(1, 3, 0, 2)),
    Piped("pp 4 v-half", v("v-half", pp=4), model="deep", blocks_per_stage=(1, 1, 1, 1, 1, 1, 1, 2)),
    Piped("pp 4 v-min", v("v-min", pp=4), model="deep"),
    Piped("zb-v tp", v("zb-v", tp=2, micro_batch_size=2), rank_map=(1, 3, 0, 2)),
    Piped(
        "chunks tp",
        Layout(pp=2, tp=2, num_model_chunks=2, sequence_parallel=False, micro_batch_size=2),
        model="five rich",
    ),
    Piped("zb-h1 tp", Layout(pp=2, tp=2, schedule="zb-h1", micro_batch_size=2), model="five rich"),
    Piped("zb-v zero 1", v("zb-v", dp_shard=2)),
    Piped("v-half replicas", v("v-half", dp_replicate=2), model="five rich"),
    Piped("zb-v ep", v("zb-v", dp_shard=2, ep=2), model="deep experts"),
    Piped("chunks ep over tp", Layout(pp=2, tp=2, ep=2, num_model_chunks=2, micro_batch_size=2), model="deep experts"),
    Piped("four chunks zb zero 1", Layout(pp=2, dp_shard=2, num_model_chunks=4, schedule="zb-h1"), model="deep"),
    Piped("four chunks zero 1 full", Layout(pp=2, dp_shard=2, num_model_chunks=4, recompute="full"), model="deep"),
    Piped(
        "chunks zero 1 selective",
        Layout(pp=2, dp_shard=2, num_model_chunks=2, recompute="selective"),
        model="five rich",
    ),
    Piped("zb-h1 zero 1 bf16", Layout(pp=2, dp_shard=2, schedule="zb-h1"), model="five rich", workload=BF16),
)
EIGHT = (
    LongRun("ten steps in 3d", v("v-half", tp=2, dp_shard=2)),
    Piped("3d chunks", Layout(pp=2, tp=2, dp_shard=2, num_model_chunks=2), model="five rich"),
    Piped("3d zb-v", v("zb-v", tp=2, dp_shard=2), rank_map=(1, 5, 3, 7, 0, 4, 2, 6)),
)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    MODELS.update(ADDED)
    return {name: ranks[0] for name, ranks in run(REFERENCES, tmp_path_factory.mktemp("reference")).items()}


@pytest.mark.parametrize("setups", by_world_size(TWO, FOUR, EIGHT, quick=QUICK))
def test_schedules_train_as_one_rank_does(
    setups: tuple[Setup, ...], references: dict[str, Outcome], tmp_path: Path
) -> None:
    require_equal(setups, run(setups, tmp_path), references)
