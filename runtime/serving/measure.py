"""Seconds of our engine's steps and of its host between them, as a plan for this machine takes them: `meshwright profile --serve`.

Steps are made, of an idle engine: rows that decode, of lengths side by side as a load has them; parts of prompts, one and several,
first and later ones; both at once. What the host adds is between the steps of requests that are really served.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, pairwise
from statistics import mean
from typing import TYPE_CHECKING

from .batch import Row, StepBatch, order, record_of
from .requests import Request, Sampling, StepRecord

if TYPE_CHECKING:
    from .engine import ServingEngine
    from .front import EngineFront

_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_PROMPTS = (4, 8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 2048)
_SEVERAL = ((2, 16), (8, 16), (4, 64), (8, 64))
"""Prompts that end in one step, and the tokens of each."""

_WARM_SHARE = 0.4
"""Of the time, for running every kind once: those that are not reached by then are left out, the largest first."""

_SERVED_ROWS = (1, 4, 16)
_SERVED_TOKENS = 24


@dataclass(frozen=True)
class _Kind:
    """Rows that decode, of up to ``context`` tokens, and ``prompts`` parts of so many tokens after ``start`` others."""

    rows: int = 0
    context: int = 0
    prompts: int = 0
    tokens: int = 0
    start: int = 0

    @property
    def new_tokens(self) -> int:
        return self.rows + self.prompts * self.tokens

    def batch(self, block_size: int, num_blocks: int) -> StepBatch:
        """Return the step's rows, their blocks one after the other in the cache."""
        free = cycle(range(num_blocks))

        def row(count: int, first: int) -> Row:
            blocks = tuple(next(free) for _ in range(-(-(first + count) // block_size)))
            return Row((1,) * count, first, blocks, Sampling())

        # From a quarter of the context to all of it: requests of a load are in every stage of their answers.
        lengths = [self.context * (self.rows + 3 * (i + 1)) // (4 * self.rows) for i in range(self.rows)]
        made = [row(1, max(length - 1, 1)) for length in lengths]
        made += [row(self.tokens, self.start) for _ in range(self.prompts)]
        return StepBatch(tuple(made[i] for i in order(made)))


def measure_steps(
    engine: ServingEngine,
    *,
    max_context: int,
    repeats: int = 3,
    budget_s: float = float("inf"),
    clock: Callable[[], float] = time.perf_counter,
) -> list[StepRecord]:
    """Run steps with made rows, and return of each kind the mean seconds of ``repeats``, fewer where the time is over.

    With stages as many steps are under way as there are stages, and a step's seconds are from its beginning to its end.

    Args:
        max_context: tokens that a row attends to at most.
    """
    if engine.has_work:
        raise RuntimeError("an engine with requests cannot be measured")
    limits, layout, begun = engine.pool.limits, engine.pool.layout, time.monotonic()
    # The kinds take turns: what disturbs the machine for a while disturbs one repetition of many.
    kinds = sorted(_kinds(engine, max_context), key=lambda kind: kind.new_tokens)
    batches = [kind.batch(limits.block_size, limits.cache_blocks) for kind in kinds]
    for idx, batch in enumerate(batches):
        _step_s(engine, batch, layout.pp, clock)
        if time.monotonic() - begun > _WARM_SHARE * budget_s:
            batches = batches[: idx + 1]
            break
    measured: list[list[float]] = [[] for _ in batches]
    for _ in range(repeats):
        for batch, times in zip(batches, measured, strict=True):
            if times and time.monotonic() - begun > budget_s:
                break
            times.append(_step_s(engine, batch, layout.pp, clock))
    return [record_of(batch.rows, seconds=mean(times)) for batch, times in zip(batches, measured, strict=True)]


def _kinds(engine: ServingEngine, max_context: int) -> Iterator[_Kind]:
    """Yield what is within the limits and the cache."""
    limits = engine.pool.limits
    room, chunk = limits.cache_blocks * limits.block_size, limits.chunk or limits.max_batched_tokens
    contexts = [length for length in (max_context // 8, max_context // 2, max_context) if length > 1]
    parts = sorted({*(tokens for tokens in _PROMPTS if tokens < chunk), chunk})
    mixed = {rows for rows in (limits.max_batch // 4, limits.max_batch // 2, limits.max_batch) if 0 < rows < chunk}
    every = [
        *(_Kind(rows, context) for rows in _ROWS if rows <= limits.max_batch for context in contexts),
        *(_Kind(0, 0, 1, tokens, start) for tokens in parts for start in (0, max_context - tokens)),
        *(_Kind(0, 0, count, tokens) for count, tokens in _SEVERAL if count * tokens <= chunk),
        *(
            _Kind(rows, contexts[-1], 1, tokens)
            for rows in sorted(mixed)
            for tokens in sorted({*(n for n in (8, 64, 256) if n < chunk - rows), chunk - rows})
        ),
    ]
    for kind in every:
        cache_tokens = kind.rows * (kind.context + limits.block_size) + kind.prompts * (kind.start + kind.tokens)
        if kind.start >= 0 and cache_tokens <= room:
            yield kind


def _step_s(engine: ServingEngine, batch: StepBatch, depth: int, clock: Callable[[], float]) -> float:
    """Return the seconds of a step while ``depth`` of them are under way."""
    instance, everyone = engine.instance, [batch] * engine.pool.layout.attention_dp
    for _ in range(depth - 1):
        instance.begin(everyone)
    begun = clock()
    for _ in range(depth):
        instance.begin(everyone)
        instance.end()
    spent = clock() - begun
    for _ in range(depth - 1):
        instance.end()
    return spent


def measure_host(engine: EngineFront, *, prompt_len: int = 8) -> list[StepRecord]:
    """Serve requests that begin together; return the host's seconds between their steps, in the mean for each number of rows.

    Nothing of an engine with stages, whose steps begin while others are under way.
    """
    pool_limit = engine.max_len - prompt_len
    hosts = []
    for rows in _SERVED_ROWS:
        before = len(engine.stats().records)
        for _ in range(rows):
            engine.submit(Request(prompt=(1,) * prompt_len, max_tokens=min(_SERVED_TOKENS, pool_limit)), _heard)
        while engine.has_work:
            engine.step(timeout_s=0.1)
        records = engine.stats().records[before:]
        gaps = [
            after.start_s - one.start_s - one.seconds
            for one, after in pairwise(records)
            if one.decode_rows == after.decode_rows == rows
        ]
        if gaps:
            hosts.append(replace(records[-1], decode_rows=rows, seconds=max(mean(gaps), 1e-9)))
    return hosts


def _heard(_: object) -> None:
    """Listen to a token, as the endpoint does."""


def mean_records(of_instances: Sequence[Sequence[StepRecord]]) -> list[StepRecord]:
    """Return the steps that all instances measured, with their mean seconds."""
    return [replace(same[0], seconds=mean(one.seconds for one in same)) for same in zip(*of_instances, strict=False)]
