"""A higher bound, from what every schedule that is faster than a known one must do.

The fluid program takes parts of the options of many layers, and so has less in use at once than any of these layers needs. If even
the count form is not faster than the known schedule where no layer may have w bytes or more in use, then every faster schedule has
a layer with at least w; the fluid program with `working >= w` is a bound on those, and the least of that and of the known schedule
is one on all. The largest such w is found by bisection.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from . import offload_count, offload_fluid
from .offload_fluid import Fluid
from .offload_instance import Instance


def raised(instance: Instance, fluid: Fluid, known_s: float) -> float:
    """Seconds that no schedule is below, given one that takes ``known_s``; never below the bound of ``fluid``."""
    sizes = np.unique(instance.working_bytes[instance.allowed])
    sizes = sizes[sizes > fluid.working_bytes]
    below, above = -1, len(sizes)  # what is needed at sizes[below] is proved, at sizes[above] it is not
    while above - below > 1:
        middle = (below + above) // 2
        if _least_without(instance, float(sizes[middle])) >= known_s:
            below = middle
        else:
            above = middle
    if below < 0:
        return fluid.bound_s
    _, tighter = offload_fluid.solve(instance, least_working_bytes=float(sizes[below]))
    return max(fluid.bound_s, known_s if tighter is None else min(known_s, tighter.bound_s))


def _least_without(instance: Instance, bytes_: float) -> float:
    """A bound on schedules of which no layer has so many bytes in use."""
    return offload_count.lower_bound_s(replace(instance, allowed=instance.allowed & (instance.working_bytes < bytes_)))
