"""CostTable: the cost of each kind of layer under each layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...schema import ClusterSpec, ModelSpec, Workload
from ...schema.errors import ConfigError
from ...schema.layers import Embedding, Head
from ...schema.layout_table import RECOMPUTES, LayoutTable
from ...schema.units import FloatArray, IntArray
from ..coefficients import Coefficients, Scenario
from ..layer.layer import LayerCost, with_data_parallel, with_minimum, within_layer_cost
from ..layer.operators import CostInputs, Layer
from ..layer.parallel import transfer_s
from ..layer.vocabulary import VocabularyShare, vocabulary_share
from ..pipeline.orders import Order
from .per_step import PerStepCosts


class KnownCosts(NamedTuple):
    """Costs by kind of layer [K] of [N] that a table is given instead of evaluating them."""

    by_kind: tuple[LayerCost, ...]
    dp_exposed_by_kind: tuple[FloatArray, ...]
    by_option: tuple[CostTable, ...] = ()


@dataclass(frozen=True)
class CostTable:
    """Costs of every kind of layer [K] under every layout [N]; ``kind_of_layer`` [L] says which is which.

    Many layouts share what happens within a layer: ``by_case`` [K] has it once for each distinct case, without collectives over
    data, and ``case_idx`` [N] says which case a layout is. Where layouts are mixed (blocks recompute differently), the cases stand
    once for each of RECOMPUTES and then once with the minimum of them in everything; `by_option` has them as if all blocks did
    the same.

    Of a cluster of several device pools these are the costs of ranks that are all as the weakest; ``device_pools`` has those on
    each pool, whose `stage_links` join stages.

    Attributes:
        option_of_layer, working_of_option: of one layout whose layers have an option each (`RecomputeCosts.assigned`).
        cluster_of_pools: of the table of one pool, the cluster that it is part of.
        order: of a synthesised schedule, of one layout only.
        known: costs by kind that are not evaluated again.
    """

    model: ModelSpec
    scenario: Scenario
    layouts: LayoutTable
    kinds: tuple[Layer, ...]
    kind_of_layer: IntArray
    by_case: tuple[LayerCost, ...]
    case_idx: IntArray
    option_of_layer: IntArray | None = None
    working_of_option: FloatArray | None = None
    device_pools: tuple[CostTable, ...] = ()
    cluster_of_pools: ClusterSpec | None = None
    order: Order | None = None
    known: KnownCosts | None = None

    @classmethod
    def from_layouts(
        cls,
        model: ModelSpec,
        workload: Workload,
        cluster: ClusterSpec,
        layouts: LayoutTable,
        *,
        coefficients: Coefficients | None = None,
        checkpoint: Callable[[], None] = lambda: None,
        is_pool: bool = False,
    ) -> CostTable:
        """Evaluate every kind of layer once for all layouts; ``checkpoint`` is called before each and may raise.

        Where the layouts have half blocks, all of them have, and these are the layers.

        Raises:
            ConfigError: the devices have no unit for the precision; of a pool's, others may have.
        """
        has_tf32 = any(group.device.peak_flops_per_s.tf32 for group in cluster.groups)
        if workload.precision == "tf32" and not (is_pool or has_tf32):
            raise ConfigError(
                f"{cluster.weakest_device.name} has no tf32 rate", help="use --precision fp16-mixed or fp32"
            )
        assert layouts.half_blocks.min(initial=1) == layouts.half_blocks.max(initial=0) or not len(layouts)
        model = model.staged(half_blocks=bool(layouts.half_blocks.any()))
        scenario = Scenario.build(workload, cluster, coefficients)
        kinds = tuple(dict.fromkeys(run.layer for run in model.layers))
        kind_of_layer = np.array([kinds.index(layer) for layer in model.iter_layers()], dtype=np.int64)
        cases, case_idx = _cases(layouts)
        inputs = CostInputs(hidden_dim=model.hidden_dim, layouts=cases, scenario=scenario)
        by_case = []
        for layer in kinds:
            checkpoint()
            cost = _at_ends(layer, within_layer_cost(layer, inputs), cases)
            by_case.append(with_minimum(cost, len(RECOMPUTES)) if layouts.is_mixed else cost)
        table = cls(model, scenario, layouts, kinds, kind_of_layer, tuple(by_case), case_idx)
        pools = (
            cls.from_layouts(
                model, workload, part.cluster, layouts, coefficients=coefficients, checkpoint=checkpoint, is_pool=True
            )
            for part in cluster.parts
        )
        return replace(table, device_pools=tuple(replace(pool, cluster_of_pools=cluster) for pool in pools))

    @property
    def workload(self) -> Workload:
        """Of the scenario."""
        return self.scenario.workload

    @property
    def cluster(self) -> ClusterSpec:
        """Of the scenario."""
        return self.scenario.cluster

    @property
    def stage_links(self) -> ClusterSpec:
        """The links between stages: those of the entire cluster."""
        return self.cluster_of_pools or self.cluster

    @cached_property
    def inputs(self) -> CostInputs:
        """Of the layouts, for what is evaluated for each of them."""
        return CostInputs(hidden_dim=self.model.hidden_dim, layouts=self.layouts, scenario=self.scenario)

    # Other tables from this one

    def evaluate(self, layouts: LayoutTable, cluster: ClusterSpec | None = None) -> CostTable:
        """Return the table of other layouts, or of another cluster, for the same model, workload and coefficients."""
        coefficients = self.scenario.coefficients
        return CostTable.from_layouts(
            self.model, self.workload, cluster or self.cluster, layouts, coefficients=coefficients
        )

    def with_layouts(self, layouts: LayoutTable, case_idx: IntArray | None = None) -> CostTable:
        """Return the same cases for other layouts; ``case_idx`` stands for the present one."""
        return replace(self, layouts=layouts, case_idx=self.case_idx if case_idx is None else case_idx, known=None)

    def select(self, rows: IntArray) -> CostTable:
        """Return the table of a subset of the layouts."""
        pools = tuple(pool.select(rows) for pool in self.device_pools)
        return replace(self.with_layouts(self.layouts.select(rows), self.case_idx[rows]), device_pools=pools)

    def compacted(self) -> CostTable:
        """Return the table with no other cases than its layouts have: sums over cases are quick where layouts are few."""
        num_cases = self.cases_by_option
        cases, case_idx = np.unique(self.case_idx % num_cases, return_inverse=True)
        rows = (np.arange(self._num_options)[:, None] * num_cases + cases).reshape(-1)
        return replace(
            self,
            by_case=tuple(cost.take(rows) for cost in self.by_case),
            case_idx=case_idx.reshape(-1) + self.case_idx // num_cases * len(cases),
            device_pools=tuple(pool.compacted() for pool in self.device_pools),
        )

    def with_budget(self, budget_bytes: int) -> CostTable:
        """Return the table where a plan may use only so much of each device, all as the weakest.

        Nothing but what fits differs, so that costs by kind are handed on.
        """
        options = self.by_option if self.layouts.is_mixed else ()
        by_option = tuple(option.with_budget(budget_bytes) for option in options)
        known = KnownCosts(self.by_kind, self.per_step.dp_exposed_by_kind, by_option)
        scenario = replace(self.scenario, cluster=self.cluster.with_budget(budget_bytes))
        return replace(self, scenario=scenario, device_pools=(), known=known)

    @cached_property
    def by_option(self) -> tuple[CostTable, ...]:
        """Mixed layouts as if all blocks recomputed the same, for each of RECOMPUTES."""
        if self.known is not None and self.known.by_option:
            return self.known.by_option
        recompute = self.layouts.recompute
        return tuple(
            self.with_layouts(
                self.layouts.replace(recompute=np.full_like(recompute, option)),
                self.case_idx + (option - recompute) * self.cases_by_option,
            )
            for option in range(len(RECOMPUTES))
        )

    @property
    def cases_by_option(self) -> int:
        """Cases under one recompute option: where layouts are mixed, ``by_case`` has them for each option and for the minimum."""
        return len(self.by_case[0].forward_s) // self._num_options

    @property
    def _num_options(self) -> int:
        return len(RECOMPUTES) + 1 if self.layouts.is_mixed else 1

    # Layers

    @cached_property
    def by_kind(self) -> tuple[LayerCost, ...]:
        """Everything a layer of each kind [K] costs, [N] each."""
        if self.known is not None:
            return self.known.by_kind
        return tuple(
            _at_ends(kind, with_data_parallel(cost.take(self.case_idx), kind, self.inputs), self.layouts)
            for kind, cost in zip(self.kinds, self.by_case, strict=True)
        )

    @cached_property
    def counts(self) -> IntArray:
        """Layers of each kind [K]."""
        return np.bincount(self.kind_of_layer, minlength=len(self.kinds))

    def total(self, name: str) -> FloatArray:
        """Return the sum of a LayerCost field other than collectives over data over all layers [N]."""
        total = sum(n * getattr(cost, name) for n, cost in zip(self.counts, self.by_case, strict=True))
        return np.asarray(total)[self.case_idx]

    def per_layer(self, name: str, idx: int) -> FloatArray:
        """Return a LayerCost field of every layer [L] under one layout."""
        values = np.array([getattr(cost, name)[idx] for cost in self.by_kind])
        return values[self.kind_of_layer]

    def prefix(self, name: str, idx: int) -> FloatArray:
        """Return the sums [L+1] of a LayerCost field over the layers before each one, under one layout; evaluated once."""
        if (name, idx) not in self._prefixes:
            self._prefixes[name, idx] = np.concatenate([[0.0], np.cumsum(self.per_layer(name, idx))])
        return self._prefixes[name, idx]

    @cached_property
    def _prefixes(self) -> dict[tuple[str, int], FloatArray]:
        return {}

    @cached_property
    def is_block(self) -> NDArray[np.bool_]:
        """Which layers [L] are blocks; the others are embedding, head and modules that predict further tokens."""
        return np.array([kind.is_block for kind in self.kinds])[self.kind_of_layer]

    @cached_property
    def head_idx(self) -> int:
        """Position of the head among the layers."""
        return next(idx for idx, layer in enumerate(self.model.iter_layers()) if layer.is_head)

    def of_blocks(self, name: str) -> FloatArray:
        """Return a LayerCost field of each kind of block and each case [blocks, cases]."""
        return np.array([getattr(c, name) for kind, c in zip(self.kinds, self.by_case, strict=True) if kind.is_block])

    @cached_property
    def block_params(self) -> FloatArray:
        """Parameters of the largest block per tensor-parallel rank [N]."""
        return self._of_largest_block("num_params")

    @cached_property
    def block_trained(self) -> FloatArray:
        """Trained parameters of the block with the most of them, per tensor-parallel rank [N]."""
        return self._of_largest_block("num_trained")

    def _of_largest_block(self, name: str) -> FloatArray:
        values = np.array([getattr(cost, name) for cost in self.by_case])
        blocks = self.kind_of_layer[self.is_block]
        if not self.layouts.half_blocks.any():
            return np.asarray(np.max(values[np.unique(blocks)], axis=0)[self.case_idx])
        halves = np.unique(blocks.reshape(-1, 2), axis=0)  # a unit of shards holds both
        return np.asarray(np.max(values[halves].sum(axis=1), axis=0)[self.case_idx])

    @cached_property
    def root_params(self) -> FloatArray:
        """Parameters of the largest unit outside the blocks per tensor-parallel rank [N]."""
        roots = [c.num_params for kind, c in zip(self.kinds, self.by_case, strict=True) if not kind.is_block]
        return np.asarray(np.max(roots, axis=0)[self.case_idx])

    @cached_property
    def working_bytes(self) -> FloatArray:
        """Largest working set of a layer [N]; of the first half of a block beside gradients that the second has made."""
        values = np.array([cost.working_bytes for cost in self.by_case])
        if self.layouts.half_blocks.any() and self.workload.engine_facts.memory is None:
            trained = np.array([cost.num_trained for cost in self.by_case])
            for first, second in np.unique(self.kind_of_layer[self.is_block].reshape(-1, 2), axis=0):
                values[first] += self.workload.compute_bytes * trained[second]
        return np.asarray(np.max(values, axis=0)[self.case_idx])

    @cached_property
    def split_working_bytes(self) -> FloatArray:
        """Largest working set of a layer in an input pass [N]."""
        return np.asarray(np.max([cost.split_working_bytes for cost in self.by_case], axis=0)[self.case_idx])

    @cached_property
    def block_activation_bytes(self) -> FloatArray:
        """Activations of the block, or half of one, with most [N]."""
        return np.asarray(np.max(self.of_blocks("activation_bytes"), axis=0)[self.case_idx])

    @cached_property
    def logits(self) -> FloatArray:
        """Logits of one micro-batch on one tensor-parallel rank [N]."""
        return np.asarray(self.inputs.tokens * self.model.head.vocab_size / self.layouts.tp)

    @cached_property
    def boundary_bytes(self) -> FloatArray:
        """Bytes of one micro-batch's hidden states between blocks on one rank [N]."""
        b = self.layouts
        unsharded = self.inputs.tokens * self.model.hidden_dim * float(self.workload.compute_bytes)
        return np.asarray(unsharded / np.where(b.sequence_parallel == 1, b.tp, 1))

    # Pipeline

    @cached_property
    def transfer_s(self) -> FloatArray:
        """Seconds one micro-batch's activations take to the next stage, once for each chunk (gradients back the same) [N]."""
        forward_s = (self.total("forward_s") + self.total("comm_forward_s")) / self.layouts.pp
        return transfer_s(self.boundary_bytes, forward_s, self.inputs, self.stage_links)

    @cached_property
    def per_step(self) -> PerStepCosts:
        """Costs that a step adds to the sum of its layers."""
        return PerStepCosts(self)

    # A vocabulary split over all stages

    @cached_property
    def vocabulary(self) -> VocabularyShare | None:
        """What each stage has of a split vocabulary [N], zero under layouts that have it at the ends; None if all do."""
        is_split = self.layouts.vocabulary == 1
        rows = np.flatnonzero(is_split)
        if not len(rows):
            return None
        embedding = next(kind for kind in self.kinds if isinstance(kind, Embedding))
        share_idx = np.zeros(len(self.layouts), dtype=np.int64)
        share_idx[rows] = np.arange(len(rows))
        return vocabulary_share(embedding, self.model.head, self.inputs.select(rows)).take(share_idx).masked(is_split)


