"""Placements for generation: against every whole placement of tiny instances, laws, and duals against finite differences."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.solvers.backend import Status
from meshwright.solvers.generation import (
    RESOURCES,
    Capacity,
    GenerationInstance,
    GenerationPlacement,
    Rates,
    busy_s,
    check,
    min_bytes,
    resident_bytes,
    solve,
    solve_relaxation,
)

GB = 1e9


def instance(
    seed: int = 0, *, device_gb: float = 6.0, host_gb: float = 20.0, storage_gb: float = 50.0
) -> GenerationInstance:
    """Two kinds of layers, a prefill and one part of decoding."""
    rng = np.random.default_rng(seed)
    weights = rng.uniform(0.5, 2.0, 2) * GB
    read = rng.uniform(2, 12) * GB
    return GenerationInstance(
        counts=np.array([1, 3]),
        weight_bytes=weights,
        moved_bytes=weights * [0.0, 1.0],
        may_store=np.array([False, True]),
        passes=np.array([1.0, 7.0]),
        compute_s=rng.uniform(0.02, 0.4, (2, 2)) * [1.0, 0.2],
        attend_s=np.array([0.0, read / (100 * GB)]),
        read_bytes=np.array([0.0, read]),
        new_bytes=np.array([0.8 * read, 0.02 * read]),
        hidden_bytes=np.array([0.4, 0.01]) * GB,
        ask_bytes=np.array([0.0, 0.05]) * GB,
        cache_bytes=1.1 * read,
        states_bytes=0.4 * GB,
        hidden_steps=3,
        num_batches=int(rng.integers(1, 4)),
        rates=Rates(
            to_device=12 * GB,
            to_host=10 * GB,
            duplex=0.5,
            storage=2 * GB,
            host_attention=float(rng.uniform(5, 40)) * GB,
        ),
        capacity=Capacity(
            device=device_gb * GB,
            host=host_gb * GB,
            storage=storage_gb * GB,
            working=0.5 * GB,
            buffer=1.0 * GB,
            slot=0.1 * GB,
            staging=0.5 * GB,
        ),
    )


def splits(total: int, parts: int) -> list[tuple[int, ...]]:
    """All ways to write ``total`` as a sum of ``parts`` numbers."""
    cuts = itertools.combinations(range(total + parts - 1), parts - 1)
    return [tuple(np.diff([-1, *cut, total + parts - 1]) - 1) for cut in cuts]


def every_placement(i: GenerationInstance, steps: int = 2):
    """Whole layers everywhere they may be, shares in steps."""
    kinds = [splits(int(n), 3) for n in i.counts]
    for layers in itertools.product(*kinds):
        for cache in splits(steps, 5):
            for hidden in splits(1, 3):
                yield GenerationPlacement(
                    layers=np.array(layers), cache=np.array(cache) / steps, hidden=np.array(hidden, dtype=float)
                )


@pytest.mark.parametrize("seed", range(3))
def test_no_whole_placement_is_faster_than_the_answer_less_its_gap(seed: int) -> None:
    i = instance(seed)
    found = solve(i)
    assert found.choice is not None
    assert check(i, found.choice) == pytest.approx(found.objective, rel=1e-9)
    assert found.gap <= 1e-3 + 1e-9
    allowed = []
    for place in every_placement(i):
        try:
            allowed.append(check(i, place))
        except ValueError:
            continue
    assert len(allowed) > 50
    assert min(allowed) >= found.bound * (1 - 1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_relaxation_is_what_another_solver_finds(seed: int) -> None:
    """The same program written down again from the definition: rows are differences of `busy_s` and `resident_bytes`."""
    optimize = pytest.importorskip("scipy.optimize")
    i = instance(seed)
    _, relaxed = solve_relaxation(i)
    assert relaxed is not None
    zero = GenerationPlacement(layers=np.zeros((2, 3)), cache=np.zeros(5), hidden=np.zeros(3))

    def unit(n: int) -> GenerationPlacement:
        flat = np.zeros(14)
        flat[n] = 1.0
        return GenerationPlacement(layers=flat[:6].reshape(2, 3), cache=flat[6:11], hidden=flat[11:])

    busy = np.stack([(busy_s(i, unit(n)) - busy_s(i, zero)).reshape(-1) for n in range(14)], axis=1)
    held = np.stack([resident_bytes(i, unit(n)) - resident_bytes(i, zero) for n in range(14)], axis=1) / GB
    seconds = np.tile(np.eye(2), (len(RESOURCES), 1))
    caps = (np.array([i.capacity.device, i.capacity.host, i.capacity.storage]) - resident_bytes(i, zero)) / GB
    equal = np.zeros((4, 16))
    equal[0, :3], equal[1, 3:6], equal[2, 6:11], equal[3, 11:14] = 1, 1, 1, 1
    answer = optimize.linprog(
        [*np.zeros(14), *i.passes],
        A_ub=np.vstack([np.hstack([busy, -seconds]), np.hstack([held, np.zeros((3, 2))])]),
        b_ub=[*-busy_s(i, zero).reshape(-1), *caps],
        A_eq=equal,
        b_eq=[*i.counts, 1, 1],
        bounds=[(0, 0 if n == 2 else None) for n in range(16)],
    )
    assert answer.status == 0
    assert relaxed.objective == pytest.approx(answer.fun, rel=1e-5)
    assert relaxed.objective <= answer.fun * (1 + 1e-7)


@given(
    seed=st.integers(0, 30),
    more=st.sampled_from(["device", "host", "storage"]),
    amount=st.floats(0, 8),
)
@settings(max_examples=25, deadline=None)
def test_more_memory_is_never_slower(seed: int, more: str, amount: float) -> None:
    i = instance(seed)
    _, before = solve_relaxation(i)
    _, after = solve_relaxation(i.with_capacity(**{more: getattr(i.capacity, more) + amount * GB}))
    assert before is not None and after is not None
    assert after.objective <= before.objective * (1 + 1e-6)


@given(
    seed=st.integers(0, 30),
    faster=st.sampled_from(["to_device", "to_host", "storage", "host_attention"]),
    ratio=st.floats(1, 4),
)
@settings(max_examples=25, deadline=None)
def test_a_faster_link_is_never_slower(seed: int, faster: str, ratio: float) -> None:
    i = instance(seed)
    _, before = solve_relaxation(i)
    _, after = solve_relaxation(replace(i, rates=replace(i.rates, **{faster: ratio * getattr(i.rates, faster)})))
    assert before is not None and after is not None
    assert after.objective <= before.objective * (1 + 1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_worth_is_the_slope_of_the_optimum(seed: int) -> None:
    i, step = instance(seed), 1e-4
    _, now = solve_relaxation(i)
    assert now is not None

    def saved(changed: GenerationInstance) -> float:
        _, then = solve_relaxation(changed)
        assert then is not None
        return now.objective - then.objective

    more = saved(i.with_capacity(device=i.capacity.device + step * GB))
    assert more == pytest.approx(now.marginal.device_s_per_byte * step * GB, rel=1e-2, abs=1e-9)
    for names, slope in (
        (("to_device", "to_host"), now.marginal.link_s2_per_byte),
        (("storage",), now.marginal.storage_s2_per_byte),
        (("host_attention",), now.marginal.host_attention_s2_per_byte),
    ):
        rates = replace(i.rates, **{name: getattr(i.rates, name) + step * GB for name in names})
        assert saved(replace(i, rates=rates)) == pytest.approx(slope * step * GB, rel=1e-2, abs=1e-8), names


def test_a_device_that_holds_everything_waits_for_compute_only() -> None:
    i = replace(instance(device_gb=60), attend_s=np.zeros(2))
    found = solve(i)
    assert found.choice is not None and found.status is Status.OPTIMAL
    assert found.choice.cache[0] == pytest.approx(1.0, abs=1e-6)
    assert found.choice.layers[:, 0].tolist() == i.counts.tolist()
    assert found.objective == pytest.approx(i.min_s, rel=1e-6)


def test_layers_that_may_not_leave_stay() -> None:
    found = solve(replace(instance(device_gb=60), streams=False))
    assert found.choice is not None
    assert found.choice.layers[:, 1:].sum() == 0


def test_nothing_fits_says_which_memory_lacks_how_much() -> None:
    i = instance(host_gb=1.0, storage_gb=0.0)
    i = replace(i, rates=replace(i.rates, storage=0.0))
    assert solve(i).status is Status.INFEASIBLE
    need = min_bytes(i, "host_bytes")
    assert need > i.capacity.host
    assert solve_relaxation(i.with_capacity(host=need * (1 + 1e-6)))[1] is not None
    assert solve_relaxation(i.with_capacity(host=need * (1 - 1e-3)))[1] is None


@pytest.mark.parametrize(
    ("changes", "label"),
    [
        ({"layers": np.array([[1, 0, 0], [2, 0, 0]])}, "C1"),
        ({"layers": np.array([[0, 0, 1], [3, 0, 0]])}, "C1"),
        ({"cache": np.array([0.5, 0.2, 0.0, 0.0, 0.0])}, "C1"),
        ({"cache": np.array([1.0, 0.0, 0.0, 0.0, 0.0]), "layers": np.array([[1, 0, 0], [3, 0, 0]])}, "C7"),
        ({"hidden": np.array([0.0, 0.0, 1.0]), "cache": np.array([0.0, 0.0, 0.0, 1.0, 0.0])}, None),
    ],
)
def test_check_names_what_a_placement_breaks(changes: dict[str, np.ndarray], label: str | None) -> None:
    i = instance(3)
    found = solve(i)
    assert found.choice is not None
    place = replace(found.choice, **changes)
    if label is None:
        assert check(i, place) >= found.bound
    else:
        with pytest.raises(ValueError, match=label):
            check(i, place)
