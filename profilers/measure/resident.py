"""What the kernel says of this process's resident memory: its peak since a moment, and how much of it are pages of files.

Pages of files are the code of libraries, which comes in as it is first run, and data that are mapped. They are no memory that a
process takes: the kernel drops them where others need room, and ranks share them.
"""

from __future__ import annotations

from pathlib import Path

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def reset_peak() -> bool:
    """Start the peak again from what is resident now; False where this system does not allow it."""
    try:
        _CLEAR_REFS.write_text("5")
        peak_bytes()
    except (OSError, LookupError):
        return False
    return True


def peak_bytes() -> int:
    """Return the most that was resident since the last reset.

    Raises:
        LookupError: this kernel does not say it.
    """
    return _bytes_of("VmHWM")


def file_bytes() -> int:
    """Return what of the resident memory are pages of files; 0 where the kernel does not say it."""
    try:
        return _bytes_of("RssFile")
    except (OSError, LookupError):
        return 0


def _bytes_of(name: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"no {name} in {_STATUS}")
