"""Sums over tp of gradients of what all ranks have in full.

The compressed vectors of latent attention are on all ranks, and each expands them to its own heads: the gradients of what the
expansions read are sums in every backward pass, in place of that of the block's input, which is complete.

Of a weight that every rank applies to its part of the tokens or heads (norms, routers) a rank has a part of the gradient. DTensor
adds the parts up when fully_shard reduces, weight by weight (torch's FSDPParam.unsharded_grad_data).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...schema.layers import Block, LatentAttention, MoE, SoftmaxAttention
from ...schema.units import FloatArray
from ..hardware.collectives import collective_s
from .operators import CostInputs, Layer
from .parallel import exchange_s


class GradientSums(NamedTuple):
    """Sums over tp [N]: how many, and their seconds."""

    number: FloatArray
    seconds: FloatArray


def sums_of_inputs(layer: Layer, inputs: CostInputs) -> GradientSums:
    """Return what sums of a backward pass come in place of one reduction of hidden states: latent attention's in our runtime."""
    block, is_ours = layer.inner_block, inputs.workload.engine_facts.is_own_runtime
    if block is None or not is_ours or layer.counted is not None or not isinstance(block.attention, LatentAttention):
        return _added([], inputs)
    attention = block.attention
    widths = (attention.q_lora_rank or inputs.hidden_dim, attention.kv_lora_rank, attention.qk_rope_head_dim)
    added = _added([np.asarray(inputs.tokens * float(width)) for width in widths], inputs)
    replaced = inputs.layouts.tp > 1
    return GradientSums(added.number - replaced, added.seconds - replaced * exchange_s(inputs)[1])


def sums_of_weights(layer: Layer, inputs: CostInputs) -> GradientSums:
    """Return the sums of weights' gradients in a reduction over data; none where an engine makes all of them once a step."""
    block, workload = layer.inner_block, inputs.workload
    is_summed = workload.engine_facts.uses_fully_shard and workload.adapters is None
    if block is None or not is_summed or layer.counted is not None:
        return _added([], inputs)
    along_sequence, always = _weights(block, inputs.hidden_dim)
    is_cut = np.asarray(inputs.layouts.sequence_parallel == 1, dtype=np.float64)
    return _added([size * is_cut for size in along_sequence] + [size * np.ones_like(is_cut) for size in always], inputs)


def _weights(block: Block, dim: int) -> tuple[list[int], list[int]]:
    """Return the elements of weights of which ranks have parts of the gradient: under sequence parallelism, and always."""
    attention, moe = block.attention, block.mlp
    along_sequence, always = [dim] * (block.num_norms * (block.norm_weight + block.norm_bias)), list[int]()
    if isinstance(attention, SoftmaxAttention) and attention.qk_norm.startswith("per_head"):
        always += [attention.head_dim] * (4 if attention.qk_norm == "per_head_bias" else 2)
    if isinstance(moe, MoE):
        always.append(moe.num_experts * dim)
        along_sequence += [dim] * (moe.shared is not None and moe.shared_gate)
    return along_sequence, always


def _added(elements: list[FloatArray], inputs: CostInputs) -> GradientSums:
    """Return the sums of so many elements [N] each, in the compute dtype; those of none and without tp are not made."""
    tp, none = inputs.layouts.tp, np.zeros(len(inputs.layouts))
    number, seconds = none, none
    for size in elements:
        is_made, sent = (tp > 1) & (size > 0), size * float(inputs.workload.compute_bytes)
        once_s = collective_s("all_reduce", sent, tp, np.ones_like(tp), inputs.cluster)
        number, seconds = number + is_made, seconds + np.where(is_made, once_s, 0.0)
    return GradientSums(number, seconds)
