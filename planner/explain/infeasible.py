"""Why nothing fits: which stage lacks what, what was fixed, and the smallest changes after which something does (advice.py).

Of generation the batch that needs least is said, with the memory that is too small for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ...cost_models.coefficients import Scenario, packaged_coefficients
from ...cost_models.stage import memory
from ...schema import ClusterSpec, InfeasibleError, Layout, MeshwrightError, TrainingEstimate, Workload
from ...schema.device_groups import part_label
from ...schema.layout import format_assignments
from ...schema.units import GIB, format_bytes, format_seconds
from ...solvers.branch_and_bound import Answer
from ...solvers.generation.instance import GenerationInstance
from ...solvers.generation.program import min_bytes, solve
from ..expand import Candidate, expand_row
from ..request import Deadline, PlanRequest
from ..search import SearchResult
from ..tasks.generation import GenerationProblem, SolvedBatch
from .advice import advise

CLOSEST_TRIES = 20
"""Layouts with the least bounds on memory that are cut into stages."""


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
        details.append("time or tries ran out before every change was tried")
    none = (
        "nothing that was tried fits: other choices, more devices, offloading, fewer bytes a state, a smaller workload"
    )
    devices = " and ".join(f"{group.num_devices} x {group.device.name}" for group in cluster.groups)
    return InfeasibleError(
        f"no plan fits {model.name} on {devices}",
        details=tuple(details),
        help=str(advice.changes[0]) if advice.changes else none,
    )


def closest_to_fitting(result: SearchResult) -> Candidate:
    """Return the layout of a search without an answer that lacks the least, its stages as even as can be."""
    rows = np.argsort(result.problem.frontier.bound_bytes, kind="stable")[:CLOSEST_TRIES]
    candidates = (expand_row(result.costs, int(row)) for row in rows)
    return min(
        candidates, key=lambda c: (c.estimate.required_bytes - c.estimate.budget_bytes, c.estimate.step_time_s, c.idx)
    )


class StageDemand(NamedTuple):
    """What must be within the budget on one stage, and the budget and the memory of its devices."""

    required_bytes: int
    budget_bytes: int
    total_bytes: int

    @property
    def free_bytes(self) -> int:
        """What remains; below zero where it does not fit."""
        return self.budget_bytes - self.required_bytes


def stage_demands(estimate: TrainingEstimate, workload: Workload, cluster: ClusterSpec) -> list[StageDemand]:
    """Return required and allowed bytes of each stage, on the device pool of a mixed cluster that it lies on."""
    pools = {part_label(cluster.parts, g): part.cluster for g, part in enumerate(cluster.parts)}
    demands = []
    for stage in estimate.stages:
        pool, terms = pools.get(stage.device, cluster), stage.memory_bytes
        required = int(memory.required_bytes(terms.total, terms.parameters, Scenario.build(workload, pool)))
        demands.append(StageDemand(required, pool.memory_budget_bytes, pool.weakest_device.memory_bytes))
    return demands


def tightest_stage(demands: Sequence[StageDemand]) -> int:
    """Return the index of the stage with the least memory to spare."""
    return min(range(len(demands)), key=lambda s: (demands[s].free_bytes, s))


def shortfall(layout: Layout, estimate: TrainingEstimate, workload: Workload, cluster: ClusterSpec) -> tuple[str, str]:
    """Say which stage needs how much more than it may have, and what its memory is made of."""
    demands = stage_demands(estimate, workload, cluster)
    fullest = tightest_stage(demands)
    required, budget, total = demands[fullest]
    where = f"stage {fullest} of {len(demands)} needs" if len(demands) > 1 else "needs"
    terms = sorted(estimate.stages[fullest].memory_bytes.model_dump().items(), key=lambda item: -item[1])
    return (
        f"{where} up to {format_bytes(required)} per device at best ({layout}); budget {format_bytes(budget)} = "
        f"{format_bytes(total)} total - {format_bytes(cluster.reserved_bytes)} reserved: "
        f"{format_bytes(required - budget)} too much   [memory (C2)]",
        "largest: " + ", ".join(f"{name} {format_bytes(size)}" for name, size in terms[:3]),
    )


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
    """Return the error that says which memory lacks how much for the shape that needs least, were the others without limit.

    That is one with few sequences at once and everything that may be elsewhere.
    """
    ranks, name = problem.cluster.largest_node, problem.model.name
    num_sequences = min(shape.num_batches * shape.batch_size for shape in problem.shapes)
    smallest = [
        shape
        for shape in problem.shapes
        if shape.streams
        and shape.num_batches * shape.batch_size == num_sequences
        and shape.batch_size == problem.batches[0]
    ]
    unlimited = [_with_room_elsewhere(problem.instance(shape)) for shape in smallest]
    device, idx = min((min_bytes(instance, "device_bytes"), idx) for idx, instance in enumerate(unlimited))
    shape, instance = smallest[idx], problem.instance(smallest[idx])
    batch = f"{shape.num_batches} x {shape.batch_size} sequences"
    if device > instance.capacity.device:
        c, place = instance.capacity, "the host" if problem.has_host else "storage"
        more = "" if problem.has_host else ", more of them together (--tp, --across-nodes)"
        return InfeasibleError(
            f"{name} does not fit with a batch of {batch}: each device needs {format_bytes(device)} with everything that may be "
            f"elsewhere on {place}, the budget is {format_bytes(c.device)}   [device memory (C7)]",
            details=(
                f"while computing {format_bytes(c.working)}, weights on the way {format_bytes(c.buffer)}, "
                f"keys and values on the way {format_bytes(2 * c.slot)}",
            ),
            help=f"use a smaller --batch-size or --prompt-len{more}, or devices with more memory",
        )
    if not problem.has_host:
        stored = _storage_need(instance) * ranks
        return InfeasibleError(
            f"{name} does not fit with a batch of {batch}: each node needs {format_bytes(stored)} of storage, "
            f"{format_bytes(instance.capacity.storage * ranks)} may be used   [storage (C9)]",
            help=f"use --nvme PATH --nvme-gib {math.ceil(stored / GIB)}",
        )
    host, also = min_bytes(instance, "host_bytes") * ranks, ""
    message = (
        f"{name} does not fit with a batch of {batch}: each node needs {format_bytes(host)} of host memory, "
        f"{format_bytes(instance.capacity.host * ranks)} may be used   [host memory (C8)]"
    )
    stored = _storage_need(instance) * ranks
    if np.isfinite(stored):
        also = f", or storage for {format_bytes(stored)}: --nvme PATH --nvme-gib {math.ceil(stored / GIB)}"
    return InfeasibleError(message, help=f"use --host-memory-gib {math.ceil(host / GIB)}{also}")


def _with_room_elsewhere(instance: GenerationInstance) -> GenerationInstance:
    """Return the problem with all the room that what leaves a device may need: on the host, or without one on storage."""
    return instance.with_capacity(host=np.inf) if instance.has_host else _with_storage(instance)


def _storage_need(instance: GenerationInstance) -> float:
    """Return the bytes of storage that the given host memory would need as well."""
    return min_bytes(_with_storage(instance), "storage_bytes")


def _with_storage(instance: GenerationInstance) -> GenerationInstance:
    """Return the problem with storage without limit, where it has none at a usual rate."""
    rate = float(packaged_coefficients()["offload"]["storage_bytes_per_s"])
    anything = np.ones_like(instance.may_store)
    anything[0] = instance.may_store[0]
    stored = replace(instance, may_store=anything, rates=replace(instance.rates, storage=rate))
    if not instance.has_host:
        return stored.with_capacity(storage=np.inf)
    staging = 0.0 if instance.capacity.staging else instance.capacity.buffer + 2 * instance.capacity.slot
    return stored.with_capacity(storage=np.inf, staging=instance.capacity.staging + staging)
