"""Predictions for many rows: those that share model, cluster and workload are one batch of layouts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...cost_models.layouts import LayoutBatch
from ...cost_models.step import SpaceCosts, estimate_step, with_memory
from ...schema import ConfigError, Estimate
from ...schema.model import Block
from ...solvers import stage_split
from .inputs import RunInputs, Skip, run_inputs
from .rows import RunRow


@dataclass(frozen=True)
class Prediction:
    """What we say about a row: an estimate, or why there is none."""

    inputs: RunInputs | None
    estimate: Estimate | None
    skipped: str | None


def predict(rows: Sequence[RunRow]) -> list[Prediction]:
    """One prediction per row, in order."""
    found: dict[int, Prediction] = {}
    batches: dict[object, list[tuple[int, RunInputs]]] = defaultdict(list)
    for idx, row in enumerate(rows):
        inputs = run_inputs(row)
        if isinstance(inputs, Skip):
            found[idx] = Prediction(None, None, inputs.reason)
        else:
            batches[(id(inputs.model), id(inputs.cluster), inputs.workload)].append((idx, inputs))
    for members in batches.values():
        found.update(_predict_batch(members))
    return [found[idx] for idx in range(len(rows))]


def _predict_batch(members: list[tuple[int, RunInputs]]) -> dict[int, Prediction]:
    first = members[0][1]
    try:
        batch = LayoutBatch.of([inputs.layout for _, inputs in members], first.workload.global_batch_size)
        costs = SpaceCosts.of(first.model, first.workload, first.cluster, batch)
    except ConfigError as error:
        return {idx: Prediction(inputs, None, f"estimate: {error.message}") for idx, inputs in members}
    return {idx: Prediction(inputs, _estimate(costs, n, inputs), None) for n, (idx, inputs) in enumerate(members)}


def _estimate(costs: SpaceCosts, idx: int, inputs: RunInputs) -> Estimate:
    cuts = boundaries(costs, idx, balanced=inputs.balanced_stages)
    estimate = estimate_step(costs, idx, cuts)
    if inputs.stage_layouts:
        estimate = _with_stage_layouts(costs, estimate, inputs, cuts)
    # torch's optimizers raise on an empty list of parameters, and even norm, head and loss as stages of their own leave some empty.
    if inputs.layout.pp > costs.model.num_layers + 2:
        return estimate.replace(fits=False)
    return estimate


def _with_stage_layouts(costs: SpaceCosts, estimate: Estimate, inputs: RunInputs, cuts: tuple[int, ...]) -> Estimate:
    """Memory where each stage recomputes and offloads another part: the fullest stage under its own layout."""
    batch = LayoutBatch.of(list(inputs.stage_layouts), inputs.workload.global_batch_size)
    own = SpaceCosts.of(costs.model, costs.workload, costs.cluster, batch)
    stages = [estimate_step(own, s, cuts).stages[s] for s in range(len(inputs.stage_layouts))]
    fullest = max(stages, key=lambda stage: stage.memory_bytes.total)
    return with_memory(estimate, fullest.memory_bytes, costs.cluster)


def boundaries(costs: SpaceCosts, idx: int, *, balanced: bool) -> tuple[int, ...]:
    """Stages as the engine that ran cuts them: by cost, or as many blocks on each with embedding and head on top.

    Where the blocks do not divide, embedding and head count as a layer each (as recipes for such models do), else by cost.
    """
    pp, num_blocks, size = int(costs.batch.pp[idx]), costs.model.num_blocks, len(costs.kind_of_layer)
    if pp == 1:
        return (0, size)
    if num_blocks < pp:  # some stages have no block
        return tuple(-(-s * size // pp) for s in range(pp + 1))
    if not balanced and num_blocks % pp == 0:
        each = num_blocks // pp
        return (0, *(1 + each * s for s in range(1, pp)), size)
    if not balanced and size % pp == 0:
        return tuple(range(0, size + 1, size // pp))
    is_block = np.array([isinstance(kind, Block) for kind in costs.kinds])[costs.kind_of_layer]
    blocks = np.concatenate([[0], np.cumsum(is_block)])
    has_block = np.broadcast_to(blocks[None, :] > blocks[:, None], (pp, size + 1, size + 1))
    return stage_split.solve(stage_split.Instance(costs.per_layer("busy_s", idx), has_block)).boundaries
