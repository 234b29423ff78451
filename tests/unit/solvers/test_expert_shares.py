"""The share program against a linear program in HiGHS."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from meshwright.solvers.experts.instance import ExpertInstance, check, make_instance
from meshwright.solvers.experts.placement import place_experts, split_shares
from meshwright.solvers.experts.shares import split_loads
from scipy.optimize import linprog
from tiers import drawn


def linear_program(instance: ExpertInstance, placed: np.ndarray, layer: int) -> float:
    """Least level of one layer."""
    slots, gpus = np.arange(instance.num_slots), np.arange(instance.num_gpus)
    all_of_expert = np.zeros((instance.num_experts, len(slots) + 1))
    all_of_expert[placed[layer], slots] = 1
    under_level = np.zeros((len(gpus), len(slots) + 1))
    under_level[instance.gpu_of_slot, slots] = 1
    under_level[:, -1] = -instance.gpu_speed
    cost = np.append(np.zeros(len(slots)), 1.0)
    answer = linprog(
        cost,
        A_ub=under_level,
        b_ub=np.zeros(len(gpus)),
        A_eq=all_of_expert,
        b_eq=instance.weight[layer, :, 0],
        method="highs",
    )
    return float(answer.fun)


@drawn(
    few=8,
    many=30,
    seed=st.integers(0, 10**6),
    shape=st.sampled_from([(8, 4, 3), (16, 8, 4), (32, 8, 6), (64, 16, 5), (12, 12, 4)]),
    speeds=st.booleans(),
    zeros=st.booleans(),
)
def test_level_is_that_of_a_linear_program(seed: int, shape: tuple[int, int, int], speeds: bool, zeros: bool) -> None:
    num_experts, num_gpus, per_gpu = shape
    rng = np.random.default_rng(seed)
    load = rng.lognormal(0, 1, (2, num_experts))
    placed = place_experts(load, num_gpus=num_gpus, num_slots=num_gpus * per_gpu).physical_to_logical
    counts = load * rng.lognormal(0, 0.8, load.shape)
    counts[:, ::3] *= 0 if zeros else 1
    speed = rng.uniform(0.5, 2, num_gpus) if speeds else None
    instance = make_instance(counts, num_gpus=num_gpus, num_slots=num_gpus * per_gpu, gpu_speed=speed)
    answer = split_loads(instance, placed)
    for layer in range(2):
        assert answer.level[layer] == pytest.approx(linear_program(instance, placed, layer), rel=1e-7)  # HiGHS' own
    assert np.allclose(answer.level, answer.bound, rtol=1e-9)  # equal but for sums in another order: optimal
    assert np.allclose(check(instance, placed, answer.share), answer.level, rtol=1e-9)


def test_shares_of_a_batch_have_the_shape_of_the_slots() -> None:
    load = np.random.default_rng(0).lognormal(0, 1, (2, 16))
    placement = place_experts(load, num_gpus=4, num_slots=24)
    assert split_shares(placement, load).shape == (2, 24)
    assert split_shares(placement, np.stack([load, load])).shape == (2, 2, 24)
