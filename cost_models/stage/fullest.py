"""The fullest moment of a rank under an order of passes: activations, gradients and copies of its chunks that meet there.

At each moment of `pipeline.in_flight.holdings` a rank of chunks c holds

    activations  sum_c stored[c] a[c] + pending[c] p[c]       p: what waits between an input and a weight pass
    logits       stored[c] b T V / tp of the chunk with the head
    gradients    sum_c summed[c] 4 P[c] + reduced[c] 4 P[c] / N
    unsharded    sum_c (1 - reduced[c]) b P[c]
    temporary    of the pass that runs: what the loss makes of the logits in a forward pass; the working set of a layer, or
                 gradients of the head, in a backward pass; gradients of all parameters, before they add up in fp32, less what was
                 read for them, in a weight pass, or those of one matrix and all that is pending; the input of a unit's reduction at
                 the end of all
"""

from __future__ import annotations

import numpy as np

from ...schema.units import Array, FloatArray, IntArray
from ..coefficients import Scenario
from ..layer.data import has_copies
from ..pipeline.in_flight import BACKWARD, END, FORWARD, INPUT, MOMENTS, WEIGHT, Holding
from .passing import MemoryTerms, StageContents, StepShape, final_reduction_bytes, loss_bytes


def stored_activations(chunks: StageContents, holding: Holding) -> FloatArray:
    """Return the bytes of activations and of what is pending at every moment [..., K], contents [..., v]."""
    return _sum(holding.stored, chunks.activation_bytes) + _sum(holding.pending, chunks.pending_bytes)


def fullest_moment(chunks: StageContents, step: StepShape, scenario: Scenario, holding: Holding) -> MemoryTerms:
    """Return the terms of the fullest moment of our runtime [...], without states and receive buffers.

    Args:
        chunks: of each chunk of the ranks [..., v].
        holding: of the ranks [..., K] or [..., K, v].
    """
    workload, copies = scenario.workload, has_copies(step, scenario.workload)
    b, master = workload.compute_bytes, float(workload.master_bytes)
    logits = b * np.asarray(chunks.logits) if workload.loss == "engine" else 0.0 * np.asarray(chunks.logits)
    # The gradients of a first weight pass are those that later ones are added to, unless they are cast before.
    made = np.eye(np.shape(holding.summed)[-1])[holding.chunk] * (holding.moment == WEIGHT)[..., None]
    made = made * (1 - holding.summed) * workload.is_full_precision
    summed = holding.summed + made
    copied = np.where(copies, b * chunks.trained + chunks.frozen_bytes, 0.0)
    terms = {
        "gradients": _sum(summed, master * chunks.trained) + _sum(holding.reduced, master * chunks.reduced(step)),
        "unsharded": _sum(1 - holding.reduced, copied),
        "activations": scenario.cluster.calibration.activations * stored_activations(chunks, holding),
        "logits": _sum(holding.stored, logits),
        "temporary": _temporary(chunks, step, scenario, holding),
    }
    next_to_all = np.where(made.any(axis=-1), _taken(_first_weights(chunks, b), holding.chunk), terms["temporary"])
    terms["temporary"] = np.maximum(next_to_all, 0.0)
    terms["activations"] = terms["activations"] + np.minimum(next_to_all, 0.0)  # read and gone
    largest = np.asarray(sum(terms.values())).argmax(axis=-1)[..., None]
    return {name: np.take_along_axis(values, largest, axis=-1)[..., 0] for name, values in terms.items()}


def _temporary(chunks: StageContents, step: StepShape, scenario: Scenario, holding: Holding) -> FloatArray:
    """Return what comes and goes in the pass at hand [..., K]; in a backward pass the logits that were counted go."""
    workload, copies = scenario.workload, has_copies(step, scenario.workload)
    b, logits = workload.compute_bytes, np.asarray(chunks.logits)
    stored = b * logits if workload.loss == "engine" else 0.0 * logits
    of_head = b * np.where(logits > 0, chunks.root_params, 0.0)
    # Made last, when the pass has let go of what it saved.
    of_embedding = np.where(logits > 0, 0.0, b * chunks.root_params - chunks.activation_bytes)
    # Gradients that are cast add up after the pass; others right away.
    uncast = b * np.maximum(of_head / b, chunks.block_params / 3)
    made = b * chunks.trained + _first_weights(chunks, b)
    by_moment = {
        FORWARD: loss_bytes(logits, workload, chunks.boundary_bytes, step.tp) - stored,
        BACKWARD: np.maximum.reduce(np.broadcast_arrays(of_head, chunks.working_bytes - stored, of_embedding)),
        INPUT: chunks.split_working_bytes,
        WEIGHT: uncast if workload.is_full_precision else made,
        END: np.where(copies, final_reduction_bytes(chunks, step, scenario), 0.0),
    }
    of_moments = np.stack(np.broadcast_arrays(*(by_moment[idx] for idx in range(len(MOMENTS)))), axis=-1)
    flat = of_moments.reshape(*of_moments.shape[:-2], -1)
    return _taken(flat, holding.chunk * len(MOMENTS) + holding.moment)


def _first_weights(chunks: StageContents, b: int) -> FloatArray:
    """Return the bytes of a weight pass next to gradients of all its parameters [..., v].

    It frees what it reads, matrix by matrix: its end, or its start, when all is pending still.
    """
    of_one = b * (np.asarray(chunks.block_params) / 3 - chunks.trained) + chunks.pending_bytes
    return np.maximum(-np.asarray(chunks.read_bytes), of_one)


def _taken(values: FloatArray, idx: IntArray) -> FloatArray:
    shape = np.broadcast_shapes(values.shape[:-1], idx.shape[:-1])
    values, idx = np.broadcast_to(values, (*shape, values.shape[-1])), np.broadcast_to(idx, (*shape, idx.shape[-1]))
    return np.asarray(np.take_along_axis(values, idx, axis=-1))


def _sum(counts: IntArray, of_chunks: Array) -> FloatArray:
    """Return sums over the chunks [..., K] of counts [..., K, v] times bytes [..., v]."""
    return np.asarray((counts @ np.asarray(of_chunks)[..., None])[..., 0])
