"""Collectives and messages between ranks: the groups to measure, the measurements, and the link they amount to.

Ranks are numbered node by node, G on each of N nodes. A mesh axis of k ranks outside s ranks of inner axes is the ranks
``r, r + s, .., r + (k - 1) s``: inside a node where k s divides G, between counterparts of all nodes for s = G, k = N.

Sizes are full buffers and bandwidths are bus bandwidths (nccl-tests): for n ranks, a buffer of S bytes and t seconds
all_reduce ``2(n-1)/n * S/t``; all_gather, reduce_scatter, all_to_all ``(n-1)/n * S/t``; p2p ``S/t``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from ...schema.cluster import CollectiveLatency, Link, LinkEfficiency
from ...schema.errors import ProfileError
from ...schema.profile import CollectiveOp, CollectivePoint, PairPoint
from ...schema.units import KIB, MIB, format_bytes

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from .timing import Bench


class GroupAxis(NamedTuple):
    """Ranks of a mesh axis: ``size`` ranks at a distance of ``stride``; isolated: only the first such group speaks."""

    size: int
    stride: int
    is_isolated: bool = False


@dataclass(frozen=True)
class RankGroup:
    """One process group of an axis, as this rank sees it.

    Attributes:
        ranks: global ranks of the group this rank would be in; ``member``: whether it takes part.
        concurrent: how many groups do the same at once.
    """

    process_group: ProcessGroup
    ranks: tuple[int, ...]
    rank: int
    member: bool
    stride: int
    num_nodes: int
    concurrent: int
    is_world: bool = False

    @property
    def size(self) -> int:
        """Return the number of ranks of the group."""
        return len(self.ranks)


def axes_of(num_nodes: int, ranks_per_node: int) -> list[GroupAxis]:
    """Return the axes to measure besides the group of all ranks, most informative first.

    The entire node, counterparts across nodes (isolated, then all at once: what a shared NIC costs), then the parts of a node as
    neighbours and at a distance, and those isolated (what they cost one another).
    """
    size = ranks_per_node
    nodes = [(size, 1, False), (num_nodes, size, False), (num_nodes, size, True), (size, 1, True)]
    part_sizes = [k for k in range(size - 1, 1, -1) if size % k == 0]
    parts = [(k, 1, False) for k in part_sizes] + [(k, size // k, False) for k in part_sizes]
    parts += [(k, 1, True) for k in part_sizes]
    return [GroupAxis(*axis) for axis in ((*nodes, *parts) if num_nodes > 1 and size > 1 else parts)]


def axis_groups(axis: GroupAxis, world_size: int) -> list[tuple[int, ...]]:
    """Return the ranks of every group of an axis; they are disjoint and hold all ranks."""
    block = axis.size * axis.stride
    starts = (first + inner for first in range(0, world_size, block) for inner in range(axis.stride))
    return [tuple(range(start, start + block, axis.stride)) for start in starts]


def world_group(num_nodes: int) -> RankGroup:
    """Return the group of all ranks."""
    import torch.distributed as dist

    world, size = dist.group.WORLD, dist.get_world_size()
    assert world is not None, "measured inside an initialised process group"
    return RankGroup(world, tuple(range(size)), dist.get_rank(), True, 1, num_nodes, 1, is_world=True)


def groups_of(axes: list[GroupAxis], num_nodes: int, ranks_per_node: int) -> Iterator[RankGroup]:
    """Yield the group of each axis that this rank is in; every rank iterates. Groups of the same ranks are made once."""
    import torch.distributed as dist

    made: dict[tuple[int, int], Any] = {}
    world_size, rank = num_nodes * ranks_per_node, dist.get_rank()
    for axis in axes:
        groups = axis_groups(axis, world_size)
        local_ranks = next(ranks for ranks in groups if rank in ranks)
        if axis[:2] not in made:
            made[axis[:2]] = dist.new_subgroups_by_enumeration([list(ranks) for ranks in groups])[0]
        yield RankGroup(
            process_group=made[axis[:2]],
            ranks=local_ranks,
            rank=local_ranks.index(rank),
            member=not axis.is_isolated or local_ranks == groups[0],
            stride=axis.stride,
            num_nodes=len({r // ranks_per_node for r in local_ranks}),
            concurrent=1 if axis.is_isolated else len(groups),
        )


def tournament(num_players: int) -> list[list[tuple[int, int]]]:
    """Return rounds of disjoint pairs in which every two meet once (the circle method); with an odd number one rests in each."""
    players: list[int | None] = [*range(num_players), *([None] if num_players % 2 else [])]
    rounds = []
    for _ in range(len(players) - 1):
        half = len(players) // 2
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        players = [players[0], players[-1], *players[1:-1]]
    return rounds


OPS: tuple[CollectiveOp, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p")

SIZES = (256 * KIB, 8 * MIB, 16 * KIB, 2 * MIB, 32 * MIB)
"""Bytes; a middle and a large one first, so that a slow machine has enough for a line."""

ALL_SIZES = (*SIZES, KIB, 128 * MIB, 64 * KIB, 512 * MIB, 4 * KIB, 1 * MIB, 256 * MIB)
"""From 1 KiB to where curves are straight; two large ones pin the tail, fits below 16 MiB are wrong above it."""

_BUFFERS = 3
"""Full buffers that a collective holds at most: input, output, and one of the library's."""

