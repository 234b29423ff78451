"""The smallest changes to a request that make something fit, each verified by finding a layout that does.

| change | tried |
|---|---|
| what was fixed | without each of the fields, then without any |
| space, engine | all of the engine instead of what `apply` executes; megatron and deepspeed |
| offload | for fsdp2 a schedule (docs/offload.md); else of the optimizer states, with the parameters, with the activations |
| devices | the least number found by bisection over numbers that the batch divides over (`growth.sizes`) |
| precision | bf16-mixed instead of fp32; parameters, gradients and states in bf16; gradients in the dtype of the products |
| seq_len, global_batch_size | halved until something fits, then one and a half times that |

Smallest first: what leaves model, machine and numerics alone, then more devices, then other numerics, then another workload; what
`apply` does not execute comes after what it does.

Why nothing fits: what binds, the best there is, what was fixed, and the smallest changes after which something does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from ...schema import ConfigError, InfeasibleError, MeshwrightError, SolverLimitError, Workload
from ...schema.engine_facts import OWN_ENGINE, PLANNED_ENGINES
from ...schema.layout import format_assignments
from ...schema.runnable import why_not_runnable
from ...schema.units import format_bytes, format_seconds
from ..deadline import Deadline, no_incumbent
from ..request import OffloadRequest, PlanRequest
from ..search import SearchResult
from .cluster_changes import grow_cluster, larger_sizes
from .feasibility import Fit, closest_to_fitting, estimate_layout, find_fit, shortfall

ADVICE_S = 10.0
"""Seconds for all changes together."""


LARGE_SPACE = 20_000
"""Layouts of a request above which changes are looked for among lean layouts only."""


NEARBY = 3
"""Sizes just below the one that bisection found which are tried besides: fits are not monotone in the number of devices."""


MIN_SEQ_LEN = 128
"""Tokens; shorter sequences are no advice."""


MIN_SHARE_OF_BATCH = 16
"""A smaller part of the batch is no advice: below some size it only leaves fewer ranks to shard over."""


Kind = Literal["fixed", "space", "engine", "offload", "devices", "precision", "seq_len", "global_batch_size"]


_CLASS: dict[Kind, int] = {
    "fixed": 0, "space": 1, "engine": 1, "offload": 1, "devices": 2, "precision": 3, "seq_len": 4, "global_batch_size": 4,
}  # fmt: skip


@dataclass(frozen=True)
class VerifiedChange:
    """A change after which a layout fits.

    Attributes:
        request: the changed request; fit: a layout of it that fits.
        executed: `apply` runs it, or runs no plan for the engine that was asked for anyway.
    """

    kind: Kind
    text: str
    request: PlanRequest
    fit: Fit
    executed: bool

    def __str__(self) -> str:
        found = self.fit.estimate
        by_apply = "" if self.executed else "; `meshwright apply` does not execute it"
        needs = f"{format_bytes(found.required_bytes)} each, {format_seconds(found.step_time_s)} a step or less"
        return f"{self.text} ({needs}{by_apply})"


@dataclass(frozen=True)
class Advice:
    """Verified changes, the smallest first; ``complete`` unless the time ran out before all were tried."""

    changes: tuple[VerifiedChange, ...]
    complete: bool


class _Advisor:
    """Looks for changes of one request until a deadline."""

    def __init__(self, request: PlanRequest, deadline: Deadline, *, lean: bool) -> None:
        self.request, self.deadline, self.lean = request, deadline, lean

    def fit(self, request: PlanRequest) -> Fit | None:
        """A layout that fits, of all where there are not too many, else of the lean ones."""
        found = None if self.lean else find_fit(request, self.deadline)
        return found or find_fit(request, self.deadline, lean=True)

    def first_fit(self, request: PlanRequest) -> Fit | None:
        """The same, but as soon as there is one: lean ones tell quickly."""
        found = find_fit(request, self.deadline, lean=True, first=True)
        return found if found or self.lean else find_fit(request, self.deadline, first=True)

    def change(self, kind: Kind, text: str, request: PlanRequest, fit: Fit | None = None) -> Iterator[VerifiedChange]:
        """The change, if something fits with it."""
        fit = fit or self.fit(request)
        if fit is not None:
            executed = request.runnable or (not self.request.workload.engine_facts.is_own_runtime and kind != "offload")
            yield VerifiedChange(kind, text, request, fit, executed and _is_executed(request, fit))


def advise(request: PlanRequest, deadline: Deadline, *, num_layouts: int) -> Advice:
    """What to change so that something fits; the order and the content depend on time only where it runs out.

    Args:
        request: of which nothing fits.
        deadline: of the search; the advice takes at most ADVICE_S of what is left.
        num_layouts: of the request's space.
    """
    limit = Deadline(min(ADVICE_S, deadline.left_s), within=deadline)
    advisor = _Advisor(request, limit, lean=num_layouts > LARGE_SPACE)
    found: list[VerifiedChange] = []
    complete = True
    for changes in (_released, _devices, _spaces, _offloads, _precisions, _sequences, _batches):
        try:
            found += changes(advisor)
        except SolverLimitError:
            complete = False
    order = sorted(found, key=lambda c: (not c.executed, _CLASS[c.kind], c.fit.estimate.step_time_s))
    return Advice(tuple(order), complete)


def _is_executed(request: PlanRequest, fit: Fit) -> bool:
    """Whether the runtime trains this workload; other engines are not run by `apply` anyway."""
    return not request.workload.engine_facts.is_own_runtime or not why_not_runnable(request.model, request.workload)


def _released(a: _Advisor) -> Iterator[VerifiedChange]:
    """Without each of the fixed fields; without any of them if that does not help."""
    request, found = a.request, False
    for name, value in request.fixed.items():
        free = {other: kept for other, kept in request.fixed.items() if other != name}
        for change in a.change("fixed", f"without {name}={value}", replace(request, fixed=free)):
            found = True
            yield replace(change, text=f"do not fix {name}={value}: {_instead(name, change.fit)}")
    if len(request.fixed) > 1 and not found:
        yield from a.change("fixed", f"fix none of {format_assignments(request.fixed)}", replace(request, fixed={}))


def _instead(name: str, fit: Fit) -> str:
    return f"{name}={getattr(fit.layout, name)} fits"


def _devices(a: _Advisor) -> Iterator[VerifiedChange]:
    """The least number of devices found."""
    counts = larger_sizes(a.request.cluster, a.request.workload)
    tried: dict[int, Fit | None] = {}

    def fit_on(place: int) -> Fit | None:
        if place not in tried:
            cluster = grow_cluster(a.request.cluster, counts[place])
            tried[place] = None if cluster is None else a.first_fit(replace(a.request, cluster=cluster))
        return tried[place]

    place = _first_that_holds(len(counts), lambda k: counts[k], lambda k: fit_on(k) is not None)
    if place is None:
        return
    cluster = grow_cluster(a.request.cluster, counts[place])
    if cluster is not None:
        larger = replace(a.request, cluster=cluster)
        yield from a.change("devices", f"use {counts[place]} devices", larger, a.fit(larger) or tried[place])


def _first_that_holds(size: int, count_of: Callable[[int], int], holds: Callable[[int], bool]) -> int | None:
    """The first place that holds, as far as growing by factors of two, bisection and NEARBY further tries find it."""
    below, place = -1, 0
    while place < size and not holds(place):
        below = place
        place = next((k for k in range(place + 1, size) if count_of(k) >= 2 * count_of(below)), size)
    if place == size:
        if below == size - 1 or not holds(size - 1):
            return None
        place = size - 1
    while place - below > 1:
        middle = (below + place) // 2
        below, place = (below, middle) if holds(middle) else (middle, place)
    nearby = (k for k in range(max(0, place - NEARBY), place) if holds(k))
    return next(nearby, place)


def _spaces(a: _Advisor) -> Iterator[VerifiedChange]:
    """All that the engine executes; other engines."""
    request = a.request
    if request.runnable:
        yield from a.change("space", "search all of the engine (--space full)", replace(request, runnable=False))
    for engine in PLANNED_ENGINES:
        if engine not in (OWN_ENGINE, request.workload.engine):
            other = replace(request, workload=request.workload.replace(engine=engine), runnable=False)
            yield from a.change("engine", f"run it by {engine} (--engine {engine})", other)


def _scheduled(a: _Advisor) -> Iterator[VerifiedChange]:
    """As a schedule that `plan --offload auto` finds: a first one, which that may only improve on."""
    request = a.request
    names = ("offload", "offload_activations", "offload_fraction", "offload_to")
    if not request.workload.engine_facts.is_own_runtime or request.cluster.is_mixed or request.fixed.get("pp", 1) != 1:
        return
    if any(name in request.fixed for name in names):
        return
    fixed = request.fixed if not a.lean else {"micro_batch_size": 1, **request.fixed}
    from ..tasks.offload import schedule_layout, search_offload  # its solver is not needed without

    try:
        found = search_offload(
            request.model,
            request.cluster,
            request.workload,
            request=OffloadRequest(),
            fixed=fixed,
            runnable=request.runnable,
            deadline=a.deadline,
            first=True,
        )
    except (ConfigError, InfeasibleError):
        return
    if found is not None:
        found = schedule_layout(request.model, request.cluster, request.workload, found.layout, OffloadRequest())
        text = f"offload (--offload auto) to {format_bytes(found.schedule.host_bytes)} of host memory a node"
        executed = request.runnable and not why_not_runnable(request.model, request.workload)
        yield VerifiedChange("offload", text, request, Fit(found.layout, found.estimate), executed)


def _offloads(a: _Advisor) -> Iterator[VerifiedChange]:
    """To the host's memory: by a schedule, or by the layout's own switches, of each kind no more than is needed."""
    scheduled = list(_scheduled(a))
    yield from scheduled
    if scheduled:
        return
    choices: tuple[dict[str, Any], ...] = (
        {"offload": "optimizer"},
        {"offload_activations": 1.0},
        {"offload": "optimizer", "offload_activations": 1.0},
        {"offload": "parameters"},
        {"offload": "parameters", "offload_activations": 1.0},
    )
    for offload in choices:
        if any(name in a.request.fixed for name in offload):
            continue
        request = replace(a.request, fixed={**a.request.fixed, **offload}, runnable=False)
        flags = ("--space full " if a.request.runnable else "") + f"--fix {format_assignments(request.fixed)}"
        for change in a.change("offload", f"offload ({flags})", request):
            if (on_host := _host_bytes(request, change.fit)) is not None:
                yield replace(change, text=f"{change.text} to {format_bytes(on_host)} of host memory a node")
                return


def _host_bytes(request: PlanRequest, fit: Fit) -> int | None:
    """What a node's host must hold: what the layout needs on the devices without offloading; None if it has not as much."""
    whole = fit.layout.replace(offload="none", offload_activations=0.0, offload_fraction=1.0)
    kept = estimate_layout(request, whole)
    on_host = max(0, kept.peak_allocated_bytes - fit.estimate.peak_allocated_bytes) * request.cluster.largest_node
    sizes_known = [group.host_memory_bytes for group in request.cluster.groups if group.host_memory_bytes]
    return None if sizes_known and on_host > min(sizes_known) else on_host


