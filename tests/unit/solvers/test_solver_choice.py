"""Any solver that PuLP knows gives the answers that HiGHS gives, and reads what is written of a program."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pulp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.planner import plan
from meshwright.planner.request import OffloadRequest
from meshwright.schema import ClusterSpec, ConfigError, Generation, ModelSpec, Workload
from meshwright.schema.units import GIB
from meshwright.solvers.backend import RowSolver, Status
from meshwright.solvers.linear_program import LinearProgram
from meshwright.solvers.solver_choice import PULP_NAMES, as_pulp, linear_solver

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:pulp")

OTHERS = [
    name
    for name, classes in PULP_NAMES.items()
    if name != "highs" and {*classes} & {*pulp.listSolvers(onlyAvailable=True)}
] + ["HiGHS"]
"""Installed solvers: PuLP ships CBC. HiGHS through PuLP has the model built another way."""


def random_program(seed: int, *, integer: bool) -> LinearProgram:
    """Make a program that has an answer, with rows of all kinds: at most, at least, equal, between, none."""
    rng = np.random.default_rng(seed)
    program = LinearProgram("random")
    x = program.add_variables(6, x_min=0.0, x_max=[9.0, 9.0, np.inf, 9.0, np.inf, 9.0], cost=rng.integers(1, 9, 6))
    point = rng.integers(0, 9, 6)
    for label in ("C1", "C2"):
        matrix = rng.integers(-3, 9, (3, 6)).astype(float)
        middle = matrix @ point
        slack = rng.integers(0, 5, 3)
        program.add_block(label, x, matrix, lower=middle - slack, upper=[middle[0], np.inf, middle[2] + 2])
    program.add_row("C3", [(x, 1.0)], lower=-np.inf, upper=point.sum() + 3)
    if integer:
        program.integer = [int(idx) for idx in x[:4]]
    return program


@pytest.mark.parametrize("name", OTHERS)
@given(seed=st.integers(0, 10**6), integer=st.booleans())
@settings(max_examples=12, deadline=None)
def test_every_solver_gives_the_same_optimum_and_duals(name: str, seed: int, integer: bool) -> None:
    program = random_program(seed, integer=integer)
    expected_status, expected = RowSolver(program).solve()
    with linear_solver(name):
        status, answer = RowSolver(program).solve()
    assert status is expected_status is Status.OPTIMAL
    assert expected is not None
    assert answer is not None
    assert answer.objective == pytest.approx(expected.objective, rel=1e-6, abs=1e-6)
    assert answer.bound == pytest.approx(expected.bound, rel=1e-6, abs=1e-6)
    if not integer:
        assert proved_by(program, answer.duals) == pytest.approx(expected.objective, rel=1e-5, abs=1e-5)


def proved_by(program: LinearProgram, duals: np.ndarray) -> float:
    """Return the bound that duals prove: duals of a degenerate program may differ between solvers, what they prove may not."""
    matrix = np.zeros((len(program.lower), len(program.cost)))
    for rows, columns, values in program.entries:
        np.add.at(matrix, (rows, columns), values)

    def cheapest(prices: np.ndarray, low: list[float], high: list[float]) -> float:
        used = np.abs(prices) > 1e-5  # CBC writes seven digits
        return float(prices[used] @ np.where(prices > 0, low, high)[used])

    reduced_cost = np.array(program.cost) - duals @ matrix
    return cheapest(duals, program.lower, program.upper) + cheapest(reduced_cost, program.x_min, program.x_max)


@pytest.mark.parametrize("name", OTHERS)
def test_changed_side_is_solved_anew_and_a_contradiction_is_infeasible(name: str) -> None:
    program = LinearProgram("change")
    x = program.add_variables(2, x_max=10.0, cost=[-1.0, -2.0])
    (row,) = program.add_row("C1", [(x, 1.0)], lower=1.0, upper=8.0)
    with linear_solver(name):
        solver = RowSolver(program)
        assert solver.solve()[1].objective == pytest.approx(-16)  # type: ignore[union-attr]
        solver.change_upper(row, 3.0)
        assert solver.solve()[1].objective == pytest.approx(-6)  # type: ignore[union-attr]
        solver.change_upper(row, 0.5)
        assert solver.solve() == (Status.INFEASIBLE, None)


@pytest.mark.parametrize("integer", [False, True])
def test_written_program_has_the_same_optimum_and_names_its_rows(integer: bool, tmp_path: Path) -> None:
    program = random_program(3, integer=integer)
    with linear_solver(write_to=tmp_path):
        _, answer = RowSolver(program).solve()
    (file,) = tmp_path.iterdir()
    assert file.name == "random-001.lp"
    text = file.read_text()
    assert "C1_0:" in text or "C1_0_upper:" in text
    import highspy

    solver = highspy.Highs()
    solver.silent()
    solver.readModel(str(file))
    solver.run()
    assert answer is not None
    assert solver.getInfo().objective_function_value == pytest.approx(answer.objective, rel=1e-9)


def test_rows_and_variables_of_the_model_are_those_of_the_program() -> None:
    program = random_program(1, integer=True)
    made = as_pulp(program)
    assert len(made.variables) == len(program.cost)
    sides = sum(
        1 if low == high else int(np.isfinite(low)) + int(np.isfinite(high))
        for low, high in zip(program.lower, program.upper, strict=True)
    )
    assert len(made.problem.constraints) == sides


@pytest.mark.long
def test_plans_do_not_depend_on_the_solver() -> None:
    model, machine = ModelSpec.named("llama-3.1-8b"), ClusterSpec.parse("1xA100-SXM-40GB")
    offload = OffloadRequest(host_memory_bytes=512 * GIB)
    tasks = (Workload(global_batch_size=8, seq_len=2048), Generation(prompt_len=512, generate_len=32))
    expected = [plan(model, machine, task, offload=offload) for task in tasks]
    with linear_solver("cbc"):
        answers = [plan(model, machine, task, offload=offload) for task in tasks]
    for one, other in zip(expected, answers, strict=True):
        # Another optimal vertex is rounded to another schedule.
        assert other.estimate.tokens_per_s == pytest.approx(one.estimate.tokens_per_s, rel=1e-2)
        assert other.search.bound == pytest.approx(one.search.bound, rel=2e-3)  # type: ignore[union-attr]


@pytest.mark.parametrize(("name", "message"), [("gurobbi", "unknown to PuLP"), ("gurobi", "not installed")])
def test_solver_that_cannot_be_used_is_refused_with_those_that_can(name: str, message: str) -> None:
    if name == "gurobi" and "gurobi" in OTHERS:
        pytest.skip("gurobi is installed")
    with pytest.raises(ConfigError, match=message) as refused, linear_solver(name):
        pass
    assert "highs, cbc" in str(refused.value)
