"""LinearProgram: rows and variables as arrays, many of a kind at once, without naming a solver (backend.py solves it)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
Term = tuple[Any, Any]
"""(indices of variables, coefficients); both broadcast to the number of rows."""


@dataclass
class LinearProgram:
    """min cost x, lower <= A x <= upper, least <= x <= most, some of x ``whole`` numbers; grown family by family."""

    cost: list[float] = field(default_factory=list)
    least: list[float] = field(default_factory=list)
    most: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    whole: list[int] = field(default_factory=list)
    entries: list[tuple[IntArray, IntArray, FloatArray]] = field(default_factory=list)
    families: dict[str, list[range]] = field(default_factory=dict)

    def variables(self, size: int, *, least: Any = 0.0, most: Any = np.inf, cost: Any = 0.0) -> IntArray:
        """Indices of ``size`` new variables."""
        start = len(self.cost)
        for values, given in ((self.least, least), (self.most, most), (self.cost, cost)):
            values.extend(_broadcast(size, given, np.float64).tolist())
        return np.arange(start, start + size)

    def rows(self, label: str, terms: Sequence[Term], *, lower: Any = -np.inf, upper: Any = np.inf) -> range:
        """One row for each entry of the longest term: lower <= sum of coefficient times variable <= upper."""
        sizes = [np.size(given) for given in (lower, upper, *(given for term in terms for given in term))]
        start, size = len(self.lower), max(sizes) if min(sizes) else 0
        self.lower.extend(_broadcast(size, lower, np.float64).tolist())
        self.upper.extend(_broadcast(size, upper, np.float64).tolist())
        places = np.arange(start, start + size)
        for idxs, values in terms:
            self.entries.append((places, _broadcast(size, idxs, np.int64), _broadcast(size, values, np.float64)))
        made = range(start, start + size)
        self.families.setdefault(label, []).append(made)
        return made

    def block(
        self, label: str, idxs: IntArray, matrix: FloatArray, *, lower: Any = -np.inf, upper: Any = np.inf
    ) -> range:
        """Rows over the same variables: ``matrix`` [rows, variables]."""
        start, (size, width) = len(self.lower), matrix.shape
        self.lower.extend(np.broadcast_to(np.asarray(lower, dtype=np.float64), size).tolist())
        self.upper.extend(np.broadcast_to(np.asarray(upper, dtype=np.float64), size).tolist())
        self.entries.append((np.repeat(np.arange(start, start + size), width), np.tile(idxs, size), matrix.reshape(-1)))
        made = range(start, start + size)
        self.families.setdefault(label, []).append(made)
        return made

    def row(self, label: str, terms: Sequence[Term], *, lower: float = -np.inf, upper: float = np.inf) -> range:
        """One row that sums over all entries of its terms."""
        place = len(self.lower)
        self.lower.append(lower)
        self.upper.append(upper)
        for idxs, values in terms:
            flat = np.asarray(idxs, dtype=np.int64).reshape(-1)
            self.entries.append((np.full(len(flat), place), flat, _broadcast(len(flat), values, np.float64)))
        made = range(place, place + 1)
        self.families.setdefault(label, []).append(made)
        return made

    def by_column(self) -> tuple[IntArray, IntArray, FloatArray]:
        """(starts [n + 1], rows, values) of the matrix, column after column, doubles added up."""
        places, columns, values = (np.concatenate(parts) for parts in zip(*self.entries, strict=True))
        key = columns * len(self.lower) + places
        order = np.argsort(key, kind="stable")
        sorted_ = key[order]
        first = np.flatnonzero(np.diff(sorted_, prepend=-1))
        unique, summed = sorted_[first], np.add.reduceat(values[order], first)
        keep = summed != 0
        unique, summed = unique[keep], summed[keep]
        starts = np.searchsorted(unique, np.arange(len(self.cost) + 1) * len(self.lower))
        return starts, unique % len(self.lower), summed


def _broadcast(size: int, given: Any, dtype: type) -> NDArray[Any]:
    """As many values as ``size``, of so many or of one."""
    values: NDArray[Any] = np.asarray(given, dtype=dtype).reshape(-1)
    if len(values) == size:
        return values
    assert len(values) == 1, f"{len(values)} values for {size} rows or variables"
    return np.full(size, values[0])


@dataclass(frozen=True)
class LinearAnswer:
    """Values of the variables and duals of the rows (what one unit more on a row's side changes in the objective).

    ``bound`` is what no answer is below: the objective itself unless variables are whole and the search for them was stopped.
    """

    objective: float
    values: FloatArray
    duals: FloatArray
    bound: float
