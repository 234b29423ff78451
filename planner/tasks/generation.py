"""Generation: which batch, how many devices to a replica, and what lies where (solvers/generation/instance.py).

Every shape, (tp, sequences at once, batches in a block, whether layers may be away), is bounded by its compute only, then by
its linear program, then solved with integer layers: always the one with the highest bound, until none may generate more than the
best. Of answers within SAME_RATE_FRACTION the one with the least latency is taken. Throughput counts generated tokens over the
entire block.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...cost_models.stage.generation import (
    LayerGroup,
    PassCosts,
    copy_bytes_per_s,
    host_attention_bytes_per_s,
    layer_groups,
    pass_costs,
)
from ...schema import ClusterSpec, ConfigError, ModelSpec, Workload
from ...schema.recurrences import Recurrence
from ...schema.task import Generation
from ...schema.units import FloatArray, IntArray
from ...solvers.backend import Status
from ...solvers.branch_and_bound import Answer, Leaf, Node, Search, Step, Stop
from ...solvers.generation.instance import Capacity, GenerationInstance, Rates
from ...solvers.generation.program import GenerationSolution, RelaxedPlacement, solve, solve_relaxation
from ..enumeration import divisors
from ..request import OffloadRequest, PlanRequest

BATCH_SIZES = tuple(sorted({2**i for i in range(11)} | {3 * 2**i for i in range(9)}))
"""Sequences at once that are tried: 1, 2, 3, 4, 6, 8, 12, ... 1024."""

NUM_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Batches in a block that are tried."""

WINDOW = 2
"""Layers whose weights may be on the device at once while they come from elsewhere: the one in use and the next."""

SAME_RATE_FRACTION = 0.01
"""Throughputs within this are equal: the model of a machine is no more exact."""

MAX_SOLVED = 60
"""Shapes that are solved with integer layers; the certificate says what that leaves open."""


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """``num_batches`` batches of ``batch_size`` sequences on ``replicas`` groups of ``tp`` devices.

    Attributes:
        streams: layers may be away from the device.
        num_tokens: that a block of all replicas generates; ``max_tokens_per_s``: with nothing but the device's compute.
    """

    tp: int
    replicas: int
    batch_size: int
    num_batches: int
    streams: bool
    num_tokens: int
    max_tokens_per_s: float


@dataclass(frozen=True)
class SolvedBatch:
    """A shape with its placement in integer layers."""

    shape: BatchShape
    instance: GenerationInstance
    relaxed: RelaxedPlacement
    solution: GenerationSolution

    @property
    def tokens_per_s(self) -> float:
        """Tokens that all replicas generate."""
        return self.shape.num_tokens / self.solution.objective

    @property
    def latency_s(self) -> float:
        """Seconds of a block, from the prompts to the last token."""
        return self.solution.objective


@dataclass(frozen=True)
class _Batch:
    """State of a node: a shape, and once it was bounded its linear program."""

    shape: BatchShape
    instance: GenerationInstance | None = None
    relaxed: RelaxedPlacement | None = None


