"""An OpenAI-compatible endpoint before a serving engine: completions and chats, whole or as server-sent events.

    POST /v1/completions, /v1/chat/completions
    GET  /v1/models, /health, /metrics

Every request has bounds: seconds to send its head, bytes of its body and seconds to send it, requests open at once and waiting in
the engine (429 with Retry-After), seconds that a client may leave an answer unread. A client that is gone takes its request and its
blocks along; a slow one holds up nobody, since the engine only appends to a queue that is as long as the answer. While the engine
drains everything new gets 503.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from ...schema.errors import ConfigError
from .answers import Answer, EventStream, Message, Receive, Send, disconnected
from .bodies import DEFAULT_TOKENS, ChatBody, Common, CompletionBody, RefusedError, read_body
from .front import EngineFront
from .meter import Meter
from .requests import EngineBusyError, TokenEvent
from .requests import Request as EngineRequest
from .text import Text

RETRY_S = 1
ENCODINGS = 2
"""Texts that are tokenised at a time: each may take some hundred bytes a character."""

_LONG_BODY = 2**16
"""Bytes of a body from which it is read beside the event loop."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What a client may take.

    Attributes:
        body_bytes: of a request; body_s: to send it; all_body_bytes: of all that have not come to the engine.
        open_requests: accepted and not answered in full.
        unread_s: that an answer may go unread.
        head_s: to send the head of a request; connections: open at once. These and `unread_s` are the server's (connection.py).
    """

    body_bytes: int = 2**22
    all_body_bytes: int = 2**26
    body_s: float = 30.0
    open_requests: int = 1024
    unread_s: float = 60.0
    head_s: float = 20.0
    connections: int = 4096


@dataclass
class Ticket:
    """A request in the engine: its events come in ``inbox``."""

    id: str
    arrived_s: float
    prompt_tokens: int
    inbox: asyncio.Queue[TokenEvent | None] = field(default_factory=asyncio.Queue)


class Endpoint:
    """The application, and the thread that steps its engine."""

    def __init__(
        self, engine: EngineFront, *, model: str, text: Text | None = None, bounds: Bounds | None = None,
        meter: Meter | None = None, hosts: frozenset[str] = frozenset(),
    ) -> None:  # fmt: skip
        """Stand before an engine.

        Args:
            model: name that clients may use.
            text: of the model; None: requests have tokens.
            hosts: names that requests may have been sent to; empty: any.
        """
        self.engine, self.model, self.text, self.bounds = engine, model, text, bounds or Bounds()
        self.meter, self.hosts = meter or Meter(), hosts
        self.open: dict[str, Ticket] = {}
        self.failure: BaseException | None = None
        self.is_draining = False
        self._opened, self._body_bytes, self._created_s = 0, 0, int(time.time())
        self._encodings = asyncio.Semaphore(ENCODINGS)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stops = threading.Event()
        self._thread = threading.Thread(target=self._run, name="serving-endpoint", daemon=True)
        routes = [
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/v1/chat/completions", self._chats, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
        ]
        refusals = {RefusedError: self._refuse, HTTPException: self._refuse_by_route}
        self._routed = Starlette(routes=routes, exception_handlers=refusals)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer, whatever goes wrong: an ASGI application."""
        is_begun = False

        async def watched(message: Message) -> None:
            nonlocal is_begun
            is_begun = True
            await send(message)

        try:
            await self._routed(scope, receive, watched)
        except Exception as error:  # a client gets an answer, and no traceback
            self.meter.ended("failed")
            if scope["type"] == "http" and not is_begun:
                content = RefusedError(500, f"the server failed: {type(error).__name__}").content
                await JSONResponse(content, 500)(scope, receive, send)

    # --- the engine ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Step the engine in a thread from now on; to be called in the event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stops.is_set():
                self.engine.step(timeout_s=0.1)
        except BaseException as error:  # every request has to hear of it
            self.failure = error
            self._call(self._tell_failure)

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Run a function in the event loop, which may be over."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    def _tell_failure(self) -> None:
        for ticket in self.open.values():
            ticket.inbox.put_nowait(None)

    async def drain(self, limit_s: float) -> bool:
        """Take nothing further and wait until what was accepted is answered; False where that took longer than allowed."""
        self.is_draining = True
        self.engine.stop_accepting()
        until_s = time.monotonic() + limit_s
        while self.open and time.monotonic() < until_s and self.failure is None:
            await asyncio.sleep(0.02)
        return not self.open

    async def stop(self) -> None:
        """End the thread, and the process of templates."""
        self._stops.set()
        await asyncio.to_thread(self._thread.join, 60)
        if self.text is not None:
            await self.text.close()

    # --- requests -----------------------------------------------------------------------------------------------------

    async def _completions(self, request: Request) -> Response:
        async def prompt_of(body: CompletionBody) -> tuple[int, ...]:
            prompt: str | tuple[int, ...] = body.prompt
            if isinstance(prompt, tuple):
                return prompt
            return await self._encode(prompt, adds_special=True)

        def limit(body: CompletionBody, _length: int) -> int:
            return body.max_tokens or DEFAULT_TOKENS

        return await self._generate(request, CompletionBody, prompt_of, limit, is_chat=False)

    async def _chats(self, request: Request) -> Response:
        async def prompt_of(body: ChatBody) -> tuple[int, ...]:
            if self.text is None:
                raise RefusedError(
                    400, "messages need a tokenizer: this server has tokens only; use /v1/completions", param="messages"
                )
            rendered = await self.text.render([message.plain() for message in body.messages])
            return await self._encode(rendered, adds_special=False)

        def limit(body: ChatBody, length: int) -> int:
            return body.max_completion_tokens or body.max_tokens or max(self.engine.max_len - length, 1)

        return await self._generate(request, ChatBody, prompt_of, limit, is_chat=True)

    async def _generate(
        self, request: Request, kind: type[Any], prompt_of: Callable[[Any], Awaitable[tuple[int, ...]]],
        limit: Callable[[Any, int], int], *, is_chat: bool,
    ) -> Response:  # fmt: skip
        arrived_s = time.monotonic()
        self._require_host(request)
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise RefusedError(415, "the body must be application/json")
        if self.is_draining:
            raise RefusedError(503, "the server is ending and takes no further requests", retry_s=RETRY_S)
        if self.failure is not None:
            raise RefusedError(503, "the engine has failed", code="engine_failed")
        if self._opened >= self.bounds.open_requests:
            raise RefusedError(429, f"{self._opened} requests are open, as many as the server takes", retry_s=RETRY_S)
        self._opened += 1
        is_handed_over = False
        try:
            async with self._body(request) as content:
                read = asyncio.to_thread(read_body, kind, content) if len(content) > _LONG_BODY else None
                body: Common = read_body(kind, content) if read is None else await read
                adapter = body.model if body.model in self.engine.adapters else None
                if body.model not in (None, self.model, adapter):
                    raise RefusedError(
                        404,
                        "there is no such model here; /v1/models has its name",
                        param="model",
                        code="model_not_found",
                    )
                try:
                    prompt = await prompt_of(body)
                    ends = self.text.stop_tokens if self.text is not None else frozenset()
                    engine_request = replace(body.request(prompt, limit(body, len(prompt)), ends), adapter=adapter)
                    if body.stop_texts and self.text is None:
                        raise RefusedError(400, "stop needs a tokenizer: this server has tokens only", param="stop")
                    ticket = self._submit(engine_request, arrived_s)
                except ConfigError as error:
                    raise RefusedError(400, str(error)) from None
            answer = Answer(self, ticket, body, engine_request, is_chat=is_chat)
            if body.stream:
                is_handed_over = True
                return EventStream(answer, self.bounds.unread_s, self._close_one)
            return await self._complete(request, answer)
        finally:
            if not is_handed_over:
                self._close_one()

    def _close_one(self) -> None:
        self._opened -= 1

    async def _complete(self, request: Request, answer: Answer) -> Response:
        """Return an answer in full; nothing to a client that has gone."""
        work, gone = asyncio.create_task(answer.complete()), asyncio.create_task(disconnected(request.receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return Response(status_code=499)
            return JSONResponse(work.result())
        finally:
            gone.cancel()
            if not work.done():
                work.cancel()
            answer.close()

    def _submit(self, engine_request: EngineRequest, arrived_s: float) -> Ticket:
        ticket = Ticket(id="", arrived_s=arrived_s, prompt_tokens=len(engine_request.prompt))

        def listener(event: TokenEvent) -> None:
            self._call(ticket.inbox.put_nowait, event)

        try:
            ticket.id = self.engine.submit(engine_request, listener)
        except EngineBusyError as error:
            status = 503 if self.is_draining else 429
            raise RefusedError(status, error.message, retry_s=RETRY_S) from None
        self.open[ticket.id] = ticket
        if self.failure is not None:
            ticket.inbox.put_nowait(None)
        return ticket

    async def events(self, ticket: Ticket) -> AsyncIterator[TokenEvent]:
        """Yield the events of a request to its end.

        Raises:
            RefusedError: the engine has failed.
        """
        while True:
            event = await ticket.inbox.get()
            if event is None:
                raise RefusedError(500, "the engine has failed", code="engine_failed")
            yield event
            if event.finish is not None:
                return

    async def _encode(self, text: str, *, adds_special: bool) -> tuple[int, ...]:
        if self.text is None:
            raise RefusedError(400, "text needs a tokenizer: this server has tokens only", param="prompt")
        if len(text) > self.engine.max_len * self.text.longest:
            raise RefusedError(
                400,
                f"the prompt has {len(text)} characters, more than {self.engine.max_len} tokens can be",
                param="prompt",
            )
        async with self._encodings:
            return await asyncio.to_thread(self.text.encode, text, adds_special=adds_special)

    @asynccontextmanager
    async def _body(self, request: Request) -> AsyncIterator[bytes]:
        """Read a body, which counts among those in hand while inside."""
        content = bytearray()
        try:
            await self._read(request, content)
            yield bytes(content)
        finally:
            self._body_bytes -= len(content)

    async def _read(self, request: Request, content: bytearray) -> None:
        limit = self.bounds.body_bytes
        too_large = RefusedError(413, f"the body has more than {limit} bytes")
        stated = request.headers.get("content-length", "")
        if stated.isdigit() and int(stated[:20]) > limit:
            raise too_large
        try:
            async with asyncio.timeout(self.bounds.body_s):
                async for chunk in request.stream():
                    content += chunk
                    self._body_bytes += len(chunk)
                    if len(content) > limit:
                        raise too_large
                    if self._body_bytes > self.bounds.all_body_bytes:
                        raise RefusedError(429, "the server has as many bodies in hand as it takes", retry_s=RETRY_S)
        except TimeoutError:
            raise RefusedError(408, f"the body took more than {self.bounds.body_s:g} s") from None
        except ClientDisconnect:
            raise RefusedError(499, "the client has gone") from None

    # --- the rest -----------------------------------------------------------------------------------------------------

    def _require_host(self, request: Request) -> None:
        """Refuse names of others that were made to resolve to this machine (DNS rebinding)."""
        host = request.headers.get("host", "").lower()
        name = host.partition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
        if self.hosts and name not in self.hosts:
            raise RefusedError(421, f"this is a server of {', '.join(sorted(self.hosts))}")

    async def _models(self, request: Request) -> Response:
        self._require_host(request)
        entry = {
            "object": "model",
            "created": self._created_s,
            "owned_by": "meshwright",
            "max_model_len": self.engine.max_len,
        }
        adapters = [{**entry, "id": name, "parent": self.model} for name in self.engine.adapters]
        return JSONResponse({"object": "list", "data": [{**entry, "id": self.model}, *adapters]})

    async def _health(self, request: Request) -> Response:
        self._require_host(request)
        is_well = self.failure is None and not self.is_draining
        return JSONResponse(
            {"status": "ok" if is_well else "draining" if self.failure is None else "failed"}, 200 if is_well else 503
        )

    async def _metrics(self, request: Request) -> Response:
        self._require_host(request)
        text = self.meter.exposition(self.model, self.engine.stats(), len(self.open))
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def _refuse(self, _request: Request, error: Exception) -> Response:
        assert isinstance(error, RefusedError)
        self.meter.ended("failed" if error.status == 500 else "refused")
        headers = {} if error.retry_s is None else {"Retry-After": str(error.retry_s)}
        return JSONResponse(error.content, error.status, headers)

    async def _refuse_by_route(self, _request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        self.meter.ended("refused")
        return JSONResponse(RefusedError(error.status_code, error.detail).content, error.status_code, error.headers)
