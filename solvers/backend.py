"""What every solver answers with: HiGHS by itself, it and all others through PuLP (solver_choice.py), and CP-SAT of OR-tools.

A file with a problem has an instance (frozen, prepared, validated), `solve` and `check`:

    solve(instance, *, time_limit_s, rel_gap, seed) -> Solution       of the three keywords those that its method has a use for
    check(instance, choice) -> float                                  the objective of `Solution.choice`, from the definition alone

`check` knows nothing of the method and raises ValueError with the label of the constraint that a choice breaks.

PuLP's `status` says Optimal for the incumbent of a stopped search; `sol_status` does not, and only it is read here. PuLP has the
models that are solved once, `RowSolver` those that are solved hundreds of times. Determinism: one thread and a
seed; where equal answers matter more than seconds, give CP-SAT a limit in its own deterministic unit of work in place of wall-clock
seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from ..schema.units import FloatArray
from .linear_program import LinearAnswer, LinearProgram
from .tolerances import ROUNDING, SOLVER

if TYPE_CHECKING:
    import pulp
    from ortools.sat.python import cp_model

    from .solver_choice import PulpProgram


Choice = TypeVar("Choice")


class Status(StrEnum):
    """optimal: proved; feasible: an answer without proof; infeasible: proved that there is none; unknown: neither."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    UNKNOWN = "unknown"

    @property
    def has_answer(self) -> bool:
        """True where there is a choice."""
        return self in (Status.OPTIMAL, Status.FEASIBLE)


