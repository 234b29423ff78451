"""The host and its drives: copies to and from the device, AdamW of parameters in host memory, and the rate of a file system.

Storage is measured past the page cache where the file system allows that: blocks written and read by a few threads.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ...schema.errors import ConfigError
from ...schema.units import MIB, format_bytes

if TYPE_CHECKING:
    import torch

    from .timing import Bench


Copy = Literal["to_device", "to_host", "both"]
COPY_BYTES = (64 * MIB, 512 * MIB, 1 * MIB)
ADAM_PARAMETERS = (2**22, 2**24, 2**26)

_ADAM_BYTES = 20
"""Of one parameter with its gradient and two states in fp32, and what the update needs besides."""

_CALLS = 6

_UNKNOWN_COPY_BYTES_PER_S, _UNKNOWN_ADAM_BYTES_PER_S = 1e9, 2e9
"""Before anything was measured."""


def measure_copies(bench: Bench, local_rank: int, ranks_per_node: int) -> list[dict[str, Any]]:
    """Measure copies in every direction and kind of memory, all devices of the host at once and one.

    Return fields of HostCopyPoint.
    """
    points: list[dict[str, Any]] = []
    slowest_s_per_byte = 1 / _UNKNOWN_COPY_BYTES_PER_S
    for size in COPY_BYTES:
        for host_memory in ("pinned", "pageable"):
            if not (bench.has_memory(2 * size) and bench.has_memory(2 * size, on_host=True)):
                continue
            calls = copy_calls(bench.device, size, pinned=host_memory == "pinned")
            for devices in dict.fromkeys((ranks_per_node, 1)):
                for direction, call in calls.items():
                    what = f"{direction} of {format_bytes(size)}, {host_memory}, {devices} at once"
                    if not bench.has_time(_CALLS * slowest_s_per_byte * size, what):
                        continue
                    bench.say(what)
                    takes_part = devices > 1 or local_rank == 0
                    timing = bench.measure(call if takes_part else _nothing, calls=1)
                    seen = bench.agree(timing.time_s) / size
                    slowest_s_per_byte = max(slowest_s_per_byte, seen) if points else seen
                    fields = {"direction": direction, "host_memory": host_memory, "size_bytes": size}
                    time_s = timing.time_s if takes_part else None
                    points.append({**fields, "devices_at_once": devices, "time_s": time_s, "spread": timing.spread})
    return points


def copy_calls(device: torch.device, size: int, *, pinned: bool) -> dict[Copy, Callable[[], Any]]:
    """Return calls that copy so many bytes in each direction, and in each direction at once on streams of their own."""
    import torch

    host = [torch.ones(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
    on_device = [torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]

    def both() -> None:
        current = torch.cuda.current_stream(device)
        for stream in streams:
            stream.wait_stream(current)
        with torch.cuda.stream(streams[0]):
            on_device[0].copy_(host[0], non_blocking=pinned)
        with torch.cuda.stream(streams[1]):
            host[1].copy_(on_device[1], non_blocking=pinned)
        for stream in streams:
            current.wait_stream(stream)

    return {
        "to_device": lambda: on_device[0].copy_(host[0], non_blocking=pinned),
        "to_host": lambda: host[1].copy_(on_device[1], non_blocking=pinned),
        "both": both,
    }


def measure_cpu_adam(bench: Bench, local_rank: int, ranks_per_node: int) -> list[dict[str, Any]]:
    """Measure torch's fused AdamW in fp32 on the host, by all ranks of a node at once and by one; return fields of CpuAdamPoint."""
    import torch

    points: list[dict[str, Any]] = []
    parameter_s = _ADAM_BYTES / _UNKNOWN_ADAM_BYTES_PER_S
    for number in ADAM_PARAMETERS:
        if not bench.has_memory(_ADAM_BYTES * number, on_host=True):
            break
        made_s = _ADAM_BYTES * number / _UNKNOWN_ADAM_BYTES_PER_S
        what = f"AdamW of {number} parameters"
        if not bench.has_time(made_s + _CALLS * parameter_s * number, what):
            continue
        parameter = torch.nn.Parameter(torch.ones(number))
        parameter.grad = torch.ones(number)
        optimizer = torch.optim.AdamW([parameter], lr=1e-4, fused=True)
        step = torch.no_grad()(optimizer.step)
        for ranks in dict.fromkeys((ranks_per_node, 1)):
            if ranks != ranks_per_node and not bench.has_time(_CALLS * parameter_s * number, f"{what} by one rank"):
                continue
            bench.say(what)
            takes_part = ranks > 1 or local_rank == 0
            timing = bench.measure(step if takes_part else _nothing, calls=1)
            parameter_s = bench.agree(timing.time_s) / number
            fields = {"num_parameters": number, "threads": torch.get_num_threads(), "ranks_at_once": ranks}
            points.append({**fields, "time_s": timing.time_s if takes_part else None, "spread": timing.spread})
    return points


def _nothing() -> None:
    """Take no part in a measurement of others."""


FILE_BYTES = (16 * MIB, 64 * MIB, 512 * MIB, 4096 * MIB)
BLOCK_BYTES = 4 * MIB

NUM_THREADS = 4
"""Blocks in flight of one rank: a single one does not fill an NVMe queue."""

_STORAGE_CALLS = 5

_UNKNOWN_BYTES_PER_S = 3e8
"""Before anything was measured."""


def check_folder(path: str) -> None:
    """Refuse what cannot be written to."""
    if not Path(path).is_dir():
        raise ConfigError(f"--nvme {path}: no such folder")
    if not os.access(path, os.W_OK):
        raise ConfigError(f"--nvme {path}: cannot write there")


def measure_storage(bench: Bench, folder: str, ranks_per_node: int) -> list[dict[str, Any]]:
    """Measure storage, all ranks at once, each in a file of its own that is removed; return fields of StoragePoint."""
    points: list[dict[str, Any]] = []
    path = Path(folder) / f".meshwright-{os.getpid()}"
    byte_s = 1 / _UNKNOWN_BYTES_PER_S
    try:
        for size in FILE_BYTES:
            room = bench.agree_min(shutil.disk_usage(folder).free / ranks_per_node / 2 - size)
            if room < 0 or not bench.has_time(2 * _STORAGE_CALLS * byte_s * size, f"files of {format_bytes(size)}"):
                continue
            slowest_s = 0.0
            direct = opens_directly(path)
            for operation, call in _storage_calls(path, size, direct=direct).items():
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
    """Tell whether the file system takes O_DIRECT; tmpfs does not."""
    flag = getattr(os, "O_DIRECT", 0)
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | flag, 0o600))
    except OSError:
        return False
    return bool(flag)


def _storage_calls(path: Path, size: int, *, direct: bool) -> dict[str, Callable[[], Any]]:
    """Return calls that write the entire file, and read it; memory of mmap is aligned to pages, which direct I/O asks for."""
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
    with contextlib.suppress(AttributeError, OSError):
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
