"""A whole training step: layers add up to stages, stages to a step.

`SpaceCosts` holds the cost of each kind of layer under each layout; from it come, with the same formulas,
`lower_bounds` (all layouts at once, every stage ideally balanced) and `estimate_step` (one layout with its real stages).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..schema import ClusterSpec, Estimate, ModelSpec, Workload
from ..schema.model import Block, Head
from ..schema.plan import Interval, MemoryBreakdown, StageEstimate, TimeBreakdown
from . import memory
from .coefficients import coefficients, device_rates, peak_flops_per_s
from .collectives import collective_s, p2p_s
from .compute import elementwise_update_s
from .engines import hides, hides_in_chunks, is_megatron, pass_bytes_per_param, update_bytes_per_param
from .experts import sharded_params
from .host_memory import host_update_s_per_param
from .interval import time_interval
from .layer_costs import LayerCost, layer_cost
from .layouts import FloatArray, IntArray, LayoutBatch
from .operators import Layer, model_flops_per_token
from .overlap import Pair, exposed_s, pair_of
from .pipeline import pipelined_lower_bound_s, pipelined_s

_NEWTON_SCHULZ_FLOPS = 25.0
"""FLOPs a weight and hidden width of Muon: five steps of X X', its square and a product with X, 4 a + 2 a^2 / b for [a, b]."""