def _at_ends(kind: Layer, cost: LayerCost, layouts: LayoutTable) -> LayerCost:
    """Return embedding and head as layers of the first and the last stage: zero where they are split over all stages."""
    if not isinstance(kind, Embedding | Head) or np.all(layouts.vocabulary == 0):
        return cost
    return cost.masked(layouts.vocabulary == 0)


def _cases(layouts: LayoutTable) -> tuple[LayoutTable, IntArray]:
    """Return the cases within layers and which one each layout is; of mixed layouts each case under all RECOMPUTES in turn."""
    if not layouts.is_mixed:
        rows, case_idx = layouts.within_layer
        return layouts.select(rows), case_idx
    rows, case_idx = layouts.replace(recompute=np.zeros_like(layouts.recompute)).within_layer
    options = np.repeat(np.arange(len(RECOMPUTES)), len(rows))
    cases = layouts.select(np.tile(rows, len(RECOMPUTES))).replace(recompute=options)
    return cases, case_idx + layouts.recompute * len(rows)


def is_aligned(costs: CostTable) -> NDArray[np.bool_]:
    """Return whether every stage of a layout lies on one device pool of the cluster [N]; never where all nodes are alike.

    Other schedules than gpipe and 1f1b, model chunks and a vocabulary split over all stages are costed as the weakest.
    """
    b = costs.layouts
    aligned = ~b.schedule_fact("splits_backward")
    aligned &= (b.recompute < len(RECOMPUTES)) & (b.vocabulary == 0) & (b.num_model_chunks == 1)
    aligned &= bool(costs.device_pools)
    for pool in costs.device_pools:
        aligned &= pool.cluster.num_devices % b.stage_ranks == 0
    return aligned


def stages_of_pools(costs: CostTable) -> IntArray:
    """Return the stages that each device pool runs under every layout [G, N], rounded down where the layout is not aligned."""
    return np.array([pool.cluster.num_devices // costs.layouts.stage_ranks for pool in costs.device_pools])
