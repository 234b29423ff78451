"""Rows of choices as columns of integers by name: crossed with the options of one more, selected, put one behind the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ..schema.units import IntArray

Columns = dict[str, IntArray]
Rows = Mapping[str, IntArray]
Allowed = Callable[[Rows], NDArray[np.bool_]]


def cross(columns: Columns, name: str, options: Sequence[int], allowed: Allowed | None = None) -> Columns:
    """Return every row with every option of a new column; those that are ``allowed``."""
    size = len(next(iter(columns.values()))) if columns else 1
    rows = np.repeat(np.arange(size), len(options))
    values = np.tile(np.asarray(options, dtype=np.int64), size)
    if allowed is not None:
        selected = allowed(_Crossed(columns, rows, name, values))
        rows, values = rows[selected], values[selected]
    return {key: column[rows] for key, column in columns.items()} | {name: values}


class _Crossed(Rows):
    """Rows of some columns with a new one; a column is made on demand, because few are needed."""

    def __init__(self, columns: Columns, rows: IntArray, name: str, values: IntArray) -> None:
        self._columns, self._rows, self._new = columns, rows, {name: values}

    def __getitem__(self, name: str) -> IntArray:
        return self._new[name] if name in self._new else self._columns[name][self._rows]

    def __iter__(self) -> Iterator[str]:
        return iter({**self._columns, **self._new})

    def __len__(self) -> int:
        return len({**self._columns, **self._new})


def select(columns: Columns, mask: NDArray[np.bool_]) -> Columns:
    """Return the rows of a mask."""
    return columns if mask.all() else take(columns, np.flatnonzero(mask))


def take(columns: Columns, rows: IntArray) -> Columns:
    """Return rows by their indices."""
    return {name: column[rows] for name, column in columns.items()}


def stack(blocks: Sequence[Columns]) -> Columns:
    """Return the rows of all blocks, one behind the other."""
    return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}
