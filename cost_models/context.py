"""Context parallelism: what a ring of cp ranks adds to the attention of one block.

Every rank holds 1 / cp of each sequence, cut into 2 cp pieces and dealt head to tail, so that causal work is even (Megatron's
`cp_comm_type` p2p, arXiv:2310.01889; load balancing as in Llama 3, arXiv:2407.21783 section 3.3.2). In cp steps it works through
the keys and values of all ranks; while it works on one part the next arrives from its neighbour:

    exposed = (cp - 1) * max(0, transfer of k and v - attention / cp)      backward: twice the bytes, k, v and their gradients

Each further step adds kernels of its own and merges its part into the output (backward: into the gradients of q, k and v).
All-gathered keys and values move the same bytes at once; grouped queries and latent attention send what their kernels read.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..schema.model import LatentAttention, SoftmaxAttention
from .coefficients import device_rates
from .collectives import Hops, p2p_s
from .layouts import FloatArray
from .setting import Setting

MERGE_KERNELS = 3
"""Kernels that merge one step's part: rescale the sums of exponentials, rescale and add the output (TransformerEngine)."""

_STEP_DISPATCHES = 5
"""Operators the host dispatches for one more step: attention, its merging kernels, a batch of sends and receives."""


class Ring(NamedTuple):
    """Seconds and dispatches [N] that the ring adds to one block: on the device, and exposed between ranks."""

    forward_s: FloatArray
    backward_s: FloatArray
    exposed_forward_s: FloatArray
    exposed_backward_s: FloatArray
    dispatches: FloatArray


def kv_width(attention: SoftmaxAttention | LatentAttention) -> int:
    """Elements of the keys and values of one token, all heads, as the attention kernel reads them."""
    v_dim = attention.v_head_dim if isinstance(attention, LatentAttention) else attention.head_dim
    return attention.num_kv_heads * (attention.head_dim + v_dim)


def ring(
    attention: SoftmaxAttention | LatentAttention, attention_s: tuple[FloatArray, FloatArray], setting: Setting
) -> Ring:
    """What the ring adds to a block whose attention takes ``attention_s`` seconds forward and backward on one rank."""
    batch, workload, rates = setting.batch, setting.workload, device_rates(setting.cluster, setting.workload)
    tokens, steps = setting.tokens, batch.cp - 1
    kv_bytes = np.asarray(tokens * kv_width(attention) / batch.tp * workload.compute_bytes)
    # The ring crosses whatever its ranks span, and its slowest link decides.
    transfer_s = p2p_s(kv_bytes, Hops(batch.cp, batch.tp, "ring"), setting.cluster)
    exposed_forward = steps * np.maximum(transfer_s - attention_s[0] / batch.cp, 0.0)
    exposed_backward = steps * np.maximum(2 * transfer_s - attention_s[1] / batch.cp, 0.0)
    v_dim = attention.v_head_dim if isinstance(attention, LatentAttention) else attention.head_dim
    out, q = attention.num_heads * v_dim, attention.q_dim
    floor = rates.launch_s + MERGE_KERNELS * rates.kernel_s
    # Reads the running and the new part and writes the sum; half of the steps concern half of the rows only.
    merged = 0.75 * 3 * tokens / batch.tp * workload.compute_bytes / rates.elementwise_bytes_per_s
    return Ring(
        steps * (floor + merged * out),
        steps * (floor + merged * (q + kv_width(attention))),
        np.asarray(exposed_forward),
        np.asarray(exposed_backward),
        np.asarray(steps * float(_STEP_DISPATCHES)),
    )
