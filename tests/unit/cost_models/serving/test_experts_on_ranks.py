"""Experts over ranks: rows of the busiest rank and experts that are reached, against draws; kernels against a measured table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from meshwright.cost_models.learned.serving_kernels import ExpertShape, reached_fraction
from meshwright.cost_models.serving.operators import busiest_over_mean
from meshwright.cost_models.serving.step import StepCosts
from meshwright.schema import ClusterSpec, ModelSpec
from meshwright.schema.serving import ServingLayout

DATA = Path(__file__).resolve().parents[5] / "shared/data/serving/operators/decode_wide_experts.parquet"


def loads(tokens: int, experts: int, cv: float, draws: int = 2000) -> np.ndarray:
    """Draw the rows of each expert: popularity by a gamma distribution, rows by a Poisson one [draws, experts]."""
    random = np.random.default_rng(0)
    popularity = random.gamma(1 / cv**2, cv**2, (draws, experts))
    return random.poisson(tokens / experts * popularity)


@pytest.mark.parametrize("tokens", [64, 512, 8192])
def test_reached_experts_are_those_of_draws(tokens: int) -> None:
    drawn = (loads(tokens, 128, 0.7) > 0).mean()
    assert float(reached_fraction(np.asarray(tokens / 128), 0.7)) == pytest.approx(drawn, rel=0.01)


@pytest.mark.parametrize(("tokens", "ranks"), [(64, 4), (512, 8), (8192, 8), (8192, 32)])
def test_rows_of_the_busiest_rank_are_those_of_draws(tokens: int, ranks: int) -> None:
    """A sum of few gamma variables has a longer tail than a normal one: up to a tenth is allowed."""
    of_ranks = loads(tokens, 128, 0.7).reshape(-1, ranks, 128 // ranks).sum(axis=2)
    drawn = (of_ranks.max(axis=1) / of_ranks.mean(axis=1)).mean()
    ours = busiest_over_mean(np.asarray([tokens / ranks]), ranks, 128 / ranks, 0.7)[0]
    assert ours == pytest.approx(drawn, rel=0.1)


@given(rows=st.floats(0.01, 1e6), more=st.floats(1, 100), ranks=st.sampled_from([1, 2, 8, 64]), cv=st.floats(0.1, 2))
def test_more_rows_reach_more_experts_and_are_more_even(rows: float, more: float, ranks: int, cv: float) -> None:
    few, many = np.asarray(rows), np.asarray(rows * more)
    assert 0 < reached_fraction(few, cv) <= reached_fraction(many, cv) * (1 + 1e-12) <= 1 + 1e-9
    assert busiest_over_mean(few, ranks, 8, cv) >= busiest_over_mean(many, ranks, 8, cv) >= 1


@pytest.mark.skipif(not DATA.exists(), reason="measured kernels lie beside the repository")
def test_experts_over_many_ranks_take_as_long_as_deepeps_kernels() -> None:
    """1 to 8 experts a rank with up to 1,024 rows, which lie outside the table that is fitted; Hopper."""
    pd = pytest.importorskip("pandas")
    table = pd.read_parquet(DATA)
    table = table[(table.system == "h100_sxm") & (table.distribution == "uniform") & (table.moe_ep_size >= 32)]
    layout = ServingLayout(attention_dp=32, ep=32)
    model, cluster = ModelSpec.named("deepseek-v3"), ClusterSpec.parse("4x8xH100-SXM-80GB")
    products = StepCosts.build(model, cluster, layout, weights="fp8", cache="fp8").instance.products
    tokens, ep = table.num_tokens.to_numpy(dtype=float), table.moe_ep_size.to_numpy(dtype=float)
    rows, ones = tokens * 8 / ep, np.ones(len(table))
    shape = ExpertShape(
        rows=rows, tokens=tokens * (1 - (1 - 1 / ep) ** 8), reached=np.minimum(256 / ep, rows), experts=256 / ep,
        hidden_dim=7168 * ones, ffn_dim=2048 * ones, gated=ones, weight_bytes=ones, faster=2 * ones, cutlass=0 * ones,
    )  # fmt: skip
    ratio = products.experts(shape, "fp8") / (table.latency.to_numpy() / 1e3)
    assert 0.8 < np.median(ratio) < 1.4
    assert ratio.max() < 2.5
