"""Placements for generation: which batch, how many devices to a replica, and what lies where (solvers/inference_instance.py).

Every shape, (tp, sequences at once, batches in a block, whether layers may be away), is bounded by its compute alone, then by
its linear program, then solved with whole layers: always the one with the highest bound, until none may generate more than the
best. Of answers within TIE the one with the least latency is taken. Throughput counts generated tokens over the whole block.
"""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..cost_models.inference import KindOfLayer, kinds_of
from ..schema import ClusterSpec, ConfigError, ModelSpec
from ..schema.inference import (
    CacheShares,
    Generation,
    InferenceChoice,
    InferenceEstimate,
    InferencePlan,
    InferenceSearch,
    InferenceWorth,
    PhaseEstimate,
    StateShares,
)
from ..schema.units import GB, GIB
from ..solvers.inference_instance import RESOURCES, Instance, busy_s, held_bytes
from ..solvers.inference_placement import Relaxed, Solution, relax, solve
from ..solvers.status import Status
from .inference_infeasible import nothing_fits, too_slow
from .inference_shapes import InferenceRequest, Shape, Shapes

TIE = 0.01
"""Throughputs within this are alike: the model of a machine is no more exact."""

MOST_SOLVED = 60
"""Shapes that are solved with whole layers; the certificate says what that leaves open."""


@dataclass(frozen=True)
class _Solved:
    shape: Shape
    instance: Instance
    relaxed: Relaxed
    solution: Solution

    @property
    def tokens_per_s(self) -> float:
        return self.shape.num_tokens / self.solution.objective_s


@dataclass
class _Search:
    """Shapes by what they may generate at most; the best so far."""

    shapes: Shapes
    limit_s: float
    queue: list[tuple[float, int, Shape, Instance | None, Relaxed | None]] = field(default_factory=list)
    solved: list[_Solved] = field(default_factory=list)
    bounded: int = 0
    attempts: int = 0
    quickest: tuple[float, Instance | None] = (np.inf, None)
    too_large: dict[tuple[int, int, bool], int] = field(default_factory=dict)

    def run(self) -> None:
        """Expand until no shape may be better; see the module."""
        shapes = self.shapes.all()
        for order, shape in enumerate(shapes):
            heapq.heappush(self.queue, (-shape.most_tokens_per_s, order, shape, None, None))
        while self.queue and self.attempts < MOST_SOLVED:
            most, order, shape, instance, relaxed = heapq.heappop(self.queue)
            if -most < self.best * (1 - TIE):
                heapq.heappush(self.queue, (most, order, shape, instance, relaxed))
                return
            if relaxed is None or instance is None:
                self._bound(order, shape)
            elif -most > self.best or relaxed.objective < self.latency_s:
                found, self.attempts = solve(instance), self.attempts + 1
                if found.placement is not None and found.objective_s <= self.limit_s:
                    self.solved.append(_Solved(shape, instance, relaxed, found))

    def _bound(self, order: int, shape: Shape) -> None:
        alike = (shape.tp, shape.num_batches, shape.streams)
        if shape.batch_size >= self.too_large.get(alike, shape.batch_size + 1):
            return
        instance = self.shapes.instance(shape)
        self.bounded += 1
        status, relaxed = relax(instance)
        if relaxed is None:
            if status is Status.INFEASIBLE:  # memory: larger batches need more
                self.too_large[alike] = shape.batch_size
            return
        self.quickest = min(self.quickest, (relaxed.objective, instance), key=lambda pair: pair[0])
        if relaxed.objective <= self.limit_s:
            most = min(shape.num_tokens / relaxed.objective, shape.most_tokens_per_s)
            heapq.heappush(self.queue, (-most, order, shape, instance, relaxed))

    @property
    def best(self) -> float:
        """Tokens per second."""
        return max((found.tokens_per_s for found in self.solved), default=0.0)

    @property
    def latency_s(self) -> float:
        """Of the one that would be taken now."""
        return self.chosen().solution.objective_s if self.solved else np.inf

    def chosen(self) -> _Solved:
        """The least latency within TIE of the best; the smaller tp where that is alike."""
        alike = [found for found in self.solved if found.tokens_per_s >= self.best * (1 - TIE)]
        return min(alike, key=lambda found: (found.solution.objective_s, found.shape.tp))

    @property
    def bound(self) -> float:
        """Tokens per second that no shape is above."""
        left = [-most for most, *_ in self.queue]
        mine = [found.shape.num_tokens / found.solution.bound_s for found in self.solved if found.solution.bound_s > 0]
        return max([*left, *mine, self.best])


