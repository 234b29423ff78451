"""Answers of the endpoint, whole or as a stream of events, in the form of OpenAI's API; completions with their tokens besides."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from .bodies import Common, RefusedError
from .requests import Request

if TYPE_CHECKING:
    from .endpoint import Endpoint, Ticket

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Answer:
    """The answer to one request, as it comes."""

    def __init__(self, endpoint: Endpoint, ticket: Ticket, body: Common, request: Request, *, is_chat: bool) -> None:
        self._endpoint, self._ticket, self._body, self._request, self._is_chat = (
            endpoint,
            ticket,
            body,
            request,
            is_chat,
        )
        self._text = None if endpoint.text is None else endpoint.text.decoder()
        self._pending = ""  # text that may be the beginning of one that ends the answer
        self._first_s = self._last_s = 0.0
        self.num_tokens = 0
        self.finish: str | None = None
        self._is_closed = False
        prefix = "chatcmpl" if is_chat else "cmpl"
        kind = "chat.completion" if is_chat else "text_completion"
        self._head = {
            "id": f"{prefix}-{ticket.id}",
            "object": kind,
            "created": int(time.time()),
            "model": request.adapter or endpoint.model,
        }

    async def parts(self) -> AsyncIterator[tuple[str, list[int]]]:
        """Yield text and tokens as they are known; ``finish`` is set with the last."""
        stops = self._body.stop_texts
        hold = max((len(text) for text in stops), default=1) - 1
        async for event in self._endpoint.events(self._ticket):
            if event.token is None:
                self.finish = "stop" if self.finish == "stop" else "cancelled"
                return
            self._first_s = self._first_s or event.time_s
            self._last_s = event.time_s
            self.num_tokens += 1
            is_end = event.finish == "stop"
            text = "" if self._text is None or is_end else self._text.add(event.token)
            self._pending += text
            matches = [place for stop in stops if (place := self._pending.find(stop)) >= 0]
            if matches:
                self.finish, event_text = "stop", self._pending[: min(matches)]
                self._pending = ""
                yield event_text, [event.token]
                return
            self.finish = event.finish
            ready = len(self._pending) if event.finish is not None else max(len(self._pending) - hold, 0)
            out, self._pending = self._pending[:ready], self._pending[ready:]
            yield out, [event.token]

    def close(self) -> None:
        """End the request in the engine where it has not ended, and count it; every answer comes here once."""
        if self._is_closed:
            return
        self._is_closed = True
        self._endpoint.open.pop(self._ticket.id, None)
        self._endpoint.engine.cancel(self._ticket.id)
        is_served = self.finish in ("stop", "length")
        outcome = "served" if is_served else "failed" if self._endpoint.failure is not None else "cancelled"
        times = (self._first_s, self._last_s, self.num_tokens) if self.num_tokens else ()
        of_engine = self._endpoint.engine.times(self._ticket.id)
        self._endpoint.meter.ended(
            outcome, prompt_tokens=self._ticket.prompt_tokens, times=times, arrived_s=self._ticket.arrived_s,
            queue_s=0.0 if of_engine is None else of_engine.queue_s,
        )  # fmt: skip

    async def complete(self) -> dict[str, Any]:
        """Return the answer in full."""
        texts, tokens = [], []
        async for text, new in self.parts():
            texts.append(text)
            tokens += new
        choice: dict[str, Any] = {"index": 0, "finish_reason": self.finish, "logprobs": None}
        if self._is_chat:
            choice["message"] = {"role": "assistant", "content": "".join(texts)}
        else:
            choice |= {"text": "".join(texts), "token_ids": tokens}
        return {**self._head, "choices": [choice], "usage": self._usage()}

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the answer as server-sent events."""
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        head = {**self._head, "object": kind}
        if self._is_chat:
            yield sse(
                {
                    **head,
                    "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}],
                }
            )
        try:
            async for text, tokens in self.parts():
                choice: dict[str, Any] = {"index": 0, "finish_reason": self.finish}
                choice |= (
                    {"delta": {"content": text}}
                    if self._is_chat
                    else {"text": text, "token_ids": tokens, "logprobs": None}
                )
                yield sse({**head, "choices": [choice]})
        except RefusedError as error:
            yield sse(error.content)
            return
        options = self._body.stream_options
        if options is not None and options.include_usage:
            yield sse({**head, "choices": [], "usage": self._usage()})
        yield b"data: [DONE]\n\n"

    def _usage(self) -> dict[str, int]:
        prompt = self._ticket.prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": self.num_tokens, "total_tokens": prompt + self.num_tokens}


class EventStream(Response):
    """A stream that ends with its client: with one that is gone, and with one that reads nothing for too long."""

    def __init__(self, answer: Answer, unread_s: float, closed: Callable[[], None]) -> None:
        super().__init__(
            media_type="text/event-stream", headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        )
        del self.headers["content-length"]
        self._answer, self._unread_s, self._closed = answer, unread_s, closed

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Send the events; without a client close the connection as it is."""
        work, gone = asyncio.create_task(self._send(send)), asyncio.create_task(disconnected(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            work.cancel()
            gone.cancel()
            self._answer.close()
            self._closed()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for chunk in self._answer.chunks():
                async with asyncio.timeout(self._unread_s):
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (TimeoutError, OSError):
            return  # the connection is closed unfinished: the client cannot take it for a whole answer


async def disconnected(receive: Receive) -> None:
    """Return when the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def sse(content: Any) -> bytes:
    """Return a server-sent event."""
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n".encode(errors="replace")