UNKNOWN_LATENCY_S, UNKNOWN_BYTES_PER_S = 1e-3, 5e8
"""Of a link before anything was measured on it: processes of one machine over sockets."""


def measure_collectives(bench: Bench, group: RankGroup, sizes: Sequence[int] = SIZES) -> list[dict[str, Any]]:
    """Measure each operation and size; return fields of CollectivePoint, ``time_s`` None on a rank that took no part.

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
        shape = {"group_size": group.size, "stride": group.stride, "num_nodes": group.num_nodes}
        for op in OPS:
            what = f"{op} of {format_bytes(size)} over {group.size} ranks"
            is_needed = group.is_world and i < 2
            if not bench.has_time(bench.point_s(expected_message_s(size, known.get(op))), what) and not is_needed:
                continue
            timing = bench.measure(calls[op])
            took_part = group.member and (op != "p2p" or group.rank ^ 1 < group.size)
            # one rank sends and then receives: a message takes half of it
            seconds = timing.time_s / 2 if op == "p2p" else timing.time_s
            measured = {"time_s": seconds if took_part else None, "spread": timing.spread}
            points.append(
                {"op": op, "size_bytes": 4 * count, **shape, "concurrent_groups": group.concurrent, **measured}
            )
            if size >= known.get(op, (0, 0.0))[0]:
                known[op] = size, bench.agree(timing.time_s)
    return points


def expected_message_s(size: int, known: tuple[int, float] | None) -> float:
    """Expect the seconds of a message from one of another size: no less for a smaller one, in proportion for a larger one."""
    if known is None:
        return UNKNOWN_LATENCY_S + size / UNKNOWN_BYTES_PER_S
    return known[1] * max(1.0, size / known[0])


def _calls(device: torch.device, count: int, group: RankGroup) -> dict[CollectiveOp, Callable[[], Any]]:
    import torch
    import torch.distributed as dist

    if not group.member:
        return dict.fromkeys(OPS, lambda: None)
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


def bus_factor(op: CollectiveOp, group_size: int) -> float:
    """Return the bytes that cross a rank's link for each byte of the full buffer."""
    if op == "p2p":
        return 1.0
    return (2.0 if op == "all_reduce" else 1.0) * (group_size - 1) / group_size


