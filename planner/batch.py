"""Batches of unequal lengths under a plan: what sequences cost on groups of the plan's ranks, and how many tokens a rank holds.

The ranks that share a batch are those that hold all layers: all that are not tensor-parallel. A group of d of them computes its
sequences by context parallelism of degree d. Seconds come from the estimate of the plan's own layout with cp = d (exchange as far
as the heads go, a ring beyond, as the runtime does it): what one more micro-batch of n equal sequences adds to a step, n such that
ranks are as full as by a mean batch in the fewest micro-batches, at lengths from the shortest to the longest, less what a
micro-batch takes whatever is in it,

    SECONDS(LEN, d) = (t(n LEN, d) - FIXED) / n + DOCUMENT(d),   FIXED = 2 t(n/2) - t(n) at d = 1, of the shortest

between which seconds a token are linear in LEN, as attention's are. Sequences that are packed attend to themselves only, each by
kernels of its own but for one rank's GPU: every rank of a group dispatches those of all documents of its place in the ring,
DOCUMENT(d). Through pipelines sequences are packed: pack_costs.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ..cost_models.coefficients import Scenario
from ..cost_models.hardware.machine import host_costs
from ..schema import ClusterSpec, ConfigError, InfeasibleError, Layout, ModelSpec, TrainingPlan, Workload
from ..schema.batch import Batch, LengthCosts
from ..schema.layers import SoftmaxAttention
from ..schema.stages import Stage
from ..schema.training_plan import TrainingEstimate
from ..schema.units import FloatArray
from ..solvers.batch_groups import BatchInstance, PackInstance, instance_under
from .expand import expand_layout
from .pack_costs import PackCosts, pack_length_costs
from .request import PlanRequest

_MAX_TOKENS = 2**22
"""Of a rank: more are not looked for."""

_LOOP_DISPATCHES, _RING_DISPATCHES = 3, 11
"""Operators that the host dispatches for the attention of one document in one block, forward and backward: in a loop over documents
the kernels and its part in joining the rows; at each place of a ring two kernels, six slices and three copies (counted in
runtime/documents/attention.py and runtime/context_parallel.py)."""

_MIN_S = 1e-12
"""Seconds of sequences that are hidden behind the gathers of their micro-batch: what takes none has no order."""

_NUM_LENGTHS = 6
"""Lengths at which seconds are worked out, evenly spaced by ratio."""


def batch_instance(batch: Batch) -> BatchInstance:
    """Return the problem of a batch that brings its costs."""
    parts = [(np.array(part.lengths, dtype=np.float64), part) for part in batch.parts]
    memory_tokens = np.array(batch.padded) + np.ceil(sum(part.token_ratio * lengths for lengths, part in parts)).astype(
        np.int64
    )
    padded = np.array(batch.padded, dtype=np.float64)

    def seconds(_: FloatArray, degree: int) -> FloatArray:
        of_parts = sum(part.costs.seconds(lengths, degree) for lengths, part in parts)
        return np.asarray(batch.costs.seconds(padded, degree) + of_parts)

    return BatchInstance.of(
        memory_tokens.tolist(),
        seconds,
        num_ranks=batch.num_ranks,
        tokens_per_rank=batch.tokens_per_rank,
        fixed_s=sum((part.costs.fixed_s for part in batch.parts), batch.costs.fixed_s),
    )


def instance_of_plan(plan: TrainingPlan, lengths: Sequence[int]) -> BatchInstance | PackInstance:
    """Return the problem of lengths on the ranks of a plan, with the seconds and the tokens that its layout gives.

    Raises:
        ConfigError: as `length_costs`, or a length is not positive.
        InfeasibleError: a rank holds no tokens, or all of them together not the longest sequence.
    """
    shortest, longest = min(lengths, default=1), max(lengths, default=1)
    costs = plan.batches
    if costs is None or not costs.lengths[0] <= max(shortest, 1) <= longest <= costs.lengths[-1]:
        costs = length_costs(
            plan.model, plan.cluster, plan.workload, plan.layout, shortest=shortest, longest=longest, stages=plan.stages
        )
    return instance_under(costs, lengths)


def length_costs(
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: Workload,
    layout: Layout,
    *,
    shortest: int = 1,
    longest: int,
    stages: Sequence[Stage] = (),
    tokens_per_rank: int = _MAX_TOKENS,
) -> LengthCosts:
    """Return what sequences between two lengths cost under a layout; through a pipeline, whose ``stages`` are given, in packs.

    Args:
        tokens_per_rank: that a rank takes at most in a micro-batch, where it could hold more.

    Raises:
        ConfigError: the ranks that share a batch make no groups, or the schedule is made for one number of micro-batches.
        InfeasibleError: a rank holds no tokens.
    """
    if layout.pp > 1:
        return _pack_costs(PackCosts(model, cluster, workload, layout, stages), shortest, longest, tokens_per_rank)
    costs = _Costs(model, cluster, workload, layout)
    tokens = min(costs.tokens_per_rank(), tokens_per_rank)
    grid = length_grid(shortest, longest, costs.multiple)
    filled = max(costs.batch_tokens / math.ceil(costs.batch_tokens / tokens), 2.0 * grid[0])
    of_shortest = costs.seconds(grid[0], 1, filled)
    fixed_s = max(2 * costs.seconds(grid[0], 1, filled / 2).total - of_shortest.total, 0.0)
    return LengthCosts(
        num_ranks=layout.dp * layout.cp,
        tokens_per_rank=tokens,
        fixed_s=fixed_s,
        step_s=max(of_shortest.first - of_shortest.total, 0.0),
        waits=layout.zero_stage >= 2,
        lengths=tuple(grid),
        token_s=tuple(
            tuple(costs.seconds(length, degree, filled).per_token(fixed_s) for length in grid)
            for degree in costs.degrees
        ),
    )


def _pack_costs(costs: PackCosts, shortest: int, longest: int, tokens_per_rank: int) -> LengthCosts:
    tokens = min(most_tokens(costs.estimate, costs.multiple) // costs.layout.cp, tokens_per_rank)
    document_s = dispatch_s(costs.cluster, costs.workload, costs.layout, costs.num_blocks)
    grid = length_grid(shortest, longest, costs.multiple)
    return pack_length_costs(costs, grid, tokens_per_rank=tokens, document_s=document_s)


def with_length_costs(plan: TrainingPlan) -> TrainingPlan:
    """Return the plan with what sequences up to the longest of its workload cost, by its own prediction."""
    workload = plan.workload
    costs = length_costs(plan.model, plan.cluster, workload, plan.layout, longest=workload.seq_len, stages=plan.stages)
    return plan.replace(batches=costs)


def layout_estimate(model: ModelSpec, cluster: ClusterSpec, workload: Workload, layout: Layout) -> TrainingEstimate:
    """Return what a layout costs whose fields are known to suit each other."""
    return expand_layout(PlanRequest(model, cluster, workload), layout).estimate


class _MicroBatch(NamedTuple):
    """Seconds of a micro-batch of equal sequences, those of a step of one of them, and its tokens."""

    total: float
    first: float
    tokens: int

    def per_token(self, fixed_s: float) -> float:
        return max(self.total - fixed_s, _MIN_S) / self.tokens


class _Costs:
    """Estimates of a layout at other lengths and degrees of context parallelism."""

    def __init__(self, model: ModelSpec, cluster: ClusterSpec, workload: Workload, layout: Layout) -> None:
        self.has_shards = layout.dp_shard * layout.cp > 1
        ranks = layout.dp_shard * layout.cp if self.has_shards else layout.dp_replicate
        if ranks & (ranks - 1):
            raise ConfigError(
                f"{ranks} ranks share a batch (dp_shard x cp), and groups are of powers of two",
                help="plan for a power of two of devices, or with --fix dp_shard=N",
            )
        self.model, self.cluster, self.workload, self.layout, self.ranks = model, cluster, workload, layout, ranks
        self.degrees = [2**idx for idx in range(ranks.bit_length())]
        self.multiple = 2 * ranks * layout.tp
        self.batch_tokens = workload.tokens_per_step / ranks

    def seconds(self, length: int, degree: int, tokens_of_rank: float) -> _MicroBatch:
        """Return what one more micro-batch with so many tokens on each rank adds to a step."""
        count = max(round(tokens_of_rank * degree / length), 1)
        layout = self._layout(degree, count)
        first = self._estimate(layout, length, 1).step_time_s
        total = self._estimate(layout, length, 2).step_time_s - first + count * self._document_s(layout)
        return _MicroBatch(total, first, count * length)

    def _document_s(self, layout: Layout) -> float:
        blocks = sum(count for block, count in self.model.block_runs if isinstance(block.attention, SoftmaxAttention))
        return dispatch_s(self.cluster, self.workload, layout, blocks)

    def _layout(self, degree: int, micro_batch_size: int) -> Layout:
        """Return the layout with groups of ``degree``: exchange as far as the heads go (C5), a ring beyond."""
        layout, heads = self.layout, {getattr(block.attention, "num_kv_heads", 1) for block, _ in self.model.block_runs}
        rest = "dp_shard" if self.has_shards else "dp_replicate"
        ulysses = math.gcd(degree, *(max(count // layout.tp, 1) for count in heads))
        return layout.replace(
            cp=degree, cp_ulysses=ulysses, micro_batch_size=micro_batch_size, **{rest: self.ranks // degree}
        )

    def _estimate(self, layout: Layout, length: int, micro_batches: int) -> TrainingEstimate:
        batch = layout.dp_shard * layout.dp_replicate * layout.micro_batch_size * micro_batches
        workload = self.workload.replace(seq_len=length, global_batch_size=batch, lengths=None)
        return layout_estimate(self.model, self.cluster, workload, layout)

    def tokens_per_rank(self) -> int:
        """Return the most tokens of a micro-batch that a rank holds (C2)."""
        layout = self._layout(1, 1)
        return most_tokens(lambda tokens: self._estimate(layout, tokens, 1), self.multiple)


def length_grid(shortest: int, longest: int, multiple: int) -> list[int]:
    """Return lengths from the shortest to the longest, each a multiple that every degree divides."""
    low, high = max(shortest, 1), max(longest, 2)
    return sorted({_rounded(length, multiple) for length in np.geomspace(low, high, _NUM_LENGTHS)})


def _rounded(length: float, multiple: int) -> int:
    return max(round(length / multiple), 1) * multiple


def dispatch_s(cluster: ClusterSpec, workload: Workload, layout: Layout, num_blocks: int) -> float:
    """Return the seconds in which the host dispatches one document's attention in so many blocks, forward and backward."""
    ring = layout.cp // layout.cp_ulysses
    is_host = cluster.weakest_device.backend.is_host
    dispatches = _RING_DISPATCHES * ring if ring > 1 else _LOOP_DISPATCHES if is_host else 0
    return dispatches * num_blocks * host_costs(Scenario.build(workload, cluster)).operator_s


