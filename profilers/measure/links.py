"""Collectives between the ranks of one machine: measuring them, and the link they amount to.

Sizes are full buffers and bandwidths are bus bandwidths (nccl-tests): for n ranks, a buffer of S bytes and t seconds
all_reduce ``2(n-1)/n * S/t``; all_gather, reduce_scatter, all_to_all ``(n-1)/n * S/t``; p2p ``S/t``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ...schema.cluster import CollectiveLatency, Link, LinkEfficiency
from ...schema.errors import ProfileError
from ...schema.profile import CollectiveOp, CollectivePoint
from ...schema.units import KIB, MIB, format_bytes

if TYPE_CHECKING:
    import torch

    from .groups import Group
    from .timing import Bench

OPS: tuple[CollectiveOp, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p")
SIZES = (256 * KIB, 8 * MIB, 16 * KIB, 2 * MIB, 32 * MIB)
"""Bytes; a middle and a large one first, so that a slow machine has enough for a line."""

ALL_SIZES = (*SIZES, KIB, 128 * MIB, 64 * KIB, 512 * MIB, 4 * KIB, 1 * MIB, 256 * MIB)
"""From 1 KiB to where curves are straight; two large ones pin the tail, fits below 16 MiB are wrong above it."""

_BUFFERS = 3
"""Full buffers that a collective holds at most: input, output, and one of the library's."""

UNKNOWN_LATENCY_S, UNKNOWN_BYTES_PER_S = 1e-3, 5e8
"""Of a link before anything was measured on it: processes of one machine over sockets."""


def measure_collectives(bench: Bench, group: Group, sizes: Sequence[int] = SIZES) -> list[dict[str, Any]]:
    """Fields of CollectivePoint for each operation and size; ``time_s`` is None on a rank that took no part.

    The functional forms are measured, which DTensor uses: their new output buffer is part of the time, as in training. Two sizes
    of each operation are measured in any case in the group of all ranks; of a larger size only what fits into time and memory.
    """
    points: list[dict[str, Any]] = []
    known: dict[CollectiveOp, tuple[int, float]] = {}
    for i, size in enumerate(sizes):
        count = max(1, size // 4 // group.size) * group.size
        if not bench.has_memory(_BUFFERS * 4 * count):
            continue
        calls = _calls(bench.device, count, group)
        for op in OPS:
            what = f"{op} of {format_bytes(size)} over {group.size} ranks"
            is_needed = group.is_world and i < 2
            if not bench.has_time(bench.point_s(expected_s(size, known.get(op))), what) and not is_needed:
                continue
            bench.say(what)
            timing = bench.measure(calls[op])
            took_part = group.member and (op != "p2p" or group.rank ^ 1 < group.size)
            # one rank sends and then receives: a message takes half of it
            seconds = timing.time_s / 2 if op == "p2p" else timing.time_s
            measured = {"time_s": seconds if took_part else None, "spread": timing.spread}
            points.append({"op": op, "size_bytes": 4 * count, **group.fields(), **measured})
            if size >= known.get(op, (0, 0.0))[0]:
                known[op] = size, bench.agree(timing.time_s)
    return points


def expected_s(size: int, known: tuple[int, float] | None) -> float:
    """Seconds of a message of ``size`` bytes, from one of another: no less for a smaller one, in proportion for a larger one."""
    if known is None:
        return UNKNOWN_LATENCY_S + size / UNKNOWN_BYTES_PER_S
    return known[1] * max(1.0, size / known[0])


def _calls(device: torch.device, count: int, group: Group) -> dict[CollectiveOp, Callable[[], Any]]:
    import torch
    import torch.distributed as dist

    if not group.member:
        return dict.fromkeys(OPS, _nothing)
    functional, wait = torch.ops._c10d_functional, torch.ops._c10d_functional.wait_tensor
    size, name = group.size, group.process_group.group_name
    full, part = torch.zeros(count, device=device), torch.zeros(count // size, device=device)
    splits, partner = [count // size] * size, group.rank ^ 1

    def ping_pong() -> None:
        if partner >= size:
            return
        for sender in sorted((group.rank, partner)):
            if sender == group.rank:
                dist.send(full, group.ranks[partner], group.process_group)
            else:
                dist.recv(full, group.ranks[partner], group.process_group)

    return {
        "all_reduce": lambda: wait(functional.all_reduce(full, "sum", name)),
        "all_gather": lambda: wait(functional.all_gather_into_tensor(part, size, name)),
        "reduce_scatter": lambda: wait(functional.reduce_scatter_tensor(full, "sum", size, name)),
        "all_to_all": lambda: wait(functional.all_to_all_single(full, splits, splits, name)),
        "p2p": ping_pong,
    }


def _nothing() -> None:
    """What ranks outside of the group do."""


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
