"""The host: copies to and from the device, AdamW in its memory, its drives, and what streams that run at once cost one another.

Storage is measured past the page cache where the file system allows that: blocks written and read by a few threads. Of products,
collectives and copies each stream is made about as long as the others, so that they overlap for most of the time; what is recorded
is the seconds of each by itself and of all until the last one ends, as ``cost_models.hardware.streams`` describes them.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import combinations, product
from math import log
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from ...schema.errors import ConfigError
from ...schema.units import MIB, format_bytes
from .compute import DTYPE_BYTES, torch_dtype
from .links import expected_message_s

if TYPE_CHECKING:
    import torch

    from .timing import Bench, Points

COPY_BYTES = (64 * MIB, 512 * MIB, 1 * MIB)
ADAM_PARAMETERS = (2**22, 2**24, 2**26)

_ADAM_BYTES = 20
"""Of one parameter with its gradient and two states in fp32, and what the update needs besides."""

_CALLS = 6

_UNKNOWN_COPY_BYTES_PER_S, _UNKNOWN_ADAM_BYTES_PER_S = 1e9, 2e9
"""Before anything was measured."""

FILE_BYTES = (16 * MIB, 64 * MIB, 512 * MIB, 4096 * MIB)
BLOCK_BYTES = 4 * MIB

NUM_THREADS = 4
"""Blocks in flight of one rank: a single one does not fill an NVMe queue."""

_STORAGE_CALLS = 5

_UNKNOWN_BYTES_PER_S = 3e8
"""Of storage before anything was measured."""

CPU_SIZES, GPU_SIZES = (8 * MIB, 2 * MIB, 32 * MIB), (64 * MIB, 256 * MIB, 16 * MIB)
CPU_MATMUL, GPU_MATMUL = (512, 512, 512), (4096, 4096, 4096)
SAMPLES = 5
_UNKNOWN_DEVICE_COPY_BYTES_PER_S = 1e10


def measure_copies(bench: Bench, local_rank: int, ranks_per_node: int) -> list[dict[str, Any]]:
    """Measure copies in every direction and kind of memory, by all devices of the host at once and one: fields of HostCopyPoint."""
    points: list[dict[str, Any]] = []
    slowest_s_per_byte = 1 / _UNKNOWN_COPY_BYTES_PER_S
    for size, host_memory in product(COPY_BYTES, ("pinned", "pageable")):
        if not (bench.has_memory(2 * size) and bench.has_memory(2 * size, on_host=True)):
            continue
        calls = _copy_calls(bench.device, size, pinned=host_memory == "pinned")
        for devices, (direction, call) in product(dict.fromkeys((ranks_per_node, 1)), calls.items()):
            what = f"{direction} of {format_bytes(size)}, {host_memory}, {devices} at once"
            if bench.has_time(_CALLS * slowest_s_per_byte * size, what):
                measured, slowest_s = _measure_subset(bench, call, takes_part=devices > 1 or local_rank == 0)
                seen = slowest_s / size
                slowest_s_per_byte = max(slowest_s_per_byte, seen) if points else seen
                fields = {"direction": direction, "host_memory": host_memory, "size_bytes": size}
                points.append({**fields, "devices_at_once": devices, **measured})
    return points


def _measure_subset(bench: Bench, call: Callable[[], Any], *, takes_part: bool) -> tuple[dict[str, Any], float]:
    """Measure a call that only some ranks make; return this one's fields, and the seconds of the slowest rank."""
    timing = bench.measure(call if takes_part else lambda: None, calls=1)
    return {"time_s": timing.time_s if takes_part else None, "spread": timing.spread}, bench.agree(timing.time_s)


def _copy_calls(device: torch.device, size: int, *, pinned: bool) -> dict[str, Callable[[], Any]]:
    """Return calls that copy so many bytes in each direction, and in each direction at once on streams of their own."""
    import torch

    host, on_device = _buffers(device, size, pinned=pinned)
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


