"""A deployment of several ranks on this machine: engine instances in processes of their own, and the router before them.

`open_engine` is the way in: the same methods as `ServingEngine`, whatever the pools are. Aggregated instances answer a request
alone.
With prefill and decode pools, a prefill instance computes the prompt and the first token, and its ranks send the cache to those of
a decode instance, which goes on. A new request goes to the instance whose requests have fewest tokens left to compute.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ...profilers.machine import cpu_rank_environment, num_cores
from ...profilers.run.faults import explain_failure
from ...profilers.run.processes import JobEnd, NodeJob, program, run_ranks
from ...schema.errors import ConfigError, MeshwrightError
from ...schema.model import ModelSpec
from ...schema.serving import Pool
from ..job.rendezvous import Rendezvous, meet
from . import worker
from .engine import ServingEngine
from .front import REMEMBERED, EngineFront, max_request_len, resolve_model
from .instance import require_servable
from .requests import EngineStats, StepRecord, TokenEvent
from .worker import ServingJob, words_of

_START_S = 600.0
"""How long ranks may take to load their weights."""

_STOP_S = 10.0
_POLL_S = 0.1


def open_engine(
    model: str | Path | ModelSpec,
    pools: Pool | Sequence[Pool],
    *,
    weights: str | Path | None = None,
    device: str = "cpu",
    seed: int = 0,
    max_queue: int | None = None,
    prefix_cache: bool = True,
    adapters: Mapping[str, Path] | None = None,
) -> EngineFront:
    """Return an engine for pools: in this process where they are one device, else in processes that it starts on this machine.

    Args: as `ServingEngine.build`.

    Raises:
        ConfigError: the pools do not make a deployment, or the model is not to be read.
        MeshwrightError: a rank could not start; with what it said.
    """
    pools = (pools,) if isinstance(pools, Pool) else tuple(pools)
    if sum(pool.num_devices for pool in pools) == 1:
        return ServingEngine.build(
            model, pools[0], weights=weights, device=device, seed=seed, max_queue=max_queue, prefix_cache=prefix_cache,
            adapters=adapters,
        )  # fmt: skip
    spec, folder = resolve_model(model, weights)
    for pool in pools:
        require_servable(spec, pool, is_single=False)
    job = ServingJob(
        model=spec, pools=pools, weights=None if folder is None else str(folder.resolve()), seed=seed, device=device,
        prefix_cache=prefix_cache, socket="",
        adapters=tuple((name, str(Path(folder).resolve())) for name, folder in (adapters or {}).items()),
    )  # fmt: skip
    return Deployment(job, max_queue=max_queue)


@dataclass
class _Routed:
    """Where a request is: the instance that has it, and the one (with its attention rank) that will decode it."""

    instance: int
    peer: tuple[int, int] | None
    tokens: int


@dataclass
class _Seen:
    """What an instance has said of itself, and the tokens of the requests that it has, by attention rank."""

    counters: dict[str, int] = field(default_factory=dict)
    records: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    tokens: list[int] = field(default_factory=list)


class Deployment(EngineFront):
    """Engine instances in other processes of this machine."""

    def __init__(self, job: ServingJob, *, max_queue: int | None = None) -> None:
        """Start the ranks and wait until every instance can serve."""
        self.job, self.instances = job, job.instances()
        self._entries, self._decoders = _by_role(job.pools, self.instances)
        super().__init__(
            job.model, min(max_request_len(job.model, pool) for pool in job.pools), max_queue,
            adapters=[name for name, _ in job.adapters],
        )  # fmt: skip
        self._arrived = _Wake()  # type: ignore[assignment]
        self._routes: dict[str, _Routed] = {}
        self._seen = [_Seen(tokens=[0] * pool.layout.attention_dp) for pool, _ in self.instances]
        self._end: JobEnd | BaseException | None = None
        self._is_closed = threading.Event()
        self._connections: dict[int, Connection] = {}
        self._folder = contextlib.ExitStack()
        folder = Path(self._folder.enter_context(tempfile.TemporaryDirectory(prefix="meshwright-serve-")))
        self._ranks = threading.Thread(target=self._run_ranks, args=(folder,), name="serving-ranks", daemon=True)
        try:
            self._meet(folder)
        except BaseException:
            self.close()
            raise

    def stats(self) -> EngineStats:
        """Return counters of all instances together, and the last steps and requests."""
        with self._lock:
            known = [
                field.name
                for field in fields(EngineStats)
                if field.name not in ("records", "requests", "finished", "tokens")
            ]
            sums = {name: sum(seen.counters.get(name, 0) for seen in self._seen) for name in known}
            sums["waiting"] += len(self._inbox)
            sums["cancelled"] = self._counts.cancelled
            return replace(
                self._counts,
                **sums,
                records=[record for seen in self._seen for record in seen.records],
                requests=list(self._ended.values()),
            )

    def records(self, instance: int) -> list[StepRecord]:
        """Return the last steps of one instance."""
        return list(self._seen[instance].records)

    def measure(self, *, max_context: int, budget_s: float) -> list[list[StepRecord]]:
        """Measure the steps of every instance, all at once."""
        for idx in self._connections:
            self._say(idx, {"do": "measure", "max_context": max_context, "budget_s": budget_s})
        measured = []
        for _, connection in sorted(self._connections.items()):
            try:
                measured.append([StepRecord(**record) for record in json.loads(connection.recv_bytes())])
            except (EOFError, OSError):
                self._ranks.join(_STOP_S)
                raise self._failure() from None
        return measured

    def step(self, timeout_s: float = 0.0) -> list[TokenEvent]:
        """Send what was submitted, and return what the instances have said since; waits for it where there is work."""
        patience = _POLL_S if self.has_work else timeout_s
        self._send_new()
        sources: list[Any] = [*self._connections.values(), self._arrived.reader]  # type: ignore[attr-defined]
        ready = wait(sources, patience)
        self._arrived.clear()
        events = []
        for idx, connection in self._connections.items():
            while connection in ready and self._has_more(connection):
                events += self._hear(idx, connection)
        self._send_new()
        if self._end is not None:
            raise self._failure()
        for event in events:
            self._tell(event)
        return events

    def close(self) -> None:
        """End all ranks; what has not ended is lost."""
        super().close()
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.send_bytes(b'{"do": "stop"}')
        if self._ranks.ident is not None:
            self._ranks.join(_STOP_S if self._connections else 0)
            self._is_closed.set()
            self._ranks.join()
        for connection in self._connections.values():
            connection.close()
        self._folder.close()

    def _num_waiting(self) -> int:
        return sum(seen.counters.get("waiting", 0) for seen in self._seen)

    # --- ranks --------------------------------------------------------------------------------------------------------

    def _meet(self, folder: Path) -> None:
        """Start the ranks, and let every driver come to the socket."""
        with socket.socket(socket.AF_UNIX) as meeting:
            path = folder / "drivers"
            meeting.bind(str(path))
            meeting.listen(len(self.instances))
            meeting.settimeout(_POLL_S)
            self.job.replace(socket=str(path)).save(folder / "job.json")
            self._ranks.start()
            deadline = time.monotonic() + _START_S
            while len(self._connections) < len(self.instances):
                if self._end is not None:
                    raise self._failure()
                if time.monotonic() > deadline:
                    raise MeshwrightError(f"the ranks of the deployment are not ready after {_START_S:g} s")
                with contextlib.suppress(TimeoutError):
                    came, _ = meeting.accept()
                    came.setblocking(True)
                    connection = Connection(came.detach())
                    self._connections[json.loads(connection.recv_bytes())["instance"]] = connection

    def _run_ranks(self, folder: Path) -> None:
        count = sum(pool.num_devices for pool in self.job.pools)
        threads = str(max(1, num_cores() // count))
        chosen = {name: os.environ.get(name, threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        try:
            with meet(Rendezvous()) as meeting:
                ranks = NodeJob(
                    command=program(worker.__name__, folder / "job.json"),
                    folder=folder, num_ranks=count, world_size=count,
                    variables={**chosen, **cpu_rank_environment(), **meeting.variables},
                )  # fmt: skip
                self._end = run_ranks(ranks, lambda _: self._require_open())
        except BaseException as error:  # told by the thread that steps
            self._end = error
        self._arrived.set()

    def _require_open(self) -> None:
        if self._is_closed.is_set():
            raise InterruptedError

    def _failure(self) -> BaseException:
        """Return why the ranks have ended."""
        if isinstance(self._end, BaseException):
            return self._end
        if self._end is not None and self._end.deaths:
            count = sum(pool.num_devices for pool in self.job.pools)
            return explain_failure(self._end.deaths, world_size=count, ended_well=self._end.ended_well)
        return MeshwrightError("the ranks of the deployment have ended")

    # --- requests -----------------------------------------------------------------------------------------------------

    def _send_new(self) -> None:
        with self._lock:
            new, self._inbox = list(self._inbox), deque()
            cancelled, self._cancelled = list(self._cancelled), deque()
        for accepted in new:
            entry = min(self._entries, key=lambda idx: sum(self._seen[idx].tokens))
            peer = None
            prompt, max_tokens = len(accepted.request.prompt), accepted.request.max_tokens
            if self._decoders:
                candidates = [(idx, rank) for idx in self._decoders for rank in range(len(self._seen[idx].tokens))]
                peer = min(candidates, key=lambda place: self._seen[place[0]].tokens[place[1]])
                self._seen[peer[0]].tokens[peer[1]] += prompt + max_tokens
            self._routes[accepted.id] = _Routed(entry, peer, prompt + max_tokens)
            self._seen[entry].tokens[0] += prompt + max_tokens
            self._say(entry, {"do": "submit", "id": accepted.id, "request": words_of(accepted.request), "peer": peer})
        for name in dict.fromkeys(cancelled):
            if name in self._routes:
                self._say(self._routes[name].instance, {"do": "cancel", "id": name})

    def _say(self, instance: int, message: dict[str, Any]) -> None:
        # Where its process is gone, the launcher says why.
        with contextlib.suppress(OSError):
            self._connections[instance].send_bytes(json.dumps(message).encode())

    def _has_more(self, connection: Connection) -> bool:
        try:
            return connection.poll(0)
        except OSError:
            return False

    def _hear(self, instance: int, connection: Connection) -> list[TokenEvent]:
        """Take in a driver's message; return the events that users hear of."""
        try:
            message = json.loads(connection.recv_bytes())
        except (EOFError, OSError):
            self._ranks.join(_STOP_S)  # its launcher ends the others and knows why
            raise self._failure() from None
        seen, events = self._seen[instance], []
        with self._lock:
            seen.counters = message["counters"]
            seen.records.extend(StepRecord(**record) for record in message["records"])
        for content in message["events"]:
            event = TokenEvent(**{field.name: content[field.name] for field in fields(TokenEvent)})
            self._note(event, content)
            if event.finish == "handed":
                event = replace(event, finish=None)
                self._hand_over(event, instance, content["source_rank"])
            elif event.finish is not None:
                self._forget(event.request)
            events.append(event)
        return events

    def _note(self, event: TokenEvent, content: dict[str, Any]) -> None:
        times = self._live[event.request].times
        if math.isnan(times.scheduled_s) and content["scheduled_s"] is not None:
            times.scheduled_s, times.cached_tokens = content["scheduled_s"], content["cached"]
        times.preemptions = max(times.preemptions, content["preemptions"])

    def _hand_over(self, event: TokenEvent, source: int, attention_rank: int) -> None:
        """Let the decode instance take what the prefill instance has sent."""
        route = self._routes[event.request]
        assert route.peer is not None
        self._seen[source].tokens[0] -= route.tokens
        target, target_rank = route.peer
        route.instance = target
        self._say(
            target,
            {"do": "take", "id": event.request, "request": words_of(self._live[event.request].request), "token": event.token,
             "source": [source, attention_rank], "attention_rank": target_rank, "now": event.time_s},
        )  # fmt: skip
        if event.request in self._cancelled:
            self._say(target, {"do": "cancel", "id": event.request})

    def _forget(self, request: str) -> None:
        route = self._routes.pop(request)
        if route.peer is None:
            self._seen[route.instance].tokens[0] -= route.tokens
            return
        self._seen[route.peer[0]].tokens[route.peer[1]] -= route.tokens
        if route.instance != route.peer[0]:  # it ended before it was handed over
            self._seen[route.instance].tokens[0] -= route.tokens


