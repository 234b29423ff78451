"""Linear programs as arrays, grown family by family of rows and variables, without naming a solver (backend.py solves them).

A family is written at once: `add_rows` makes one row for each entry of its longest term, `add_row` one that sums over all entries,
`add_block` rows over the same variables from a matrix. Each has the label of its constraint, which `families` leads back from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..schema.units import FloatArray, IntArray

Term = tuple[Any, Any]
"""(indices of variables, coefficients); both broadcast to the number of rows."""


@dataclass
class LinearProgram:
    """min cost x, lower <= A x <= upper, x_min <= x <= x_max, some of x ``integer``; ``name`` says of what problem."""

    name: str = "program"
    cost: list[float] = field(default_factory=list)
    x_min: list[float] = field(default_factory=list)
    x_max: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    integer: list[int] = field(default_factory=list)
    entries: list[tuple[IntArray, IntArray, FloatArray]] = field(default_factory=list)
    families: dict[str, list[range]] = field(default_factory=dict)

    def add_variables(self, size: int, *, x_min: Any = 0.0, x_max: Any = np.inf, cost: Any = 0.0) -> IntArray:
        """Return the indices of ``size`` new variables."""
        start = len(self.cost)
        for values, given in ((self.x_min, x_min), (self.x_max, x_max), (self.cost, cost)):
            values.extend(_broadcast(size, given, np.float64).tolist())
        return np.arange(start, start + size)

    def add_rows(self, label: str, terms: Sequence[Term], *, lower: Any = -np.inf, upper: Any = np.inf) -> range:
        """Add lower <= sum of coefficient times variable <= upper for each entry of the longest term."""
        sizes = [np.size(given) for given in (lower, upper, *(given for term in terms for given in term))]
        size = max(sizes) if min(sizes) else 0
        rows = self._sides(label, size, lower, upper)
        idxs = np.arange(rows.start, rows.stop)
        for variables, values in terms:
            self.entries.append((idxs, _broadcast(size, variables, np.int64), _broadcast(size, values, np.float64)))
        return rows

    def add_row(self, label: str, terms: Sequence[Term], *, lower: float = -np.inf, upper: float = np.inf) -> range:
        """Add one row that sums over all entries of its terms."""
        row = self._sides(label, 1, lower, upper)
        for idxs, values in terms:
            variables = np.asarray(idxs, dtype=np.int64).reshape(-1)
            size = len(variables)
            self.entries.append((np.full(size, row.start), variables, _broadcast(size, values, np.float64)))
        return row

    def add_block(
        self, label: str, idxs: IntArray, matrix: FloatArray, *, lower: Any = -np.inf, upper: Any = np.inf
    ) -> range:
        """Add rows over the same variables: ``matrix`` [rows, variables]."""
        size, width = matrix.shape
        rows = self._sides(label, size, lower, upper)
        self.entries.append(
            (np.repeat(np.arange(rows.start, rows.stop), width), np.tile(idxs, size), matrix.reshape(-1))
        )
        return rows

    def _sides(self, label: str, size: int, lower: Any, upper: Any) -> range:
        start = len(self.lower)
        self.lower.extend(_broadcast(size, lower, np.float64).tolist())
        self.upper.extend(_broadcast(size, upper, np.float64).tolist())
        rows = range(start, start + size)
        self.families.setdefault(label, []).append(rows)
        return rows

    def by_column(self) -> tuple[IntArray, IntArray, FloatArray]:
        """Return (starts [n + 1], rows, values) of the matrix, column after column; entries of one place are added up."""
        rows, columns, values = (np.concatenate(arrays) for arrays in zip(*self.entries, strict=True))
        key = columns * len(self.lower) + rows
        order = np.argsort(key, kind="stable")
        sorted_ = key[order]
        first = np.flatnonzero(np.diff(sorted_, prepend=-1))
        unique, summed = sorted_[first], np.add.reduceat(values[order], first)
        nonzero = summed != 0
        unique, summed = unique[nonzero], summed[nonzero]
        starts = np.searchsorted(unique, np.arange(len(self.cost) + 1) * len(self.lower))
        return starts, unique % len(self.lower), summed


def _broadcast(size: int, given: Any, dtype: type) -> NDArray[Any]:
    values: NDArray[Any] = np.asarray(given, dtype=dtype).reshape(-1)
    if len(values) == size:
        return values
    assert len(values) == 1, f"{len(values)} values for {size} rows or variables"
    return np.full(size, values[0])


@dataclass(frozen=True)
class LinearAnswer:
    """Values of the variables, and duals of the rows: what one unit more of a row's side changes in the objective.

    ``bound``: no answer is below it; the objective itself unless variables are integer and the search for them was stopped.
    """

    objective: float
    values: FloatArray
    duals: FloatArray
    bound: float