class GenerationProblem:
    """All shapes of one request, as a problem of solvers/branch_and_bound.py that minimises -(tokens per second)."""

    def __init__(self, request: PlanRequest) -> None:
        """Cost the passes of every batch."""
        assert isinstance(request.task, Generation)
        self.model, self.cluster, self.generation = request.model, request.cluster, request.task
        self._request = request
        self.offload = request.offload or OffloadRequest()
        self.block_size = request.fixed.get("batch_size")
        self.limit_s = request.latency_limit_s or np.inf
        self.phases = self.generation.phases
        self._deadline = request.deadline
        self._passes = np.array([float(phase.num_passes) for phase in self.phases])
        self.solved: list[SolvedBatch] = []
        self.num_bounded = 0
        self.quickest: tuple[float, GenerationInstance | None] = (np.inf, None)
        self._too_large: dict[tuple[int, int, bool], int] = {}

    @cached_property
    def degrees(self) -> tuple[int, ...]:
        """Devices that may hold the model together: as many as divide all heads, and a node, or of whole nodes the cluster."""
        node, total = int(np.gcd.reduce([*self.cluster.node_sizes])), self.cluster.num_devices
        heads = [block.attention.num_heads for block, _ in self.model.block_runs]
        sizes = [tp for tp in range(1, node + 1) if node % tp == 0]
        if self.generation.across_nodes:
            sizes += [tp for tp in range(2 * node, min(total, max(heads)) + 1, node) if total % tp == 0]
        return tuple(tp for tp in sizes if all(h % tp == 0 for h in heads))

    @cached_property
    def batches(self) -> IntArray:
        """Sequences at once."""
        total = self.block_size
        sizes = BATCH_SIZES if total is None else divisors(total)
        return np.array(sizes, dtype=np.int64)

    @cached_property
    def _costs(self) -> dict[int, tuple[tuple[LayerGroup, ...], PassCosts]]:
        size, costs = self.generation.element_bytes, {}
        fixed = self._request.fixed.get("tp")
        for tp in self.degrees if fixed is None else (fixed,):
            self._deadline.require(f"costing {len(self.batches)} batches on {tp} devices")
            passes = pass_costs(self.model, self.cluster, self.generation, tp, self.batches)
            costs[tp] = layer_groups(self.model, tp, size), passes
        return costs

    @cached_property
    def shapes(self) -> list[BatchShape]:
        """Every shape, with what it generates at most by compute only."""
        shapes = []
        for tp, (kinds, costs) in self._costs.items():
            counts = np.array([len(kind.idxs) for kind in kinds], dtype=np.float64)
            compute_s: FloatArray = np.einsum("p,c,cpb->b", self._passes, counts, costs.compute_s)
            for j, b in enumerate(self.batches.tolist()):
                for k in NUM_BATCHES if self.block_size is None else (self.block_size // b,):
                    replicas = self.cluster.num_devices // tp
                    tokens = replicas * b * k * self.generation.generate_len
                    shapes += [
                        BatchShape(
                            tp=tp, replicas=replicas, batch_size=b, num_batches=k, streams=streams, num_tokens=tokens,
                            max_tokens_per_s=tokens / (k * float(compute_s[j])),
                        )
                        for streams in (False, True)
                    ]  # fmt: skip
        return shapes

    @property
    def has_host(self) -> bool:
        """True where devices have a memory and processors next to them; False where they are those."""
        return not self.cluster.weakest_device.backend.is_host

    @cached_property
    def host_bytes(self) -> float:
        """Host memory of one rank apart from the device's; infinite where it is not known."""
        if not self.has_host:
            return 0.0
        return self.offload.rates(self._training, self.cluster).memory_bytes

    @property
    def _training(self) -> Workload:
        """A workload whose host has the same rates."""
        return Workload(seq_len=1, global_batch_size=1, precision=self.generation.training_precision)

    @property
    def host_attention(self) -> float:
        """Bytes per second of keys and values that one rank's share of the host attends to."""
        of_node = self.offload.host_attention_bytes_per_s
        return host_attention_bytes_per_s(self.cluster) if of_node is None else of_node / self.cluster.largest_node

    @cached_property
    def _rates(self) -> Rates:
        host = self.offload.rates(self._training, self.cluster)
        link = host.link_bytes_per_s if self.has_host else copy_bytes_per_s(self.cluster, self.generation)
        return Rates(
            to_device=link,
            to_host=link,
            duplex=host.duplex,
            storage=host.storage_bytes_per_s if self.offload.storage_bytes > 0 else 0.0,
            host_attention=self.host_attention,
            drive_attention=(self.offload.drive_attention_bytes_per_s or 0.0) / self.cluster.largest_node,
        )

    def instance(self, shape: BatchShape) -> GenerationInstance:
        """Return the problem of one rank."""
        kinds, costs = self._costs[shape.tp]
        j, k = int(np.searchsorted(self.batches, shape.batch_size)), shape.num_batches
        moved = np.array([kind.moved_bytes for kind in kinds])
        slot, largest = float(costs.slot_bytes[j]), float(moved.max())
        hidden = k * costs.hidden_bytes[:, j]
        stores = self.offload.storage_bytes > 0
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
                storage=self.offload.storage_bytes / self.cluster.largest_node,
                working=float(costs.working_bytes[j]),
                buffer=WINDOW * largest if shape.streams else 0.0,
                slot=slot,
                staging=WINDOW * (largest + slot) if stores and self.has_host else 0.0,
            ),
            streams=shape.streams,
            has_host=self.has_host,
        )

    def roots(self) -> Step[_Batch, SolvedBatch]:
        """Return every shape with the bound of its compute."""
        return Step([Node(-shape.max_tokens_per_s, _Batch(shape), idx) for idx, shape in enumerate(self.shapes)])

    def expand(self, node: Node[_Batch], incumbent: float) -> Step[_Batch, SolvedBatch]:
        """Bound a shape by its linear program, or solve it with integer layers."""
        shape, instance, relaxed = node.state.shape, node.state.instance, node.state.relaxed
        if instance is None or relaxed is None:
            return self._bound(node)
        if node.bound >= incumbent and self.solved and relaxed.objective >= self.chosen().latency_s:
            return Step()
        solution = solve(instance, deadline=self._deadline)
        if solution.choice is None or solution.objective > self.limit_s:
            return Step(evaluated=1, effort=1)
        solved = SolvedBatch(shape, instance, relaxed, solution)
        self.solved.append(solved)
        bound = -shape.num_tokens / solution.bound if solution.bound > 0 else np.inf
        return Step((), [Leaf(-solved.tokens_per_s, solved, bound)], evaluated=1, effort=1)

    def _bound(self, node: Node[_Batch]) -> Step[_Batch, SolvedBatch]:
        shape = node.state.shape
        series = (shape.tp, shape.num_batches, shape.streams)
        if shape.batch_size >= self._too_large.get(series, shape.batch_size + 1):
            return Step()
        instance = self.instance(shape)
        self.num_bounded += 1
        status, relaxed = solve_relaxation(instance)
        if relaxed is None:
            if status is Status.INFEASIBLE:  # memory: larger batches need more
                self._too_large[series] = shape.batch_size
            return Step()
        self.quickest = min(self.quickest, (relaxed.objective, instance), key=lambda pair: pair[0])
        if relaxed.objective > self.limit_s:
            return Step()
        bound = max(node.bound, -shape.num_tokens / relaxed.objective)
        return Step([Node(bound, _Batch(shape, instance, relaxed), node.key)])

    def chosen(self) -> SolvedBatch:
        """Return the least latency within SAME_RATE_FRACTION of the best; the smaller tp where that is equal."""
        best = max(solved.tokens_per_s for solved in self.solved)
        close = [solved for solved in self.solved if solved.tokens_per_s >= best * (1 - SAME_RATE_FRACTION)]
        return min(close, key=lambda solved: (solved.latency_s, solved.shape.tp))


