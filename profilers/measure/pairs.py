"""Bandwidth between every two ranks of a node and every two nodes, and which link is slower than the others."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from ...schema.profile_points import PairPoint
from ...schema.units import MIB, format_bytes
from .groups import tournament
from .links import expected_s

if TYPE_CHECKING:
    from .timing import Bench

MESSAGE_BYTES = (8 * MIB, 64 * MIB)


def rounds_of(num_nodes: int, ranks_per_node: int) -> list[list[tuple[int, int]]]:
    """Rounds of disjoint pairs of ranks: first counterparts of two nodes, all ranks of a node at once, then ranks of one node."""
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
    """Fields of PairPoint of every pair; a message there and back counts half."""
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
            if not bench.has_time(bench.point_s(2 * expected_s(size, known)), what):
                continue
            bench.say(what)
            mine = next((pair for pair in pairs if rank in pair), None)

            def there_and_back(mine: tuple[int, int] | None = mine, buffer: torch.Tensor = buffer) -> None:
                for sender in mine or ():
                    receiver = sum(mine or ()) - sender
                    dist.send(buffer, receiver) if rank == sender else dist.recv(buffer, sender)

            timing = bench.measure(there_and_back)
            taken_s = bench.agree(timing.time_s) / 2
            known = size, taken_s if known is None or known[0] != size else max(known[1], taken_s)
            if mine is not None:
                fields = {
                    "first_rank": mine[0],
                    "second_rank": mine[1],
                    "size_bytes": size,
                    "concurrent_pairs": len(pairs),
                }
                points.append({**fields, "time_s": timing.time_s / 2, "spread": timing.spread})
    return points


def node_matrix(
    points: Sequence[PairPoint], num_nodes: int, ranks_per_node: int
) -> tuple[tuple[float, ...], ...] | None:
    """Bytes/s between counterparts of each two nodes [N, N], the median over ranks at the largest size; None if one is missing."""
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