def _precisions(a: _Advisor) -> Iterator[VerifiedChange]:
    """Fewer bytes for parameters, gradients and optimizer states."""
    workload = a.request.workload
    has_bf16 = a.request.cluster.weakest_device.peak_flops_per_s.bf16 is not None
    changes: list[tuple[str, dict[str, str]]] = []
    if not workload.engine_facts.is_own_runtime and workload.gradients == "fp32" and workload.precision != "fp32":
        changes.append(("accumulate gradients in the dtype of the products", {"gradients": "compute"}))
    if has_bf16 and workload.precision == "fp32":
        changes.append(("train in mixed precision (--precision bf16-mixed)", {"precision": "bf16-mixed"}))
    if has_bf16 and workload.precision != "bf16":
        changes.append(("keep parameters, gradients and states in bf16 (--precision bf16)", {"precision": "bf16"}))
    for text, change in changes:
        yield from a.change("precision", text, _with(a.request, workload.replace(**change)))


def _sequences(a: _Advisor) -> Iterator[VerifiedChange]:
    """Shorter sequences; memory only falls with their length, so the shortest tells whether to go on."""
    shortest = _with(a.request, a.request.workload.replace(seq_len=min(MIN_SEQ_LEN, a.request.workload.seq_len)))
    if a.first_fit(shortest) is not None:
        yield from _shrunk(a, "seq_len", least=MIN_SEQ_LEN, text="shorten sequences to {} tokens (--seq-len {})")


