"""Calibration: what measured runs of one's own cluster say about the model's rates, as a few named ratios."""

from __future__ import annotations

from pydantic import Field

from .base import Frozen, NonNegativeFloat, NonNegativeInt, PositiveFloat

Ratio = Field(default=1.0, gt=0.05, lt=20.0)


class Calibration(Frozen):
    """Ratios of what a cluster achieves to what the model assumes; all one where nothing was measured.

    Attributes:
        products: rate of matrix products.
        attention: rate of fused attention.
        elementwise: bandwidth of memory-bound kernels.
        host: speed of the host's dispatch (its seconds are divided by this).
        scale_up, scale_out: bandwidth of links inside and between nodes.
        activations: bytes kept for the backward pass.
        overhead_bytes: what a device holds besides what the model counts.
        num_runs: measured runs the ratios come from.
        spread: standard deviation of log(measured / predicted) on runs that were left out in turn; None below two runs.
        error_before, error_after: mean |predicted / measured - 1| on runs left out in turn, without and with the ratios.
    """

    products: float = Ratio
    attention: float = Ratio
    elementwise: float = Ratio
    host: float = Ratio
    scale_up: float = Ratio
    scale_out: float = Ratio
    activations: float = Ratio
    overhead_bytes: NonNegativeFloat = 0.0
    num_runs: NonNegativeInt = 0
    spread: PositiveFloat | None = None
    error_before: float | None = None
    error_after: float | None = None

    def __str__(self) -> str:
        """The ratios that moved, and on how many runs they rest."""
        names = ("products", "attention", "elementwise", "host", "scale_up", "scale_out", "activations")
        moved = [f"{name} x{getattr(self, name):.2f}" for name in names if abs(getattr(self, name) - 1) >= 0.005]
        if abs(self.overhead_bytes) >= 2**20:
            moved.append(f"{self.overhead_bytes / 2**30:+.2f} GiB")
        text = f"{', '.join(moved) or 'nothing moved'} from {self.num_runs} runs"
        if self.error_before is None or self.error_after is None:
            return text
        return f"{text}; on runs left out in turn {100 * self.error_before:.1f} % -> {100 * self.error_after:.1f} %"
