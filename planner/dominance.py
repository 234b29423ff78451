"""What is left out of a space because another layout of it cannot be worse.

Ways to split cp into a ring and an exchange (cp_ulysses) keep the same bytes and send the same gradients and stage transfers:
all that differs is what context parallelism adds to attention. A split is left out where another one of the same tp and cp adds
no more seconds in either pass and no more dispatches of the host, for every kind of attention and the same micro-batch: with the
same cut into stages a step does not get faster when its layers take longer, because every start waits for what ends before it and
communication that hides beside a layer saves at most what that takes (overlap.pair_s).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..cost_models.layer_costs import context_of_attention
from ..cost_models.layouts import FloatArray, IntArray, LayoutBatch, not_searched
from ..cost_models.setting import Setting
from ..schema import ClusterSpec, ModelSpec, Workload
from ..schema.layout import NUMBERS


def exchanges_worth_trying(
    columns: dict[str, IntArray],
    micro_batch_sizes: Sequence[int],
    model: ModelSpec,
    workload: Workload,
    cluster: ClusterSpec,
) -> NDArray[np.bool_]:
    """Whether no other split of the same cp over the same tp is as good in everything [N, sizes]; the first of equal ones is."""
    keep = np.ones((len(columns["tp"]), len(micro_batch_sizes)), dtype=bool)
    open_rows = np.flatnonzero(columns["cp"] > 1)
    # On devices or nodes that differ, the better split on one of them may be the worse one on another.
    differs = cluster.is_mixed or cluster.bandwidth_matrix is not None
    if workload.attention != "flash" or not len(open_rows) or differs:
        return keep
    chosen = {name: columns[name][open_rows] for name in ("tp", "cp", "cp_ulysses")}
    added = _added(chosen, micro_batch_sizes, model, workload, cluster)
    groups = np.unique(np.stack([chosen["tp"], chosen["cp"]]), axis=1, return_inverse=True)[1].reshape(-1)
    for group in range(int(groups.max()) + 1):
        rows = np.flatnonzero(groups == group)
        no_worse = np.all(added[rows][:, None] <= added[rows][None, :], axis=-1)  # [i, j, size]: i in place of j
        equal = no_worse & no_worse.transpose(1, 0, 2)
        before = np.arange(len(rows))[:, None] < np.arange(len(rows))[None, :]
        keep[open_rows[rows]] = ~np.any(no_worse & (~equal | before[:, :, None]), axis=0)
    return keep


def _added(
    columns: dict[str, IntArray],
    micro_batch_sizes: Sequence[int],
    model: ModelSpec,
    workload: Workload,
    cluster: ClusterSpec,
) -> FloatArray:
    """Seconds forward and backward and dispatches of every split [N, sizes, 3 x kinds]."""
    size, repeats = len(columns["tp"]), len(micro_batch_sizes)
    ones = np.ones(size * repeats, dtype=np.int64)
    crossed = {name: np.repeat(column, repeats) for name, column in columns.items()}
    crossed["micro_batch_size"] = np.tile(np.asarray(micro_batch_sizes, dtype=np.int64), size)
    zeros: dict[str, Any] = dict.fromkeys(("zero_stage", "sequence_parallel", "recompute", "schedule"), 0 * ones)
    arrays: dict[str, Any] = dict.fromkeys(NUMBERS, ones) | zeros | crossed | not_searched(len(ones))
    batch = LayoutBatch(**arrays, num_microbatches=ones)
    setting = Setting(hidden_dim=model.hidden_dim, batch=batch, workload=workload, cluster=cluster)
    parts = []
    for attention in dict.fromkeys(block.attention for block, _ in model.block_runs):
        block = next(block for block, _ in model.block_runs if block.attention == attention)
        added = context_of_attention(block, setting)
        forward, backward = added.forward_s + added.exposed_forward_s, added.backward_s + added.exposed_backward_s
        parts += [values.reshape(size, repeats) for values in (forward, backward, added.dispatches)]
    return np.stack(parts, axis=-1)
