"""What each engine's memory-bound kernels read and write: facts of its code, in elements per element of the tensor's width.

fsdp2       torch, eager: F.rms_norm and F.layer_norm are one kernel forward and two backward; rotary embedding, silu and product,
            and the loss's casts are kernels each.
megatron    Transformer Engine's norms; apply_rope_fusion, bias_swiglu_fusion, bias_gelu_fusion, fused cross entropy, as its recipes
            set them; the gradients of q, k and v are concatenated.
deepspeed   Megatron-DeepSpeed: fused norms and bias-gelu; the attended context is copied, the gradients of q, k and v
            concatenated; vocab_parallel_cross_entropy step by step; rotary and gated parts as torch.
nanotron    flash-attn's Triton norm and rotary kernels; gated part as torch.
internevo   fused norm, flash-attn's rotary, silu and product fused.

Reads that miss the cache twice count twice. A layer norm takes 2.2 elements forward and 6.9 backward, a softmax 2.3 and 6.1, at
the bandwidth of plain pointwise kernels: 26 and 8 measured sizes each on A100 and H100 (NeuSight traces, MIT), mean error 4 %
with a launch and a rate fitted to each.
"""

from __future__ import annotations

from typing import NamedTuple


class Passes(NamedTuple):
    """Elements read and written forward and backward, and kernels launched."""

    forward: float
    backward: float
    forward_kernels: int
    backward_kernels: int


def added(one: Passes, other: Passes) -> Passes:
    """Both."""
    return Passes(
        one.forward + other.forward,
        one.backward + other.backward,
        one.forward_kernels + other.forward_kernels,
        one.backward_kernels + other.backward_kernels,
    )


class EngineKernels(NamedTuple):
    """Memory-bound kernels of one engine.

    Attributes:
        norm: per element of the hidden states; rotary: per rotated element of queries and keys.
        gated: per element of the feed-forward width, for silu(gate) * up; plain: for one activation.
        loss: fp32 elements per logit, from logits in the compute dtype to their gradient.
        residual: per element of the hidden states, both additions of a block.
        qkv: copies around attention per element of q, k and v.
        bias: the gradient of one bias, a sum over tokens, per element of the product's output; none where the product does it.
    """

    norm: Passes
    rotary: Passes
    gated: Passes
    plain: Passes
    loss: Passes
    residual: Passes
    qkv: Passes
    bias: Passes


# Forward cast (1.5) and log-softmax; backward zeros of the picked ones (1), softmax, cast back (1.5).
_TORCH = EngineKernels(
    norm=Passes(2.2, 6.9, 1, 2),
    rotary=Passes(9, 9, 8, 8),
    gated=Passes(5, 9, 2, 3),
    plain=Passes(2, 3, 1, 1),
    loss=Passes(3.8, 8.6, 3, 3),
    residual=Passes(6, 6, 2, 2),
    qkv=Passes(0, 0, 0, 0),
    bias=Passes(0, 1, 0, 1),
)
_FUSED_NORM = Passes(2.2, 4.0, 1, 2)
_FUSED_ROTARY = Passes(2, 2, 2, 2)
_FUSED_GATED = Passes(3, 5, 1, 1)

ENGINE_KERNELS: dict[str, EngineKernels] = {
    "fsdp2": _TORCH,
    # Loss: maximum of the fp32 copy, exponentials, sum and quotient in place; backward scales and casts the softmax.
    "megatron": _TORCH._replace(
        norm=_FUSED_NORM,
        rotary=_FUSED_ROTARY,
        gated=_FUSED_GATED,
        loss=Passes(7.5, 3.5, 4, 2),
        qkv=Passes(0, 2, 0, 1),
        bias=Passes(0, 0, 0, 0),
    ),
    "deepspeed": _TORCH._replace(norm=_FUSED_NORM, loss=Passes(9.5, 3.5, 7, 3), qkv=Passes(0.67, 2.67, 1, 2)),
    "aceso": _TORCH._replace(norm=_FUSED_NORM, loss=Passes(9.5, 3.5, 7, 3), qkv=Passes(0.67, 2.67, 1, 2)),
    "nanotron": _TORCH._replace(norm=_FUSED_NORM, rotary=_FUSED_ROTARY, loss=Passes(9.5, 3.5, 7, 3)),
    "internevo": _TORCH._replace(norm=_FUSED_NORM, rotary=_FUSED_ROTARY, gated=_FUSED_GATED),
}

COMPILED = _TORCH._replace(norm=_FUSED_NORM, rotary=_FUSED_ROTARY, gated=_FUSED_GATED, loss=Passes(2.5, 3.5, 3, 3))
"""torch.compile: each chain of pointwise kernels and its sum is one kernel."""

COMPILED_BLOCKS = COMPILED._replace(loss=_TORCH.loss)
"""The same of everything but the loss."""

COMPOSITE_NORM = Passes(18, 36, 6, 12)
"""RMSNorm as torch ran it eagerly before 2.8: cast, square, mean, product, cast, product, and their gradients, half of it in fp32.

Compiled, Llama-3-8B on H100 (HBM2e) takes 0.39 s a step less (torchtitan benchmarks/llama3_h100_202412); counted 0.27 to 0.37 s.
"""


NORM_ON_CPU = Passes(7, 19, 6, 13)
"""F.rms_norm on a CPU, which has no fused kernel: square, mean, product and weight; gradients of each, those over rows and over
tokens as sums of their own. Without casts: CPUs train in fp32.
"""


def kernels_of(engine: str, fusion: str, *, on_cpu: bool = False) -> EngineKernels:
    """The memory-bound kernels of an engine under a workload's ``fusion``."""
    if on_cpu and fusion == "engine":
        return ENGINE_KERNELS[engine]._replace(norm=NORM_ON_CPU)
    if fusion in ("compiled", "compiled_blocks"):
        return COMPILED if fusion == "compiled" else COMPILED_BLOCKS
    kernels = _TORCH if fusion == "eager" else ENGINE_KERNELS[engine]
    return kernels._replace(norm=COMPOSITE_NORM) if fusion in ("composite_norm", "eager") else kernels


DROPOUT = Passes(1, 5, 0, 2)
"""What dropout before both additions of a block adds to them, fused with them forward: a mask of one byte an element is written
forward and read backward, where the gradient is read and written besides."""
