"""Columns of arrays, one row for each combination of choices, and how rows are combined with further ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ..cost_models.layouts import IntArray

Columns = dict[str, IntArray]


def divisors(n: int) -> list[int]:
    """All divisors of n, increasing."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def cross(
    columns: Columns,
    name: str,
    options: Sequence[int],
    allowed: Callable[[Mapping[str, IntArray]], NDArray[np.bool_]] | None = None,
) -> Columns:
    """Every row with every option of a new column; those that are ``allowed``."""
    size = len(next(iter(columns.values()))) if columns else 1
    rows = np.repeat(np.arange(size), len(options))
    values = np.tile(np.asarray(options, dtype=np.int64), size)
    if allowed is not None:
        keep = allowed(_Crossed(columns, rows, name, values))
        rows, values = rows[keep], values[keep]
    return {key: column[rows] for key, column in columns.items()} | {name: values}


class _Crossed(Mapping[str, IntArray]):
    """Rows of some columns beside a new one; a column is made when it is asked for, because few are."""

    def __init__(self, columns: Columns, rows: IntArray, name: str, values: IntArray) -> None:
        """``values`` of the new column ``name`` stand beside ``rows`` of the others."""
        self._columns, self._rows, self._new = columns, rows, {name: values}

    def __getitem__(self, name: str) -> IntArray:
        return self._new[name] if name in self._new else self._columns[name][self._rows]

    def __iter__(self) -> Iterator[str]:
        return iter({**self._columns, **self._new})

    def __len__(self) -> int:
        return len({**self._columns, **self._new})


def select(columns: Columns, keep: NDArray[np.bool_]) -> Columns:
    """The rows of a mask."""
    if keep.all():
        return columns
    rows = np.flatnonzero(keep)
    return {name: column[rows] for name, column in columns.items()}


def always(c: Mapping[str, IntArray]) -> NDArray[np.bool_]:
    """Every row."""
    return np.ones_like(c["tp"], dtype=bool)
