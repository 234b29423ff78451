"""An entire training step: layers add up to stages, stages to a step, with the interval that its time may be off by.

Stages lie on device pools, groups of devices that are alike; a cluster has one pool unless its nodes differ. On a mixed cluster a
layout is aligned with the pools when the ranks of a stage fill every pool without rest. Pool g then runs
k_g = devices / stage_ranks stages, one after the other, with the costs of its own device and links; what joins stages are the links
of the entire cluster. Layouts that are not aligned are costed as if every rank were the weakest: one pool.

    T = replay of the stages' passes + max_s exposed_s + edges + max_s update_s       (pipeline/replay.py)

with the passes, exposed_s and update_s of stage s on its pool, and the edges of the pool that has the most.

Each device draws a part of its power limit that depends on what it does (coefficients.toml, [power]):

    E = sum over devices of LIMIT * (COMPUTE t_compute + MEMORY t_memory_bound + COMMUNICATION t_communication + WAITING t_waiting)

of the devices alone: hosts, switches, fans and losses of the supply come on top (about half as much again in a node of eight H100,
of which 8.4 kW were measured where the boards' limits are 5.6 kW, arXiv:2412.08602).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ...schema import ClusterSpec, ModelSpec, TrainingEstimate, Workload
from ...schema.device_groups import part_label
from ...schema.errors import ConfigError
from ...schema.layout_table import MIXED
from ...schema.training_plan import MemoryBreakdown, StageEstimate, TimeBreakdown
from ...schema.units import FloatArray, IntArray
from ..coefficients import Scenario, packaged_coefficients
from ..hardware.collectives import collective_s
from ..hardware.machine import board_w, host_costs, peak_flops_per_s
from ..layer.operators import FusedAttention, Gemm, Layer, OperatorRules, Scan, layer_operators
from ..pipeline.replay import PipelineShape, makespan_s, pipelined_s
from . import memory
from .contents import contents_between, contents_of_ranks, pipeline_shape, rank_memory_terms, stage_memory_terms
from .interval import Basis, peak_interval, time_interval
from .passing import MemoryTerms, StageContents
from .table import CostTable


class StagePasses(NamedTuple):
    """Seconds of one micro-batch in each stage [S], communication within layers included.

    Attributes:
        forward, backward: of the passes; ``weight`` of the backward one, gradients of weights.
        exposed: what data parallelism adds to a stage's step; ``copied`` of it, copies and sums of parameters and gradients.
        time_terms: forward and backward by the names of TimeBreakdown.
    """

    forward: FloatArray
    backward: FloatArray
    weight: FloatArray
    exposed: FloatArray
    copied: FloatArray
    time_terms: dict[str, FloatArray]


def estimate_step(
    costs: CostTable, idx: int, boundaries: Sequence[int], pool_of_stage: IntArray | None = None
) -> TrainingEstimate:
    """Return the estimate of layout ``idx`` whose stage s holds layers ``boundaries[s] .. boundaries[s+1] - 1``.

    With model chunks there are pp stages for each, or pp that stand for all the layers of a rank, its chunks equal to each other.

    Args:
        costs: table of layouts.
        idx: one of them.
        boundaries: first layer of each stage [S + 1].
        pool_of_stage: device pool of each stage [S] of an aligned layout; None: all as the weakest.
    """
    assert costs.layouts.recompute[idx] != MIXED or costs.option_of_layer is not None, "each layer needs an option"
    first, last = np.array(boundaries[:-1]), np.array(boundaries[1:])
    shape = pipeline_shape(costs, idx)
    ranks = ranks_of_stages(shape, len(first))
    num_ranks, in_chunks = int(ranks.max()) + 1, len(first) > int(ranks.max()) + 1
    passes = pass_seconds(costs, idx, boundaries, pool_of_stage)
    if pool_of_stage is None:
        contents = contents_between(costs, idx, first, last)
        if in_chunks:
            contents, terms = rank_memory_terms(costs, idx, contents)
        else:
            terms = stage_memory_terms(costs, idx, contents, ranks)
        of_ranks = _split(terms, num_ranks)
        transfer_s = np.full(num_ranks, 2 * costs.transfer_s[idx])
        update_s = float(np.max(costs.per_step.update_s(contents.trained, contents.expert_params, idx)))
        scenarios = [costs.scenario] * num_ranks
        fullest = int(np.argmax([memory.total_bytes(terms) for terms in of_ranks]))
    else:
        pools = [costs.device_pools[g] for g in pool_of_stage]
        scenarios, of_ranks, update_s = [pool.scenario for pool in pools], [], 0.0
        transfer_s = transfer_of_stages(costs, idx, pool_of_stage)
        for s, pool in enumerate(pools):
            contents = contents_between(pool, idx, first[s : s + 1], last[s : s + 1])
            of_ranks += _split(stage_memory_terms(pool, idx, contents, np.array([s])), 1)
            update_s = max(
                update_s, float(np.max(pool.per_step.update_s(contents.trained, contents.expert_params, idx)))
            )
        required = [memory.required_by_terms(*pair) for pair in zip(of_ranks, scenarios, strict=True)]
        budgets = [scenario.cluster.memory_budget_bytes for scenario in scenarios]
        fullest = int(np.argmax([float(of_rank) / cap for of_rank, cap in zip(required, budgets, strict=True)]))
    once_s = (edges_s(costs, idx, pool_of_stage), update_s + host_costs(costs.scenario).step_s)
    breakdown_s = _time_breakdown(replace(shape, pp=num_ranks), passes, ranks, transfer_s, once_s)
    unhidden_s = float(costs.total("ep_hidden_s")[idx])
    filling_s = float(costs.per_step.filling_s[idx])
    breakdown_s = breakdown_s.replace(
        dp=max(breakdown_s.dp - unhidden_s - filling_s, 0.0),
        ep=breakdown_s.ep + unhidden_s,
        bubble=breakdown_s.bubble + filling_s,
    )
    breakdown_s = _with_vocabulary_s(costs, idx, breakdown_s)
    forward_s, backward_s = (np.bincount(ranks, seconds, num_ranks) for seconds in (passes.forward, passes.backward))
    if (share := costs.vocabulary) is not None:
        ahead_s = share.total("forward_s")[idx] + share.total("comm_forward_s")[idx]
        forward_s, backward_s = forward_s + ahead_s, backward_s + share.total("busy_s")[idx] - ahead_s
    stages = tuple(
        StageEstimate(
            forward_s=float(forward_s[s]),
            backward_s=float(backward_s[s]),
            memory_bytes=memory.breakdown(of_ranks[s]),
            device=""
            if pool_of_stage is None or not costs.cluster.parts
            else part_label(costs.cluster.parts, int(pool_of_stage[s])),
        )
        for s in range(num_ranks)
    )
    return estimate_from_terms(costs, idx, breakdown_s, stages, fullest, scenarios[fullest])


def ranks_of_stages(shape: PipelineShape, num_stages: int) -> IntArray:
    """Return the rank that runs each of the stages [S] of `estimate_step`, which with model chunks may stand for all of a rank."""
    in_chunks = num_stages == shape.num_stages > shape.pp
    return np.array(shape.rank_of_stage) if in_chunks else np.arange(num_stages)


def busiest_rank(passes: StagePasses, ranks: IntArray, transfer_s: FloatArray) -> int:
    """Return the rank whose passes and transfers of a micro-batch take longest; the terms of compute are its."""
    return int(np.argmax(np.bincount(ranks, passes.forward + passes.backward, len(transfer_s)) + transfer_s))


def _split(terms: MemoryTerms, num_ranks: int) -> list[MemoryTerms]:
    """Return the memory terms of each rank, given arrays over the ranks."""
    full = {name: np.broadcast_to(values, num_ranks) for name, values in terms.items()}
    return [{name: values[s] for name, values in full.items()} for s in range(num_ranks)]


def values_of_stages(
    costs: CostTable, pool_of_stage: IntArray, of_pool: Callable[[CostTable], FloatArray]
) -> FloatArray:
    """Return [S, ...]: what ``of_pool`` gives for the pool that each stage lies on."""
    values = [of_pool(pool) for pool in costs.device_pools]
    return np.array([values[g] for g in pool_of_stage])


def transfer_of_stages(costs: CostTable, idx: int, pool_of_stage: IntArray) -> FloatArray:
    """Return the seconds each stage [S] sends and receives for one micro-batch, both ways; deals out anew where tp differs."""
    sent_s = values_of_stages(costs, pool_of_stage, lambda pool: np.asarray(2 * pool.transfer_s[idx]))
    tp = np.array([int(costs.device_pools[g].layouts.tp[idx]) for g in pool_of_stage])
    if np.all(tp == tp[0]):
        return sent_s
    anew_s = resharding_s(costs, idx, tp)
    return sent_s + 2 * np.array([0.0, *(anew_s[s, s + 1] for s in range(len(tp) - 1))])


def resharding_s(costs: CostTable, idx: int, tp: IntArray) -> FloatArray:
    """Return the seconds [T, T] of an all-to-all of hidden states from a stage of each tp [T] to one of each; infinite where
    neither divides the other.
    """
    larger, smaller = np.maximum(tp[:, None], tp), np.minimum(tp[:, None], tp)
    group = np.where(larger == smaller, 1, larger)
    seconds = collective_s("all_to_all", float(costs.boundary_bytes[idx]), group, np.ones_like(group), costs.cluster)
    return np.asarray(np.where(larger % smaller, np.inf, seconds))


def edges_s(costs: CostTable, idx: int, pool_of_stage: IntArray | None) -> float:
    """Return first gather, last reduction, tied copies and tokens that nothing hides, on the pool where they take longest."""
    pools = (costs,) if pool_of_stage is None else costs.device_pools
    return max(float(pool.per_step.dp_edges_s[idx]) for pool in pools)


def pass_seconds(
    costs: CostTable, idx: int, boundaries: Sequence[int], pool_of_stage: IntArray | None = None
) -> StagePasses:
    """Return the passes of stages under layout ``idx``, as in `estimate_step`; a split vocabulary comes on top."""
    spans = list(pairwise(boundaries))
    pools = (costs,) if pool_of_stage is None else costs.device_pools
    pool_idx = [0] * len(spans) if pool_of_stage is None else list(pool_of_stage)

    def stage_sums(of_pool: Callable[[CostTable], FloatArray]) -> FloatArray:
        """Return the sums [S] of values of layers [L] over the layers of each stage, on its pool."""
        values = [of_pool(pool) for pool in pools]
        return np.array([values[g][i:j].sum() for g, (i, j) in zip(pool_idx, spans, strict=True)])

    def field_sums(name: str) -> FloatArray:
        return stage_sums(lambda pool: pool.per_layer(name, idx))

    forward, backward, recompute = field_sums("forward_s"), field_sums("backward_s"), field_sums("recompute_s")
    sent = {axis: (field_sums(f"{axis}_forward_s"), field_sums(f"{axis}_backward_s")) for axis in ("tp", "cp", "ep")}
    return StagePasses(
        forward + sum(ahead for ahead, _ in sent.values()),
        backward + recompute + sum(back for _, back in sent.values()),
        field_sums("weight_s"),
        stage_sums(lambda pool: pool.per_step.exposed_s(idx)),
        stage_sums(lambda pool: pool.per_step.copied_s(idx)),
        {"compute": forward + backward, "recompute": recompute}
        | {axis: ahead + back for axis, (ahead, back) in sent.items()},
    )


def outside_passes_s(costs: CostTable, idx: int, contents: StageContents, passes: StagePasses) -> float:
    """Return what `estimate_step` adds to the passes of layout ``idx``: what its ranks expose, edges, the update and the host's.

    Args:
        contents, passes: of the stages, one for each chunk of a rank.
    """
    shape = pipeline_shape(costs, idx)
    of_ranks = contents_of_ranks(costs, idx, contents)
    exposed_s = np.bincount(np.array(shape.rank_of_stage), passes.exposed, shape.pp)
    update_s = costs.per_step.update_s(of_ranks.trained, of_ranks.expert_params, idx)
    return (
        float(exposed_s.max() + costs.per_step.dp_edges_s[idx] + np.max(update_s)) + host_costs(costs.scenario).step_s
    )


def _time_breakdown(
    shape: PipelineShape, passes: StagePasses, ranks: IntArray, transfer_s: FloatArray, once_s: tuple[float, float]
) -> TimeBreakdown:
    """Return the time terms of a step.

    Args:
        shape: schedule and numbers.
        passes: of each stage.
        ranks: which rank has each of the passes.
        transfer_s: of each rank, both ways.
        once_s: edges of data parallelism, and the update.
    """
    m, pp = shape.num_microbatches, shape.pp

    def on_ranks(seconds: FloatArray) -> FloatArray:
        return np.asarray(np.bincount(ranks, seconds, pp), dtype=np.float64)

    busy = on_ranks(passes.forward + passes.backward) + transfer_s
    slowest = busiest_rank(passes, ranks, transfer_s)
    terms = {name: m * float(on_ranks(seconds)[slowest]) for name, seconds in passes.time_terms.items()}
    copied, exposed = copies_and_collectives(on_ranks(passes.copied), on_ranks(passes.exposed))
    step_s, busy_s = pipeline_s(shape, passes, transfer_s), m * float(busy[slowest])
    is_rounding = math.isclose(step_s, busy_s, rel_tol=1e-12)
    return TimeBreakdown(
        **{**terms, "compute": terms["compute"] + copied},
        dp=exposed + once_s[0],
        pp=m * float(transfer_s[slowest]),
        bubble=0.0 if is_rounding else max(0.0, step_s - busy_s),
        optimizer=once_s[1],
    )


def copies_and_collectives(copied: FloatArray, exposed: FloatArray) -> tuple[float, float]:
    """Return copies, which are part of compute, and collectives over data, of the rank that has most of both."""
    rank = int(np.argmax(exposed))
    return float(copied[rank]), float(exposed[rank] - copied[rank])


def pipeline_s(shape: PipelineShape, passes: StagePasses, transfer_s: FloatArray) -> float:
    """Return the seconds of all micro-batches through the pipeline: the schedule, replayed.

    Args:
        shape: schedule and numbers.
        passes: of every stage, or of all the stages of each rank, which then count as equal.
        transfer_s: of one micro-batch to and from the neighbours of each rank, over all its chunks; both ranks wait for it.

    Raises:
        ConfigError: the schedule is not defined for these numbers. Interleaved 1F1B has its closed form for any.
    """
    forward, backward, weight = passes.forward, passes.backward - passes.weight, passes.weight
    chunks, rank_of_stage = shape.num_model_chunks, np.array(shape.rank_of_stage)
    if chunks > 1 and len(forward) == shape.pp:
        forward, backward, weight = (seconds[rank_of_stage] / chunks for seconds in (forward, backward, weight))
    each_way = (transfer_s / 2 / chunks)[rank_of_stage]
    try:
        return makespan_s(shape, forward + each_way, backward + each_way, weight)
    except ConfigError:
        if not shape.record.runs_in_rounds or shape.record.splits_backward:
            raise
        busy = np.bincount(rank_of_stage, forward + backward + weight, shape.pp) + transfer_s
        return float(pipelined_s(busy, shape.num_microbatches, chunks))


def _with_vocabulary_s(costs: CostTable, idx: int, terms: TimeBreakdown) -> TimeBreakdown:
    """Return the breakdown with what a split vocabulary adds to every stage."""
    if costs.vocabulary is None:
        return terms
    m, share = int(costs.layouts.num_microbatches[idx]), costs.vocabulary.take(np.array([idx]))
    sent_s, step_s, dp_s = (float(seconds[idx]) for seconds in costs.per_step.vocabulary_seconds(costs.vocabulary))
    compute = m * float(share.total("forward_s")[0] + share.total("backward_s")[0] + share.total("recompute_s")[0])
    within = m * float(share.total("comm_forward_s")[0] + share.total("comm_backward_s")[0])
    sent = m * sent_s
    return terms.replace(
        compute=terms.compute + compute,
        tp=terms.tp + within,
        pp=terms.pp + sent,
        bubble=terms.bubble + max(0.0, step_s - compute - within - sent),
        dp=terms.dp + dp_s,
    )


def estimate_from_terms(
    costs: CostTable,
    idx: int,
    breakdown_s: TimeBreakdown,
    stages: tuple[StageEstimate, ...],
    fullest: int,
    scenario: Scenario | None = None,
) -> TrainingEstimate:
    """Return the estimate that follows from the terms of a step and from what each stage holds.

    Memory is that of stage ``fullest``, whose device pool has ``scenario`` (None: that of the table).
    """
    workload, cluster, model = costs.workload, costs.cluster, costs.model
    peak = sum(group.num_devices * peak_flops_per_s(group.device, workload.precision) for group in cluster.groups)
    time = breakdown_s.total
    tokens_per_s = workload.tokens_per_step / time
    flops = step_flops_per_token(model, workload) * tokens_per_s
    of_pool = scenario or costs.scenario
    return TrainingEstimate(
        step_time_s=time,
        step_time_interval_s=time_interval(
            Basis(
                model=model,
                scenario=costs.scenario,
                terms=breakdown_s,
                zero_stage=int(costs.layouts.zero_stage[idx]),
                offloads=bool(costs.layouts.offloads[idx]) or breakdown_s.offload > 0,
            )
        ),
        tokens_per_s=tokens_per_s,
        tokens_per_s_per_device=tokens_per_s / cluster.num_devices,
        mfu=flops / peak,
        budget_bytes=of_pool.cluster.memory_budget_bytes,
        **_peaks(stages[fullest].memory_bytes, of_pool),
        breakdown_s=breakdown_s,
        memory_bytes=stages[fullest].memory_bytes,
        stages=stages,
    )


def with_memory(estimate: TrainingEstimate, terms: MemoryBreakdown, scenario: Scenario) -> TrainingEstimate:
    """Return the estimate with another peak of the fullest device."""
    return estimate.replace(memory_bytes=terms, **_peaks(terms, scenario))


def _peaks(terms: MemoryBreakdown, scenario: Scenario) -> dict[str, Any]:
    """Return the fields of an Estimate that follow from the terms of the allocated peak."""
    allocated, budget = terms.total, scenario.cluster.memory_budget_bytes
    reserved = float(memory.reserved_bytes(allocated, terms.parameters, scenario))
    required = int(memory.required_bytes(allocated, terms.parameters, scenario))
    if required <= budget:  # an allocator that finds no room gives its cached blocks back first
        reserved = min(reserved, budget)
    reserved += memory.process_bytes(scenario)
    return {
        "peak_allocated_bytes": allocated,
        "peak_reserved_bytes": int(reserved),
        "peak_device_bytes": int(reserved + memory.context_bytes(scenario)),
        "memory_interval_bytes": peak_interval(allocated, scenario),
        "required_bytes": required,
        "fits": required <= budget,
    }


def step_flops_per_token(model: ModelSpec, workload: Workload) -> float:
    """Return the FLOPs that a step needs for each token: forward passes, a third of a training step each, and backward passes."""
    layers = tuple((run.layer, run.count) for run in model.layers)
    is_frozen = workload.adapters is not None and workload.has_backward
    flops = model_flops_per_token(layers, model.hidden_dim, workload.attended_len, frozen=is_frozen)
    thirds = sum(phase.num_passes * (3 if phase.has_backward else 1) for phase in workload.phases)
    return float(flops * thirds / 3)


def model_flops_per_token(
    layers: tuple[tuple[Layer, int], ...], hidden_dim: int, seq_len: int, *, frozen: bool = False
) -> float:
    """Return the FLOPs of a training step per token: forward plus backward, no recompute, causal attention and scans counted once.

    A frozen model needs no gradients of its weights: four FLOPs for each instead of six (its adapters are left out).
    """
    products, attention = forward_flops_per_token(layers, hidden_dim, seq_len)
    # Attention's backward pass counts without the kernel's recomputed scores.
    return (2 if frozen else 3) * products + 3 * attention


def forward_flops_per_token(
    layers: tuple[tuple[Layer, int], ...], hidden_dim: int, seq_len: int
) -> tuple[float, float]:
    """Return the FLOPs of a forward pass per token: of products with weights, of causal attention and scans."""
    products = attention = 0.0
    for layer, count in layers:
        for op in layer_operators(layer, OperatorRules(hidden_dim=hidden_dim, seq_len=seq_len)):
            if isinstance(op, Gemm):
                products += count * 2 * op.n * op.k * op.rows_per_token
            elif isinstance(op, FusedAttention | Scan):
                attention += count * op.forward_flops_per_token
    return products, attention


WORK = {
    "compute": ("compute", "recompute"),
    "memory_bound": ("optimizer",),
    "communication": ("tp", "cp", "ep", "dp", "pp"),
    "waiting": ("bubble", "offload"),
}
"""Kind of work -> parts of a step that are spent on it. Kernels of compute that memory binds count as compute."""


def has_power_limits(cluster: ClusterSpec) -> bool:
    """Return whether the power limit of every device is known."""
    return all(group.device.power_limit_w is not None for group in cluster.groups)


def power_limit_w(cluster: ClusterSpec) -> float:
    """Return the watts that all devices may draw together.

    Raises:
        ConfigError: the power limit of a device is unknown.
    """
    lacking = sorted({group.device.name for group in cluster.groups if group.device.power_limit_w is None})
    if lacking:
        raise ConfigError(
            f"the power limit of {', '.join(lacking)} is unknown, so energy is too",
            help="state power_limit_w of the device in a cluster file (docs/cluster.md)",
        )
    return sum(group.num_devices * (board_w(group.device) or 0.0) for group in cluster.groups)


def energy_j(breakdown_s: TimeBreakdown, cluster: ClusterSpec) -> float:
    """Return the joules that all devices draw in a step."""
    power = packaged_coefficients()["power"]
    busy_s = {work: sum(getattr(breakdown_s, part) for part in parts) for work, parts in WORK.items()}
    return power_limit_w(cluster) * float(sum(power[work] * seconds for work, seconds in busy_s.items()))


def step_energy_j(estimate: TrainingEstimate, cluster: ClusterSpec) -> float:
    """Return the joules of an estimated step."""
    return energy_j(estimate.breakdown_s, cluster)


def min_energy_j(step_s: float, compute_s: float, cluster: ClusterSpec) -> float:
    """Return joules that no step of ``step_s`` or more is below, which computes for ``compute_s`` at least."""
    power = packaged_coefficients()["power"]
    lowest = min(power[work] for work in WORK)
    return power_limit_w(cluster) * float(lowest * step_s + (power["compute"] - lowest) * compute_s)
