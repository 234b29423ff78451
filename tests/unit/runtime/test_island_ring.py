"""Rings of islands of which one is lost in the middle of a sum, wherever that falls: members in threads, real decisions."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from meshwright.runtime.job.rendezvous import Meeting
from meshwright.runtime.supervision.decisions import Decisions
from meshwright.runtime.supervision.generations import Report
from meshwright.runtime.supervision.membership import Membership
from meshwright.runtime.training.island_ring import IslandRing
from meshwright.runtime.training.ring import Ring
from meshwright.runtime.training.ring_links import RingLinks, meet_in_ring
from meshwright.schema import Layout
from meshwright.schema.local_updates import ROW
from test_local_updates import islands_plan

SEQUENCES, NUM_SUMS = (1, 2, 3), 3
PLAN = islands_plan(Layout(dp_replicate=3), (1, 1, 1), SEQUENCES, steps=2)
EXCHANGES = 2 + 4 + 2
"""Of a sum of three members: their votes, the sum, and the round after which all know that all have it."""


class KilledError(Exception):
    """A member ends here."""


@pytest.fixture
def trio(monkeypatch: pytest.MonkeyPatch) -> Trio:
    """A job whose store is in this process."""
    store = dist.HashStore()
    monkeypatch.setattr(Membership, "client", lambda _: store)
    return Trio(store)


class Trio:
    """Three islands of one rank each, each a thread, and what the launcher decides of them."""

    def __init__(self, store: dist.Store) -> None:
        self._decisions = Decisions(Meeting(0, {}, store), PLAN, (), [range(3)])
        self.sums: dict[int, list[float]] = {}

    def run(self, victim: int, dies_at: int) -> None:
        """Let all take part, until one is killed at one of its exchanges and the others are done."""
        members = [
            threading.Thread(target=self._member, args=(idx, dies_at if idx == victim else -1), daemon=True)
            for idx in range(3)
        ]
        for member in members:
            member.start()
        while any(member.is_alive() for member in members):
            self._decisions.look()
            members[0].join(0.002)

    def _member(self, idx: int, dies_at: int) -> None:
        membership = Membership("127.0.0.1", 0, idx, 20.0, cuts=False)
        membership.begin()
        assert PLAN.local_updates is not None
        ring = IslandRing(
            membership, PLAN.local_updates, [(0,), (1,), (2,)], idx, name="ring", sends=True, state=(), tell=dict,
            timeout_s=20.0,
        )  # fmt: skip
        ring.join()
        count, sums = 0, list[float]()

        def exchange(links: RingLinks, *parts: Any) -> None:
            nonlocal count
            if count == dies_at:
                links.close()
                raise KilledError
            count += 1
            RingLinks.exchange(links, *parts)

        def add_up(ring: Ring, weight: float) -> float:
            links = ring._links
            links.exchange = lambda *parts: exchange(links, *parts)  # type: ignore[method-assign]
            ring.maximum(0.0)
            sums.append(float(ring.sum(torch.full((ROW,), weight * (idx + 1)), 32)[0]))
            return float(idx)

        try:
            for number in range(NUM_SUMS):
                ring.together(add_up)
                del sums[number:-1]  # of tries that failed
            self.sums[idx] = sums
        except KilledError:
            self._decisions.board.tell(Report(node=0, ranks=(idx,), cause="killed"))


def mean_of(*islands: int) -> float:
    """What some islands sum up: their numbers weighted by their sequences."""
    return sum(SEQUENCES[i] * (i + 1) for i in islands) / sum(SEQUENCES[i] for i in islands)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("dies_at", range(2 * EXCHANGES))
def test_those_who_are_left_have_the_same_sums_wherever_one_is_lost(trio: Trio, victim: int, dies_at: int) -> None:
    """A sum that the lost one had ended counts; the one in whose middle it was lost may count with it or without."""
    trio.run(victim, dies_at)
    first, second = trio.sums.values()
    assert first == second
    left = [idx for idx in range(3) if idx != victim]
    assert set(trio.sums) == set(left)
    num_with_it = sum(value == pytest.approx(mean_of(0, 1, 2), rel=1e-6) for value in first)
    assert first[num_with_it:] == pytest.approx([mean_of(*left)] * (NUM_SUMS - num_with_it), rel=1e-6)
    assert num_with_it - dies_at // EXCHANGES in (0, 1)


def test_strangers_are_not_taken_for_members() -> None:
    """Who does not know the token of the store is cut off, and the member before comes in after him."""
    store, links = dist.HashStore(), list[RingLinks]()

    def member() -> None:
        links.append(meet_in_ring(store, "ring", (0, 1), 0, timeout_s=20.0)[0])

    thread = threading.Thread(target=member)
    thread.start()
    (host, port), token, _ = json.loads(store.get("ring/0"))
    with socket.create_connection((host, port)) as stranger:
        stranger.sendall(b"0" * len(token))
        other, _ = meet_in_ring(store, "ring", (0, 1), 1, timeout_s=20.0)
        assert stranger.recv(1) == b""
    thread.join()
    other.exchange(memoryview(b"word"), None)
    received = bytearray(4)
    links[0].exchange(None, memoryview(received))
    assert received == b"word"
    links[0].close()
    with pytest.raises(ConnectionError):
        other.exchange(None, memoryview(received))
