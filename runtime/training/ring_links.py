"""Connections of a rank to its neighbours in a ring of islands: one to the next member, and one from the member before.

They are plain TCP, and not gloo's, because waiting must end when a member of the ring is gone: gloo's send to a closed connection
waits for the timeout of collectives. Each member listens at the interface by which the job's ranks meet, and takes the connection
of who shows a token from the job's store, which only those reach who know the job's secret.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import os
import secrets
import select
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from ...profilers.machine import addresses_of

_LOOK_S, _CONNECT_S, _TOKEN = 0.1, 10.0, 32


class RingLinks:
    """What one member sends to and receives from; without connections where it is alone.

    Args:
        check: called while nothing arrives; raises where it is not to be waited for.
        timeout_s: how long nothing may arrive.
    """

    def __init__(self, check: Callable[[], None], timeout_s: float) -> None:
        self._check, self._timeout_s = check, timeout_s
        self._next: socket.socket | None = None
        self._before: socket.socket | None = None

    def join(self, listener: socket.socket, token: bytes, next_place: Sequence[Any], next_token: bytes) -> None:
        """Connect to the next member, and take the connection of the one before.

        Raises:
            OSError: a neighbour did not answer.
        """
        self._next = socket.create_connection(tuple(next_place), timeout=_CONNECT_S)
        self._next.sendall(next_token)
        end = time.monotonic() + self._timeout_s
        while self._before is None:
            if select.select([listener], [], [], _LOOK_S)[0]:
                connection, _ = listener.accept()
                if hmac.compare_digest(_read(connection, len(token)), token):
                    self._before = connection
                else:
                    connection.close()
            elif time.monotonic() > end:
                raise TimeoutError("the member before did not connect")
            else:
                self._check()
        for connection in (self._next, self._before):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setblocking(False)

    def exchange(self, outgoing: memoryview | None, incoming: memoryview | None) -> None:
        """Send bytes to the next member while as many as fit arrive from the one before.

        Raises:
            OSError: a neighbour is gone, or said nothing for too long.
        """
        end = time.monotonic() + self._timeout_s
        while outgoing or incoming:
            poll = select.poll()
            if outgoing:
                poll.register(self._next, select.POLLOUT)  # type: ignore[arg-type]
            if incoming:
                poll.register(self._before, select.POLLIN)  # type: ignore[arg-type]
            ready = {descriptor for descriptor, _ in poll.poll(1000 * _LOOK_S)}
            if ready:
                end = time.monotonic() + self._timeout_s
            elif time.monotonic() > end:
                raise TimeoutError(f"nothing arrived for {self._timeout_s:g} s")
            else:
                self._check()
            if outgoing and self._next is not None and self._next.fileno() in ready:
                outgoing = outgoing[self._next.send(outgoing) :]
            if incoming and self._before is not None and self._before.fileno() in ready:
                if not (count := self._before.recv_into(incoming)):
                    raise ConnectionResetError("it closed the connection")
                incoming = incoming[count:]

    def close(self) -> None:
        """Let the neighbours know that nothing more comes."""
        for connection in (self._next, self._before):
            if connection is not None:
                connection.close()
        self._next = self._before = None


def meet_in_ring(
    store: dist.Store,
    name: str,
    members: Sequence[int],
    member: int,
    *,
    words: Any = None,
    check: Callable[[], None] = lambda: None,
    timeout_s: float,
) -> tuple[RingLinks, list[Any]]:
    """Return the links of one of some members, given in the order of the ring, and what each of them tells the others.

    Args:
        store: all members see it; name: of the ring in it.
        words: of this member, as JSON.
        check: as of `RingLinks`.

    Raises:
        OSError: a neighbour did not answer.
    """
    token = secrets.token_hex(_TOKEN)
    links = RingLinks(check, timeout_s)
    with _listener() as listener:
        store.set(f"{name}/{member}", json.dumps([listener.getsockname()[:2], token, words]))
        entries = heard(store, name, members)
        if len(members) > 1:
            place, next_token, _ = entries[(members.index(member) + 1) % len(members)]
            try:
                links.join(listener, token.encode(), place, next_token.encode())
            except BaseException:
                links.close()
                raise
    return links, [entry[2] for entry in entries]


def heard(store: dist.Store, name: str, members: Sequence[int]) -> list[Any]:
    """Return place, token and words of each member of a ring, once all are there."""
    return [json.loads(text) for text in store.multi_get([f"{name}/{member}" for member in members])]


def _listener() -> socket.socket:
    """Return a socket at the interface of the job; by itself on the loopback, as the ranks of a job on one machine are."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    address = next(iter(addresses_of(interface)), "127.0.0.1")
    family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
    return socket.create_server((address, 0), family=family)


def _read(connection: socket.socket, size: int) -> bytes:
    """Return what arrives within _CONNECT_S of all bytes, however slowly a stranger sends them."""
    data, end = b"", time.monotonic() + _CONNECT_S
    with suppress(OSError):
        while len(data) < size and (remaining_s := end - time.monotonic()) > 0:
            connection.settimeout(remaining_s)
            if not (part := connection.recv(size - len(data))):
                break
            data += part
    return data