def _batches(a: _Advisor) -> Iterator[VerifiedChange]:
    """A smaller batch: fewer sequences in flight."""
    least = max(1, a.request.workload.global_batch_size // MIN_SHARE_OF_BATCH)
    yield from _shrunk(a, "global_batch_size", least=least, text="use a global batch of {} (--global-batch-size {})")


def _shrunk(
    a: _Advisor, name: Literal["seq_len", "global_batch_size"], *, least: int, text: str
) -> Iterator[VerifiedChange]:
    """Halved until something fits, then one and a half times that."""
    whole = getattr(a.request.workload, name)
    value, found = whole // 2, None
    while value >= least:
        request = _with(a.request, a.request.workload.replace(**{name: value}))
        if (found := a.first_fit(request)) is not None:
            break
        value //= 2
    if found is None:
        return
    larger = value * 3 // 2
    request = _with(a.request, a.request.workload.replace(**{name: larger}))
    if larger < whole and a.first_fit(request) is not None:
        value = larger
    yield from a.change(name, text.format(value, value), _with(a.request, a.request.workload.replace(**{name: value})))


def _with(request: PlanRequest, workload: Workload) -> PlanRequest:
    """Another workload, in the space that our runtime executes where it did and still trains it."""
    runnable = request.runnable and not why_not_runnable(request.model, workload)
    return replace(request, workload=workload, runnable=runnable)


def explain_infeasible(request: PlanRequest, result: SearchResult, deadline: Deadline) -> MeshwrightError:
    """The error for a search that found nothing that fits."""
    model, cluster, batch = request.model, request.cluster, result.costs.batch
    if result.stopped_early:
        done = (
            f"{result.evaluated} of {result.num_layouts} layouts evaluated; none is faster than {result.bound_s:.4g} s"
        )
        return no_incumbent(deadline, f"for {model.name}", done)
    best = closest_to_fitting(result)
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
