"""Embedding and head split over all stages of a pipeline: what every stage gets of them.

Each stage holds a pp-th of the vocabulary and makes the logits of every micro-batch for it (arXiv:2411.05288). The last block's
output goes to all stages, sums of exponentials and the gradient of that output are reduced over them (Algorithm 2: one barrier),
embeddings are summed where the first block is and their gradients sent to all:

    T x D to all + T x D reduced + 2 T fp32 all-reduced, output;    T x D reduced + T x D to all, input

for T tokens, D wide. All of it runs with the passes of other micro-batches, one unit of the schedule later; what outlasts a
stage's passes of a micro-batch is exposed. The barrier costs one more micro-batch in flight, and logits and hidden states of two
are alive.
Tied weights need no copy and no sum: a stage holds the same rows of both. Every stage is longer by the same seconds c:

    step = that of the blocks alone + (m + (pp - 1) / v) c
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ...schema.layers import Embedding, Head
from ...schema.units import FloatArray, IntArray
from ..hardware.collectives import collective_s
from .layer import LayerCost, with_data_parallel, within_layer_cost
from .operators import CostInputs

ALIVE = 2
"""Micro-batches whose logits and last hidden states a stage holds: one before the barrier, one after it."""

MORE_IN_FLIGHT = 1
"""Micro-batches that a stage holds more of because of the barrier (arXiv:2411.05288 section 4: p + 1 with Algorithm 2)."""


@dataclass(frozen=True, kw_only=True)
class VocabularyShare:
    """What each stage has of the vocabulary's layers [N]; zero where they are at the ends.

    ``sent_s`` is the communication over the stages for one micro-batch, forward and backward; ``logits`` are those of the
    micro-batches whose logits are alive, on one tensor-parallel rank.
    """

    embedding: LayerCost
    head: LayerCost
    sent_s: FloatArray
    logits: FloatArray

    def total(self, name: str) -> FloatArray:
        """Return a LayerCost field of both shares [N]."""
        return np.asarray(getattr(self.embedding, name) + getattr(self.head, name))

    def take(self, rows: IntArray) -> VocabularyShare:
        """Return the shares under a subset of the layouts."""
        layers = {"embedding": self.embedding.take(rows), "head": self.head.take(rows)}
        return VocabularyShare(**layers, sent_s=self.sent_s[rows], logits=self.logits[rows])

    def masked(self, keep: NDArray[np.bool_]) -> VocabularyShare:
        """Return zero shares where not ``keep`` [N]."""
        sent_s, logits = np.where(keep, self.sent_s, 0.0), np.where(keep, self.logits, 0.0)
        layers = {"embedding": self.embedding.masked(keep), "head": self.head.masked(keep)}
        return VocabularyShare(**layers, sent_s=sent_s, logits=logits)

    @property
    def waiting_bytes(self) -> FloatArray:
        """Activations of the head's share that wait for the barrier or follow it [N]."""
        return np.asarray(ALIVE * self.head.activation_bytes)


def vocabulary_share(embedding: Embedding, head: Head, inputs: CostInputs) -> VocabularyShare:
    """Return the shares under every layout [N] of inputs whose vocabularies are split."""
    layouts, by_pp, logits = inputs.layouts, [], np.zeros(len(inputs.layouts))
    for pp in np.unique(layouts.pp):
        rows = np.flatnonzero(layouts.pp == pp)
        num_rows = -(-head.vocab_size // int(pp))
        subset = inputs.select(rows)
        costs = [_share(layer.replace(vocab_size=num_rows), subset) for layer in (embedding, head)]
        logits[rows] = ALIVE * subset.tokens * num_rows / subset.layouts.tp
        by_pp.append((rows, costs))
    order = np.argsort(np.concatenate([rows for rows, _ in by_pp]), kind="stable")
    shares = [LayerCost.concatenate([costs[end] for _, costs in by_pp]).take(order) for end in (0, 1)]
    return VocabularyShare(embedding=shares[0], head=shares[1], sent_s=_sent_s(inputs), logits=logits)


def _share(layer: Embedding | Head, inputs: CostInputs) -> LayerCost:
    cost = within_layer_cost(layer, inputs)
    if isinstance(layer, Head) and layer.tied:
        copy = layer.vocab_size * inputs.hidden_dim / inputs.layouts.tp
        trained = cost.num_trained if inputs.workload.adapters is not None else cost.num_trained - copy
        cost = replace(cost, num_params=cost.num_params - copy, num_trained=trained)
    return with_data_parallel(cost, layer, inputs)


def _sent_s(inputs: CostInputs) -> FloatArray:
    """Return the seconds of a micro-batch's collectives over the stages [N]."""
    b, cluster = inputs.layouts, inputs.cluster
    hidden = np.asarray(inputs.hidden_bytes / np.where(b.sequence_parallel == 1, b.tp, 1), dtype=np.float64)
    to_all = collective_s("all_gather", hidden, b.pp, b.stage_ranks, cluster)
    reduced = collective_s("reduce_scatter", hidden, b.pp, b.stage_ranks, cluster)
    sums = collective_s("all_reduce", np.asarray(8.0 * inputs.tokens, dtype=np.float64), b.pp, b.stage_ranks, cluster)
    return np.asarray(2 * (to_all + reduced) + sums)
