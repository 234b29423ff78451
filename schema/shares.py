"""What each data-parallel rank takes of a global batch: how many of its sequences, and in how many passes.

A batch that does not divide is dealt as evenly as possible: in sequences, so that the micro-batches of a rank differ by one at
most; over the stages of a pipeline, where all have one size, in whole micro-batches. Ranks that exchange something within a pass
must run as many passes; a pass for which a rank has no sequence left repeats one that counts nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from .layout import Layout

if TYPE_CHECKING:
    from .training_plan import TrainingPlan


@dataclass(frozen=True)
class BatchShare:
    """Part of one data-parallel rank.

    Attributes:
        rows: its sequences of the global batch.
        passes: sequences of each of its passes that count.
        shape: sequences that each pass runs on, at least one: those beyond the ones that count are repeated.
    """

    rows: range
    passes: tuple[int, ...]
    shape: tuple[int, ...]


def dealt(total: int, num_ranks: int, unit: int = 1) -> tuple[int, ...]:
    """Return ``total`` sequences dealt to ranks as evenly as whole ``units`` allow, the first ones taking what is left over."""
    each, more = divmod(total // unit, num_ranks)
    return tuple(unit * (each + (rank < more)) for rank in range(num_ranks))


def dealt_by_speed(total: int, seconds: Sequence[float], unit: int = 1) -> tuple[int, ...]:
    """Return ``total`` sequences dealt so that the rank that is busy longest ends as soon as possible, a unit to each at least.

    ``(O) min max_d n[d] seconds[d]``: each further unit goes to the rank that is then done first, which no other deal beats.

    Args:
        seconds: that one unit takes each rank.
    """
    shares = [unit] * len(seconds)
    ends = [(2 * each, rank) for rank, each in enumerate(seconds)]
    heapq.heapify(ends)
    for _ in range(total // unit - len(seconds)):
        end_s, rank = ends[0]
        shares[rank] += unit
        heapq.heapreplace(ends, (end_s + seconds[rank], rank))
    return tuple(shares)


def even_shares(layout: Layout, global_batch_size: int) -> tuple[int, ...]:
    """Return the sequences of each data-parallel rank where all are as fast."""
    return dealt(global_batch_size, layout.dp, layout.micro_batch_size if layout.pp > 1 else 1)


def passes_together(layout: Layout, *, has_offload: bool = False) -> bool:
    """Return whether ranks with other sequences must run as many passes.

    Below ZeRO 2 parameters are gathered once, and gradients reduced once, with a rank's first and last pass. Above, and among
    experts with axes of their own, every pass exchanges something; the passes of a pipeline are in its order.
    """
    return layout.pp > 1 or layout.zero_stage >= 2 or not layout.experts_follow_tp or has_offload


def share_of_rank(plan: TrainingPlan, dp_rank: int) -> BatchShare:
    """Return what a data-parallel rank takes of each global batch of a plan."""
    layout, shares = plan.layout, plan.batch_shares
    size, count = layout.micro_batch_size, shares[dp_rank]
    first = [0, *accumulate(shares)][dp_rank]
    together = passes_together(layout, has_offload=plan.offload is not None)
    num_passes = -(-(max(shares) if together else count) // size)
    if layout.pp > 1:
        passes = tuple(min(size, max(0, count - i * size)) for i in range(num_passes))
        return BatchShare(range(first, first + count), passes, (size,) * num_passes)
    passes = dealt(count, num_passes)
    return BatchShare(range(first, first + count), passes, tuple(max(1, part) for part in passes))


def state_copies(plan: TrainingPlan) -> int:
    """Return how many ranks hold each part of the parameters and optimizer states, of the part that fewest hold."""
    layouts = [plan.layout_of_stage(idx) for idx in range(len(plan.stages))]
    replicas = [layout.dp_replicate * (1 if layout.zero_stage else layout.cp) for layout in layouts]
    experts = [layout.expert_copies // layout.expert_shards for layout in layouts if not layout.experts_follow_tp]
    return int(min(replicas + experts))
