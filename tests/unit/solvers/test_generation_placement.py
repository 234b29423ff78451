"""Placements for generation: against every whole placement of tiny instances, laws, and duals against finite differences."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.solvers.backend import Status
from meshwright.solvers.generation.instance import (
    RESOURCES,
    WAYS,
    Capacity,
    GenerationInstance,
    GenerationPlacement,
    Rates,
    busy_s,
    check,
    resident_bytes,
)
from meshwright.solvers.generation.program import min_bytes, solve, solve_relaxation

GB = 1e9


def instance(
    seed: int = 0,
    *,
    device_gb: float = 6.0,
    host_gb: float = 20.0,
    storage_gb: float = 50.0,
    drives_gb_per_s: float = 0.0,
) -> GenerationInstance:
    """Two kinds of layers, a prefill and one part of decoding; drives that attend where they have a rate."""
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
            drive_attention=drives_gb_per_s * GB,
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


def without_host(i: GenerationInstance) -> GenerationInstance:
    """The same where the device computes in the host's own memory."""
    i = replace(i, has_host=False)
    return i.with_capacity(host=0.0, staging=0.0, device=i.capacity.device + 4 * GB)


MACHINES = {
    "plain": lambda seed: instance(seed),
    "drives attend": lambda seed: instance(seed, host_gb=6.0, drives_gb_per_s=8.0),
    "no host": lambda seed: without_host(instance(seed)),
    "no host, drives attend": lambda seed: without_host(instance(seed, drives_gb_per_s=8.0)),
}


def splits(total: int, parts: int) -> list[tuple[int, ...]]:
    """All ways to write ``total`` as a sum of ``parts`` numbers."""
    cuts = itertools.combinations(range(total + parts - 1), parts - 1)
    return [tuple(np.diff([-1, *cut, total + parts - 1]) - 1) for cut in cuts]


def every_placement(i: GenerationInstance, steps: int = 2):
    """Whole layers everywhere they may be, shares in steps."""
    kinds = [splits(int(n), 3) for n in i.counts]
    for layers in itertools.product(*kinds):
        for cache in splits(steps, len(WAYS)):
            for hidden in splits(1, 3):
                yield GenerationPlacement(
                    layers=np.array(layers), cache=np.array(cache) / steps, hidden=np.array(hidden, dtype=float)
                )


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("seed", range(3))
def test_no_whole_placement_is_faster_than_the_answer_less_its_gap(seed: int, machine: str) -> None:
    i = MACHINES[machine](seed)
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
    assert len(allowed) > (50 if i.has_host else 10)
    assert min(allowed) >= found.bound * (1 - 1e-6)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("seed", range(6))
def test_relaxation_is_what_another_solver_finds(seed: int, machine: str) -> None:
    """The same program written down again from the definition: rows are differences of `busy_s` and `resident_bytes`."""
    optimize = pytest.importorskip("scipy.optimize")
    i = MACHINES[machine](seed)
    _, relaxed = solve_relaxation(i)
    assert relaxed is not None
    zero = GenerationPlacement(layers=np.zeros((2, 3)), cache=np.zeros(6), hidden=np.zeros(3))

    def unit(n: int) -> GenerationPlacement:
        flat = np.zeros(15)
        flat[n] = 1.0
        return GenerationPlacement(layers=flat[:6].reshape(2, 3), cache=flat[6:12], hidden=flat[12:])

    allowed = [*i.allowed_layers.reshape(-1), *i.allowed_ways, True, i.has_host, True]
    busy = np.stack([(busy_s(i, unit(n)) - busy_s(i, zero)).reshape(-1) for n in range(15)], axis=1)
    busy = np.where(allowed, busy, 0.0)  # what cannot be takes forever
    held = np.stack([resident_bytes(i, unit(n)) - resident_bytes(i, zero) for n in range(15)], axis=1) / GB
    seconds = np.tile(np.eye(2), (len(RESOURCES), 1))
    caps = (np.array([i.capacity.device, i.capacity.host, i.capacity.storage]) - resident_bytes(i, zero)) / GB
    equal = np.zeros((4, 17))
    equal[0, :3], equal[1, 3:6], equal[2, 6:12], equal[3, 12:15] = 1, 1, 1, 1
    answer = optimize.linprog(
        [*np.zeros(15), *i.passes],
        A_ub=np.vstack([np.hstack([busy, -seconds]), np.hstack([held, np.zeros((3, 2))])]),
        b_ub=[*-busy_s(i, zero).reshape(-1), *caps],
        A_eq=equal,
        b_eq=[*i.counts, 1, 1],
        bounds=[*((0, None if may else 0) for may in allowed), (0, None), (0, None)],
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
    faster=st.sampled_from(["to_device", "to_host", "storage", "host_attention", "drive_attention"]),
    ratio=st.floats(1, 4),
    machine=st.sampled_from(list(MACHINES)),
)
@settings(max_examples=40, deadline=None)
def test_a_faster_link_is_never_slower(seed: int, faster: str, ratio: float, machine: str) -> None:
    i = MACHINES[machine](seed)
    _, before = solve_relaxation(i)
    _, after = solve_relaxation(replace(i, rates=replace(i.rates, **{faster: ratio * getattr(i.rates, faster)})))
    assert before is not None and after is not None
    assert after.objective <= before.objective * (1 + 1e-6)


