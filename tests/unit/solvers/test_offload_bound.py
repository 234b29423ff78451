"""What no offload schedule is below: links that both directions share, copies in waits, bytes in use; and updates in pieces."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.solvers.offload import bound, program, repair, schedule
from meshwright.solvers.offload.instance import AllowedMoves, Links
from meshwright.solvers.offload.simulation import (
    TO_DEVICE,
    TO_HOST,
    Job,
    broken_constraints,
    run_jobs,
    simulate,
    simulate_within,
)
from offload_problems import FULL, KEEP, choice_of, instance


@given(
    down=st.lists(st.floats(0.01, 5.0), min_size=1, max_size=4),
    up=st.lists(st.floats(0.01, 5.0), min_size=1, max_size=4),
    duplex=st.floats(0.0, 1.0),
)
@settings(deadline=None)
def test_copies_both_ways_take_as_long_as_the_links_say(down: list[float], up: list[float], duplex: float) -> None:
    links = Links(to_host_bytes_per_s=1.0, to_device_bytes_per_s=1.0, duplex=duplex)
    jobs = [Job(TO_HOST, seconds) for seconds in down] + [Job(TO_DEVICE, seconds) for seconds in up]
    _, end = run_jobs(jobs, replace(instance(1), links=links))
    assert end.max() == pytest.approx(float(links.seconds(sum(down), sum(up))))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), blocks=st.integers(2, 6), slow=st.floats(0.2, 2.0), prefetch=st.integers(1, 3))
def test_no_simulation_is_faster_than_the_program_of_its_choice(
    seed: int, blocks: int, slow: float, prefetch: int
) -> None:
    links = Links(to_host_bytes_per_s=slow * 10e9, to_device_bytes_per_s=slow * 8e9, duplex=0.4)
    problem = instance(blocks, seed=seed, cap_share=2.0, links=links, pieces=3)
    rng = np.random.default_rng(seed)
    option = rng.integers(0, 5, problem.num_layers)
    option[[0, -1]] = KEEP
    choice = repair.choice_from_locations(option, rng.integers(0, 4, problem.num_layers))
    planned = program.solve_fluid(problem, choice)[1]
    assert planned is not None
    # The solver's own tolerance.
    assert planned.objective_s <= simulate(problem, choice, prefetch=prefetch).step_s * (1 + 1e-6)


def test_a_layer_leaves_while_the_next_one_waits_for_its_parameters() -> None:
    links = Links(to_host_bytes_per_s=10e9, to_device_bytes_per_s=1e9)
    problem = instance(2, cap_share=2.0, links=links)
    choice = choice_of(problem, (3, KEEP), parameters=np.array([False, False, True, False]))
    planned = program.solve_fluid(problem, choice)[1]
    simulated = simulate(problem, choice)
    assert planned is not None and planned.objective_s <= simulated.step_s * (1 + 1e-6)


def test_the_raised_bound_is_below_every_choice_and_above_the_fluid_one() -> None:
    nowhere = AllowedMoves(host_optimizer=False, streamed_optimizer=False, parameters=False)
    problem = instance(4, seed=5, may=nowhere)
    only = problem.allowed & np.isin(np.arange(5), (KEEP, FULL))[:, None]
    everything = problem.retained_bytes[KEEP].sum() + problem.resident_bytes + problem.fixed_bytes + problem.turn_bytes
    problem = replace(problem, allowed=only, cap_bytes=float(everything) - 8e9)
    times = []
    for option in itertools.product((KEEP, FULL), repeat=4):
        choice = choice_of(problem, option)
        simulated = simulate(problem, choice)
        if not broken_constraints(problem, choice, simulated):
            times.append(simulated.step_s)
    fluid = program.solve_fluid(problem)[1]
    assert fluid is not None
    for known_s in times:
        raised = bound.raise_bound_s(problem, fluid, known_s)
        assert fluid.bound_s <= raised <= min(times) * (1 + 1e-6)
    # Every faster choice recomputes a block, which needs 4 GB times its size at once; parts of all of them need less.
    assert bound.raise_bound_s(problem, fluid, min(times)) > fluid.bound_s * 1.001
    found = schedule.solve(problem)
    assert found.simulated is not None and found.bound <= min(times) * (1 + 1e-6)


def test_states_that_stream_in_pieces_wait_for_less() -> None:
    problem = instance(3, cap_share=2.0)
    streamed = choice_of(problem, (KEEP,) * 3, streamed_optimizer=np.array([False, True, True, True, False]))
    whole = simulate(problem, streamed).update_s
    in_pieces = simulate(replace(problem, pieces=4), streamed).update_s
    planned = program.solve_fluid(problem, streamed)[1]
    assert planned is not None
    # By hand: 8 GB a layer each way at 10 GB/s, both at once at 7.5 GB/s; the first comes alone and the last goes alone.
    least = float(problem.links.seconds(2.4, 2.4))
    assert least < in_pieces < whole
    assert in_pieces - least <= (whole - least) / 2


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    blocks=st.integers(2, 6),
    prefetch=st.integers(1, 3),
    share=st.floats(0.7, 0.999) | st.floats(1.001, 1.3),
)
def test_a_simulation_is_given_up_only_where_it_takes_longer(
    seed: int, blocks: int, prefetch: int, share: float
) -> None:
    links = Links(to_host_bytes_per_s=6e9, to_device_bytes_per_s=8e9, duplex=0.4, compute_lost_to_device=0.3)
    problem = instance(blocks, seed=seed, cap_share=2.0, links=links, pieces=3, num_microbatches=2)
    rng = np.random.default_rng(seed)
    option = rng.integers(0, 5, problem.num_layers)
    option[[0, -1]] = KEEP
    choice = repair.choice_from_locations(option, rng.integers(0, 4, problem.num_layers))
    simulated = simulate(problem, choice, prefetch=prefetch)
    within = simulate_within(problem, choice, share * simulated.step_s, {}, prefetch=prefetch)
    assert within == (simulated if share > 1 else None)
    sums = repair.ResourceSums(problem)
    assert sums.simulate_within(choice, 0.99 * simulated.step_s, prefetch=prefetch) is None
    assert sums.simulate(choice, prefetch=prefetch) == simulated
    assert sums.simulate_within(choice, 0.99 * simulated.step_s, prefetch=prefetch) is None


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), cap=st.floats(0.3, 1.5), host=st.floats(0.05, 2.0))
def test_no_uniform_policy_that_fits_is_left_out(seed: int, cap: float, host: float) -> None:
    problem = instance(4, seed=seed, cap_share=cap)
    problem = replace(problem, host_cap_bytes=host * problem.total_state_bytes)
    for choice in schedule.uniform_policies(problem, (1.0, 0.5)):
        simulated, least_s = simulate(problem, choice), repair.ResourceSums(problem).lower_bound_s(choice)
        if not broken_constraints(problem, choice, simulated):
            assert least_s <= simulated.step_s * (1 + 1e-9)


@pytest.mark.parametrize("spread", [False, True])
def test_a_program_solved_again_does_not_remember(spread: bool) -> None:
    problem = instance(6, seed=3, cap_share=0.6)
    if spread:
        problem = replace(problem, kind=np.arange(problem.num_layers))
    more = np.array([10e9, 0.0, 10e9, 0.0, 0.0])
    again, fresh = bound.count_programs(problem)[1], bound.count_programs(problem)[1]
    first, tighter, back = again.solve()[1], again.solve(more)[1], again.solve()[1]
    assert first is not None and tighter is not None and back is not None
    assert tighter.objective_s > first.objective_s
    only = fresh.solve(more)[1]
    assert only is not None and np.array_equal(only.options, tighter.options)
    assert np.array_equal(first.options, back.options) and first.objective_s == back.objective_s