@dataclass(frozen=True)
class SpaceCosts:
    """Costs of every kind of layer [K] under every layout [N] of ``batch``; ``kind_of_layer`` [L] says which is which."""

    model: ModelSpec
    workload: Workload
    cluster: ClusterSpec
    batch: LayoutBatch
    kinds: tuple[Layer, ...]
    kind_of_layer: IntArray
    by_kind: tuple[LayerCost, ...]

    @classmethod
    def of(cls, model: ModelSpec, workload: Workload, cluster: ClusterSpec, batch: LayoutBatch) -> SpaceCosts:
        """Evaluate every kind of layer once for the whole batch."""
        kinds = tuple(dict.fromkeys(run.layer for run in model.layers))
        kind_of_layer = np.array([kinds.index(layer) for layer in model.iter_layers()], dtype=np.int64)
        costs = tuple(layer_cost(layer, model.hidden_dim, batch, workload, cluster) for layer in kinds)
        return cls(model, workload, cluster, batch, kinds, kind_of_layer, costs)

    @cached_property
    def counts(self) -> IntArray:
        """Layers of each kind [K]."""
        return np.bincount(self.kind_of_layer, minlength=len(self.kinds))

    def total(self, name: str) -> FloatArray:
        """Sum of a LayerCost field over all layers [N]."""
        return np.asarray(sum(n * getattr(cost, name) for n, cost in zip(self.counts, self.by_kind, strict=True)))

    def per_layer(self, name: str, idx: int) -> FloatArray:
        """A LayerCost field of every layer [L] under one layout."""
        values = np.array([getattr(cost, name)[idx] for cost in self.by_kind])
        return values[self.kind_of_layer]

    @cached_property
    def transfer_s(self) -> FloatArray:
        """Seconds one micro-batch's activations take to the next stage, once for each chunk (gradients back the same) [N].

        Megatron and DeepSpeed send a tensor-parallel rank's share only and gather it on arrival (scatter-gather optimisation,
        arXiv:2104.04473 section 4.1; DeepSpeed's PipelineEngine.is_pipe_partitioned).
        """
        b = self.batch
        sent, gathered = self.boundary_bytes, np.zeros(len(b))
        if is_megatron(self.workload):
            whole = np.where(b.sequence_parallel == 1, 0.0, sent)
            sent = sent / np.where(b.sequence_parallel == 1, 1, b.tp)
            gathered = collective_s(
                "all_gather", whole, np.where(b.sequence_parallel == 1, 1, b.tp), np.ones_like(b.tp), self.cluster
            )
        # The pipeline is the outermost axis: some boundary crosses the outermost link it spans, and the slowest one decides.
        once = p2p_s(sent, b.stage_ranks * b.pp - 1, self.cluster) + gathered
        if hides_in_chunks(self.workload):
            chunk_s = (self.total("forward_s") + self.total("comm_forward_s")) / b.pp / b.num_model_chunks
            once = np.where(b.num_model_chunks > 1, np.maximum(once - chunk_s, 0.0), once)
        return np.asarray(np.where(b.pp > 1, b.num_model_chunks * once, 0.0))

    @cached_property
    def boundary_bytes(self) -> FloatArray:
        """Bytes of one micro-batch's hidden states between blocks on one rank [N]."""
        b = self.batch
        whole = b.tokens(self.workload.seq_len) * self.model.hidden_dim * float(self.workload.compute_bytes)
        return np.asarray(whole / np.where(b.sequence_parallel == 1, b.tp, 1))

    @cached_property
    def overlap(self) -> float:
        """Part of the compute time under which data-parallel communication hides."""
        return float(coefficients()["overlap"][self.cluster.weakest_device.backend])

    @cached_property
    def dp_exposed_by_kind(self) -> tuple[FloatArray, ...]:
        """Exposed gathering and reduction of one layer over the whole step and the passes that serve them, by kind [K] of [N]."""
        rate = device_rates(self.cluster, self.workload).update_bytes_per_s
        passes_s = self.batch.num_microbatches * pass_bytes_per_param(self.batch, self.workload) / rate
        exposed = zip(self._collectives_exposed, self.by_kind, strict=True)
        return tuple(np.asarray(seconds + passes_s * cost.num_trained) for seconds, cost in exposed)

    @cached_property
    def _collectives_exposed(self) -> tuple[FloatArray, ...]:
        return tuple(self._dp_exposed(kind, cost) for kind, cost in zip(self.kinds, self.by_kind, strict=True))

    def _dp_exposed(self, kind: Layer, cost: LayerCost) -> FloatArray:
        b = self.batch
        forward = self.overlap * (cost.forward_s + cost.comm_forward_s)
        backward = self.overlap * (cost.backward_s + cost.recompute_s + cost.comm_backward_s)
        gather_hides, reduction_hides = hides(b, self.workload)
        forward, backward = forward * gather_hides, backward * reduction_hides
        if self.workload.engine == "fsdp2":
            # torch's pipelining reduces after the last backward pass, when there is nothing left to hide behind.
            backward = np.where(b.pp > 1, 0.0, backward)
        # The head stays gathered: its backward pass follows at once.
        gather_backward = np.where((b.zero_stage == 3) & (not isinstance(kind, Head)), cost.gather_s, 0.0)
        gathered, reduced = (
            cost.num_params * self.workload.compute_bytes,
            cost.num_params * self.workload.gradient_bytes,
        )
        # A ring all-gather or reduce-scatter sends what all others hold; sums over replicas are small beside it.
        parts = (b.dp_shard - 1) / b.dp_shard * gathered, (b.dp - 1) / b.dp * reduced
        in_forward = self._beside(forward, cost.gather_s, pair_of(parts[0], cost.gather_s, self.cluster))
        both_s = gather_backward + cost.reduce_s
        both = np.where(gather_backward > 0, parts[0], 0.0) + parts[1]
        in_backward = self._beside(backward, both_s, pair_of(both, both_s, self.cluster))
        return np.asarray(self._passes * (in_forward + in_backward))

    def _beside(self, compute_s: FloatArray, collective_s: FloatArray, pair: Pair) -> FloatArray:
        """What a layer's collective adds to its own compute, or in all chunks but one to pp micro-batches of the next [N]."""
        b, own = self.batch, exposed_s(compute_s, collective_s, pair)
        if not hides_in_chunks(self.workload):
            return own
        others = exposed_s(compute_s * np.minimum(b.num_microbatches, b.pp), collective_s, pair)
        return np.asarray(own / b.num_model_chunks + others * (1 - 1 / b.num_model_chunks))

    @cached_property
    def _passes(self) -> IntArray:
        """How often in a step parameters are gathered and gradients reduced [N].

        Under a pipeline fully_shard keeps parameters gathered and reduces once: torch's PipelineStage asks for it in its last
        backward pass, and torchtitan's reshard_after_forward is off there.
        """
        b = self.batch
        once = (b.zero_stage < 2) | ((b.pp > 1) & (self.workload.engine == "fsdp2"))
        return np.asarray(np.where(once, 1, b.num_microbatches))

    @cached_property
    def dp_edges_s(self) -> FloatArray:
        """What nothing can hide [N]: the first gather and last reduction as far as not exposed already, tied copies' gradients."""
        idx = int(self.kind_of_layer[0])
        first, exposed = self.by_kind[idx], self._collectives_exposed[idx]
        edges = np.maximum(self.overlap * self._passes * (first.gather_s + first.reduce_s) - exposed, 0.0)
        if not self.model.tie_embeddings:
            return np.asarray(edges)
        b = self.batch
        if self.workload.adapters is not None:
            return np.asarray(edges)  # frozen copies have no gradients
        share = 4.0 * self.model.vocab_size * self.model.hidden_dim / b.tp / b.num_shards
        distance = b.stage_ranks * (b.pp - 1)
        both = collective_s("all_reduce", share, np.full_like(b.pp, 2), np.maximum(distance, 1), self.cluster)
        return np.asarray(edges + np.where(b.pp > 1, both, 0.0))

    def update_s(
        self, trained: FloatArray | float, expert_params: FloatArray | float, at: int | slice = slice(None)
    ) -> FloatArray:
        """Seconds of the optimizer on a stage with ``trained`` parameters per tensor-parallel rank, under layouts ``at``."""
        b, workload = self.batch, self.workload
        rates = device_rates(self.cluster, workload)
        share = np.asarray(sharded_params(trained, expert_params, b.num_shards[at], b.expert_shards[at]))
        update_bytes = update_bytes_per_param(workload)
        seconds = elementwise_update_s(share, update_bytes, rates)
        if workload.optimizer == "muon":
            seconds = seconds + share * _NEWTON_SCHULZ_FLOPS * self.model.hidden_dim / rates.gemm_flops_per_s
        away = np.where(b.offload[at] > 0, b.offload_fraction[at], 0.0)
        on_host = host_update_s_per_param(workload, self.cluster, b.offload_to_storage[at], update_bytes)
        return np.asarray((1 - away) * seconds + away * share * on_host)

    def once_per_layer_s(self, idx: int) -> FloatArray:
        """What each layer [L] adds to a step once, not per micro-batch: exposed communication and its update."""
        exposed = np.array([seconds[idx] for seconds in self.dp_exposed_by_kind])[self.kind_of_layer]
        return exposed + self.update_s(self.per_layer("num_trained", idx), self.per_layer("expert_params", idx), idx)

    @cached_property
    def block_params(self) -> FloatArray:
        """Parameters of the largest block per tensor-parallel rank [N]."""
        blocks = [c.num_params for kind, c in zip(self.kinds, self.by_kind, strict=True) if isinstance(kind, Block)]
        return np.asarray(np.max(blocks, axis=0))

    @cached_property
    def block_trained(self) -> FloatArray:
        """Trained parameters of the block with the most of them, per tensor-parallel rank [N]."""
        blocks = [c.num_trained for kind, c in zip(self.kinds, self.by_kind, strict=True) if isinstance(kind, Block)]
        return np.asarray(np.max(blocks, axis=0))

    @cached_property
    def root_kinds(self) -> tuple[int, ...]:
        """Kinds outside the blocks: embedding, head, MTP."""
        return tuple(k for k, kind in enumerate(self.kinds) if not isinstance(kind, Block))

    @cached_property
    def root_params(self) -> FloatArray:
        """Parameters of the largest unit outside the blocks per tensor-parallel rank [N]."""
        return np.asarray(np.max([self.by_kind[k].num_params for k in self.root_kinds], axis=0))

    @cached_property
    def working_bytes(self) -> FloatArray:
        """Largest working set of a layer [N]."""
        return np.asarray(np.max([cost.working_bytes for cost in self.by_kind], axis=0))

    @cached_property
    def logits(self) -> FloatArray:
        """Logits of one micro-batch on one tensor-parallel rank [N]."""
        b = self.batch
        return np.asarray(b.tokens(self.workload.seq_len) * self.model.head.vocab_size / b.tp)