def fit_line(sizes: Sequence[float], times: Sequence[float]) -> tuple[float, float]:
    """Fit latency (s) and rate (bytes/s) of ``t = latency + bytes / rate``: least squared relative error, neither negative.

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


def fit_lines(points: Sequence[CollectivePoint]) -> dict[str, tuple[float, float]]:
    """Return latency (s) and bus bandwidth (bytes/s) of each operation that has points, all of groups of one size."""
    lines = {}
    for op in OPS:
        if same_op := [point for point in points if point.op == op]:
            latency, rate = fit_line([point.size_bytes for point in same_op], [point.time_s for point in same_op])
            lines[op] = latency, rate * bus_factor(op, same_op[0].group_size)
    return lines


def fit_link(points: Sequence[CollectivePoint], backend: Literal["nccl", "gloo"], source: str) -> Link:
    """Return the link of one level: the bandwidth of the best operation, the others as fractions of it, and the points themselves.

    The latency of a collective is that of all_reduce over all ranks; how it depends on their number was not measured.
    """
    lines = fit_lines(points)
    if missing := [op for op in OPS if op not in lines]:
        raise ProfileError(
            f"the profile has no measurement of {missing[0]}", help="measure again with `--cluster local`"
        )
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
    """Return the link of a single rank, which sends nothing over it: a copy within its memory (read and write), no latency."""
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


MESSAGE_BYTES = (8 * MIB, 64 * MIB)


def rounds_of(num_nodes: int, ranks_per_node: int) -> list[list[tuple[int, int]]]:
    """Return rounds of disjoint pairs: first counterparts of two nodes, all ranks of a node at once, then ranks of one node."""
    between = [
        [(a * ranks_per_node + i, b * ranks_per_node + i) for a, b in pairs for i in range(ranks_per_node)]
        for pairs in tournament(num_nodes)
    ]
    inside = [
        [(node * ranks_per_node + a, node * ranks_per_node + b) for a, b in pairs for node in range(num_nodes)]
        for pairs in tournament(ranks_per_node)
    ]
    return [*between, *inside]


def measure_pairs(bench: Bench, num_nodes: int, ranks_per_node: int) -> list[dict[str, Any]]:
    """Measure every pair; a message there and back counts half; return fields of PairPoint."""
    import torch
    import torch.distributed as dist

    rank, points = dist.get_rank(), []
    known: tuple[int, float] | None = None
    for size in MESSAGE_BYTES:
        if not bench.has_memory(2 * size):
            break
        buffer = torch.zeros(size // 4, device=bench.device)
        for pairs in rounds_of(num_nodes, ranks_per_node):
            what = f"{format_bytes(size)} between {len(pairs)} pairs of ranks"
            if not bench.has_time(bench.point_s(2 * expected_message_s(size, known)), what):
                continue
            pair = next((pair for pair in pairs if rank in pair), None)

            def round_trip(pair: tuple[int, int] | None = pair, buffer: torch.Tensor = buffer) -> None:
                for sender in pair or ():
                    receiver = sum(pair or ()) - sender
                    dist.send(buffer, receiver) if rank == sender else dist.recv(buffer, sender)

            timing = bench.measure(round_trip)
            taken_s = bench.agree(timing.time_s) / 2
            known = size, taken_s if known is None or known[0] != size else max(known[1], taken_s)
            if pair is not None:
                fields = {"first_rank": pair[0], "second_rank": pair[1], "size_bytes": size}
                timed = {"time_s": timing.time_s / 2, "spread": timing.spread}
                points.append({**fields, "concurrent_pairs": len(pairs), **timed})
    return points


def node_matrix(
    points: Sequence[PairPoint], num_nodes: int, ranks_per_node: int
) -> tuple[tuple[float, ...], ...] | None:
    """Return the bytes/s between counterparts of each two nodes [N, N], at the largest size; None if one is missing."""
    rates: dict[tuple[int, int], dict[int, list[float]]] = {}
    for point in points:
        nodes = point.first_rank // ranks_per_node, point.second_rank // ranks_per_node
        if nodes[0] != nodes[1]:
            rates.setdefault(nodes, {}).setdefault(point.size_bytes, []).append(point.size_bytes / point.time_s)
    if num_nodes < 2 or len(rates) < num_nodes * (num_nodes - 1) // 2:
        return None
    best = {nodes: median(by_size[max(by_size)]) for nodes, by_size in rates.items()}
    everyone = range(num_nodes)
    return tuple(tuple(best.get((min(a, b), max(a, b)), 0.0) for b in everyone) for a in everyone)