def plan_inference(
    model: ModelSpec,
    cluster: ClusterSpec,
    generation: Generation,
    request: InferenceRequest | None = None,
    *,
    top: int = 4,
) -> InferencePlan:
    """The batch and placement that generate the most tokens a second, or the most within a latency.

    Raises:
        ConfigError: the model cannot generate so many tokens, or the cluster has no accelerator.
        InfeasibleError: nothing fits, or nothing is within the latency; says by how much.
    """
    start, request = time.perf_counter(), request or InferenceRequest()
    _require_sense(model, cluster, generation)
    shapes = Shapes(model, cluster, generation, request)
    search = _Search(shapes, request.latency_limit_s or np.inf)
    search.run()
    if not search.solved:
        if search.quickest[1] is not None:
            raise too_slow(model, solve(search.quickest[1]).objective_s, search.limit_s)
        raise nothing_fits(shapes)
    chosen = search.chosen()
    others = sorted((found for found in search.solved if found is not chosen), key=lambda found: -found.tokens_per_s)
    return InferencePlan(
        model=model,
        cluster=cluster,
        generation=generation,
        tp=chosen.shape.tp,
        replicas=chosen.shape.replicas,
        device_batch_size=chosen.shape.batch_size,
        num_device_batches=chosen.shape.num_batches,
        **_placed(kinds_of(model, chosen.shape.tp, generation.element_bytes), chosen),
        estimate=_estimate(shapes, chosen),
        worth=_worth(cluster, chosen),
        search=InferenceSearch(
            evaluated=len(search.solved),
            bounded=search.bounded,
            pruned=len(shapes.all()) - len(search.solved),
            bound_tokens_per_s=search.bound,
            gap=max(0.0, 1 - chosen.tokens_per_s / search.bound),
            search_s=time.perf_counter() - start,
        ),
        alternatives=tuple(_choice(found) for found in others[:top]),
        latency_limit_s=request.latency_limit_s,
        notes=_notes(shapes, chosen),
    )


def _require_sense(model: ModelSpec, cluster: ClusterSpec, generation: Generation) -> None:
    positions = model.embedding.num_positions
    if positions and generation.total_len > positions:
        raise ConfigError(
            f"{generation.prompt_len} + {generation.generate_len} tokens exceed the {positions} learned positions of {model.name}",
            help=f"use --prompt-len {max(1, positions - generation.generate_len)} or less",
        )
    if cluster.weakest_device.vendor == "cpu":
        raise ConfigError(
            f"{cluster.name} has no accelerator: its devices are the host itself",
            help="name a cluster with GPUs, for example --cluster 1xT4-16GB",
        )


def _placed(kinds: tuple[KindOfLayer, ...], chosen: _Solved) -> dict[str, Any]:
    """Which layers lie where; those of a kind that come from elsewhere are spread evenly."""
    place = chosen.solution.placement
    assert place is not None
    host: list[int] = []
    storage: list[int] = []
    for kind, (_, on_host, on_storage) in zip(kinds, place.layers.tolist(), strict=True):
        away = _spread(kind.idxs, on_host + on_storage)
        stored = _spread(away, on_storage)
        storage += stored
        host += [idx for idx in away if idx not in {*stored}]
    shares = [min(1.0, max(0.0, float(share))) for share in place.cache]
    states = [min(1.0, max(0.0, float(share))) for share in place.hidden]
    return {
        "host_layers": tuple(sorted(host)),
        "storage_layers": tuple(sorted(storage)),
        "cache": CacheShares(**dict(zip(CacheShares.model_fields, shares, strict=True))),
        "states": StateShares(**dict(zip(StateShares.model_fields, states, strict=True))),
    }


