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

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from ...schema.model import ModelSpec
from ...schema.serving import Pool
from .executor import Executor
from .front import REMEMBERED, Accepted, EngineFront, max_request_len, resolve_model
from .instance import Instance, require_servable
from .measure import measure_steps
from .ranks import InstanceRanks
from .requests import EngineStats, Finish, Request, StepRecord, TokenEvent
from .scheduler import Running, Scheduler, Step
from .transfer import Peer


class ServingEngine(EngineFront):
    """One engine instance, driven from this process.

    Attributes:
        pool: what the engine was told; its ``replicas`` are other engines' business.
        num_records: of steps of attention ranks so far.
    """

    def __init__(
        self,
        instance: Instance,
        pool: Pool,
        *,
        max_queue: int | None = None,
        reuses_prefixes: bool = True,
        clock: Callable[[], float] = time.monotonic,
        adapters: Iterable[str] = (),
    ) -> None:
        """Drive an instance; see `build`."""
        limits, layout = pool.limits, pool.layout
        super().__init__(instance.spec, max_request_len(instance.spec, pool), max_queue, clock, adapters)
        self.pool, self._instance = pool, instance
        self._schedulers = [
            Scheduler(limits, reuses_prefixes=reuses_prefixes, steps_under_way=layout.pp)
            for _ in range(layout.attention_dp)
        ]
        self._under_way: deque[tuple[list[Step | None], float]] = deque()
        self._running: dict[str, tuple[Running, Scheduler]] = {}
        self._arriving: deque[tuple[Running, Scheduler, int]] = deque()
        self._hand_to: dict[str, Peer] = {}
        self._handed_by: dict[str, int] = {}
        self._tickets = self.num_records = 0
        self._counts.total_blocks = limits.cache_blocks * layout.attention_dp
        self._records: deque[StepRecord] = deque(maxlen=REMEMBERED)

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
        clock: Callable[[], float] = time.monotonic,
        adapters: Mapping[str, Path] | None = None,
    ) -> ServingEngine:
        """Return an engine of one rank in this process.

        Args:
            model: a folder with config.json (and safetensors, then loaded), a name of the catalogue, or a spec.
            weights: folder of safetensors, where not ``model``; without any the weights are made from ``seed``.
            max_queue: waiting requests beyond which `submit` refuses; None: no limit.
            prefix_cache: reuse blocks of requests that start alike.
            clock: of all times that the engine tells.
            adapters: folder of each low-rank adapter by the name that requests give.

        Raises:
            ConfigError: the model is not to be read, or the pool asks for types that our engine lacks.
            RuntimeMismatchError: this version cannot serve the model on the layout.
        """
        spec, folder = resolve_model(model, weights)
        require_servable(spec, pool)
        ranks = InstanceRanks(pool.layout)
        adapters = adapters or {}
        executor = Executor(
            spec, ranks, pool, device=torch.device(device), seed=seed, weights=folder, adapters=tuple(adapters.values())
        )
        return cls(
            Instance(executor), pool, max_queue=max_queue, reuses_prefixes=prefix_cache, clock=clock, adapters=adapters
        )

    def stats(self) -> EngineStats:
        """Return counters, and the last steps and requests."""
        counted = self.counters()
        with self._lock:
            return replace(counted, records=list(self._records), requests=list(self._ended.values()))

    def measure(self, *, max_context: int, budget_s: float) -> list[list[StepRecord]]:
        """Measure the steps of this instance."""
        return [measure_steps(self, max_context=max_context, budget_s=budget_s, clock=self._clock)]

    def _num_waiting(self) -> int:
        return sum(len(one.waiting) for one in self._schedulers)

    def close(self) -> None:
        """End the thread and the other ranks; what has not ended is lost."""
        super().close()
        self._instance.stop()

    def submit_for(self, peer: Peer, request: Request, id: str) -> str:  # noqa: A002
        """Take a request in whose tokens after the first another instance decodes; see `submit`."""
        with self._lock:
            self._hand_to[id] = peer
        return self.submit(request, id=id)

    @property
    def instance(self) -> Instance:
        """Return the ranks behind the engine, for measuring steps while it has no work."""
        return self._instance

    def take(self, accepted: Accepted, token: int, source: Peer, attention_rank: int) -> None:
        """Go on with a request whose prompt and first token another instance computed: its cache is on its way from there.

        Only from the thread that steps.
        """
        self._tickets += 1
        with self._lock:
            self._live[accepted.id] = accepted
        one = self._begin(accepted, [*accepted.request.prompt, token])
        scheduler = self._schedulers[attention_rank]
        self._running[one.id] = one, scheduler
        self._arriving.append((one, scheduler, self._tickets))
        self._instance.expect(self._tickets, source, attention_rank, len(accepted.request.prompt))

    def _begin(self, accepted: Accepted, tokens: list[int]) -> Running:
        request = accepted.request
        number = 0 if request.adapter is None else self.adapters[request.adapter]
        return Running(accepted.id, request, accepted.times, tokens, adapter=number)

    def handed_by(self, request: str) -> int:
        """Return which attention rank sent the cache of a request that was handed over; may be asked once."""
        return self._handed_by.pop(request)

    def last_records(self, count: int) -> list[StepRecord]:
        """Return the records of the last steps, as far as they are kept."""
        return list(self._records)[-count:] if count else []

    def counters(self) -> EngineStats:
        """Return the counters of `stats` alone."""
        with self._lock:
            return replace(
                self._counts,
                waiting=len(self._inbox) + self._num_waiting(),
                running=sum(len(one.running) for one in self._schedulers),
                preemptions=sum(one.num_preemptions for one in self._schedulers),
                used_blocks=sum(one.pool.num_used for one in self._schedulers),
            )

    def step(self, timeout_s: float = 0.0) -> list[TokenEvent]:
        """Run one step and return what it brought; listeners have been called. Without work, wait so long for some."""
        if not self.has_work and timeout_s > 0:
            self._arrived.wait(timeout_s)
        self._arrived.clear()
        events = list(self._take_in())
        self._adopt()
        self._begin_steps()
        if self._under_way:
            events += self._end_step()
        for event in events:
            self._tell(event)
        return events

    def _take_in(self) -> Iterator[TokenEvent]:
        """Give new requests to the least loaded attention rank, and end those that were cancelled."""
        with self._lock:
            while self._inbox:
                accepted = self._inbox.popleft()
                one = self._begin(accepted, list(accepted.request.prompt))
                one.hand_to = self._hand_to.pop(one.id, None)
                scheduler = min(self._schedulers, key=lambda candidate: candidate.load)
                scheduler.add(one)
                self._running[one.id] = one, scheduler
            cancelled, self._cancelled = list(self._cancelled), deque()
        for name in dict.fromkeys(cancelled):
            if name in self._running:
                one, scheduler = self._running.pop(name)
                with self._lock:
                    scheduler.drop(one)
                yield TokenEvent(request=name, index=-1, token=None, finish="cancelled", time_s=self._clock())

    def _adopt(self) -> None:
        """Let requests run whose caches came from another instance, in the order of their arrival, as blocks are free."""
        while self._arriving:
            one, scheduler, ticket = self._arriving[0]
            with self._lock:
                is_gone = one.is_cancelled or one.id not in self._running
                if not is_gone and not scheduler.adopt(one):
                    return
            self._instance.ingest(ticket, [] if is_gone else one.blocks, len(one.request.prompt))
            self._arriving.popleft()

    def _begin_steps(self) -> None:
        """Send steps out until each stage has one, or nothing is left to do."""
        while len(self._under_way) < self.pool.layout.pp:
            now = self._clock()
            with self._lock:
                steps = [scheduler.schedule(now) for scheduler in self._schedulers]
            if not any(steps):
                return
            self._under_way.append((steps, self._clock()))
            self._instance.begin([None if step is None else step.batch for step in steps])

    def _end_step(self) -> list[TokenEvent]:
        steps, start_s = self._under_way.popleft()
        tokens = self._instance.end()
        now, events = self._clock(), []
        with self._lock:
            for scheduler, step, sampled in zip(self._schedulers, steps, tokens, strict=True):
                if step is None:
                    continue
                self._records.append(replace(step.record, start_s=start_s, seconds=now - start_s))
                self.num_records += 1
                for one, token in scheduler.finish(step, sampled):
                    events.append(self._event(one, token, now))
                    if events[-1].finish == "handed":
                        assert one.hand_to is not None
                        self._handed_by[one.id] = self._schedulers.index(scheduler)
                        self._instance.give(one.hand_to, self._handed_by[one.id], one.blocks, one.computed)
                    if events[-1].finish is not None:
                        scheduler.drop(one)
                        del self._running[one.id]
            self._counts.steps += 1
        return events

    def _event(self, one: Running, token: int, now: float) -> TokenEvent:
        finish: Finish | None = None
        if token in one.request.stop_tokens:
            finish = "stop"
        elif one.num_generated >= one.request.max_tokens:
            finish = "length"
        elif one.hand_to is not None:
            finish = "handed"
        return TokenEvent(request=one.id, index=one.num_generated - 1, token=token, finish=finish, time_s=now)