def search_generation(request: PlanRequest) -> tuple[GenerationProblem, Answer[SolvedBatch]]:
    """Search the batch and placement that generate the most tokens a second, or the most within a latency.

    Raises:
        ConfigError: the model cannot generate so many tokens, or the cluster has no accelerator.
    """
    problem = GenerationProblem(request)
    _require_sense(request.model, request.cluster, problem.generation)
    if not problem.has_host:
        _require_host_apart(request.cluster, problem.offload)
    if (tp := request.fixed.get("tp")) is not None:
        _require_tp(problem, tp)
    if problem.offload.drive_attention_bytes_per_s is not None:
        _require_drives_can_attend(request.model, problem.offload)
    stop = Stop(rel_gap=-SAME_RATE_FRACTION, max_effort=MAX_SOLVED, deadline=request.deadline)
    return problem, Search(problem).run(stop)


def _require_sense(model: ModelSpec, cluster: ClusterSpec, generation: Generation) -> None:
    positions = model.embedding.num_positions
    if positions and generation.total_len > positions:
        raise ConfigError(
            f"{generation.prompt_len} + {generation.generate_len} tokens exceed the {positions} learned positions of {model.name}",
            help=f"use --prompt-len {max(1, positions - generation.generate_len)} or less",
        )
    if generation.across_nodes and (cluster.num_nodes == 1 or len({*cluster.node_sizes}) > 1):
        sizes = f"nodes of {', '.join(map(str, sorted({*cluster.node_sizes})))} devices"
        raise ConfigError(
            f"a model lies across nodes of equal size only: {cluster.name} has "
            + ("one node" if cluster.num_nodes == 1 else sizes),
            help="leave out --across-nodes",
        )


def _require_tp(problem: GenerationProblem, tp: int) -> None:
    """Require that so many devices may hold the model together.

    Raises:
        ConfigError: they may not.
    """
    cluster, allowed = problem.cluster, problem.degrees
    if tp in allowed:
        return
    spans = not problem.generation.across_nodes and tp > cluster.largest_node and cluster.num_devices % tp == 0
    raise ConfigError(
        f"{tp} devices cannot hold {problem.model.name} together on {cluster.name}: {', '.join(map(str, allowed))} can",
        help="let them be of several nodes: --across-nodes" if spans else f"use --tp {allowed[-1]}",
    )


def _require_host_apart(cluster: ClusterSpec, offload: OffloadRequest) -> None:
    """Require that nothing is said of a host where devices are the host.

    Raises:
        ConfigError: something is.
    """
    given = {
        "--host-memory-gib": offload.host_memory_bytes,
        "--host-attention-gb-per-s": offload.host_attention_bytes_per_s,
    }
    if names := [name for name, value in given.items() if value is not None]:
        raise ConfigError(
            f"{' and '.join(names)}: {cluster.name} has no host apart, its devices compute in the host's own memory",
            help="leave it out; what a plan may use is the device's memory, less reserved_gib of the cluster file",
        )


def _require_drives_can_attend(model: ModelSpec, offload: OffloadRequest) -> None:
    """Require drives, and keys and values that they can attend to.

    Raises:
        ConfigError: there are none.
    """
    if offload.storage_bytes <= 0:
        raise ConfigError(
            "drives are to attend to keys and values, but none may be used",
            help="say what may be written there: --nvme PATH --nvme-gib G, or leave out --storage-attention-gb-per-s",
        )
    if kinds := {block.attention.kind for block, _ in model.block_runs if isinstance(block.attention, Recurrence)}:
        raise ConfigError(
            f"{model.name} has {', '.join(sorted(kinds))} layers, whose states are worked on and written in every pass: drives "
            "attend to keys and values only",
            help="leave out --storage-attention-gb-per-s",
        )
