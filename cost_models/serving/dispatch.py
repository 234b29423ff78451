"""Kernels that a step dispatches where no graph holds it: their launches, by the framework, are the least that such a step takes.

Counted as engines fuse them (vllm, sglang, TensorRT-LLM model code): a norm takes the residual's sum with it, rotation the write to
the cache, an all-reduce stands after attention and after the feed-forward part. Weights of fewer than 16 bits have a kernel
for every product that converts its input.
"""

from __future__ import annotations

from ...schema.layers import Block, LatentAttention, MoE, SoftmaxAttention
from ...schema.model import ModelSpec
from ...schema.recurrences import Recurrence
from ...schema.serving import BYTES_OF, WeightDtype

_SOFTMAX = 6  # norm, qkv, rotation, attention, output, all-reduce
_QK_NORM = 2
_LATENT = (
    20  # norm, two projections down with norms and splits, two up, rotation, cache, six copies, attention, output, sum
)
_RECURRENT = 16  # norm, two projections, convolution, gates, a scan of eight kernels, norm, output, all-reduce
_DENSE = 5  # norm, up, activation, down, all-reduce
_MIXTURE = 11  # norm, router, choice, two to sort, up, activation, down, scale, sum over experts, all-reduce
_SHARED = 3


def step_kernels(model: ModelSpec, weights: WeightDtype, experts: WeightDtype) -> int:
    """Return the kernels of one pass through all blocks."""
    return sum(count * _block_kernels(block, weights, experts) for block, count in model.block_runs)


def _block_kernels(block: Block, weights: WeightDtype, experts: WeightDtype) -> int:
    narrow, narrow_experts = BYTES_OF[weights] < 2, BYTES_OF[experts] < 2
    if isinstance(block.attention, Recurrence):
        attention = _RECURRENT + 3 * narrow
    elif isinstance(block.attention, LatentAttention):
        attention = _LATENT + 4 * narrow
    elif isinstance(block.attention, SoftmaxAttention):
        attention = _SOFTMAX + _QK_NORM * (block.attention.qk_norm != "none") + 2 * narrow
    else:
        attention = 0
    if isinstance(block.mlp, MoE):
        return attention + _MIXTURE + (_SHARED if block.mlp.shared_ffn_dim else 0) + 2 * narrow_experts
    return attention + _DENSE + 2 * narrow
