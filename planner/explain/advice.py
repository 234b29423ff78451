"""The smallest changes of a request after which something fits.

| change | tried |
|---|---|
| what was fixed | without each of the fields, then without any |
| space, engine | all of the engine instead of what `apply` executes; megatron and deepspeed |
| offload | for fsdp2 a schedule (docs/offload.md); else of the optimizer states, with the parameters, with the activations |
| devices | the least number found by bisection over numbers that the batch divides over (`larger_sizes`) |
| precision | bf16-mixed instead of fp32; parameters, gradients and states in bf16; gradients in the dtype of the products |
| seq_len, global_batch_size | halved until something fits, then one and a half times that |

Every change is verified by a layout that fits with it (`find_fit`). Smallest first: what leaves model, machine and numerics as they
are, then more devices, then other numerics, then another workload; what `apply` does not execute comes after what it does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import numpy as np

from ...cost_models.stage import memory
from ...cost_models.stage.bounds import budget_bytes, memory_bounds, uniform_time_bounds
from ...cost_models.stage.table import CostTable
from ...schema import (
    ClusterSpec,
    ConfigError,
    InfeasibleError,
    Layout,
    LinkLevel,
    SolverLimitError,
    TrainingEstimate,
    Workload,
)
from ...schema.catalogue import find_device
from ...schema.cluster import Link
from ...schema.engine_facts import ENGINES, OWN_ENGINE, PLANNED_ENGINES
from ...schema.layout import format_assignments
from ...schema.runnable import why_not_runnable
from ...schema.units import format_bytes, format_seconds
from ..expand import Candidate, expand_fitting, expand_layout
from ..request import OffloadRequest, PlanRequest, is_trained_by_apply
from ..space import build_space
from ..tasks.offload import schedule_layout, search_offload

MAX_PROBES = 200
"""Requests that are looked at for all changes together; most advice takes 10 to 40."""

LARGE_SPACE = 20_000
"""Layouts of a request above which changes are looked for among lean layouts only."""

FIT_TRIES = 6
"""Layouts expanded for each of the two orders of a probe."""

ROOMY_FRACTION = 0.9
"""Bounds take stages as balanced; layouts below this part of the budget mostly fit with real ones."""

LEAN: dict[str, Any] = {"micro_batch_size": 1, "recompute": "full", "num_model_chunks": 1, "etp": 1}
"""What a layout with the least memory mostly has; where these are fixed, a space is some hundred times smaller."""

NEARBY = 3
"""Sizes just below the one that bisection found which are tried besides: fits are not monotone in the number of devices."""

MIN_SEQ_LEN = 128
"""Tokens; shorter sequences are no advice."""

MIN_SHARE_OF_BATCH = 16
"""A smaller part of the batch is no advice: below some size it only leaves fewer ranks to shard over."""

MAX_GROWTH = 256
"""Largest multiple of the cluster, or of a node of it, that is tried."""

MAX_SHARED_RANKS = 64
"""Ranks that share one sequence at a time (tp x cp x pp) at least, where dp takes all that the batch allows."""

Kind = Literal["fixed", "space", "engine", "offload", "devices", "precision", "seq_len", "global_batch_size"]

_CLASS: dict[Kind, int] = {
    "fixed": 0, "space": 1, "engine": 1, "offload": 1, "devices": 2, "precision": 3, "seq_len": 4, "global_batch_size": 4,
}  # fmt: skip


@dataclass(frozen=True)
class Fit:
    """A layout that fits."""

    layout: Layout
    estimate: TrainingEstimate


@dataclass(frozen=True)
class VerifiedChange:
    """A change after which a layout fits.

    Attributes:
        request: the changed request; fit: a layout of it that fits.
        executed: `apply` runs it, or runs no plan for the requested engine anyway.
    """

    kind: Kind
    text: str
    request: PlanRequest
    fit: Fit
    executed: bool

    def __str__(self) -> str:
        estimate = self.fit.estimate
        by_apply = "" if self.executed else "; `meshwright apply` does not execute it"
        needs = f"{format_bytes(estimate.required_bytes)} each, {format_seconds(estimate.step_time_s)} a step or less"
        return f"{self.text} ({needs}{by_apply})"


@dataclass(frozen=True)
class Advice:
    """Verified changes, the smallest first; ``complete`` unless a limit came before all were tried."""

    changes: tuple[VerifiedChange, ...]
    complete: bool


def advise(request: PlanRequest, *, num_layouts: int) -> Advice:
    """Return what to change so that something fits; depends on the machine only where the request's time runs out.

    Args:
        request: of which nothing fits.
        num_layouts: of the request's space.
    """
    advisor = _Advisor(request, num_layouts=num_layouts)
    changes: list[VerifiedChange] = []
    complete = True
    for propose in (_released, _devices, _spaces, _offloads, _precisions, _sequences, _batches):
        try:
            changes += propose(advisor)
        except SolverLimitError:
            complete = False
    order = sorted(changes, key=lambda c: (not c.executed, _CLASS[c.kind], c.fit.estimate.step_time_s))
    return Advice(tuple(order), complete)


def find_fit(
    request: PlanRequest, *, among: Literal["all", "lean"] = "all", which: Literal["fastest", "first"] = "fastest"
) -> Fit | None:
    """Return a layout that fits for certain, or None where none of those tried does: one may still exist.

    Of the bounded layouts those with the least memory are expanded, and of those with memory to spare the fastest by their bounds.

    Args:
        among: all layouts, or those that are `LEAN` in what is not fixed.
        which: of those tried.

    Raises:
        SolverLimitError: the deadline came first.
    """
    if among == "lean":
        request = replace(request, fixed={**LEAN, **request.fixed})
    try:
        space = build_space(request)
    except ConfigError:
        return None

    def checkpoint() -> None:
        request.deadline.require("verifying a change")

    costs = CostTable.from_layouts(request.model, request.workload, request.cluster, space.batch, checkpoint=checkpoint)
    required = memory.lower_bound_required_bytes(memory_bounds(costs), costs.scenario)
    budget = budget_bytes(costs)
    smallest = np.argsort(required, kind="stable")[:FIT_TRIES]
    roomy = np.flatnonzero(required <= ROOMY_FRACTION * budget)
    fastest = roomy[np.argsort(uniform_time_bounds(costs.select(roomy)), kind="stable")[:FIT_TRIES]]
    rows = np.array(list(dict.fromkeys([*smallest[(required <= budget)[smallest]], *fastest])), dtype=np.int64)
    if not len(rows):
        return None
    subset, feasible = costs.select(rows).compacted(), list[Candidate]()
    for idx in range(len(rows)):
        checkpoint()
        if (candidate := expand_fitting(subset, idx)) is not None:
            feasible.append(candidate)
            if which == "first":
                break
    best = min(feasible, key=lambda c: (c.estimate.step_time_s, rows[c.idx]), default=None)
    return None if best is None else Fit(best.layout(subset.layouts), best.estimate)


class _Advisor:
    """Looks for changes of one request until MAX_PROBES or its deadline."""

    def __init__(self, request: PlanRequest, *, num_layouts: int) -> None:
        self.request, self.is_large = request, num_layouts > LARGE_SPACE
        self._num_probes = 0

    def _probe(
        self, request: PlanRequest, among: Literal["all", "lean"], which: Literal["fastest", "first"] = "fastest"
    ) -> Fit | None:
        if self._num_probes == MAX_PROBES:
            raise SolverLimitError(f"{MAX_PROBES} changed requests were looked at")
        self._num_probes += 1
        return find_fit(request, among=among, which=which)

    def fit(self, request: PlanRequest) -> Fit | None:
        return (None if self.is_large else self._probe(request, "all")) or self._probe(request, "lean")

    def first_fit(self, request: PlanRequest) -> Fit | None:
        """Return a layout that fits as soon as there is one: lean ones tell quickly."""
        fit = self._probe(request, "lean", "first")
        return fit if fit or self.is_large else self._probe(request, "all", "first")

    def change(self, kind: Kind, text: str, request: PlanRequest, fit: Fit | None = None) -> Iterator[VerifiedChange]:
        fit = fit or self.fit(request)
        if fit is not None:
            # Other engines are not run by `apply` anyway.
            is_ours = request.workload.engine_facts.is_own_runtime
            executed = request.runnable or (not self.request.workload.engine_facts.is_own_runtime and kind != "offload")
            executed &= not (is_ours and why_not_runnable(request.model, request.workload))
            yield VerifiedChange(kind, text, request, fit, executed)


def _released(a: _Advisor) -> Iterator[VerifiedChange]:
    """Release each of the fixed fields; all of them if that does not help."""
    request, any_fits = a.request, False
    for name, value in request.fixed.items():
        others = {other: kept for other, kept in request.fixed.items() if other != name}
        for change in a.change("fixed", "", replace(request, fixed=others)):
            any_fits = True
            instead = f"{name}={getattr(change.fit.layout, name)} fits"
            yield replace(change, text=f"do not fix {name}={value}: {instead}")
    if len(request.fixed) > 1 and not any_fits:
        yield from a.change("fixed", f"fix none of {format_assignments(request.fixed)}", replace(request, fixed={}))


def _devices(a: _Advisor) -> Iterator[VerifiedChange]:
    counts = larger_sizes(a.request.cluster, a.request.workload)

    @cache
    def fit_on(idx: int) -> tuple[PlanRequest, Fit] | None:
        cluster = grow_cluster(a.request.cluster, counts[idx])
        larger = cluster and replace(a.request, cluster=cluster)
        fit = larger and a.first_fit(larger)
        return (larger, fit) if larger and fit else None

    idx = _first_that_holds(counts, lambda k: fit_on(k) is not None)
    if idx is not None and (smallest := fit_on(idx)) is not None:
        larger, fit = smallest
        yield from a.change("devices", f"use {counts[idx]} devices", larger, a.fit(larger) or fit)


def _first_that_holds(counts: Sequence[int], holds: Callable[[int], bool]) -> int | None:
    """Return the first index that holds, as far as growing by factors of two, bisection and NEARBY more tries find it."""
    size, below, idx = len(counts), -1, 0
    while idx < size and not holds(idx):
        below = idx
        idx = next((k for k in range(idx + 1, size) if counts[k] >= 2 * counts[below]), size)
    if idx == size:
        if below == size - 1 or not holds(size - 1):
            return None
        idx = size - 1
    while idx - below > 1:
        middle = (below + idx) // 2
        below, idx = (below, middle) if holds(middle) else (middle, idx)
    nearby = (k for k in range(max(0, idx - NEARBY), idx) if holds(k))
    return next(nearby, idx)


def larger_sizes(cluster: ClusterSpec, workload: Workload) -> list[int]:
    """Return numbers of devices beyond these that the batch divides over well enough, increasing: first the rest of a node."""
    now, node = cluster.num_devices, _devices_per_node(cluster)
    if cluster.num_nodes == 1:
        counts = [*range(now + 1, node + 1), *range(2 * node, MAX_GROWTH * node + 1, node)]
    else:
        step = now // _common_nodes(cluster)
        counts = list(range(now + step, MAX_GROWTH * now + 1, step))
    return [count for count in counts if count // math.gcd(count, workload.global_batch_size) <= MAX_SHARED_RANKS]


def grow_cluster(cluster: ClusterSpec, num_devices: int) -> ClusterSpec | None:
    """Return the cluster with ``num_devices`` devices, as one of `larger_sizes`; None where its link domains do not divide them."""
    if cluster.num_nodes == 1:
        per_node = min(num_devices, _devices_per_node(cluster))
        groups = [cluster.groups[0].replace(num_nodes=num_devices // per_node, devices_per_node=per_node)]
        inner = [LinkLevel(link=cluster.levels[-1].link, domain_size=per_node)]
    else:
        common = _common_nodes(cluster)
        times = num_devices * common // cluster.num_devices
        groups = [group.resized(group.num_nodes * times // common).replace(profile=None) for group in cluster.groups]
        inner = [level for level in cluster.levels if level is not cluster.levels[-1] or level.link.kind != "scale-out"]
    levels = [level for level in inner if level.domain_size > 1]
    if not levels or levels[-1].domain_size != num_devices:
        levels.append(LinkLevel(link=_network(cluster), domain_size=num_devices))
    try:
        return cluster.replace(groups=tuple(groups), levels=tuple(levels), bandwidth_matrix=None, profile=None)
    except ConfigError:
        return None


def _common_nodes(cluster: ClusterSpec) -> int:
    return math.gcd(*(group.num_nodes for group in cluster.groups))


def _catalogue_entry(cluster: ClusterSpec) -> dict[str, Any]:
    try:
        return dict(find_device(cluster.groups[0].device.name)[1])
    except ConfigError:
        return {}


def _devices_per_node(cluster: ClusterSpec) -> int:
    """Return the devices of a full node: what the catalogue says of the device, or as many as there are."""
    return max(cluster.groups[0].devices_per_node, int(_catalogue_entry(cluster).get("devices_per_node", 0)))


def _network(cluster: ClusterSpec) -> Link:
    """Return what joins more nodes: the network that there is, else the usual one of the device, else the only link known."""
    link, usual = cluster.levels[-1].link, _catalogue_entry(cluster).get("scaleout")
    return link if link.kind == "scale-out" or usual is None else Link.named(usual)


def _spaces(a: _Advisor) -> Iterator[VerifiedChange]:
    request = a.request
    if request.runnable:
        yield from a.change("space", "search all of the engine (--space full)", replace(request, runnable=False))
    for engine in PLANNED_ENGINES:
        facts = ENGINES[engine]
        # Engines that are calibrated as another have its times.
        if engine not in (OWN_ENGINE, request.workload.engine) and not facts.calibrated_as:
            if facts.lacks and facts.lacks(request.model, request.workload):
                continue
            other = replace(request, task=request.workload.replace(engine=engine), runnable=False)
            yield from a.change("engine", f"run it by {engine} (--engine {engine})", other)


def _scheduled(a: _Advisor) -> VerifiedChange | None:
    """Offload by a schedule that `plan --offload auto` finds: a first one, which that may only improve on."""
    request = a.request
    names = {"offload", "offload_activations", "offload_fraction", "offload_to"}
    is_ours, one_stage = request.workload.engine_facts.is_own_runtime, request.fixed.get("pp", 1) == 1
    if not is_ours or not one_stage or request.cluster.is_mixed or names & request.fixed.keys():
        return None
    fixed = request.fixed if not a.is_large else {"micro_batch_size": 1, **request.fixed}
    anything = replace(request, fixed=fixed, offload=OffloadRequest())
    try:
        first = search_offload(anything, effort="first")
    except (ConfigError, InfeasibleError):
        return None
    if first is None:
        return None
    best = schedule_layout(anything, first.layout)
    text = f"offload (--offload auto) to {format_bytes(best.schedule.host_bytes)} of host memory a node"
    executed = request.runnable and not why_not_runnable(request.model, request.workload)
    return VerifiedChange("offload", text, request, Fit(best.layout, best.estimate), executed)


def _offloads(a: _Advisor) -> Iterator[VerifiedChange]:
    """Offload to the host's memory: by a schedule, or by the layout's switches, of each kind no more than is needed."""
    if (scheduled := _scheduled(a)) is not None:
        yield scheduled
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
    """Return what a node's host must hold: what the devices need besides without offloading; None if it has not as much."""
    on_device = fit.layout.replace(offload="none", offload_activations=0.0, offload_fraction=1.0)
    peak_bytes = expand_layout(request, on_device).estimate.peak_allocated_bytes
    on_host = max(0, peak_bytes - fit.estimate.peak_allocated_bytes) * request.cluster.largest_node
    sizes_known = [group.host_memory_bytes for group in request.cluster.groups if group.host_memory_bytes]
    return None if sizes_known and on_host > min(sizes_known) else on_host


