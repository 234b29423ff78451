"""SpaceCosts: the cost of each kind of layer under each layout, and what a step adds to the sum of its layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ...schema import ClusterSpec, ModelSpec, Workload
from ...schema.arrays import FloatArray, IntArray
from ...schema.layers import Block, Embedding, Head
from ...schema.layout_table import RECOMPUTES, LayoutTable
from ...schema.schedules import SCHEDULE_NAMES
from ..coefficients import coefficients
from ..hardware.collectives import Hops, collective_s, p2p_s
from ..hardware.compute import elementwise_update_s
from ..hardware.device import device_rates
from ..hardware.host import host_update_s_per_param, update_bytes_per_param
from ..hardware.overlap import Pair, exposed_s, pair_slowdowns
from ..layer.data import DIRECTION_ELEMENTS, ZEROTH_ORDER_ELEMENTS, hides, hides_in_chunks, passes_bytes_per_param
from ..layer.layer import LayerCost, with_data_parallel, with_minimum, within_layer_cost
from ..layer.operators import CostInputs, Layer
from ..layer.parallel import sharded_params
from ..layer.vocabulary import VocabularyShare, vocabulary_share
from ..pipeline.simulation import Order


def _at_ends(kind: Layer, cost: LayerCost, batch: LayoutTable) -> LayerCost:
    """Embedding and head as layers of the first and the last stage: nothing of them where they are split over all stages."""
    if not isinstance(kind, Embedding | Head) or np.all(batch.vocabulary == 0):
        return cost
    return cost.masked(batch.vocabulary == 0)


_NEWTON_SCHULZ_FLOPS = 25.0
"""FLOPs a weight and hidden width of Muon: five steps of X X', its square and a product with X, 4 a + 2 a^2 / b for [a, b]."""


