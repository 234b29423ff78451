"""What is chosen for the stages of one layout: layers with their recompute, and an order of passes.

A mixed layout: which layers each stage holds and what every block of them recomputes (solvers/stages/stage_program.py). Where an
engine recomputes any block, each stage fills its memory by itself. Where it recomputes the first blocks of every stage, as many on
each (EngineFacts.recomputes_first_blocks), there is a program for each number of them, without choices of its own.

A synthesised schedule: named ones are made for passes of equal length and for one amount of memory. Where a rank holds the first
and the last stage of a V, an order made for the real passes and for all of a device's memory is shorter between the steps of memory
of v-min, v-half and zb-v (solvers/pipeline/greedy.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..cost_models.pipeline.orders import Order, Pipeline, no_order_below_s
from ..cost_models.pipeline.replay import PipelineShape
from ..cost_models.stage import memory
from ..cost_models.stage.contents import (
    RecomputeCosts,
    contents_between,
    pipeline_shape,
    rank_headroom_bytes,
    stage_headroom_bytes,
    stage_memory_terms,
)
from ..cost_models.stage.step import StagePasses, estimate_step, outside_passes_s, pass_seconds
from ..cost_models.stage.table import CostTable
from ..schema import TrainingEstimate
from ..schema.layout_table import RECOMPUTES
from ..schema.schedules import GIVEN, SMALLEST_OVER_A_V
from ..schema.units import FloatArray, IntArray
from ..solvers.pipeline.greedy import quick_order
from ..solvers.stages import splits
from ..solvers.stages.stage_program import (
    StageFilling,
    StageProgramInstance,
    lower_bound_s,
    min_slowest_s,
    solve,
)
from ..solvers.tolerances import SUMMED

SYNTHESISED = GIVEN.idx
LEANEST = SMALLEST_OVER_A_V.idx
"""Of the named schedules over a V the one that holds least."""

NONE, SELECTIVE, FULL = (RECOMPUTES.index(name) for name in ("none", "selective", "full"))

MIN_IDLE_FRACTION = 0.025
"""Idle part of a pipeline from which more orders are tried: they gain a half of it at most, less than predictions tell apart."""

SMALL_ARRAY = 1 << 13
"""Numbers in an array that take about as long as the call for it."""

Fits = NDArray[np.bool_]
"""[O, S, L+1, L+1]: whether a stage may hold layers i..j-1 with one option for all."""


def last_layers_that_fit(
    shape: tuple[int, ...], size: int, fits: Callable[[IntArray, IntArray], NDArray[np.bool_]]
) -> IntArray:
    """Return for each first layer [*shape, size] the end of the longest span that fits, by bisection.

    More layers never need less memory. ``fits`` tells of first layers and ends [..., *shape, size] which spans are within memory:
    of several ends at once where arrays are so small that their number decides what it takes.
    """
    first = np.broadcast_to(np.arange(size), (*shape, size))
    feasible, too_large = first.copy(), np.full(first.shape, size)
    parts = 1 + np.clip(SMALL_ARRAY // first.size, 1, max(math.isqrt(size), 1))
    inner = np.arange(1, parts).reshape(-1, *(1,) * first.ndim)
    while np.any(too_large - feasible > 1):
        ends = feasible + (too_large - feasible) * inner // parts
        is_feasible = fits(np.broadcast_to(first, ends.shape), ends) | (ends == feasible)
        last_feasible = np.where(is_feasible, ends, feasible).max(axis=0)
        too_large = np.maximum(np.where(is_feasible, too_large, ends).min(axis=0), last_feasible + 1)
        feasible = last_feasible
    return feasible


class Stages(NamedTuple):
    """Boundaries [S+1], an index into RECOMPUTES for each layer [L], seconds of a step, and what no answer is faster than."""

    boundaries: tuple[int, ...]
    options: tuple[int, ...]
    objective_s: float
    bound_s: float


class Layers:
    """One mixed layout layer by layer [L] and option by option [O], and the spans [P] of layers its stages [S] may hold.

    Attributes:
        num_stages, chunks: S, and the model chunks of a stage.
        kinds, has_choice: kind of each layer [L], and whether it holds a block.
        busy_s, retained_bytes: seconds and activations of each layer for one micro-batch [O, L].
        exposed_s, update_s: once in a step: communication over data that nothing hides [O, L], and each layer's update [L].
        transfer_s: a stage passes activations on and gradients back, for one micro-batch.
        constant_s: what a step adds to (O) whatever its stages hold.
        weights: how often the slowest stage and the sum of the stages count in a step at most; min_weights: at least, each pair by
            itself (both: cost_models/pipeline/replay.py, for one stage a rank).
    """

    def __init__(self, costs: RecomputeCosts, idx: int, memory_budget_bytes: float, *, below_s: float = np.inf) -> None:
        """Take what the layers of layout ``idx`` cost under each option; answers of ``below_s`` and more are of no interest."""
        table, plain = costs.minimum.layouts, costs.by_option[0]
        self.costs, self.idx, self.memory_budget_bytes = costs, idx, memory_budget_bytes
        self.num_stages, self.chunks = int(table.pp[idx]), int(table.num_model_chunks[idx])
        self.kinds: IntArray = costs.minimum.kind_of_layer
        self.has_choice: NDArray[np.bool_] = costs.has_choice[self.kinds]
        self.busy_s: FloatArray = costs.of_kinds("busy_s", idx)[self.kinds].T
        self.retained_bytes: FloatArray = costs.of_kinds("activation_bytes", idx)[self.kinds].T
        self.exposed_s: FloatArray = costs.exposed_s(idx)[self.kinds].T
        self.update_s = plain.per_step.layer_updates_s(idx)
        self.transfer_s = 2 * float(costs.minimum.transfer_s[idx]) if self.num_stages > 1 else 0.0
        self.constant_s = float(plain.per_step.dp_edges_s[idx])
        self._below_s = below_s - self.constant_s
        self._num_microbatches = float(table.num_microbatches[idx])
        m, pp = self._num_microbatches, self.num_stages
        self.weights = (m - 1, 1.0)
        self.min_weights: tuple[tuple[float, float], ...] = (self.weights,)
        if not table.schedule_of_row(idx).all_forward_first:
            few = ((m - 1) / 2, 1.0), (m, 0.0), (0.0, 2 * pp / (pp + 1) if m == pp else 0.0)
            self.min_weights = ((m - pp - 1, 2.0), (m, 0.0)) if m > pp else few

    def lower_bound_s(self, program: Program) -> float:
        """Return seconds of a step that no answer of a program is below."""
        return lower_bound_s(program.instance, self.min_weights) + self.constant_s

    @cached_property
    def fits(self) -> Fits:
        """Stages may hold layers i..j-1 with one option for all [O, S, L+1, L+1]: a block for each chunk, within memory."""
        costs, idx, num_options = self.costs.minimum, self.idx, len(RECOMPUTES)
        working = self.costs.working_bytes(idx)[:, None, None]
        retained, option = _prefix(self.retained_bytes), np.arange(num_options)[:, None, None]

        def fits(first: IntArray, last: IntArray) -> NDArray[np.bool_]:
            contents = replace(
                contents_between(costs, idx, first, last),
                activation_bytes=retained[option, last] - retained[option, first],
                working_bytes=np.broadcast_to(working, first.shape),
            )
            terms = stage_memory_terms(costs, idx, contents, np.arange(self.num_stages)[:, None])
            return np.asarray(memory.required_by_terms(terms, costs.scenario) <= self.memory_budget_bytes)

        size = len(self.kinds) + 1
        last = last_layers_that_fit((num_options, self.num_stages), size, fits)
        blocks = np.concatenate([[0], np.cumsum(costs.is_block)])
        has_block = blocks[None, :] - blocks[:, None] >= self.chunks
        return np.asarray(has_block & (np.arange(size) <= last[..., None]))

    @cached_property
    def best_uniform_s(self) -> float:
        """(O) of the best split with one option for all, or what answers have to be below; infinite where none fits."""
        if np.isfinite(self._below_s):
            return self._below_s
        seconds, (slowest, total) = [], self.weights
        for option, fits in enumerate(self.fits):
            _, ends = splits.fastest_split(splits.StageSplitInstance(self.busy_s[option], fits))
            if ends:
                of_layers = (self.busy_s[option], self.exposed_s[option], self.update_s)
                busy, exposed, update = (np.diff(_prefix(values)[list(ends)]) for values in of_layers)
                stage_s = busy + self.transfer_s
                seconds.append(slowest * stage_s.max() + total * stage_s.sum() + exposed.max() + update.max())
        return float(min(seconds, default=np.inf))

    @cached_property
    def spans(self) -> tuple[IntArray, IntArray, IntArray]:
        """Stage, first and last layer of each span [P] that an answer as good as `best_uniform_s` may have."""
        stages, shortest = self.num_stages, _prefix(self.busy_s.min(axis=0))
        # The slowest stage counts at least as often as there are micro-batches, and the rest has a lower bound as well.
        once_s = (self.exposed_s.min(axis=0).sum() + self.update_s.sum()) / stages
        longest_s = (self.best_uniform_s - once_s) / self._num_microbatches * (1 + 1e-9) - self.transfer_s
        longest_s = min(longest_s, 2 * float(shortest[-1]))  # finite
        s, rest = np.arange(stages)[:, None], shortest[-1] - shortest
        begins = (shortest <= s * longest_s) & (rest <= (stages - s) * longest_s)
        ends = (shortest <= (s + 1) * longest_s) & (rest <= (stages - s - 1) * longest_s)
        is_short = shortest[None, :] - shortest[:, None] <= longest_s
        allowed = np.logical_or.reduce(self.fits) & is_short & begins[:, :, None] & ends[:, None, :]
        stage, first, last = np.nonzero(allowed)
        return stage, first, last

    def between(self, values: FloatArray) -> FloatArray:
        """Return sums over the layers of each span [..., P]."""
        _, first, last = self.spans
        prefix = _prefix(values)
        return np.asarray(prefix[..., last] - prefix[..., first])

    @cached_property
    def room_bytes(self) -> FloatArray:
        """Activations of one micro-batch that each span's stage may keep [P, O] while it reserves the option's working set."""
        stage, first, last = self.spans
        costs, cap_bytes = self.costs.minimum, self.memory_budget_bytes
        contents = contents_between(costs, self.idx, first, last)
        headroom = []
        for working in self.costs.working_bytes(self.idx):
            reserving = replace(contents, working_bytes=np.full(len(stage), working))
            headroom.append(stage_headroom_bytes(costs, self.idx, reserving, stage, cap_bytes=cap_bytes))
        return np.stack(headroom, axis=1)

    def first_blocks(self, values: FloatArray, count: int) -> FloatArray:
        """Return sums over the first ``count`` blocks of each span [P]."""
        _, first, last = self.spans
        before = np.concatenate([[0], np.cumsum(self.has_choice)])
        prefix = _prefix(values[self.has_choice])
        return np.asarray(prefix[np.minimum(before[first] + count, before[last])] - prefix[before[first]])


def _prefix(values: FloatArray) -> FloatArray:
    zero = np.zeros((*values.shape[:-1], 1))
    return np.concatenate([zero, np.cumsum(values, axis=-1)], axis=-1)


class Program(NamedTuple):
    """An instance, and of which blocks it decides nothing: the ``first`` of each stage take ``option``, if that is given."""

    instance: StageProgramInstance
    option: int | None = None
    first: int = 0


def _instance(layers: Layers, spans: NDArray[np.bool_] | slice, **of_spans: Any) -> StageProgramInstance:
    stage, first, last = (of_span[spans] for of_span in layers.spans)
    slowest, total = layers.weights
    return StageProgramInstance(
        num_layers=len(layers.kinds),
        num_stages=layers.num_stages,
        stage=stage,
        first=first,
        last=last,
        slowest_weight=slowest,
        sum_weight=total,
        **of_spans,
    )


def free_program(layers: Layers) -> Program:
    """Return the program in which each stage has a choice for each of its blocks."""
    kinds = np.flatnonzero(layers.costs.has_choice)
    fixed, busy = ~layers.has_choice, layers.costs.of_kinds("busy_s", layers.idx)[kinds]
    exposed, working = layers.costs.exposed_s(layers.idx)[kinds], layers.costs.working_bytes(layers.idx)
    shape = (layers.num_stages, *busy.shape)
    is_kind = np.array([layers.kinds == kind for kind in kinds], dtype=np.float64)
    always_retained = layers.between(layers.retained_bytes[NONE] * fixed)
    instance = _instance(
        layers,
        slice(None),
        fixed_s=layers.between(layers.busy_s[NONE] * fixed) + layers.transfer_s,
        fixed_once_s=np.stack([layers.between(layers.exposed_s[NONE] * fixed), layers.between(layers.update_s)]),
        counts=np.rint(layers.between(is_kind)).astype(np.int64).T,
        seconds=np.broadcast_to(busy, shape),
        once_s=np.stack([np.broadcast_to(exposed, shape), np.zeros(shape)]),
        retained_bytes=layers.costs.of_kinds("activation_bytes", layers.idx)[kinds],
        room_bytes=layers.room_bytes - always_retained[:, None],
        uses=working[None, :] <= working[:, None],
    )
    return Program(instance)


def first_blocks_program(layers: Layers, option: int, count: int, *, limited: bool = True) -> Program:
    """Return the program in which the first ``count`` blocks of every stage take ``option``, all others none.

    Unless ``limited``, without limits of memory.
    """

    def between(values: FloatArray) -> FloatArray:
        return layers.between(values[NONE]) + layers.first_blocks(values[option] - values[NONE], count)

    keep = np.ones(len(layers.spans[0]), dtype=bool)
    if limited:
        keep = between(layers.retained_bytes) <= layers.room_bytes[:, option if count else NONE]
    once, none = np.stack([between(layers.exposed_s), layers.between(layers.update_s)]), (layers.num_stages, 0, 1)
    instance = _instance(
        layers,
        keep,
        fixed_s=(between(layers.busy_s) + layers.transfer_s)[keep],
        fixed_once_s=once[:, keep],
        counts=np.zeros((int(keep.sum()), 0), dtype=np.int64),
        seconds=np.zeros(none),
        once_s=np.zeros((2, *none)),
        retained_bytes=np.zeros((0, 1)),
        room_bytes=np.zeros((int(keep.sum()), 1)),
        uses=np.ones((1, 1), dtype=bool),
    )
    return Program(instance, option, count)


def programs(layers: Layers, best_s: Callable[[], float]) -> Iterator[Program]:
    """Yield the programs of a layout one of whose answers may be faster than the best so far."""
    if not layers.costs.minimum.workload.engine_facts.recomputes_first_blocks:
        yield free_program(layers)
        return
    max_blocks = int(layers.first_blocks(np.ones(len(layers.kinds)), len(layers.kinds)).max(initial=0))
    yield first_blocks_program(layers, NONE, 0)
    yield first_blocks_program(layers, SELECTIVE, max_blocks)

    def is_promising(count: int) -> bool:
        unlimited = first_blocks_program(layers, FULL, count, limited=False)
        return layers.lower_bound_s(unlimited) < best_s()

    if not is_promising(layers.chunks):
        return
    for count in range(_min_blocks(layers, max_blocks), max_blocks + layers.chunks, layers.chunks):
        # With more blocks recomputed every split takes longer, so this bounds all that remain.
        if not is_promising(count):
            return
        yield first_blocks_program(layers, FULL, count)


def _min_blocks(layers: Layers, max_blocks: int) -> int:
    """Return the least number of blocks, in multiples of a stage's chunks, with which some split fits.

    It is beyond ``max_blocks`` if none does.
    """
    low, high = 1, -(-max_blocks // layers.chunks) + 1
    while low < high:
        middle = (low + high) // 2
        instance = first_blocks_program(layers, FULL, middle * layers.chunks).instance
        fits = np.isfinite(min_slowest_s(instance, instance.fixed_s))
        low, high = (low, middle) if fits else (middle + 1, high)
    return low * layers.chunks


def choose_stages(layers: Layers) -> list[Stages]:
    """Return even stages for the pipeline only, and even ones with what they do once; none where nothing fits."""
    best: dict[float, Stages] = {}

    def best_s() -> float:
        return min((stages.objective_s for stages in best.values()), default=np.inf)

    bound_s = np.inf
    for program in programs(layers, best_s):
        program_s = layers.lower_bound_s(program)
        bound_s = min(bound_s, program_s)
        if program_s >= best_s():
            continue
        for once_weight in (0.0, 1 / sum(layers.weights)):
            solution = solve(program.instance, once_weight=once_weight)
            if solution.choice is not None:
                options = options_of_layers(layers, program, solution.choice)
                boundaries, objective_s = solution.choice.boundaries, solution.objective + layers.constant_s
                stages = Stages(boundaries, options, objective_s, 0.0)
                best[once_weight] = min(best.get(once_weight, stages), stages, key=lambda stages: stages.objective_s)
    # A program that was not promising has no answer below this one.
    bound_s = min(bound_s, best_s())
    return list({stages.boundaries: stages._replace(bound_s=bound_s) for stages in best.values()}.values())


def options_of_layers(layers: Layers, program: Program, filling: StageFilling) -> tuple[int, ...]:
    """Return an option for each layer: of the blocks of a kind on a stage the first ones recompute the most."""
    options = np.zeros(len(layers.kinds), dtype=np.int64)
    block_kinds = np.flatnonzero(layers.costs.has_choice)
    for s, (first, last) in enumerate(zip(filling.boundaries[:-1], filling.boundaries[1:], strict=True)):
        local = np.arange(first, last)
        blocks = local[layers.has_choice[first:last]]
        if program.option is not None:
            options[blocks[: program.first]] = program.option
            continue
        for k, kind in enumerate(block_kinds):
            counts = filling.counts[s, k][::-1]
            options[local[layers.kinds[local] == kind]] = np.repeat(np.arange(len(counts))[::-1], counts)
    return tuple(int(option) for option in options)


def with_schedule(costs: CostTable, schedule: int) -> CostTable:
    """Return the same layouts with another schedule: nothing that one layer costs differs."""
    return costs.with_layouts(costs.layouts.replace(schedule=np.full_like(costs.layouts.schedule, schedule)))


class OrderInstance(NamedTuple):
    """The passes of a layout (row 0) as `estimate_step` replays them, whatever its schedule.

    Attributes:
        headroom_bytes: what each rank may hold of activations [R].
        outside_s: what a step adds to its passes, in any order.
    """

    row: CostTable
    boundaries: tuple[int, ...]
    pipeline: Pipeline
    headroom_bytes: tuple[float, ...]
    outside_s: float

    @property
    def bound_s(self) -> float:
        """Seconds of a step that no order of the passes is below."""
        return self.outside_s + no_order_below_s(self.pipeline, [cap * (1 + SUMMED) for cap in self.headroom_bytes])


def order_instance(costs: CostTable, idx: int, boundaries: tuple[int, ...]) -> OrderInstance:
    """Return what an order of passes is made for: the stages of layout ``idx``."""
    row = with_schedule(costs.select(np.array([idx])), SYNTHESISED)
    shape, first, last = pipeline_shape(row, 0), np.array(boundaries[:-1]), np.array(boundaries[1:])
    contents, passes = contents_between(row, 0, first, last), pass_seconds(row, 0, boundaries)
    each_way_s = np.full(shape.num_stages, float(row.transfer_s[0]) / shape.num_model_chunks)
    retained = contents.activation_bytes + contents.output_bytes
    pipeline = build_pipeline(shape, passes, each_way_s, retained, contents.pending_bytes)
    headroom = rank_headroom_bytes(row, 0, contents, cap_bytes=row.cluster.memory_budget_bytes)
    outside_s = outside_passes_s(row, 0, contents, passes)
    return OrderInstance(row, boundaries, pipeline, tuple(float(bytes_) for bytes_ in headroom), outside_s)


def synthesise(
    instance: OrderInstance, *, below_s: float = np.inf, quick: bool = False
) -> tuple[Order, TrainingEstimate] | None:
    """Return the best order of passes found for the stages of a layout; None where none is within memory, or none below ``below_s``
    by the bound.

    Where no step is shorter than ``below_s``, or only a ``quick`` answer is asked for, it is the first one tried.
    """
    if instance.bound_s >= below_s:
        return None
    order = quick_order(
        instance.pipeline,
        instance.headroom_bytes,
        min_idle_fraction=np.inf if quick else MIN_IDLE_FRACTION,
        below_s=0.0 if quick else below_s - instance.outside_s,
    )
    if order is None:
        return None
    estimate = estimate_step(replace(instance.row, order=order), 0, instance.boundaries)
    return (order, estimate) if estimate.fits else None


def build_pipeline(
    shape: PipelineShape,
    passes: StagePasses,
    each_way_s: FloatArray,
    retained_bytes: FloatArray | None = None,
    pending_bytes: FloatArray | None = None,
) -> Pipeline:
    """Return passes whose transfers are part of them, as both ranks wait for a transfer.

    Args:
        each_way_s: seconds of a transfer after each stage [S].
        retained_bytes: activations of a micro-batch in each stage [S]; None where only times are of interest.
        pending_bytes: what waits between its input and its weight pass; None: nothing.
    """
    retained = np.ones(shape.num_stages) if retained_bytes is None else retained_bytes
    pending = np.zeros(shape.num_stages) if pending_bytes is None else pending_bytes
    return Pipeline(
        num_microbatches=shape.num_microbatches,
        rank_of_stage=shape.rank_of_stage,
        forward_s=tuple((passes.forward + each_way_s).tolist()),
        backward_s=tuple((passes.backward - passes.weight + each_way_s).tolist()),
        weight_s=tuple(passes.weight.tolist()),
        transfer_s=(0.0,) * (shape.num_stages - 1),
        held_bytes=tuple(retained.tolist()),
        backward_freed_bytes=tuple((-pending).tolist()),
        weight_freed_bytes=tuple((retained + pending).tolist()),
    )