def most_tokens(estimate: Callable[[int], TrainingEstimate], multiple: int) -> int:
    """Return the most tokens of a micro-batch that fit, by bisection over its estimates.

    Raises:
        InfeasibleError: not even ``multiple`` do.
    """
    few, many = (estimate(tokens) for tokens in (multiple, 64 * multiple))
    each = max((many.required_bytes - few.required_bytes) / (63 * multiple), 1.0)
    guess = _rounded(min((few.budget_bytes - few.required_bytes) / each, _MAX_TOKENS), multiple)
    low, high = 0, multiple
    for tokens in (guess * 31 // 32, guess):  # memory is nearly linear in tokens
        tokens = _rounded(tokens, multiple)
        if tokens > low and estimate(tokens).fits:
            low, high = tokens, 2 * tokens
        else:
            high = tokens
            break
    while high < _MAX_TOKENS and high == 2 * low and estimate(high).fits:
        low, high = high, 2 * high
    while high - low > max(multiple, low // 64):
        middle = _rounded((low + high) / 2, multiple)
        low, high = (middle, high) if estimate(middle).fits else (low, middle)
    if not low:
        raise InfeasibleError(
            f"a rank of the plan's layout does not hold {high:,} tokens (C2)",
            help="plan with recompute or more devices",
        )
    return low
