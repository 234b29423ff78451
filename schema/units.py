"""Units (data sheets are decimal, memory is binary, time is seconds), and functions that take numbers and arrays alike."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

MB, GB = 10**6, 10**9
KIB, MIB, GIB = 2**10, 2**20, 2**30
TFLOP = 10**12

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool]

Numbers = Any
"""A number, or an array with one number for each layout: formulas that are written once for both."""

Array = Numbers
"""The same, where arrays are usual; all arguments of one call broadcast together."""


def format_bytes(num_bytes: float) -> str:
    """Format bytes for the screen, binary units: ``format_bytes(3 * 2**30) == '3.0 GiB'``."""
    for unit, size in (("TiB", 2**40), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """Format seconds for the screen with three significant digits: ``'12.3 ms'``, ``'4.56 s'``, ``'2 h 03 min'``."""
    if abs(seconds) >= 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= 0.9995 * size:  # 999.6 us are 1 ms
            return f"{seconds / size:.3g} {unit}" if abs(seconds) < 999.5 * size else f"{seconds / size:.0f} {unit}"
    return f"{seconds / 1e-6:.2g} us"


def format_joules(joules: float) -> str:
    """Format joules for the screen, three significant digits: ``format_joules(4.2e6) == '4.2 MJ'``."""
    for unit, size in (("GJ", 1e9), ("MJ", 1e6), ("kJ", 1e3)):
        if joules >= size:
            return f"{joules / size:.3g} {unit}" if joules < 1000 * size else f"{joules / size:,.0f} {unit}"
    return f"{joules:.3g} J"


def format_count(count: float) -> str:
    """Format parameters or tokens for the screen: ``format_count(70_553_706_496) == '70.6 B'``."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if abs(count) >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f}"


_SUFFIXES = {"k": 2**10, "m": 2**20}
_DECIMAL_SUFFIXES = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_COUNT = re.compile(r"([+-]?[0-9][0-9_,]*)([kKmM]?)")


def parse_count(text: str) -> int:
    """Read a count as lengths of sequences and batches are written: ``parse_count("8k") == 8192``, ``parse_count("4M") == 2**22``.

    Raises:
        ValueError: it is no whole number.
    """
    match = _COUNT.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no whole number; 8192 and 8k (8 x 1024) are")
    return int(match[1].replace(",", "").replace("_", "")) * _SUFFIXES.get(match[2].lower(), 1)


def parse_number(text: str) -> float:
    """Read a number.

    Raises:
        ValueError: it is none.
    """
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is no number") from None


def parse_decimal(text: str) -> float:
    """Read an amount as the tokens of a run are written: ``parse_decimal("15T") == 15e12``.

    Raises:
        ValueError: it is no number.
    """
    number, factor = text.strip(), _DECIMAL_SUFFIXES.get(text.strip()[-1:].lower(), 1)
    try:
        return float(number if factor == 1 else number[:-1]) * factor
    except ValueError:
        raise ValueError(f"{text!r} is no number; 15e12 and 15T are") from None


def format_percent(fraction: float, digits: int = 1, *, sign: bool = False) -> str:
    """Format a part of a whole for the screen, zero without a sign: ``format_percent(0.0476) == '4.8 %'``."""
    text = f"{100 * fraction:.{digits}f}"
    if float(text) == 0:
        text = text.lstrip("-")
    elif sign and fraction > 0:
        text = "+" + text
    return f"{text} %"


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: ``counted(1, "node") == '1 node'``, ``counted(2, "batch", "batches")``."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


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
