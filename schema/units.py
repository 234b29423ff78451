"""Units in one place: data sheets are decimal (GB), memory is binary (GiB); time is always seconds."""

from __future__ import annotations

MB = 10**6
GB = 10**9
KIB = 2**10
MIB = 2**20
GIB = 2**30

TFLOP = 10**12

_BINARY = (("TiB", 2**40), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB))
_SECONDS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))


def format_bytes(num_bytes: float) -> str:
    """Format bytes for the screen, binary units: ``format_bytes(3 * 2**30) == '3.0 GiB'``."""
    for unit, size in _BINARY:
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """Format seconds for the screen with three significant digits: ``'12.3 ms'``, ``'4.56 s'``, ``'2 h 03 min'``."""
    if abs(seconds) >= 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"
    for unit, size in _SECONDS:
        if abs(seconds) >= size:
            return f"{seconds / size:.3g} {unit}" if abs(seconds) < 1000 * size else f"{seconds / size:.0f} {unit}"
    return f"{seconds / 1e-6:.2g} us"


def format_count(count: float) -> str:
    """Format parameters or tokens for the screen: ``format_count(70_553_706_496) == '70.6 B'``."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if abs(count) >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f}"
