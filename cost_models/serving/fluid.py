"""What no schedule of an engine instance beats: steps where nothing waits, whose prompts fall on them in the best way.

A share f of the steps has prompts, from as few as hold all tokens to one for each chunk of a prompt. Under a load that arrives by
itself all steps have the N rows of (S1). Where a number of requests is kept in flight they may come in waves, so that
few or none decode beside prompts, and more than N in the other steps:

    f N1 + (1 - f) N2 = N,    T = (1 - f) t(N2, S2, 0) + f t(N1, S1, p / f),    rate = x / T                         (F1)
    requests in flight >= rate (first token + (o - 1) times the seconds of the steps that a row is in)             (F2)

Each way is a curve of its own over x, of which a loop has the best: a schedule follows one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...schema.units import FloatArray
from .instance_model import InstanceModel
from .mix import Mix
from .shares import min_cycle_s

WAYS = 24
"""Tokens of prompts in a step that are tried, from the fewest to the most."""

WAVES = (1.0, 0.5, 0.0)
"""N1 over N in waves of requests that are kept in flight."""


def chunks(instance: InstanceModel, mix: Mix) -> float:
    """Return the steps that a mean prompt takes part in."""
    return float(mix.share @ np.ceil(mix.new_len / min(instance.max_batched_tokens, instance.chunk)))


def smallest_part(instance: InstanceModel, x: FloatArray, mix: Mix, rows: FloatArray, more: Any = 1.0) -> FloatArray:
    """Return the part of the steps that have prompts where each takes all tokens that it may."""
    room = instance.max_batched_tokens - (0.0 if instance.prefill_first else rows)
    return np.asarray(more * x * mix.new_tokens / np.maximum(room, 1.0))


@dataclass(frozen=True)
class FluidSteps:
    """Ways in which prompts may fall on steps, [C] of them, of each point of a curve [X]; no schedule does better than all.

    Attributes:
        step_s: mean seconds of a step; infinite where it cannot be.
        seen_s: between two tokens of a request; first_rows: that decode beside prompts.
    """

    step_s: FloatArray
    seen_s: FloatArray
    first_rows: FloatArray


def fluid_steps(
    instance: InstanceModel, mix: Mix, per_step: FloatArray, *, waves: Sequence[float] = (1.0,)
) -> FluidSteps:
    """Return the steps of an instance where nothing waits or varies, prompts in few steps to one for each of their chunks.

    Args:
        waves: rows that decode in steps with prompts, over those of a mean step: below one where requests come in waves.
    """
    x = np.asarray(per_step, dtype=np.float64)
    per_row = mix.cached_steps / mix.decode_steps if mix.decode_steps else 0.0
    rows = np.maximum(x * mix.decode_steps, 1.0) if mix.decode_steps else 0 * x
    if instance.sharing is not None:
        cycle_s, seen_s = min_cycle_s(instance, mix, x)
        return FluidSteps(cycle_s[None, :], seen_s[None, :], rows[None, :])
    if not mix.new_tokens:
        seconds = instance.pass_s(rows, rows * per_row)[None, :]
        return FluidSteps(seconds, seconds, rows[None, :])
    low = smallest_part(instance, x, mix, rows)
    high = np.maximum(x * chunks(instance, mix), low)
    parts = low * (high / np.maximum(low, 1e-30)) ** np.linspace(0, 1, WAYS)[:, None]
    part = np.concatenate([parts] * len(waves))
    part = part if instance.prefill_first else np.minimum(part, 1.0)
    fraction = np.repeat(np.asarray(waves), WAYS)[:, None] + 0 * part
    prompts = np.maximum(part, 1e-12)
    first = fraction * rows
    other = rows + 0 * part if instance.prefill_first else (rows - part * first) / np.maximum(1 - part, 1e-12)
    other = np.where(fraction == 1, rows, other)
    occupied = (
        mix.occupied_steps(reserves_output=instance.reserves_output) / mix.decode_steps if mix.decode_steps else 0.0
    )
    fits = (other <= np.maximum(instance.max_batch, rows)) & (
        other * occupied <= np.maximum(instance.cache_tokens, rows * occupied)
    )
    other = np.where(fits, other, rows)
    plain_s = instance.pass_s(other, other * per_row)
    mixed_s = instance.prompt_s(first, first * per_row, x * mix.new_tokens / prompts, mix.mean_context, x / prompts)
    if instance.prefill_first:
        step_s, seen_s = plain_s + part * mixed_s, plain_s + fraction * part * mixed_s
    else:
        step_s = (1 - part) * plain_s + part * mixed_s
        seen_s = ((1 - part) * other * plain_s + part * first * mixed_s) / np.maximum(rows, 1e-12)
    return FluidSteps(np.where(fits, step_s, np.inf), np.where(mix.decode_steps, seen_s, step_s), first)
