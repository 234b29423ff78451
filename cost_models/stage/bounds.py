"""Admissible bounds on the seconds and bytes of every layout of a table at once, every stage ideally balanced, and rough estimates.

Stages on device pools: pool_bounds.py. An estimate is no bound: it says what to try first (`rough_pipeline`, `rough_bytes`).

Mixed layouts, whose blocks recompute differently, have two bounds within memory.

**Step.** Were the stages balanced, a layer of kind k under option o would add

    value[k,o] = f busy[k,o] + exposed[k,o] / pp

to a step, f being that of a step over the work of one micro-batch (`lower_bound_s`), and the largest of pp stages is at
least their mean. All stages together may save A bytes for each micro-batch: a device holds at least the fewest micro-batches in
flight, and memory is convex in what a stage holds. For every price of a byte,

    step >= sum_k n_k min_o (value[k,o] + price saved[k,o]) - price A

by Lagrangian duality; the best price is among those at which some kind changes its option.

**Slowest stage.** Early stages hold more micro-batches, so they recompute more or hold fewer blocks. Of the most frequent kind of
block stage s holds x[s,o] under option o, in seconds t and bytes of its device

    sum_o t[o] x[s,o] <= t                                         the slowest stage takes t
    sum_o (in_flight[s] saved[o] + static) x[s,o] <= headroom      while activations are present
    sum_o update x[s,o] <= headroom                                when the gradients are

and by linear duality no more blocks altogether than n_s(t), the least of u t + v headroom over the vertices of
u t[o] + v (in_flight[s] saved[o] + static) >= 1. All N blocks are held, none of them cut, so t is the least with

    sum_s floor(n_s(t)) >= N      and      sum_s n_s(t) - W min_s n_s'(t) >= N

where W are the seconds of all other layers, which take their time on some stage: n_s is concave.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from ...schema.layout_table import MIXED
from ...schema.schedules import SCHEDULE_NAMES
from ...schema.units import BoolArray, FloatArray, IntArray
from ..pipeline.in_flight import in_flight, in_flight_of_stage, min_in_flight, min_summed_in_flight, summed_in_flight
from ..pipeline.replay import PipelineShape, PipelineWork, lower_bound_s, makespan_s
from . import memory
from .contents import RecomputeCosts, more_in_flight, step_shape, with_vocabulary
from .passing import StageContents, StepShape
from .pool_bounds import fullest_stage_on_pools, pipeline_bound
from .replicas import saved_s
from .table import CostTable, is_aligned, stages_of_pools

LARGEST_RATIO = 4.0
"""Stages that take longer than this many times their bound without memory count as taking that long."""

NUM_HALVINGS = 12
"""Of that range."""

ROUGH_ERROR = 0.06
"""Steps and bytes are estimated at most so much too large (4 % in 120 cuts of 8B on 16 devices, 2 % in 120 of six large cases)."""

SAMPLE_RANKS, MAX_SAMPLE_CHUNKS, MAX_SAMPLE_ROUNDS, NUM_SHARES = 8, 4, 4, 10
"""Ranks of pipelines that are replayed to know the bubble of a schedule, the most chunks of each and micro-batches a rank, and in
how many steps the shares of forward and weight passes are told apart."""


def quick_time_bounds(costs: CostTable) -> FloatArray:
    """Return a bound on the seconds of a step [N] from the work within layers and the pipeline's bubble alone."""
    bound = lower_bound_s(pipeline_work(costs, slowest_stage_s(costs), np.zeros(len(costs.layouts))))
    aligned = is_aligned(costs)
    if aligned.any():
        bound[aligned] = pipeline_bound(costs.select(np.flatnonzero(aligned)), transfers=False)
    return np.asarray(bound - saved_s(costs) if costs.device_pools else bound)