@dataclass(frozen=True, kw_only=True)
class Solution(Generic[Choice]):
    """An answer to an instance.

    Attributes:
        choice: values of the variables, in the form that the problem's `check` takes; None without an answer.
        objective: in the unit of the problem's (O); infinite without an answer.
        bound: no choice has a lower objective; -inf where the method gives none.
        solve_s: wall-clock seconds.
        backend: method or solver that made the choice.
    """

    status: Status
    choice: Choice | None
    objective: float = math.inf
    bound: float = -math.inf
    solve_s: float = 0.0
    backend: str = ""

    @property
    def gap(self) -> float:
        """1 - bound / objective, at least 0; infinite without an answer. Objectives of this folder are positive."""
        if not math.isfinite(self.objective):
            return math.inf
        return max(0.0, 1.0 - self.bound / self.objective) if self.objective else 0.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When to stop.

    Args:
        time_limit_s: wall-clock seconds.
        rel_gap: stop when (incumbent - bound) / |incumbent| is not larger.
        seed: of the solver's random choices.
        work_limit: CP-SAT's deterministic time, about a second each on a fast core; None: no such limit.
    """

    time_limit_s: float
    rel_gap: float = 0.0
    seed: int = 0
    work_limit: float | None = None


@dataclass(frozen=True)
class Outcome:
    """How a solver ended. `objective` is None without an answer, `bound` where nothing is known."""

    status: Status
    objective: float | None = None
    bound: float | None = None

    @property
    def gap(self) -> float:
        """|objective - bound| / |objective|; infinite without both."""
        if self.objective is None or self.bound is None:
            return math.inf
        return abs(self.objective - self.bound) / max(abs(self.objective), ROUNDING)


def solve_linear(problem: pulp.LpProblem, limits: Limits) -> Outcome:
    """Solve a PuLP model; its variables hold the answer, and mean nothing where there is none."""
    import pulp

    from .solver_choice import solver_choice  # here: most plans have no such program

    choice = solver_choice()
    choice.write(problem)
    problem.solve(choice.pulp_solver(time_limit_s=limits.time_limit_s, rel_gap=limits.rel_gap, seed=limits.seed))
    status = _status(problem)
    objective = bound = float(pulp.value(problem.objective)) if status.has_answer else None
    if status is not Status.INFEASIBLE and any(each.cat == pulp.LpInteger for each in problem.variables()):
        # In the model's own sense: PuLP hands a maximisation to the solver with its sign changed.
        sign = -1.0 if problem.sense == pulp.LpMaximize else 1.0
        bound = None
        if isinstance(problem.solver, pulp.HiGHS):
            bound = sign * float(problem.solverModel.getInfo().mip_dual_bound) + float(problem.objective.constant)
        elif status is Status.OPTIMAL and objective is not None:
            bound = objective - sign * limits.rel_gap * abs(objective)
        bound = bound if bound is not None and math.isfinite(bound) else None
    return _without_allowed_gap(Outcome(status, objective, bound))


def _status(problem: pulp.LpProblem) -> Status:
    import pulp

    return {
        pulp.LpSolutionOptimal: Status.OPTIMAL,
        pulp.LpSolutionIntegerFeasible: Status.FEASIBLE,
        pulp.LpSolutionInfeasible: Status.INFEASIBLE,
    }.get(problem.sol_status, Status.UNKNOWN)


def _without_allowed_gap(outcome: Outcome) -> Outcome:
    if outcome.status is Status.OPTIMAL and outcome.gap > SOLVER:
        return replace(outcome, status=Status.FEASIBLE)
    return outcome


class RowSolver:
    """A linear program in HiGHS, or in the solver of `solver_choice`, which can be solved again with other sides of its rows.

    Each time from the start, so that an answer does not depend on what was solved before. With integer variables: until the answer
    is within ``rel_gap`` of its bound, or for ``max_nodes`` nodes.
    """

    def __init__(
        self,
        program: LinearProgram,
        *,
        time_limit_s: float = math.inf,
        rel_gap: float = 0.0,
        max_nodes: int | None = None,
    ) -> None:
        """Hand the program over."""
        import highspy

        from .solver_choice import HIGHS, as_pulp, solver_choice

        choice = solver_choice()
        if choice.write_to is not None:
            choice.write(as_pulp(program).problem)
        self._program, self._time_limit_s, self._rel_gap = program, time_limit_s, rel_gap
        self._elsewhere = None if choice.name == HIGHS else as_pulp(program)
        self._has_integers, self._lower = bool(program.integer), program.lower
        self._solver = solver = highspy.Highs()
        solver.silent()
        solver.setOptionValue("threads", 1)
        if program.integer:
            solver.setOptionValue("mip_rel_gap", rel_gap)
            if max_nodes is not None:
                solver.setOptionValue("mip_max_nodes", max_nodes)
        if math.isfinite(time_limit_s):
            solver.setOptionValue("time_limit", time_limit_s)
        starts, rows, values = program.by_column()
        types = np.zeros(len(program.cost), dtype=np.int32)
        types[program.integer] = int(highspy.HighsVarType.kInteger)
        solver.passModel(
            len(program.cost), len(program.lower), len(values),
            int(highspy.MatrixFormat.kColwise), int(highspy.ObjSense.kMinimize), 0.0,
            *(np.array(sides) for sides in (program.cost, program.x_min, program.x_max, program.lower, program.upper)),
            starts[:-1].astype(np.int32), rows.astype(np.int32), values, types if self._has_integers else types[:0],
        )  # fmt: skip

    def change_upper(self, row: int, upper: float) -> None:
        """Set the upper side of one row."""
        self._solver.changeRowBounds(row, self._lower[row], upper)
        if self._elsewhere is not None:
            self._elsewhere.change_upper(row, upper)

    def solve(self) -> tuple[Status, LinearAnswer | None]:
        """Solve the program as it is now."""
        if self._elsewhere is not None:
            return self._solve_elsewhere(self._elsewhere)
        import highspy

        solver = self._solver
        solver.clearSolver()
        solver.run()
        ended = solver.getModelStatus()
        if ended in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
            return Status.INFEASIBLE, None
        info = solver.getInfo()
        stopped = ended in (highspy.HighsModelStatus.kSolutionLimit, highspy.HighsModelStatus.kTimeLimit)
        has_incumbent = self._has_integers and stopped and math.isfinite(info.mip_gap)
        if ended != highspy.HighsModelStatus.kOptimal and not has_incumbent:
            return Status.UNKNOWN, None
        solution, objective = solver.getSolution(), float(info.objective_function_value)
        bound = min(objective, float(info.mip_dual_bound)) if self._has_integers else objective
        answer = LinearAnswer(objective, np.array(solution.col_value), np.array(solution.row_dual), bound)
        proved = objective - bound <= SOLVER * max(abs(objective), ROUNDING)
        return (Status.OPTIMAL if proved else Status.FEASIBLE), answer

    def _solve_elsewhere(self, model: PulpProgram) -> tuple[Status, LinearAnswer | None]:
        """Solve by PuLP. Of a search that was stopped PuLP says no bound: then it is that of the linear relaxation."""
        from .solver_choice import solver_choice

        choice, limit_s = solver_choice(), self._time_limit_s if math.isfinite(self._time_limit_s) else None
        model.problem.solve(choice.pulp_solver(time_limit_s=limit_s, rel_gap=self._rel_gap or None))
        status = _status(model.problem)
        if not status.has_answer:
            return status, None
        values, duals = model.values, model.duals
        objective = float(np.dot(self._program.cost, values))
        if not self._has_integers:
            return status, LinearAnswer(objective, values, self._dual_values() if duals is None else duals, objective)
        bound = objective - self._rel_gap * abs(objective)
        if status is not Status.OPTIMAL:
            model.problem.solve(choice.pulp_solver(time_limit_s=limit_s, relaxed=True))
            bound = float(np.dot(self._program.cost, model.values))
        proved = objective - bound <= SOLVER * max(abs(objective), ROUNDING)
        answer = LinearAnswer(objective, values, np.zeros(len(self._lower)), bound)
        return (Status.OPTIMAL if proved else Status.FEASIBLE), answer

    def _dual_values(self) -> FloatArray:
        """Return HiGHS' duals, for solvers that give none."""
        self._solver.clearSolver()
        self._solver.run()
        return np.array(self._solver.getSolution().row_dual)


def new_constraint_program() -> cp_model.CpModel:
    """Return an empty CP-SAT model."""
    from ortools.sat.python import cp_model

    return cp_model.CpModel()


def solve_constraint_program(model: cp_model.CpModel, limits: Limits) -> tuple[Outcome, cp_model.CpSolver]:
    """Solve a CP-SAT model on one worker, from its hint where it has one; the solver gives the values of the answer."""
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(limits.time_limit_s, 0.0)
    solver.parameters.relative_gap_limit = limits.rel_gap
    solver.parameters.random_seed = limits.seed % 2**31
    solver.parameters.num_workers = 1
    if limits.work_limit is not None:
        solver.parameters.max_deterministic_time = limits.work_limit
    try:
        code = solver.solve(model)
    except IndexError:
        # Seen once in thousands of solves with OR-tools 9.15: "absl::btree_map::at" from inside its presolve.
        return Outcome(Status.UNKNOWN), solver
    status = {
        cp_model.OPTIMAL: Status.OPTIMAL,
        cp_model.FEASIBLE: Status.FEASIBLE,
        cp_model.INFEASIBLE: Status.INFEASIBLE,
    }.get(code, Status.UNKNOWN)
    objective = solver.objective_value if status.has_answer else None
    bound = None if status is Status.INFEASIBLE else solver.best_objective_bound
    return _without_allowed_gap(Outcome(status, objective, bound)), solver
