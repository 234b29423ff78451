"""Why nothing fits: what binds, the best there is, what was fixed, and the smallest changes after which something does.

| change | tried |
|---|---|
| what was fixed | without each of the fields, then without any |
| space, engine | all of the engine instead of what `apply` executes; megatron and deepspeed |
| offload | for fsdp2 a schedule (docs/offload.md); else of the optimizer states, with the parameters, with the activations |
| devices | the least number found by bisection over numbers that the batch divides over (`larger_sizes`) |
| precision | bf16-mixed instead of fp32; parameters, gradients and states in bf16; gradients in the dtype of the products |
| seq_len, global_batch_size | halved until something fits, then one and a half times that |

Every change is verified by finding a layout that fits with it. Smallest first: what leaves model, machine and numerics as they are,
then more devices, then other numerics, then another workload; what `apply` does not execute comes after what it does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from ...cost_models.coefficients import packaged_coefficients
from ...schema import ConfigError, InfeasibleError, MeshwrightError, SolverLimitError, Workload
from ...schema.engine_facts import OWN_ENGINE, PLANNED_ENGINES
from ...schema.layout import format_assignments
from ...schema.runnable import why_not_runnable
from ...schema.units import GIB, format_bytes, format_seconds
from ...solvers.branch_and_bound import Answer
from ...solvers.generation import GenerationInstance, min_bytes, solve
from ..expand import expand_layout
from ..request import Deadline, OffloadRequest, PlanRequest
from ..search import SearchResult
from ..tasks.generation import BatchShape, GenerationProblem, SolvedBatch
from ..tasks.offload import schedule_layout, search_offload
from .cluster_changes import grow_cluster, larger_sizes
from .feasibility import Fit, closest_to_fitting, find_fit, shortfall

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


def explain_infeasible(request: PlanRequest, result: SearchResult) -> MeshwrightError:
    """Return the error for a search without any layout that fits."""
    model, cluster = request.model, request.cluster
    if result.stopped_early:
        num_layouts = result.problem.num_layouts
        done = f"{result.evaluated} of {num_layouts} layouts evaluated; none is faster than {result.bound_s:.4g} s"
        return request.deadline.error(f"for {model.name}", done)
    best = closest_to_fitting(result)
    details = [*shortfall(best.layout(result.costs.layouts), best.estimate, request.workload, cluster)]
    if request.fixed:
        details.append(f"fixed: {format_assignments(request.fixed)}")
    advice = advise(request, num_layouts=result.problem.num_layouts)
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
    """Verified changes, the smallest first; ``complete`` unless the time ran out before all were tried."""

    changes: tuple[VerifiedChange, ...]
    complete: bool


class _Advisor:
    """Looks for changes of one request until its deadline."""

    def __init__(self, request: PlanRequest, *, num_layouts: int) -> None:
        self.request, self.is_large = request, num_layouts > LARGE_SPACE

    def fit(self, request: PlanRequest) -> Fit | None:
        """Return a layout that fits, of all where there are not too many, else of the lean ones."""
        fit = None if self.is_large else find_fit(request)
        return fit or find_fit(request, among="lean")

    def first_fit(self, request: PlanRequest) -> Fit | None:
        """Return a layout that fits as soon as there is one: lean ones tell quickly."""
        fit = find_fit(request, among="lean", which="first")
        return fit if fit or self.is_large else find_fit(request, which="first")

    def change(self, kind: Kind, text: str, request: PlanRequest, fit: Fit | None = None) -> Iterator[VerifiedChange]:
        """Yield the change, if something fits with it."""
        fit = fit or self.fit(request)
        if fit is not None:
            # Other engines are not run by `apply` anyway.
            is_ours = request.workload.engine_facts.is_own_runtime
            executed = request.runnable or (not self.request.workload.engine_facts.is_own_runtime and kind != "offload")
            executed &= not (is_ours and why_not_runnable(request.model, request.workload))
            yield VerifiedChange(kind, text, request, fit, executed)


def advise(request: PlanRequest, *, num_layouts: int) -> Advice:
    """Return what to change so that something fits; order and content depend on time only where it runs out.

    Args:
        request: of which nothing fits; the advice takes at most ADVICE_S of what remains of its time.
        num_layouts: of the request's space.
    """
    limit = Deadline(min(ADVICE_S, request.deadline.remaining_s), within=request.deadline)
    advisor = _Advisor(replace(request, deadline=limit), num_layouts=num_layouts)
    changes: list[VerifiedChange] = []
    complete = True
    for propose in (_released, _devices, _spaces, _offloads, _precisions, _sequences, _batches):
        try:
            changes += propose(advisor)
        except SolverLimitError:
            complete = False
    order = sorted(changes, key=lambda c: (not c.executed, _CLASS[c.kind], c.fit.estimate.step_time_s))
    return Advice(tuple(order), complete)


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
    """Take the least number of devices found."""
    counts = larger_sizes(a.request.cluster, a.request.workload)
    tried: dict[int, Fit | None] = {}

    def fit_on(idx: int) -> Fit | None:
        if idx not in tried:
            cluster = grow_cluster(a.request.cluster, counts[idx])
            tried[idx] = None if cluster is None else a.first_fit(replace(a.request, cluster=cluster))
        return tried[idx]

    idx = _first_that_holds(len(counts), lambda k: counts[k], lambda k: fit_on(k) is not None)
    if idx is None:
        return
    cluster = grow_cluster(a.request.cluster, counts[idx])
    if cluster is not None:
        larger = replace(a.request, cluster=cluster)
        yield from a.change("devices", f"use {counts[idx]} devices", larger, a.fit(larger) or tried[idx])


def _first_that_holds(size: int, count_of: Callable[[int], int], holds: Callable[[int], bool]) -> int | None:
    """Return the first index that holds, as far as growing by factors of two, bisection and NEARBY more tries find it."""
    below, idx = -1, 0
    while idx < size and not holds(idx):
        below = idx
        idx = next((k for k in range(idx + 1, size) if count_of(k) >= 2 * count_of(below)), size)
    if idx == size:
        if below == size - 1 or not holds(size - 1):
            return None
        idx = size - 1
    while idx - below > 1:
        middle = (below + idx) // 2
        below, idx = (below, middle) if holds(middle) else (middle, idx)
    nearby = (k for k in range(max(0, idx - NEARBY), idx) if holds(k))
    return next(nearby, idx)


def _spaces(a: _Advisor) -> Iterator[VerifiedChange]:
    """Search all that the engine executes; other engines."""
    request = a.request
    if request.runnable:
        yield from a.change("space", "search all of the engine (--space full)", replace(request, runnable=False))
    for engine in PLANNED_ENGINES:
        if engine not in (OWN_ENGINE, request.workload.engine):
            other = replace(request, task=request.workload.replace(engine=engine), runnable=False)
            yield from a.change("engine", f"run it by {engine} (--engine {engine})", other)


def _scheduled(a: _Advisor) -> Iterator[VerifiedChange]:
    """Offload by a schedule that `plan --offload auto` finds: a first one, which that may only improve on."""
    request = a.request
    names = ("offload", "offload_activations", "offload_fraction", "offload_to")
    if not request.workload.engine_facts.is_own_runtime or request.cluster.is_mixed or request.fixed.get("pp", 1) != 1:
        return
    if any(name in request.fixed for name in names):
        return
    fixed = request.fixed if not a.is_large else {"micro_batch_size": 1, **request.fixed}
    anything = replace(request, fixed=fixed, offload=OffloadRequest())
    try:
        first = search_offload(anything, effort="first")
    except (ConfigError, InfeasibleError):
        return
    if first is not None:
        best = schedule_layout(anything, first.layout)
        text = f"offload (--offload auto) to {format_bytes(best.schedule.host_bytes)} of host memory a node"
        executed = request.runnable and not why_not_runnable(request.model, request.workload)
        yield VerifiedChange("offload", text, request, Fit(best.layout, best.estimate), executed)


def _offloads(a: _Advisor) -> Iterator[VerifiedChange]:
    """Offload to the host's memory: by a schedule, or by the layout's switches, of each kind no more than is needed."""
    scheduled = list(_scheduled(a))
    if scheduled:
        yield from scheduled
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
    """Use fewer bytes for parameters, gradients and optimizer states."""
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
        yield from a.change("precision", text, _with_workload(a.request, workload.replace(**change)))


def _sequences(a: _Advisor) -> Iterator[VerifiedChange]:
    """Use shorter sequences; memory only falls with their length, so the shortest tells whether to go on."""
    shortest = a.request.workload.replace(seq_len=min(MIN_SEQ_LEN, a.request.workload.seq_len))
    if a.first_fit(_with_workload(a.request, shortest)) is not None:
        yield from _shrunk(a, "seq_len", minimum=MIN_SEQ_LEN, text="shorten sequences to {} tokens (--seq-len {})")


def _batches(a: _Advisor) -> Iterator[VerifiedChange]:
    """Use a smaller batch: fewer sequences in flight."""
    minimum = max(1, a.request.workload.global_batch_size // MIN_SHARE_OF_BATCH)
    yield from _shrunk(
        a, "global_batch_size", minimum=minimum, text="use a global batch of {} (--global-batch-size {})"
    )


def _shrunk(
    a: _Advisor, name: Literal["seq_len", "global_batch_size"], *, minimum: int, text: str
) -> Iterator[VerifiedChange]:
    """Halve it until something fits, then try one and a half times that."""

    def shrunk(value: int) -> PlanRequest:
        return _with_workload(a.request, a.request.workload.replace(**{name: value}))

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


def _with_workload(request: PlanRequest, workload: Workload) -> PlanRequest:
    """Return the request for another workload, in the space that our runtime executes where it did and still trains it."""
    runnable = request.runnable and not why_not_runnable(request.model, workload)
    return replace(request, task=workload, runnable=runnable)


def explain_no_batch(problem: GenerationProblem, answer: Answer[SolvedBatch], deadline: Deadline) -> MeshwrightError:
    """Return the error for a search that solved no batch of sequences: the time, the latency, or memory."""
    model, instance = problem.model, problem.quickest[1]
    if answer.ended == "deadline":
        return deadline.error(f"for {model.name}", f"{problem.num_bounded} batches bounded")
    if instance is None:
        return _no_batch_fits(problem)
    fastest_s = solve(instance).objective
    return InfeasibleError(
        f"no batch of {model.name} is done within {format_seconds(problem.limit_s)}: the fastest takes "
        f"{format_seconds(fastest_s)}   [(O)]",
        help=f"use --latency-limit-s {math.ceil(100 * fastest_s) / 100:g} or more, or generate fewer tokens",
    )


def _no_batch_fits(problem: GenerationProblem) -> InfeasibleError:
    """Return the error that says which memory lacks how much for the shape that needs least, were the others without limit."""
    ranks, name = problem.cluster.largest_node, problem.model.name
    needs = [(_device_need(problem.instance(shape)), shape) for shape in _smallest(problem)]
    device, shape = min(needs, key=lambda pair: pair[0])
    instance = problem.instance(shape)
    batch = f"{shape.num_batches} x {shape.batch_size} sequences"
    if device > instance.capacity.device:
        c = instance.capacity
        return InfeasibleError(
            f"{name} does not fit with a batch of {batch}: each device needs {format_bytes(device)} with everything that may be "
            f"elsewhere on the host, the budget is {format_bytes(c.device)}   [device memory (C7)]",
            details=(
                f"while computing {format_bytes(c.working)}, weights on the way {format_bytes(c.buffer)}, "
                f"keys and values on the way {format_bytes(2 * c.slot)}",
            ),
            help="use a smaller --batch-size or --prompt-len, or devices with more memory",
        )
    host = min_bytes(instance, "host_bytes") * ranks
    gib = math.ceil(host / GIB)
    message = (
        f"{name} does not fit with a batch of {batch}: each node needs {format_bytes(host)} of host memory, "
        f"{format_bytes(instance.capacity.host * ranks)} may be used   [host memory (C8)]"
    )
    stored, also = _storage_need(instance) * ranks, ""
    if np.isfinite(stored):
        also = f", or storage for {format_bytes(stored)}: --nvme PATH --nvme-gib {math.ceil(stored / GIB)}"
    return InfeasibleError(message, help=f"use --host-memory-gib {gib}{also}")


def _smallest(problem: GenerationProblem) -> list[BatchShape]:
    """Return shapes of which one needs least: few sequences at once, everything that may be elsewhere."""
    num_sequences = min(shape.num_batches * shape.batch_size for shape in problem.shapes)
    return [
        shape
        for shape in problem.shapes
        if shape.streams
        and shape.num_batches * shape.batch_size == num_sequences
        and shape.batch_size == problem.batches[0]
    ]


def _device_need(instance: GenerationInstance) -> float:
    return min_bytes(instance.with_capacity(host=np.inf), "device_bytes")


def _storage_need(instance: GenerationInstance) -> float:
    """Return the bytes of storage that the given host memory would need as well."""
    rate = float(packaged_coefficients()["offload"]["storage_bytes_per_s"])
    anything = np.ones_like(instance.may_store)
    anything[0] = instance.may_store[0]
    stored = replace(instance, may_store=anything, rates=replace(instance.rates, storage=rate))
    staging = 0.0 if instance.capacity.staging else instance.capacity.buffer + 2 * instance.capacity.slot
    changed = stored.with_capacity(storage=np.inf, staging=instance.capacity.staging + staging)
    return min_bytes(changed, "storage_bytes")
