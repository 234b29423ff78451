"""Offload schedules of the sizes that can be rented (planner/sizes.py): where nothing fits without one, or one is cheaper."""

from __future__ import annotations

import math

from ..schema import ConfigError, InfeasibleError, SolverLimitError
from .offload import Offloaded, search_offload
from .offload_space import OffloadSpace
from .planning import WORTH_MOVING
from .search import REL_GAP
from .sizes import Size, SizesRequest


def bound_of_schedules(size: Size, request: SizesRequest) -> float:
    """Seconds that no schedule of a size beats: the work of its layouts, all of them at once."""
    assert request.offload is not None
    try:
        space = OffloadSpace(
            request.model,
            size.cluster,
            request.workload,
            request.fixed,
            request=request.offload,
            runnable=request.runnable,
            deadline=request.deadline,
        )
    except ConfigError:
        return math.inf
    except SolverLimitError:
        return 0.0
    return float(space.work_s().min(initial=math.inf))


def search_schedules(size: Size, request: SizesRequest, limit_s: float, *, plain_s: float | None) -> bool:
    """The fastest schedule of a size where it beats ``limit_s`` and what the size has without, which takes ``plain_s``."""
    bound_s, known_s = size.least_s, limit_s * (1 + 2 * REL_GAP) if plain_s is None else plain_s
    try:
        found = _searched(size, request, known_s)
    except (ConfigError, InfeasibleError):
        return plain_s is not None
    except SolverLimitError:
        size.is_stopped = True
        return plain_s is not None
    if found is None:
        if plain_s is None and size.outcome == "does not fit":
            size.outcome = "too slow" if limit_s == request.slowest_s else "dearer"
            size.reason = "nothing fits without an offload schedule, and none is faster"
        return plain_s is not None
    size.bound_s = min(bound_s, found.certificate.bound_s)
    size.is_stopped |= found.certificate.status == "feasible"
    if found.estimate.step_time_s >= known_s * (1 - WORTH_MOVING):
        return plain_s is not None
    size.offloaded, size.step_time_s = found, found.estimate.step_time_s
    return True


def _searched(size: Size, request: SizesRequest, worse_than_s: float) -> Offloaded | None:
    assert request.offload is not None
    return search_offload(
        request.model,
        size.cluster,
        request.workload,
        request=request.offload,
        fixed=request.fixed,
        runnable=request.runnable,
        deadline=request.deadline,
        worse_than_s=worse_than_s,
    )
