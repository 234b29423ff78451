"""Collectives between the ranks of one machine: measuring them, and the link they amount to.

Sizes are full buffers and bandwidths are bus bandwidths (nccl-tests): for n ranks, a buffer of S bytes and t seconds
all_reduce ``2(n-1)/n * S/t``; all_gather, reduce_scatter, all_to_all ``(n-1)/n * S/t``; p2p ``S/t``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..schema.cluster import CollectiveLatency, Link, LinkEfficiency
from ..schema.errors import ProfileError
from ..schema.profile import CollectiveOp, CollectivePoint
from ..schema.units import KIB, MIB

if TYPE_CHECKING:
    import torch

    from .timing import Bench

OPS: tuple[CollectiveOp, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p")
SIZES = (256 * KIB, 8 * MIB, 16 * KIB, 2 * MIB, 32 * MIB)
"""Bytes; a middle and a large one first, so that a slow machine has enough for a line."""


def measure_collectives(bench: Bench, sizes: Sequence[int] = SIZES) -> list[dict[str, Any]]:
    """Fields of CollectivePoint for each operation and size; ``time_s`` is None on a rank that had no partner (p2p).

    The functional forms are measured, which DTensor uses: their new output buffer is part of the time, as in training.
    """
    import torch.distributed as dist

    group_size = dist.get_world_size()
    points: list[dict[str, Any]] = []
    for i, size in enumerate(sizes):
        count = max(1, size // 4 // group_size) * group_size
        calls = _calls(bench.device, count)
        for op in OPS:
            if i >= 2 and not bench.has_time():
                return points
            seconds = bench.median_s(calls[op])
            paired = op != "p2p" or dist.get_rank() ^ 1 < group_size
            # one rank sends and then receives: a message takes half of it
            time_s = (seconds / 2 if op == "p2p" else seconds) if paired else None
            points.append({"op": op, "group_size": group_size, "size_bytes": 4 * count, "time_s": time_s})
    return points


def _calls(device: torch.device, count: int) -> dict[CollectiveOp, Callable[[], Any]]:
    import torch
    import torch.distributed as dist

    functional, wait = torch.ops._c10d_functional, torch.ops._c10d_functional.wait_tensor
    size, rank = dist.get_world_size(), dist.get_rank()
    world = dist.group.WORLD
    assert world is not None, "measured inside an initialised process group"
    group = world.group_name
    full, part = torch.zeros(count, device=device), torch.zeros(count // size, device=device)
    splits, partner = [count // size] * size, rank ^ 1

    def ping_pong() -> None:
        if partner >= size:
            return
        for sender in sorted((rank, partner)):
            if sender == rank:
                dist.send(full, partner)
            else:
                dist.recv(full, partner)

    return {
        "all_reduce": lambda: wait(functional.all_reduce(full, "sum", group)),
        "all_gather": lambda: wait(functional.all_gather_into_tensor(part, size, group)),
        "reduce_scatter": lambda: wait(functional.reduce_scatter_tensor(full, "sum", size, group)),
        "all_to_all": lambda: wait(functional.all_to_all_single(full, splits, splits, group)),
        "p2p": ping_pong,
    }


def bus_factor(op: CollectiveOp, group_size: int) -> float:
    """Bytes that cross a rank's link for each byte of the full buffer."""
    if op == "p2p":
        return 1.0
    return (2.0 if op == "all_reduce" else 1.0) * (group_size - 1) / group_size


def fit_line(sizes: Sequence[float], times: Sequence[float]) -> tuple[float, float]:
    """Latency (s) and rate (bytes/s) of ``t = latency + bytes / rate``: least squared relative error, neither negative.

    Relative, so that a small message counts as much as a large one. A latency that would be negative is 0; where the
    times do not grow with the size, the rate is that of the largest message.
    """
    size, time = np.asarray(sizes, dtype=float), np.asarray(times, dtype=float)
    rows = np.stack([1 / time, size / time], axis=1)
    scale = np.array([1, 1 / size.max()])
    latency, slope = np.linalg.lstsq(rows * scale, np.ones_like(time), rcond=None)[0] * scale
    if latency < 0:
        latency, slope = 0.0, rows[:, 1].sum() / (rows[:, 1] ** 2).sum()
    if slope <= 0:
        latency, slope = max(0.0, rows[:, 0].sum() / (rows[:, 0] ** 2).sum()), time[size.argmax()] / size.max()
    return float(latency), float(1 / slope)


def fit_link(points: Sequence[CollectivePoint], backend: Literal["nccl", "gloo"], source: str) -> Link:
    """The link of one level: the bandwidth of the best operation, the others as fractions of it, and the points themselves.

    The latency of a collective is that of all_reduce over all ranks; how it depends on their number was not measured.

    Raises:
        ProfileError: an operation was not measured.
    """
    lines: dict[str, tuple[float, float]] = {}
    for op in OPS:
        mine = [point for point in points if point.op == op]
        if not mine:
            raise ProfileError(f"the profile has no measurement of {op}", help="measure again with `--cluster local`")
        latency, rate = fit_line([point.size_bytes for point in mine], [point.time_s for point in mine])
        lines[op] = latency, rate * bus_factor(op, mine[0].group_size)
    best = max(bandwidth for _, bandwidth in lines.values())
    return Link(
        name=f"local-{backend}",
        kind="scale-up",
        title=f"{backend} between the ranks of this machine",
        bandwidth_bytes_per_s=best,
        latency_s=lines["p2p"][0],
        efficiency=LinkEfficiency(**{op: bandwidth / best for op, (_, bandwidth) in lines.items()}),
        collective_latency_s=CollectiveLatency(base=lines["all_reduce"][0], per_hop=0.0),
        measured=tuple(points),
        source=source,
    )


def unused_link(backend: Literal["nccl", "gloo"], memory_bandwidth: float) -> Link:
    """The link of a single rank, which sends nothing over it: a copy within its memory (read and write), no latency."""
    return Link(
        name=f"local-{backend}",
        kind="scale-up",
        title="one rank: nothing is sent",
        bandwidth_bytes_per_s=memory_bandwidth / 2,
        latency_s=0.0,
        efficiency=LinkEfficiency(p2p=1.0, all_reduce=1.0, all_gather=1.0, reduce_scatter=1.0, all_to_all=1.0),
        collective_latency_s=CollectiveLatency(base=0.0, per_hop=0.0),
        source="not measured: half of the memory bandwidth; one rank has no partner to measure with",
    )
