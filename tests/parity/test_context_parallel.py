"""Sequences shared out over ranks, with every other axis, against one rank; tolerances as in test_parity.

A sequence of 24 tokens gives pieces of 3 to 6: no power of two.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from harness import Outcome, by_world_size
from meshwright.schema import Layout, Workload
from meshwright.schema.layers import MoE
from plans import tiny_model
from test_parity import MODELS, Setup, require_equal, run

LONG = Workload(seq_len=24, global_batch_size=8, precision="fp32")
LONG_SGD = LONG.replace(optimizer="sgd")
LONG_BF16 = LONG_SGD.replace(precision="bf16-mixed")
STEPS = 10
ADDED = {
    "long latent sgd": MODELS["latent"],
    "long": tiny_model(num_blocks=4, qkv_bias=True, qk_norm="per_head"),
    "long sgd": tiny_model(tied=True, num_heads=8, num_kv_heads=4),
    "long experts": tiny_model(num_blocks=2, experts=MoE(num_experts=8, top_k=2, ffn_dim=32)),
}


@dataclasses.dataclass(frozen=True)
class Long(Setup):
    """A setup of longer sequences, trained by AdamW."""

    model: str = "long"
    workload: Workload = LONG


@dataclasses.dataclass(frozen=True)
class Plain(Setup):
    """The same without momentum: Adam's division by small roots magnifies rounding, here of merged attention, from step to step."""

    model: str = "long sgd"
    workload: Workload = LONG_SGD


REFERENCES = tuple(
    (Long if name == "long" else Plain)(name, Layout(micro_batch_size=4), model=name, num_steps=STEPS) for name in ADDED
)
TWO = (
    Long("ring", Layout(cp=2, micro_batch_size=4)),
    Long("exchange", Layout(cp=2, cp_ulysses=2, micro_batch_size=4)),
    Long("ring, zero 1", Layout(cp=2, zero_stage=1, micro_batch_size=2), saves=True),
    Plain("ring, replicas", Layout(cp=2, zero_stage=0, micro_batch_size=4)),
    Long("ring, selective", Layout(cp=2, micro_batch_size=4, recompute="selective")),
    Long("ring, full", Layout(cp=2, micro_batch_size=4, recompute="full")),
    Long("exchange, selective", Layout(cp=2, cp_ulysses=2, micro_batch_size=4, recompute="selective")),
    Plain("ring bf16", Layout(cp=2, micro_batch_size=4), workload=LONG_BF16),
    Plain("exchange bf16", Layout(cp=2, cp_ulysses=2, micro_batch_size=4), workload=LONG_BF16),
    Plain("ring, latent", Layout(cp=2, micro_batch_size=4, recompute="selective"), model="long latent sgd"),
    Plain("exchange, latent", Layout(cp=2, cp_ulysses=2, micro_batch_size=4), model="long latent sgd"),
    Plain("own model, ring", Layout(cp=2, micro_batch_size=4), own_model=True),
    Long("ring resumed as pp", Layout(pp=2, micro_batch_size=2), resumes="ring, zero 1"),
    Plain("ten steps of a ring", Layout(cp=2, micro_batch_size=4), num_steps=STEPS),
)
QUICK = ("ring, zero 1", "exchange, selective", "ring, latent", "exchange bf16", "ring resumed as pp")
FOUR = (
    Long("cp 4", Layout(cp=4, micro_batch_size=4)),
    Long("cp 4, half exchanged", Layout(cp=4, cp_ulysses=2, micro_batch_size=4)),
    Plain("cp 4, all exchanged", Layout(cp=4, cp_ulysses=4, micro_batch_size=4)),
    Long("cp zero 3", Layout(cp=2, dp_shard=2, micro_batch_size=2), rank_map=(0, 1, 2, 3)),
    Long("cp replicas", Layout(cp=2, dp_replicate=2, micro_batch_size=2), rank_map=(2, 3, 0, 1)),
    Plain("cp replicas zero 0", Layout(cp=2, dp_replicate=2, zero_stage=0)),
    Long("cp tp", Layout(cp=2, tp=2, micro_batch_size=4), rank_map=(0, 2, 1, 3)),
    Plain("exchange tp", Layout(cp=2, cp_ulysses=2, tp=2, micro_batch_size=4)),
    Long("cp pp", Layout(cp=2, pp=2, micro_batch_size=2), rank_map=(1, 3, 0, 2)),
    Plain("cp zb-v", Layout(cp=2, pp=2, num_model_chunks=2, schedule="zb-v", micro_batch_size=2)),
    Plain("cp ep", Layout(cp=2, dp_shard=2, ep=4, micro_batch_size=2), model="long experts"),
)
EIGHT = (
    Long("cp tp zero 3", Layout(cp=2, tp=2, dp_shard=2, micro_batch_size=2)),
    Plain("cp pp tp", Layout(cp=2, cp_ulysses=2, pp=2, tp=2, micro_batch_size=2), rank_map=(1, 5, 3, 7, 0, 4, 2, 6)),
    Plain(
        "ten steps of cp pp dp", Layout(cp=2, pp=2, dp_shard=2, num_model_chunks=2, schedule="zb-h1"), num_steps=STEPS
    ),
)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    MODELS.update(ADDED)
    return {name: ranks[0] for name, ranks in run(REFERENCES, tmp_path_factory.mktemp("reference")).items()}


@pytest.mark.parametrize("setups", by_world_size(TWO, FOUR, EIGHT, quick=QUICK))
def test_shared_sequences_train_as_whole_ones(
    setups: tuple[Setup, ...], references: dict[str, Outcome], tmp_path: Path
) -> None:
    require_equal(setups, run(setups, tmp_path), references)
