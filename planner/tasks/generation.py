"""Shapes of batches for generation, and their instances of solvers/generation/instance.py.

Why nothing fits for generation, and the smallest change that would.

Placements for generation: which batch, how many devices to a replica, and what lies where (solvers/generation/instance.py).

Every shape, (tp, sequences at once, batches in a block, whether layers may be away), is bounded by its compute alone, then by
its linear program, then solved with whole layers: always the one with the highest bound, until none may generate more than the
best. Of answers within TIE the one with the least latency is taken. Throughput counts generated tokens over the whole block.
"""

from __future__ import annotations

import heapq
import math
import time
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from ...cost_models.coefficients import packaged_coefficients
from ...cost_models.hardware.host import host_rates
from ...cost_models.stage.generation import (
    GenerationPhase as Phase,
)
from ...cost_models.stage.generation import (
    LayerGroup,
    PassCosts,
    host_attention_bytes_per_s,
    layer_groups,
    pass_costs,
    phases_of,
)
from ...schema import ClusterSpec, ConfigError, InfeasibleError, ModelSpec, Workload
from ...schema.generation import (
    CacheShares,
    GenerationAlternative,
    GenerationEstimate,
    GenerationMarginalValues,
    GenerationPlan,
    GenerationSearch,
    PhaseEstimate,
    StateShares,
)
from ...schema.task import Generation
from ...schema.units import GB, GIB, format_bytes, format_seconds
from ...solvers.generation.instance import RESOURCES, Capacity, GenerationInstance, Rates, busy_s, resident_bytes
from ...solvers.generation.placement import GenerationSolution, RelaxedPlacement, min_bytes, solve, solve_relaxation
from ...solvers.solution import Status

BATCH_SIZES = tuple(sorted({2**i for i in range(11)} | {3 * 2**i for i in range(9)}))
"""Sequences at once that are tried: 1, 2, 3, 4, 6, 8, 12, ... 1024."""