class _Wake:
    """What `threading.Event` is to a thread that waits, to one that waits for messages."""

    def __init__(self) -> None:
        self.reader, self._writer = socket.socketpair()
        self.reader.setblocking(False)
        self._writer.setblocking(False)

    def set(self) -> None:
        """Wake the thread that waits."""
        with contextlib.suppress(BlockingIOError, OSError):
            self._writer.send(b"1")

    def clear(self) -> None:
        """Forget what woke it."""
        with contextlib.suppress(BlockingIOError):
            while self.reader.recv(4096):
                pass


def _by_role(pools: Sequence[Pool], instances: Sequence[Any]) -> tuple[list[int], list[int]]:
    """Return the instances that take requests in, and those that decode for them."""
    roles = {pool.role for pool in pools}
    if any(pool.speculate is not None for pool in pools):
        raise ConfigError("the plan drafts tokens, which our own engine does not", help="plan without --speculate")
    if roles not in ({"agg"}, {"prefill", "decode"}):
        raise ConfigError(f"pools of {', '.join(sorted(roles))}: either all are agg, or there are prefill and decode")
    if len(roles) > 1 and len({pool.cache for pool in pools}) > 1:
        raise ConfigError("prefill and decode pools have caches of unlike types", help="plan both with the same cache")
    entries = [i for i, (pool, _) in enumerate(instances) if pool.role != "decode"]
    return entries, [i for i, (pool, _) in enumerate(instances) if pool.role == "decode"]
