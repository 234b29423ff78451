"""Connections of a rank to its neighbours in a ring of islands: one to the next member, and one from the member before.

They are plain TCP, and not gloo's, because waiting must end when a member of the ring is gone: gloo's send to a closed connection
waits for the timeout of collectives. Each member listens at the interface by which the job's ranks meet, and takes the connection
of who shows a token from the job's store, which only those reach who know the job's secret. Others keep nobody waiting: all are
listened to at once, and of too many the oldest is cut.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import os
import secrets
import select
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Self

import torch.distributed as dist

from ...profilers.machine import addresses_of

_LOOK_S, _CONNECT_S, _TOKEN, _MAX_STRANGERS = 0.1, 10.0, 32, 256


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
        self._before = self._accept(listener, token)
        for connection in (self._next, self._before):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setblocking(False)

    def _accept(self, listener: socket.socket, token: bytes) -> socket.socket:
        """Return the connection that shows a token.

        Raises:
            TimeoutError: none does.
        """
        end, look_s = time.monotonic() + self._timeout_s, 0.0
        with _Strangers(listener, token) as strangers:
            while (now_s := time.monotonic()) < end:
                if now_s > look_s:
                    self._check()
                    look_s = now_s + _LOOK_S
                if (member := strangers.look()) is not None:
                    return member
        raise TimeoutError("the member before did not connect")

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


class _Strangers:
    """Those who have connected to a listener and have not shown a token."""

    def __init__(self, listener: socket.socket, token: bytes) -> None:
        self._listener, self._token = listener, token
        self._shown = dict[socket.socket, bytes]()
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in [*self._shown]:
            self._cut(connection)
        self._selector.close()

    def look(self) -> socket.socket | None:
        """Listen to all for a moment; return the connection that has shown the token."""
        for key, _ in self._selector.select(_LOOK_S):
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            if connection is self._listener:
                self._admit()
            elif connection in self._shown and self._shows_token(connection):
                del self._shown[connection]
                return connection
        return None

    def _admit(self) -> None:
        with suppress(OSError):  # it has gone again
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ)
            self._shown[connection] = b""
        if len(self._shown) > _MAX_STRANGERS:
            self._cut(next(iter(self._shown)))

    def _shows_token(self, connection: socket.socket) -> bool:
        part = b""
        with suppress(OSError):
            part = connection.recv(len(self._token) - len(self._shown[connection]))
        self._shown[connection] += part
        if hmac.compare_digest(self._shown[connection], self._token):
            return True
        if not part or len(self._shown[connection]) == len(self._token):
            self._cut(connection)
        return False

    def _cut(self, connection: socket.socket) -> None:
        del self._shown[connection]
        self._selector.unregister(connection)
        connection.close()


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
