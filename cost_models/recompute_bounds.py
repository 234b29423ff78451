"""Least seconds of mixed layouts, as arrays: what recompute costs at least to bring balanced stages within memory.

Were the stages balanced, a layer of kind k under option o would add

    value[k,o] = f busy[k,o] + exposed[k,o] / pp

to a step, f being that of a step over the work of one micro-batch (pipeline.lower_bound_s), and the largest of pp stages is at
least their mean. All stages together may keep A bytes for each micro-batch: a device holds at least the fewest micro-batches in
flight, and memory is convex in what a stage holds. For every price of a byte,

    step >= sum_k n_k min_o (value[k,o] + price kept[k,o]) - price A

by Lagrangian duality; the best price is among those at which some kind changes its option.
"""

from __future__ import annotations

import itertools

import numpy as np

from .layouts import FloatArray
from .option_costs import OptionCosts


def least_step_s(options: OptionCosts, per_second: FloatArray, kept_bytes: FloatArray) -> FloatArray:
    """Admissible bound [N] on what the layers add to a step.

    Args:
        options: mixed layouts [N].
        per_second: seconds of a step for one of all layers' work on one micro-batch, spread evenly [N].
        kept_bytes: activations that all stages together may keep for each micro-batch [N].
    """
    b, counts = options.least.batch, options.least.counts.astype(np.float64)
    value, kept = [], []
    for costs in options.under:
        exposed = costs.dp_exposed_by_kind
        value.append(
            [per_second * cost.busy_s[costs.like] + e / b.pp for cost, e in zip(costs.inside, exposed, strict=True)]
        )
        kept.append([cost.activation_bytes[costs.like] for cost in costs.inside])
    values, bytes_ = np.array(value), np.array(kept)  # [O, K, N]
    with_choice = np.flatnonzero(options.has_choice)
    best = _at_price(values, bytes_, counts, np.zeros(len(b)), kept_bytes)
    room = np.maximum(kept_bytes, 0.0)
    for k in with_choice:
        for some, other in itertools.combinations(range(len(values)), 2):
            saved = bytes_[some, k] - bytes_[other, k]
            price = np.maximum((values[other, k] - values[some, k]) / np.where(saved == 0, np.inf, saved), 0.0)
            best = np.maximum(best, _at_price(values, bytes_, counts, price, room))
    return best


def _at_price(
    values: FloatArray, kept: FloatArray, counts: FloatArray, price: FloatArray, room: FloatArray
) -> FloatArray:
    cheapest = np.min(values + price * kept, axis=0)
    return np.asarray(np.tensordot(counts, cheapest, axes=1) - price * np.where(price > 0, room, 0.0))
