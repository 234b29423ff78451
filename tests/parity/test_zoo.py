"""What profile_module and plan offer of a user's model parallelize runs, gradients equal to one rank's; the rest is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import zoo
from harness import Case, run_group
from zoo_plans import differences, in_groups, plans_of

QUICK = ("gemma", "plain")
OTHERS = ["clip", *(name for name in zoo.MODELS if name not in (*QUICK, "clip"))]
REASONS = ("base_model_tp_plan", "plain module", "only the plan's own model is", "names no", "fully_shard", "may mix tokens",
           "is a scalar", "two or more blocks", "does not run without values", "computes by values")  # fmt: skip


@pytest.mark.parametrize("names", in_groups(QUICK, OTHERS, 4), ids="-".join)
def test_what_is_offered_runs_and_the_rest_says_why(names: Sequence[str], tmp_path: Path) -> None:
    cases: dict[str, dict[str, Case]] = {}
    for name in names:
        offered, refused = plans_of(name)
        assert "the plan's own choice" in offered, refused
        for wish, why in refused.items():
            assert any(reason in why for reason in REASONS), f"{name}, {wish}: {why}"
        cases[name] = {
            wish: Case(f"{name}, {wish}", plan, module=name, run=zoo.one_step) for wish, plan in offered.items()
        }
    outcomes = run_group(2, [case for of_model in cases.values() for case in of_model.values()], tmp_path)
    for name, of_model in cases.items():
        reference = zoo.alone(name)
        for case in of_model.values():
            gradients = {key: grad for outcome in outcomes[case.name] for key, grad in outcome.gradients.items()}
            problems = differences(gradients, reference)
            assert not problems, f"{case.name}, {case.plan.layout}: {problems}"
