"""What profile_module and plan offer of a user's model parallelize runs, gradients equal to one rank's; the rest is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import zoo
from harness import Case, run_group
from meshwright.planner import plan
from meshwright.profilers import profile_module
from meshwright.schema import ConfigError, ModelSpec, TrainingPlan, Workload
from plans import cpu_cluster
from torch import Tensor

WISHES: dict[str, dict[str, Any]] = {
    "the plan's own choice": {},
    "replicas": {"dp_replicate": 2, "dp_shard": 1},
    "sharded, recompute": {"dp_shard": 2, "zero_stage": 3, "recompute": "full"},
    "tp": {"tp": 2, "sequence_parallel": False},
    "tp along the sequence": {"tp": 2, "sequence_parallel": True},
    "stages": {"pp": 2, "schedule": "1f1b", "num_model_chunks": 1},
}
QUICK = ("gemma", "plain", "clip")
REASONS = ("base_model_tp_plan", "plain module", "only the plan's own model is", "names no", "fully_shard", "may mix tokens",
           "is a scalar", "two or more blocks", "does not run without values", "computes by values")  # fmt: skip


def plans_of(name: str) -> tuple[dict[str, TrainingPlan], dict[str, str]]:
    """What is offered for two ranks, and why not the rest."""
    model, inputs = zoo.build(name)
    spec: ModelSpec = profile_module(model, inputs if hasattr(model, "config") else list(inputs.values()))
    assert spec.traced_len is not None
    workload = Workload(seq_len=spec.traced_len, global_batch_size=zoo.BATCH, precision="fp32")
    offered, refused = dict[str, TrainingPlan](), dict[str, str]()
    for wish, fixed in WISHES.items():
        try:
            offered[wish] = plan(spec, cpu_cluster(2), workload, fixed=fixed)
        except ConfigError as error:
            refused[wish] = str(error)
    return offered, refused


@pytest.mark.parametrize(
    "names",
    [QUICK, pytest.param([name for name in zoo.MODELS if name not in QUICK], marks=pytest.mark.long)],
    ids=["quick", "all"],
)
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


def differences(gradients: dict[str, Tensor], reference: dict[str, Tensor]) -> list[str]:
    """Gradients that are missing or differ by more than rounding of the largest one."""
    largest = max(float(grad.abs().max()) for grad in reference.values())
    tied = {key for key in reference if key not in gradients}  # a tied head goes by the embedding's name
    wrong = [f"{key} is missing" for key in tied]
    for key in reference.keys() & gradients.keys():
        error = float((gradients[key] - reference[key]).abs().max())
        if error > 1e-5 * largest:
            wrong.append(f"{key}: {error / largest:.1e} of the largest gradient")
    return wrong
