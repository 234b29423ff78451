"""A batch of unequal lengths under a plan: what its sequences cost on groups of the plan's ranks, and how many tokens a rank holds.

The ranks that share a batch are those that hold all layers: all that are not tensor-parallel. A group of d of them computes its
sequences by context parallelism of degree d. Seconds come from the estimate of the plan's own layout with cp = d (a ring, or
Ulysses as far as the heads go, if it is faster): what one more micro-batch of n equal sequences adds to a step, n such that ranks
are half full, at lengths from the shortest to the longest of the batch, less what a micro-batch takes whatever is in it,

    SECONDS(LEN, d) = (t(n LEN, d) - FIXED) / n,   FIXED = 2 t(n/2) - t(n) at d = 1, of the shortest

between which seconds a token are interpolated over log LEN. Sequences that are packed attend to themselves only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..schema import ConfigError, InfeasibleError, Layout, TrainingPlan
from ..schema.batch import Batch
from ..schema.training_plan import TrainingEstimate
from ..solvers.batch_groups import BatchInstance
from .plan import estimate

_MAX_TOKENS = 2**22
"""Of a rank: more are not looked for."""

_NUM_LENGTHS = 6
"""Lengths at which seconds are worked out, evenly spaced by ratio."""


def batch_instance(batch: Batch) -> BatchInstance:
    """Return the problem of a batch that brings its costs."""
    return BatchInstance.of(
        batch.padded,
        batch.costs.seconds,
        num_ranks=batch.num_ranks,
        tokens_per_rank=batch.tokens_per_rank,
        fixed_s=batch.costs.fixed_s,
    )


def instance_of_plan(plan: TrainingPlan, lengths: Sequence[int]) -> BatchInstance:
    """Return the problem of lengths on the ranks of a plan, with the seconds and the tokens that its layout gives.

    Raises:
        ConfigError: the layout is one whose micro-batches have one shape.
        InfeasibleError: a rank holds no tokens, or all of them together not the longest sequence.
    """
    costs = _Costs(plan)
    tokens = costs.tokens_per_rank()
    grid = costs.grid(lengths)
    shortest = costs.seconds(grid[0], 1, tokens)
    fixed_s = max(2 * costs.seconds(grid[0], 1, tokens / 2).total - shortest.total, 0.0)
    per_token = {
        degree: np.array([costs.seconds(length, degree, tokens).per_token(fixed_s) for length in grid])
        for degree in costs.degrees
    }
    return BatchInstance.of(
        lengths,
        lambda given, degree: given * np.interp(np.log(given), np.log(grid), per_token[degree]),
        num_ranks=costs.ranks * plan.layout.dp_replicate,
        max_degree=costs.ranks,
        tokens_per_rank=tokens,
        fixed_s=fixed_s,
    )


class _MicroBatch(NamedTuple):
    """Seconds of a micro-batch of equal sequences, and their tokens."""

    total: float
    tokens: int

    def per_token(self, fixed_s: float) -> float:
        return max(self.total - fixed_s, 0.0) / self.tokens


class _Costs:
    """Estimates of a plan's layout at other lengths and degrees of context parallelism."""

    def __init__(self, plan: TrainingPlan) -> None:
        layout = plan.layout
        if layout.pp > 1:
            raise ConfigError(
                f"the plan has {layout.pp} pipeline stages, whose micro-batches have one shape",
                help="plan with --fix pp=1 for batches of unequal lengths",
            )
        ranks = layout.dp_shard * layout.cp
        if ranks & (ranks - 1):
            raise ConfigError(
                f"{ranks} ranks share a batch (dp_shard x cp), and groups are of powers of two",
                help="plan for a power of two of devices, or with --fix dp_shard=N",
            )
        self.plan, self.ranks = plan, ranks
        self.degrees = [2**idx for idx in range(ranks.bit_length())]
        self.multiple = 2 * ranks * layout.tp

    def grid(self, lengths: Sequence[int]) -> list[int]:
        """Return lengths from the shortest to the longest that every degree divides."""
        low, high = max(min(lengths, default=1), 1), max(max(lengths, default=1), 2)
        return sorted({self._rounded(length) for length in np.geomspace(low, high, _NUM_LENGTHS)})

    def _rounded(self, length: float) -> int:
        return max(round(length / self.multiple), 1) * self.multiple

    def seconds(self, length: int, degree: int, tokens_per_rank: float) -> _MicroBatch:
        """Return what one more micro-batch adds to a step whose ranks are half full, by the faster exchange."""
        count = max(round(tokens_per_rank * degree / 2 / length), 1)
        total = min(
            self._estimate(layout, length, 2).step_time_s - self._estimate(layout, length, 1).step_time_s
            for layout in self._layouts(degree, count)
        )
        return _MicroBatch(total, count * length)

    def _layouts(self, degree: int, micro_batch_size: int) -> list[Layout]:
        """Return the plan's layout with groups of ``degree``: a ring, or Ulysses as far as the heads go (C5)."""
        layout = self.plan.layout
        fields = {"cp": degree, "cp_ulysses": 1, "dp_shard": self.ranks // degree, "micro_batch_size": micro_batch_size}
        ring = layout.replace(**fields)
        heads = {getattr(block.attention, "num_kv_heads", 1) for block, _ in self.plan.model.block_runs}
        ulysses = math.gcd(degree, *(max(count // layout.tp, 1) for count in heads))
        return [ring] if ulysses == 1 else [ring, ring.replace(cp_ulysses=ulysses)]

    def _estimate(self, layout: Layout, length: int, micro_batches: int) -> TrainingEstimate:
        batch = layout.dp_shard * layout.dp_replicate * layout.micro_batch_size * micro_batches
        workload = self.plan.workload.replace(seq_len=length, global_batch_size=batch)
        return estimate(self.plan.model, self.plan.cluster, workload, layout)

    def tokens_per_rank(self) -> int:
        """Return the most tokens of a micro-batch that a rank holds, by bisection (C2)."""
        layout = self._layouts(1, 1)[0]
        low, high = 0, self.multiple
        while self._estimate(layout, high, 1).fits and high < _MAX_TOKENS:
            low, high = high, 2 * high
        while high - low > max(self.multiple, low // 64):
            middle = self._rounded((low + high) / 2)
            low, high = (middle, high) if self._estimate(layout, middle, 1).fits else (low, middle)
        if not low:
            raise InfeasibleError(
                f"a rank of the plan's layout does not hold {high:,} tokens (C2)",
                help="plan with recompute or more devices",
            )
        return low
