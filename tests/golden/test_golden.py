"""What the commands answered when this was written, to 1e-12: no planned number changes by accident.

Where a change of numbers is meant, `python tests/golden/regenerate.py` writes them anew and says what changed.
"""

from __future__ import annotations

import pytest
from golden_cases import Case, cases, differences, run, stored_answers

ANSWERS = stored_answers()


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.label, marks=[] if "quick" in case.name else [pytest.mark.long]) for case in cases()],
)
def test_answer_is_the_stored_one(case: Case) -> None:
    expected, actual = ANSWERS[case.group][case.name], run(case)
    changed = list(differences(expected, actual))
    assert not changed, "\n".join([*case.commands, *changed[:40]])


def test_every_answer_has_a_case() -> None:
    named = {(case.group, case.name) for case in cases()}
    assert {(group, name) for group, answers in ANSWERS.items() for name in answers} == named
