"""Which requests take part in the next step of an attention rank: continuous batching with a budget of tokens and blocks.

Every request has tokens, of which the first ``computed`` are in the cache; a step brings as many further ones as budget, chunk and
blocks allow, and the request whose last token was computed gets the next. A prompt and a request that lost its cache are the same
thing. Running requests come first, in the order of their arrival, then waiting ones; when blocks run out, the youngest running
request gives up its own and waits at the head of the queue.

Several steps may be under way (stages of a pipeline): a request is in one of them at most.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...schema.serving import EngineLimits
from .batch import Row, StepBatch, order, record_of
from .blocks import BlockPool, extend_digests
from .requests import Request, RequestTimes, StepRecord
from .transfer import Peer


@dataclass(eq=False)
class Running:
    """A request with what the engine knows about it.

    Attributes:
        tokens: prompt and what was generated so far.
        computed: of them, in the cache (or in a step that is under way).
        blocks: of its cache, in order.
        digests: of its full blocks, as far as they are known; named: of them given to the pool.
        adapter: index of its adapter, 0 for none.
        is_under_way: in a step that has not ended.
        is_cancelled: to be dropped when that step ends.
        hand_to: who decodes it, where another instance does.
    """

    id: str
    request: Request
    times: RequestTimes
    tokens: list[int]
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    named: int = 0
    adapter: int = 0
    is_under_way: bool = False
    is_cancelled: bool = False
    hand_to: Peer | None = None

    @property
    def num_generated(self) -> int:
        """Return the tokens generated so far."""
        return len(self.tokens) - len(self.request.prompt)


@dataclass(frozen=True)
class Step:
    """A step under way: its rows and the requests that they are of, with what `Scheduler.finish` needs of the beginning."""

    batch: StepBatch
    requests: tuple[Running, ...]
    record: StepRecord


class Scheduler:
    """The queue, the running requests and the blocks of one attention rank."""

    def __init__(self, limits: EngineLimits, *, reuses_prefixes: bool = True, steps_under_way: int = 1) -> None:
        self.limits, self.steps_under_way = limits, steps_under_way
        self.pool = BlockPool(limits.cache_blocks, limits.block_size, reuses_prefixes=reuses_prefixes)
        self.waiting: deque[Running] = deque()
        self.running: list[Running] = []
        self.num_preemptions = 0

    @property
    def num_requests(self) -> int:
        """Return the requests that have not ended."""
        return len(self.waiting) + len(self.running)

    @property
    def load(self) -> int:
        """Return the tokens of all requests here: what a router compares."""
        return sum(len(one.tokens) + one.request.max_tokens for queue in (self.waiting, self.running) for one in queue)

    def add(self, request: Running) -> None:
        """Put a request at the end of the queue."""
        self.waiting.append(request)

    def adopt(self, one: Running) -> bool:
        """Let a request run whose cache of all tokens but the last comes from elsewhere; False where there is no room yet."""
        if len(self.running) >= self.limits.max_batch or not self._has_blocks(one, len(one.tokens) - 1):
            return False
        one.computed = len(one.tokens) - 1
        self.running.append(one)
        return True

    def schedule(self, now: float) -> Step | None:
        """Return the next step, its blocks taken; None where no request can do anything."""
        num_waiting, budget = len(self.waiting), self.limits.max_batched_tokens
        entries: list[tuple[Running, Row]] = []
        share = -(-len(self.running) // self.steps_under_way)
        for one in list(self.running):
            if not budget or len(entries) >= max(share, 1):
                break
            # An older one may have taken its blocks since.
            if one.is_under_way or one not in self.running:
                continue
            count = self._count(one, budget)
            if not self._make_room(one, one.computed + count, {id(entry[0]) for entry in entries}):
                continue
            entries.append((one, self._enter(one, count)))
            budget -= count
        while self.waiting and budget and len(self.running) < self.limits.max_batch:
            row = self._admit(self.waiting[0], budget)
            if row is None:
                break
            one = self.waiting.popleft()
            self.running.append(one)
            if one.times.scheduled_s != one.times.scheduled_s:
                one.times.scheduled_s = now
            entries.append((one, row))
            budget -= len(row.tokens)
        if not entries:
            return None
        sequence = order([row for _, row in entries])
        rows = tuple(entries[i][1] for i in sequence)
        record = record_of(
            rows, start_s=now, waiting=num_waiting, running=len(self.running), used_blocks=self.pool.num_used
        )
        return Step(StepBatch(rows), tuple(entries[i][0] for i in sequence), record)

    def finish(self, step: Step, tokens: Sequence[int]) -> list[tuple[Running, int]]:
        """Take in what a step computed, ``tokens`` of the rows that are sampled; return each request's new token."""
        new, remaining = [], iter(tokens)
        for one, row in zip(step.requests, step.batch.rows, strict=True):
            one.is_under_way = False
            token = next(remaining) if row.sampling is not None else None
            if one.is_cancelled:
                self.drop(one)
                continue
            self._name_blocks(one)
            if token is not None:
                one.tokens.append(token)
                new.append((one, token))
        return new

    def drop(self, one: Running) -> None:
        """Forget a request; one in a step that is under way leaves when that ends."""
        if one.is_under_way:
            one.is_cancelled = True
            return
        if one in self.running:
            self.running.remove(one)
        elif one in self.waiting:
            self.waiting.remove(one)
        self.pool.release(one.blocks)
        one.blocks = []

    def _count(self, one: Running, budget: int) -> int:
        """Return the new tokens of a request in this step."""
        return min(len(one.tokens) - one.computed, budget, self.limits.chunk or budget)

    def _admit(self, one: Running, budget: int) -> Row | None:
        """Return the first row of a waiting request, what is known of its prompt taken from the cache; None: not now."""
        size = self.limits.block_size
        extend_digests(one.digests, one.tokens, size, root=_root(one))
        # The last token is computed in any case: its logits are what is asked for.
        one.blocks = self.pool.find(one.digests[: (len(one.tokens) - 1) // size])
        one.computed, one.named = len(one.blocks) * size, len(one.blocks)
        count = self._count(one, budget)
        is_complete = self.limits.chunk is not None or one.computed + count == len(one.tokens)
        if not is_complete or not self._has_blocks(one, one.computed + count):
            self.pool.release(one.blocks)
            one.blocks, one.computed = [], 0
            return None
        if not one.num_generated:
            one.times.cached_tokens = one.computed
        return self._enter(one, count)

    def _has_blocks(self, one: Running, length: int) -> bool:
        """Take the blocks that a request lacks for so many tokens; False where there are too few."""
        missing = -(-length // self.limits.block_size) - len(one.blocks)
        taken = self.pool.take(missing) if missing > 0 else []
        if taken is None:
            return False
        one.blocks += taken
        return True

    def _make_room(self, one: Running, length: int, in_step: set[int]) -> bool:
        """Take blocks for a running request, from the youngest others where none are free; False where it has to wait."""
        while not self._has_blocks(one, length):
            others = [other for other in self.running if not other.is_under_way and id(other) not in in_step]
            if not others:
                return False
            youngest = others[-1]
            self._preempt(youngest)
            if youngest is one:
                return False
        return True

    def _preempt(self, one: Running) -> None:
        self.running.remove(one)
        self.pool.release(one.blocks)
        one.blocks, one.computed, one.named = [], 0, 0
        one.times.preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(one)

    def _enter(self, one: Running, count: int) -> Row:
        end = one.computed + count
        sampling = one.request.sampling if end == len(one.tokens) else None
        used = one.blocks[: -(-end // self.limits.block_size)]
        row = Row(tuple(one.tokens[one.computed : end]), one.computed, tuple(used), sampling, one.adapter)
        one.computed, one.is_under_way = end, True
        return row

    def _name_blocks(self, one: Running) -> None:
        """Let the blocks that are full be found by others."""
        full = one.computed // self.limits.block_size
        if full > one.named and self.pool.reuses_prefixes:
            extend_digests(one.digests, one.tokens, self.limits.block_size, root=_root(one))
            for i in range(one.named, full):
                self.pool.name(one.blocks[i], one.digests[i])
            one.named = full


def _root(one: Running) -> bytes:
    return one.adapter.to_bytes(4, "big") if one.adapter else b""
