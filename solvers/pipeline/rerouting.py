"""Passes of a stage whose device is lost, run by the devices of the same stage in other replicas of the pipeline.

Sets     d replicas, s = 0..S-1 stages, i micro-batches of a replica; (d, s) devices, without the LOST ones
Data     FORWARD[s], BACKWARD[s] seconds of a pass, M[d] micro-batches, CAPACITY[s] micro-batches that a device has memory for
Variables  end[s, kind, d, i], peer[d, i] for a lost (d, s)
(O)  min  max end
(C1) peers:    passes of a lost (d, s) run on (peer, s), the others on (d, s); peers take micro-batches in turn
(C2) order:    F of stage s after F of s - 1, B of s after B of s + 1 and F of s
(C3) device:   a device runs one pass at a time
(C4) memory:   a device of stage s holds CAPACITY[s] micro-batches at most; S - s under 1F1B, and what there is room for

No states move: a peer has the weights already, and adds the gradients of all that it runs.
Greedy by events: a device that falls idle takes the oldest backward pass that has arrived, else a forward pass: the oldest one, or
of the replica of which it holds least, or of its own replica until all of that have begun; the shortest of the three orders. The
first two do not deadlock, as what the last stage takes in leaves it next; the third may, where two replicas need each other.
The idea is ReCycle's (arXiv:2405.14009).
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Literal, get_args

from ...schema.errors import InfeasibleError

Device = tuple[int, int]
"""Replica and stage."""

Rule = Literal["oldest", "balanced", "own replica first"]
"""Of several forward passes that have arrived."""


@dataclass(frozen=True)
class ReroutingInstance:
    """Seconds of the passes of each stage [S], micro-batches of each replica [D], those a device may hold [S], the lost ones."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    num_microbatches: tuple[int, ...]
    capacities: tuple[int, ...]
    lost: frozenset[Device] = frozenset()

    @property
    def num_stages(self) -> int:
        """S."""
        return len(self.forward_s)


@dataclass(frozen=True)
class Pass:
    """One pass: of which stage, kind, replica and micro-batch, and the device and the time it has."""

    stage: int
    kind: str
    replica: int
    micro_batch: int
    device: Device
    start_s: float
    end_s: float


def solve(instance: ReroutingInstance) -> tuple[Pass, ...]:
    """Return the passes of a step in the order in which they start.

    Raises:
        InfeasibleError: a stage is lost in every replica.
    """
    num_passes = 2 * instance.num_stages * sum(instance.num_microbatches)
    orders = [order for rule in get_args(Rule) if len(order := _Events(instance, rule).run()) == num_passes]
    return tuple(sorted(min(orders, key=makespan_s), key=lambda each: each.start_s))


def makespan_s(passes: Iterable[Pass]) -> float:
    """Return (O)."""
    return max(each.end_s for each in passes)


def executors(instance: ReroutingInstance) -> dict[tuple[int, int, int], Device]:
    """Return the device of each replica, stage and micro-batch: (C1).

    Raises:
        InfeasibleError: a stage is lost in every replica.
    """
    replicas, of = range(len(instance.num_microbatches)), dict[tuple[int, int, int], Device]()
    for s in range(instance.num_stages):
        alive = [d for d in replicas if (d, s) not in instance.lost]
        if not alive:
            raise InfeasibleError(f"stage {s} is lost in every replica: no peer has its weights")
        taken = count()
        for d in replicas:
            for i in range(instance.num_microbatches[d]):
                of[d, s, i] = (alive[next(taken) % len(alive)], s) if (d, s) in instance.lost else (d, s)
    return of


