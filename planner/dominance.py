"""What is left out of a space because another layout of it cannot be worse.

Ways to split cp into a ring and an exchange (cp_ulysses) keep the same bytes and send the same gradients and stage transfers:
all that differs is what context parallelism adds to attention. A split is left out where another one of the same tp and cp adds
no more seconds in either pass and no more dispatches of the host, for every kind of attention and the same micro-batch: with the
same cut into stages a step does not get faster when its layers take longer, because every start waits for what ends before it and
communication that hides beside a layer saves at most what that takes (overlap.pair_s).

Sequence parallelism never takes more memory, sends no more between stages and leaves less to do beside products, but its two
collectives in place of one may take longer, mostly where messages are small. Layouts without it are left out where no stage has
more than SAME_SECONDS_FRACTION less work for a micro-batch. A step follows the work of its stages; how that is divided between
passes shows where a pipeline fills and drains, so this is measured, not a theorem.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..cost_models.coefficients import Scenario
from ..cost_models.layer.layer import context_of_attention
from ..cost_models.layer.operators import CostInputs
from ..cost_models.stage.table import CostTable
from ..schema import ClusterSpec, ModelSpec, Workload
from ..schema.layout_table import RECOMPUTES, LayoutTable, distinct_rows
from ..schema.units import FloatArray, IntArray

SAME_SECONDS_FRACTION = 0.01
"""Layouts this close are equal within any model's error (choose.SAME_TIME_FRACTION): the one that needs less memory stays."""


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
    crossed = {name: np.repeat(column, repeats) for name, column in columns.items()}
    crossed["micro_batch_size"] = np.tile(np.asarray(micro_batch_sizes, dtype=np.int64), size)
    batch = LayoutTable.filled(size * repeats, **crossed)
    setting = CostInputs(hidden_dim=model.hidden_dim, layouts=batch, scenario=Scenario.build(workload, cluster))
    parts = []
    for attention in dict.fromkeys(block.attention for block, _ in model.block_runs):
        block = next(block for block, _ in model.block_runs if block.attention == attention)
        added = context_of_attention(block, setting)
        forward, backward = added.forward_s + added.exposed_forward_s, added.backward_s + added.exposed_backward_s
        parts += [values.reshape(size, repeats) for values in (forward, backward, added.dispatches)]
    return np.stack(parts, axis=-1)


def worth_whole_sequence(
    columns: dict[str, IntArray], model: ModelSpec, workload: Workload, cluster: ClusterSpec
) -> NDArray[np.bool_]:
    """Whether layouts with tp > 1 may gain more than SAME_SECONDS_FRACTION by leaving sequence parallelism out [N].

    They may not where no part of a stage (`_work`) gains more, whatever is recomputed.

    Args:
        columns: degrees [N], their micro-batch sizes and ``dp``.
        model, workload, cluster: what they train and where.
    """
    if (
        cluster.is_mixed or cluster.bandwidth_matrix is not None
    ):  # what holds of one device or node may not hold of another
        return np.ones(len(columns["tp"]), dtype=bool)
    names = ("tp", "cp", "cp_ulysses", "micro_batch_size", "ep", "etp")
    rows, like = distinct_rows([*(columns[name] for name in names), columns["pp"] > 1, columns["dp"] > 1])
    some = {name: columns[name][rows] for name in (*names, "pp", "dp")}
    work = _work(_whole_and_split(some, model, workload, cluster)).reshape(-1, 2, len(RECOMPUTES), len(rows))
    no_slower = work[:, 1] <= (1 + SAME_SECONDS_FRACTION) * work[:, 0]
    return np.asarray(~np.all(no_slower, axis=(0, 1))[like])


def _whole_and_split(
    columns: dict[str, IntArray], model: ModelSpec, workload: Workload, cluster: ClusterSpec
) -> CostTable:
    """Costs of layouts [2 x recomputes x N] without and with sequence parallelism, under every recompute, nothing sharded."""
    size, options = len(columns["tp"]), len(RECOMPUTES)
    crossed = {name: np.tile(column, 2 * options) for name, column in columns.items() if name != "dp"}
    crossed |= {
        "dp_replicate": np.tile(columns["dp"], 2 * options),
        "sequence_parallel": np.repeat(np.arange(2), options * size),
        "recompute": np.tile(np.repeat(np.arange(options), size), 2),
    }
    return CostTable.from_layouts(model, workload, cluster, LayoutTable.filled(2 * options * size, **crossed))


def _work(costs: CostTable) -> FloatArray:
    """Seconds of one micro-batch, forward and backward, of what every stage is a sum of [parts, N].

    A stage has a block for certain, so the embedding and the head count with one of every kind.
    """
    layers = tuple(zip(costs.kinds, costs.by_case, strict=True))
    ends = [cost.busy_s for kind, cost in layers if (kind.is_embedding or kind.is_head)]
    beside = [np.zeros_like(ends[0]), *ends, np.sum(ends, axis=0)]
    parts = []
    for kind, cost in layers:
        if not (kind.is_embedding or kind.is_head):
            parts += [cost.busy_s + other for other in (beside if kind.is_block else beside[:1])]
    return np.stack(parts)[:, costs.case_idx]
