"""The serving engine: `ServingEngine.build(model, pool)`, then `submit` requests and `step`.

```python
engine = ServingEngine.build("tiny-llama/", pool)    # a folder of safetensors, a catalogue name, or a ModelSpec (made weights)
request = engine.submit(Request(prompt=(1, 2, 3), max_tokens=16), on_token=print)    # any thread; -> id
while engine.has_work:
    events = engine.step()    # one thread; -> list[TokenEvent]
engine.cancel(request)        # any thread; True where it had not ended
engine.drain()                # no further requests; steps until all accepted ones have ended
engine.stats()                # EngineStats: counters, a StepRecord of each step, RequestTimes of ended requests
engine.times(request)         # RequestTimes of a request, until 10,000 others have ended
engine.start(), engine.stop() # a thread that steps, instead of calling `step`
engine.close()                # ends the thread and other ranks
```

`submit` raises ConfigError for what cannot be served (empty prompt, tokens outside the vocabulary, longer than ``max_len``, bad
sampling) and EngineBusyError where the queue is full or the engine drains: then nothing of the request was kept, and what was
accepted is never lost. ``on_token``
is called in the thread that steps, after the step, once for each TokenEvent of the request in order;
the last has ``finish`` set ("stop", "length", "cancelled"). Every accepted request ends with exactly one such event.

Rank 0 of an instance drives: it schedules, sends the rows to all ranks, and takes their tokens in; the other ranks `follow`.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from ...schema.errors import ConfigError
from ...schema.model import ModelSpec
from ...schema.serving import Pool
from .executor import Executor
from .instance import Instance, require_servable
from .ranks import InstanceRanks
from .requests import (
    EngineBusyError,
    EngineStats,
    Finish,
    Listener,
    Request,
    RequestTimes,
    StepRecord,
    TokenEvent,
)
from .scheduler import Running, Scheduler, Step

_REMEMBERED = 10_000
"""Steps and ended requests whose times are kept."""


class ServingEngine:
    """One engine instance, driven from this process.

    Attributes:
        spec: of the model.
        pool: what the engine was told; its ``replicas`` are other engines' business.
        max_len: tokens of a prompt and its answer at most.
    """

    def __init__(
        self, instance: Instance, pool: Pool, *, max_queue: int | None = None, reuses_prefixes: bool = True
    ) -> None:
        """Drive an instance; see `build`."""
        limits, layout = pool.limits, pool.layout
        self.spec, self.pool, self._instance, self._max_queue = instance.spec, pool, instance, max_queue
        capacity = limits.cache_blocks * limits.block_size
        uncut = capacity if limits.chunk is not None else limits.max_batched_tokens
        learned = self.spec.embedding.num_positions or self.spec.max_seq_len
        self.max_len = min(self.spec.max_seq_len, learned, capacity, uncut)
        self._schedulers = [
            Scheduler(limits, reuses_prefixes=reuses_prefixes, steps_under_way=layout.pp)
            for _ in range(layout.attention_dp)
        ]
        self._under_way: deque[tuple[list[Step | None], float]] = deque()
        self._lock = threading.Lock()
        self._arrived = threading.Event()
        self._inbox: deque[Running] = deque()
        self._cancelled: deque[str] = deque()
        self._live: dict[str, tuple[Running, Listener | None, Scheduler | None]] = {}
        self._ended: OrderedDict[str, RequestTimes] = OrderedDict()
        self._counts = EngineStats(total_blocks=limits.cache_blocks * layout.attention_dp)
        self._records: deque[StepRecord] = deque(maxlen=_REMEMBERED)
        self._next_id = 0
        self._is_draining = False
        self._thread: threading.Thread | None = None
        self._stops = threading.Event()

    @classmethod
    def build(
        cls,
        model: str | Path | ModelSpec,
        pool: Pool,
        *,
        weights: str | Path | None = None,
        device: str | torch.device = "cpu",
        seed: int = 0,
        max_queue: int | None = None,
        prefix_cache: bool = True,
    ) -> ServingEngine:
        """Return an engine of one rank in this process.

        Args:
            model: a folder with config.json (and safetensors, then loaded), a name of the catalogue, or a spec.
            weights: folder of safetensors, where not ``model``; without any the weights are made from ``seed``.
            max_queue: waiting requests beyond which `submit` refuses; None: no limit.
            prefix_cache: reuse blocks of requests that start alike.

        Raises:
            ConfigError: the model is not to be read, or the pool asks for types that our engine lacks.
            RuntimeMismatchError: this version cannot serve the model on the layout.
        """
        spec, folder = resolve_model(model, weights)
        require_servable(spec, pool)
        ranks = InstanceRanks(pool.layout)
        executor = Executor(spec, ranks, pool, device=torch.device(device), seed=seed, weights=folder)
        return cls(Instance(executor), pool, max_queue=max_queue, reuses_prefixes=prefix_cache)

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
            waiting = len(self._inbox) + sum(len(one.waiting) for one in self._schedulers)
            if self._max_queue is not None and waiting >= self._max_queue:
                raise EngineBusyError(
                    f"{waiting} requests wait already, as many as the queue takes", help="try again later"
                )
            name = id or f"request-{self._next_id}"
            if name in self._live:
                raise ConfigError(f"there is a request {name} already")
            self._next_id += 1
            times = RequestTimes(submitted_s=time.monotonic(), prompt_tokens=len(request.prompt))
            running = Running(name, request, times, list(request.prompt))
            self._live[name] = (running, on_token, None)
            self._inbox.append(running)
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
            return live[0].times if live is not None else self._ended.get(request)

    def stats(self) -> EngineStats:
        """Return counters, and the last steps and requests."""
        with self._lock:
            return replace(
                self._counts,
                waiting=len(self._inbox) + sum(len(one.waiting) for one in self._schedulers),
                running=sum(len(one.running) for one in self._schedulers),
                preemptions=sum(one.num_preemptions for one in self._schedulers),
                used_blocks=sum(one.pool.num_used for one in self._schedulers),
                records=list(self._records),
                requests=list(self._ended.values()),
            )

    # --- the thread that steps ----------------------------------------------------------------------------------------

    def step(self, timeout_s: float = 0.0) -> list[TokenEvent]:
        """Run one step and return what it brought; listeners have been called. Without work, wait so long for some."""
        if not self.has_work and timeout_s > 0:
            self._arrived.wait(timeout_s)
        self._arrived.clear()
        events = list(self._take_in())
        self._begin_steps()
        if self._under_way:
            events += self._end_step()
        for event in events:
            self._tell(event)
        return events

    def drain(self) -> list[TokenEvent]:
        """Take no further requests and step until those accepted have ended; return the events."""
        self._is_draining = True
        if self._thread is not None:
            while self.has_work:
                time.sleep(0.005)
            return []
        return [event for _ in iter(lambda: self.has_work, False) for event in self.step()]

    def refuse_further(self) -> None:
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
        self._instance.stop()

    def __enter__(self) -> ServingEngine:
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
        if request.adapter is not None:
            raise ConfigError(f"there is no adapter {request.adapter}")

    def _take_in(self) -> Iterator[TokenEvent]:
        """Give new requests to the least loaded attention rank, and end those that were cancelled."""
        with self._lock:
            while self._inbox:
                one = self._inbox.popleft()
                scheduler = min(self._schedulers, key=lambda candidate: candidate.load)
                scheduler.add(one)
                _, listener, _ = self._live[one.id]
                self._live[one.id] = (one, listener, scheduler)
            cancelled, self._cancelled = list(self._cancelled), deque()
        for name in dict.fromkeys(cancelled):
            if name in self._live:
                one, _, scheduler = self._live[name]
                assert scheduler is not None
                with self._lock:
                    scheduler.drop(one)
                yield TokenEvent(request=name, index=-1, token=None, finish="cancelled", time_s=time.monotonic())

    def _begin_steps(self) -> None:
        """Send steps out until each stage has one, or nothing is left to do."""
        while len(self._under_way) < self.pool.layout.pp:
            now = time.monotonic()
            with self._lock:
                steps = [scheduler.schedule(now) for scheduler in self._schedulers]
            if not any(steps):
                return
            self._under_way.append((steps, now))
            self._instance.begin([None if step is None else step.batch for step in steps])

    def _end_step(self) -> list[TokenEvent]:
        steps, start_s = self._under_way.popleft()
        tokens = self._instance.end()
        now, events = time.monotonic(), []
        with self._lock:
            for scheduler, step, sampled in zip(self._schedulers, steps, tokens, strict=True):
                if step is None:
                    continue
                self._records.append(replace(step.record, seconds=now - start_s))
                for one, token in scheduler.finish(step, sampled):
                    events.append(self._event(one, token, now))
                    if events[-1].finish is not None:
                        scheduler.drop(one)
            self._counts.steps += 1
            self._counts.tokens += len(events)
        return events

    def _event(self, one: Running, token: int, now: float) -> TokenEvent:
        times = one.times
        if not times.output_tokens:
            times.first_s = now
        times.last_s, times.output_tokens = now, times.output_tokens + 1
        finish: Finish | None = None
        if token in one.request.stop_tokens:
            finish = "stop"
        elif one.num_generated >= one.request.max_tokens:
            finish = "length"
        return TokenEvent(request=one.id, index=one.num_generated - 1, token=token, finish=finish, time_s=now)

    def _tell(self, event: TokenEvent) -> None:
        with self._lock:
            one, listener, _ = self._live[event.request]
            if event.finish is not None:
                del self._live[event.request]
                self._ended[event.request] = one.times
                if len(self._ended) > _REMEMBERED:
                    self._ended.popitem(last=False)
                if event.finish == "cancelled":
                    self._counts.cancelled += 1
                else:
                    self._counts.finished += 1
        if listener is not None:
            listener(event)


def resolve_model(model: str | Path | ModelSpec, weights: str | Path | None) -> tuple[ModelSpec, Path | None]:
    """Return a model's spec, and the folder of its weights where there are any."""
    if isinstance(model, ModelSpec):
        return model, None if weights is None else Path(weights)
    spec = ModelSpec.resolve(str(model))
    folder = Path(model)
    if weights is None and folder.is_dir() and any(folder.glob("*.safetensors")):
        weights = folder
    return spec, None if weights is None else Path(weights)
