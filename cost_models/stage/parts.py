"""What the compute of a step is spent on: the parts of the layers of the busiest stage, added up over its micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...schema.layers import Embedding
from ...schema.layout_table import RECOMPUTES
from ...schema.units import FloatArray, IntArray
from ..layer.layer import LayerCost
from ..layer.operators import CostInputs, Layer
from ..layer.parts import ComputeParts, layer_parts
from .contents import pipeline_shape
from .step import busiest_rank, copies_and_collectives, pass_seconds, ranks_of_stages, transfer_of_stages
from .table import CostTable


def compute_parts(
    costs: CostTable, idx: int, boundaries: Sequence[int], pool_of_stage: IntArray | None = None
) -> ComputeParts:
    """Return the parts of `TimeBreakdown.compute` of layout ``idx``, as `estimate_step` costs it; they sum to it."""
    shape, first = pipeline_shape(costs, idx), np.array(boundaries[:-1])
    ranks = ranks_of_stages(shape, len(first))
    num_ranks = int(ranks.max()) + 1
    passes = pass_seconds(costs, idx, boundaries, pool_of_stage)
    if pool_of_stage is None:
        transfer_s, table = np.full(num_ranks, 2 * costs.transfer_s[idx]), costs
    else:
        transfer_s = transfer_of_stages(costs, idx, pool_of_stage)
    busiest = busiest_rank(passes, ranks, transfer_s)
    if pool_of_stage is not None:
        table = costs.device_pools[int(pool_of_stage[busiest])]
    layers = [
        kind
        for stage in np.flatnonzero(ranks == busiest).tolist()
        for kind in table.kind_of_layer[boundaries[stage] : boundaries[stage + 1]]
    ]
    kinds, counts = np.unique(layers, return_counts=True)
    parts = [_of_kind(table, idx, int(kind)) for kind in kinds]
    total = np.asarray(counts, dtype=np.float64) @ np.array(parts) + _of_vocabulary(table, idx)
    copied_s, exposed_s = (np.bincount(ranks, seconds, num_ranks) for seconds in (passes.copied, passes.exposed))
    copied, _ = copies_and_collectives(np.asarray(copied_s, np.float64), np.asarray(exposed_s, np.float64))
    return ComputeParts(*(shape.num_microbatches * total).tolist())._replace(parameter_copies=copied)


def _of_kind(table: CostTable, idx: int, kind: int) -> FloatArray:
    """Return the parts of one layer of a kind, as an array of them; where blocks recompute differently a kind has an option."""
    row = np.array([idx])
    layouts = table.layouts.select(row)
    if table.option_of_layer is not None:
        option = kind // (len(table.kinds) // len(RECOMPUTES))
        layouts = layouts.replace(recompute=np.full_like(layouts.recompute, option))
    inputs = CostInputs(hidden_dim=table.model.hidden_dim, layouts=layouts, scenario=table.scenario)
    cost = table.by_kind[kind].take(row)
    if not cost.forward_s.any():  # an embedding or a head that is split over all stages
        return np.zeros(len(ComputeParts._fields))
    return _of_layer(table.kinds[kind], inputs, cost)


def _of_layer(layer: Layer, inputs: CostInputs, cost: LayerCost) -> FloatArray:
    return np.array([np.sum(seconds) for seconds in layer_parts(layer, inputs, cost)])


def _of_vocabulary(table: CostTable, idx: int) -> FloatArray:
    """Return the parts of a stage's share of a split vocabulary."""
    layouts = table.layouts.select(np.array([idx]))
    if table.vocabulary is None or not layouts.vocabulary[0]:
        return np.zeros(len(ComputeParts._fields))
    share = table.vocabulary.take(np.array([idx]))
    inputs = CostInputs(hidden_dim=table.model.hidden_dim, layouts=layouts, scenario=table.scenario)
    embedding = next(kind for kind in table.kinds if isinstance(kind, Embedding))
    num_rows = -(-table.model.head.vocab_size // int(layouts.pp[0]))
    layers = ((embedding, share.embedding), (table.model.head, share.head))
    return sum(
        (_of_layer(layer.replace(vocab_size=num_rows), inputs, cost) for layer, cost in layers),
        start=np.zeros(len(ComputeParts._fields)),
    )