def _precisions(a: _Advisor) -> Iterator[VerifiedChange]:
    workload = a.request.workload
    peaks = a.request.cluster.weakest_device.peak_flops_per_s
    has_bf16 = peaks.bf16 is not None
    changes: list[tuple[str, dict[str, str]]] = []
    if not workload.engine_facts.is_own_runtime and not workload.is_full_precision:
        text = "accumulate gradients in the dtype of the products (--fix gradients=compute)"
        changed = replace(a.request, fixed={**a.request.fixed, "gradients": "compute"})
        if changed != a.request:
            yield from a.change("precision", text, changed)
    if peaks.tf32 is not None and workload.precision == "fp32":
        changes.append(("multiply fp32 on the matrix units (--precision tf32)", {"precision": "tf32"}))
    if has_bf16 and workload.is_full_precision:
        changes.append(("train in mixed precision (--precision bf16-mixed)", {"precision": "bf16-mixed"}))
    if has_bf16 and workload.precision != "bf16":
        changes.append(("keep parameters, gradients and states in bf16 (--precision bf16)", {"precision": "bf16"}))
    for text, change in changes:
        yield from a.change("precision", text, _with_workload(a.request, **change))


def _sequences(a: _Advisor) -> Iterator[VerifiedChange]:
    """Use shorter sequences; memory only falls with their length, so the shortest tells whether to go on."""
    if a.first_fit(_with_workload(a.request, seq_len=min(MIN_SEQ_LEN, a.request.workload.seq_len))) is not None:
        yield from _shrunk(a, "seq_len", MIN_SEQ_LEN, "shorten sequences to {} tokens (--seq-len {})")


