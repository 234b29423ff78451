"""Rate of a file system, past the page cache where it allows that: blocks written and read by a few threads."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...schema.errors import ConfigError
from ...schema.units import MIB, format_bytes

if TYPE_CHECKING:
    from .timing import Bench

FILE_BYTES = (16 * MIB, 64 * MIB, 512 * MIB, 4096 * MIB)
BLOCK_BYTES = 4 * MIB
NUM_THREADS = 4
"""Blocks in flight of one rank: a single one does not fill an NVMe queue."""

_CALLS = 5
_UNKNOWN_BYTES_PER_S = 3e8
"""Before anything was measured."""


def check_folder(path: str) -> None:
    """Refuse what cannot be written to.

    Raises:
        ConfigError: no such folder, or no right to write there.
    """
    if not Path(path).is_dir():
        raise ConfigError(f"--nvme {path}: no such folder")
    if not os.access(path, os.W_OK):
        raise ConfigError(f"--nvme {path}: cannot write there")


def measure_storage(bench: Bench, folder: str, ranks_per_node: int) -> list[dict[str, Any]]:
    """Fields of StoragePoint, all ranks at once, each in a file of its own that is removed."""
    points: list[dict[str, Any]] = []
    path = Path(folder) / f".meshwright-{os.getpid()}"
    byte_s = 1 / _UNKNOWN_BYTES_PER_S
    try:
        for size in FILE_BYTES:
            room = bench.agree_least(shutil.disk_usage(folder).free / ranks_per_node / 2 - size)
            if room < 0 or not bench.has_time(2 * _CALLS * byte_s * size, f"files of {format_bytes(size)}"):
                continue
            slowest_s = 0.0
            direct = opens_directly(path)
            for operation, call in _calls(path, size, direct=direct).items():
                bench.say(f"{operation} files of {format_bytes(size)}")
                timing = bench.measure(call, calls=1)
                slowest_s = max(slowest_s, bench.agree(timing.time_s))
                fields = {"operation": operation, "size_bytes": size, "block_bytes": BLOCK_BYTES, "direct": direct}
                points.append({**fields, "ranks_at_once": ranks_per_node, **timing.fields()})
            byte_s = slowest_s / size
    finally:
        path.unlink(missing_ok=True)
    return points


def opens_directly(path: Path) -> bool:
    """Whether the file system takes O_DIRECT; tmpfs does not."""
    flag = getattr(os, "O_DIRECT", 0)
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | flag, 0o600))
    except OSError:
        return False
    return bool(flag)


def _calls(path: Path, size: int, *, direct: bool) -> dict[str, Callable[[], Any]]:
    """Write the whole file, and read it; memory of mmap is aligned to pages, which direct I/O asks for."""
    buffers = [mmap.mmap(-1, BLOCK_BYTES) for _ in range(NUM_THREADS)]
    for buffer in buffers:
        buffer.write(os.urandom(4096) * (BLOCK_BYTES // 4096))  # zeros could be compressed or not stored at all
    flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0)

    def all_blocks(operation: Callable[[int, list[mmap.mmap], int], int]) -> None:
        handle = os.open(path, flags, 0o600)
        try:
            with ThreadPoolExecutor(NUM_THREADS) as pool:
                list(
                    pool.map(
                        lambda thread: _blocks(handle, operation, buffers[thread], thread, size), range(NUM_THREADS)
                    )
                )
            os.fsync(handle)
            if not direct:
                _forget(handle)
        finally:
            os.close(handle)

    return {"write": lambda: all_blocks(os.pwritev), "read": lambda: all_blocks(os.preadv)}


def _blocks(
    handle: int, operation: Callable[[int, list[mmap.mmap], int], int], buffer: mmap.mmap, thread: int, size: int
) -> None:
    for start in range(thread * BLOCK_BYTES, size, NUM_THREADS * BLOCK_BYTES):
        operation(handle, [buffer], start)


def _forget(handle: int) -> None:
    """Drop the file's pages, so that the next read comes from the device."""
    with contextlib.suppress(AttributeError, OSError):
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
