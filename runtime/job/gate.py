"""The gate before the store of a job on several nodes: who knows the job's secret comes through, everybody else is cut off.

torch's store obeys whoever reaches it, so it listens on the loopback of the node that holds it. At the endpoint stands a gate; on
the loopback of every other node stands a door, to which its launcher and its ranks connect as to the store, and which brings each
connection to the gate. There both sides show that they know the secret, which is not sent:

    gate -> door   G, 32 random bytes
    door -> gate   D, 32 random bytes, and HMAC-SHA256(secret, "door" G D)
    gate -> door   HMAC-SHA256(secret, "gate" G D)

Gate and door are threads of the launchers: these call only what releases the interpreter while it waits for the store.

After that the bytes are those of the store, neither encrypted nor signed: the secret keeps out who can connect, not who sits on
the line.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

from ...schema import ConfigError

SECRET_VARIABLE = "MESHWRIGHT_SECRET"
MIN_SECRET = 16
"""Letters of a secret: fewer can be tried out."""

_LOOPBACK = "127.0.0.1"
_RANDOM, _PROOF, _CHUNK = 32, 32, 2**16
_KNOCK_S = 5.0
"""How long either side waits for the other's proof."""

_MAX_STRANGERS = 256
"""Connections that have not shown anything yet; of more the oldest is cut, so that strangers keep out nobody."""

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class WrongSecretError(Exception):
    """The other side does not know the secret, or is something else."""


def secret_of(variables: Mapping[str, str]) -> bytes:
    """Return the secret that the nodes of a job share.

    Raises:
        ConfigError: there is none, or it is short.
    """
    text = variables.get(SECRET_VARIABLE, "")
    if len(text) < MIN_SECRET:
        what = (
            f"{SECRET_VARIABLE} has {len(text)} letters, at least {MIN_SECRET} are needed"
            if text
            else "several nodes need a secret that they share"
        )
        raise ConfigError(
            what,
            details=("without it anybody who reaches the place where they meet could be one of them",),
            help=f"export {SECRET_VARIABLE}=$(head -c 32 /dev/urandom | base64), the same on every node",
        )
    return text.encode()


class Relay:
    """Listens in a thread of its own, and joins each connection to another one."""

    def __init__(
        self,
        listener: socket.socket,
        onward: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[Streams]],
    ) -> None:
        """Begin to listen.

        Args:
            onward: returns what a connection is joined to, or raises a WrongSecretError or an OSError.
        """
        self.port: int = listener.getsockname()[1]
        self._listener, self._onward = listener, onward
        self._strangers: dict[asyncio.Task[None], None] = {}
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_open = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="gate")
        self._thread.start()
        self._is_open.wait()

    def close(self) -> None:
        """Stop listening and cut every connection."""
        with suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        server = self._loop.run_until_complete(
            asyncio.start_server(self._accept, sock=self._listener, backlog=socket.SOMAXCONN)
        )
        self._is_open.set()
        try:
            self._loop.run_forever()
        finally:
            server.close()
            self._loop.run_until_complete(self._cut())
            self._loop.close()

    async def _cut(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._strangers[task] = None
        if len(self._strangers) > _MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.cancel()
        try:
            await self._join(task, reader, writer)
        except (WrongSecretError, OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # a stranger learns nothing, and that the gate closes ends every connection
        finally:
            writer.close()

    async def _join(self, task: asyncio.Task[None], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            other_reader, other_writer = await asyncio.wait_for(self._onward(reader, writer), _KNOCK_S)
        finally:
            self._strangers.pop(task, None)
        ways = [asyncio.create_task(_pump(reader, other_writer)), asyncio.create_task(_pump(other_reader, writer))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            other_writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()


def open_gate(listener: socket.socket, store_port: int, secret: bytes) -> Relay:
    """Let those who know the secret through to the store on this machine's loopback."""

    async def onward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Streams:
        challenge = secrets.token_bytes(_RANDOM)
        writer.write(challenge)
        answer = await reader.readexactly(_RANDOM + _PROOF)
        if not hmac.compare_digest(answer[_RANDOM:], _proof(secret, b"door", challenge, answer[:_RANDOM])):
            raise WrongSecretError
        writer.write(_proof(secret, b"gate", challenge, answer[:_RANDOM]))
        return await asyncio.open_connection(_LOOPBACK, store_port)

    return Relay(listener, onward)


def open_door(host: str, port: int, secret: bytes) -> Relay:
    """Listen on this machine's loopback, and bring what connects there to the gate at an endpoint."""

    async def onward(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> Streams:
        reader, writer = await asyncio.open_connection(host, port)
        try:
            challenge, answer = await reader.readexactly(_RANDOM), secrets.token_bytes(_RANDOM)
            writer.write(answer + _proof(secret, b"door", challenge, answer))
            await writer.drain()
            require_proof(await reader.readexactly(_PROOF), secret, challenge, answer)
        except BaseException:
            writer.close()
            raise
        return reader, writer

    return Relay(socket.create_server((_LOOPBACK, 0)), onward)


def knock(host: str, port: int, secret: bytes, timeout_s: float) -> None:
    """Find out whether the gate at an endpoint lets this process through.

    Raises:
        OSError: nothing listens there, or what does says nothing.
        WrongSecretError: it does not let us through, or does not know the secret itself.
    """
    with socket.create_connection((host, port), timeout=timeout_s) as connection:
        challenge, answer = _read(connection, _RANDOM), secrets.token_bytes(_RANDOM)
        connection.sendall(answer + _proof(secret, b"door", challenge, answer))
        require_proof(_read(connection, _PROOF), secret, challenge, answer)


def require_proof(shown: bytes, secret: bytes, challenge: bytes, answer: bytes) -> None:
    """Refuse a gate that does not know the secret.

    Raises:
        WrongSecretError: it does not.
    """
    if not hmac.compare_digest(shown, _proof(secret, b"gate", challenge, answer)):
        raise WrongSecretError


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (part := connection.recv(size - len(data))):
            if data or size == _PROOF:
                raise WrongSecretError
            raise ConnectionResetError("it closed the connection")
        data += part
    return data


def _proof(secret: bytes, side: bytes, challenge: bytes, answer: bytes) -> bytes:
    return hmac.digest(secret, side + challenge + answer, hashlib.sha256)


def raise_descriptor_limit() -> None:
    """Let this process have as many connections as it may: a gate has two for each of a rank's."""
    if os.name == "posix":
        import resource

        _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