def _buffers(device: torch.device, size: int, *, pinned: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    import torch

    host = [torch.ones(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
    return host, [torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2)]


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
            measured, slowest_s = _measure_subset(bench, step, takes_part=ranks > 1 or local_rank == 0)
            parameter_s = slowest_s / number
            fields = {"num_parameters": number, "threads": torch.get_num_threads(), "ranks_at_once": ranks}
            points.append({**fields, **measured})
    return points


# --- storage ---------------------------------------------------------------------------------------------------------


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
            direct = _opens_directly(path)
            for operation, call in _storage_calls(path, size, direct=direct).items():
                bench.say(f"{operation} files of {format_bytes(size)}")
                timing = bench.measure(call, calls=1)
                slowest_s = max(slowest_s, bench.agree(timing.time_s))
                fields = {"operation": operation, "size_bytes": size, "block_bytes": BLOCK_BYTES, "direct": direct}
                points.append({**fields, "ranks_at_once": ranks_per_node, **timing._asdict()})
            byte_s = slowest_s / size
    finally:
        path.unlink(missing_ok=True)
    return points


def _opens_directly(path: Path) -> bool:
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

        def every_fourth(thread: int) -> None:
            for start in range(thread * BLOCK_BYTES, size, NUM_THREADS * BLOCK_BYTES):
                operation(handle, [buffers[thread]], start)

        try:
            with ThreadPoolExecutor(NUM_THREADS) as pool:
                list(pool.map(every_fourth, range(NUM_THREADS)))
            os.fsync(handle)
            if not direct:  # what was written must not be read from memory
                with contextlib.suppress(AttributeError, OSError):
                    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)

    return {"write": lambda: all_blocks(os.pwritev), "read": lambda: all_blocks(os.preadv)}


# --- streams at once -------------------------------------------------------------------------------------------------

Start = Callable[[], Callable[[], Any]]
"""Starts a stream and returns what waits for its end."""


def measure_overlap(bench: Bench, dtype: str, measured: Points) -> list[dict[str, Any]]:
    """Measure each set of streams of this machine for a few sizes; ``measured`` says what they take: fields of OverlapPoint."""
    import torch.distributed as dist

    on_gpu, world_size = bench.device.type == "cuda", dist.get_world_size()
    shape = GPU_MATMUL if on_gpu else CPU_MATMUL
    points: list[dict[str, Any]] = []
    for size in GPU_SIZES if on_gpu else CPU_SIZES:
        memory = 4 * size + DTYPE_BYTES[dtype] * (shape[0] * shape[2] + shape[1] * shape[2] + shape[0] * shape[1])
        if not bench.has_memory(memory):
            continue
        names = [*(["collective"] if world_size > 1 else []), *(["to_device", "to_host"] if on_gpu else []), "compute"]
        what = f"{' with '.join(names)} of {format_bytes(size)}"
        # The longest to size the product, each by itself, and every set.
        num_streams = 1 + len(names) + sum(map(len, _sets(names)))
        if not bench.has_time((SAMPLES + 1) * num_streams * _longest_s(measured, size, on_gpu=on_gpu), what):
            continue
        starts = _starts(bench, size, shape, dtype, with_collective=world_size > 1)
        isolated = {name: _seconds(bench, [start]) for name, start in starts.items()}
        for streams in _sets(list(starts)):
            if bench.remaining_s() <= 0:
                bench.leave_out(what, 1)
                return points
            together_s = _seconds(bench, [starts[name] for name in streams])
            sizes = {
                "collective_op": "all_reduce" if "collective" in streams else None,
                "collective_bytes": size if "collective" in streams else 0,
                "group_size": world_size if "collective" in streams else 1,
                "copy_bytes": size if {"to_device", "to_host"} & set(streams) else 0,
            }
            alone_s = [isolated[name] for name in streams]
            fields = {"streams": list(streams), "matmul": list(shape), "dtype": dtype, **sizes}
            points.append({**fields, "alone_s": alone_s, "together_s": together_s})
    return points


def _longest_s(measured: Points, size: int, *, on_gpu: bool) -> float:
    """Expect the seconds of the longest stream of ``size`` bytes, from the nearest size that was measured."""
    known = [p for p in measured.get("collectives", ()) if p["op"] == "all_reduce" and p["time_s"]]
    known += [p for p in measured.get("host_copies", ()) if p["host_memory"] == "pinned" and p["time_s"]]
    if not known:
        return size / _UNKNOWN_DEVICE_COPY_BYTES_PER_S if on_gpu else expected_message_s(size, None)
    slowest = max(known, key=lambda p: (-abs(log(p["size_bytes"] / size)), p["time_s"]))
    return expected_message_s(size, (slowest["size_bytes"], slowest["time_s"]))


def _sets(streams: Sequence[str]) -> list[tuple[str, ...]]:
    """Return every pair, then every larger set; pairs that hold the product first."""
    return [chosen for count in range(2, len(streams) + 1) for chosen in combinations(streams, count)]


def _seconds(bench: Bench, starts: list[Start]) -> float:
    """Return the median seconds from the start of some streams to the end of the last one."""
    samples = []
    for i in range(SAMPLES + 1):
        bench.synchronize()
        bench.agree(0.0)  # the ranks begin together
        begin = time.perf_counter()
        for wait in [start() for start in starts]:
            wait()
        bench.synchronize()
        if i:
            samples.append(time.perf_counter() - begin)
    return median(samples)


def _starts(
    bench: Bench, size: int, shape: tuple[int, int, int], dtype: str, *, with_collective: bool
) -> dict[str, Start]:
    """Make the streams: collective and copies are under way when the product begins, which a CPU runs in this very thread."""
    import torch
    import torch.distributed as dist

    starts: dict[str, Start] = {}
    longest_s = 0.0
    if with_collective:
        buffer = torch.zeros(size // 4, device=bench.device)
        starts["collective"] = lambda: dist.all_reduce(buffer, async_op=True).wait
        longest_s = _seconds(bench, [starts["collective"]])
    if bench.device.type == "cuda":
        starts |= _copies(bench.device, size)
        longest_s = max(longest_s, _seconds(bench, [starts["to_device"]]))
    m, n, k = shape
    a, b = (torch.randn(*dims, device=bench.device).to(torch_dtype(dtype)) for dims in ((m, k), (k, n)))
    repeats = max(
        1, min(1000, round(bench.agree(longest_s) / max(bench.agree(bench.measure(lambda: a @ b).time_s), 1e-9)))
    )

    def products() -> Callable[[], Any]:
        for _ in range(repeats):
            a @ b
        return lambda: None

    return {**starts, "compute": products}


def _copies(device: torch.device, size: int) -> dict[str, Start]:
    import torch

    host, on_device = _buffers(device, size, pinned=True)
    targets = {"to_device": (on_device[0], host[0]), "to_host": (host[1], on_device[1])}

    def start(name: str, stream: torch.cuda.Stream) -> Callable[[], Any]:
        target, source = targets[name]
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return stream.synchronize

    return {name: partial(start, name, torch.cuda.Stream(device)) for name in targets}