def lower_bounds(costs: SpaceCosts) -> tuple[FloatArray, FloatArray]:
    """Admissible bounds for every layout: seconds of a step and bytes of the fullest device, [N] each.

    Stages are taken as perfectly balanced in time and in memory at once. Both costs are convex in what a stage holds, so no
    real split does better. For pp = 1 the time is exact.
    """
    b = costs.batch
    busy = costs.total("busy_s") + (b.pp > 1) * 2 * costs.transfer_s * b.pp
    exposed = sum(n * e for n, e in zip(costs.counts, costs.dp_exposed_by_kind, strict=True)) / b.pp + costs.dp_edges_s
    params, trained, expert_params = (costs.total(n) / b.pp for n in ("num_params", "num_trained", "expert_params"))
    time = (
        pipelined_lower_bound_s(busy, b.num_microbatches, b.pp, b.num_model_chunks)
        + exposed
        + costs.update_s(trained, expert_params)
    )
    contents = memory.StageContents(
        params=params,
        trained=trained,
        expert_params=expert_params,
        block_trained=costs.block_trained,
        frozen_bytes=costs.total("frozen_bytes") / b.pp,
        root_params=np.where(b.pp == 1, costs.root_params, 0.0),
        block_params=costs.block_params,
        activation_bytes=costs.total("activation_bytes") / b.pp,
        working_bytes=costs.working_bytes,
        logits=np.where(b.pp == 1, costs.logits, 0.0),
        boundary_bytes=costs.boundary_bytes,
    )
    fewest = memory.in_flight(b.schedule, b.num_microbatches, b.pp, b.pp - 1, b.num_model_chunks)
    parts = memory.stage_memory(
        contents, _step_shape(b, fewest, num_neighbours=np.minimum(b.pp - 1, 1)), costs.workload, costs.cluster
    )
    return time, memory.total_bytes(parts)


