"""Cuts of one layout's layers into stages: even ones, those that a replay promises most of, and what no cut is below.

    even_cuts         for the pipeline only, and with what stages do once (solvers/stages/splits.py)
    replayed_bound    what no cut beats when the schedule is replayed (solvers/stages/split_bound.py), and its cut
    best_chunks       which chunks of a rank have one block more than its others, by replays (solvers/stages/chunk_cuts.py)

Vectorised bounds (cost_models/stage/bounds.py) order a space; the bounds here are worked out for one layout, when its turn comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..cost_models.pipeline.replay import lower_bound_s
from ..cost_models.stage import memory
from ..cost_models.stage.bounds import fullest_stage, pipeline_work
from ..cost_models.stage.contents import (
    RecomputeCosts,
    contents_between,
    pipeline_shape,
    rank_memory_terms,
    stage_memory_terms,
)
from ..cost_models.stage.table import CostTable, is_aligned
from ..schema.errors import ConfigError
from ..schema.layout_table import MIXED
from ..schema.units import FloatArray, IntArray
from ..solvers.backend import Status
from ..solvers.stages import chunk_cuts, split_bound, splits
from ..solvers.stages.split_bound import paths_past
from .stage_choice import last_layers_that_fit

Cut = tuple[int, ...]
"""Boundaries of stages: first layer of each, and the number of layers."""

Fits = NDArray[np.bool_]


def even_cuts(costs: CostTable, idx: int, *, cap_bytes: float) -> tuple[list[Cut], float]:
    """Return the even cut and the one that counts what a stage adds once, none where no split is within ``cap_bytes``.

    Also seconds that no split within them can beat; with model chunks zero: nothing is known but the bound of the layout.
    """
    busy = costs.per_layer("busy_s", idx)
    both = (busy, busy + costs.per_step.once_per_layer_s(idx) / int(costs.layouts.num_microbatches[idx]))
    if costs.layouts.num_model_chunks[idx] > 1:
        required, ranks = splits.memoized(required_bytes(costs, idx)), pipeline_shape(costs, idx).rank_of_stage
        instances = (splits.ChunkSplitInstance(weights, costs.is_block, ranks, required, cap_bytes) for weights in both)
        cuts = [splits.solve_chunks(instance).choice for instance in instances]
        return [cut for cut in dict.fromkeys(cuts) if cut], 0.0
    fits = stage_fits(costs, idx, cap_bytes=cap_bytes)
    solved = [splits.solve_stages(splits.StageSplitInstance(weights, fits)) for weights in both]
    if solved[0].status is Status.INFEASIBLE:
        return [], float("inf")
    return [cut.choice for cut in solved if cut.choice], _split_bound_s(costs, idx, solved[0].objective, fits)


def _split_bound_s(costs: CostTable, idx: int, slowest_s: float, fits: Fits) -> float:
    """Return what no split is below: each maximum over the stages is at least the lowest that any split has of it."""
    one = costs.select(np.array([idx]))
    pipeline_s = float(lower_bound_s(pipeline_work(one, np.array([slowest_s]), 2 * one.transfer_s))[0])
    exposed = np.array([seconds[idx] for seconds in costs.per_step.dp_exposed_by_kind])[costs.kind_of_layer]
    update = costs.per_step.once_per_layer_s(idx) - exposed
    slowest = (splits.fastest_split(splits.StageSplitInstance(per_step, fits))[0] for per_step in (exposed, update))
    return pipeline_s + float(costs.per_step.dp_edges_s[idx]) + sum(slowest)


def required_bytes(costs: CostTable, idx: int) -> splits.Required:
    """Return the function that says what each rank requires, given boundaries."""

    def of_ranks(boundaries: IntArray) -> FloatArray:
        contents = contents_between(costs, idx, boundaries[:, :-1], boundaries[:, 1:])
        _, terms = rank_memory_terms(costs, idx, contents)
        return np.asarray(memory.required_by_terms(terms, costs.scenario))

    return of_ranks


def stage_fits(costs: CostTable, idx: int, *, cap_bytes: float) -> Fits:
    """Return FITS [S, L+1, L+1]: the stage has a block, and what it requires is within ``cap_bytes``."""
    pp, size = int(costs.layouts.pp[idx]), len(costs.kind_of_layer) + 1
    blocks = np.concatenate([[0], np.cumsum(costs.is_block)])
    has_block = blocks[None, :] > blocks[:, None]
    if np.isinf(cap_bytes):
        return np.broadcast_to(has_block, (pp, size, size))

    def fits(first: IntArray, last: IntArray) -> NDArray[np.bool_]:
        contents = contents_between(costs, idx, first, last)
        terms = stage_memory_terms(costs, idx, contents, np.arange(pp)[:, None])
        return np.asarray(memory.required_by_terms(terms, costs.scenario) <= cap_bytes)

    return np.asarray(has_block & (np.arange(size) <= last_layers_that_fit((pp,), size, fits)[..., None]))


def best_chunks(
    costs: CostTable, idx: int, known: Sequence[IntArray], fits: Fits | None, *, below_s: float
) -> tuple[IntArray | None, float]:
    """Return the boundaries [1, S+1] of the best cut of chunks found from known ones, and seconds that none is below."""
    cap_bytes = costs.cluster.memory_budget_bytes
    instance, required = _split_bound_instance(costs, idx, fits), required_bytes(costs, idx)
    if instance is None:
        return None, 0.0
    edges_s, blocks = float(costs.per_step.dp_edges_s[idx]), np.flatnonzero(costs.is_block)
    before = np.concatenate([[0], np.cumsum(costs.is_block)])

    def boundaries(sizes: IntArray) -> IntArray:
        ends = blocks[np.cumsum(sizes, axis=1) - 1] + 1
        ends[:, -1] = len(costs.is_block)
        return np.concatenate([np.zeros((len(sizes), 1), dtype=np.int64), ends], axis=1)

    def within_memory(sizes: IntArray) -> Fits:
        return np.asarray(np.all(required(boundaries(sizes)) <= cap_bytes, axis=1))

    starts = [np.diff(before[cut[0]]) for cut in known]
    best = chunk_cuts.best_cut(instance, starts, within_memory, below_s=below_s - edges_s)
    if best is None:
        return None, 0.0
    return boundaries(best.sizes[None, :]), best.bound_s + edges_s * (best.bound_s > 0)


def replayed_bound(costs: CostTable, idx: int, *, below_s: float, fits: Fits | None = None) -> split_bound.SplitBound:
    """Return what no split of layout ``idx`` is faster than; ``below_s`` where none is below that, zero where nothing is replayed.

    Of a mixed layout each block counts under the option that is lowest in everything.

    Args:
        below_s: seconds of a step of interest.
        fits: what memory allows: with one stage a rank whether it may hold layers i..j-1 [S, L+1, L+1], else `rank_fits`.
    """
    instance = _split_bound_instance(costs, idx, fits)
    if instance is None:
        return split_bound.SplitBound(0.0, ())
    edges_s = float(costs.per_step.dp_edges_s[idx])
    bound = split_bound.lower_bound_s(instance, below_s=below_s - edges_s)
    return replace(bound, bound_s=bound.bound_s + edges_s)


def _split_bound_instance(costs: CostTable, idx: int, fits: Fits | None) -> split_bound.SplitBoundInstance | None:
    table, one = costs.layouts, costs.select(np.array([idx]))
    if table.pp[idx] == 1 or table.vocabulary[idx] or (costs.device_pools and is_aligned(one)[0]):
        return None
    shape = pipeline_shape(costs, idx)
    try:
        paths_past(shape)
    except ConfigError:  # the step has a closed form, whose bound is as good
        return None
    choices = RecomputeCosts(costs) if table.recompute[idx] == MIXED else None
    exposed_by_kind = costs.per_step.dp_exposed_by_kind if choices is None else choices.min_exposed_by_kind
    seconds, per_step = _seconds(costs, idx), _per_step_s(costs, idx, exposed_by_kind)
    by_option = [
        (_seconds(option, idx), _per_step_s(option, idx, option.per_step.dp_exposed_by_kind))
        for option in (choices.by_option if choices else ())
    ]
    blocks = np.flatnonzero(costs.is_block)
    fixed, fixed_per_step = np.zeros((3, shape.num_stages)), np.zeros((len(per_step), shape.num_stages))
    fixed[:2] = costs.transfer_s[idx] / shape.num_model_chunks
    for stage, kinds in ((0, costs.kind_of_layer[: blocks[0]]), (-1, costs.kind_of_layer[blocks[-1] + 1 :])):
        fixed[:, stage] += seconds[:, kinds].sum(axis=1)
        fixed_per_step[:, stage] += per_step[:, kinds].sum(axis=1)
    kinds = costs.kind_of_layer[blocks]
    fullest = [float(fullest_stage(one, [np.array([value]) for value in values])[0]) for values in per_step]
    return split_bound.SplitBoundInstance(
        shape,
        seconds[:, kinds],
        np.unique(kinds, return_inverse=True)[1],
        fixed,
        per_step[:, kinds],
        fixed_per_step,
        np.array(fullest),
        _fits_of_blocks(fits, costs.is_block),
        tuple((of_kind[:, kinds], per_step_of_kind[:, kinds]) for of_kind, per_step_of_kind in by_option),
    )


def _seconds(costs: CostTable, idx: int) -> FloatArray:
    """Return forward, input and weight pass of a layer of each kind [3, K]."""
    by_kind = [cost.take(costs.case_idx[[idx]]) for cost in costs.by_case]  # one case: sums over all cases take long
    total = np.concatenate([cost.busy_s for cost in by_kind])
    forward = np.concatenate([cost.forward_s + cost.comm_forward_s for cost in by_kind])
    weight = np.concatenate([cost.weight_s for cost in by_kind])
    return np.stack([forward, total - forward - weight, weight])


def _per_step_s(costs: CostTable, idx: int, exposed_by_kind: Sequence[FloatArray]) -> FloatArray:
    """Return what a layer of each kind adds to its rank once, exposed communication and its update [2, K]."""
    case_idx = costs.case_idx[idx]
    trained, experts = np.array([(c.num_trained[case_idx], c.expert_params[case_idx]) for c in costs.by_case]).T
    return np.stack([[seconds[idx] for seconds in exposed_by_kind], costs.per_step.update_s(trained, experts, idx)])


def _fits_of_blocks(fits: Fits | None, is_block: NDArray[np.bool_]) -> Fits | None:
    """Return whether a stage may hold blocks i..j-1, with what is before the first block and behind the last one."""
    if fits is None or fits.shape[-1] != len(is_block) + 1:
        return fits
    blocks = np.flatnonzero(is_block)
    first, last = np.append(blocks, len(is_block)), np.append(0, blocks + 1)
    first[0], last[-1] = 0, len(is_block)
    return np.asarray(fits[:, first][:, :, last])


def rank_fits(costs: CostTable, idx: int, *, cap_bytes: float) -> Fits | None:
    """Return with several chunks a rank, whether it may hold j - i blocks [R, N+1, N+1]; None where blocks differ.

    Chunks count as having the blocks that all of them have.
    """
    kinds = set(costs.kind_of_layer[costs.is_block].tolist())
    if len(kinds) > 1 or not np.isfinite(cap_bytes):
        return None
    shape, blocks = pipeline_shape(costs, idx), np.flatnonzero(costs.is_block)
    even = np.arange(1, len(blocks) // shape.num_model_chunks + 1)[:, None]  # blocks of each chunk [E, 1]
    stages = np.arange(shape.num_stages)
    first = np.where(stages == 0, 0, blocks[0]) + 0 * even
    last = blocks[0] + even + 0 * stages
    first[:, -1], last[:, -1] = blocks[-1] + 1 - even[:, 0], len(costs.is_block)
    _, terms = rank_memory_terms(costs, idx, contents_between(costs, idx, first, last))
    required = memory.required_by_terms(terms, costs.scenario)
    max_blocks = (np.asarray(required <= cap_bytes).sum(axis=0) + 1) * shape.num_model_chunks - 1  # [R]
    size = np.arange(len(blocks) + 1) - np.arange(len(blocks) + 1)[:, None]
    return np.asarray((size >= 0) & (size <= max_blocks[:, None, None]))
