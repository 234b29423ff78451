"""What no split of a layout into stages beats when its schedule is replayed: solvers/split_bound.py for a layout of a space.

Vectorised bounds (cost_models/bounds.py) order a space; these are worked out for one layout at a time, when its turn comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..cost_models import memory
from ..cost_models.bounds import fullest_stage
from ..cost_models.layouts import MIXED, FloatArray
from ..cost_models.mixed_step import is_aligned
from ..cost_models.option_costs import OptionCosts
from ..cost_models.pipeline_paths import paths_past
from ..cost_models.space_costs import SpaceCosts
from ..cost_models.stage_memory import contents_between, rank_memory_parts, shape_of
from ..schema.errors import ConfigError
from ..schema.model import Block
from ..solvers import split_bound

Fits = NDArray[np.bool_]


class Replayed(NamedTuple):
    """Seconds of a step that no split beats, and the blocks of each rank in the split they come from; empty if none is."""

    bound_s: float
    sizes: tuple[int, ...] = ()


def replayed_bound(costs: SpaceCosts, idx: int, *, below_s: float, fits: Fits | None = None) -> Replayed:
    """No split of layout ``idx`` is faster; ``below_s`` where none is faster than that. Zero where nothing is replayed.

    Of a mixed layout each block counts under the option that is least in everything.

    Args:
        costs: of some layouts.
        idx: one of them.
        below_s: seconds of a step of interest.
        fits: what memory allows: with one stage a rank whether it may hold layers i..j-1 [S, L+1, L+1], else `rank_fits`.
    """
    instance = _instance(costs, idx, fits)
    if instance is None:
        return Replayed(0.0)
    edges_s = float(costs.dp_edges_s[idx])
    found = split_bound.least_s(instance, below_s=below_s - edges_s)
    return Replayed(found.bound_s + edges_s, found.sizes)


def _instance(costs: SpaceCosts, idx: int, fits: Fits | None) -> split_bound.Instance | None:
    b, row = costs.batch, np.array([idx])
    if b.pp[idx] == 1 or b.vocabulary[idx] or (costs.parts and is_aligned(costs.select(row))[0]):
        return None
    shape = shape_of(costs, idx)
    try:
        paths_past(shape)
    except ConfigError:  # the step has a closed form, whose bound is as good
        return None
    options = OptionCosts.of(costs) if b.recompute[idx] == MIXED else None
    seconds = _seconds(costs, idx)
    once = _once(costs, idx, options.least_exposed_by_kind if options else costs.dp_exposed_by_kind)
    under = options.under if options else ()
    choices = [(_seconds(one, idx), _once(one, idx, one.dp_exposed_by_kind)) for one in under]
    is_block = np.array([isinstance(kind, Block) for kind in costs.kinds])[costs.kind_of_layer]
    fixed = np.zeros((3, shape.num_stages))
    fixed[:2] = costs.transfer_s[idx] / shape.num_model_chunks
    blocks = np.flatnonzero(is_block)
    ends = [(0, costs.kind_of_layer[: blocks[0]]), (-1, costs.kind_of_layer[blocks[-1] + 1 :])]
    once_fixed = np.zeros((len(once), shape.num_stages))
    for stage, kinds in ends:
        fixed[:, stage] += seconds[:, kinds].sum(axis=1)
        once_fixed[:, stage] += once[:, kinds].sum(axis=1)
    kind_of_block = np.unique(costs.kind_of_layer[blocks], return_inverse=True)[1]
    of_block = costs.kind_of_layer[blocks]
    one = costs.select(row)
    least = np.array([_fullest_s(one, values) for values in once])
    return split_bound.Instance(
        shape,
        seconds[:, of_block],
        kind_of_block,
        fixed,
        once[:, of_block],
        once_fixed,
        least,
        _of_blocks(fits, is_block),
        tuple((of_kind[:, of_block], once_of_kind[:, of_block]) for of_kind, once_of_kind in choices),
    )


def _seconds(costs: SpaceCosts, idx: int) -> FloatArray:
    """Forward, input and weight pass of a layer of each kind [3, K]."""
    own = [cost.at(costs.like[[idx]]) for cost in costs.inside]  # of this layout alone: sums over all cases take long
    total = np.concatenate([cost.busy_s for cost in own])
    forward = np.concatenate([cost.forward_s + cost.comm_forward_s for cost in own])
    weight = np.concatenate([cost.weight_s for cost in own])
    return np.stack([forward, total - forward - weight, weight])


def _once(costs: SpaceCosts, idx: int, exposed_by_kind: Sequence[FloatArray]) -> FloatArray:
    """What a layer of each kind adds to its rank once, exposed communication and its update [2, K]."""
    case = costs.like[idx]
    trained = np.array([cost.num_trained[case] for cost in costs.inside])
    experts = np.array([cost.expert_params[case] for cost in costs.inside])
    exposed = np.array([seconds[idx] for seconds in exposed_by_kind])
    return np.stack([exposed, costs.update_s(trained, experts, idx)])


def _fullest_s(one: SpaceCosts, of_kind: FloatArray) -> float:
    return float(fullest_stage(one, [np.array([seconds]) for seconds in of_kind])[0])


def _of_blocks(fits: Fits | None, is_block: NDArray[np.bool_]) -> Fits | None:
    """Whether a stage may hold blocks i..j-1, with what is before the first block and behind the last one."""
    if fits is None or fits.shape[-1] != len(is_block) + 1:
        return fits
    blocks = np.flatnonzero(is_block)
    first, last = np.append(blocks, len(is_block)), np.append(0, blocks + 1)
    first[0], last[-1] = 0, len(is_block)
    return np.asarray(fits[:, first][:, :, last])


def rank_fits(costs: SpaceCosts, idx: int, *, cap_bytes: float) -> Fits | None:
    """With several chunks a rank, whether it may hold j - i blocks [R, N+1, N+1]; None where blocks differ.

    Chunks count as having the blocks that all of them have.
    """
    kinds = {k for k in costs.kind_of_layer if isinstance(costs.kinds[k], Block)}
    if len(kinds) > 1 or not np.isfinite(cap_bytes):
        return None
    shape = shape_of(costs, idx)
    is_block = np.isin(costs.kind_of_layer, list(kinds))
    blocks = np.flatnonzero(is_block)
    even = np.arange(1, len(blocks) // shape.num_model_chunks + 1)[:, None]  # blocks of each chunk [E, 1]
    stages = np.arange(shape.num_stages)
    first = np.where(stages == 0, 0, blocks[0]) + 0 * even
    last = blocks[0] + even + 0 * stages
    first[:, -1], last[:, -1] = blocks[-1] + 1 - even[:, 0], len(is_block)
    _, parts = rank_memory_parts(costs, idx, contents_between(costs, idx, first, last))
    required = memory.required_bytes(memory.total_bytes(parts), parts["parameters"], costs.workload, costs.cluster)
    most = (np.asarray(required <= cap_bytes).sum(axis=0) + 1) * shape.num_model_chunks - 1  # [R]
    size = np.arange(len(blocks) + 1) - np.arange(len(blocks) + 1)[:, None]
    return np.asarray((size >= 0) & (size <= most[:, None, None]))
