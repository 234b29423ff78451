"""Bodies of requests in OpenAI's form, and answers that refuse them.

Fields that would change an answer in a way that our engine lacks are taken with the value that changes nothing, and refused with
any other; unknown fields are refused.
"""

from __future__ import annotations

import json
import secrets
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from .requests import Request, Sampling

GREEDY_BELOW = 1e-5
"""Temperatures below are the likeliest token: their quotients overflow."""

MAX_FIELDS = 64
DEFAULT_TOKENS = 16
"""Of a completion that does not say how many, as in OpenAI's API."""


class RefusedError(Exception):
    """A request that gets an error: its status and OpenAI's object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_s: int | None = None,
    ) -> None:
        super().__init__(message)
        kinds = {429: "rate_limit_error", 500: "server_error", 503: "service_unavailable"}
        self.status, self.retry_s = status, retry_s
        error = {"message": message, "type": kinds.get(status, "invalid_request_error"), "param": param, "code": code}
        self.content = {"error": error}


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)


class StreamOptions(_Body):
    """What a stream has besides tokens."""

    include_usage: bool = False


Token = Annotated[int, Field(ge=0, lt=2**31)]
One = Annotated[int, Field(ge=1, le=1)]
StopText = Annotated[str, Field(min_length=1, max_length=256)]


class Common(_Body):
    """What both kinds of requests may ask for.

    Attributes:
        stop: texts that end an answer and do not stand in it; stop_token_ids: tokens that do.
        ignore_eos: the model's own ends count as any token.
    """

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=4)] | None = None
    stop_token_ids: Annotated[list[Token], Field(max_length=64)] | None = None
    ignore_eos: bool = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    n: One | None = None
    best_of: One | None = None
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None

    def request(self, prompt: tuple[int, ...], max_tokens: int, ends: frozenset[int]) -> Request:
        """Return what the engine is asked for; ``ends`` are the model's own."""
        for name, neutral in (("presence_penalty", 0), ("frequency_penalty", 0), ("repetition_penalty", 1)):
            if getattr(self, name) not in (None, neutral):
                raise RefusedError(400, f"{name} other than {neutral} is not supported", param=name)
        heat = 1.0 if self.temperature is None else self.temperature
        sampling = Sampling(
            temperature=heat if heat >= GREEDY_BELOW else 0.0,
            top_k=max(self.top_k or 0, 0),
            top_p=self.top_p or 1.0,
            seed=secrets.randbits(62) if self.seed is None else self.seed,
        )
        stop = frozenset(self.stop_token_ids or ()) | (frozenset() if self.ignore_eos else ends)
        return Request(prompt=prompt, max_tokens=max_tokens, sampling=sampling, stop_tokens=stop)

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """Return the texts that end an answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class CompletionBody(Common):
    """POST /v1/completions. ``prompt``: a text, or the numbers of tokens; one of either in a list."""

    prompt: Any
    echo: Literal[False] | None = None
    logprobs: None = None
    suffix: Literal[""] | None = None

    @field_validator("prompt")
    @classmethod
    def _is_one_prompt(cls, value: Any) -> str | tuple[int, ...]:
        """Return a prompt by itself; by hand, since a million wrong tokens are one error."""
        parsed = (
            value[0] if isinstance(value, list) and len(value) == 1 and isinstance(value[0], (str, list)) else value
        )
        if isinstance(parsed, str):
            return parsed
        if not isinstance(parsed, list) or not all(type(token) is int and 0 <= token < 2**31 for token in parsed):
            raise ValueError("must be a text, or a list of the numbers of tokens; one prompt a request")
        return tuple(parsed)


class TextPart(_Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(_Body):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(max_length=4096)]
    name: str | None = None

    def plain(self) -> dict[str, Any]:
        """Return it as templates read it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": content, **({"name": self.name} if self.name else {})}


class ChatBody(Common):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None


B = TypeVar("B", bound=Common)


def read_body(kind: type[B], content: bytes) -> B:
    """Return a body.

    Raises:
        RefusedError: it is no JSON, or not of this form; with the field.
    """
    try:
        parsed = json.loads(content)
    except (ValueError, RecursionError):
        raise RefusedError(400, "the body is no JSON") from None
    if not isinstance(parsed, dict) or len(parsed) > MAX_FIELDS:
        raise RefusedError(400, f"the body must be an object of at most {MAX_FIELDS} fields")
    try:
        return kind.model_validate(parsed)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join(str(part)[:64] for part in first["loc"])
        raise RefusedError(400, f"{place or 'body'}: {first['msg'][:300]}", param=place or None) from None
