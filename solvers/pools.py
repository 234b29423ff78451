"""Which copies of models share devices, on how many, and what lies on the hosts between its calls: post-training, exactly.

Sets
    a            copies of models
    q            calls, of the copy a(q), at the level l(q) of the step; a level waits for the one before it
    b            pools of a partition of the copies
    n            sizes: numbers of devices
Data
    SECONDS[q,n], LIVE[q,n]    of a call on n devices, and the bytes of a device while it runs; infinite where nothing fits
    STATE[a,n], MOVE[a,n]      bytes of a device that the copy needs between its calls, seconds to bring them to the host or back
    SEND[n,n']                 of new weights, from the copy that is updated to the one that generates
    BUDGET, HOST, N            bytes of a device, of the host for a device, devices
    FETCHES                    equal parts of a step's samples, each passed on to the next level as soon as it is there
    AHEAD                      steps by which weights that generate may be behind
Variables
    partition, n[b], offloaded[a]
Objective
    (O)  min  T = max(max_b busy[b], path / (1 + AHEAD))
    busy[b] = sum over calls of b and moves
    path    = sum over levels of the longest pool of that level / FETCHES + (1 - 1 / FETCHES) max_b (calls and moves of b):
              the first part passes all levels, and the busiest pool then does the others
Constraints
    (C1) devices: sum_b n[b] <= N
    (C2) memory: LIVE[q,n] + sum of STATE[a] over the others of b that stay <= BUDGET;  sum of STATE[a] over offloaded <= HOST
    (C3) same weights: without AHEAD a step waits for its entire path, new weights are sent before it generates
    (C4) rate: SECONDS of generation are those of all tokens that are generated for the samples of a step

Branch and bound (branch_and_bound.py): a node is a partition with the sizes of its first pools; the others take at least what they
take on all devices that remain, level by level.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..schema.units import FloatArray
from .branch_and_bound import Answer, Clock, Leaf, Node, Search, Step, Stop

Partition = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class PoolsInstance:
    """Copies, their calls and costs.

    Attributes:
        copy_of, level_of: of each call [Q].
        sizes: of pools, ascending [S].
        seconds, live_bytes: of calls [Q, S]; state_bytes, move_s: of copies [A, S].
        send_s: [S, S] by the sizes of the sender's and the generator's pools; sender, generator: which copies they are.
        fetches: FETCHES; ahead: AHEAD.
        shares: True: the generator is with the sender; False: it is not; None: either.
    """

    copy_of: tuple[int, ...]
    level_of: tuple[int, ...]
    sizes: tuple[int, ...]
    seconds: FloatArray
    live_bytes: FloatArray
    state_bytes: FloatArray
    move_s: FloatArray
    send_s: FloatArray
    budget_bytes: float
    host_bytes: float
    num_devices: int
    ahead: float = 0.0
    fetches: int = 1
    sender: int = 1
    generator: int = 0
    shares: bool | None = None

    @property
    def num_copies(self) -> int:
        """Return the copies of models."""
        return len(self.state_bytes)

    @property
    def num_levels(self) -> int:
        """Return the levels of a step."""
        return max(self.level_of) + 1


class PoolCosts(NamedTuple):
    """A pool of a size: seconds by level [L], and the copies that are offloaded."""

    level_s: tuple[float, ...]
    offloaded: frozenset[int]


class PlacedPools(NamedTuple):
    """An answer: pools with their sizes (indices into the instance's), and what is offloaded."""

    partition: Partition
    size_idxs: tuple[int, ...]
    offloaded: frozenset[int]


@dataclass(frozen=True)
class _Open:
    partition: Partition
    size_idxs: tuple[int, ...]


def partitions(count: int) -> Iterator[Partition]:
    """Yield every partition of 0..count-1."""
    if count == 0:
        yield ()
        return
    last = count - 1
    for smaller in partitions(last):
        for idx, block in enumerate(smaller):
            yield (*smaller[:idx], (*block, last), *smaller[idx + 1 :])
        yield (*smaller, (last,))


class PoolsProblem:
    """The problem of the search; see the module."""

    def __init__(self, instance: PoolsInstance, chosen: Sequence[Partition] | None = None) -> None:
        """Prepare costs of pools; ``chosen``: partitions that count, all where it is None."""
        self.instance = instance
        every = partitions(instance.num_copies) if chosen is None else chosen
        self.partitions = [self._ordered(partition) for partition in every if self._is_allowed(partition)]

    def _is_allowed(self, partition: Partition) -> bool:
        i = self.instance
        shares = any(i.generator in block and i.sender in block for block in partition)
        return i.shares is None or shares == i.shares

    def _ordered(self, partition: Partition) -> Partition:
        """Put pools first that take longest on all devices: their sizes decide most."""
        last = len(self.instance.sizes) - 1
        return tuple(sorted(partition, key=lambda block: (-min(sum(self._shortest(block, last)), 1e300), block)))

    @functools.cached_property
    def _costs(self) -> dict[tuple[tuple[int, ...], int], PoolCosts]:
        return {}

    def costs(self, block: tuple[int, ...], size: int) -> PoolCosts:
        """Return the seconds by level of copies that share a pool of a size, without the sending of weights (C2)."""
        if (block, size) not in self._costs:
            self._costs[block, size] = pool_costs(self.instance, block, size)
        return self._costs[block, size]

    @functools.cached_property
    def _shortest_known(self) -> dict[tuple[tuple[int, ...], int], tuple[float, ...]]:
        return {}

    def _shortest(self, block: tuple[int, ...], size: int) -> tuple[float, ...]:
        """Return the least seconds of each level over sizes up to one, and of all levels together."""
        if (block, size) not in self._shortest_known:
            here = self.costs(block, size).level_s
            every = (*here, sum(here))
            if size:
                every = tuple(min(a, b) for a, b in zip(every, self._shortest(block, size - 1), strict=True))
            self._shortest_known[block, size] = every
        return self._shortest_known[block, size]

    def roots(self) -> Step[_Open, PlacedPools]:
        """Return a node for each partition."""
        return Step(nodes=[self._node(partition, ()) for partition in self.partitions])

    def _node(self, partition: Partition, size_idxs: tuple[int, ...]) -> Node[_Open]:
        return Node(
            self.bound(partition, size_idxs), _Open(partition, size_idxs), (len(partition), partition, size_idxs)
        )

    def bound(self, partition: Partition, size_idxs: tuple[int, ...]) -> float:
        """Return what no sizes of the other pools are below."""
        i, assigned = self.instance, len(size_idxs)
        room = i.num_devices - sum(i.sizes[idx] for idx in size_idxs)
        rest = partition[assigned:]
        room_of_one = room - (len(rest) - 1) * i.sizes[0]
        if rest and room_of_one < i.sizes[0]:
            return math.inf
        largest = max((idx for idx, size in enumerate(i.sizes) if size <= room_of_one), default=0)
        rows = [self.costs(block, idx).level_s for block, idx in zip(partition, size_idxs, strict=False)]
        totals = [sum(row) for row in rows]
        for block in rest:
            *levels, total = self._shortest(block, largest)
            rows.append(tuple(levels))
            totals.append(total)
        send_s = self._send_s(partition, size_idxs)
        path_s = send_s + passed_s(i, np.array(rows), np.array(totals)) if rows else math.inf
        return max(path_s / (1 + i.ahead), *totals) if rows else math.inf

    def _send_s(self, partition: Partition, size_idxs: tuple[int, ...]) -> float:
        """Return the seconds of sending, or their least where sizes are open."""
        i = self.instance
        of = {copy: idx for idx, block in enumerate(partition) for copy in block}
        rows = [size_idxs[of[copy]] if of[copy] < len(size_idxs) else None for copy in (i.sender, i.generator)]
        table = i.send_s if rows[0] is None else i.send_s[rows[0] : rows[0] + 1]
        table = table if rows[1] is None else table[:, rows[1] : rows[1] + 1]
        return float(table.min())

    def expand(self, node: Node[_Open], incumbent: float) -> Step[_Open, PlacedPools]:
        """Give the next pool each size that leaves room for the others."""
        i, state = self.instance, node.state
        rest = len(state.partition) - len(state.size_idxs) - 1
        room = i.num_devices - sum(i.sizes[idx] for idx in state.size_idxs) - rest * i.sizes[0]
        nodes: list[Node[_Open]] = []
        leaves: list[Leaf[PlacedPools]] = []
        for idx, size in enumerate(i.sizes):
            if size > room:  # (C1)
                break
            size_idxs = (*state.size_idxs, idx)
            if rest:
                child = self._node(state.partition, size_idxs)
                if child.bound < incumbent:
                    nodes.append(child)
                continue
            costs = [self.costs(block, size) for block, size in zip(state.partition, size_idxs, strict=True)]
            if not all(map(math.isfinite, itertools.chain.from_iterable(each.level_s for each in costs))):  # (C2)
                continue
            offloaded = frozenset[int]().union(*(each.offloaded for each in costs))
            answer = PlacedPools(state.partition, size_idxs, offloaded)
            seconds = period(i, answer)
            if math.isfinite(seconds):
                leaves.append(Leaf(seconds, answer, key=(len(state.partition), state.partition, size_idxs)))
        return Step(nodes, leaves, evaluated=len(leaves))


def pool_costs(instance: PoolsInstance, block: Sequence[int], size: int) -> PoolCosts:
    """Return the seconds by level of copies that share a pool, with the offload that moves least within (C2)."""
    calls = [q for q, copy in enumerate(instance.copy_of) if copy in block]
    best = PoolCosts((math.inf,) * instance.num_levels, frozenset())
    if not all(math.isfinite(instance.seconds[q, size]) for q in calls):
        return best
    for count in range(len(block) + 1):
        for offloaded in itertools.combinations(block, count):
            if not fits_memory_C2(instance, block, size, offloaded):
                continue
            level_s = [0.0] * instance.num_levels
            for q in calls:
                level_s[instance.level_of[q]] += float(instance.seconds[q, size])
            for copy in offloaded:
                for level in {instance.level_of[q] for q in calls if instance.copy_of[q] == copy}:
                    level_s[level] += 2 * float(instance.move_s[copy, size])
            if sum(level_s) < sum(best.level_s):
                best = PoolCosts(tuple(level_s), frozenset(offloaded))
    return best


def fits_memory_C2(instance: PoolsInstance, block: Sequence[int], size: int, offloaded: Sequence[int]) -> bool:
    """Return whether each call of a pool has its memory beside the states that stay, and the host those that do not."""
    state = instance.state_bytes[:, size]
    if sum(state[copy] for copy in offloaded) > instance.host_bytes:
        return False
    for q, copy in enumerate(instance.copy_of):
        if copy in block:
            others = sum(state[other] for other in block if other != copy and other not in offloaded)
            if instance.live_bytes[q, size] + others > instance.budget_bytes:
                return False
    return True


def passed_s(instance: PoolsInstance, level_s: FloatArray, totals: FloatArray) -> float:
    """Return the path without the sending of weights: of pools with seconds by level [B, L] and in all [B]."""
    first = float(level_s.max(axis=0).sum()) / instance.fetches
    return first + (1 - 1 / instance.fetches) * float(totals.max())


def path_s(instance: PoolsInstance, answer: PlacedPools) -> float:
    """Return the seconds from the first token of a step to its last update, new weights included."""
    rows, send_s = _rows(instance, answer)
    return passed_s(instance, rows, rows.sum(axis=1)) + send_s


def period(instance: PoolsInstance, answer: PlacedPools) -> float:
    """Return (O) of an answer from its definition.

    Without steps ahead it is the path itself, which ends with new weights (C3); SECONDS of generation count every token (C4).
    """
    rows, send_s = _rows(instance, answer)
    busy = rows.sum(axis=1)
    path = passed_s(instance, rows, busy) + send_s
    for pool, block in enumerate(answer.partition):
        if instance.sender in block or instance.generator in block:
            busy[pool] += send_s
    return max(float(busy.max()), path / (1 + instance.ahead))


def _rows(instance: PoolsInstance, answer: PlacedPools) -> tuple[FloatArray, float]:
    """Return the seconds of each pool by level [B, L], and of the sending of weights."""
    rows = np.zeros((len(answer.partition), instance.num_levels))
    of: dict[int, int] = {}
    for pool, (block, size) in enumerate(zip(answer.partition, answer.size_idxs, strict=True)):
        of |= dict.fromkeys(block, pool)
        for q, copy in enumerate(instance.copy_of):
            if copy in block:
                rows[pool, instance.level_of[q]] += instance.seconds[q, size]
        for copy in set(block) & answer.offloaded:
            for level in {instance.level_of[q] for q, owner in enumerate(instance.copy_of) if owner == copy}:
                rows[pool, level] += 2 * instance.move_s[copy, size]
    sender, receiver = of[instance.sender], of[instance.generator]
    send_s = float(instance.send_s[answer.size_idxs[sender], answer.size_idxs[receiver]])
    return rows, send_s


def check(instance: PoolsInstance, answer: PlacedPools) -> tuple[str, ...]:
    """Return the constraints that an answer breaks, by label."""
    broken = []
    copies = sorted(copy for block in answer.partition for copy in block)
    if copies != list(range(instance.num_copies)):
        broken.append(f"partition: its pools hold {copies}")
    devices = sum(instance.sizes[idx] for idx in answer.size_idxs)
    if devices > instance.num_devices:
        broken.append(f"(C1) devices: {devices} of {instance.num_devices}")
    for block, size in zip(answer.partition, answer.size_idxs, strict=True):
        if not fits_memory_C2(instance, block, size, sorted(answer.offloaded & set(block))):
            broken.append(f"(C2) memory: copies {block} on {instance.sizes[size]} devices")
    return tuple(broken)


def solve_pools(
    instance: PoolsInstance, *, chosen: Sequence[Partition] | None = None, deadline: Clock | None = None
) -> Answer[PlacedPools]:
    """Return the placement with the shortest step; ``chosen``: partitions that count."""
    search: Search[_Open, PlacedPools] = Search(PoolsProblem(instance, chosen))
    return search.run(Stop(deadline=deadline))