@pytest.mark.parametrize("machine", ["plain", "drives attend"])
@pytest.mark.parametrize("seed", range(4))
def test_worth_is_the_slope_of_the_optimum(seed: int, machine: str) -> None:
    i, step = MACHINES[machine](seed), 1e-4
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
        *([(("drive_attention",), now.marginal.drive_attention_s2_per_byte)] if i.rates.drive_attention else []),
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


def test_pass_of_drives_that_attend_is_the_closed_form() -> None:
    """All keys and values in the drives, weights on the device: what each resource does, by hand."""
    i = replace(instance(1, device_gb=60.0, drives_gb_per_s=8.0), num_batches=1)
    layers = np.stack([i.counts, 0 * i.counts, 0 * i.counts], axis=1)
    place = GenerationPlacement(layers=layers, cache=np.eye(6)[5], hidden=np.array([1.0, 0.0, 0.0]))
    busy = dict(zip(RESOURCES, busy_s(i, place)[:, 1], strict=True))
    read, new, ask = float(i.read_bytes[1]), float(i.new_bytes[1]), float(i.ask_bytes[1])
    compute = float(i.layer_compute_s[1])
    assert busy["compute"] == pytest.approx(compute)
    assert busy["link to device"] == pytest.approx(ask / (12 * GB))
    assert busy["link to host"] == pytest.approx((new + ask) / (10 * GB))
    assert busy["storage"] == pytest.approx((new + 2 * ask) / (2 * GB))
    assert busy["host attention"] == 0
    assert busy["attention in the drives"] == pytest.approx(read / (8 * GB))
    exchanged = ask / (12 * GB) + ask / (10 * GB) + 2 * ask / (2 * GB)
    assert busy["one batch"] == pytest.approx(compute + read / (8 * GB) + exchanged)


@given(seed=st.integers(0, 60), rate=st.floats(0.5, 60), host_gb=st.floats(2, 20))
@settings(max_examples=25, deadline=None)
def test_drives_that_attend_are_never_slower_than_drives_that_only_store(
    seed: int, rate: float, host_gb: float
) -> None:
    _, stores = solve_relaxation(instance(seed, host_gb=host_gb))
    _, attends = solve_relaxation(instance(seed, host_gb=host_gb, drives_gb_per_s=rate))
    assert stores is not None and attends is not None
    assert attends.objective <= stores.objective * (1 + 1e-6)


def test_quick_drives_take_the_keys_and_values() -> None:
    slow, quick = (solve(instance(2, host_gb=6.0, drives_gb_per_s=rate)).choice for rate in (0.01, 50.0))
    assert slow is not None and quick is not None
    assert slow.cache[5] < 0.1 < 0.4 < quick.cache[5]


def test_nothing_lies_with_a_host_that_is_not_apart() -> None:
    i = without_host(instance(1)).with_capacity(device=6 * GB)
    found = solve(i)
    assert found.choice is not None
    assert found.choice.layers[:, 1].sum() == 0 and found.choice.hidden[1] == 0
    assert found.choice.cache[[1, 2, 3]].sum() == 0
    assert found.choice.layers[1, 2] > 0  # weights come from storage


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
        ({"cache": np.array([0.5, 0.2, 0.0, 0.0, 0.0, 0.0])}, "C1"),
        ({"cache": np.array([1.0, 0.0, 0.0, 0.0, 0.0, 0.0]), "layers": np.array([[1, 0, 0], [3, 0, 0]])}, "C7"),
        ({"cache": np.array([0.0, 0.0, 0.0, 0.0, 0.0, 1.0])}, "C1"),
        ({"hidden": np.array([0.0, 0.0, 1.0]), "cache": np.array([0.0, 0.0, 0.0, 1.0, 0.0, 0.0])}, None),
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
