"""What the slowest stage of a mixed layout takes at least for one micro-batch, given what each stage has memory for: as arrays.

Early stages hold more micro-batches, so they recompute more or hold fewer blocks. Of the most frequent kind of block stage s holds
x[s,o] under option o, in seconds t and bytes of its device

    sum_o t[o] x[s,o] <= t                                     the slowest stage takes t
    sum_o (in_flight[s] kept[o] + static) x[s,o] <= room       while activations are there
    sum_o update x[s,o] <= room                                when the gradients are

and by linear duality no more blocks altogether than n_s(t), the least of u t + v room over the vertices of
u t[o] + v (in_flight[s] kept[o] + static) >= 1. All N blocks are held, whole ones, so t is the least with

    sum_s floor(n_s(t)) >= N      and      sum_s n_s(t) - W min_s n_s'(t) >= N

where W are the seconds of all other layers, which take their time on some stage: n_s is concave.
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from ..schema.model import Block
from . import memory
from .layouts import FloatArray, IntArray
from .option_costs import OptionCosts
from .space_costs import SpaceCosts
from .stage_contents import StageContents
from .stage_memory import step_shape

LARGEST_RATIO = 4.0
"""Stages that take longer than this many times what they take at least anyway count as taking that long."""

STEPS = 12
"""Halvings of that range."""


def slowest_within_memory_s(costs: SpaceCosts, least_s: FloatArray) -> FloatArray:
    """Seconds [N] of one micro-batch that the slowest stage of mixed layouts takes at least, not below ``least_s``."""
    result = least_s.copy()
    for pp in np.unique(costs.batch.pp):
        if pp > 1:
            rows = np.flatnonzero(costs.batch.pp == pp)
            result[rows] = _of_one_pp(costs.select(rows), int(pp), least_s[rows])
    return result


def _of_one_pp(costs: SpaceCosts, pp: int, least_s: FloatArray) -> FloatArray:
    blocks = [k for k, kind in enumerate(costs.kinds) if isinstance(kind, Block)]
    most = max(blocks, key=lambda k: costs.counts[k])
    needed = int(costs.counts[most])
    others_s = costs.total("busy_s") - needed * costs.inside[most].busy_s[costs.like]
    lines = _lines(costs, most, pp)

    def too_short(rows: IntArray, t: FloatArray) -> NDArray[np.bool_]:
        slope, intercept = (values[:, rows] for values in lines)  # [V, n, S]
        held = slope * t[:, None] + intercept
        at = np.argmin(held, axis=0)[None]
        held, slope = (np.take_along_axis(values, at, axis=0)[0] for values in (held, slope))
        whole = np.floor(held * (1 + 1e-12) + 1e-9).sum(axis=1)
        beside = held.sum(axis=1) - others_s[rows] * slope.min(axis=1)
        return np.asarray((whole < needed) | (beside < needed * (1 - 1e-12)))

    everything = np.arange(len(least_s))
    rows = everything[too_short(everything, least_s)]
    low, high = least_s[rows], LARGEST_RATIO * least_s[rows]
    for _ in range(STEPS):
        middle = (low + high) / 2
        short = too_short(rows, middle)
        low, high = np.where(short, middle, low), np.where(short, high, middle)
    result = least_s.copy()
    result[rows] = low * (1 - 1e-12)
    return result


def _lines(costs: SpaceCosts, kind: int, pp: int) -> tuple[FloatArray, FloatArray]:
    """Slope and intercept [V, N, S] of the lines whose least is how many blocks of ``kind`` a stage may hold in t seconds."""
    b, under = costs.batch, OptionCosts.of(costs).under
    seconds = np.array([one.inside[kind].busy_s[one.like] for one in under])  # [O, N]
    kept = np.array([one.inside[kind].activation_bytes[one.like] for one in under])
    none, one = (_room_bytes(costs, kind, count) for count in (0.0, 1.0))
    room, static = np.maximum(none[0], 0.0), none[0] - one[0]
    flight = memory.in_flight(b.schedule[:, None], b.num_microbatches[:, None], pp, np.arange(pp))  # [N, S]
    taken = flight * kept[:, :, None] + static[:, None]  # [O, N, S]
    times = np.broadcast_to(seconds[:, :, None], taken.shape)
    zero = np.zeros(taken.shape[1:])
    slopes, intercepts = [1 / times.min(axis=0)], [zero]
    with np.errstate(divide="ignore", invalid="ignore"):
        slopes += [zero, zero]
        intercepts += [
            room[:, None] / np.maximum(taken.min(axis=0), 1e-9),
            zero + (np.maximum(none[1], 0.0) / np.maximum(none[1] - one[1], 1e-9))[:, None],
        ]
        for some, other in itertools.combinations(range(len(under)), 2):
            cross = times[some] * taken[other] - times[other] * taken[some]
            u, v = (taken[other] - taken[some]) / cross, (times[some] - times[other]) / cross
            is_vertex = np.isfinite(u) & np.isfinite(v) & (u >= 0) & (v >= 0)
            is_vertex &= np.all(u * times + v * taken >= 1 - 1e-9, axis=0)
            slopes.append(np.where(is_vertex, u, 0.0))
            intercepts.append(np.where(is_vertex, v * room[:, None], np.inf))
    return np.stack(slopes), np.stack(intercepts) * (1 + 1e-9)


def _room_bytes(costs: SpaceCosts, kind: int, count: float) -> tuple[FloatArray, FloatArray]:
    """Bytes [N] that a stage with so many blocks of a kind has left at most: for activations, and when its gradients are there.

    Both fall at least as fast from any number of blocks to the next as from none to one: the peak is a maximum of such lines.
    """
    block, like, cap_bytes = costs.inside[kind], costs.like, costs.cluster.memory_budget_bytes
    contents = StageContents(
        params=count * block.num_params[like],
        trained=count * block.num_trained[like],
        expert_params=count * block.expert_params[like],
        block_trained=costs.block_trained,
        frozen_bytes=count * block.frozen_bytes[like],
        root_params=np.zeros(len(like)),
        block_params=costs.block_params,
        activation_bytes=np.zeros(len(like)),
        working_bytes=costs.working_bytes,
        logits=np.zeros(len(like)),
        boundary_bytes=costs.boundary_bytes,
    )
    ones = np.ones(len(like))
    shape = step_shape(costs.batch, ones, num_neighbours=np.ones(len(like), dtype=np.int64))
    workload, cluster = costs.workload, costs.cluster
    room = memory.kept_room_bytes(contents, shape, workload, cluster, cap_bytes=cap_bytes)
    parts = memory.stage_memory(contents, shape, workload, cluster)
    required = memory.required_bytes(memory.total_bytes(parts), parts["parameters"], workload, cluster)
    return np.asarray(room), np.asarray(cap_bytes - required)