def stage_memory_parts(
    costs: SpaceCosts, idx: int, contents: memory.StageContents, stage_idx: IntArray
) -> dict[str, FloatArray]:
    """Memory parts of stages ``stage_idx`` of layout ``idx``."""
    b = costs.batch
    flight = memory.in_flight(b.schedule[idx], b.num_microbatches[idx], b.pp[idx], stage_idx, b.num_model_chunks[idx])
    num_neighbours = (stage_idx > 0).astype(np.int64) + (stage_idx < b.pp[idx] - 1)
    shape = _step_shape(b, flight, num_neighbours=num_neighbours, at=idx)
    return memory.stage_memory(contents, shape, costs.workload, costs.cluster)


def _step_shape(
    batch: LayoutBatch, in_flight: IntArray, *, num_neighbours: IntArray, at: int | slice = slice(None)
) -> memory.StepShape:
    return memory.StepShape(
        dp_replicate=batch.num_replicas[at],
        dp_shard=batch.num_shards[at],
        expert_shards=batch.expert_shards[at],
        zero_stage=batch.zero_stage[at],
        num_microbatches=batch.num_microbatches[at],
        in_flight=in_flight,
        num_neighbours=num_neighbours,
        offload=batch.offload[at],
        offload_fraction=batch.offload_fraction[at],
    )


def contents_between(costs: SpaceCosts, idx: int, first: IntArray, last: IntArray) -> memory.StageContents:
    """Contents of stages that hold layers ``first .. last - 1`` under layout ``idx``; arrays of any one shape."""

    def span(values: FloatArray) -> FloatArray:
        prefix = np.concatenate([[0.0], np.cumsum(values)])
        return np.asarray(prefix[last] - prefix[first])

    params = costs.per_layer("num_params", idx)
    is_root = np.isin(costs.kind_of_layer, costs.root_kinds)
    head_idx = next(i for i, layer in enumerate(costs.model.iter_layers()) if isinstance(layer, Head))
    return memory.StageContents(
        params=span(params),
        trained=span(costs.per_layer("num_trained", idx)),
        expert_params=span(costs.per_layer("expert_params", idx)),
        block_trained=costs.block_trained[idx],
        frozen_bytes=span(costs.per_layer("frozen_bytes", idx)),
        root_params=np.minimum(span(params * is_root), costs.root_params[idx]),
        block_params=costs.block_params[idx],
        activation_bytes=span(costs.per_layer("activation_bytes", idx)),
        working_bytes=costs.working_bytes[idx],
        logits=np.where((first <= head_idx) & (head_idx < last), costs.logits[idx], 0.0),
        boundary_bytes=costs.boundary_bytes[idx],
    )


def estimate_step(costs: SpaceCosts, idx: int, boundaries: Sequence[int]) -> Estimate:
    """Estimate of layout ``idx`` whose stage s holds layers ``boundaries[s] .. boundaries[s+1] - 1``."""
    first, last = np.array(boundaries[:-1]), np.array(boundaries[1:])
    contents = contents_between(costs, idx, first, last)
    parts = stage_memory_parts(costs, idx, contents, np.arange(len(first)))
    breakdown_s, stage_s = _time_breakdown(costs, idx, first, last, contents)
    allocated = memory.total_bytes(parts)
    fullest = int(np.argmax(allocated))
    stages = tuple(
        StageEstimate(
            forward_s=float(stage_s[0][s]),
            backward_s=float(stage_s[1][s]),
            memory_bytes=memory.breakdown({name: np.broadcast_to(v, first.shape)[s] for name, v in parts.items()}),
        )
        for s in range(len(first))
    )
    return _assemble(costs, breakdown_s, stages, fullest)


