"""Which solver gets the linear and integer programs, and where they are written: PuLP is the door to all but HiGHS itself.

    with linear_solver("cbc", write_to=Path("programs")):
        plan(...)

Answers do not depend on the choice beyond the tolerances of solvers (tests/unit/solvers/test_solver_choice.py). Programs of
CP-SAT (windows of pipeline orders, exact packing) are no linear ones and stay with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..schema.errors import ConfigError
from ..schema.units import FloatArray
from .linear_program import LinearProgram

if TYPE_CHECKING:
    import pulp

HIGHS = "highs"
_UPPER, _EQUAL, _LOWER = -1, 0, 1
"""Senses of a constraint as PuLP numbers them."""
PULP_NAMES = {
    "highs": ("HiGHS",),
    "cbc": ("COIN_CMD", "PULP_CBC_CMD"),
    "glpk": ("GLPK_CMD",),
    "scip": ("SCIP_PY", "SCIP_CMD"),
    "gurobi": ("GUROBI", "GUROBI_CMD"),
    "cplex": ("CPLEX_PY", "CPLEX_CMD"),
    "xpress": ("XPRESS_PY", "XPRESS"),
    "mosek": ("MOSEK",),
    "copt": ("COPT",),
}
"""Solver -> classes of PuLP that start it, the first that is installed is taken. Any other class of PuLP goes by its own name."""


@dataclass
class SolverChoice:
    """The solver of linear and integer programs.

    Attributes:
        name: a key of PULP_NAMES or a class of PuLP.
        write_to: folder that gets every program as an .lp file; None: nothing is written.
        written: programs so far, by name.
    """

    name: str = HIGHS
    write_to: Path | None = None
    written: dict[str, int] = field(default_factory=dict)

    def pulp_solver(
        self, *, time_limit_s: float | None = None, rel_gap: float | None = None, seed: int = 0, relaxed: bool = False
    ) -> pulp.LpSolver:
        """Return PuLP's object for the solver: silent, on one thread; ``relaxed`` leaves out that variables are integer.

        Raises:
            ConfigError: PuLP does not know it, or it is not installed.
        """
        import pulp

        options: dict[str, Any] = {"msg": False, "timeLimit": time_limit_s, "gapRel": rel_gap, "mip": not relaxed}
        for name in PULP_NAMES.get(self.name, (self.name,)):
            if name in pulp.listSolvers() and pulp.getSolver(name, msg=False).available():
                if name == "HiGHS":
                    options |= {"threads": 1, "random_seed": seed % 2**31}
                elif name in ("COIN_CMD", "PULP_CBC_CMD"):
                    options |= {"threads": 1}
                return pulp.getSolver(name, **options)
        installed = pulp.listSolvers(onlyAvailable=True)
        names = [name for name, classes in PULP_NAMES.items() if {*classes} & {*installed}]
        known = self.name in PULP_NAMES or self.name in pulp.listSolvers()
        raise ConfigError(
            f"the solver {self.name} is {'not installed' if known else 'unknown to PuLP'}",
            help=f"one of {', '.join(names)}" + (f", or install {self.name}" if known else ""),
        )

    def write(self, problem: pulp.LpProblem) -> None:
        """Write a program next to those before it: ``offload_bound-001.lp``."""
        if self.write_to is None:
            return
        name = re.sub(r"\W+", "_", problem.name)
        self.written[name] = self.written.get(name, 0) + 1
        self.write_to.mkdir(parents=True, exist_ok=True)
        problem.writeLP(str(self.write_to / f"{name}-{self.written[name]:03d}.lp"))


_CHOICE: ContextVar[SolverChoice | None] = ContextVar("solver_choice", default=None)


def solver_choice() -> SolverChoice:
    """Return the choice in force: HiGHS unless `linear_solver` says otherwise."""
    return _CHOICE.get() or SolverChoice()


@contextmanager
def linear_solver(name: str = HIGHS, *, write_to: Path | None = None) -> Iterator[SolverChoice]:
    """Send all linear and integer programs within the block to a solver, and write them to a folder.

    Raises:
        ConfigError: PuLP does not know the solver, or it is not installed.
    """
    choice = SolverChoice(name, write_to)
    choice.pulp_solver()
    token = _CHOICE.set(choice)
    try:
        yield choice
    finally:
        _CHOICE.reset(token)


@dataclass
class PulpProgram:
    """A `LinearProgram` as a model of PuLP, with its rows under their labels."""

    problem: pulp.LpProblem
    variables: list[pulp.LpVariable]
    rows: list[list[pulp.LpConstraint]]
    """Of each row its constraints: two where it has two different finite sides."""

    def change_upper(self, row: int, upper: float) -> None:
        """Set the upper side of one row that has one."""
        (constraint,) = (each for each in self.rows[row] if each.sense == _UPPER)
        constraint.changeRHS(upper)

    @property
    def values(self) -> FloatArray:
        """Return the values of the variables."""
        return np.array([x.value() or 0.0 for x in self.variables])

    @property
    def duals(self) -> FloatArray | None:
        """Return the duals of the rows; None where the solver gives none."""
        duals = [[each.pi for each in row] for row in self.rows]
        if any(dual is None for row in duals for dual in row):
            return None
        return np.array([sum(row) for row in duals], dtype=np.float64)


def as_pulp(program: LinearProgram) -> PulpProgram:
    """Return a program as PuLP has it; variables are ``x0..``, rows their label and number: ``C6_0``."""
    import pulp

    problem = pulp.LpProblem(program.name, pulp.LpMinimize)
    integer = {*program.integer}
    variables = [
        problem.add_variable(
            f"x{idx}",
            lowBound=None if low == -np.inf else low,
            upBound=None if high == np.inf else high,
            cat=pulp.LpInteger if idx in integer else pulp.LpContinuous,
        )
        for idx, (low, high) in enumerate(zip(program.x_min, program.x_max, strict=True))
    ]
    problem += pulp.LpAffineExpression((x, cost) for x, cost in zip(variables, program.cost, strict=True) if cost)
    labels = [""] * len(program.lower)
    for label, families in program.families.items():
        for number, row in enumerate(row for rows in families for row in rows):
            labels[row] = f"{re.sub(r'[^A-Za-z0-9]', '_', label)}_{number}"
    terms: list[list[tuple[Any, float]]] = [[] for _ in labels]
    starts, idxs, values = program.by_column()
    for column, x in enumerate(variables):
        for entry in range(starts[column], starts[column + 1]):
            terms[idxs[entry]].append((x, float(values[entry])))
    rows: list[list[pulp.LpConstraint]] = []
    for label, pairs, low, high in zip(labels, terms, program.lower, program.upper, strict=True):
        sides = [(_EQUAL, low, "")] if low == high else [(_LOWER, low, "_lower"), (_UPPER, high, "_upper")]
        rows.append(
            [
                pulp.LpConstraint(pulp.LpAffineExpression(pairs), sense, label + suffix, side)
                for sense, side, suffix in sides
                if np.isfinite(side)
            ]
        )
        for constraint in rows[-1]:
            problem += constraint
    return PulpProgram(problem, variables, rows)
