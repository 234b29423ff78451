"""Scores and regret by hand."""

from __future__ import annotations

import pytest
from meshwright.schema.units import GIB
from meshwright.validation import predict, read_runs, score_groups, score_sources
from meshwright.validation.score import log_bias, memory_kind, rank_correlation, regret, relative_error
from run_rows import GOOD, table


def test_scores_by_hand() -> None:
    assert relative_error([2.0, 1.0], [1.0, 2.0]) == pytest.approx(0.75)
    assert log_bias([2.0, 1.0], [1.0, 2.0]) == pytest.approx(0.0)
    assert log_bias([2.0, 8.0], [1.0, 1.0]) == pytest.approx(3.0)
    assert rank_correlation([1.0, 2.0, 3.0], [10.0, 30.0, 20.0]) == pytest.approx(0.5)
    assert rank_correlation([1.0, 1.0, 2.0, 2.0], [1.0, 1.0, 2.0, 2.0]) == pytest.approx(1.0)
    assert rank_correlation([1.0, 2.0], [1.0, 2.0]) is None
    assert rank_correlation([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]) is None


def test_regret_is_of_the_fastest_prediction_that_fits() -> None:
    assert regret([3.0, 1.0, 2.0], [True, False, True], [4.0, 1.0, 2.0], 1.0) == (2, 0.5)
    assert regret([3.0, 1.0, 2.0], [False, False, False], [4.0, 1.0, 2.0], 1.0) == (1, 0.0)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("max_allocated (max over ranks)", "allocated"),
        ("peak reserved (torchtitan log; max over ranks)", "reserved"),
        ("nvidia-smi style, integer GiB of 80", "nvidia-smi"),
        ("allocated vs reserved not stated", "unstated"),
        ('peak memory "GB" as printed, max over stages', "peak"),
        ("GPU memory as printed", "unstated"),
        ("", "unstated"),
    ],
)
def test_memory_kind_of_a_description(text, kind) -> None:
    assert memory_kind(text) == kind


def test_source_score_counts_every_row_once(tmp_path) -> None:
    rows = read_runs(table(tmp_path, *GOOD))
    predictions = predict(rows)
    groups = score_groups(rows, predictions, ["g", "absent"])
    score = score_sources(rows, predictions, groups)["s"]
    assert (score.rows, score.scored, score.unscored, score.skipped) == (4, 2, 1, {"layout: batch does not divide": 1})
    assert score.time is not None
    assert score.time.count == 2
    known = [p.estimate for p in predictions if p.estimate]
    assert score.time.mape == pytest.approx((abs(known[0].step_time_s / 2 - 1) + abs(known[1].step_time_s / 3 - 1)) / 2)
    assert score.memory["allocated"].bias == pytest.approx(known[0].peak_allocated_bytes / (20 * GIB) - 1)
    assert (score.fit.failed, score.fit.recall, score.fit.ran, score.fit.false_alarms) == (0, None, 2, 0.0)
    chosen = {"a": 2.0, "b": 3.0}[groups["g"].chosen or ""]
    assert groups["g"].regret == pytest.approx(1 - 2.0 / chosen)
    assert list(groups) == ["g"]
