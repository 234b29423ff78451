"""Context parallelism: what a ring of ranks, and an exchange of tokens for heads, add to attention.

Every rank holds 1 / cp of each sequence, cut into 2 cp pieces and dealt head to tail, so that causal work is even (Megatron's
`cp_comm_type` p2p, arXiv:2310.01889; load balancing as in Llama 3, arXiv:2407.21783 section 3.3.2). In r steps it works through
the keys and values of all ranks; while it works on one part the next arrives from its neighbour:

    exposed = (r - 1) * max(0, transfer of k and v - attention / r)      backward: twice the bytes, k, v and their gradients

Each further step adds kernels and merges its part into the output (backward: into the gradients of q, k and v). Grouped queries and
latent attention send what their kernels read.
With Ulysses degree u (arXiv:2309.14509; Megatron's a2a, and a2a+p2p where the ring has r = cp / u > 1 steps) u neighbours first
exchange queries, keys and values, so that each has all their tokens for a u-th of the heads, and exchange the output back. Nothing
overlaps the exchanges, and each tensor is put into the order of its receivers and back, a copy each:

    exposed = all-to-all of q, k, v and out over u, forward; of their gradients, backward

Mixers with a state (linear attention, Mamba) pass it from piece to piece of the sequence instead: `state_passing_s`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ...schema.engine_kernels import RingKernels
from ...schema.recurrences import Recurrence
from ...schema.units import FloatArray, IntArray
from ..hardware.collectives import collective_s, p2p_s
from ..hardware.compute import attention_s as fused_s
from ..hardware.machine import device_rates
from ..hardware.node_links import Hops
from .operators import CostInputs, FusedAttention, kernels_of

_MERGE_KERNELS = 3
"""Kernels that merge one step's part: rescale the sums of exponentials, rescale and add the output (TransformerEngine)."""

_EXCHANGED_COPIES = 2
"""Copies of each tensor around its all-to-all: into the order of the receivers, and back into that of the sequence."""

_EXCHANGE_DISPATCHES = 12
"""Operators the host dispatches for the exchanges of one pass: two copies and a collective for each of four tensors."""

_STEP_DISPATCHES = 5
"""Operators the host dispatches for one more step: attention, its merging kernels, a batch of sends and receives."""


class AddedTime(NamedTuple):
    """Seconds and dispatches [N] that are added to one block: on the device, and exposed between ranks."""

    forward_s: FloatArray
    backward_s: FloatArray
    exposed_forward_s: FloatArray
    exposed_backward_s: FloatArray
    dispatches: FloatArray


def context_parallel(
    attention: FusedAttention, attention_s: tuple[FloatArray, FloatArray], inputs: CostInputs
) -> AddedTime:
    """Return what ring and exchange add to attention that takes ``attention_s`` seconds forward and backward on one rank."""
    terms = zip(ring_attention(attention, attention_s, inputs), ulysses_exchange(attention, inputs), strict=True)
    return AddedTime(*(np.asarray(of_ring + of_exchange) for of_ring, of_exchange in terms))


def ulysses_exchange(attention: FusedAttention, inputs: CostInputs) -> AddedTime:
    """Return what the exchange of tokens for heads over cp_ulysses ranks adds."""
    layouts, rates, ranks = inputs.layouts, device_rates(inputs.scenario), inputs.layouts.cp_ulysses
    each = attention.kv_width / 2
    widths = (attention.num_heads * attention.qk_dim, each, each, attention.num_heads * attention.v_dim)
    element = np.asarray(inputs.tokens / layouts.tp * float(inputs.workload.compute_bytes))
    exposed = sum(collective_s("all_to_all", element * width, ranks, layouts.tp, inputs.cluster) for width in widths)
    copied = 2 * element * sum(widths) / rates.elementwise_bytes_per_s  # read and written
    copies_s = np.where(ranks > 1, _EXCHANGED_COPIES * (len(widths) * rates.kernel_s + copied), 0.0)
    dispatches = np.where(ranks > 1, float(_EXCHANGE_DISPATCHES), 0.0)
    return AddedTime(copies_s, copies_s, np.asarray(exposed), np.asarray(exposed), dispatches)


