"""Predictions of rows: the estimator's, with stages cut as the engine that ran does, in the order of the rows."""

from __future__ import annotations

import csv
import math

import pytest
from meshwright.cost_models.stage.table import CostTable
from meshwright.planner import estimate
from meshwright.schema import ClusterSpec, Layout, ModelSpec, Workload
from meshwright.schema.layers import Block, DenseMLP, Embedding, Head, LayerRun, SoftmaxAttention
from meshwright.schema.layout_table import LayoutTable
from meshwright.validation import predict, read_groups, read_runs, score_groups, score_sources
from meshwright.validation.predict import boundaries
from run_rows import SHARED, a_row, inputs_of


def test_prediction_equals_the_estimator_where_our_rules_hold() -> None:
    row = a_row()
    inputs = inputs_of()
    predicted = predict([row])[0].estimate
    assert predicted is not None
    expected = estimate(inputs.model, inputs.cluster, inputs.workload, inputs.layout)
    # Even stages here, balanced ones there: embedding and head make them differ a little.
    assert predicted.step_time_s == pytest.approx(expected.step_time_s, rel=0.1)
    assert predicted.step_time_s >= expected.step_time_s * (1 - 1e-12)


def test_predictions_keep_the_order_of_rows_of_many_batches() -> None:
    sizes = [(2048, 1), (1024, 1), (2048, 2), (1024, 2)]
    rows = [a_row(id=str(n), seq_len=seq, micro_batch=micro) for n, (seq, micro) in enumerate(sizes)]
    together = predict(rows)
    assert [p.estimate for p in together] == [predict([row])[0].estimate for row in rows]


def test_nanotron_cuts_stages_where_the_weights_pass_their_share() -> None:
    """Blocks of 12 h^2 and a head of 32 h^2 on 4 stages: 128 h^2 in all, a stage ends with the block that passes 32, 64, 96."""
    attention = SoftmaxAttention(kind="mha", num_heads=4, num_kv_heads=4, head_dim=16, rope_fraction=0.0)
    block = Block(attention=attention, mlp=DenseMLP(ffn_dim=256, gated=False))
    vocab = 32 * 64
    spec = ModelSpec(
        name="test",
        architecture="decoder",
        hidden_dim=64,
        layers=(
            LayerRun(layer=Embedding(vocab_size=vocab)),
            LayerRun(layer=block, count=8),
            LayerRun(layer=Head(vocab_size=vocab)),
        ),
        tie_embeddings=False,
        max_seq_len=4096,
    )
    batch = LayoutTable.from_layouts([Layout(pp=4)], 8)
    workload = Workload(seq_len=64, global_batch_size=8, engine="nanotron")
    costs = CostTable.from_layouts(spec, workload, ClusterSpec.parse("4xH100-SXM-80GB"), batch)
    assert boundaries(costs, 0, balanced=True) == (0, 4, 7, 9, 10)
    assert boundaries(costs, 0, balanced=False) == (0, 3, 5, 7, 10)


def test_row_of_impossible_size_is_skipped_and_others_are_predicted() -> None:
    absurd, usual = predict([a_row(id="x", hidden=999_999_999, ffn=999_999_999, params_b=None), a_row(id="y")])
    assert (absurd.skipped or "").startswith("estimate: MemoryBreakdown")
    assert usual.estimate is not None


def test_stages_without_layers_are_predicted() -> None:
    row = a_row(layers=3, pp=16, tp=1, dp=1)
    estimate = predict([row])[0].estimate
    assert estimate is not None
    assert sum(stage.forward_s > 0 for stage in estimate.stages) == 5


@pytest.mark.long
@pytest.mark.skipif(not SHARED.exists(), reason=f"the measured runs are not beside the repository ({SHARED})")
def test_measured_runs_are_read_whole_and_mostly_predicted() -> None:
    rows = read_runs(SHARED / "training_runs.csv")
    with (SHARED / "training_runs.csv").open(newline="") as file:
        assert len(rows) == sum(1 for _ in csv.DictReader(file))
    rows = rows[::4]
    predictions = predict(rows)
    assert sum(p.estimate is not None for p in predictions) > 1000
    assert all((p.estimate is None) == (p.skipped is not None) for p in predictions)
    scores = score_sources(
        rows, predictions, score_groups(rows, predictions, read_groups(SHARED / "decision_groups.csv"))
    )
    assert sum(score.rows for score in scores.values()) == len(rows)
    assert all(math.isfinite(score.time.mape) for score in scores.values() if score.time)
    assert sum(score.regret.count for score in scores.values() if score.regret) > 50
