"""The only file that names a solver: HiGHS (also by itself) and CBC through PuLP, CP-SAT through OR-tools.

Both come back with the same `Outcome`, whose status tells an answer with proof from one without and from none at all. PuLP's own
`status` does not: it says Optimal for the incumbent of a stopped search. `sol_status` does, and only it is read here.

Determinism: one thread and a seed. A wall-clock limit still stops at a moment that depends on the machine; where equal answers
matter more than seconds, give CP-SAT a limit in its own deterministic unit of work.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from .linear_program import LinearAnswer, LinearProgram
from .solution import Status

if TYPE_CHECKING:
    import pulp
    from ortools.sat.python import cp_model

LinearSolver = Literal["highs", "cbc"]

_PROVED = 1e-6  # relative; HiGHS and CBC accept rows violated by up to this


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
    """What a solver said. `objective` is None without an answer, `bound` None where the solver does not tell (CBC)."""

    status: Status
    objective: float | None
    bound: float | None
    solve_s: float
    backend: str

    @property
    def gap(self) -> float:
        """|objective - bound| / |objective|; infinite without both."""
        if self.objective is None or self.bound is None:
            return math.inf
        return abs(self.objective - self.bound) / max(abs(self.objective), 1e-12)


def solve_linear(problem: pulp.LpProblem, limits: Limits, solver: LinearSolver = "highs") -> Outcome:
    """Solve a PuLP model; with an answer the variables hold it, without one they mean nothing."""
    import pulp

    start = time.perf_counter()
    problem.solve(_highs(limits) if solver == "highs" else _cbc(limits))
    status = {
        pulp.LpSolutionOptimal: Status.OPTIMAL,
        pulp.LpSolutionIntegerFeasible: Status.FEASIBLE,
        pulp.LpSolutionInfeasible: Status.INFEASIBLE,
    }.get(problem.sol_status, Status.UNKNOWN)
    found = status in (Status.OPTIMAL, Status.FEASIBLE)
    objective = float(pulp.value(problem.objective)) if found else None
    bound = objective if status is Status.OPTIMAL and limits.rel_gap == 0 else None
    if solver == "highs" and status is not Status.INFEASIBLE:
        bound = _highs_bound(problem, objective)
    return _stated(Outcome(status, objective, bound, time.perf_counter() - start, solver))


def _stated(outcome: Outcome) -> Outcome:
    """Solvers call an answer optimal as soon as it is within the allowed gap; here that is proved only without a gap."""
    if outcome.status is Status.OPTIMAL and outcome.gap > _PROVED:
        return replace(outcome, status=Status.FEASIBLE)
    return outcome


def _highs(limits: Limits) -> pulp.LpSolver:
    import pulp

    return pulp.HiGHS(
        msg=False, threads=1, timeLimit=limits.time_limit_s, gapRel=limits.rel_gap, random_seed=limits.seed % 2**31
    )


def _cbc(limits: Limits) -> pulp.LpSolver:
    import pulp

    options = [f"randomCbcSeed {limits.seed % 2**31}"]
    return pulp.PULP_CBC_CMD(
        msg=False, threads=1, timeLimit=limits.time_limit_s, gapRel=limits.rel_gap, options=options
    )


def _highs_bound(problem: pulp.LpProblem, objective: float | None) -> float | None:
    """Dual bound in the model's own sense; PuLP hands a maximisation to HiGHS with its sign changed."""
    import pulp

    if not any(variable.cat == pulp.LpInteger for variable in problem.variables()):
        return objective
    bound = float(problem.solverModel.getInfo().mip_dual_bound)
    if not math.isfinite(bound):
        return None
    signed = -bound if problem.sense == pulp.LpMaximize else bound
    return signed + float(problem.objective.constant)


