"""Which ranks of a plan do the same, so that one of them stands for all.

Ranks differ by the stages they hold, by how many sequences their passes have (schema/shares.py) and, where keys and values go round
a ring, by what of them they need. The rank that stands for a kind is its first: of what does not divide it has the larger part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...schema.errors import ConfigError
from ...schema.shares import share_of_rank
from ...schema.training_plan import TrainingPlan
from ..mesh import AXES


class RankKind(NamedTuple):
    """Ranks that do the same; ``rank`` is rehearsed for them. ``shape`` numbers their sequences and their place in a ring."""

    stages: tuple[int, ...]
    rank: int
    ranks: tuple[int, ...]
    shape: tuple[int, int] = (0, 0)


def rank_kinds(plan: TrainingPlan, only: Sequence[int] = ()) -> list[RankKind]:
    """Return the kinds of ranks of a plan, or only those of some ranks, which are then rehearsed themselves.

    Raises:
        ConfigError: a rank that the plan does not have.
    """
    size = int(plan.layout.world_size)
    if wrong := [rank for rank in only if not 0 <= rank < size]:
        raise ConfigError(f"rank {wrong[0]}: the plan has ranks 0 to {size - 1}")
    ranks, stage_ranks = np.arange(size), int(plan.layout.stage_ranks)
    keys = np.empty((size, 3), dtype=np.int64)
    for position in range(plan.layout.pp):
        stages = _stages(plan, position)
        layout = plan.layout_of_stage(stages[0])
        here = ranks[position * stage_ranks : (position + 1) * stage_ranks]
        rest, coordinates = here % stage_ranks, dict[str, np.ndarray]()
        for axis in reversed(AXES[1:]):
            rest, coordinates[axis] = np.divmod(rest, getattr(layout, axis))
        dp_rank = coordinates["dp_replicate"] * layout.dp_shard + coordinates["dp_shard"]
        ring_size = layout.cp // layout.cp_ulysses
        ring = coordinates["cp"] // layout.cp_ulysses
        # The first of a ring needs half of all other keys, the last all of them for half of its queries.
        of_ring = np.where(ring == 0, 0, np.where(ring == ring_size - 1, 2, 1))
        keys[here] = np.stack([np.full(len(here), position), _share_kinds(plan)[dp_rank], of_ring], axis=1)
    unique, inverse = np.unique(keys, axis=0, return_inverse=True)
    kinds = []
    for idx, key in enumerate(unique):
        members = tuple(np.flatnonzero(inverse.reshape(-1) == idx).tolist())
        chosen = [rank for rank in only if rank in set(members)] if only else [members[0]]
        kinds += [RankKind(_stages(plan, int(key[0])), rank, members, (int(key[1]), int(key[2]))) for rank in chosen]
    return sorted(kinds, key=lambda kind: (kind.stages, kind.rank))


def _stages(plan: TrainingPlan, position: int) -> tuple[int, ...]:
    return tuple(idx for idx, holder in enumerate(plan.rank_of_stage) if holder == position)


def _share_kinds(plan: TrainingPlan) -> np.ndarray:
    """Return a number for each data-parallel rank, the same where passes have as many sequences."""
    numbers: dict[tuple[int, int], int] = {}
    signatures: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    result = []
    for dp_rank, share in enumerate(plan.batch_shares):
        if (key := (share, 0)) not in numbers:
            one = share_of_rank(plan, dp_rank)
            numbers[key] = signatures.setdefault((one.passes, one.shape), len(signatures))
        result.append(numbers[key])
    return np.array(result)
