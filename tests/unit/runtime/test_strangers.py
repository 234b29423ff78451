"""Strangers who hold connections open, many at once: who knows the secret or the token comes through all the same."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist
from meshwright.runtime.job.gate import knock, open_gate
from meshwright.runtime.training.ring_links import RingLinks, heard, meet_in_ring

SECRET = b"of the job, as long as it must be"


@contextmanager
def strangers(place: tuple[str, int], count: int) -> Iterator[None]:
    """So many connections that say nothing."""
    held = list[socket.socket]()
    try:
        for _ in range(count):
            with suppress(OSError):
                held.append(socket.create_connection(place, timeout=5))
        yield
    finally:
        for connection in held:
            connection.close()


def test_the_gate_lets_in_who_knows_the_secret_however_many_strangers_wait() -> None:
    store = socket.create_server(("127.0.0.1", 0))
    gate = open_gate(socket.create_server(("127.0.0.1", 0)), store.getsockname()[1], SECRET)
    with store, strangers(("127.0.0.1", gate.port), 400):
        knock("127.0.0.1", gate.port, SECRET, 5)
    gate.close()


def test_a_ring_forms_however_many_strangers_wait() -> None:
    store, links = dist.HashStore(), dict[int, RingLinks]()

    def join(member: int) -> None:
        links[member], _ = meet_in_ring(store, "ring", (0, 1), member, timeout_s=20)

    members = [threading.Thread(target=join, args=(idx,), daemon=True) for idx in range(2)]
    members[0].start()
    while not store.check(["ring/0"]):
        time.sleep(0.01)
    place, *_ = heard(store, "ring", [0])[0]
    with strangers(tuple(place), 100):
        members[1].start()
        for member in members:
            member.join(10)
    assert links.keys() == {0, 1}
    sent, received = bytearray(b"to the next"), bytearray(11)
    other = threading.Thread(target=links[1].exchange, args=(memoryview(sent), memoryview(bytearray(11))))
    other.start()
    links[0].exchange(memoryview(sent), memoryview(received))
    other.join(10)
    assert received == sent
    for each in links.values():
        each.close()
