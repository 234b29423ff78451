"""Seconds of a step as a simulation asks for them: tables of an engine instance's costs, read a hundred thousand times.

    decode   t = body(r) + experts(r) + head(b) + a_d(b, S)                r: b padded to the next captured size
    prompts  t = body(b + p) + experts(b + p) + head(b + n) + a_d(b, S) + a_p(p, C)
    drafts   b rows have k + 1 tokens each and the step gives E of them: t / E a token, and of a step with prompts what they add
    engine   t' = max(t + d, h) beside the device, t + d + h else;  h = step_s + row_s (b + n), d = device_s
             without a graph t is at least eager_kernel_s for each of its kernels

with b decoding requests over S cached tokens and p tokens of n ending prompts that attend to C tokens each. Body: products and what
tensor-parallel ranks exchange, of the fullest attention rank; experts: of all ranks' rows, so of the mean, with what waits for
those in the host's memory.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from ...schema.serving import EngineLimits
from ...schema.units import Array, FloatArray, IntArray
from .attention_ffn import SplitCosts
from .engine import EngineProfile

_DECODE_CONTEXTS = 2.0 ** np.arange(0, 21)
_PROMPT_CONTEXTS = np.concatenate([[0.0], 2.0 ** np.arange(4, 21)])
_EXPERTS = ("experts", "host_link", "host_compute")
_TABLED_APART = ("head", *_EXPERTS, "decode_attention", "prefill_attention")


class StepParts(Protocol):
    """Where a step's seconds come from: `StepCosts`, or anything else with parts of these names."""

    def parts(
        self,
        decode_rows: Array,
        cached_tokens: Array,
        prefill_tokens: Array = 0,
        prefill_context: Array = 0,
        *,
        prompts: Array = 0,
    ) -> Mapping[str, FloatArray]:
        """Return seconds by part: head, experts, decode_attention, prefill_attention, and others that only rows decide."""
        ...


