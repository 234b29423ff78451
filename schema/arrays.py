"""Arrays of numbers, and the few functions that take numbers and arrays alike."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool]

Numbers = Any
"""A number, or an array with one number for each layout: formulas that are written once for both."""

Array = Numbers
"""The same, where arrays are usual; all arguments of one call broadcast together."""


def where(condition: Numbers, one: Numbers, other: Numbers) -> Numbers:
    """Return ``one`` where the condition holds, else ``other``; a plain number for plain numbers."""
    return (one if condition else other) if isinstance(condition, bool) else np.where(condition, one, other)


def maximum(one: Numbers, other: Numbers) -> Numbers:
    """Return the larger of two; a plain number for plain numbers."""
    are_arrays = isinstance(one, np.ndarray) or isinstance(other, np.ndarray)
    return np.maximum(one, other) if are_arrays else max(one, other)


def gcd(one: Numbers, other: Numbers) -> Numbers:
    """Return the greatest common divisor; a plain number for plain numbers."""
    are_arrays = isinstance(one, np.ndarray) or isinstance(other, np.ndarray)
    return np.gcd(one, other) if are_arrays else math.gcd(one, other)
