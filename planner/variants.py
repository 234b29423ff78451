"""A training request answered with fewer of its devices, or with another batch, where that takes less time for a sequence.

Sets
    v            variants of a request: fewer whole nodes (of one node: fewer devices), or a batch within the tolerance
Data
    B[v], N[v]   sequences of a step, devices
    MIN_S      device-seconds of a sequence in the best micro-batch that one device could hold, without communication
Objective
    (O)  min  T[v] / B[v]                        seconds of the plan's step for a sequence
Constraints
    (C1) nodes: N[v] <= N, in entire nodes where there are several
    (C2) tolerance: |B[v] - B| <= tolerance B

No variant is better than perfect scaling, T[v] / B[v] >= MIN_S / N[v].

The request as asked is planned first. Tried besides: as many devices as give the rank with most no more micro-batches than it
has; counts that divide better, `SMOOTH` times a power of two (of one node and where shares may be uneven: one device less, and
those of `MODEL_RANKS`); and batches that are multiples of the ranks that could share them. What perfect scaling excludes is not
planned. Where the batch divides over the plan's ranks, and the devices divide well, there is no variant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from ..cost_models.stage.table import CostTable
from ..schema import ClusterSpec, ConfigError, InfeasibleError, SolverLimitError, TrainingPlan
from ..schema.layout_table import LayoutTable
from ..schema.offers import with_devices_per_node, with_nodes
from ..schema.training_plan import Requested
from ..schema.units import counted, format_percent, format_seconds
from .enumeration import MAX_MICRO_BATCH_SIZE
from .request import PlanRequest

SMOOTH = (1, 3, 5, 7, 9)
"""Odd factors of device counts that leave degrees to choose."""

MAX_SMOOTH, MAX_BATCHES = 3, 6
"""Variants of each kind that are tried."""

MODEL_RANKS = (1, 2, 4, 8)
"""Devices that share a sequence, for which the fewest are tried that give no rank more sequences than all devices would."""

Answer = TrainingPlan | ConfigError | InfeasibleError


@dataclass(frozen=True)
class Variant:
    """A request that may take less time for a sequence than the one that was asked."""

    request: PlanRequest

    @property
    def num_devices(self) -> int:
        """Devices that it uses."""
        return self.request.cluster.num_devices


def best_variant(
    request: PlanRequest, answer: Answer, plan_faster: Callable[[PlanRequest, float], TrainingPlan | None]
) -> TrainingPlan:
    """Return the plan of the variant with the least seconds for a sequence (O), or the answer to what was asked.

    ``plan_faster`` plans a variant; None where no step is shorter than so many seconds.

    Raises:
        ConfigError, InfeasibleError: the answer is one of these, and no variant has a plan.
    """
    exact = answer if isinstance(answer, TrainingPlan) else None
    best, min_s = exact, min_device_s(request)
    for variant in _variants(request, exact):
        if request.deadline.is_over:
            break
        if best is not None and min_s / variant.num_devices >= _per_sequence_s(best):
            continue
        batch = variant.request.workload.global_batch_size
        try:
            other = plan_faster(variant.request, math.inf if best is None else _per_sequence_s(best) * batch)
        except (ConfigError, InfeasibleError, SolverLimitError):
            continue
        if other is not None and (best is None or _per_sequence_s(other) < _per_sequence_s(best)):
            best = other
    if best is None:
        assert not isinstance(answer, TrainingPlan)
        raise answer
    return best if best is exact else _marked(best, request, exact)


def _per_sequence_s(plan: TrainingPlan) -> float:
    return plan.estimate.step_time_s / plan.workload.global_batch_size


def min_device_s(request: PlanRequest) -> float:
    """Return MIN_S: the passes of whole layers, for micro-batches of 1, 2, 4, .. sequences."""
    return _min_sequence_s(_one_device(request))


def min_device_s_of_pools(request: PlanRequest) -> list[float]:
    """Return MIN_S of each device pool of a mixed cluster."""
    return [_min_sequence_s(pool) for pool in _one_device(request).device_pools]


def perfect_scaling_s(request: PlanRequest) -> float:
    """Return seconds that no step is below: every device as fast as in its best micro-batch."""
    cluster = request.cluster
    of_pools = min_device_s_of_pools(request) if cluster.parts else [min_device_s(request)]
    sizes = [part.cluster.num_devices for part in cluster.parts] or [cluster.num_devices]
    rate = sum(size / seconds for size, seconds in zip(sizes, of_pools, strict=True))
    return request.workload.global_batch_size / rate


def _one_device(request: PlanRequest) -> CostTable:
    sizes = 2 ** np.arange(MAX_MICRO_BATCH_SIZE.bit_length())
    table = LayoutTable.filled(len(sizes), micro_batch_size=sizes)
    return CostTable.from_layouts(request.model, request.workload, request.cluster, table)


def _min_sequence_s(costs: CostTable) -> float:
    return float(np.min(costs.total("busy_s") / costs.layouts.micro_batch_size))


def _variants(request: PlanRequest, exact: TrainingPlan | None) -> Iterator[Variant]:
    """Yield variants, those with most devices first, then those of other batches."""
    cluster = request.cluster
    if len(cluster.groups) == 1:
        for count in _fewer(request, exact):
            yield Variant(replace(request, cluster=resized(cluster, count)))
    for batch in _rounded_batches(request):
        yield Variant(replace(request, task=request.workload.replace(global_batch_size=batch)))


def _units(cluster: ClusterSpec) -> int:
    return cluster.num_nodes if cluster.num_nodes > 1 else cluster.num_devices


def resized(cluster: ClusterSpec, count: int) -> ClusterSpec:
    """Return the first ``count`` nodes of a cluster of one group, or of its only node the first devices."""
    return with_nodes(cluster, count) if cluster.num_nodes > 1 else with_devices_per_node(cluster, count)


def _fewer(request: PlanRequest, exact: TrainingPlan | None) -> list[int]:
    """Return how many nodes, or devices of the only one (C1), are worth trying, decreasing."""
    cluster, batch = request.cluster, request.workload.global_batch_size
    units = _units(cluster)
    of_batch = _odd_part(batch)
    odd_parts = {odd * shared for odd in SMOOTH for shared in (1, of_batch)}
    smooth = {odd << k for odd in odd_parts for k in range(units.bit_length()) if odd << k < units}
    counts = set(sorted(smooth)[-MAX_SMOOTH:])
    if request.workload.engine_facts.takes_uneven_shares and cluster.num_nodes == 1:
        counts = {units - 1, *(_filled(batch, units, taken) for taken in MODEL_RANKS if taken <= units)}
    if exact is not None:
        counts.add(min(_as_few_passes(exact) * units // cluster.num_devices, units))
    return sorted(counts - {0, units}, reverse=True)


def _filled(batch: int, num_devices: int, taken: int) -> int:
    """Return the least devices on which ranks of ``taken`` devices each have no more sequences than on all of them."""
    share = -(-batch // (num_devices // taken))
    return taken * -(-batch // share)


def _as_few_passes(plan: TrainingPlan) -> int:
    """Return the least devices, in whole nodes, on which the rank with most takes as many micro-batches as in a plan."""
    layout, per_node = plan.layout, plan.cluster.groups[0].devices_per_node if plan.cluster.num_nodes > 1 else 1
    dp = -(-plan.workload.global_batch_size // (layout.micro_batch_size * plan.num_microbatches))
    return -(-dp * (layout.world_size // layout.dp) // per_node) * per_node


def _rounded_batches(request: PlanRequest) -> list[int]:
    """Return the batches within the tolerance (C2) that the most ranks share evenly, those of most ranks first."""
    exact, devices = request.workload.global_batch_size, request.cluster.num_devices
    room = math.floor(exact * request.batch_tolerance * (1 + 1e-12))
    batches: dict[int, None] = {}
    if not room:
        return []
    for taken in (2**k for k in range(devices.bit_length())):
        ranks = devices // taken
        for batch in (exact // ranks * ranks, -(-exact // ranks) * ranks) if ranks and devices % taken == 0 else ():
            if batch and batch != exact and abs(batch - exact) <= room:
                batches[batch] = None
    return list(batches)[:MAX_BATCHES]


def _odd_part(number: int) -> int:
    return number // (number & -number)


def _marked(plan: TrainingPlan, request: PlanRequest, exact: TrainingPlan | None) -> TrainingPlan:
    """Return a plan that says what was asked, and why it is for something else."""
    cluster, batch = request.cluster, request.workload.global_batch_size
    notes = []
    gain = "what was asked has no plan"
    if exact is not None:
        part = format_percent(1 - _per_sequence_s(plan) / _per_sequence_s(exact))
        gain = f"a sequence takes {part} less time than as asked ({format_seconds(exact.estimate.step_time_s)} a step)"
        if part == format_percent(0):
            gain = f"the step is no shorter as asked ({format_seconds(exact.estimate.step_time_s)})"
    idle = cluster.num_devices - plan.cluster.num_devices if len(cluster.groups) == 1 else 0
    if idle:
        notes.append(f"{counted(idle, 'device')} of {cluster.num_devices} stay idle: {gain}")
    if (rounded := plan.workload.global_batch_size) != batch:
        notes.append(
            f"a batch of {rounded} sequences in place of {batch} ({format_percent(rounded / batch - 1)}; --batch-tolerance): {gain}"
        )
    return plan.replace(
        requested=Requested(
            cluster=cluster.name, num_devices=cluster.num_devices, num_nodes=cluster.num_nodes, global_batch_size=batch,
            step_time_s=None if exact is None else exact.estimate.step_time_s,
        ),
        notes=(*notes, *plan.notes),
    )  # fmt: skip
