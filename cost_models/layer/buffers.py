"""Buffers that stay for the entire step: of products that run in chunks with their communication, and of graphs."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...schema import Workload
from ...schema.units import Array, FloatArray
from .operators import CostInputs


def userbuffers_bytes(boundary_bytes: Array, layouts: Any, workload: Workload) -> Array:
    """Return the buffers for products in chunks, given the hidden states of a rank; of a StepShape or a LayoutTable.

    Each of the ten collectives of a block has one that ranks write into, for the hidden states of all tp ranks: six gathers, in fp8
    where products are, and four reductions.
    Source: Transformer Engine, initialize_ub; Megatron gives it [seq_len / cp * micro_batch_size, hidden_dim].
    """
    gathered = 1.0 if workload.precision in ("fp8", "nvfp4") else float(workload.compute_bytes)
    whole = boundary_bytes * layouts.tp * (6 * gathered / workload.compute_bytes + 4)
    return np.where(layouts.tp_overlap, whole, 0.0)


def graph_buffers_bytes(inputs: CostInputs) -> FloatArray:
    """Return what a block that is a graph has besides for each micro-batch in flight [N]: its input and its output's gradient.

    A graph reads from and writes to the same places whenever it is replayed, and a block has one for each micro-batch in flight:
    what comes from elsewhere is copied there. Source: Transformer Engine, make_graphed_callables; Megatron-Core, cuda_graphs.py.
    """
    layouts = inputs.layouts
    hidden_bytes = inputs.hidden_bytes / np.where(layouts.sequence_parallel == 1, layouts.tp, 1)
    return np.where(layouts.cuda_graphs == 1, 2 * hidden_bytes, 0.0)
