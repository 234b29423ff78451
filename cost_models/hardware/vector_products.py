"""Products in plain fp32, which run on the vector units and not on the matrix units that the learned model knows.

    1 / rate = ((e P)^-q + (g j W)^-q)^(1/q)

e is the part e of the fp32 peak P that the kernels reach: processors with 128 lanes read operands from the shared memory no faster
than those with 64, so that they reach less of their peak; j is what the silicon makes of a joule in 16-bit products, g of it
those in fp32 make, W the board's watts, q as in `machine.product_clock`. Small boards are held back by W, others by e. Where a
processor multiplies fp32 on matrix units of its own (CDNA 2), e is above one: the peak is that of vectors.
"""

from __future__ import annotations

from ...schema import Device
from ..coefficients import Coefficients
from ..learned.kernels import EnergyLimit, GemmRates


def on_vector_units(rates: GemmRates, device: Device, watts: float | None, coefficients: Coefficients) -> GemmRates:
    """Return the rates of a device's products in plain fp32; ``watts`` of its board, None where unknown."""
    c, clocks, silicon = coefficients["fp32"], coefficients["clocks"], device.die or device.architecture
    reached = c["efficiency"].get(silicon, c["efficiency"]["other"])
    fit = rates.coefficients._replace(compute_efficiency=reached, tail_waves=c["tail_waves"])
    per_joule = clocks["flops_per_joule"].get(silicon)
    fed = None if watts is None or per_joule is None else c["flops_per_joule_ratio"] * per_joule * watts
    energy = None if fed is None else EnergyLimit(fed, clocks["sharpness"])
    return rates._replace(coefficients=fit, reference=None, energy=energy, has_residual=False)
