"""Offload schedules against brute force, laws, a timeline by hand, and the definition."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.solvers.backend import Status
from meshwright.solvers.offload import bound, program, repair, schedule
from meshwright.solvers.offload.instance import AllowedMoves, Links
from meshwright.solvers.offload.simulation import broken_constraints, simulate
from offload_problems import ACTIVATIONS, FULL, KEEP, choice_of, instance


def test_no_choice_of_whole_layers_beats_the_bound_and_few_beat_the_answer() -> None:
    problem = instance(3, cap_share=0.7, may=AllowedMoves(host_optimizer=False, parameters=False))
    ends = (False, False), (True, True)
    blocks = itertools.product([False, True], repeat=3)
    streams = [np.array([first, *mask, last]) for mask, (first, last) in itertools.product(blocks, ends)]
    times = []
    for option in itertools.product(range(5), repeat=3):
        for mask in streams:
            choice = choice_of(problem, option, streamed_optimizer=mask)
            simulated = simulate(problem, choice)
            if not broken_constraints(problem, choice, simulated):
                times.append(simulated.step_s)
    found = schedule.solve(problem)
    assert found.simulated is not None and found.choice is not None
    assert found.bound <= min(times) * (1 + 1e-9)
    assert bound.lower_bound_s(problem) <= found.bound * (1 + 1e-9)
    # Rounding three blocks is a heuristic: within a twentieth of the best of all 2,000 choices.
    assert min(times) * (1 - 1e-9) <= found.simulated.step_s <= 1.05 * min(times)
    assert bound.lower_bound_s(problem) <= found.bound <= min(times) * (1 + 1e-9)


@pytest.mark.long
@settings(max_examples=12, deadline=None)
@given(
    blocks=st.integers(3, 7),
    seed=st.integers(0, 99),
    share=st.floats(0.45, 0.95),
    microbatches=st.sampled_from([1, 4]),
    lost=st.sampled_from([0.0, 0.3]),
)
def test_laws_of_bounds_and_answers(blocks: int, seed: int, share: float, microbatches: int, lost: float) -> None:
    links = Links(
        to_host_bytes_per_s=10e9,
        to_device_bytes_per_s=12e9,
        duplex=0.4,
        compute_lost_to_host=lost,
        compute_lost_to_device=lost / 2,
    )
    problem = instance(
        blocks,
        cap_share=share,
        seed=seed,
        copies=0.5 * (seed % 2),
        num_microbatches=microbatches,
        gradients_accumulate=microbatches > 1,
        links=links,
    )
    status, fluid = program.solve_fluid(problem)
    counted = bound.lower_bound_s(problem)
    if fluid is None:
        assert status is Status.INFEASIBLE
        return
    assert counted <= fluid.objective_s * (1 + 1e-6)
    # More memory, a faster link: never a higher bound.
    for better in (
        replace(problem, cap_bytes=1.1 * problem.cap_bytes),
        replace(problem, links=replace(links, to_host_bytes_per_s=13e9)),
        replace(problem, links=replace(links, duplex=0.8)),
    ):
        eased = program.solve_fluid(better)[1]
        assert eased is not None and eased.objective_s <= fluid.objective_s * (1 + 1e-6)
    found = schedule.solve(problem)
    if found.choice is not None and found.simulated is not None:
        again = simulate(problem, found.choice, prefetch=found.prefetch)
        assert again == found.simulated and not broken_constraints(problem, found.choice, again)
        # The bounds are below the linear program of the choice, and that below its simulation.
        assert fluid.objective_s <= found.bound * (1 + 1e-6) <= found.objective * (1 + 2e-6)
        assert found.objective <= again.step_s * (1 + 1e-6)
        for choice in schedule.uniform_policies(problem, (1.0, 0.5)):
            uniform = simulate(problem, choice, prefetch=2)
            assert broken_constraints(problem, choice, uniform) or again.step_s <= uniform.step_s * (1 + 1e-9)


def test_worth_is_what_a_little_more_saves() -> None:
    problem = instance(5, cap_share=0.5, seed=3)
    fluid = program.solve_fluid(problem)[1]
    assert fluid is not None and fluid.marginal.device_s_per_byte > 0
    more, step = 1e6, 1e5
    roomier = program.solve_fluid(replace(problem, cap_bytes=problem.cap_bytes + more))[1]
    links = replace(problem.links, to_host_bytes_per_s=10e9 + step, to_device_bytes_per_s=10e9 + step)
    faster = program.solve_fluid(replace(problem, links=links))[1]
    assert roomier is not None and faster is not None
    # Differences of two optima over steps this small carry the solver's own tolerance.
    assert (fluid.objective_s - roomier.objective_s) / more == pytest.approx(fluid.marginal.device_s_per_byte, rel=0.02)
    both = fluid.marginal.to_host_s2_per_byte + fluid.marginal.to_device_s2_per_byte
    assert (fluid.objective_s - faster.objective_s) / step == pytest.approx(both, rel=0.02)


def test_a_timeline_by_hand() -> None:
    problem = instance(2, cap_share=1.0, gradients_accumulate=True)
    # One block of two leaves (1 s) while the next runs forward, and comes back while that one runs backward: hidden.
    hidden = simulate(problem, choice_of(problem, (ACTIVATIONS, KEEP)))
    passes = float(problem.forward_s.sum() + problem.backward_s.sum())
    assert hidden.microbatch_s == pytest.approx(passes)
    # The last block leaves and comes back, 1 s each, while the head runs for 0.6 s.
    exposed = simulate(problem, choice_of(problem, (KEEP, ACTIVATIONS)))
    assert exposed.microbatch_s == pytest.approx(passes + 2.0 - 0.6)
    assert exposed.to_host_bytes == exposed.to_device_bytes == 10e9
    full = simulate(problem, choice_of(problem, (FULL, FULL)))
    assert full.microbatch_s == pytest.approx(passes + 1.6)
    kept = simulate(problem, choice_of(problem, (KEEP, KEEP)))
    assert kept.microbatch_bytes - full.microbatch_bytes == pytest.approx(15e9)  # 2 x (10 - 1) GB less 3 GB in use


def test_updates_on_host_device_and_storage() -> None:
    links = Links(to_host_bytes_per_s=10e9, to_device_bytes_per_s=10e9, read_bytes_per_s=4e9, write_bytes_per_s=2e9)
    problem = instance(2, cap_share=1.0, links=links, storage_cap_bytes=1e12)
    none = np.zeros(4, dtype=bool)
    block = np.array([False, True, False, False])
    on_device = simulate(problem, choice_of(problem, (KEEP, KEEP)))
    assert on_device.update_s == pytest.approx(problem.device_update_s.sum())
    host = simulate(problem, choice_of(problem, (KEEP, KEEP), host_optimizer=block))
    assert host.update_s == pytest.approx(0.4 + 0.5 + 0.4)  # gradient down, update, parameters up
    assert host.host_bytes == pytest.approx(16e9)
    streamed = simulate(problem, choice_of(problem, (KEEP, KEEP), streamed_optimizer=block))
    assert streamed.to_host_bytes == streamed.to_device_bytes == 8e9
    stored = simulate(problem, choice_of(problem, (KEEP, KEEP), host_optimizer=block, storage=block))
    assert stored.update_s == pytest.approx(2.0 + 0.5 + 4.0)  # read, update, write
    assert (stored.storage_bytes, stored.host_bytes) == (8e9, pytest.approx(8e9))
    assert broken_constraints(problem, choice_of(problem, (KEEP, KEEP), storage=~none), stored) != []


def test_what_does_not_fit_is_infeasible_and_says_what_the_host_needs() -> None:
    problem = instance(4, cap_share=0.4)
    needed = bound.min_host_bytes(problem)
    assert np.isfinite(needed)
    short = replace(problem, host_cap_bytes=0.9 * needed)
    assert bound.lower_bound_s(short) == np.inf
    assert schedule.solve(short).status is Status.INFEASIBLE
    assert bound.lower_bound_s(replace(problem, host_cap_bytes=1.1 * needed)) < np.inf
    assert schedule.solve(replace(problem, cap_bytes=1e9)).choice is None


def test_whole_layers_need_all_of_what_one_has_in_use() -> None:
    nowhere = AllowedMoves(host_optimizer=False, streamed_optimizer=False, parameters=False)
    problem = instance(3, may=nowhere)
    only = problem.allowed & np.isin(np.arange(5), (KEEP, FULL))[:, None]
    everything = problem.resident_bytes + 30e9 + problem.fixed_bytes + problem.turn_bytes + 1e9
    problem = replace(problem, allowed=only, cap_bytes=everything - 8e9)
    # A block saves 9 GB and the first one needs 3 GB more in use: two blocks. Fractions: a third of each, with 1 GB more in use.
    compute_s = problem.compute_s + problem.device_update_s.sum()
    whole = bound.count_programs(problem)[0].solve()[1]
    assert whole is not None and whole.bound_s == pytest.approx(compute_s + 2 * 0.8)
    assert bound.lower_bound_s(problem) == pytest.approx(compute_s + 0.8)
    found = schedule.solve(problem)
    assert found.simulated is not None and found.simulated.step_s == pytest.approx(found.bound)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 99), blocks=st.integers(2, 5))
def test_sums_over_layers_are_what_the_simulation_moves_and_holds(seed: int, blocks: int) -> None:
    links = Links(to_host_bytes_per_s=10e9, to_device_bytes_per_s=12e9, read_bytes_per_s=4e9, write_bytes_per_s=2e9)
    problem = instance(blocks, seed=seed, cap_share=0.8, storage_cap_bytes=1e12, links=links)
    rng = np.random.default_rng(seed)
    option = rng.integers(0, 5, problem.num_layers)
    option[[0, -1]] = KEEP
    place = rng.integers(0, 6, problem.num_layers)
    choice = repair.choice_from_locations(option, place)
    assert np.array_equal(repair.locations_of(choice), place)
    sums = repair.ResourceSums(problem)
    simulated, total = simulate(problem, choice), sums.total(choice)
    assert total[repair.HOST] == pytest.approx(simulated.host_bytes)
    assert total[repair.STORED] == pytest.approx(simulated.storage_bytes)
    down = total[repair.DOWN] + total[repair.UPDATE_DOWN]
    up = total[repair.UP] + total[repair.UPDATE_UP]
    assert (down, up) == (pytest.approx(simulated.to_host_bytes), pytest.approx(simulated.to_device_bytes))
    # A change is worth what the sums of the changed choice say.
    changes = sums.changes(choice, np.arange(problem.num_layers))
    for row in range(0, len(changes.layer), 5):
        other = changes.apply(choice, row)
        assert sums.seconds(sums.total(other)) - sums.seconds(total) == pytest.approx(changes.seconds[row], abs=1e-9)
        update = simulate(problem, other).update_bytes - simulated.update_bytes
        assert changes.sums[row, repair.DEVICE_IN_UPDATE] == pytest.approx(update, abs=1.0)


def test_parameters_on_their_way_and_their_gradients_are_on_the_device() -> None:
    problem = instance(2, cap_share=1.0, gradients_accumulate=True)
    block = np.array([False, True, False, False])
    kept = simulate(problem, choice_of(problem, (KEEP, KEEP)))
    away = simulate(problem, choice_of(problem, (KEEP, KEEP), parameters=block))
    # 8 GB of states, 4 of parameters and 4 of gradients leave; at the turn the parameters are on their way back.
    assert kept.forward_bytes - away.forward_bytes == pytest.approx(12e9)
    # In the backward pass of the block its gradients are there while everything is still kept before it.
    assert away.backward_bytes <= kept.backward_bytes
    assert away.backward_bytes >= kept.backward_bytes - 16e9


@pytest.mark.parametrize("accumulates", [False, True])
def test_copies_leave_as_gradients_come_in_the_last_backward_pass(accumulates: bool) -> None:
    """Of one micro-batch; of several the peak is in one before, where copies stay beside all gradients."""
    problem = instance(2, cap_share=2.0, copies=0.5, gradients_accumulate=accumulates, num_microbatches=1 + accumulates)
    found = simulate(problem, choice_of(problem, (KEEP, KEEP)))
    # 4 GB of gradients a block and 2 GB at the ends, half as much of copies; blocks keep 10 GB and have 1 GB in use.
    kept, gradients = np.array([0.0, 10e9, 20e9, 20e9]), np.array([12e9, 10e9, 6e9, 2e9])
    freed = np.array([5e9, 3e9, 1e9, 0.0])
    slots = kept if accumulates else kept + gradients - freed
    always = problem.resident_bytes + problem.fixed_bytes + 1e9
    assert found.backward_bytes == pytest.approx(always + max(slots.max(), slots[-1] + problem.turn_bytes))
