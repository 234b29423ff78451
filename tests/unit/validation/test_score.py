"""Scores and regret by hand."""

from __future__ import annotations

import pytest
from meshwright.schema.units import GIB
from meshwright.validation import predict, read_runs, score_by, score_groups, score_overall, score_sources
from meshwright.validation.decisions import rank_correlation
from meshwright.validation.score import log_bias, memory_kind, relative_error
from run_rows import GOOD, table


def test_scores_by_hand() -> None:
    assert relative_error([2.0, 1.0], [1.0, 2.0]) == pytest.approx(0.75)
    assert log_bias([2.0, 1.0], [1.0, 2.0]) == pytest.approx(0.0)
    assert log_bias([2.0, 8.0], [1.0, 1.0]) == pytest.approx(3.0)
    assert rank_correlation([1.0, 2.0, 3.0], [10.0, 30.0, 20.0]) == pytest.approx(0.5)
    assert rank_correlation([1.0, 1.0, 2.0, 2.0], [1.0, 1.0, 2.0, 2.0]) == pytest.approx(1.0)
    assert rank_correlation([1.0, 2.0], [1.0, 2.0]) is None
    assert rank_correlation([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]) is None


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
    assert (score.fit.failed, score.fit.misses, score.fit.ran, score.fit.alarms) == (0, 0, 2, 0)
    widths = [(e.step_time_interval_s.high - e.step_time_interval_s.low) / e.step_time_s for e in known[:2]]
    assert score.time.width == pytest.approx(sum(widths) / 2)
    chosen = {"a": 2.0, "b": 3.0}[groups["g"].chosen or ""]
    assert groups["g"].regret == pytest.approx(1 - 2.0 / chosen)
    # The naive rule takes row b, whose tp x pp is 1 and not 2; at random it is b half of the time.
    assert (groups["g"].naive, groups["g"].random) == (pytest.approx(1 / 3), pytest.approx(1 / 6))
    # Of two rows the geometric mean lies a root of their ratio above the faster one.
    assert groups["g"].measured_gain == pytest.approx((5.0 - chosen) ** 0.5 / chosen**0.5 - 1)
    ratio = known[1].step_time_s / known[0].step_time_s
    assert groups["g"].predicted_gain == pytest.approx(max(ratio, 1 / ratio) ** 0.5 - 1)
    assert list(groups) == ["g"]
    assert groups == score_groups(rows, predictions)
    overall = score_overall([score])
    assert (overall.coverage, overall.num_groups, overall.alarms, overall.ran) == (score.time.coverage, 1, 0, 2)


def test_errors_by_fields_of_the_layout(tmp_path) -> None:
    rows = read_runs(table(tmp_path, *GOOD))
    parts = score_by(rows, predict(rows), ["micro_batch", "recompute"])
    assert list(parts) == [("s", 1, "full"), ("s", 2, "none")]
    assert sum(part.count for part in parts.values()) == 2


def test_regret_counts_a_best_row_that_could_not_be_predicted(tmp_path) -> None:
    lines = [line.replace(",C,", ",A,") for line in GOOD]
    lines[3] = lines[3].replace("A100-SXM-80GB", "abacus")  # 1.0 s, on a device that nobody knows
    rows = read_runs(table(tmp_path, *lines))
    group = score_groups(rows, predict(rows))["g"]
    assert (group.measured, group.predicted, group.best) == (3, 2, "d")
    assert group.regret == pytest.approx(1 - 1.0 / {"a": 2.0, "b": 3.0}[group.chosen or ""])
