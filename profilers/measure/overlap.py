"""What a product, a collective and copies cost one another when they run at once.

Each stream is made about as long as the others, so that they overlap for most of the time; what is recorded is
the seconds of each by itself and of all until the last one ends, as ``cost_models.hardware.streams`` describes them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import combinations
from math import log
from statistics import median
from typing import TYPE_CHECKING, Any

from ...schema.units import MIB, format_bytes
from .compute import DTYPE_BYTES, torch_dtype
from .links import expected_message_s

if TYPE_CHECKING:
    import torch

    from .timing import Bench, Points

CPU_SIZES = (8 * MIB, 2 * MIB, 32 * MIB)
GPU_SIZES = (64 * MIB, 256 * MIB, 16 * MIB)
CPU_MATMUL, GPU_MATMUL = (512, 512, 512), (4096, 4096, 4096)
SAMPLES = 5
_UNKNOWN_COPY_BYTES_PER_S = 1e10

Start = Callable[[], Callable[[], Any]]
"""Starts a stream and returns what waits for its end."""


def measure_overlap(bench: Bench, dtype: str, measured: Points) -> list[dict[str, Any]]:
    """Measure each set of streams of this machine for a few sizes; ``measured`` says what they take.

    Return fields of OverlapPoint.
    """
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
        if not bench.has_time(_all_sets_s(names, longest_s(measured, size, on_gpu=on_gpu)), what):
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


def longest_s(measured: Points, size: int, *, on_gpu: bool) -> float:
    """Expect the seconds of the longest stream of ``size`` bytes, from the nearest size that was measured."""
    known = [p for p in measured.get("collectives", ()) if p["op"] == "all_reduce" and p["time_s"]]
    known += [p for p in measured.get("host_copies", ()) if p["host_memory"] == "pinned" and p["time_s"]]
    if not known:
        return size / _UNKNOWN_COPY_BYTES_PER_S if on_gpu else expected_message_s(size, None)
    slowest = max(known, key=lambda p: (-abs(log(p["size_bytes"] / size)), p["time_s"]))
    return expected_message_s(size, (slowest["size_bytes"], slowest["time_s"]))


def _all_sets_s(names: list[str], stream_s: float) -> float:
    """Expect the seconds of measuring streams equally long: the longest to size the product, each by itself, and every set."""
    return (SAMPLES + 1) * stream_s * (1 + len(names) + sum(map(len, _sets(names))))


def _sets(streams: list[str]) -> list[tuple[str, ...]]:
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
    repeats = max(1, min(1000, round(bench.agree(longest_s) / max(bench.agree(bench.median_s(lambda: a @ b)), 1e-9))))

    def products() -> Callable[[], Any]:
        for _ in range(repeats):
            a @ b
        return lambda: None

    return {**starts, "compute": products}


def _copies(device: torch.device, size: int) -> dict[str, Start]:
    import torch

    host = [torch.ones(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    on_device = [torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2)]
    targets = {"to_device": (on_device[0], host[0]), "to_host": (host[1], on_device[1])}

    def start(name: str, stream: torch.cuda.Stream) -> Callable[[], Any]:
        target, source = targets[name]
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return stream.synchronize

    return {name: partial(start, name, torch.cuda.Stream(device)) for name in targets}