def _row_grid(max_rows: int) -> IntArray:
    """Return every count to 32, then steps of about a twelfth, to ``max_rows``."""
    rows = [*range(1, min(32, max_rows) + 1)]
    while rows[-1] < max_rows:
        rows.append(min(max(rows[-1] * 13 // 12, rows[-1] + 1), max_rows))
    return np.array(rows, dtype=np.int64)


class EngineTable(ABC):
    """A step's seconds with what an engine's host adds; subclasses have those of the devices."""

    def __init__(self, step: StepParts, profile: EngineProfile, limits: EngineLimits, *, num_kernels: int = 0) -> None:
        self.overhead, self.sizes, self.with_prompts = profile.overhead, limits.graph_sizes, profile.graphs.with_prompts
        self.queries, self.tokens_per_step = getattr(step, "queries", 1), getattr(step, "tokens_per_step", 1.0)
        self.eager_s = profile.overhead.eager_kernel_s * num_kernels
        self._curves: dict[tuple[int, float], tuple[FloatArray, FloatArray, list[float], list[float]]] = {}

    @abstractmethod
    def _decode_device_s(self, rows: int, mean_rows: float) -> list[float]:
        """Return the device's seconds of a step that only decodes, over the cached tokens of a row _DECODE_CONTEXTS."""

    @abstractmethod
    def prompt_s(
        self, rows: int, cached: float, tokens: float, context: float, prompts: int, mean_tokens: float | None = None
    ) -> float:
        """Return the seconds of a step with tokens of prompts beside ``rows`` that decode; mean_tokens: rows of the mean rank."""

    def padded(self, rows: float) -> float:
        """Return the captured size that holds so many rows; the rows themselves beyond the largest."""
        idx = bisect_left(self.sizes, rows)
        return self.sizes[idx] if idx < len(self.sizes) else rows

    def decode_s(self, rows: int, cached: float, mean_rows: float | None = None) -> float:
        """Return the seconds of a step that only decodes."""
        _, _, xs, ys = self._curve(rows, rows if mean_rows is None else mean_rows)
        return _between(xs, ys, cached)

    def decode_steps_s(self, rows: int, cached: float, num_steps: int, mean_rows: float | None = None) -> FloatArray:
        """Return the seconds of following steps, each with ``rows`` more tokens in the cache than the one before [num_steps]."""
        xs, ys, _, _ = self._curve(rows, rows if mean_rows is None else mean_rows)
        return np.interp(cached + rows * np.arange(num_steps), xs, ys)

    def _with_host(self, seconds: float, rows: float, captured: bool) -> float:
        """Return the seconds of a step with what the host adds."""
        host = self.overhead.step_s + self.overhead.row_s * rows
        seconds = (seconds if captured else max(seconds, self.eager_s)) + self.overhead.device_s
        return max(seconds, host) if self.overhead.overlapped else seconds + host

    def _curve(self, rows: int, mean_rows: float) -> tuple[FloatArray, FloatArray, list[float], list[float]]:
        """Return cached tokens and the seconds of a step over them, as arrays and as lists."""
        if (key := (rows, mean_rows)) not in self._curves:
            captured = bool(self.sizes) and rows <= self.sizes[-1]
            of_device = self._decode_device_s(rows, mean_rows)
            seconds = np.array([self._with_host(value, rows, captured) for value in of_device])
            if self.tokens_per_step > 1:
                seconds += self.overhead.draft_row_s * rows
            seconds /= self.tokens_per_step
            cached = np.asarray(_DECODE_CONTEXTS * rows, dtype=np.float64)
            self._curves[key] = cached, seconds, cached.tolist(), seconds.tolist()
        return self._curves[key]


class StepTable(EngineTable):
    """A step's seconds under an engine's limits, as one attention rank sees them."""

    def __init__(self, step: StepParts, profile: EngineProfile, limits: EngineLimits, *, num_kernels: int = 0) -> None:
        super().__init__(step, profile, limits, num_kernels=num_kernels)
        self.batches = _row_grid(limits.max_batch)
        rows = _row_grid(self.queries * limits.max_batch + limits.max_batched_tokens)
        self._rows, self._batches = rows.tolist(), self.batches.tolist()
        decode = step.parts(rows, rows)
        prompt = step.parts(np.zeros_like(rows), np.zeros_like(rows), rows, np.minimum(rows / 2, 1.0))
        self._decode_body, self._prompt_body = (_body(parts, rows) for parts in (decode, prompt))
        self._decode_experts, self._prompt_experts = (_named(parts, _EXPERTS, rows) for parts in (decode, prompt))
        self._head = _named(step.parts(self.batches, self.batches), ("head",), self.batches)
        contexts = self.batches[:, None] * _DECODE_CONTEXTS
        self._attend = np.broadcast_to(step.parts(self.batches[:, None], contexts)["decode_attention"], contexts.shape)
        self._tokens = 2.0 ** np.arange(0, np.ceil(np.log2(max(rows[-1], 2))) + 1)
        zero, shape = np.zeros((len(self._tokens), 1)), (len(self._tokens), len(_PROMPT_CONTEXTS))
        pairs = step.parts(zero, zero, self._tokens[:, None], _PROMPT_CONTEXTS)
        self._prompt_attend = np.broadcast_to(pairs["prefill_attention"], shape).tolist()
        self._token_list, self._context_list = self._tokens.tolist(), _PROMPT_CONTEXTS.tolist()

    def prompt_s(
        self, rows: int, cached: float, tokens: float, context: float, prompts: int, mean_tokens: float | None = None
    ) -> float:
        """Return the seconds of a step with tokens of prompts beside ``rows`` that decode; mean_tokens: rows of the mean rank."""
        every = rows + tokens
        seconds = _between(self._rows, self._prompt_body, every)
        seconds += _between(self._rows, self._prompt_experts, every if mean_tokens is None else mean_tokens)
        if heads := rows + prompts:
            seconds += _between(self._batches, self._head, heads)
        if rows:
            seconds += _between_pairs(self._batches, _DECODE_CONTEXTS_LIST, self._attend, rows, cached / rows)
        seconds += _between_pairs(self._token_list, self._context_list, self._prompt_attend, tokens, context)
        captured = self.with_prompts and bool(self.sizes) and every <= self.sizes[-1]
        if rows and self.tokens_per_step > 1:
            return self._prompt_beside_drafts_s(rows, cached, (tokens, context), prompts, captured=captured)
        return self._with_host(seconds, heads, captured)

    def _prompt_beside_drafts_s(
        self, rows: int, cached: float, sizes: tuple[float, float], prompts: int, *, captured: bool
    ) -> float:
        """Return what a step with prompts adds, and a token's part of the time that the rows take without them."""
        unmixed_s, checked = self.decode_s(rows, cached), self.queries * rows
        more = _between_pairs(self._token_list, self._context_list, self._prompt_attend, *sizes)
        for table in (self._prompt_body, self._prompt_experts):
            more += _between(self._rows, table, checked + sizes[0]) - _between(self._rows, table, checked)
        more += _between(self._batches, self._head, rows + prompts) - _between(self._batches, self._head, rows)
        step_s = self.tokens_per_step * unmixed_s + more
        return (step_s if captured else max(step_s, self.eager_s)) - (self.tokens_per_step - 1) * unmixed_s

    def _decode_device_s(self, rows: int, mean_rows: float) -> list[float]:
        """Return the device's seconds of a step that only decodes, over the cached tokens of a row _DECODE_CONTEXTS."""
        wide = self.padded(rows)
        fixed = _between(self._rows, self._decode_body, wide)
        fixed += _between(self._rows, self._decode_experts, self.padded(mean_rows))
        fixed += _between(self._batches, self._head, rows)
        idx = min(max(bisect_right(self._batches, rows) - 1, 0), len(self._batches) - 1)
        after = min(idx + 1, len(self._batches) - 1)
        low, high = self._batches[idx], self._batches[after]
        weight = (rows - low) / (high - low) if high > low else 0.0
        attend = (1 - weight) * self._attend[idx] + weight * self._attend[after]
        return [fixed + value for value in attend.tolist()]


class SplitTable(EngineTable):
    """A step's seconds of an instance with feed-forward devices: a slowest part in each layer, which no sum of tables has."""

    def __init__(self, step: SplitCosts, profile: EngineProfile, limits: EngineLimits, *, num_kernels: int = 0) -> None:
        super().__init__(step, profile, limits, num_kernels=num_kernels)
        self._step = step

    def decode_steps_s(self, rows: int, cached: float, num_steps: int, mean_rows: float | None = None) -> FloatArray:
        """Return the seconds of following steps, each with ``rows`` more tokens in the cache than the one before [num_steps]."""
        return super().decode_steps_s(rows, cached, num_steps, self._rounded(rows, mean_rows))

    def decode_s(self, rows: int, cached: float, mean_rows: float | None = None) -> float:
        """Return the seconds of a step that only decodes."""
        return super().decode_s(rows, cached, self._rounded(rows, mean_rows))

    @staticmethod
    def _rounded(rows: int, mean_rows: float | None) -> float:
        """Return the mean over ranks, up to the next 64th of the fullest rank's rows, so that few curves are made."""
        return rows if mean_rows is None else rows * math.ceil(64 * mean_rows / rows) / 64

    def _decode_device_s(self, rows: int, mean_rows: float) -> list[float]:
        """Return the devices' seconds of a step that only decodes, over the cached tokens of a row _DECODE_CONTEXTS."""
        cached = _DECODE_CONTEXTS * rows
        parts = self._step.parts(rows, cached, mean_rows=mean_rows, pad=self.padded)
        return np.sum([np.broadcast_to(seconds, cached.shape) for seconds in parts.values()], axis=0).tolist()

    def prompt_s(
        self, rows: int, cached: float, tokens: float, context: float, prompts: int, mean_tokens: float | None = None
    ) -> float:
        """Return the seconds of a step with tokens of prompts beside ``rows`` that decode; mean_tokens: rows of the mean rank."""
        parts = self._step.parts(rows, cached, tokens, context, prompts=prompts, mean_rows=mean_tokens)
        captured = self.with_prompts and bool(self.sizes) and rows + tokens <= self.sizes[-1]
        return self._with_host(float(sum(parts.values())), rows + prompts, captured)


def table_of(step: StepParts, profile: EngineProfile, limits: EngineLimits, *, num_kernels: int = 0) -> EngineTable:
    """Return the table of an engine's steps; ``num_kernels``: of one that no graph holds."""
    kind = SplitTable if isinstance(step, SplitCosts) else StepTable
    return kind(step, profile, limits, num_kernels=num_kernels)  # type: ignore[arg-type]


_DECODE_CONTEXTS_LIST = _DECODE_CONTEXTS.tolist()


def _body(parts: Mapping[str, FloatArray], rows: IntArray) -> list[float]:
    """Return the seconds that only rows decide, of the rank's own."""
    return np.sum(
        [np.broadcast_to(s, rows.shape) for name, s in parts.items() if name not in _TABLED_APART], axis=0
    ).tolist()


def _named(parts: Mapping[str, FloatArray], names: tuple[str, ...], rows: IntArray) -> list[float]:
    total = sum((parts[name] for name in names if name in parts), np.zeros(()))
    return np.broadcast_to(total, rows.shape).astype(np.float64).tolist()


def _between(xs: list[float], ys: list[float], x: float) -> float:
    """Return the value at x, linear between points; in proportion beyond the last one, and the first one's below it."""
    if x <= xs[0]:
        return ys[0]
    if x >= xs[-1]:
        return ys[-1] * (x / xs[-1])
    idx = bisect_right(xs, x) - 1
    return ys[idx] + (ys[idx + 1] - ys[idx]) * (x - xs[idx]) / (xs[idx + 1] - xs[idx])


def _between_pairs(
    xs: list[float], ys: list[float], table: FloatArray | list[list[float]], x: float, y: float
) -> float:
    """Return the value at (x, y), linear between the lines of x."""
    idx = min(max(bisect_right(xs, x) - 1, 0), max(len(xs) - 2, 0))
    lower = _between(ys, table[idx], y)
    if len(xs) == 1 or x <= xs[0]:
        return float(lower)
    upper = _between(ys, table[idx + 1], y)
    return float(lower + (upper - lower) * (x - xs[idx]) / (xs[idx + 1] - xs[idx]))