def check(instance: ReroutingInstance, passes: Sequence[Pass]) -> tuple[str, ...]:
    """Return what is wrong with passes: (C1) to (C4), knowing no solver."""
    wrong, last = [], instance.num_stages - 1
    by_name = {(p.stage, p.kind, p.replica, p.micro_batch): p for p in passes}
    if len(by_name) != len(passes) or len(passes) != 2 * instance.num_stages * sum(instance.num_microbatches):
        return ("(C1) a pass is missing, or there twice",)
    for p in passes:
        if p.device in instance.lost or (
            (p.replica, p.stage) not in instance.lost and p.device != (p.replica, p.stage)
        ):
            wrong.append(f"(C1) {p}")
        before = (
            [(p.stage - 1, "F")]
            if p.kind == "F"
            else [(p.stage, "F"), *([(p.stage + 1, "B")] if p.stage < last else [])]
        )
        for stage, kind in before:
            if stage >= 0 and by_name[stage, kind, p.replica, p.micro_batch].end_s > p.start_s + 1e-9:
                wrong.append(f"(C2) {p}")
    for device in {p.device for p in passes}:
        row = sorted((p for p in passes if p.device == device), key=lambda p: p.start_s)
        if any(a.end_s > b.start_s + 1e-9 for a, b in pairwise(row)):
            wrong.append(f"(C3) {device}")
        in_flight = 0
        for p in row:
            in_flight += 1 if p.kind == "F" else -1
            if in_flight > instance.capacities[device[1]]:
                wrong.append(f"(C4) {device}")
    return tuple(wrong)


class _Events:
    def __init__(self, instance: ReroutingInstance, rule: Rule) -> None:
        self.rule = rule
        self.instance, self.device_of, self.passes = instance, executors(instance), list[Pass]()
        devices, replicas = set(self.device_of.values()), range(len(instance.num_microbatches))
        self.ready = {
            (device, kind, d): deque[tuple[float, int]]() for device in devices for kind in "FB" for d in replicas
        }
        self.in_flight = {device: [0] * len(replicas) for device in devices}
        self.begun = Counter[tuple[Device, int]]()
        self.idle_from_s, self.queue = dict.fromkeys(devices, 0.0), list[tuple[float, Device]]()

    def run(self) -> list[Pass]:
        """Return the passes of the step."""
        for d, num in enumerate(self.instance.num_microbatches):
            for i in range(num):
                self._arrive(0.0, "F", d, 0, i)
        while self.queue:
            now, device = heapq.heappop(self.queue)
            if now >= self.idle_from_s[device]:
                self._decide(now, device)
        return self.passes

    def _arrive(self, now: float, kind: str, d: int, s: int, i: int) -> None:
        device = self.device_of[d, s, i]
        self.ready[device, kind, d].append((now, i))
        heapq.heappush(self.queue, (max(now, self.idle_from_s[device]), device))

    def _rank(self, d: int, device: Device) -> int:
        return self.in_flight[device][d] if self.rule == "balanced" else 0

    def _may_begin(self, d: int, device: Device) -> bool:
        replica = device[0]
        is_first = d == replica or self.begun[device, replica] == self.instance.num_microbatches[replica]
        return self.rule != "own replica first" or is_first

    def _decide(self, now: float, device: Device) -> None:
        last, s, in_flight = self.instance.num_stages - 1, device[1], self.in_flight[device]
        has_room = sum(in_flight) < self.instance.capacities[s]
        choices = [
            (kind, self._rank(d, device) if kind == "F" else 0, *row[0], d)
            for kind in ("B", "F")
            for d in range(len(in_flight))
            if (row := self.ready[device, kind, d])
            and row[0][0] <= now
            and (kind == "B" or (has_room and self._may_begin(d, device)))
        ]
        if not choices:
            return
        kind, _, _, i, d = min(choices)
        self.ready[device, kind, d].popleft()
        seconds = (self.instance.forward_s if kind == "F" else self.instance.backward_s)[s]
        end = now + seconds
        self.passes.append(Pass(s, kind, d, i, device, now, end))
        in_flight[d] += 1 if kind == "F" else -1
        self.begun[device, d] += kind == "F"
        self.idle_from_s[device] = end
        heapq.heappush(self.queue, (end, device))
        if kind == "F" and s < last:
            self._arrive(end, "F", d, s + 1, i)
        elif kind == "F":
            self._arrive(end, "B", d, s, i)
        elif s:
            self._arrive(end, "B", d, s - 1, i)
