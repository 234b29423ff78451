"""Context parallelism: what a ring of ranks, and an exchange of tokens for heads, add to the attention of one block.

Every rank holds 1 / cp of each sequence, cut into 2 cp pieces and dealt head to tail, so that causal work is even (Megatron's
`cp_comm_type` p2p, arXiv:2310.01889; load balancing as in Llama 3, arXiv:2407.21783 section 3.3.2). In r steps it works through
the keys and values of all ranks; while it works on one part the next arrives from its neighbour:

    exposed = (r - 1) * max(0, transfer of k and v - attention / r)      backward: twice the bytes, k, v and their gradients

Each further step adds kernels of its own and merges its part into the output (backward: into the gradients of q, k and v).
All-gathered keys and values move the same bytes at once; grouped queries and latent attention send what their kernels read.

With Ulysses degree u (arXiv:2309.14509; Megatron's a2a, and a2a+p2p where the ring has r = cp / u > 1 steps) u neighbours first
exchange queries, keys and values, so that each has all their tokens for a u-th of the heads, and exchange the output back. Work and
kept bytes are those of the ring with fewer steps: u times the tokens, a u-th of the heads. Nothing runs beside the exchanges:

    exposed = all-to-all of q, k, v and out over u, forward; of their gradients, backward

and each tensor is put into the order of its receivers and back, a copy each.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..schema.model import LatentAttention, SoftmaxAttention
from .coefficients import device_rates
from .collectives import Hops, collective_s, p2p_s
from .layouts import FloatArray
from .setting import Setting

MERGE_KERNELS = 3
"""Kernels that merge one step's part: rescale the sums of exponentials, rescale and add the output (TransformerEngine)."""

EXCHANGED_COPIES = 2
"""Copies of each tensor around its all-to-all: into the order of the receivers, and back into that of the sequence."""

_EXCHANGE_DISPATCHES = 12
"""Operators the host dispatches for the exchanges of one pass: two copies and a collective for each of four tensors."""

_STEP_DISPATCHES = 5
"""Operators the host dispatches for one more step: attention, its merging kernels, a batch of sends and receives."""


class Added(NamedTuple):
    """Seconds and dispatches [N] that are added to one block: on the device, and exposed between ranks."""

    forward_s: FloatArray
    backward_s: FloatArray
    exposed_forward_s: FloatArray
    exposed_backward_s: FloatArray
    dispatches: FloatArray


def kv_width(attention: SoftmaxAttention | LatentAttention) -> int:
    """Elements of the keys and values of one token, all heads, as the attention kernel reads them."""
    v_dim = attention.v_head_dim if isinstance(attention, LatentAttention) else attention.head_dim
    return attention.num_kv_heads * (attention.head_dim + v_dim)


def context_parallel(
    attention: SoftmaxAttention | LatentAttention, attention_s: tuple[FloatArray, FloatArray], setting: Setting
) -> Added:
    """What the ring and the exchange add to a block whose attention takes ``attention_s`` seconds forward and backward."""
    parts = zip(ring(attention, attention_s, setting), exchange(attention, setting), strict=True)
    return Added(*(np.asarray(of_ring + of_exchange) for of_ring, of_exchange in parts))


def exchange(attention: SoftmaxAttention | LatentAttention, setting: Setting) -> Added:
    """What the exchange of tokens for heads over cp_ulysses ranks adds to a block."""
    batch, workload, rates = setting.batch, setting.workload, device_rates(setting.cluster, setting.workload)
    v_dim = attention.v_head_dim if isinstance(attention, LatentAttention) else attention.head_dim
    each = kv_width(attention) / 2
    tensors = (attention.q_dim, each, each, attention.num_heads * v_dim)
    element = np.asarray(setting.tokens / batch.tp * float(workload.compute_bytes))
    exposed = sum(
        collective_s("all_to_all", element * width, batch.cp_ulysses, batch.tp, setting.cluster) for width in tensors
    )
    copied = 2 * element * sum(tensors) / rates.elementwise_bytes_per_s  # read and written
    exchanges = batch.cp_ulysses > 1
    copies_s = np.where(exchanges, EXCHANGED_COPIES * (len(tensors) * rates.kernel_s + copied), 0.0)
    dispatches = np.where(exchanges, float(_EXCHANGE_DISPATCHES), 0.0)
    return Added(copies_s, copies_s, np.asarray(exposed), np.asarray(exposed), dispatches)


def ring(
    attention: SoftmaxAttention | LatentAttention, attention_s: tuple[FloatArray, FloatArray], setting: Setting
) -> Added:
    """What the ring adds to a block whose attention takes ``attention_s`` seconds forward and backward on one rank."""
    batch, workload, rates = setting.batch, setting.workload, device_rates(setting.cluster, setting.workload)
    degree = batch.cp // batch.cp_ulysses
    tokens, steps = setting.tokens, degree - 1
    kv_bytes = np.asarray(tokens * kv_width(attention) / batch.tp * workload.compute_bytes)
    # The ring crosses whatever its ranks span, and its slowest link decides.
    transfer_s = p2p_s(kv_bytes, Hops(degree, batch.tp * batch.cp_ulysses, "ring"), setting.cluster)
    exposed_forward = steps * np.maximum(transfer_s - attention_s[0] / degree, 0.0)
    exposed_backward = steps * np.maximum(2 * transfer_s - attention_s[1] / degree, 0.0)
    v_dim = attention.v_head_dim if isinstance(attention, LatentAttention) else attention.head_dim
    out, q = attention.num_heads * v_dim, attention.q_dim
    floor = rates.launch_s + MERGE_KERNELS * rates.kernel_s
    # Reads the running and the new part and writes the sum; half of the steps concern half of the rows only.
    merged = 0.75 * 3 * tokens / batch.tp * workload.compute_bytes / rates.elementwise_bytes_per_s
    return Added(
        steps * (floor + merged * out),
        steps * (floor + merged * (q + kv_width(attention))),
        np.asarray(exposed_forward),
        np.asarray(exposed_backward),
        np.asarray(steps * float(_STEP_DISPATCHES)),
    )
