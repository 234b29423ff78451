"""Stages with options against brute force over every cut and every choice."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.solvers.backend import Status
from meshwright.solvers.stages.stage_program import StageFilling, StageProgramInstance, check, lower_bound_s, solve

USES = np.array([[True, False, False], [True, True, False], [True, True, True]])


def random_instance(
    seed: int, *, num_layers: int, num_stages: int, num_kinds: int, devices: int = 1
) -> StageProgramInstance:
    """Layers of random kinds, the first without a choice; options that keep less take longer; stages with random room."""
    rng = np.random.default_rng(seed)
    kind_of_layer = np.concatenate([[-1], np.sort(rng.integers(0, num_kinds, num_layers - 1))])
    seconds = np.sort(rng.uniform(1.0, 2.0, (num_kinds, 3)), axis=1)
    kept = -np.sort(-rng.integers(1, 30, (num_kinds, 3)), axis=1) * 1e6
    speed = rng.uniform(0.7, 1.4, devices)[rng.integers(0, devices, num_stages)]
    once = np.sort(rng.uniform(0.0, 1.5, (2, num_kinds, 3)), axis=2)[:, :, ::-1]
    spans = [
        (s, i, j)
        for s in range(num_stages)
        for i in range(num_layers)
        for j in range(i + 1, num_layers + 1)
        if rng.random() < 0.9
    ]
    stage, first, last = np.array(spans, dtype=np.int64).T
    counts = np.array([[np.sum(kind_of_layer[i:j] == k) for k in range(num_kinds)] for _, i, j in spans])
    room = rng.uniform(0.3, 1.2, num_stages)[stage] * 20e6 * num_layers / num_stages
    return StageProgramInstance(
        num_layers=num_layers,
        num_stages=num_stages,
        stage=stage,
        first=first,
        last=last,
        fixed_s=rng.uniform(0.0, 0.5, len(spans)),
        fixed_once_s=rng.uniform(0.0, 0.5, (2, len(spans))),
        counts=counts,
        seconds=speed[:, None, None] * seconds,
        once_s=speed[:, None, None] * once[:, None],
        retained_bytes=kept,
        room_bytes=room[:, None] - np.array([0.0, 1e6, 7e6]),
        uses=USES,
        slowest_weight=float(rng.choice([0.5, 3.0, 12.0])),
        sum_weight=float(rng.choice([0.25, 1.0])),
    )


def every_answer(instance: StageProgramInstance) -> list[tuple[float, float]]:
    """(O) and the slowest stage of every cut with every choice that is allowed."""
    answers = []
    num_kinds, num_options = instance.retained_bytes.shape
    at = {key: p for p, key in enumerate(zip(instance.stage, instance.first, instance.last, strict=True))}
    for cuts in itertools.combinations(range(1, instance.num_layers), instance.num_stages - 1):
        boundaries = (0, *cuts, instance.num_layers)
        spans = [at.get((s, i, j)) for s, (i, j) in enumerate(itertools.pairwise(boundaries))]
        if None in spans:
            continue
        of_stage = []
        for p in spans:
            layers = [k for k in range(num_kinds) for _ in range(instance.counts[p, k])]
            choices = set()
            for options in itertools.product(range(num_options), repeat=len(layers)):
                picks = np.zeros((num_kinds, num_options), dtype=np.int64)
                np.add.at(picks, (layers, list(options)), 1)
                choices.add(tuple(picks.ravel()))
            of_stage.append([np.array(picks).reshape(num_kinds, num_options) for picks in sorted(choices)])
        for picks in itertools.product(*of_stage):
            try:
                objective = check(instance, StageFilling(boundaries, np.array(picks)))
            except ValueError:
                continue
            seconds = [instance.fixed_s[p] + (instance.seconds[s] * picks[s]).sum() for s, p in enumerate(spans)]
            answers.append((objective, float(max(seconds))))
    return answers


def assert_equals_brute_force(instance: StageProgramInstance) -> None:
    answers, solution = every_answer(instance), solve(instance)
    if not answers:
        assert solution.status is Status.INFEASIBLE
        return
    best = min(answers)[0]
    without = {"fixed_once_s": 0 * instance.fixed_once_s, "once_s": 0 * instance.once_s}
    seconds = replace(instance, slowest_weight=1.0, sum_weight=0.0, **without)
    assert check(seconds, solution.choice) == pytest.approx(min(slowest for _, slowest in answers))
    assert lower_bound_s(instance) <= best * (1 + 1e-9)
    assert solution.objective >= best * (1 - 1e-9)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), num_layers=st.integers(2, 5), num_stages=st.integers(1, 3))
def test_one_kind_equals_brute_force(seed: int, num_layers: int, num_stages: int) -> None:
    assert_equals_brute_force(random_instance(seed, num_layers=num_layers, num_stages=num_stages, num_kinds=1))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), num_layers=st.integers(3, 5), num_stages=st.integers(2, 3))
def test_kinds_and_devices_that_differ_equal_brute_force(seed: int, num_layers: int, num_stages: int) -> None:
    instance = random_instance(seed, num_layers=num_layers, num_stages=num_stages, num_kinds=2, devices=2)
    assert_equals_brute_force(instance)
