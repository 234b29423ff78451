"""The plan of a batch that a search of generation chose (planner/tasks/generation.py): places, estimate, marginal values, notes."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...cost_models.stage.generation import LayerGroup, layer_groups, sums_across_machines
from ...schema import Certificate, ClusterSpec
from ...schema.generation import (
    AllReduces,
    CacheShares,
    GenerationAlternative,
    GenerationEstimate,
    GenerationMarginalValues,
    GenerationPlan,
    PhaseEstimate,
    StateShares,
)
from ...schema.units import GB, GIB
from ...solvers.branch_and_bound import Answer
from ...solvers.generation.instance import DRIVES, RESOURCES, WAYS, busy_s, resident_bytes
from ..request import PlanRequest
from ..tasks.generation import GenerationProblem, SolvedBatch


def build_generation_plan(
    request: PlanRequest, problem: GenerationProblem, answer: Answer[SolvedBatch], *, top: int
) -> GenerationPlan:
    """Write the answer of a search that solved some batch."""
    chosen = problem.chosen()
    others = sorted((solved for solved in problem.solved if solved is not chosen), key=lambda s: -s.tokens_per_s)
    return GenerationPlan(
        model=request.model,
        cluster=request.cluster,
        generation=problem.generation,
        tp=chosen.shape.tp,
        replicas=chosen.shape.replicas,
        device_batch_size=chosen.shape.batch_size,
        num_device_batches=chosen.shape.num_batches,
        **_placed(layer_groups(request.model, chosen.shape.tp, problem.generation.element_bytes), chosen),
        estimate=_estimate(problem, chosen),
        worth=_marginal_values(request.cluster, chosen),
        search=Certificate.proved(
            objective=chosen.tokens_per_s,
            bound=-answer.bound,
            unit="tokens_per_s",
            finished=answer.is_proved,
            evaluated=len(problem.solved),
            bounded=problem.num_bounded,
            pruned=len(problem.shapes) - len(problem.solved),
            search_s=answer.solve_s,
        ),
        alternatives=tuple(
            GenerationAlternative(
                tp=other.shape.tp,
                device_batch_size=other.shape.batch_size,
                num_device_batches=other.shape.num_batches,
                tokens_per_s=other.tokens_per_s,
                latency_s=other.latency_s,
            )
            for other in others[:top]
        ),
        latency_limit_s=request.latency_limit_s,
        notes=_notes(problem, chosen),
        provenance=request.provenance(),
    )


def _placed(kinds: tuple[LayerGroup, ...], chosen: SolvedBatch) -> dict[str, Any]:
    """Return which layers lie where; those of a kind that come from elsewhere are spread evenly."""
    place = chosen.solution.choice
    assert place is not None
    host: list[int] = []
    storage: list[int] = []
    for kind, (_, on_host, on_storage) in zip(kinds, place.layers.tolist(), strict=True):
        away = _evenly_spaced(kind.idxs, on_host + on_storage)
        stored = _evenly_spaced(away, on_storage)
        storage += stored
        host += [idx for idx in away if idx not in {*stored}]
    shares = [min(1.0, max(0.0, float(share))) for share in place.cache]
    states = [min(1.0, max(0.0, float(share))) for share in place.hidden]
    return {
        "host_layers": tuple(sorted(host)),
        "storage_layers": tuple(sorted(storage)),
        "cache": CacheShares(**dict(zip(WAYS, shares, strict=True))),
        "states": StateShares(**dict(zip(StateShares.model_fields, states, strict=True))),
    }


def _evenly_spaced(idxs: tuple[int, ...] | list[int], count: int) -> list[int]:
    """Return ``count`` of the indices, evenly spaced."""
    return [idxs[(2 * i + 1) * len(idxs) // (2 * count)] for i in range(count)]


def _estimate(problem: GenerationProblem, chosen: SolvedBatch) -> GenerationEstimate:
    i, place, ranks = chosen.instance, chosen.solution.choice, problem.cluster.largest_node
    assert place is not None
    busy, resident = busy_s(i, place), resident_bytes(i, place)
    seconds, shape = busy.max(axis=0), chosen.shape
    sums = sums_across_machines(problem.model, problem.cluster, problem.generation, shape.tp, shape.batch_size)
    phases = tuple(
        PhaseEstimate(
            name=phase.name,
            passes=phase.num_passes,
            context=float(np.mean(phase.contexts)),
            seconds_per_pass=float(seconds[p]),
            busy_s={
                name: seconds
                for name, seconds in zip(RESOURCES, busy[:, p].tolist(), strict=True)
                if name != DRIVES or i.rates.drive_attention > 0
            },
            binds=RESOURCES[int(busy[:, p].argmax())],
            all_reduce=None
            if (each := sums[p]) is None
            else AllReduces(algorithm=each.algorithm, seconds_per_pass=shape.num_batches * each.seconds),
        )
        for p, phase in enumerate(problem.phases)
    )
    total = float(i.passes @ seconds)
    bound = chosen.shape.num_tokens / chosen.relaxed.objective
    host = i.capacity.host * ranks
    return GenerationEstimate(
        prefill_s=float(seconds[0]),
        decode_s=total - float(seconds[0]) if len(seconds) > 1 else 0.0,
        latency_s=total,
        tokens_per_s=chosen.tokens_per_s,
        device_bytes=round(float(resident[0])),
        device_budget_bytes=problem.cluster.memory_budget_bytes,
        host_bytes=round(float(resident[1]) * ranks),
        host_budget_bytes=int(host) if i.has_host and np.isfinite(host) else None,
        storage_bytes=round(float(resident[2]) * ranks),
        storage_budget_bytes=int(i.capacity.storage * ranks),
        bound_tokens_per_s=max(bound, chosen.tokens_per_s),
        gap=max(0.0, 1 - chosen.tokens_per_s / bound),
        phases=phases,
    )


def _marginal_values(cluster: ClusterSpec, chosen: SolvedBatch) -> GenerationMarginalValues:
    """Return tokens per second: for each second saved they are tokens / seconds^2."""
    marginal, ranks = chosen.relaxed.marginal, cluster.largest_node
    rate = chosen.shape.num_tokens / chosen.relaxed.objective**2
    return GenerationMarginalValues(
        device_per_gib=rate * marginal.device_s_per_byte * GIB,
        host_per_gib=rate * marginal.host_s_per_byte * GIB / ranks,
        storage_per_gib=rate * marginal.storage_s_per_byte * GIB / ranks,
        link_per_gb_per_s=rate * marginal.link_s2_per_byte * GB,
        storage_per_gb_per_s=rate * marginal.storage_s2_per_byte * GB / ranks,
        host_attention_per_gb_per_s=rate * marginal.host_attention_s2_per_byte * GB / ranks,
        drive_attention_per_gb_per_s=rate * marginal.drive_attention_s2_per_byte * GB / ranks,
    )


def _notes(problem: GenerationProblem, chosen: SolvedBatch) -> tuple[str, ...]:
    place = chosen.solution.choice
    assert place is not None
    notes = ["an estimate: meshwright runs no generation"]
    if not problem.has_host:
        notes.append(
            "devices compute in the host's own memory: what they read of storage comes to it, and nothing lies apart"
        )
    elif not np.isfinite(problem.host_bytes):
        notes.append("what the host has is not known: no limit was set; say it with --host-memory-gib")
    if place.cache[1] + place.cache[3] > 0:
        rate = problem.host_attention * problem.cluster.largest_node / GB
        notes.append(
            f"the host's processors are taken to attend to {rate:.3g} GB/s of keys and values "
            "(--host-attention-gb-per-s says what yours reach)"
        )
    if place.cache[WAYS.index("drive_attended")] > 0:
        rate = chosen.instance.rates.drive_attention * problem.cluster.largest_node / GB
        notes.append(f"a node's drives are taken to attend to {rate:.3g} GB/s of keys and values within themselves")
    return tuple(notes)
