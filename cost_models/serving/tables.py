"""Costs tabulated once and interpolated after: over rows, and over a plane of two sizes in logarithms.

A simulation asks for thousands of steps of one instance, whose costs depend on few numbers. Over rows the table is piecewise linear
between sizes that are at most a factor of 2^(1/8) apart (1 to 16 exactly); over a plane the logarithm of the seconds is bilinear in
the logarithms of both sizes, exact where seconds are a power of either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...schema.units import FloatArray

ROWS: FloatArray = np.unique(
    np.concatenate([np.arange(17.0), np.round(2.0 ** np.arange(4, 17.01, 0.125)), 2.0 ** np.arange(18, 23)])
)
"""Rows of a step at which costs are tabulated; 0 costs nothing."""

_TINY = 1e-30


def over_rows(rows: Any, seconds: FloatArray) -> FloatArray:
    """Return seconds at ``rows`` [...] from those [G] at ROWS; beyond the last in proportion."""
    rows = np.asarray(rows, dtype=np.float64)
    return np.asarray(np.interp(rows, ROWS, seconds) * np.maximum(rows / ROWS[-1], 1.0))


@dataclass(frozen=True, eq=False)
class Plane:
    """Seconds over two sizes.

    Attributes:
        first, second: log2 of the sizes, evenly spaced by ``STEP``; log_seconds: [F, S].
    """

    log_seconds: FloatArray

    STEP = 0.5
    FIRST = np.arange(0.0, 17.01, STEP)
    SECOND = np.arange(0.0, 21.01, STEP)

    @classmethod
    def sizes(cls) -> tuple[FloatArray, FloatArray]:
        """Return the sizes [F, 1] and [1, S] at which seconds are wanted."""
        return 2.0 ** cls.FIRST[:, None], 2.0 ** cls.SECOND[None]

    @classmethod
    def of(cls, seconds: FloatArray) -> Plane:
        """Return the table of ``seconds`` [F, S] at `sizes`."""
        return cls(np.log(np.maximum(seconds, _TINY)))

    def __call__(self, first: Any, second: Any) -> FloatArray:
        """Return the seconds at two sizes [...]; of less than one of the first its share, and none of none."""
        first, second = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
        x = np.clip(np.log2(np.maximum(first, 1.0)) / self.STEP, 0, len(self.FIRST) - 1)
        y = np.clip(np.log2(np.maximum(second, 1.0)) / self.STEP, 0, len(self.SECOND) - 1)
        i = np.minimum(x.astype(np.int64), len(self.FIRST) - 2)
        j = np.minimum(y.astype(np.int64), len(self.SECOND) - 2)
        u, v, table = x - i, y - j, self.log_seconds
        log = (1 - u) * ((1 - v) * table[i, j] + v * table[i, j + 1])
        log = log + u * ((1 - v) * table[i + 1, j] + v * table[i + 1, j + 1])
        return np.asarray(np.exp(log) * np.clip(first, 0.0, 1.0))
