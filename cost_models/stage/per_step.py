"""What a step adds to the sum of its layers: collectives over data, copies and sums of gradients, waits of stages, the update."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ...schema.units import FloatArray
from ..hardware.collectives import collective_s
from ..hardware.machine import device_rates, host_costs
from ..layer.data import (
    copied_bytes_per_param,
    exposed_collectives_s,
    exposed_gather_s,
    filling_bytes_per_param,
    gathers_in_passes,
    has_copies,
    passes_per_step,
    summed_bytes_per_param,
    summed_s,
    update_s,
)
from ..layer.gradient_sums import sums_of_weights
from ..layer.layer import LayerCost
from ..layer.operators import Layer
from ..layer.vocabulary import VocabularyShare

if TYPE_CHECKING:
    from .table import CostTable


@dataclass(frozen=True)
class PerStepCosts:
    """What is not proportional to the micro-batches of a step, under every layout [N] of a table."""

    costs: CostTable

    @cached_property
    def _overlap(self) -> float:
        """Part of the compute time under which data-parallel communication hides."""
        return float(self.costs.scenario.coefficients["overlap"][self.costs.cluster.weakest_device.backend.collectives])

    def _unhidden_s(self, cost: LayerCost) -> FloatArray:
        """Return what of gathering and reducing one layer counts in a step if nothing hides it [N]."""
        passes = passes_per_step(self.costs.layouts, self.costs.workload)
        return np.asarray(self._overlap * (passes.gathers * cost.gather_s + passes.reductions * cost.reduce_s))

    def _exposed_s(self, kind: Layer, cost: LayerCost) -> FloatArray:
        """Return what gathering and reducing one layer adds to a step [N]."""
        return exposed_collectives_s(cost, self._overlap, self.costs.inputs, is_head=kind.is_head)

    @cached_property
    def _copied_s_per_param(self) -> tuple[FloatArray, FloatArray]:
        """Seconds of the copies and sums that all micro-batches make of a parameter [N], and what one of an expert takes more."""
        of_any, of_experts = (
            copied_bytes_per_param(self.costs.layouts, self.costs.workload, of_experts=is_expert)
            for is_expert in (False, True)
        )
        return of_any / self._copies_per_s, (of_experts - of_any) / self._copies_per_s

    @property
    def _copies_per_s(self) -> float:
        """Bytes a second of copies and sums.

        On a CPU the bandwidth of plain copies: AdamW, which writes what it has read, streams twice as much.
        """
        streams = device_rates(self.costs.scenario).update_bytes_per_s
        return min(streams, self.costs.cluster.weakest_device.memory_bandwidth_bytes_per_s)

    def _sums_s(self, cost: LayerCost) -> tuple[FloatArray, FloatArray]:
        """Return the seconds of a layer's sums of gradients in a backward pass [N], and what of them the pass is longer."""
        seconds = (
            summed_bytes_per_param(self.costs.layouts, self.costs.workload) / self._copies_per_s * cost.num_trained
        )
        return seconds, summed_s(seconds, cost, self.costs.inputs)

    def _weights_summed_s(self, kind: Layer, cost: LayerCost) -> FloatArray:
        """Return how much longer sums of weights' gradients over tp make a backward pass that reduces [N]."""
        inputs = self.costs.inputs
        sums, is_made = sums_of_weights(kind, inputs), has_copies(inputs.layouts, inputs.workload)
        host_s = sums.number * host_costs(inputs.scenario).collective_s
        return np.asarray(is_made * summed_s(sums.seconds, cost, inputs, host_s))

    def _copied_s(self, cost: LayerCost) -> FloatArray:
        """Return the seconds of the copies and sums of a layer's parameters in a step [N]."""
        (of_any, more), (sums_s, added_s) = self._copied_s_per_param, self._sums_s(cost)
        hidden_s = (self.costs.layouts.num_microbatches - 1) * (sums_s - added_s)
        return np.asarray(of_any * cost.num_trained + more * cost.expert_params - hidden_s)

    @cached_property
    def _copied_by_kind(self) -> tuple[FloatArray, ...]:
        return tuple(self._copied_s(cost) for cost in self.costs.by_kind)

    @cached_property
    def dp_exposed_by_kind(self) -> tuple[FloatArray, ...]:
        """Exposed gathering and reduction of one layer over the entire step and the copies that serve them, by kind [K] of [N]."""
        if self.costs.known is not None:
            return self.costs.known.dp_exposed_by_kind
        reductions = passes_per_step(self.costs.layouts, self.costs.workload).reductions
        return tuple(
            self._exposed_s(kind, cost) + cost.levels_s + copied_s + reductions * self._weights_summed_s(kind, cost)
            for kind, cost, copied_s in zip(self.costs.kinds, self.costs.by_kind, self._copied_by_kind, strict=True)
        )

    def copied_s(self, idx: int) -> FloatArray:
        """Return, of each layer's [L] exposed seconds under one layout, the copies and sums, which do not communicate."""
        return np.array([seconds[idx] for seconds in self._copied_by_kind])[self.costs.kind_of_layer]

    @cached_property
    def dp_edges_s(self) -> FloatArray:
        """What nothing can hide [N]: the first gather and last reduction as far as not exposed already, tied copies' gradients.

        Tokens on their way to experts in the first forward and the last backward pass, which run beside no other micro-batch, and
        `filling_s`.
        """
        first = self.costs.by_kind[self.costs.kind_of_layer[0]]
        exposed = self._exposed_s(self.costs.kinds[self.costs.kind_of_layer[0]], first)
        edges = np.maximum(self._unhidden_s(first) - exposed, 0.0)
        edges = edges + self.costs.total("ep_hidden_s") + self.filling_s
        if (
            not self.costs.model.tie_embeddings or self.costs.workload.adapters is not None
        ):  # frozen copies have no gradients
            return np.asarray(edges)
        b = self.costs.layouts
        share = 4.0 * self.costs.model.vocab_size * self.costs.model.hidden_dim / b.tp / b.num_gradient_shards
        distance = np.maximum(b.stage_ranks * (b.pp - 1), 1)
        both = collective_s("all_reduce", share, np.full_like(b.pp, 2), distance, self.costs.stage_links)
        # Under a split vocabulary a stage has the same rows of both, once.
        return np.asarray(edges + np.where((b.pp > 1) & (b.vocabulary == 0), both, 0.0))

    @cached_property
    def filling_s(self) -> FloatArray:
        """Seconds that stages wait for each other while a pipeline fills and drains, besides the passes of the layers [N].

        In all stages but a rank's own: sums of gradients, part of an undivided backward pass, and what gathers add to a forward
        pass (`gathers_in_passes`), of which the first hides behind no layer. Of a schedule's chunks the first.
        """
        b, workload = self.costs.layouts, self.costs.workload
        if not np.any(b.pp > 1):
            return np.zeros(len(b))
        of_any, of_experts = (
            filling_bytes_per_param(b, workload, of_experts=is_expert) / self._copies_per_s
            for is_expert in (False, True)
        )
        gathers, undivided = gathers_in_passes(b, workload), ~b.schedule_fact("splits_backward")
        seconds, hidden = np.zeros(len(b)), np.zeros(len(b))
        for n, cost in zip(self.costs.counts, self.costs.by_kind, strict=True):
            exposed = exposed_gather_s(cost, self._overlap, self.costs.inputs)
            copied = of_any * cost.num_trained + (of_experts - of_any) * cost.expert_params
            seconds += n * (copied + gathers * exposed + undivided * self._sums_s(cost)[1])
            hidden += n * gathers * (cost.gather_s - exposed)
        num_units = len(self.costs.kind_of_layer) / np.where(b.half_blocks == 1, 2, 1)
        return np.asarray((b.pp - 1) * (seconds / b.pp / b.num_model_chunks + hidden / num_units))

    def update_s(
        self, trained: FloatArray | float, expert_params: FloatArray | float, idx: int | slice = slice(None)
    ) -> FloatArray:
        """Return the seconds of the optimizer on a stage, given parameters per tensor-parallel rank, under layouts ``idx``."""
        return update_s(trained, expert_params, self.costs.inputs, idx)

    def once_per_layer_s(self, idx: int) -> FloatArray:
        """Return what each layer [L] adds to a step once, not per micro-batch: exposed communication and its update."""
        return self.exposed_s(idx) + self.layer_updates_s(idx)

    def exposed_s(self, idx: int) -> FloatArray:
        """Return the exposed communication over data of each layer [L] under one layout."""
        return np.array([seconds[idx] for seconds in self.dp_exposed_by_kind])[self.costs.kind_of_layer]

    def layer_updates_s(self, idx: int) -> FloatArray:
        """Return the seconds of the optimizer on each layer [L] under one layout."""
        return self.update_s(self.costs.per_layer("num_trained", idx), self.costs.per_layer("expert_params", idx), idx)

    def vocabulary_seconds(self, share: VocabularyShare) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return what a split vocabulary adds [N]: to one micro-batch, to a step, and to the collectives over data of a step.

        To a micro-batch what is sent, as far as it outlasts a stage's own passes, which is part of the second; to collectives over
        data those of each stage's share, first gather and last reduction included.
        """
        b = self.costs.layouts
        hidden_s = self.costs.total("busy_s") / b.pp if self.costs.workload.overlaps else 0.0
        sent_s = np.maximum(share.sent_s - hidden_s, 0.0)
        step_s = (b.num_microbatches + (b.pp - 1) / b.num_model_chunks) * (share.total("busy_s") + sent_s)
        dp_s = np.zeros(len(b))
        for kind in self.costs.kinds:
            if kind.is_embedding or kind.is_head:
                cost = share.embedding if kind.is_embedding else share.head
                exposed = np.maximum(self._exposed_s(kind, cost), self._unhidden_s(cost))
                dp_s = dp_s + exposed + cost.levels_s + self._copied_s(cost)
        return np.asarray(sent_s), np.asarray(step_s), np.where(b.vocabulary == 1, dp_s, 0.0)
