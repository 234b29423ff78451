"""Numbers of replicas that vary while packing: against brute force, EPLB and the greedy numbers, and the bound with partners."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import strategies as st
from meshwright.solvers.experts.balance import eplb_placement
from meshwright.solvers.experts.bounds import lower_bound
from meshwright.solvers.experts.instance import (
    BestSlots,
    ExpertInstance,
    check,
    make_instance,
    uniform_objective,
    uniform_shares,
)
from meshwright.solvers.experts.packing import Effort, exchange_slots, greedy_counts, largest_first, slots_from_grid
from meshwright.solvers.experts.placement import place_experts
from meshwright.solvers.experts.replicas import vary_replicas
from tiers import drawn


def skewed(seed: int, num_layers: int, num_experts: int, sigma: float = 2.0) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(0, sigma, (num_layers, num_experts))


def greedily_packed(instance: ExpertInstance) -> np.ndarray:
    counts = greedy_counts(instance.weight.max(axis=2), instance.num_slots, instance.num_gpus)
    return exchange_slots(instance, slots_from_grid(largest_first(instance, counts)), Effort())


def best_by_enumeration(instance: ExpertInstance) -> float:
    """Least (O) of one layer over every content of every GPU."""
    contents = list(itertools.combinations(range(instance.num_experts), int(instance.slots_per_gpu[0])))
    slots = [
        list(itertools.chain.from_iterable(gpus))
        for gpus in itertools.combinations_with_replacement(contents, instance.num_gpus)
        if len(set(itertools.chain.from_iterable(gpus))) == instance.num_experts
    ]
    layers = ExpertInstance(instance.load.repeat(len(slots), axis=1), instance.slots_per_gpu, instance.gpu_speed)
    return float(uniform_objective(layers, np.array(slots)).min())


@pytest.mark.parametrize(("num_experts", "num_gpus"), [(64, 32), (128, 64)])
def test_three_slots_and_strong_skew_are_balanced(num_experts: int, num_gpus: int) -> None:
    """Greedy numbers of replicas leave the fullest GPU 2 to 45 % above the mean, EPLB 5 to 60 %."""
    load = skewed(3, 4, num_experts)
    placement = place_experts(load, num_gpus=num_gpus, num_slots=3 * num_gpus)
    instance = make_instance(load, num_gpus=num_gpus, num_slots=3 * num_gpus)
    assert placement.balance.max() <= 1.05 < uniform_objective(instance, greedily_packed(instance)).max()
    theirs = eplb_placement(load, num_slots=3 * num_gpus, num_gpus=num_gpus)
    assert np.all(placement.balance < uniform_objective(instance, theirs))


SHAPES = [(4, 3, 2), (5, 3, 2), (6, 4, 2), (5, 4, 2), (5, 3, 3), (6, 3, 3), (6, 2, 4)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("num_experts", "num_gpus", "per_gpu"), SHAPES)
def test_small_cases_are_near_the_best_and_bounded(seed: int, num_experts: int, num_gpus: int, per_gpu: int) -> None:
    load = skewed(seed, 1, num_experts, sigma=1.3)
    instance = make_instance(load, num_gpus=num_gpus, num_slots=num_gpus * per_gpu)
    best = best_by_enumeration(instance)
    placement = place_experts(load, num_gpus=num_gpus, num_slots=num_gpus * per_gpu)
    # A walk is no proof: of 72 such cases four were up to 1.6 % above the best.
    assert best * (1 - 1e-9) <= placement.balance[0] <= best * 1.02
    assert lower_bound(instance, weighted=False)[0] <= best * (1 + 1e-9)


def test_bound_counts_the_slots_that_make_partners_small() -> None:
    """Loads 6, 1, 1 on two GPUs of two slots: the extra slot halves the 6, beside a 1. Bound and answer are 4 of a mean of 4."""
    balanced = make_instance(np.array([[6.0, 1.0, 1.0]]), num_gpus=2, num_slots=4)
    assert lower_bound(balanced, weighted=False)[0] == pytest.approx(1.0)
    # 9, 3, 3: the 9 halved beside a 3 is 7.5, the mean; 9, 6, 3: 4.5 + 6 over a mean of 9, of which 4.5 + 3 is certain.
    uneven = make_instance(np.array([[9.0, 6.0, 3.0, 3.0]]), num_gpus=2, num_slots=4)
    assert lower_bound(uneven, weighted=False)[0] == pytest.approx((9 + 3) / 10.5)  # no slot to spare: 9 beside a 3


@drawn(
    few=8,
    many=20,
    seed=st.integers(0, 10**6),
    slots=st.lists(st.integers(1, 4), min_size=2, max_size=8),
    spare=st.integers(0, 8),
    workloads=st.integers(1, 3),
    speeds=st.booleans(),
)
def test_any_slots_speeds_and_workloads_keep_the_constraints_and_get_no_worse(
    seed: int, slots: list[int], spare: int, workloads: int, speeds: bool
) -> None:
    rng = np.random.default_rng(seed)
    num_experts = max(max(slots), sum(slots) - spare)
    load = rng.lognormal(0, 1.6, (workloads, 2, num_experts))
    instance = make_instance(
        load,
        num_gpus=len(slots),
        num_slots=sum(slots),
        slots_per_gpu=slots,
        gpu_speed=rng.uniform(0.5, 2, len(slots)) if speeds else None,
    )
    start = greedily_packed(instance)
    best = BestSlots(instance, start.copy())
    vary_replicas(best, np.ones(2), np.arange(2), rng)
    assert np.all(best.objective <= uniform_objective(instance, start))
    recomputed = check(instance, best.placed, uniform_shares(best.placed, num_experts))
    assert np.allclose(recomputed, best.objective, rtol=1e-9)  # sums in another order
