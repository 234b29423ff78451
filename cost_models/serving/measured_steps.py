"""Seconds of a step from steps that were measured on the machine itself, where there is an engine to measure: `StepParts` by fit.

    t = body(r) + h (b + n) + d S + p C p_tokens,      r = b + p_tokens

body: linear between the measured counts of rows, its values at them, h, d and p least squares of the relative errors without
negative terms (Lawson and Hanson, Solving Least Squares Problems, 1974, chapter 23).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import nnls

from ...schema.errors import ConfigError
from ...schema.units import Array, FloatArray

_MIN_STEPS = 8
"""Steps below which a fit of three slopes and a curve says nothing."""


@dataclass(frozen=True, eq=False)
class MeasuredSteps:
    """Seconds of steps, fitted.

    Attributes:
        rows, body_s: a curve over new tokens; head_s: of a row with logits; decode_s: of a cached token that a decoding row
        attends to; prefill_s: of a pair of tokens of prompts.
        error: mean of the relative errors of the steps that were fitted.
    """

    rows: FloatArray
    body_s: FloatArray
    head_s: float
    decode_s: float
    prefill_s: float
    error: float

    @classmethod
    def fit(
        cls,
        decode_rows: ArrayLike,
        cached_tokens: ArrayLike,
        prefill_tokens: ArrayLike,
        prefill_context: ArrayLike,
        prompts: ArrayLike,
        seconds: ArrayLike,
    ) -> MeasuredSteps:
        """Return the fit of measured steps, arrays [N].

        Raises:
            ConfigError: too few steps, or seconds that are none.
        """
        columns = [
            np.asarray(c, dtype=np.float64)
            for c in (decode_rows, cached_tokens, prefill_tokens, prefill_context, prompts)
        ]
        decoding, cached, tokens, context, ending = columns
        measured = np.asarray(seconds, dtype=np.float64)
        if len(measured) < _MIN_STEPS or not (np.isfinite(measured) & (measured > 0)).all():
            raise ConfigError(
                f"{len(measured)} steps with seconds from {measured.min(initial=np.inf):g} on are no measurement of an engine",
                help=f"at least {_MIN_STEPS} steps that took time",
            )
        rows = decoding + tokens
        knots = np.unique(rows)
        hats = np.stack([np.interp(rows, knots, unit) for unit in np.eye(len(knots))], axis=1)
        # Differences of the curve as unknowns: it never falls.
        rising = hats @ np.tril(np.ones((len(knots), len(knots))))
        terms = np.column_stack([rising, decoding + ending, cached, tokens * context])
        scale = np.maximum(np.abs(terms).max(axis=0), 1e-12)
        solution, _ = nnls(terms / scale / measured[:, None], np.ones(len(measured)))
        slopes = solution / scale
        error = float(np.abs(terms @ slopes / measured - 1).mean())
        head, decode, prefill = slopes[len(knots) :].tolist()
        return cls(knots, np.cumsum(slopes[: len(knots)]), head, decode, prefill, error)

    def parts(
        self,
        decode_rows: Array,
        cached_tokens: Array,
        prefill_tokens: Array = 0,
        prefill_context: Array = 0,
        *,
        prompts: Array = 0,
    ) -> dict[str, FloatArray]:
        """Return seconds by part, as `StepCosts.parts` does."""
        rows = np.asarray(decode_rows, dtype=np.float64) + prefill_tokens
        beyond = self.body_s[-1] * rows / self.rows[-1]  # in proportion where nothing was measured
        body = np.where(rows > self.rows[-1], beyond, np.interp(rows, self.rows, self.body_s))
        return {
            "products": np.where(rows > 0, body, 0.0),
            "head": np.asarray(self.head_s * (np.asarray(decode_rows) + prompts)),
            "decode_attention": np.asarray(self.decode_s * np.asarray(cached_tokens, dtype=np.float64)),
            "prefill_attention": np.asarray(self.prefill_s * np.asarray(prefill_tokens) * prefill_context),
        }
