"""Runs whose micro-batches wait for messages between nodes, found from the measurements alone.

On some clusters a job now and then loses the same fraction of a second at every message between nodes that the next pass waits
for: two runs of one layout then differ by a factor, and no property of the layout says which of them it is. Such a run measures
the fabric of its day, so it neither fits a coefficient nor judges an interval or a choice.

The rule: a micro-batch takes no longer than one of the same layout on at most as many stages, nor more than k times as long
where it has k times the sequences. Other numbers of data-parallel ranks and of micro-batches do not matter to it, so that runs of
other sizes are its neighbours. Where only gradients cross nodes, more ranks may cost something, once a step, and the rule is
wider. No prediction is asked, and no name of a publication, framework or cluster.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from ..schema.units import BoolArray
from .rows import RunRow

STALL_S, STALL_RATIO = 0.25, 1.5
"""A stall adds more than both to the neighbour's micro-batch. Repeated runs differ by up to a quarter, and on the one cluster where
many stall a message costs 0.27 s: nothing lies between a micro-batch's excess of 0.1 and of 0.4 s there."""

STEP_STALL_S, STEP_STALL_RATIO = 0.5, 2.0
"""The same where nothing but gradients and parameters crosses nodes: the seconds are those of a step."""

_SAME = (
    "gpu_type", "inter_interconnect", "framework", "model", "layers", "hidden", "ffn", "seq_len", "precision",
    "recompute", "offload", "tp", "cp", "ep", "vpp",
)  # fmt: skip


def stalled(rows: Sequence[RunRow]) -> BoolArray:
    """Return which rows [N] lost their time to messages between nodes, each judged by its neighbours among ``rows``."""
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for idx, row in enumerate(rows):
        if (row.n_gpus or 1) > (row.gpus_per_node or 8) and row.measured_s is not None:
            is_piped = (row.pp or 1) > 1
            sharding = "" if is_piped else row.sharding_class  # what passes gather between nodes
            groups[*(getattr(row, name) for name in _SAME), is_piped, sharding].append(idx)
    answer = np.zeros(len(rows), dtype=bool)
    for idxs in groups.values():
        times = [_micro_batch_s(rows[idx]) for idx in idxs]
        seconds, per_step = np.array(times).T
        pp, sequences = np.array([(rows[idx].pp or 1, rows[idx].micro_batch or 1) for idx in idxs]).T
        bounds = seconds[:, None] * np.maximum(sequences / sequences[:, None], 1)  # [neighbour, row]
        reference = np.where(pp[:, None] <= pp, bounds, np.inf).min(axis=0)
        if _passes_wait(rows[idxs[0]]):
            answer[idxs] = seconds > np.maximum(reference + STALL_S, reference * STALL_RATIO)
        else:
            answer[idxs] = seconds > np.maximum(reference + STEP_STALL_S / per_step, reference * STEP_STALL_RATIO)
    return answer


def _passes_wait(row: RunRow) -> bool:
    """Return whether passes of a run over several nodes wait for messages: of a pipeline, or of split tensors or sequences."""
    return (row.pp or 1) > 1 or (row.tp or 1) * (row.cp or 1) > (row.gpus_per_node or 8)


def _micro_batch_s(row: RunRow) -> tuple[float, float]:
    """Return the seconds of a micro-batch, and how many of them one stage waits for in a step, filling the pipeline included."""
    assert row.measured_s is not None
    count = (row.global_batch or 1) / ((row.dp or 1) * (row.micro_batch or 1))
    chunks = int(row.vpp) if row.vpp.isdigit() else 1
    per_step = count + ((row.pp or 1) - 1) / max(1, chunks)
    return row.measured_s / per_step, per_step
