"""A client's connection: it has so long to send the head of a request, and to read on; there are so many at a time.

uvicorn limits how long a connection may rest between requests; one that sends nothing, or a byte now and then, it holds for ever,
and one that reads nothing of its answers too.
"""

from __future__ import annotations

import asyncio
from typing import cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


def connections_within(*, head_s: float, unread_s: float, limit: int) -> type[H11Protocol]:
    """Return the kind of connection for `uvicorn.Config(http=...)`: further ones than ``limit`` are closed at once."""

    class Connection(H11Protocol):
        _waits: asyncio.TimerHandle | None = None
        _sends: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > limit:
                transport.abort()
            else:
                self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            for timer in (self._waits, self._sends):
                if timer is not None:
                    timer.cancel()

        def send_400_response(self, msg: str) -> None:
            try:
                super().send_400_response(msg)
            except h11.LocalProtocolError:  # a part of an answer is on its way
                cast("asyncio.Transport", self.transport).abort()

        def pause_writing(self) -> None:
            super().pause_writing()  # type: ignore[no-untyped-call]
            self._watch_reader()

        def timeout_keep_alive_handler(self) -> None:
            super().timeout_keep_alive_handler()
            self._watch_reader()

        def _watch_reader(self, before: int | None = None) -> None:
            """Cut a client that reads nothing of what waits for it."""
            transport = cast("asyncio.Transport", self.transport)
            size = transport.get_write_buffer_size()
            if size == before:
                transport.abort()
            elif size:
                if self._sends is not None:
                    self._sends.cancel()
                self._sends = self.loop.call_later(unread_s, self._watch_reader, size)

        def _watch(self) -> None:
            """Give the head that is awaited its time, which further bytes of it do not renew."""
            if self.conn.their_state is not h11.IDLE:
                if self._waits is not None:
                    self._waits.cancel()
                self._waits = None
            elif self._waits is None:
                transport = cast("asyncio.Transport", self.transport)
                self._waits = self.loop.call_later(head_s, transport.abort)

    return Connection