def _spread(idxs: tuple[int, ...] | list[int], count: int) -> list[int]:
    """``count`` of the indices, evenly."""
    return [idxs[(2 * i + 1) * len(idxs) // (2 * count)] for i in range(count)]


def _estimate(shapes: Shapes, chosen: _Solved) -> InferenceEstimate:
    i, place, ranks = chosen.instance, chosen.solution.placement, shapes.cluster.largest_node
    assert place is not None
    busy, held = busy_s(i, place), held_bytes(i, place)
    seconds = busy.max(axis=0)
    phases = tuple(
        PhaseEstimate(
            name=phase.name,
            passes=len(phase.lengths),
            context=float(phase.lengths.mean()),
            seconds_per_pass=float(seconds[p]),
            busy_s=dict(zip(RESOURCES, busy[:, p].tolist(), strict=True)),
            binds=RESOURCES[int(busy[:, p].argmax())],
        )
        for p, phase in enumerate(shapes.phases)
    )
    total = float(i.passes @ seconds)
    bound = chosen.shape.num_tokens / chosen.relaxed.objective
    host = i.capacity.host * ranks
    return InferenceEstimate(
        prefill_s=float(seconds[0]),
        decode_s=total - float(seconds[0]) if len(seconds) > 1 else 0.0,
        latency_s=total,
        tokens_per_s=chosen.tokens_per_s,
        device_bytes=round(float(held[0])),
        device_budget_bytes=shapes.cluster.memory_budget_bytes,
        host_bytes=round(float(held[1]) * ranks),
        host_budget_bytes=int(host) if np.isfinite(host) else None,
        storage_bytes=round(float(held[2]) * ranks),
        storage_budget_bytes=int(i.capacity.storage * ranks),
        bound_tokens_per_s=max(bound, chosen.tokens_per_s),
        gap=max(0.0, 1 - chosen.tokens_per_s / bound),
        phases=phases,
    )


def _worth(cluster: ClusterSpec, chosen: _Solved) -> InferenceWorth:
    """Tokens per second for each second saved are tokens / seconds^2."""
    worth, ranks = chosen.relaxed.worth, cluster.largest_node
    rate = chosen.shape.num_tokens / chosen.relaxed.objective**2
    return InferenceWorth(
        device_per_gib=rate * worth.device_s_per_byte * GIB,
        host_per_gib=rate * worth.host_s_per_byte * GIB / ranks,
        storage_per_gib=rate * worth.storage_s_per_byte * GIB / ranks,
        link_per_gb_per_s=rate * worth.link_s2_per_byte * GB,
        storage_per_gb_per_s=rate * worth.storage_s2_per_byte * GB / ranks,
        host_attention_per_gb_per_s=rate * worth.host_attention_s2_per_byte * GB / ranks,
    )


def _choice(found: _Solved) -> InferenceChoice:
    return InferenceChoice(
        tp=found.shape.tp,
        device_batch_size=found.shape.batch_size,
        num_device_batches=found.shape.num_batches,
        tokens_per_s=found.tokens_per_s,
        latency_s=found.solution.objective_s,
    )


def _notes(shapes: Shapes, chosen: _Solved) -> tuple[str, ...]:
    place = chosen.solution.placement
    assert place is not None
    notes = ["an estimate: meshwright runs no generation"]
    if not np.isfinite(shapes.host_bytes):
        notes.append("what the host has is not known: no limit was set; say it with --host-memory-gib")
    if place.cache[1] + place.cache[3] > 0:
        rate = shapes.host_attention * shapes.cluster.largest_node / GB
        notes.append(
            f"the host's processors are taken to attend to {rate:.3g} GB/s of keys and values "
            "(--host-attention-gb-per-s says what yours reach)"
        )
    return tuple(notes)
