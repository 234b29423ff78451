"""Counts and routes of engine instances: against brute force, the definition, and the mixes that others found."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from meshwright.solvers.deployment import Counts, DeploymentInstance, check, relaxed_bound, solve

CASES = Path(__file__).parents[3] / "../shared/data/serving/gpu_mix_cases.json"


def random_instance(seed: int, *, disaggregated: bool) -> DeploymentInstance:
    rng = np.random.default_rng(seed)
    roles = ("agg", "agg", "prefill", "decode") if disaggregated else ("agg", "agg", "agg")
    seconds = rng.uniform(0.05, 1.5, (3, len(roles)))
    seconds[0, 1] = np.inf
    return DeploymentInstance(
        rates=rng.uniform(0.2, 2, 3), seconds=seconds, cost=rng.uniform(1, 8, len(roles)),
        size=rng.integers(1, 5, len(roles)), device_type=np.arange(len(roles)) % 2, stock=np.array([12.0, 12.0]), roles=roles,
        sent_s=rng.uniform(0, 0.3, (3, len(roles))) if disaggregated else None, max_count=np.full(len(roles), 5.0),
    )  # fmt: skip


def routable(instance: DeploymentInstance, counts: tuple[int, ...]) -> bool:
    """Whether shares exist for these counts, by another linear program (scipy)."""
    from scipy.optimize import linprog

    classes, kinds = instance.seconds.shape
    served = np.isfinite(instance.seconds)
    busy = np.where(served, instance.seconds, 0) * instance.rates[:, None]
    upper, upper_rows, equal, equal_rows = [], [], [], []
    for e in range(kinds):
        row = np.zeros((classes, kinds))
        row[:, e] = busy[:, e]
        upper_rows.append(row.ravel())
        upper.append(counts[e])
        if instance.sent_s is not None and instance.roles[e] != "agg":
            row = np.zeros((classes, kinds))
            row[:, e] = instance.sent_s[:, e] * instance.rates
            upper_rows.append(row.ravel())
            upper.append(counts[e])
    for w in range(classes):
        row, flow = np.zeros((classes, kinds)), np.zeros((classes, kinds))
        row[w, instance.of("agg", "prefill")] = 1
        flow[w, instance.of("prefill")], flow[w, instance.of("decode")] = 1, -1
        equal_rows += [row.ravel(), flow.ravel()]
        equal += [1, 0]
    bounds = [(0, 1 if allowed else 0) for allowed in served.ravel()]
    found = linprog(np.zeros(classes * kinds), upper_rows, upper, equal_rows, equal, bounds)
    return bool(found.status == 0)


@pytest.mark.parametrize("disaggregated", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_no_counts_are_cheaper(seed: int, disaggregated: bool) -> None:
    instance = random_instance(seed, disaggregated=disaggregated)
    answer, best = solve(instance), math.inf
    for counts in itertools.product(range(5), repeat=len(instance.roles)):
        cost = float(instance.cost @ np.array(counts))
        used = [instance.size @ np.where(instance.device_type == t, counts, 0) for t in range(2)]
        if cost < best and np.all(np.array(used) <= instance.stock) and routable(instance, counts):
            best = cost
    assert answer.objective == pytest.approx(best, rel=1e-6)
    assert answer.bound <= best * (1 + 1e-6)
    if answer.choice is not None:
        assert check(instance, answer.choice) == pytest.approx(answer.objective)
        assert relaxed_bound(instance) <= answer.objective


@pytest.mark.parametrize("label", ["E1", "E2", "E3", "E4", "E5"])
def test_the_definition_names_what_is_broken(label: str) -> None:
    instance = DeploymentInstance(
        rates=np.array([1.0]), seconds=np.array([[0.5, 0.5, 0.5]]), cost=np.ones(3), size=np.array([2, 1, 1]),
        device_type=np.zeros(3, dtype=np.int64), stock=np.array([8.0]), roles=("agg", "prefill", "decode"),
        max_count=np.full(3, 5.0),
    )  # fmt: skip
    good = Counts(np.array([1, 1, 1]), np.array([[0.5, 0.5, 0.5]]))
    assert check(instance, good) == 3
    wrong = {
        "E1": Counts(good.instances, np.array([[0.2, 0.5, 0.5]])),
        "E2": Counts(np.array([0, 1, 1]), good.shares),
        "E3": Counts(np.array([4, 1, 1]), good.shares),
        "E4": Counts(good.instances, np.array([[0.5, 0.5, 0.2]])),
        "E5": Counts(np.array([1, 6, 0]), np.array([[1.0, 0.0, 0.0]])),
    }
    if label == "E5":
        instance = DeploymentInstance(**{**instance.__dict__, "stock": np.array([100.0])})
    with pytest.raises(ValueError, match=rf"\({label}\)"):
        check(instance, wrong[label])


@pytest.mark.skipif(not CASES.exists(), reason="needs ../shared/data/serving")
def test_mixes_cost_no_more_than_the_best_found() -> None:
    for case in json.loads(CASES.read_text())["cases"]:
        names = list(case["instances_of_work"])
        work = np.array([case["instances_of_work"][name] for name in names]).T
        options = json.loads(CASES.read_text())["options"][case["model"]]
        instance = DeploymentInstance(
            rates=np.ones(len(work)), seconds=np.where(work > 0, work, 1e-12),
            cost=np.array([options[name]["usd_per_hour"] for name in names]), size=np.ones(len(names), dtype=np.int64),
            device_type=np.arange(len(names)), stock=np.full(len(names), np.inf), roles=("agg",) * len(names),
        )  # fmt: skip
        answer = solve(instance, time_limit_s=5)
        assert answer.objective <= case["best_found"]["usd_per_hour"] * (1 + 1e-6)
        assert answer.gap <= 0.01
        assert relaxed_bound(instance) == pytest.approx(case["fractional_bound_usd_per_hour"], rel=0.01)
        assert answer.objective <= min(case["one_type_usd_per_hour"].values()) * (1 + 1e-3)
