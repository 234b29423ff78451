"""Seconds of a step from steps that were measured on the machine itself, where there is an engine to measure: `StepParts` by fit.

    t = body(b + p) + h (b + n) + [b > 0] (a + e b + d S) + [p > 0] (f + q p C)

of b rows that decode over S cached tokens, and p tokens of n ending prompts that attend to C each. body: linear between the
measured counts of rows. Its values at them and all other coefficients: least squares of the relative errors without negative terms
(Lawson and Hanson, Solving Least Squares Problems, 1974, chapter 23).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import nnls

from ...schema import ClusterSpec, ModelSpec, Profile
from ...schema.errors import ConfigError
from ...schema.serving import CacheDtype, ServingLayout, WeightDtype
from ...schema.units import Array, FloatArray
from .engine import EngineProfile

_MIN_STEPS = 8
"""Steps below which a fit of three slopes and a curve says nothing."""


@dataclass(frozen=True, eq=False)
class MeasuredSteps:
    """Seconds of steps, fitted.

    Attributes:
        rows, body_s: a curve over new tokens; head_s: of a row with logits.
        decode_s: of a step with rows that decode, of such a row, and of a cached token that it attends to.
        prefill_s: of a step with prompts, and of a pair of tokens of theirs.
        error: mean of the relative errors of the steps that were fitted; num_measured: how many.
    """

    rows: FloatArray
    body_s: FloatArray
    head_s: float
    decode_s: tuple[float, float, float]
    prefill_s: tuple[float, float]
    error: float
    num_measured: int

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
        terms = np.column_stack(
            [rising, decoding + ending, decoding > 0, decoding, cached, tokens > 0, tokens * context]
        )
        scale = np.maximum(np.abs(terms).max(axis=0), 1e-12)
        solution, _ = nnls(terms / scale / measured[:, None], np.ones(len(measured)))
        slopes = solution / scale
        error = float(np.abs(terms @ slopes / measured - 1).mean())
        head, step, row, token, part, pair = slopes[len(knots) :].tolist()
        return cls(knots, np.cumsum(slopes[: len(knots)]), head, (step, row, token), (part, pair), error, len(measured))

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
        decoding, cached, tokens, context = (
            np.asarray(values, dtype=np.float64)
            for values in (decode_rows, cached_tokens, prefill_tokens, prefill_context)
        )
        rows = decoding + tokens
        beyond = self.body_s[-1] * rows / self.rows[-1]  # in proportion where nothing was measured
        body = np.where(rows > self.rows[-1], beyond, np.interp(rows, self.rows, self.body_s))
        step, row, token = self.decode_s
        part, pair = self.prefill_s
        return {
            "products": np.where(rows > 0, body, 0.0),
            "head": self.head_s * (decoding + prompts),
            "decode_attention": np.where(decoding > 0, step + row * decoding + token * cached, 0.0),
            "prefill_attention": np.where(tokens > 0, part + pair * tokens * context, 0.0),
        }

    def seconds(
        self,
        decode_rows: Array,
        cached_tokens: Array,
        prefill_tokens: Array = 0,
        prefill_context: Array = 0,
        *,
        prompts: Array = 0,
    ) -> FloatArray:
        """Return the seconds of a step, as `StepCosts.seconds` does."""
        parts = self.parts(decode_rows, cached_tokens, prefill_tokens, prefill_context, prompts=prompts)
        return np.asarray(sum(parts.values()))


@dataclass(frozen=True, eq=False)
class MeasuredEngine:
    """A layout of our engine as `meshwright profile --serve` measured it.

    Attributes:
        by_devices: devices of the machine that were in use, ascending, and the steps then.
        host_s: between two steps: always, and for each row; None: not measured.
    """

    by_devices: tuple[tuple[int, MeasuredSteps], ...]
    host_s: tuple[float, float] | None

    @classmethod
    def of(
        cls, profile: Profile, model: ModelSpec, layout: ServingLayout, weights: WeightDtype, cache: CacheDtype
    ) -> MeasuredEngine | None:
        """Return what a profile has of a layout; None for nothing."""
        chosen = (model.content, layout, weights, cache)
        points = defaultdict(list)
        for point in profile.serving_steps:
            if (point.content, point.layout, point.weights, point.cache) == chosen:
                points[point.devices_in_use].append(point)
        hosts = [
            (point.rows, point.time_s)
            for point in profile.serving_host
            if (point.content, point.layout, point.weights, point.cache) == chosen
        ]
        names = ("decode_rows", "cached_tokens", "prefill_tokens", "prefill_context", "prompts", "time_s")
        fits = [
            (devices, MeasuredSteps.fit(*([getattr(one, name) for one in same] for name in names)))
            for devices, same in sorted(points.items())
            if len(same) >= _MIN_STEPS
        ]
        return cls(tuple(fits), _line(hosts)) if fits else None

    def steps(self, devices_in_use: int) -> MeasuredSteps:
        """Return the steps while so many devices are in use: those of the next larger number that was measured."""
        return next((fit for devices, fit in self.by_devices if devices >= devices_in_use), self.by_devices[-1][1])

    def profile(self, engine: EngineProfile) -> EngineProfile:
        """Return the engine with the host's seconds as measured."""
        if self.host_s is None:
            return engine
        step_s, row_s = self.host_s
        return engine.model_copy(
            update={"overhead": engine.overhead.model_copy(update={"step_s": step_s, "row_s": row_s})}
        )


def measured_weights(cluster: ClusterSpec, model: ModelSpec) -> WeightDtype | None:
    """Return the type of weights that a cluster's profile has steps of a model with, the first of several; None for none."""
    points = () if cluster.profile is None else cluster.profile.serving_steps
    return next((point.weights for point in points if point.content == model.content), None)


def _line(points: list[tuple[int, float]]) -> tuple[float, float] | None:
    """Return intercept and slope of the line through points, neither negative; None where there are none."""
    if not points:
        return None
    rows, seconds = np.array(points, dtype=np.float64).T
    solution, _ = nnls(np.column_stack([np.ones_like(rows), rows]), seconds)
    return float(solution[0]), float(solution[1])
