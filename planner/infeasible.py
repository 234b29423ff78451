"""Why nothing fits: what binds, the best there is, what was fixed, and the smallest changes after which something does."""

from __future__ import annotations

from ..schema import InfeasibleError, MeshwrightError
from ..schema.layout import format_assignments
from .advice import advise
from .closest import closest, shortfall
from .deadline import Deadline, no_incumbent
from .request import Request
from .search import SearchResult


def explain_infeasible(request: Request, result: SearchResult, deadline: Deadline) -> MeshwrightError:
    """The error for a search that found nothing that fits."""
    model, cluster, batch = request.model, request.cluster, result.costs.batch
    if result.stopped_early:
        done = (
            f"{result.evaluated} of {result.num_layouts} layouts evaluated; none is faster than {result.bound_s:.4g} s"
        )
        return no_incumbent(deadline, f"for {model.name}", done)
    best = closest(result)
    details = [*shortfall(best.layout(batch), best.estimate, request.workload, cluster)]
    if request.fixed:
        details.append(f"fixed: {format_assignments(request.fixed)}")
    advice = advise(request, deadline, num_layouts=result.num_layouts)
    details += [f"also fits: {change}" for change in advice.changes[1:]]
    if not advice.complete:
        details.append("the time ran out before every change was tried")
    none = (
        "nothing that was tried fits: other choices, more devices, offloading, fewer bytes a state, a smaller workload"
    )
    devices = " and ".join(f"{group.num_devices} x {group.device.name}" for group in cluster.groups)
    return InfeasibleError(
        f"no plan fits {model.name} on {devices}",
        details=tuple(details),
        help=str(advice.changes[0]) if advice.changes else none,
    )