def ring_attention(
    attention: FusedAttention, attention_s: tuple[FloatArray, FloatArray], inputs: CostInputs
) -> AddedTime:
    """Return what the ring adds to attention that takes ``attention_s`` seconds forward and backward on one rank."""
    layouts, compute_bytes, rates = inputs.layouts, inputs.workload.compute_bytes, device_rates(inputs.scenario)
    degree = layouts.cp // layouts.cp_ulysses
    tokens, steps = inputs.tokens, degree - 1
    kv_bytes = np.asarray(tokens * attention.kv_width / layouts.tp * compute_bytes)
    # The ring crosses whatever its ranks span, and its slowest link decides.
    transfer_s = p2p_s(kv_bytes, Hops(degree, layouts.tp * layouts.cp_ulysses, "ring"), inputs.cluster)
    exposed_forward = steps * np.maximum(transfer_s - attention_s[0] / degree, 0.0)
    exposed_backward = steps * np.maximum(2 * transfer_s - attention_s[1] / degree, 0.0)
    around = kernels_of(inputs.workload, on_host=inputs.cluster.weakest_device.backend.is_host).ring
    if around is not None:
        # Gradients of keys arrive after the last step.
        exposed = exposed_forward, exposed_backward + (steps > 0) * transfer_s
        pieces = [_in_pieces(attention, seconds, degree, which, inputs) for which, seconds in enumerate(attention_s)]
        return _copied_ring(around, attention, (steps, pieces), exposed, inputs)
    out, q = attention.num_heads * attention.v_dim, attention.num_heads * attention.qk_dim
    floor = rates.launch_s + _MERGE_KERNELS * rates.kernel_s
    # Reads the running and the new part and writes the sum; half of the steps concern half of the rows only.
    merged = 0.75 * 3 * tokens / layouts.tp * compute_bytes / rates.elementwise_bytes_per_s
    return AddedTime(
        steps * (floor + merged * out),
        steps * (floor + merged * (q + attention.kv_width)),
        np.asarray(exposed_forward),
        np.asarray(exposed_backward),
        np.asarray(steps * float(_STEP_DISPATCHES)),
    )


def _in_pieces(
    attention: FusedAttention, seconds: FloatArray, degree: IntArray, is_backward: int, inputs: CostInputs
) -> FloatArray:
    """Return what kernels for one rank's keys after the other take more than one for all, which takes ``seconds`` [N].

    The first is causal, further ones meet half of the keys with all queries.
    """
    layouts, rates, more = inputs.layouts, device_rates(inputs.scenario), np.zeros(len(seconds))
    for ring in np.unique(degree[degree > 1]).tolist():
        rows = np.flatnonzero(degree == ring)
        length = max(
            attention.seq_len // ring, 2
        )  # of a ring that is longer than the sequence, which a rule excludes later
        first = replace(attention, context=(length + 1) / 2, seq_len=length, longest=length)
        next_one = replace(attention, context=length / 2, seq_len=length, longest=length // 2)
        start_s, step_s, entire_s = (
            fused_s(op, inputs.tokens[rows], layouts.tp[rows], rates, backward=bool(is_backward))
            for op in (first, next_one, attention)
        )
        more[rows] = seconds[rows] * ((start_s + (ring - 1) * step_s) / entire_s - 1)
    return more


def _copied_ring(
    kernels: RingKernels,
    attention: FusedAttention,
    ring: tuple[IntArray, list[FloatArray]],
    exposed: tuple[FloatArray, FloatArray],
    inputs: CostInputs,
) -> AddedTime:
    """Return what an engine's own kernels add, given the steps after the first and what attention takes more in pieces [N]."""
    layouts, rates = inputs.layouts, device_rates(inputs.scenario)
    queries = attention.num_heads * (attention.qk_dim + attention.v_dim) / 2
    keys, is_shared = attention.kv_width, attention.num_kv_heads < attention.num_heads
    copied = is_shared * (keys + kernels.shared * queries)
    element_s = np.asarray(inputs.tokens / layouts.tp * inputs.workload.compute_bytes / rates.elementwise_bytes_per_s)
    seconds, dispatches, steps = [], np.zeros(len(layouts)), ring[0]
    for which, more in zip(("forward", "backward"), ring[1], strict=True):
        start, step, launched, launched_a_step = copied, copied / 2, float(is_shared), float(is_shared)
        for width, first, later in (
            (queries, kernels.queries, kernels.step_queries), (keys, kernels.keys, kernels.step_keys),
        ):  # fmt: skip
            start, step = start + width * getattr(first, which), step + width * getattr(later, which)
            launched += getattr(first, f"{which}_kernels")
            launched_a_step += getattr(later, f"{which}_kernels")
        count = launched + steps * launched_a_step
        copied_s = element_s * (start + steps * step) + count * rates.kernel_s
        seconds.append(np.where(steps > 0, copied_s, 0.0) + more)
        dispatches = dispatches + np.where(steps > 0, (count + 2 * steps) / 2, 0.0)  # attention, sends and receives
    forward_s, backward_s = seconds
    return AddedTime(forward_s, backward_s, np.asarray(exposed[0]), np.asarray(exposed[1]), dispatches)


def state_passing_s(mixer: Recurrence, inputs: CostInputs) -> FloatArray:
    """Return the seconds [N] in which the state of a recurrence passes through all ranks of a sequence, in either direction.

    Of the 2 cp pieces, dealt head to tail, neighbours are on different ranks but for the two in the middle: 2 (cp - 1) hops in a
    row, of a state in fp32. All scans run at once before, from an empty state each, and what arrives is added (LASP,
    arXiv:2404.02882); nothing hides the hops.
    """
    layouts = inputs.layouts
    state_bytes = 4.0 * mixer.state_elements / layouts.tp * layouts.micro_batch_size
    hop_s = p2p_s(state_bytes, Hops(layouts.cp, layouts.tp, "loop"), inputs.cluster)
    return np.where(layouts.cp > 1, 2 * (layouts.cp - 1) * hop_s, 0.0)