@dataclass(frozen=True)
class CostTable:
    """Costs of every kind of layer [K] under every layout [N] of ``batch``; ``kind_of_layer`` [L] says which is which.

    Many layouts share what happens inside a layer: ``inside`` [K] has it once for each distinct case, without collectives over
    data, and ``like`` [N] says which case a layout is. Where layouts are mixed, the cases stand once for each of RECOMPUTES and
    then once with the least of them in everything; `by_option` has them as if all blocks did the same.

    ``order`` is that of a synthesised schedule, of one layout alone.

    Of a mixed cluster these are the costs of ranks that are all as the weakest; ``parts`` has those on each of its parts, whose
    ``stage_links`` join stages.
    """

    model: ModelSpec
    workload: Workload
    cluster: ClusterSpec
    batch: LayoutTable
    kinds: tuple[Layer, ...]
    kind_of_layer: IntArray
    inside: tuple[LayerCost, ...]
    like: IntArray
    option_of_layer: IntArray | None = None
    working_of_option: FloatArray | None = None
    parts: tuple[CostTable, ...] = ()
    links_of_whole: ClusterSpec | None = None
    order: Order | None = None

    @classmethod
    def of(
        cls,
        model: ModelSpec,
        workload: Workload,
        cluster: ClusterSpec,
        batch: LayoutTable,
        *,
        checkpoint: Callable[[], None] = lambda: None,
    ) -> CostTable:
        """Evaluate every kind of layer once for the whole batch; ``checkpoint`` is called before each and may raise."""
        kinds = tuple(dict.fromkeys(run.layer for run in model.layers))
        kind_of_layer = np.array([kinds.index(layer) for layer in model.iter_layers()], dtype=np.int64)
        cases, like = _cases(batch)
        once = CostInputs(hidden_dim=model.hidden_dim, batch=cases, workload=workload, cluster=cluster)
        inside = []
        for layer in kinds:
            checkpoint()
            cost = _at_ends(layer, within_layer_cost(layer, once), once.batch)
            inside.append(with_minimum(cost, len(RECOMPUTES)) if batch.is_mixed else cost)
        whole = cls(model, workload, cluster, batch, kinds, kind_of_layer, tuple(inside), like)
        parts = (cls.of(model, workload, part.cluster, batch, checkpoint=checkpoint) for part in cluster.parts)
        return replace(whole, parts=tuple(replace(part, links_of_whole=cluster) for part in parts))

    @property
    def stage_links(self) -> ClusterSpec:
        """The links between stages: those of the whole cluster."""
        return self.links_of_whole or self.cluster

    def select(self, rows: IntArray) -> CostTable:
        """The same for some of the layouts."""
        parts = tuple(part.select(rows) for part in self.parts)
        return replace(self, batch=self.batch.select(rows), like=self.like[rows], parts=parts)

    def compacted(self) -> CostTable:
        """The same with no other cases inside layers than these layouts have: sums over cases are quick where layouts are few."""
        parts = tuple(part.compacted() for part in self.parts)
        if not self.batch.is_mixed:
            cases, like = np.unique(self.like, return_inverse=True)
            return replace(self, inside=tuple(c.at(cases) for c in self.inside), like=like.reshape(-1), parts=parts)
        num_cases = self.cases_by_option
        cases, like = np.unique(self.like % num_cases, return_inverse=True)
        like = like.reshape(-1) + self.like // num_cases * len(cases)
        of_options = (np.arange(len(RECOMPUTES) + 1)[:, None] * num_cases + cases).reshape(-1)
        return replace(self, inside=tuple(c.at(of_options) for c in self.inside), like=like, parts=parts)

    def with_budget(self, budget_bytes: int) -> CostTable:
        """The same where a plan may use only so much of each device, all as the weakest: nothing but what fits differs."""
        other = replace(self, cluster=self.cluster.with_budget(budget_bytes), parts=())
        worked_out = {name: value for name, value in self.__dict__.items() if name not in self.__dataclass_fields__}
        if "by_option" in worked_out:
            worked_out["by_option"] = tuple(costs.with_budget(budget_bytes) for costs in self.by_option)
        other.__dict__.update(worked_out)
        return other

    @cached_property
    def by_option(self) -> tuple[CostTable, ...]:
        """Mixed layouts as if all blocks recomputed the same, for each of RECOMPUTES."""
        return tuple(self._under(option) for option in range(len(RECOMPUTES)))

    def _under(self, option: int) -> CostTable:
        batch = self.batch.replace(recompute=np.full_like(self.batch.recompute, option))
        return replace(self, batch=batch, like=self.like + (option - self.batch.recompute) * self.cases_by_option)

    @property
    def cases_by_option(self) -> int:
        """Cases under one recompute option where layouts are mixed: ``inside`` has them for each option and for the least."""
        return len(self.inside[0].forward_s) // (len(RECOMPUTES) + 1)

    @cached_property
    def by_kind(self) -> tuple[LayerCost, ...]:
        """Everything a layer of each kind [K] costs, [N] each."""
        setting = CostInputs(
            hidden_dim=self.model.hidden_dim, batch=self.batch, workload=self.workload, cluster=self.cluster
        )
        costs = zip(self.kinds, self.inside, strict=True)
        return tuple(
            _at_ends(kind, with_data_parallel(cost.at(self.like), kind, setting), self.batch) for kind, cost in costs
        )

    @cached_property
    def vocabulary(self) -> VocabularyShare | None:
        """What each stage has of a split vocabulary [N], zero under layouts that have it at the ends; None if all do."""
        rows = np.flatnonzero(self.batch.vocabulary == 1)
        if not len(rows):
            return None
        setting = CostInputs(
            hidden_dim=self.model.hidden_dim,
            batch=self.batch.select(rows),
            workload=self.workload,
            cluster=self.cluster,
        )
        embedding = next(kind for kind in self.kinds if isinstance(kind, Embedding))
        place = np.zeros(len(self.batch), dtype=np.int64)
        place[rows] = np.arange(len(rows))
        return vocabulary_share(embedding, self.model.head, setting).at(place).masked(self.batch.vocabulary == 1)

    @cached_property
    def vocabulary_sent_s(self) -> FloatArray:
        """Exposed communication of a split vocabulary for one micro-batch [N]: what outlasts a stage's own passes."""
        if self.vocabulary is None:
            return np.zeros(len(self.batch))
        beside = self.total("busy_s") / self.batch.pp if self.workload.overlap else 0.0
        return np.asarray(np.maximum(self.vocabulary.sent_s - beside, 0.0))

    @cached_property
    def vocabulary_s(self) -> FloatArray:
        """Seconds that a split vocabulary adds to a step [N], collectives over data apart."""
        if self.vocabulary is None:
            return np.zeros(len(self.batch))
        b = self.batch
        each = self.vocabulary.total("busy_s") + self.vocabulary_sent_s
        return np.asarray((b.num_microbatches + (b.pp - 1) / b.num_model_chunks) * each)

    @cached_property
    def vocabulary_dp_s(self) -> FloatArray:
        """Exposed collectives over data of each stage's share of the vocabulary, first gather and last reduction included [N]."""
        if self.vocabulary is None:
            return np.zeros(len(self.batch))
        seconds = np.zeros(len(self.batch))
        for kind in self.kinds:
            if isinstance(kind, Embedding | Head):
                cost = self.vocabulary.embedding if isinstance(kind, Embedding) else self.vocabulary.head
                exposed = self._dp_exposed(kind, cost)
                alone = self.overlap * self._passes * (cost.gather_s + cost.reduce_s)
                seconds = seconds + np.maximum(exposed, alone) + cost.levels_s + self._passes_s * cost.num_trained
        return np.where(self.batch.vocabulary == 1, seconds, 0.0)

    @cached_property
    def counts(self) -> IntArray:
        """Layers of each kind [K]."""
        return np.bincount(self.kind_of_layer, minlength=len(self.kinds))

    def total(self, name: str) -> FloatArray:
        """Sum of a LayerCost field other than collectives over data over all layers [N]."""
        total = sum(n * getattr(cost, name) for n, cost in zip(self.counts, self.inside, strict=True))
        return np.asarray(total)[self.like]

    def per_layer(self, name: str, idx: int) -> FloatArray:
        """A LayerCost field of every layer [L] under one layout."""
        values = np.array([getattr(cost, name)[idx] for cost in self.by_kind])
        return values[self.kind_of_layer]

    def prefix(self, name: str, idx: int) -> FloatArray:
        """Sums [L+1] of a LayerCost field over the layers before each one, under one layout; kept for the next time."""
        if (name, idx) not in self._prefixes:
            self._prefixes[name, idx] = np.concatenate([[0.0], np.cumsum(self.per_layer(name, idx))])
        return self._prefixes[name, idx]

    @cached_property
    def _prefixes(self) -> dict[tuple[str, int], FloatArray]:
        return {}

    @cached_property
    def is_root(self) -> IntArray:
        """Layers [L] outside the blocks, 1 or 0."""
        return np.isin(self.kind_of_layer, self.root_kinds).astype(np.int64)

    @cached_property
    def transfer_s(self) -> FloatArray:
        """Seconds one micro-batch's activations take to the next stage, once for each chunk (gradients back the same) [N].

        Megatron and DeepSpeed send a tensor-parallel rank's share only and gather it on arrival (scatter-gather optimisation,
        arXiv:2104.04473 section 4.1; DeepSpeed's PipelineEngine.is_pipe_partitioned).
        """
        b = self.batch
        sent, gathered = self.boundary_bytes, np.zeros(len(b))
        if self.workload.engine_facts.is_eager_like_megatron:
            whole = np.where(b.sequence_parallel == 1, 0.0, sent)
            sent = sent / np.where(b.sequence_parallel == 1, 1, b.tp)
            gathered = collective_s(
                "all_gather", whole, np.where(b.sequence_parallel == 1, 1, b.tp), np.ones_like(b.tp), self.cluster
            )
        # The pipeline is the outermost axis: some boundary crosses the outermost link it spans, and the slowest one decides.
        once = p2p_s(sent, Hops(b.pp, b.stage_ranks, "chain"), self.stage_links) + gathered
        if self.stage_links.bandwidth_matrix is not None:  # the last rank's chunks send to the first rank's next ones
            ring = p2p_s(sent, Hops(b.pp, b.stage_ranks, "ring"), self.stage_links) + gathered
            once = np.where(b.num_model_chunks > 1, ring, once)
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
        return float(coefficients()["overlap"][self.cluster.weakest_device.backend.collectives])

    @cached_property
    def dp_exposed_by_kind(self) -> tuple[FloatArray, ...]:
        """Exposed gathering and reduction of one layer over the whole step and the passes that serve them, by kind [K] of [N]."""
        exposed = zip(self._collectives_exposed, self.by_kind, strict=True)
        return tuple(
            np.asarray(seconds + cost.levels_s + self._passes_s * cost.num_trained) for seconds, cost in exposed
        )

    @cached_property
    def _passes_s(self) -> FloatArray:
        """Seconds per parameter of the passes over it that all micro-batches make [N].

        On a CPU at the bandwidth of plain copies: AdamW, which writes what it has read, streams twice as much.
        """
        streams = device_rates(self.cluster, self.workload).update_bytes_per_s
        rate = min(streams, self.cluster.weakest_device.memory_bandwidth_bytes_per_s)
        return np.asarray(passes_bytes_per_param(self.batch, self.workload) / rate)

    def copied_s(self, idx: int) -> FloatArray:
        """Of each layer's [L] exposed seconds under one layout: those passes, which compute and do not communicate."""
        return np.asarray(self._passes_s[idx] * self.per_layer("num_trained", idx))

    @cached_property
    def _collectives_exposed(self) -> tuple[FloatArray, ...]:
        return tuple(self._dp_exposed(kind, cost) for kind, cost in zip(self.kinds, self.by_kind, strict=True))

    def _dp_exposed(self, kind: Layer, cost: LayerCost) -> FloatArray:
        b = self.batch
        forward = self.overlap * (cost.forward_s + cost.comm_forward_s)
        backward = self.overlap * (cost.backward_s + cost.recompute_s + cost.comm_backward_s)
        gather_hides, reduction_hides = hides(b, self.workload)
        forward, backward = forward * gather_hides, backward * reduction_hides
        if self.workload.engine_facts.reduces_after_pipeline:
            # torch's pipelining reduces after the last backward pass, when there is nothing left to hide behind.
            backward = np.where(b.pp > 1, 0.0, backward)
        # The head stays gathered: its backward pass follows at once.
        gather_backward = np.where((b.zero_stage == 3) & (not isinstance(kind, Head)), cost.regather_s, 0.0)
        gathered, reduced = (
            cost.num_params * self.workload.compute_bytes,
            cost.num_params * self.workload.gradient_bytes,
        )
        # A ring all-gather or reduce-scatter sends what all others hold; sums over replicas are small beside it.
        parts = (b.dp_shard - 1) / b.dp_shard * gathered, (b.dp - 1) / b.dp * reduced
        of_owners = self.workload.engine_facts.data_parallel.gathers_from_owners | (b.zero_stage < 3)
        gathers = np.where(of_owners, b.dp_shard * (b.num_optimizer_shards // b.num_shards), b.dp_shard)
        first = (gathers - 1) / gathers * gathered
        in_forward = self._beside(forward, cost.gather_s, pair_slowdowns(first, cost.gather_s, self.cluster))
        both_s = gather_backward + cost.reduce_s
        both = np.where(gather_backward > 0, parts[0], 0.0) + parts[1]
        in_backward = self._beside(backward, both_s, pair_slowdowns(both, both_s, self.cluster))
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
        once = (b.zero_stage < 2) | ((b.pp > 1) & self.workload.engine_facts.reduces_after_pipeline)
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
        share = 4.0 * self.model.vocab_size * self.model.hidden_dim / b.tp / b.num_gradient_shards
        distance = b.stage_ranks * (b.pp - 1)
        both = collective_s("all_reduce", share, np.full_like(b.pp, 2), np.maximum(distance, 1), self.stage_links)
        # Under a split vocabulary a stage has the same rows of both, once.
        return np.asarray(edges + np.where((b.pp > 1) & (b.vocabulary == 0), both, 0.0))

    def update_s(
        self, trained: FloatArray | float, expert_params: FloatArray | float, at: int | slice = slice(None)
    ) -> FloatArray:
        """Seconds of the optimizer on a stage with ``trained`` parameters per tensor-parallel rank, under layouts ``at``."""
        b, workload = self.batch, self.workload
        rates = device_rates(self.cluster, workload)
        owners = b.num_optimizer_shards[at], b.expert_optimizer_shards[at]
        share = np.asarray(sharded_params(trained, expert_params, *owners))
        if not workload.has_backward:
            whole = (trained - expert_params) * b.tp[at] + expert_params * b.ep[at] * b.expert_tp[at]
            return elementwise_update_s(np.asarray(share), ZEROTH_ORDER_ELEMENTS * workload.master_bytes, rates) + (
                elementwise_update_s(np.asarray(whole), DIRECTION_ELEMENTS * workload.master_bytes, rates)
            )
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
        blocks = [c.num_params for kind, c in zip(self.kinds, self.inside, strict=True) if isinstance(kind, Block)]
        return np.asarray(np.max(blocks, axis=0)[self.like])

    @cached_property
    def block_trained(self) -> FloatArray:
        """Trained parameters of the block with the most of them, per tensor-parallel rank [N]."""
        blocks = [c.num_trained for kind, c in zip(self.kinds, self.inside, strict=True) if isinstance(kind, Block)]
        return np.asarray(np.max(blocks, axis=0)[self.like])

    @cached_property
    def head_idx(self) -> int:
        """Position of the head among the layers."""
        return next(idx for idx, layer in enumerate(self.model.iter_layers()) if isinstance(layer, Head))

    @cached_property
    def root_kinds(self) -> tuple[int, ...]:
        """Kinds outside the blocks: embedding, head, MTP."""
        return tuple(k for k, kind in enumerate(self.kinds) if not isinstance(kind, Block))

    @cached_property
    def root_params(self) -> FloatArray:
        """Parameters of the largest unit outside the blocks per tensor-parallel rank [N]."""
        return np.asarray(np.max([self.inside[k].num_params for k in self.root_kinds], axis=0)[self.like])

    @cached_property
    def working_bytes(self) -> FloatArray:
        """Largest working set of a layer [N]."""
        return np.asarray(np.max([cost.working_bytes for cost in self.inside], axis=0)[self.like])

    @cached_property
    def logits(self) -> FloatArray:
        """Logits of one micro-batch on one tensor-parallel rank [N]."""
        b = self.batch
        return np.asarray(b.tokens(self.workload.seq_len) * self.model.head.vocab_size / b.tp)


def _cases(batch: LayoutTable) -> tuple[LayoutTable, IntArray]:
    """Distinct cases inside layers and which one each layout is; of mixed layouts each case under all of RECOMPUTES in turn."""
    if not batch.is_mixed:
        rows, like = batch.within_layer
        return batch.select(rows), like
    rows, like = batch.replace(recompute=np.zeros_like(batch.recompute)).within_layer
    options = np.repeat(np.arange(len(RECOMPUTES)), len(rows))
    cases = batch.select(np.tile(rows, len(RECOMPUTES))).replace(recompute=options)
    return cases, like + batch.recompute * len(rows)


def is_aligned(costs: CostTable) -> NDArray[np.bool_]:
    """Whether every stage of a layout lies on one part of the cluster [N]; never where all nodes are alike.

    Other schedules than gpipe and 1f1b, model chunks and a vocabulary split over all stages are costed as the weakest.
    """
    b = costs.batch
    aligned = np.isin(b.schedule, [SCHEDULE_NAMES.index(name) for name in ("gpipe", "1f1b")])
    aligned &= (b.recompute < len(RECOMPUTES)) & (b.vocabulary == 0) & (b.num_model_chunks == 1) & bool(costs.parts)
    for part in costs.parts:
        aligned &= part.cluster.num_devices % b.stage_ranks == 0
    return aligned


def stages_of_pools(costs: CostTable) -> IntArray:
    """Stages that each part runs under every layout [G, N], rounded down where the layout is not aligned."""
    return np.array([part.cluster.num_devices // costs.batch.stage_ranks for part in costs.parts])