class RowSolver:
    """A linear program in HiGHS itself (importing pulp takes longer than most of them); it can be solved again with other sides.

    Each time from the start, so that an answer does not depend on what was asked before. Where variables are whole: until the
    answer is within ``rel_gap`` of its bound, or for at most ``most_nodes`` nodes.
    """

    def __init__(
        self,
        program: LinearProgram,
        *,
        time_limit_s: float = math.inf,
        rel_gap: float = 0.0,
        most_nodes: int | None = None,
    ) -> None:
        import highspy
        import numpy as np

        self._whole, self._lower = bool(program.whole), program.lower
        self._solver = solver = highspy.Highs()
        solver.silent()
        solver.setOptionValue("threads", 1)
        if program.whole:
            solver.setOptionValue("mip_rel_gap", rel_gap)
            if most_nodes is not None:
                solver.setOptionValue("mip_max_nodes", most_nodes)
        if math.isfinite(time_limit_s):
            solver.setOptionValue("time_limit", time_limit_s)
        starts, rows, values = program.by_column()
        whole = np.zeros(len(program.cost), dtype=np.int32)
        whole[program.whole] = int(highspy.HighsVarType.kInteger)
        solver.passModel(
            len(program.cost), len(program.lower), len(values),
            int(highspy.MatrixFormat.kColwise), int(highspy.ObjSense.kMinimize), 0.0,
            *(np.array(sides) for sides in (program.cost, program.least, program.most, program.lower, program.upper)),
            starts[:-1].astype(np.int32), rows.astype(np.int32), values, whole if self._whole else whole[:0],
        )  # fmt: skip

    def change_upper(self, row: int, upper: float) -> None:
        """Another upper side of one row."""
        self._solver.changeRowBounds(row, self._lower[row], upper)

    def solve(self) -> tuple[Status, LinearAnswer | None]:
        """What HiGHS says of it as it is now."""
        import highspy
        import numpy as np

        solver = self._solver
        solver.clearSolver()
        solver.run()
        said = solver.getModelStatus()
        if said in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
            return Status.INFEASIBLE, None
        info = solver.getInfo()
        stopped = said in (highspy.HighsModelStatus.kSolutionLimit, highspy.HighsModelStatus.kTimeLimit)
        if said != highspy.HighsModelStatus.kOptimal and not (self._whole and stopped and math.isfinite(info.mip_gap)):
            return Status.UNKNOWN, None
        found, objective = solver.getSolution(), float(info.objective_function_value)
        bound = min(objective, float(info.mip_dual_bound)) if self._whole else objective
        answer = LinearAnswer(objective, np.array(found.col_value), np.array(found.row_dual), bound)
        proved = objective - bound <= _PROVED * max(abs(objective), 1e-12)
        return (Status.OPTIMAL if proved else Status.FEASIBLE), answer


def solve_rows(
    program: LinearProgram, *, time_limit_s: float = math.inf, rel_gap: float = 0.0, most_nodes: int | None = None
) -> tuple[Status, LinearAnswer | None]:
    """A linear program solved once."""
    return RowSolver(program, time_limit_s=time_limit_s, rel_gap=rel_gap, most_nodes=most_nodes).solve()


def new_constraint_program() -> cp_model.CpModel:
    """An empty CP-SAT model."""
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
    start = time.perf_counter()
    try:
        code = solver.solve(model)
    except (
        IndexError
    ):  # seen once in thousands of solves with OR-tools 9.15: "absl::btree_map::at" from inside its presolve
        return Outcome(Status.UNKNOWN, None, None, time.perf_counter() - start, "cp-sat"), solver
    status = {
        cp_model.OPTIMAL: Status.OPTIMAL,
        cp_model.FEASIBLE: Status.FEASIBLE,
        cp_model.INFEASIBLE: Status.INFEASIBLE,
    }.get(code, Status.UNKNOWN)
    found = status in (Status.OPTIMAL, Status.FEASIBLE)
    objective = solver.objective_value if found else None
    bound = None if status is Status.INFEASIBLE else solver.best_objective_bound
    return _stated(Outcome(status, objective, bound, time.perf_counter() - start, "cp-sat")), solver