NUM_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Batches in a block that are tried."""


WINDOW = 2
"""Layers whose weights may be on the device at once while they come from elsewhere: the one in use and the next."""


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """What a user fixes.

    Attributes:
        batch_size: sequences in a block on each replica; None: whatever generates most.
        host_memory_bytes: of one node; None: as the cluster says.
        storage_bytes: of one node's drives.
        host_attention_bytes_per_s: of one node's processors; None: the default coefficient.
        latency_limit_s: from the prompts to the last token of a block.
    """

    batch_size: int | None = None
    host_memory_bytes: float | None = None
    storage_bytes: float = 0.0
    host_attention_bytes_per_s: float | None = None
    latency_limit_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """``num_batches`` batches of ``batch_size`` sequences on ``replicas`` groups of ``tp`` devices.

    ``num_tokens`` generates a block of all replicas; with nothing but the device's compute ``most_tokens_per_s``.
    """

    tp: int
    replicas: int
    batch_size: int
    num_batches: int
    streams: bool
    num_tokens: int
    most_tokens_per_s: float


@dataclass(frozen=True)
class BatchShapes:
    """All shapes of one request."""

    model: ModelSpec
    cluster: ClusterSpec
    generation: Generation
    request: GenerationRequest

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """Prefill and parts of the decoding."""
        return phases_of(self.generation)

    @cached_property
    def degrees(self) -> tuple[int, ...]:
        """Devices that may hold the model together: within a node, and as many as divide all heads."""
        node = int(np.gcd.reduce([*self.cluster.node_sizes]))
        heads = [block.attention.num_heads for block, _ in self.model.block_runs]
        return tuple(tp for tp in range(1, node + 1) if node % tp == 0 and all(h % tp == 0 for h in heads))

    @cached_property
    def batches(self) -> np.ndarray:
        """Sequences at once."""
        total = self.request.batch_size
        sizes = BATCH_SIZES if total is None else [b for b in range(1, total + 1) if total % b == 0]
        return np.array(sizes, dtype=np.int64)

    @cached_property
    def _costs(self) -> dict[int, tuple[tuple[LayerGroup, ...], PassCosts]]:
        size = self.generation.element_bytes
        return {
            tp: (
                layer_groups(self.model, tp, size),
                pass_costs(self.model, self.cluster, self.generation, tp, self.batches),
            )
            for tp in self.degrees
        }

    @cached_property
    def _passes(self) -> np.ndarray:
        return np.array([float(len(phase.lengths)) for phase in self.phases])

    def all(self) -> list[BatchShape]:
        """Every shape, with what it generates at most by compute alone."""
        return self._all

    @cached_property
    def _all(self) -> list[BatchShape]:
        found = []
        for tp, (kinds, costs) in self._costs.items():
            counts = np.array([len(kind.idxs) for kind in kinds], dtype=np.float64)
            compute = np.einsum("p,c,cpb->b", self._passes, counts, costs.compute_s)
            for j, b in enumerate(self.batches.tolist()):
                for k in self._num_batches(b):
                    replicas = self.cluster.num_devices // tp
                    tokens = replicas * b * k * self.generation.generate_len
                    found += [
                        BatchShape(
                            tp=tp, replicas=replicas, batch_size=b, num_batches=k, streams=streams, num_tokens=tokens,
                            most_tokens_per_s=tokens / (k * float(compute[j])),
                        )
                        for streams in (False, True)
                    ]  # fmt: skip
        return found

    def _num_batches(self, batch_size: int) -> tuple[int, ...]:
        total = self.request.batch_size
        return NUM_BATCHES if total is None else (total // batch_size,)

    @cached_property
    def _rates(self) -> Rates:
        workload = Workload(seq_len=1, global_batch_size=1, precision=self.generation.training_precision)
        host = host_rates(workload, self.cluster)
        return Rates(
            to_device=host.link_bytes_per_s,
            to_host=host.link_bytes_per_s,
            duplex=host.duplex,
            storage=host.storage_bytes_per_s if self.request.storage_bytes > 0 else 0.0,
            host_attention=self.host_attention,
        )

    @property
    def host_attention(self) -> float:
        """Bytes per second of one rank."""
        own = self.request.host_attention_bytes_per_s
        return host_attention_bytes_per_s(self.cluster) if own is None else own / self.cluster.largest_node

    @cached_property
    def host_bytes(self) -> float:
        """Of one rank; infinite where it is not known."""
        workload = Workload(seq_len=1, global_batch_size=1, precision=self.generation.training_precision)
        return host_rates(workload, self.cluster, memory_bytes=self.request.host_memory_bytes).memory_bytes

    def instance(self, shape: BatchShape) -> GenerationInstance:
        """The problem of one rank."""
        kinds, costs = self._costs[shape.tp]
        j, k = int(np.searchsorted(self.batches, shape.batch_size)), shape.num_batches
        moved = np.array([kind.moved_bytes for kind in kinds])
        slot, largest = float(costs.slot_bytes[j]), float(moved.max())
        hidden = k * costs.hidden_bytes[:, j]
        stores = self.request.storage_bytes > 0
        return GenerationInstance(
            counts=np.array([len(kind.idxs) for kind in kinds]),
            weight_bytes=np.array([kind.weight_bytes for kind in kinds]),
            moved_bytes=moved,
            may_store=np.array([kind.may_store and stores for kind in kinds]),
            passes=self._passes,
            compute_s=k * costs.compute_s[:, :, j],
            attend_s=k * costs.attend_s[:, j],
            read_bytes=k * costs.read_bytes[:, j],
            new_bytes=k * costs.new_bytes[:, j],
            hidden_bytes=hidden,
            ask_bytes=k * costs.ask_bytes[:, j],
            cache_bytes=k * float(costs.cache_bytes[j]),
            states_bytes=float(hidden.max()),
            hidden_steps=sum(len(kind.idxs) for kind in kinds if kind.layer.is_block),
            num_batches=k,
            rates=self._rates,
            capacity=Capacity(
                device=float(self.cluster.memory_budget_bytes),
                host=self.host_bytes,
                storage=self.request.storage_bytes / self.cluster.largest_node,
                working=float(costs.working_bytes[j]),
                buffer=WINDOW * largest if shape.streams else 0.0,
                slot=slot,
                staging=WINDOW * (largest + slot) if stores else 0.0,
            ),
            streams=shape.streams,
        )


def too_slow(model: ModelSpec, least_s: float, limit_s: float) -> InfeasibleError:
    """No batch is within the latency."""
    return InfeasibleError(
        f"no batch of {model.name} is done within {format_seconds(limit_s)}: the fastest takes {format_seconds(least_s)}   [(O)]",
        help=f"use --latency-limit-s {math.ceil(100 * least_s) / 100:g} or more, or generate fewer tokens",
    )


def nothing_fits(shapes: BatchShapes) -> InfeasibleError:
    """Which memory lacks how much for the shape that needs least, were the others without limit."""
    ranks, name = shapes.cluster.largest_node, shapes.model.name
    needs = [(_device_need(shapes.instance(shape)), shape) for shape in _smallest(shapes)]
    device, shape = min(needs, key=lambda pair: pair[0])
    instance = shapes.instance(shape)
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


def _smallest(shapes: BatchShapes) -> list[BatchShape]:
    """Shapes of which one needs least: few sequences at once, everything that may be elsewhere."""
    fewest = min(shape.num_batches * shape.batch_size for shape in shapes.all())
    return [
        shape
        for shape in shapes.all()
        if shape.streams and shape.num_batches * shape.batch_size == fewest and shape.batch_size == shapes.batches[0]
    ]


def _device_need(instance: GenerationInstance) -> float:
    return min_bytes(instance.with_capacity(host=np.inf), "device_bytes")


def _storage_need(instance: GenerationInstance) -> float:
    """Bytes of storage that the given host memory would need beside it."""
    rate = float(packaged_coefficients()["offload"]["storage_bytes_per_s"])
    anything = np.ones_like(instance.may_store)
    anything[0] = instance.may_store[0]
    stored = replace(instance, may_store=anything, rates=replace(instance.rates, storage=rate))
    staging = 0.0 if instance.capacity.staging else instance.capacity.buffer + 2 * instance.capacity.slot
    changed = stored.with_capacity(storage=np.inf, staging=instance.capacity.staging + staging)
    return min_bytes(changed, "storage_bytes")


SAME_RATE_FRACTION = 0.01
"""Throughputs within this are alike: the model of a machine is no more exact."""


MAX_SOLVED = 60
"""Shapes that are solved with whole layers; the certificate says what that leaves open."""


@dataclass(frozen=True)
class _SolvedBatch:
    shape: BatchShape
    instance: GenerationInstance
    relaxed: RelaxedPlacement
    solution: GenerationSolution

    @property
    def tokens_per_s(self) -> float:
        return self.shape.num_tokens / self.solution.objective


@dataclass
class _Search:
    """Shapes by what they may generate at most; the best so far."""

    shapes: BatchShapes
    limit_s: float
    queue: list[tuple[float, int, BatchShape, GenerationInstance | None, RelaxedPlacement | None]] = field(
        default_factory=list
    )
    solved: list[_SolvedBatch] = field(default_factory=list)
    bounded: int = 0
    attempts: int = 0
    quickest: tuple[float, GenerationInstance | None] = (np.inf, None)
    too_large: dict[tuple[int, int, bool], int] = field(default_factory=dict)

    def run(self) -> None:
        """Expand until no shape may be better; see the module."""
        shapes = self.shapes.all()
        for order, shape in enumerate(shapes):
            heapq.heappush(self.queue, (-shape.most_tokens_per_s, order, shape, None, None))
        while self.queue and self.attempts < MAX_SOLVED:
            most, order, shape, instance, relaxed = heapq.heappop(self.queue)
            if -most < self.best * (1 - SAME_RATE_FRACTION):
                heapq.heappush(self.queue, (most, order, shape, instance, relaxed))
                return
            if relaxed is None or instance is None:
                self._bound(order, shape)
            elif -most > self.best or relaxed.objective < self.latency_s:
                found, self.attempts = solve(instance), self.attempts + 1
                if found.choice is not None and found.objective <= self.limit_s:
                    self.solved.append(_SolvedBatch(shape, instance, relaxed, found))

    def _bound(self, order: int, shape: BatchShape) -> None:
        alike = (shape.tp, shape.num_batches, shape.streams)
        if shape.batch_size >= self.too_large.get(alike, shape.batch_size + 1):
            return
        instance = self.shapes.instance(shape)
        self.bounded += 1
        status, relaxed = solve_relaxation(instance)
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
        return self.chosen().solution.objective if self.solved else np.inf

    def chosen(self) -> _SolvedBatch:
        """The least latency within TIE of the best; the smaller tp where that is alike."""
        alike = [found for found in self.solved if found.tokens_per_s >= self.best * (1 - SAME_RATE_FRACTION)]
        return min(alike, key=lambda found: (found.solution.objective, found.shape.tp))

    @property
    def bound(self) -> float:
        """Tokens per second that no shape is above."""
        left = [-most for most, *_ in self.queue]
        mine = [found.shape.num_tokens / found.solution.bound for found in self.solved if found.solution.bound > 0]
        return max([*left, *mine, self.best])


def plan_generation(
    model: ModelSpec,
    cluster: ClusterSpec,
    generation: Generation,
    request: GenerationRequest | None = None,
    *,
    top: int = 4,
) -> GenerationPlan:
    """The batch and placement that generate the most tokens a second, or the most within a latency.

    Raises:
        ConfigError: the model cannot generate so many tokens, or the cluster has no accelerator.
        InfeasibleError: nothing fits, or nothing is within the latency; says by how much.
    """
    start, request = time.perf_counter(), request or GenerationRequest()
    _require_sense(model, cluster, generation)
    shapes = BatchShapes(model, cluster, generation, request)
    search = _Search(shapes, request.latency_limit_s or np.inf)
    search.run()
    if not search.solved:
        if search.quickest[1] is not None:
            raise too_slow(model, solve(search.quickest[1]).objective, search.limit_s)
        raise nothing_fits(shapes)
    chosen = search.chosen()
    others = sorted((found for found in search.solved if found is not chosen), key=lambda found: -found.tokens_per_s)
    return GenerationPlan(
        model=model,
        cluster=cluster,
        generation=generation,
        tp=chosen.shape.tp,
        replicas=chosen.shape.replicas,
        device_batch_size=chosen.shape.batch_size,
        num_device_batches=chosen.shape.num_batches,
        **_placed(layer_groups(model, chosen.shape.tp, generation.element_bytes), chosen),
        estimate=_estimate(shapes, chosen),
        worth=_marginal_values(cluster, chosen),
        search=GenerationSearch(
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
    if cluster.weakest_device.backend.is_host:
        raise ConfigError(
            f"{cluster.name} has no accelerator: its devices are the host itself",
            help="name a cluster with GPUs, for example --cluster 1xT4-16GB",
        )


def _placed(kinds: tuple[LayerGroup, ...], chosen: _SolvedBatch) -> dict[str, Any]:
    """Which layers lie where; those of a kind that come from elsewhere are spread evenly."""
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
        "cache": CacheShares(**dict(zip(CacheShares.model_fields, shares, strict=True))),
        "states": StateShares(**dict(zip(StateShares.model_fields, states, strict=True))),
    }


def _evenly_spaced(idxs: tuple[int, ...] | list[int], count: int) -> list[int]:
    """``count`` of the indices, evenly."""
    return [idxs[(2 * i + 1) * len(idxs) // (2 * count)] for i in range(count)]


def _estimate(shapes: BatchShapes, chosen: _SolvedBatch) -> GenerationEstimate:
    i, place, ranks = chosen.instance, chosen.solution.choice, shapes.cluster.largest_node
    assert place is not None
    busy, held = busy_s(i, place), resident_bytes(i, place)
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
    return GenerationEstimate(
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


def _marginal_values(cluster: ClusterSpec, chosen: _SolvedBatch) -> GenerationMarginalValues:
    """Tokens per second for each second saved are tokens / seconds^2."""
    worth, ranks = chosen.relaxed.marginal, cluster.largest_node
    rate = chosen.shape.num_tokens / chosen.relaxed.objective**2
    return GenerationMarginalValues(
        device_per_gib=rate * worth.device_s_per_byte * GIB,
        host_per_gib=rate * worth.host_s_per_byte * GIB / ranks,
        storage_per_gib=rate * worth.storage_s_per_byte * GIB / ranks,
        link_per_gb_per_s=rate * worth.link_s2_per_byte * GB,
        storage_per_gb_per_s=rate * worth.storage_s2_per_byte * GB / ranks,
        host_attention_per_gb_per_s=rate * worth.host_attention_s2_per_byte * GB / ranks,
    )


def _choice(found: _SolvedBatch) -> GenerationAlternative:
    return GenerationAlternative(
        tp=found.shape.tp,
        device_batch_size=found.shape.batch_size,
        num_device_batches=found.shape.num_batches,
        tokens_per_s=found.tokens_per_s,
        latency_s=found.solution.objective,
    )


def _notes(shapes: BatchShapes, chosen: _SolvedBatch) -> tuple[str, ...]:
    place = chosen.solution.choice
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
