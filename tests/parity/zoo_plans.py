"""Plans of the zoo's models, what a rank holds under them, and how far gradients are from those of one rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pytest
import zoo
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

LIMIT_S = 600.0
"""Of a search, on a busy machine."""

SHARDED = {"dp_shard": 2, "zero_stage": 3, "recompute": "full"}
STAGED = {"pp": 2, "schedule": "1f1b", "num_model_chunks": 1}
"""Beside tp 2: each on four ranks, or both."""


def in_groups(quick: Sequence[str], others: Sequence[str], at_once: int) -> list[Any]:
    """Models of a test: quick ones, then others so many at once, which end within its limit; every second group is of the night."""
    starts = range(0, len(others), at_once)
    marks = (pytest.mark.long, pytest.mark.nightly)
    return [quick, *(pytest.param(others[i : i + at_once], marks=marks[i // at_once % 2]) for i in starts)]


@cache
def spec_of(name: str, *tp: int) -> ModelSpec:
    """A model of the zoo as one to plan, with operators placed for these degrees."""
    model, inputs = zoo.build(name)
    return profile_module(model, inputs if hasattr(model, "config") else list(inputs.values()), tp=tp)


def plans_of(name: str) -> tuple[dict[str, TrainingPlan], dict[str, str]]:
    """What is offered for two ranks, and why not the rest."""
    spec = spec_of(name)
    offered, refused = dict[str, TrainingPlan](), dict[str, str]()
    for wish, fixed in WISHES.items():
        try:
            offered[wish] = plan(spec, cpu_cluster(2), workload_of(spec), fixed=fixed, time_limit_s=LIMIT_S)
        except ConfigError as error:
            refused[wish] = str(error)
    return offered, refused


def workload_of(spec: ModelSpec) -> Workload:
    """Four samples in fp32."""
    assert spec.traced_len is not None
    return Workload(seq_len=spec.traced_len, global_batch_size=zoo.BATCH, precision="fp32")


def placed_plan(name: str, **fixed: int | str) -> TrainingPlan:
    """A plan with tp 2 on as many ranks as its degrees make."""
    spec = spec_of(name, 2)
    degrees = {"tp": 2, "dp_shard": 1, "pp": 1, "dp_replicate": 1, "sequence_parallel": False, **fixed}
    ranks = math.prod(int(degrees[axis]) for axis in ("tp", "dp_shard", "pp", "dp_replicate"))
    return plan(spec, cpu_cluster(ranks), workload_of(spec), fixed=degrees, time_limit_s=LIMIT_S)


def share_of_parameters(name: str, found: TrainingPlan) -> float:
    """What a rank of tp 2 holds of a model's parameters."""
    assert found.model.code is not None
    cut = {
        f"{path}.{parameter}"
        for placement in found.model.code.placements
        for path in placement.paths
        for parameter, form in placement.parameters
        if form.startswith("S")
    }
    model, _ = zoo.build(name)
    held, total, seen = 0.0, 0, set[int]()
    paths = [(path, p) for path, p in model.named_parameters(remove_duplicate=False)]
    for path, parameter in sorted(paths, key=lambda item: item[0] not in cut):
        if id(parameter) not in seen:
            seen.add(id(parameter))
            total += parameter.numel()
            held += parameter.numel() / (2 if path in cut else 1)
    return held / total


def errors(gradients: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> dict[str, float]:
    """How far each gradient is from one rank's, in parts of the largest gradient; infinite where it is missing."""
    largest = max(float(grad.abs().max()) for grad in reference.values())
    missing = dict.fromkeys(reference.keys() - gradients.keys(), math.inf)  # a tied head goes by the embedding's name
    common = reference.keys() & gradients.keys()
    return {**missing, **{key: float((gradients[key] - reference[key]).abs().max()) / largest for key in common}}


def differences(gradients: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> list[str]:
    """Gradients that are missing or differ by more than rounding of the largest one."""
    return [
        f"{key}: {error:.1e} of the largest gradient"
        for key, error in errors(gradients, reference).items()
        if not error <= 1e-5
    ]
