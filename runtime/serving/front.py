"""What every serving engine does for those who call it: take requests in, tell listeners, drain, step in a thread.

`ServingEngine` (engine.py) steps one instance in this process; `Deployment` (deployment.py) lets other processes step.
"""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ...schema.errors import ConfigError
from ...schema.model import ModelSpec
from ...schema.serving import Pool
from .requests import EngineBusyError, EngineStats, Listener, Request, RequestTimes, StepRecord, TokenEvent

REMEMBERED = 10_000
"""Steps and ended requests whose times are kept."""


@dataclass
class Accepted:
    """A request that has not ended."""

    id: str
    request: Request
    times: RequestTimes
    listener: Listener | None


class EngineFront(ABC):
    """A serving engine, as those see it who call it: abstract base.

    Attributes:
        spec: of the model.
        max_len: tokens of a prompt and its answer at most.
        adapters: number of each by its name, from 1.
    """

    def __init__(
        self, spec: ModelSpec, max_len: int, max_queue: int | None, clock: Callable[[], float] = time.monotonic,
        adapters: Iterable[str] = (),
    ) -> None:  # fmt: skip
        self.adapters = {name: number for number, name in enumerate(adapters, start=1)}
        self.spec, self.max_len, self._max_queue, self._clock = spec, max_len, max_queue, clock
        self._lock = threading.Lock()
        self._arrived = threading.Event()
        self._inbox: deque[Accepted] = deque()
        self._cancelled: deque[str] = deque()
        self._live: dict[str, Accepted] = {}
        self._ended: OrderedDict[str, RequestTimes] = OrderedDict()
        self._counts = EngineStats()
        self._next_id = 0
        self._is_draining = False
        self._thread: threading.Thread | None = None
        self._stops = threading.Event()

    # --- any thread ---------------------------------------------------------------------------------------------------

    def submit(self, request: Request, on_token: Listener | None = None, *, id: str | None = None) -> str:  # noqa: A002
        """Take a request in; return its id (``id`` where given).

        Raises:
            ConfigError: it cannot be served.
            EngineBusyError: the queue is full, or the engine drains.
        """
        self._check(request)
        with self._lock:
            if self._is_draining:
                raise EngineBusyError("the engine is draining and takes no further requests")
            waiting = len(self._inbox) + self._num_waiting()
            if self._max_queue is not None and waiting >= self._max_queue:
                raise EngineBusyError(
                    f"{waiting} requests wait already, as many as the queue takes", help="try again later"
                )
            name = id or f"request-{self._next_id}"
            if name in self._live:
                raise ConfigError(f"there is a request {name} already")
            self._next_id += 1
            times = RequestTimes(submitted_s=self._clock(), prompt_tokens=len(request.prompt))
            self._live[name] = Accepted(name, request, times, on_token)
            self._inbox.append(self._live[name])
        self._arrived.set()
        return name

    def cancel(self, request: str) -> bool:
        """End a request; its last event comes with the next step. False where it has ended already."""
        with self._lock:
            if request not in self._live:
                return False
            self._cancelled.append(request)
        self._arrived.set()
        return True

    @property
    def has_work(self) -> bool:
        """Tell whether a request has not ended."""
        return bool(self._live)

    def times(self, request: str) -> RequestTimes | None:
        """Return when things happened to a request; None for one that is unknown or long ended."""
        with self._lock:
            live = self._live.get(request)
            return live.times if live is not None else self._ended.get(request)

    @abstractmethod
    def stats(self) -> EngineStats:
        """Return counters, and the last steps and requests."""

    @abstractmethod
    def measure(self, *, max_context: int, budget_s: float) -> list[list[StepRecord]]:
        """Measure the steps of every instance, all at once (`measure_steps`); only without requests."""

    @abstractmethod
    def _num_waiting(self) -> int:
        """Return the requests that wait for their first step, those that `step` has not seen left out."""

    # --- the thread that steps ----------------------------------------------------------------------------------------

    @abstractmethod
    def step(self, timeout_s: float = 0.0) -> list[TokenEvent]:
        """Run one step and return what it brought; listeners have been called. Without work, wait so long for some."""

    def drain(self) -> list[TokenEvent]:
        """Take no further requests and step until those accepted have ended; return the events."""
        self._is_draining = True
        if self._thread is not None:
            while self.has_work:
                time.sleep(0.005)
            return []
        return [event for _ in iter(lambda: self.has_work, False) for event in self.step()]

    def stop_accepting(self) -> None:
        """Take no further requests, without waiting for those accepted."""
        self._is_draining = True

    def start(self) -> None:
        """Step in a thread of its own from now on."""
        assert self._thread is None
        self._stops.clear()
        self._thread = threading.Thread(target=self._run, name="serving-engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its step."""
        self._stops.set()
        self._arrived.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """End the thread and the other ranks; what has not ended is lost."""
        self.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._stops.is_set():
            self.step(timeout_s=0.1)

    def _check(self, request: Request) -> None:
        length, vocabulary = len(request.prompt), self.spec.vocab_size
        if not length:
            raise ConfigError("the prompt is empty")
        if request.max_tokens < 1:
            raise ConfigError(f"max_tokens {request.max_tokens} is below 1")
        outside = next((token for token in request.prompt if not 0 <= token < vocabulary), None)
        if outside is not None:
            raise ConfigError(f"token {outside} of the prompt is not in the vocabulary of {vocabulary}")
        if length + request.max_tokens > self.max_len:
            raise ConfigError(
                f"a prompt of {length} tokens and {request.max_tokens} to generate are more than the {self.max_len} "
                "that a request may have here",
                help="a shorter prompt, or smaller max_tokens",
            )
        if request.adapter is not None and request.adapter not in self.adapters:
            raise ConfigError(
                f"there is no adapter {request.adapter}", details=(f"there are: {', '.join(self.adapters) or 'none'}",)
            )

    def _tell(self, event: TokenEvent) -> None:
        """Note what an event says about its request, then let its listener hear it."""
        with self._lock:
            accepted = self._live[event.request]
            times = accepted.times
            if event.token is not None:
                if math.isnan(times.first_s):
                    times.first_s = event.time_s
                times.last_s, times.output_tokens = event.time_s, event.index + 1
                self._counts.tokens += 1
            if event.finish is not None:
                del self._live[event.request]
                self._ended[event.request] = accepted.times
                if len(self._ended) > REMEMBERED:
                    self._ended.popitem(last=False)
                if event.finish == "cancelled":
                    self._counts.cancelled += 1
                else:
                    self._counts.finished += 1
        if accepted.listener is not None:
            accepted.listener(event)


def max_request_len(spec: ModelSpec, pool: Pool) -> int:
    """Return the tokens that a request may have on an instance of a pool."""
    limits = pool.limits
    capacity = limits.cache_blocks * limits.block_size
    uncut = capacity if limits.chunk is not None else limits.max_batched_tokens
    return min(spec.max_seq_len, spec.embedding.num_positions or spec.max_seq_len, capacity, uncut)


def resolve_model(model: str | Path | ModelSpec, weights: str | Path | None) -> tuple[ModelSpec, Path | None]:
    """Return a model's spec, and the folder of its weights where there are any."""
    if isinstance(model, ModelSpec):
        return model, None if weights is None else Path(weights)
    spec = ModelSpec.resolve(str(model))
    folder = Path(model)
    if weights is None and folder.is_dir() and any(folder.glob("*.safetensors")):
        weights = folder
    return spec, None if weights is None else Path(weights)
