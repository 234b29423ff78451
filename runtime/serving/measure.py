"""Seconds of an idle engine's steps over rows, lengths and parts of prompts: what a plan for this machine predicts its load
from.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

from .batch import Row, StepBatch, order, record_of
from .engine import ServingEngine
from .requests import Sampling, StepRecord

_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_PROMPTS = (4, 8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 2048)


def measure_steps(
    engine: ServingEngine, *, max_context: int, repeats: int = 3, clock: Callable[[], float] = time.perf_counter
) -> list[StepRecord]:
    """Run steps of one attention rank with made rows, and return what the median of ``repeats`` took of each kind.

    Args:
        max_context: tokens that a row attends to at most.
    """
    if engine.has_work:
        raise RuntimeError("an engine with requests cannot be measured")
    limits = engine.pool.limits
    room = limits.cache_blocks * limits.block_size
    contexts = [length for length in (max_context // 8, max_context // 2, max_context) if length]
    chunk = limits.chunk or limits.max_batched_tokens
    parts = {*(tokens for tokens in _PROMPTS if tokens < chunk), chunk}
    kinds: list[tuple[int, int, int, int]] = [
        *((rows, context, 0, 0) for rows in _ROWS if rows <= limits.max_batch for context in contexts),
        *((0, 0, tokens, start) for tokens in sorted(parts) for start in (0, max_context - tokens)),
        *(
            (rows, contexts[-1] // 2, chunk - rows, 0)
            for rows in (limits.max_batch // 2, limits.max_batch)
            if 0 < rows < chunk
        ),
    ]
    batches = [
        _made(*kind, limits.block_size, limits.cache_blocks)
        for kind in kinds
        if kind[3] >= 0 and kind[0] * (kind[1] + limits.block_size) + kind[2] + kind[3] <= room
    ]
    measured: list[list[float]] = [[] for _ in batches]
    # The kinds take turns: what disturbs the machine for a while disturbs one repetition of many.
    for _ in range(repeats):
        for batch, times in zip(batches, measured, strict=True):
            begun = clock()
            engine.instance.begin([batch] * engine.pool.layout.attention_dp)
            engine.instance.end()
            times.append(clock() - begun)
    return [
        record_of(batch.rows, seconds=statistics.median(times)) for batch, times in zip(batches, measured, strict=True)
    ]


def _made(rows: int, context: int, tokens: int, start: int, block_size: int, num_blocks: int) -> StepBatch:
    """Return rows of one token that attend to ``context`` tokens, and one part of a prompt after ``start``."""
    free = itertools.cycle(range(num_blocks))

    def row(count: int, first: int) -> Row:
        blocks = tuple(next(free) for _ in range(-(-(first + count) // block_size)))
        return Row((1,) * count, first, blocks, Sampling())

    made = [row(1, context - 1) for _ in range(rows)] + ([row(tokens, start)] if tokens else [])
    return StepBatch(tuple(made[i] for i in order(made)))
