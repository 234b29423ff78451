"""Requests that are kept in flight: rate, first token and further ones over what an instance has in flight.

Of an estimate there is one curve; of a bound one for each way in which prompts may fall on steps (fluid.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...schema.units import FloatArray
from .fluid import WAVES, fluid_steps
from .instance_model import InstanceModel
from .mix import Mix
from .steady_state import first_token_s, largest_per_step, operating_points

POINTS = 128
"""Points of a curve, 7 % apart: between two of them it is taken for straight."""


@dataclass(frozen=True)
class ClosedLoop:
    """Curves [C, X] of an instance: requests a second, seconds of the first token without waiting, and between two tokens."""

    requests_per_s: FloatArray
    first_s: FloatArray
    token_s: FloatArray

    @classmethod
    def of(cls, instance: InstanceModel, mix: Mix, *, fluid: bool) -> ClosedLoop:
        """Return the curves of an instance, as bounded or as estimated."""
        end = largest_per_step(instance, mix)
        x = np.geomspace(2e-4 * end, end, POINTS)
        if not fluid:
            points = operating_points(instance, mix, x)
            return cls(points.requests_per_s[None, :], points.ttft_s[None, :], points.step_s[None, :])
        steps = fluid_steps(instance, mix, x, waves=WAVES)
        ways = len(steps.step_s) // len(WAVES) or 1
        per_row = mix.cached_steps / mix.decode_steps if mix.decode_steps else 0.0
        first_s = [
            first_token_s(instance, mix, rows, rows * per_row, fluid=True) @ mix.share
            for rows in steps.first_rows[::ways]
        ]
        return cls(x / steps.step_s * instance.lanes, np.repeat(first_s, ways, axis=0), steps.seen_s)

    def under(
        self, in_flight: float, *, more_first_s: float, decode_steps: float, count: int
    ) -> tuple[float, float, float]:
        """Return the most requests a second of so many instances, and the least seconds of the first token and of a further one.

        Args:
            in_flight: requests of all instances; more_first_s: before the first token, beside what this instance does.
        """
        first_s = self.first_s + more_first_s
        rate = count * self.requests_per_s
        loads = np.maximum.accumulate(rate * (first_s + decode_steps * self.token_s), axis=1)

        def values(of: FloatArray) -> list[float]:
            return [float(np.interp(in_flight, load, each)) for load, each in zip(loads, of, strict=True)]

        # More in flight never carry less: what is beyond the best may wait.
        return max(values(np.maximum.accumulate(rate, axis=1))), min(values(first_s)), min(values(self.token_s))

    def token_s_by_rate(self, requests_per_s: float) -> float:
        """Return the least seconds between two tokens of an instance at a rate."""
        return min(
            float(np.interp(requests_per_s, np.maximum.accumulate(rate), token_s))
            for rate, token_s in zip(self.requests_per_s, self.token_s, strict=True)
        )