def time_bounds(costs: CostTable) -> FloatArray:
    """Return a bound on the seconds of a step [N], of aligned layouts on their device pools."""
    bound, aligned = uniform_time_bounds(costs), is_aligned(costs)
    if aligned.any():
        subset = costs.select(np.flatnonzero(aligned))
        pools = subset.device_pools
        bound[aligned] = (
            pipeline_bound(subset, transfers=True)
            + fullest_stage_on_pools(subset, [pool.per_step.dp_exposed_by_kind for pool in pools])
            + np.max([pool.per_step.dp_edges_s for pool in pools], axis=0)
            + fullest_stage_on_pools(subset, [_updates(pool) for pool in pools])
        )
    return bound - saved_s(costs) if costs.device_pools else bound


def uniform_time_bounds(costs: CostTable) -> FloatArray:
    """Return a bound on the seconds of a step [N] with all ranks as the weakest.

    Stages are taken as perfectly balanced in time and in memory at once. Both costs are convex in what a stage holds, so no
    real split does better. For pp = 1 it is exact.
    """
    mixed = costs.layouts.recompute == MIXED
    if mixed.any() and not mixed.all():
        bound = np.zeros(len(mixed))
        for rows in (np.flatnonzero(mixed), np.flatnonzero(~mixed)):
            bound[rows] = uniform_time_bounds(costs.select(rows))
        return bound
    always = costs.per_step.dp_edges_s + fullest_stage(costs, _updates(costs))
    if (share := costs.vocabulary) is not None:  # the same on every stage
        _, step_s, dp_s = costs.per_step.vocabulary_seconds(share)
        always = always + (step_s + dp_s + costs.per_step.update_s(share.total("num_trained"), 0.0))
    slowest, exposed = slowest_stage_s(costs), costs.per_step.dp_exposed_by_kind
    if mixed.any():
        slowest, exposed = lower_bound_slowest_s(costs, slowest), RecomputeCosts(costs).min_exposed_by_kind
    bound = lower_bound_s(pipeline_work(costs, slowest, 2 * costs.transfer_s)) + fullest_stage(costs, exposed) + always
    return np.asarray(np.maximum(bound, _mixed_step_s(costs) + always) if mixed.any() else bound)


def _updates(costs: CostTable) -> list[FloatArray]:
    """Return the seconds of the optimizer for a layer of each kind [K] of [N]."""
    rows = costs.case_idx
    return [costs.per_step.update_s(cost.num_trained[rows], cost.expert_params[rows]) for cost in costs.by_case]


def pipeline_work(costs: CostTable, slowest_s: FloatArray, transfer_s: FloatArray) -> PipelineWork:
    """Return what the bounds of a pipeline look at, given what the slowest rank has at least and the transfers of each rank [N]."""
    b, rows = costs.layouts, costs.case_idx
    busy = [cost.busy_s for cost in costs.by_case]
    forward = [cost.forward_s + cost.comm_forward_s for cost in costs.by_case]
    weight = [cost.weight_s for cost in costs.by_case]
    blocks, main = [k for k, kind in enumerate(costs.kinds) if kind.is_block], _main_kind(costs)
    not_embedding = [k for k, kind in enumerate(costs.kinds) if not kind.is_embedding]
    cheapest = np.min([busy[k] for k in blocks], axis=0)
    cheapest_forward = np.min([forward[k] for k in blocks], axis=0)
    dearest = np.max([busy[k] for k in blocks], axis=0)

    def total(kinds: Sequence[int]) -> FloatArray:
        return np.asarray(sum(costs.counts[k] * busy[k] for k in kinds))[rows]

    def max_share(values: Sequence[FloatArray]) -> FloatArray:
        """Return the largest share of the work of a kind; a layer that costs nothing (a split head) does not count."""
        shares = [np.divide(values[k], busy[k], out=np.zeros_like(busy[k]), where=busy[k] > 0) for k in not_embedding]
        return np.asarray(np.max(shares, axis=0)[rows])

    return PipelineWork(
        schedule=b.schedule,
        pp=b.pp,
        num_model_chunks=b.num_model_chunks,
        num_microbatches=b.num_microbatches,
        total_s=total(range(len(busy))),
        blocks_s=total(blocks),
        deep_s=total(not_embedding),
        slowest_s=slowest_s,
        num_blocks=costs.model.num_blocks,
        block_s=cheapest[rows],
        block_forward_s=cheapest_forward[rows],
        transfer_s=transfer_s,
        total_forward_s=np.asarray(sum(n * s for n, s in zip(costs.counts, forward, strict=True)))[rows],
        main_s=busy[main][rows],
        num_other_blocks=costs.model.num_blocks - int(costs.counts[main]),
        main_forward_share=(forward[main] / busy[main])[rows],
        block_share=(cheapest / dearest)[rows],
        block_forward_share=(cheapest_forward / dearest)[rows],
        path_share=1 - max_share(weight),
        forward_share=max_share(forward),
        weight_share=max_share(weight),
    )


