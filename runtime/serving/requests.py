"""What a user of the engine hands in and gets back: requests with their sampling, and an event for every token."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from ...schema.errors import ConfigError, MeshwrightError

Finish = Literal["stop", "length", "cancelled", "handed"]
"""``handed``: to the instance that decodes; inside a deployment only."""

MAX_SEED = 2**63
"""Seeds are numbers of 63 bits: they travel between ranks as signed words."""


class EngineBusyError(MeshwrightError):
    """The engine's queue is full, or the engine is draining; nothing of the request was kept."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is chosen from the logits.

    Attributes:
        temperature: 0: the likeliest token.
        top_k: only that many of the likeliest; 0: all.
        top_p: only the likeliest that together have this probability.
        seed: with the token's position it decides the draw, on whatever layout and however often the request was preempted.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(f"temperature {self.temperature} is not a number from 0")
        if self.top_k < 0:
            raise ConfigError(f"top_k {self.top_k} is below 0 (0: all tokens)")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p {self.top_p} is not in (0, 1]")
        if not 0 <= self.seed < MAX_SEED:
            raise ConfigError(f"seed {self.seed} is not in 0..2^63-1")


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt to continue.

    Attributes:
        prompt: tokens, at least one.
        max_tokens: generated at most.
        stop_tokens: the first of them ends the request; it is part of the answer's events.
        adapter: name of the low-rank adapter to answer with; None: the model as it is.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = Sampling()
    stop_tokens: frozenset[int] = frozenset()
    adapter: str | None = None


@dataclass(frozen=True, kw_only=True)
class TokenEvent:
    """One generated token of a request, or its end without one.

    Attributes:
        request: id that `submit` gave.
        index: of the token among those generated, from 0; -1 without a token.
        token: None where the request was cancelled.
        finish: why the request ended with this event; None: more will come.
        time_s: `time.monotonic` when the token was known.
    """

    request: str
    index: int
    token: int | None
    finish: Finish | None
    time_s: float


Listener = Callable[[TokenEvent], None]


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What one step of an engine instance did: the arguments of a step's cost, and the seconds it took.

    Attributes:
        decode_rows: requests that decoded a token; cached_tokens: that these attended to, together.
        prefill_tokens: of prompts in this step; prefill_context: tokens that one of them attends to on average.
        prompts: prompts that ended in this step.
        waiting: requests in the queue when it began; running: requests with a cache.
        used_blocks: of the cache, after it began.
        start_s: `time.monotonic` at its beginning; seconds: until its tokens were known.
    """

    decode_rows: int
    cached_tokens: int
    prefill_tokens: int
    prefill_context: float
    prompts: int
    waiting: int
    running: int
    used_blocks: int
    start_s: float
    seconds: float


@dataclass(kw_only=True)
class RequestTimes:
    """When things happened to a request, `time.monotonic`: for queue, TTFT and TPOT beside a plan's.

    Attributes:
        submitted_s, scheduled_s, first_s, last_s: handed in; first in a step; first and last token known.
        cached_tokens: of its prompt that were found in the cache.
        preemptions: how often it lost its cache.
    """

    submitted_s: float
    scheduled_s: float = math.nan
    first_s: float = math.nan
    last_s: float = math.nan
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0

    @property
    def queue_s(self) -> float:
        """Return the time before its first step."""
        return self.scheduled_s - self.submitted_s

    @property
    def ttft_s(self) -> float:
        """Return the time to the first token."""
        return self.first_s - self.submitted_s

    @property
    def tpot_s(self) -> float:
        """Return the mean time of a token after the first; nan for one token."""
        after = self.output_tokens - 1
        return (self.last_s - self.first_s) / after if after > 0 else math.nan


@dataclass(kw_only=True)
class EngineStats:
    """Counters of an engine since it was built, with the last steps and finished requests (bounded)."""

    steps: int = 0
    tokens: int = 0
    finished: int = 0
    cancelled: int = 0
    preemptions: int = 0
    waiting: int = 0
    running: int = 0
    used_blocks: int = 0
    total_blocks: int = 0
    records: list[StepRecord] = field(default_factory=list)
    requests: list[RequestTimes] = field(default_factory=list)
