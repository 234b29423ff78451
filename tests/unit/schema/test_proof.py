"""The words for what a search proved."""

from __future__ import annotations

import pytest
from meshwright.schema import Certificate
from meshwright.schema.units import counted, format_percent

COUNTS = {"evaluated": 3, "pruned": 5, "search_s": 0.1}


@pytest.mark.parametrize(
    ("bound", "finished", "status", "verdict"),
    [
        (1.0, True, "optimal", "optimal"),
        (0.9991, True, "optimal", "optimal"),
        (0.952, True, "complete", "complete, within 4.8 %"),
        (1.0, False, "stopped", "stopped early, within 0.0 %"),
        (0.952, False, "stopped", "stopped early, within 4.8 %"),
        (0.0, False, "stopped", "stopped early, nothing proved"),
    ],
)
def test_optimal_is_said_only_where_the_gap_is_closed(bound: float, finished: bool, status: str, verdict: str) -> None:
    made = Certificate.proved(objective=1.0, bound=bound, finished=finished, **COUNTS)
    assert (made.status, made.verdict) == (status, verdict)
    assert Certificate.model_validate(made.model_dump()) == made


def test_more_tokens_than_the_bound_leave_no_gap() -> None:
    made = Certificate.proved(objective=10.0, bound=11.0, finished=True, unit="tokens_per_s", **COUNTS)
    assert made.verdict == "complete, within 9.1 %"


@pytest.mark.parametrize(
    ("old", "gap", "status"), [("optimal", 0.05, "complete"), ("optimal", 0.0, "optimal"), ("feasible", 0.0, "stopped")]
)
def test_words_of_older_documents_are_read(old: str, gap: float, status: str) -> None:
    document = {"status": old, "objective_s": 1.0, "bound_s": 1.0 - gap, "gap": gap, **COUNTS}
    assert Certificate.model_validate(document).status == status


def test_percentages_and_counts_read_as_english() -> None:
    assert [format_percent(value) for value in (-1e-5, 0.0, 0.0476, -0.05)] == ["0.0 %", "0.0 %", "4.8 %", "-5.0 %"]
    assert [format_percent(value, sign=True) for value in (-1e-5, 1e-5, 0.0476)] == ["0.0 %", "0.0 %", "+4.8 %"]
    assert [counted(1, "node"), counted(2, "node"), counted(0, "batch", "batches")] == [
        "1 node",
        "2 nodes",
        "0 batches",
    ]
