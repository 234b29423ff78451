"""Seconds of a rollout: prompts that an engine instance answers, from the first one to the last response that is waited for.

    row i      starts when a slot is free, decodes LEN[i] - DONE[i] tokens, one a step, and ends
    t          steps since the start; rows(t), cached(t): rows under way and tokens they attend to
    decode     sum over t of pass(rows(t), cached(t))      `InstanceModel.pass_s`, on a grid of POINTS
    prompts    tokens of prompts that start, max_batched_tokens of them in a pass

A rollout that is ended once enough responses are there carries the others over: they go on in the next one, after a pass over what
they have (`steady_rollout` repeats that until rollouts are alike). Without that the longest response decides.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np

from ...schema.batch import Lengths
from ...schema.units import FloatArray
from .instance_model import InstanceModel

POINTS = 96
"""Of the grid over steps: the sum over every step differs by less than 1 % (test)."""

ROUNDS, WARM_UP = 8, 3
"""Rollouts in a row with responses that are carried over, and those of them that are not counted."""


@dataclass(frozen=True)
class Rollout:
    """Seconds of a rollout on one instance, and what of it.

    Attributes:
        decode_s, prompt_s: with the rows that decode, and of the passes over prompts.
        steps: until the last response that is waited for; rows: under way on average.
    """

    decode_s: float
    prompt_s: float
    steps: float
    rows: float

    @property
    def seconds(self) -> float:
        """Return the seconds from the first prompt on."""
        return self.decode_s + self.prompt_s


def stratified(lengths: Lengths, count: int, *, among: int | None = None) -> FloatArray:
    """Return ``count`` lengths that stand for the distribution, the longest of ``among`` draws one of them, in an order that is
    not sorted.
    """
    shares = (np.arange(count) + 0.5) / count
    shares[-1] = max(shares[-1], 1 - 0.5 / (among or count))
    ends = np.cumsum(lengths.counts) / np.sum(lengths.counts)
    values = np.asarray(lengths.lengths, dtype=np.float64)[np.minimum(np.searchsorted(ends, shares), len(ends) - 1)]
    return np.asarray(values[np.random.default_rng(0).permutation(count)])


def concurrent_rows(model: InstanceModel, lengths: Lengths, prompt_len: float) -> int:
    """Return the rows of a lane that run at once: as the batch limit and the cache of a mean row under way allow."""
    values, counts = np.asarray(lengths.lengths, dtype=np.float64), np.asarray(lengths.counts, dtype=np.float64)
    context = prompt_len + float((counts * values**2).sum() / (2 * (counts * values).sum()))
    return max(1, int(min(model.max_batch, model.cache_tokens / context)))


def cached_tokens(lengths: Lengths, prompt_len: float, rows: int) -> float:
    """Return the tokens that a lane has to hold at once, at most: rows that all end together."""
    return rows * (prompt_len + float(lengths.mean))


def rollout(
    model: InstanceModel,
    lengths: FloatArray,
    prompt_len: float,
    *,
    rows: int,
    finished: int | None = None,
    done: FloatArray | None = None,
    shared_prompts: int = 1,
) -> tuple[Rollout, FloatArray]:
    """Return a rollout of one lane, and the tokens that each response has at its end.

    Args:
        lengths: of the responses [N], in the order in which they start.
        rows: that run at once.
        finished: responses that are waited for; None: all.
        done: tokens that they have from the rollout before [N].
        shared_prompts: responses to one prompt, whose pass is made once.
    """
    done = np.zeros(len(lengths)) if done is None else done
    remaining = np.maximum(lengths - done, 1.0)
    starts = _starts(remaining, rows)
    ends = starts + remaining
    last = float(np.partition(ends, (finished or len(lengths)) - 1)[(finished or len(lengths)) - 1])
    begun = starts < last
    step = last / POINTS
    middle = (np.arange(POINTS) + 0.5) * step
    order, by_end = np.argsort(starts), np.argsort(ends)
    # Tokens of row i at step t: prompt + DONE[i] + t - start[i].
    offset = prompt_len + done - starts
    num_begun = np.searchsorted(starts[order], middle, side="right")
    num_ended = np.searchsorted(ends[by_end], middle, side="right")
    sums_begun = np.concatenate([[0.0], np.cumsum(offset[order])])
    sums_ended = np.concatenate([[0.0], np.cumsum(offset[by_end])])
    under_way = (num_begun - num_ended).astype(np.float64)
    cached = sums_begun[num_begun] - sums_ended[num_ended] + under_way * middle
    decode_s = float((model.pass_s(under_way, cached) * step).sum())
    fresh = begun & (done == 0)
    tokens = prompt_len * fresh.sum() / shared_prompts + float((prompt_len + done)[begun & (done > 0)].sum())
    context = tokens / max(int(begun.sum()), 1) / 2
    prompt_s = _prompts_s(model, tokens, max(context, prompt_len / 2), float(begun.sum()))
    result = np.where(begun, np.minimum(done + np.maximum(last - starts, 0.0), lengths), done)
    return Rollout(decode_s, prompt_s, last, float(under_way.mean())), np.asarray(result)


def _starts(remaining: FloatArray, rows: int) -> FloatArray:
    """Return the step at which each row starts: at once, or when one of ``rows`` before it ends."""
    starts = np.zeros(len(remaining))
    if len(remaining) <= rows:
        return starts
    free = remaining[:rows].tolist()
    heapq.heapify(free)
    for idx, steps in enumerate(remaining[rows:].tolist(), start=rows):
        starts[idx] = free[0]
        heapq.heapreplace(free, free[0] + steps)
    return starts


def _prompts_s(model: InstanceModel, tokens: float, context: float, prompts: float) -> float:
    """Return the seconds of passes over so many tokens of prompts."""
    if tokens <= 0:
        return 0.0
    passes = math.ceil(tokens / model.max_batched_tokens)
    return passes * float(model.pass_s(0.0, 0.0, tokens / passes, context, prompts / passes))


def steady_rollout(
    model: InstanceModel,
    lengths: Lengths,
    prompt_len: float,
    samples: int,
    *,
    oversample: float = 1.0,
    shared_prompts: int = 1,
    among: int | None = None,
) -> Rollout:
    """Return the mean rollout of one lane that gives ``samples`` responses, ``oversample`` times as many under way.

    ``among``: responses of all lanes, the longest of which this one has.
    """
    rows = concurrent_rows(model, lengths, prompt_len)
    count = math.ceil(samples * oversample)
    pool = stratified(lengths, count, among=among)
    if count == samples:
        return rollout(model, pool, prompt_len, rows=rows, shared_prompts=shared_prompts)[0]
    done, rounds = np.zeros(count), []
    for idx in range(ROUNDS):
        result, done = rollout(
            model, pool, prompt_len, rows=rows, finished=samples, done=done, shared_prompts=shared_prompts
        )
        rounds.append(result)
        # Those that have ended leave, the furthest first; new ones come after those that are carried over.
        is_carried = np.ones(count, dtype=bool)
        is_carried[np.argsort(pool - done, kind="stable")[:samples]] = False
        fresh = np.random.default_rng(idx + 1).permutation(stratified(lengths, samples, among=among))
        pool, done = np.concatenate([pool[is_carried], fresh]), np.concatenate([done[is_carried], np.zeros(samples)])
    counted = rounds[WARM_UP:]
    means = np.mean([(each.decode_s, each.prompt_s, each.steps, each.rows) for each in counted], axis=0)
    return Rollout(*means.tolist())
