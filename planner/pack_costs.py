"""What sequences cost in packs that go through the pipeline of a layout, whose layers are cut into stages already.

Seconds are those of the layers of each stage over micro-batches of n equal sequences, n such that a mean batch makes
`_PACKS_PER_RANK` packs for each rank of a pipeline, at lengths from the shortest to the longest, less what a pack takes whatever is
in it (planner/batch.py has the same of groups). What differs between packs is taken to differ alike on every stage: SECONDS are the
busiest rank's, and forward, backward and weight seconds of each stage those of packs of mean sequences, as parts of what the
busiest rank takes for one.

Transfers between stages are part of the passes. What a step has besides them (gathers, reductions, the update) comes once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..cost_models.pipeline.replay import makespan_s
from ..cost_models.stage.contents import RecomputeCosts, pipeline_shape
from ..cost_models.stage.step import estimate_step, pass_seconds
from ..cost_models.stage.table import CostTable
from ..schema import ClusterSpec, ConfigError, Layout, ModelSpec, TrainingEstimate, Workload
from ..schema.batch import LengthCosts, PipelineCosts, why_no_packs
from ..schema.layers import SoftmaxAttention
from ..schema.layout_table import RECOMPUTES, LayoutTable
from ..schema.stages import Stage
from ..schema.units import FloatArray

_PACKS_PER_RANK = 4
"""Packs over the ranks of a pipeline that a batch is taken to have: the pipeline is then idle for a fifth of the time."""


class StageSeconds(NamedTuple):
    """Seconds of a micro-batch on every stage [S], and on the busiest rank."""

    forward: FloatArray
    backward: FloatArray
    weight: FloatArray
    busiest: float


@dataclass(frozen=True)
class PackCosts:
    """Costs of a layout with its stages at other lengths.

    Raises:
        ConfigError: the schedule is made for one number of micro-batches.
    """

    model: ModelSpec
    cluster: ClusterSpec
    workload: Workload
    layout: Layout
    stages: Sequence[Stage]

    def __post_init__(self) -> None:
        if why := why_no_packs(self.layout.schedule):
            raise ConfigError(
                "the plan's pipeline cannot run batches of unequal lengths", details=why, help="--fix schedule=1f1b"
            )

    @property
    def num_ranks(self) -> int:
        """Return the ranks of a stage that share a batch."""
        return int(self.layout.dp * self.layout.cp)

    @property
    def multiple(self) -> int:
        """Return what tokens of a sequence are a multiple of, so that the ranks of cp and tp share them."""
        return int(2 * self.layout.cp * self.layout.tp)

    @cached_property
    def num_blocks(self) -> int:
        """Return the blocks with attention of the rank that has most."""
        layers = list(self.model.staged(half_blocks=self.layout.half_blocks).iter_layers())
        attends = [isinstance(getattr(layer, "attention", None), SoftmaxAttention) for layer in layers]
        counts = [sum(attends[idx] for idx in stage.layer_idxs) for stage in self.stages]
        return int(np.bincount(self._ranks, counts).max())

    @cached_property
    def _ranks(self) -> tuple[int, ...]:
        return pipeline_shape(self._table(self.multiple, 1), 0).rank_of_stage

    @property
    def _boundaries(self) -> tuple[int, ...]:
        last = self.stages[-1]
        return (*(stage.first_layer_idx for stage in self.stages), last.first_layer_idx + last.num_layers)

    def _table(self, seq_len: int, micro_batch_size: int, packs_per_rank: int = 2) -> CostTable:
        """Return the layout as the only row, with micro-batches of so many sequences, so many for each rank of a pipeline."""
        layout = self.layout.replace(micro_batch_size=micro_batch_size)
        batch = layout.dp * micro_batch_size * packs_per_rank * layout.pp
        workload = self.workload.replace(seq_len=seq_len, global_batch_size=batch, lengths=None)
        costs = CostTable.from_layouts(self.model, workload, self.cluster, LayoutTable.from_layouts([layout], batch))
        if layout.recompute != "mixed":
            return costs
        options = [RECOMPUTES.index(stage.recompute_of(idx)) for stage in self.stages for idx in stage.layer_idxs]
        return RecomputeCosts(costs).assigned(0, options)

    def estimate(self, seq_len: int) -> TrainingEstimate:
        """Return the estimate with packs of one sequence."""
        return estimate_step(self._table(seq_len, 1), 0, self._boundaries)

    def seconds(self, length: int, count: int) -> StageSeconds:
        """Return the seconds of a micro-batch of equal sequences."""
        return self._seconds(self._table(length, count))

    def _seconds(self, costs: CostTable) -> StageSeconds:
        passes = pass_seconds(costs, 0, self._boundaries)
        each_way_s = float(costs.transfer_s[0]) / self.layout.num_model_chunks
        forward, backward = passes.forward + each_way_s, passes.backward - passes.weight + each_way_s
        of_ranks = np.bincount(self._ranks, forward + backward + passes.weight, self.layout.pp)
        return StageSeconds(forward, backward, passes.weight, float(of_ranks.max()))

    def outside_s(self, length: int, count: int) -> tuple[float, float]:
        """Return what a step of such micro-batches takes besides its passes: for each micro-batch (sums of gradients), and once."""
        few, many = (self._outside_s(self._table(length, count, packs)) for packs in (2, 4))
        each_s = max((many - few) / (2 * self.layout.pp), 0.0)
        return each_s, max(few - 2 * self.layout.pp * each_s, 0.0)

    def _outside_s(self, costs: CostTable) -> float:
        forward, backward, weight, _ = self._seconds(costs)
        passes_s = makespan_s(pipeline_shape(costs, 0), forward, backward, weight)
        return max(estimate_step(costs, 0, self._boundaries).step_time_s - passes_s, 0.0)


def pack_length_costs(costs: PackCosts, grid: Sequence[int], *, tokens_per_rank: int, document_s: float) -> LengthCosts:
    """Return what sequences of the lengths of a grid cost in packs of at most so many tokens on a rank.

    Args:
        document_s: seconds in which the host dispatches the attention of one document on the busiest rank.
    """
    layout = costs.layout
    capacity, packs = tokens_per_rank * layout.cp, _PACKS_PER_RANK * layout.pp
    filled = max(min(capacity / 2, costs.workload.tokens_per_step / layout.dp / packs), 2.0 * grid[0])

    def of(length: int, tokens: float) -> tuple[StageSeconds, int]:
        count = max(round(tokens / length), 1)
        return costs.seconds(length, count), count

    (shortest, count), (half, half_count) = of(grid[0], filled), of(grid[0], filled / 2)
    each_s = (shortest.busiest - half.busiest) / max(count - half_count, 1)
    fixed_s = max(shortest.busiest - count * each_s, 0.0)
    outside_each_s, step_s = costs.outside_s(grid[0], count)
    token_s = []
    for length in grid:
        seconds, count = of(length, filled)
        token_s.append(max((seconds.busiest - fixed_s) / count + document_s, 1e-12) / length)
    mean = min(max(costs.workload.tokens_per_step // costs.workload.global_batch_size, grid[0]), grid[-1])
    mean = -(-mean // costs.multiple) * costs.multiple
    parts, _ = of(mean, filled)
    normal = (tuple((values / parts.busiest).tolist()) for values in parts[:3])
    forward_s, backward_s, weight_s = normal
    return LengthCosts(
        num_ranks=costs.num_ranks,
        tokens_per_rank=tokens_per_rank,
        fixed_s=fixed_s + outside_each_s,
        step_s=step_s,
        waits=False,
        lengths=tuple(grid),
        token_s=(tuple(token_s),),
        pipeline=PipelineCosts(
            schedule=layout.schedule, pp=layout.pp, num_model_chunks=layout.num_model_chunks, cp=layout.cp,
            forward_s=forward_s, backward_s=backward_s, weight_s=weight_s,
        ),
    )  # fmt: skip
