"""Bytes one layer keeps for the backward pass, and its working set there, under every layout of a batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..schema import ClusterSpec, Workload
from ..schema.layout import Recompute
from . import engine_memory
from .activations import Kernels, Saved, saved_elements, saved_for_weights
from .adapters import saved_beside
from .engines import is_megatron
from .experts import token_share
from .layouts import RECOMPUTES, FloatArray, LayoutBatch
from .operators import Layer


def activation_bytes(
    layer: Layer, hidden_dim: int, batch: LayoutBatch, workload: Workload, cluster: ClusterSpec
) -> tuple[FloatArray, FloatArray]:
    """Bytes kept from forward to backward under each layout's recompute, and the working set of the backward pass."""
    how = Kernels(
        compute_bytes=workload.compute_bytes,
        unfused_norm=cluster.weakest_device.vendor == "cpu",
        score_width=workload.seq_len if workload.attention == "math" else 0,
        engine=engine_memory.MEMORY.get(workload.engine),
        every_second=workload.selective == "alternate_products",
        saves_fp8=workload.precision in ("fp8", "nvfp4") and workload.engine == "megatron",
        eager=workload.fusion == "eager",
        frozen=workload.adapters is not None,
        dropout=workload.dropout,
        fp8_activation_input=workload.fp8_activation_input,
    )
    choices = [_saved(layer, hidden_dim, recompute, how, workload) for recompute in RECOMPUTES]
    if is_megatron(workload) and workload.attention == "math":
        # Selective drops what lies between query, key, value and the output of attention, and nothing else.
        choices[RECOMPUTES.index("selective")] = _saved(
            layer, hidden_dim, "none", replace(how, score_width=0), workload
        )
    kept = np.stack([_saved_bytes(saved, batch, workload) for saved in choices])
    chosen = np.take_along_axis(kept, batch.recompute[None, :], axis=0)[0]
    mean = batch.recompute_fraction * chosen + (1 - batch.recompute_fraction) * kept[0]
    # While one layer runs backward, what it had dropped is there again, and gradients of its widest tensors beside it.
    gradients = 0.5 * kept[0]
    if how.engine is not None and how.score_width:
        # Each gradient of the scores takes the place of a saved tensor that has been used.
        fused = _saved(layer, hidden_dim, "none", replace(how, score_width=0), workload)
        gradients = 0.5 * _saved_bytes(fused, batch, workload)
    return mean, kept[0] - chosen + gradients


def _saved(layer: Layer, hidden_dim: int, recompute: Recompute, how: Kernels, workload: Workload) -> Saved:
    """What a layer keeps; a frozen one without what only gradients of weights read, but with what its adapters keep."""
    saved = saved_elements(layer, hidden_dim, recompute, how)
    if workload.adapters is None:
        return saved
    if workload.adapters.frozen != "nf4":  # its product keeps its input all the same
        saved -= saved_for_weights(layer, hidden_dim, recompute)
    return saved if recompute == "full" else saved + saved_beside(layer, hidden_dim, workload.adapters)


def _saved_bytes(saved: Saved, batch: LayoutBatch, workload: Workload) -> FloatArray:
    tokens = batch.tokens(workload.seq_len)
    along_sequence = np.where(batch.sequence_parallel == 1, batch.tp, 1)
    whole = saved.whole + saved.routed * token_share(batch, workload)
    elements = whole + saved.tp / batch.tp + saved.tokens / along_sequence
    fp32 = saved.tp_fp32 / batch.tp + saved.fp32 / along_sequence
    return np.asarray(tokens * (workload.compute_bytes * elements + 4 * fp32), dtype=np.float64)