def _time_breakdown(
    costs: SpaceCosts, idx: int, first: IntArray, last: IntArray, contents: memory.StageContents
) -> tuple[TimeBreakdown, tuple[FloatArray, FloatArray]]:
    def stage_sums(name: str) -> FloatArray:
        values = costs.per_layer(name, idx)
        return np.array([values[i:j].sum() for i, j in zip(first, last, strict=True)])

    m, pp = int(costs.batch.num_microbatches[idx]), len(first)
    forward, backward, recompute = stage_sums("forward_s"), stage_sums("backward_s"), stage_sums("recompute_s")
    tp_forward, tp_backward = stage_sums("tp_forward_s"), stage_sums("tp_backward_s")
    cp_forward, cp_backward = stage_sums("cp_forward_s"), stage_sums("cp_backward_s")
    ep_forward, ep_backward = stage_sums("ep_forward_s"), stage_sums("ep_backward_s")
    transfer = 2 * float(costs.transfer_s[idx]) if pp > 1 else 0.0
    busy = forward + backward + recompute + tp_forward + tp_backward + transfer
    busy = busy + cp_forward + cp_backward + ep_forward + ep_backward
    slowest = int(np.argmax(busy))
    exposed = np.array([e[idx] for e in costs.dp_exposed_by_kind])[costs.kind_of_layer]
    dp = max(exposed[i:j].sum() for i, j in zip(first, last, strict=True)) + float(costs.dp_edges_s[idx])
    parts = TimeBreakdown(
        compute=m * float(forward[slowest] + backward[slowest]),
        recompute=m * float(recompute[slowest]),
        tp=m * float(tp_forward[slowest] + tp_backward[slowest]),
        cp=m * float(cp_forward[slowest] + cp_backward[slowest]),
        ep=m * float(ep_forward[slowest] + ep_backward[slowest]),
        dp=float(dp),
        pp=m * transfer,
        bubble=max(
            0.0, float(pipelined_s(busy, m, costs.batch.num_model_chunks[idx]) - m * busy[slowest])
        ),  # rounding can leave -1e-16 for one stage
        optimizer=float(np.max(costs.update_s(contents.trained, contents.expert_params, idx))),
    )
    inside = (tp_forward + cp_forward + ep_forward, tp_backward + cp_backward + ep_backward)
    return parts, (forward + inside[0], backward + recompute + inside[1])


def with_memory(estimate: Estimate, parts: MemoryBreakdown, workload: Workload, cluster: ClusterSpec) -> Estimate:
    """The estimate with another peak of the fullest device."""
    allocated = parts.total
    reserved, upper = (
        allocated * memory.reserved_over_allocated(cluster),
        memory.upper_bytes(allocated, workload, cluster),
    )
    low = allocated * memory.interval_factors(workload, cluster)[0]
    return estimate.replace(
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=int(reserved),
        peak_device_bytes=int(reserved + memory.context_bytes(cluster)),
        memory_interval_bytes=Interval(low=low, high=float(upper)),
        fits=float(upper) <= cluster.memory_budget_bytes,
        memory_bytes=parts,
    )


def _assemble(
    costs: SpaceCosts, breakdown_s: TimeBreakdown, stages: tuple[StageEstimate, ...], fullest: int
) -> Estimate:
    workload, cluster, model = costs.workload, costs.cluster, costs.model
    device = cluster.weakest_device
    time, allocated = breakdown_s.total, stages[fullest].memory_bytes.total
    tokens_per_s = workload.tokens_per_step / time
    layers = tuple((run.layer, run.count) for run in model.layers)
    is_frozen = workload.adapters is not None
    flops = model_flops_per_token(layers, model.hidden_dim, workload.attended_len, frozen=is_frozen) * tokens_per_s
    upper = float(memory.upper_bytes(allocated, workload, cluster))
    return Estimate(
        step_time_s=time,
        step_time_interval_s=time_interval(breakdown_s, cluster),
        tokens_per_s=tokens_per_s,
        tokens_per_s_per_device=tokens_per_s / cluster.num_devices,
        mfu=flops / (peak_flops_per_s(device, workload.precision) * cluster.num_devices),
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=int(allocated * memory.reserved_over_allocated(cluster)),
        peak_device_bytes=int(allocated * memory.reserved_over_allocated(cluster) + memory.context_bytes(cluster)),
        memory_interval_bytes=Interval(low=allocated * memory.interval_factors(workload, cluster)[0], high=upper),
        budget_bytes=cluster.memory_budget_bytes,
        fits=upper <= cluster.memory_budget_bytes,
        breakdown_s=breakdown_s,
        memory_bytes=stages[fullest].memory_bytes,
        stages=stages,
    )
