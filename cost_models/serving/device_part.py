"""A part of a device that one of two phases has to itself: its multiprocessors, and of the bandwidth what they can draw.

    FLOP/s     s P                      s: share of the multiprocessors
    bytes/s    min(1, s / s0) W         s0: the share from which on they draw all of it (`serving.shares.saturating`)

Launches, links and the host are as before. What was learned of kernels on entire devices holds of a part too: residuals do not
change with it, so that a larger part is never slower.

Source: arXiv:2504.19867 (semi-PD: phases on parts of the multiprocessors, one memory).
"""

from __future__ import annotations

from typing import NamedTuple

from ..coefficients import Coefficients
from ..hardware.compute import DeviceRates
from ..learned.kernels import GemmRates

UNLIMITED = 1e12
"""Times a rate, so that its term vanishes beside any launch."""


class DevicePart(NamedTuple):
    """What a phase has of a device, over all of it: arithmetic, and bandwidth of the memory."""

    compute: float = 1.0
    bandwidth: float = 1.0

    @classmethod
    def of_share(cls, share: float, coefficients: Coefficients) -> DevicePart:
        """Return the part of a device that a share of its multiprocessors, in (0, 1], has."""
        return cls(share, min(1.0, share / float(coefficients["serving"]["shares"]["saturating"])))

    def rates(self, rates: DeviceRates) -> DeviceRates:
        """Return the rates of the part of a device."""
        if self == ENTIRE:
            return rates
        attention = rates.attention
        if attention is not None:
            device = attention.device._replace(
                peak_flops_per_s=attention.device.peak_flops_per_s * self.compute,
                bytes_per_s=attention.device.bytes_per_s * self.bandwidth,
            )
            attention = attention._replace(device=device)
        return rates._replace(
            attention=attention,
            gemm_flops_per_s=rates.gemm_flops_per_s * self.compute,
            vector_flops_per_s=rates.vector_flops_per_s * self.compute,
            gemm_bytes_per_s=rates.gemm_bytes_per_s * self.bandwidth,
            elementwise_bytes_per_s=rates.elementwise_bytes_per_s * self.bandwidth,
        )

    def gemm_rates(self, rates: GemmRates) -> GemmRates:
        """Return the rates of products on the part, with the residual of the entire device."""
        if self == ENTIRE:
            return rates
        sheet, energy = rates.hardware, rates.energy
        if energy is not None:
            energy = energy._replace(flops_per_s=energy.flops_per_s * self.compute)
        return rates._replace(
            hardware=sheet._replace(
                peak_flops_per_s=sheet.peak_flops_per_s * self.compute,
                memory_bandwidth_bytes_per_s=sheet.memory_bandwidth_bytes_per_s * self.bandwidth,
            ),
            energy=energy,
            reference=rates.reference or sheet,
        )


ENTIRE = DevicePart()
"""A device of which nothing is shared."""

MEMORY, LAUNCHES = DevicePart(UNLIMITED, 1.0), DevicePart(UNLIMITED, UNLIMITED)
"""What is left of kernels without arithmetic, and without traffic too."""