def _batches(a: _Advisor) -> Iterator[VerifiedChange]:
    minimum = max(1, a.request.workload.global_batch_size // MIN_SHARE_OF_BATCH)
    yield from _shrunk(a, "global_batch_size", minimum, "use a global batch of {} (--global-batch-size {})")


def _shrunk(
    a: _Advisor, name: Literal["seq_len", "global_batch_size"], minimum: int, text: str
) -> Iterator[VerifiedChange]:
    """Halve it until something fits, then try one and a half times that."""

    def shrunk(value: int) -> PlanRequest:
        return _with_workload(a.request, **{name: value})

    full = getattr(a.request.workload, name)
    value = full // 2
    while value >= minimum and a.first_fit(shrunk(value)) is None:
        value //= 2
    if value < minimum:
        return
    larger = value * 3 // 2
    if larger < full and a.first_fit(shrunk(larger)) is not None:
        value = larger
    yield from a.change(name, text.format(value, value), shrunk(value))


def _with_workload(request: PlanRequest, **changes: Any) -> PlanRequest:
    """Return the request for another workload, in the space that our runtime executes where it did and still trains it."""
    workload = request.workload.replace(**changes)
    runnable = request.runnable and is_trained_by_apply(request.model, workload)
    return replace(request, task=workload, runnable=runnable)