def _main_kind(costs: CostTable) -> int:
    """Return the most frequent kind of block."""
    return max((k for k, kind in enumerate(costs.kinds) if kind.is_block), key=lambda k: costs.counts[k])


def fullest_stage(costs: CostTable, by_kind: Sequence[FloatArray]) -> FloatArray:
    """Return what the stage with the most of something has at least [N], given a layer of each kind [K] of [N].

    The mean of all stages, or the blocks of a kind: some stage holds ceil(n / pp) of n.
    """
    pp = costs.layouts.pp
    fullest = sum((n * values for n, values in zip(costs.counts, by_kind, strict=True)), start=np.zeros(len(pp))) / pp
    for n, kind, values in zip(costs.counts, costs.kinds, by_kind, strict=True):
        if kind.is_block:
            fullest = np.maximum(fullest, -(-n // pp) * values)
    return np.asarray(fullest)


def slowest_stage_s(costs: CostTable) -> FloatArray:
    """Return the seconds [N] of one micro-batch that the slowest stage takes at least, without transfers.

    Some stage has the mean, or ceil(n / pp) of n blocks of a kind; or the rank with the head has j blocks and another one
    ceil((n - j) / (pp - 1)), at the j where the larger of both is least.
    """
    b, rows = costs.layouts, costs.case_idx
    of_kinds = fullest_stage(costs, [cost.busy_s[rows] for cost in costs.by_case])
    last_block = int(np.flatnonzero(costs.is_block)[-1])
    behind = np.bincount(costs.kind_of_layer[last_block + 1 :], minlength=len(costs.kinds))
    head = np.asarray(sum(n * cost.busy_s for n, cost in zip(behind, costs.by_case, strict=True)))[rows]
    block, n = np.min(costs.of_blocks("busy_s"), axis=0)[rows], costs.model.num_blocks
    num_others, chunks = np.maximum(b.pp - 1, 1), b.num_model_chunks
    lowest = np.full(len(b), np.inf)
    for more in (0, 1):
        even = np.floor((n - num_others * head / block) / b.pp) + more
        with_head = np.clip(even, chunks, np.maximum(n - num_others * chunks, chunks))
        of_others = -(-(n - with_head) // num_others) * block
        lowest = np.minimum(lowest, np.maximum(with_head * block + head, of_others))
    return np.asarray(np.where(b.pp > 1, np.maximum(of_kinds, lowest), of_kinds))


def memory_bounds(costs: CostTable) -> FloatArray:
    """Return a bound on the bytes of the fullest device [N]."""
    shape, contents = _shape_with_min_in_flight(costs), _balanced_contents(costs)
    bound = np.asarray(memory.total_bytes(memory.stage_memory(contents, shape, costs.scenario)))
    rows = np.flatnonzero((costs.layouts.recompute == MIXED) & (costs.layouts.pp == 1))
    if len(rows):
        bound[rows] = np.maximum(bound[rows], _mixed_bytes(costs.select(rows)))
    return bound


def _mixed_bytes(costs: CostTable) -> FloatArray:
    """Return the bytes that mixed layouts of one stage require at least [N].

    The option in use with the largest working set decides: no block saves less than under the leanest option with one no larger.
    """
    by_option = [_balanced_contents(option) for option in costs.by_option]
    working, saved = (
        np.array([getattr(contents, name) for contents in by_option]) for name in ("working_bytes", "activation_bytes")
    )
    required = []
    for contents, largest in zip(by_option, working, strict=True):
        activations = np.where(working <= largest, saved, np.inf).min(axis=0)
        terms = memory.stage_memory(
            replace(contents, activation_bytes=activations), _shape_with_min_in_flight(costs), costs.scenario
        )
        required.append(memory.total_bytes(terms))
    return np.asarray(np.min(required, axis=0))


def _balanced_contents(costs: CostTable) -> StageContents:
    """Return the mean of all stages of every layout [N].

    With chunks each saves as much as one of the smallest blocks: a rank holds more micro-batches of its first chunk than of its
    last, so what is saved in the last one weighs less.
    """
    pp, activations = costs.layouts.pp, costs.total("activation_bytes")
    chunked = costs.model.num_blocks * np.min(costs.of_blocks("activation_bytes"), axis=0)[costs.case_idx]
    activations = np.where(costs.layouts.num_model_chunks > 1, np.minimum(chunked, activations), activations)
    contents = StageContents(
        params=costs.total("num_params") / pp,
        trained=costs.total("num_trained") / pp,
        expert_params=costs.total("expert_params") / pp,
        block_trained=costs.block_trained,
        frozen_bytes=costs.total("frozen_bytes") / pp,
        root_params=np.where(pp == 1, costs.root_params, 0.0),
        block_params=costs.block_params,
        activation_bytes=activations / pp,
        pending_bytes=0.0 * pp,
        working_bytes=costs.working_bytes,
        split_working_bytes=costs.split_working_bytes,
        block_activation_bytes=costs.block_activation_bytes,
        head_activation_bytes=np.where(
            pp == 1, costs.by_kind[costs.kind_of_layer[costs.head_idx]].activation_bytes, 0.0
        ),
        logits=np.where(pp == 1, costs.logits, 0.0),
        boundary_bytes=costs.boundary_bytes,
        ends_are_one=costs.model.tie_embeddings & (pp == 1),
    )
    return with_vocabulary(costs, contents)


def _shape_with_min_in_flight(costs: CostTable) -> StepShape:
    """Return the shape of the stage with the fewest micro-batches in flight."""
    b = costs.layouts
    numbers = b.schedule, b.num_microbatches, b.pp, b.num_model_chunks
    flight = more_in_flight(costs, min_in_flight(*numbers))
    summed = np.where(b.pp > 1, min_summed_in_flight(*numbers), flight)
    return step_shape(b, flight, num_neighbours=np.minimum(b.pp - 1, 1), summed_in_flight=summed)


def budget_bytes(costs: CostTable) -> FloatArray:
    """Return what `memory_bounds` must be within for a layout to fit [N]: of aligned layouts the mean of its stages, as convex."""
    budget, aligned = np.full(len(costs.layouts), float(costs.cluster.memory_budget_bytes)), is_aligned(costs)
    if not aligned.any():
        return budget
    of_pools = np.array([pool.cluster.memory_budget_bytes for pool in costs.device_pools], dtype=np.float64)
    return np.where(aligned, of_pools @ stages_of_pools(costs) / costs.layouts.pp, budget)


# Rough estimates


def estimates_s(costs: CostTable, bound_s: FloatArray) -> FloatArray:
    """Return about what the step of each layout takes, given its bound; infinite where it seems not to fit [N].

    On device pools that is the bound: ranks as slow as the weakest say nothing of them.
    """
    seconds, flight = rough_pipeline(costs)
    seconds = np.where(is_aligned(costs), 0.0, seconds)
    fits = rough_bytes(costs, flight) <= (1 + ROUGH_ERROR) * budget_bytes(costs)
    return np.where(fits, bound_s + np.maximum(seconds - quick_time_bounds(costs), 0.0), np.inf)


def rough_pipeline(costs: CostTable) -> tuple[FloatArray, FloatArray]:
    """Return about what the pipeline of each layout takes without transfers, and the micro-batches on its fullest rank [N].

    T = m max_s t_s + bubble (pp - 1) W / pp with the bubble of equal stages: a v-th where backward passes are whole; others defer
    the gradients of weights, and theirs depends on the shares of the passes.
    """
    b, total = costs.layouts, costs.total("busy_s")
    bubble = 1.0 / b.num_model_chunks
    flight = np.asarray(
        in_flight_of_stage(b.schedule, b.num_microbatches, b.pp, 0, b.num_model_chunks), dtype=np.float64
    )
    rows = np.flatnonzero(b.schedule_fact("splits_backward") & ~b.schedule_fact("is_given") & (b.pp > 1))
    if len(rows):
        chunks = np.minimum(b.num_model_chunks[rows], MAX_SAMPLE_CHUNKS)
        rounds = np.clip(b.num_microbatches[rows] // b.pp[rows], 1, MAX_SAMPLE_ROUNDS)
        shares = (costs.total("forward_s") + costs.total("comm_forward_s"), costs.total("weight_s"))
        steps = [np.rint(NUM_SHARES * share[rows] / total[rows]).astype(np.int64) for share in shares]
        distinct, of_row = np.unique(np.stack([b.schedule[rows], chunks, rounds, *steps]), axis=1, return_inverse=True)
        sampled = np.array([_bubble_and_flight(*map(int, column)) for column in distinct.T])[of_row.reshape(-1)]
        bubble[rows] = sampled[:, 0] * chunks / b.num_model_chunks[rows]
        flight[rows] = np.minimum(b.num_microbatches[rows], sampled[:, 1] * b.pp[rows])
    others = np.maximum(bubble, 0.0) * (b.pp - 1) / b.pp * total
    return np.asarray(b.num_microbatches * slowest_stage_s(costs) + others), flight


@cache
def _bubble_and_flight(schedule: int, chunks: int, rounds: int, forward: int, weight: int) -> tuple[float, float]:
    """Return the bubble of equal stages in micro-batches for each rank but one, and the micro-batches in flight for each."""
    num_microbatches = rounds * SAMPLE_RANKS
    shape = PipelineShape(
        schedule=SCHEDULE_NAMES[schedule], pp=SAMPLE_RANKS, num_model_chunks=chunks, num_microbatches=num_microbatches
    )
    of_stage = np.full((3, shape.num_stages), 1 / chunks)
    forward_s, weight_s = forward / NUM_SHARES, weight / NUM_SHARES
    of_stage *= np.array([forward_s, max(1 - forward_s - weight_s, 0.0), weight_s])[:, None]
    bubble = makespan_s(shape, *of_stage) - num_microbatches
    return bubble / (SAMPLE_RANKS - 1), float(in_flight(shape).max()) / SAMPLE_RANKS


def rough_bytes(costs: CostTable, flight: FloatArray) -> FloatArray:
    """Return about what the fullest device of each layout requires [N]: the mean stage with ceil(blocks / pp) blocks."""
    pp, n = costs.layouts.pp, costs.model.num_blocks
    more = -(-n // pp) * pp / n
    contents = replace(_balanced_contents(costs), activation_bytes=costs.total("activation_bytes") / pp)
    scaled = ("params", "trained", "expert_params", "frozen_bytes", "activation_bytes")
    contents = replace(contents, **{name: more * getattr(contents, name) for name in scaled})
    shape = step_shape(costs.layouts, more_in_flight(costs, flight), num_neighbours=np.minimum(pp - 1, 1))
    return np.asarray(memory.required_by_terms(memory.stage_memory(contents, shape, costs.scenario), costs.scenario))


# Mixed layouts


def _mixed_step_s(costs: CostTable) -> FloatArray:
    """Return what the layers of mixed layouts and their transfers take at least once they fit [N]."""
    b, total = costs.layouts, costs.total("busy_s")
    # With one stage a rank, balanced stages take as much longer as there is more work.
    per_second = lower_bound_s(pipeline_work(costs, total / b.pp, np.zeros(len(b)))) / total
    max_saved = b.pp * memory.activation_headroom_bytes(
        _balanced_contents(costs),
        _shape_with_min_in_flight(costs),
        costs.scenario,
        cap_bytes=costs.cluster.memory_budget_bytes,
    )
    by_option, counts = costs.by_option, costs.counts.astype(np.float64)
    value_s = np.array([  # [O, K, N]
        [per_second * cost.busy_s[option.case_idx] + exposed / b.pp
         for cost, exposed in zip(option.by_case, option.per_step.dp_exposed_by_kind, strict=True)]
        for option in by_option
    ])  # fmt: skip
    saved = np.array([[cost.activation_bytes[option.case_idx] for cost in option.by_case] for option in by_option])

    def at_price(price: FloatArray) -> FloatArray:
        cheapest = np.min(value_s + price * saved, axis=0)
        paid = price * np.where(price > 0, np.maximum(max_saved, 0.0), 0.0)
        return np.asarray(np.tensordot(counts, cheapest, axes=1) - paid)

    best = at_price(np.zeros(len(b)))
    for k in np.flatnonzero(RecomputeCosts(costs).has_choice):
        for one, other in itertools.combinations(range(len(by_option)), 2):
            difference = saved[one, k] - saved[other, k]
            price = (value_s[other, k] - value_s[one, k]) / np.where(difference == 0, np.inf, difference)
            best = np.maximum(best, at_price(np.maximum(price, 0.0)))
    return np.asarray(best + per_second * 2 * costs.transfer_s * b.pp)


def lower_bound_slowest_s(costs: CostTable, without_memory_s: FloatArray) -> FloatArray:
    """Return the seconds [N] of one micro-batch that the slowest stage of mixed layouts takes at least.

    Args:
        costs: table of mixed layouts.
        without_memory_s: a bound that knows nothing of memory [N]; the result is not below it.
    """
    result = without_memory_s.copy()
    for pp in np.unique(costs.layouts.pp):
        if pp > 1:
            rows = np.flatnonzero(costs.layouts.pp == pp)
            result[rows] = _of_one_pp(costs.select(rows), int(pp), without_memory_s[rows])
    return result


def _of_one_pp(costs: CostTable, pp: int, without_memory_s: FloatArray) -> FloatArray:
    main = _main_kind(costs)
    needed = int(costs.counts[main])
    others_s = costs.total("busy_s") - needed * costs.by_case[main].busy_s[costs.case_idx]
    lines = _lines(costs, main, pp)

    def too_short(rows: IntArray, t: FloatArray) -> BoolArray:
        slope, intercept = (values[:, rows] for values in lines)  # [V, n, S]
        num_blocks = slope * t[:, None] + intercept
        line = np.argmin(num_blocks, axis=0)[None]
        num_blocks, slope = (np.take_along_axis(values, line, axis=0)[0] for values in (num_blocks, slope))
        uncut = np.floor(num_blocks * (1 + 1e-12) + 1e-9).sum(axis=1)
        with_others = num_blocks.sum(axis=1) - others_s[rows] * slope.min(axis=1)
        return np.asarray((uncut < needed) | (with_others < needed * (1 - 1e-12)))

    all_rows = np.arange(len(without_memory_s))
    rows = all_rows[too_short(all_rows, without_memory_s)]
    low, high = without_memory_s[rows], LARGEST_RATIO * without_memory_s[rows]
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        short = too_short(rows, middle)
        low, high = np.where(short, middle, low), np.where(short, high, middle)
    result = without_memory_s.copy()
    result[rows] = low * (1 - 1e-12)
    return result


def _lines(costs: CostTable, kind: int, pp: int) -> tuple[FloatArray, FloatArray]:
    """Return slope and intercept [V, N, S] of lines whose minimum is how many blocks of a kind a stage may hold in t seconds."""
    b, options = costs.layouts, costs.by_option
    seconds = np.array([option.by_case[kind].busy_s[option.case_idx] for option in options])  # [O, N]
    saved = np.array([option.by_case[kind].activation_bytes[option.case_idx] for option in options])
    none, one = (_block_headroom_bytes(costs, kind, count) for count in (0.0, 1.0))
    headroom, static = np.maximum(none[0], 0.0), none[0] - one[0]
    m = b.num_microbatches[:, None]
    flight = in_flight_of_stage(b.schedule[:, None], m, pp, np.arange(pp))  # [N, S]
    flight = np.where(m > 1, summed_in_flight(m, flight), flight)  # beside the gradients that are static
    taken = flight * saved[:, :, None] + static[:, None]  # [O, N, S]
    times = np.broadcast_to(seconds[:, :, None], taken.shape)
    zero = np.zeros(taken.shape[1:])
    slopes, intercepts = [1 / times.min(axis=0)], [zero]
    with np.errstate(divide="ignore", invalid="ignore"):
        slopes += [zero, zero]
        intercepts += [
            headroom[:, None] / np.maximum(taken.min(axis=0), 1e-9),
            zero + (np.maximum(none[1], 0.0) / np.maximum(none[1] - one[1], 1e-9))[:, None],
        ]
        for i, j in itertools.combinations(range(len(options)), 2):
            cross = times[i] * taken[j] - times[j] * taken[i]
            u, v = (taken[j] - taken[i]) / cross, (times[i] - times[j]) / cross
            is_vertex = np.isfinite(u) & np.isfinite(v) & (u >= 0) & (v >= 0)
            is_vertex &= np.all(u * times + v * taken >= 1 - 1e-9, axis=0)
            slopes.append(np.where(is_vertex, u, 0.0))
            intercepts.append(np.where(is_vertex, v * headroom[:, None], np.inf))
    return np.stack(slopes), np.stack(intercepts) * (1 + 1e-9)


def _block_headroom_bytes(costs: CostTable, kind: int, count: float) -> tuple[FloatArray, FloatArray]:
    """Return the bytes [N] that remain at most on a stage with ``count`` blocks of a kind: for activations, and with its gradients.

    Both fall at least as fast from any number of blocks to the next as from none to one: the peak is a maximum of such lines.
    """
    block, rows, cap_bytes = costs.by_case[kind], costs.case_idx, costs.cluster.memory_budget_bytes
    none = np.zeros(len(rows))
    contents = StageContents(
        params=count * block.num_params[rows],
        trained=count * block.num_trained[rows],
        expert_params=count * block.expert_params[rows],
        block_trained=costs.block_trained,
        frozen_bytes=count * block.frozen_bytes[rows],
        root_params=none,
        block_params=costs.block_params,
        activation_bytes=none,
        pending_bytes=none,
        working_bytes=costs.working_bytes,
        split_working_bytes=none,
        block_activation_bytes=none,
        logits=none,
        boundary_bytes=costs.boundary_bytes,
    )
    summed, neighbours = np.where(costs.layouts.num_microbatches > 1, 1, -1), np.ones(len(rows), dtype=np.int64)
    shape = step_shape(costs.layouts, np.ones(len(rows)), num_neighbours=neighbours, summed_in_flight=summed)
    headroom = memory.activation_headroom_bytes(contents, shape, costs.scenario, cap_bytes=cap_bytes)
    required = memory.required_by_terms(memory.stage_memory(contents, shape, costs.scenario), costs.scenario)
    return np.asarray(headroom), np.asarray(cap_bytes - required)
