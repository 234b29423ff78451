"""How alike runs are in what does not differ between the layouts of one plan: the model, its workload and the number of devices.

What a model of costs leaves out is alike for like runs (kernels of a width, a recipe, its data), so that what some were off by says
something of others. Beside the ratios of a calibration:

    log(measured / predicted) = .. + u,   u ~ GP(0, DEVIATION^2 M(d))        M(d) = (1 + sqrt(3) d) exp(-sqrt(3) d)

with d the distance of two runs over SCALES.
"""

from __future__ import annotations

import math

import numpy as np

from ..schema import ModelSpec, Workload
from ..schema.units import FloatArray

SCALES = {
    "params": 1.5,
    "hidden": 1.0,
    "seq": 2.1,
    "devices": 3.1,
    "low_precision": 1.5,
    "experts": 1.5,
    "adapters": 1.5,
}
"""Distance one, of the logarithms, and of one run having what the other has not. Set by hand, not fitted."""

DEVIATION = 0.10
"""Of the sources that docs/accuracy.md calibrates, 0.07 to 0.15 take as much off the error of the runs left out."""


def features(model: ModelSpec, workload: Workload, num_devices: int) -> FloatArray:
    """Return where a run stands [F], over SCALES."""
    values = {
        "params": math.log(model.num_params),
        "hidden": math.log(model.hidden_dim),
        "seq": math.log(workload.seq_len),
        "devices": math.log(num_devices),
        "low_precision": float(workload.precision in ("fp8", "nvfp4")),
        "experts": float(model.is_moe),
        "adapters": float(workload.adapters is not None),
    }
    return np.array([values[name] / scale for name, scale in SCALES.items()])


def covariance(first: FloatArray, second: FloatArray) -> FloatArray:
    """Return the covariance of u between runs at ``first`` [N, F] and at ``second`` [M, F]."""
    distance = np.sqrt(3 * np.square(first[:, None] - second[None]).sum(axis=-1))
    return np.asarray(DEVIATION**2 * (1 + distance) * np.exp(-distance))
