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

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...schema.task import Engine
from ...schema.units import MIB


class KernelTraffic(NamedTuple):
    """Elements read and written forward and backward, and kernels launched."""

    forward: float
    backward: float
    forward_kernels: int
    backward_kernels: int


def add_traffic(one: KernelTraffic, other: KernelTraffic) -> KernelTraffic:
    """Both."""
    return KernelTraffic(
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

    norm: KernelTraffic
    rotary: KernelTraffic
    gated: KernelTraffic
    plain: KernelTraffic
    loss: KernelTraffic
    residual: KernelTraffic
    qkv: KernelTraffic
    bias: KernelTraffic


# Forward cast (1.5) and log-softmax; backward zeros of the picked ones (1), softmax, cast back (1.5).
_TORCH = EngineKernels(
    norm=KernelTraffic(2.2, 6.9, 1, 2),
    rotary=KernelTraffic(9, 9, 8, 8),
    gated=KernelTraffic(5, 9, 2, 3),
    plain=KernelTraffic(2, 3, 1, 1),
    loss=KernelTraffic(3.8, 8.6, 3, 3),
    residual=KernelTraffic(6, 6, 2, 2),
    qkv=KernelTraffic(0, 0, 0, 0),
    bias=KernelTraffic(0, 1, 0, 1),
)


_FUSED_NORM = KernelTraffic(2.2, 4.0, 1, 2)


_FUSED_ROTARY = KernelTraffic(2, 2, 2, 2)


_FUSED_GATED = KernelTraffic(3, 5, 1, 1)


ENGINE_KERNELS: dict[str, EngineKernels] = {
    "fsdp2": _TORCH,
    # Loss: maximum of the fp32 copy, exponentials, sum and quotient in place; backward scales and casts the softmax.
    "megatron": _TORCH._replace(
        norm=_FUSED_NORM,
        rotary=_FUSED_ROTARY,
        gated=_FUSED_GATED,
        loss=KernelTraffic(7.5, 3.5, 4, 2),
        qkv=KernelTraffic(0, 2, 0, 1),
        bias=KernelTraffic(0, 0, 0, 0),
    ),
    "deepspeed": _TORCH._replace(
        norm=_FUSED_NORM, loss=KernelTraffic(9.5, 3.5, 7, 3), qkv=KernelTraffic(0.67, 2.67, 1, 2)
    ),
    "aceso": _TORCH._replace(norm=_FUSED_NORM, loss=KernelTraffic(9.5, 3.5, 7, 3), qkv=KernelTraffic(0.67, 2.67, 1, 2)),
    "nanotron": _TORCH._replace(norm=_FUSED_NORM, rotary=_FUSED_ROTARY, loss=KernelTraffic(9.5, 3.5, 7, 3)),
    "internevo": _TORCH._replace(norm=_FUSED_NORM, rotary=_FUSED_ROTARY, gated=_FUSED_GATED),
}


COMPILED = _TORCH._replace(
    norm=_FUSED_NORM, rotary=_FUSED_ROTARY, gated=_FUSED_GATED, loss=KernelTraffic(2.5, 3.5, 3, 3)
)
"""torch.compile: each chain of pointwise kernels and its sum is one kernel."""


COMPILED_BLOCKS = COMPILED._replace(loss=_TORCH.loss)
"""The same of everything but the loss."""


COMPOSITE_NORM = KernelTraffic(18, 36, 6, 12)
"""RMSNorm as torch ran it eagerly before 2.8: cast, square, mean, product, cast, product, and their gradients, half of it in fp32.

Compiled, Llama-3-8B on H100 (HBM2e) takes 0.39 s a step less (torchtitan benchmarks/llama3_h100_202412); counted 0.27 to 0.37 s.
"""


NORM_ON_CPU = KernelTraffic(7, 19, 6, 13)
"""F.rms_norm on a CPU, which has no fused kernel: square, mean, product and weight; gradients of each, those over rows and over
tokens as sums of their own. Without casts: CPUs train in fp32.
"""


def kernels_of_engine(engine: str, fusion: str, *, on_cpu: bool = False) -> EngineKernels:
    """The memory-bound kernels of an engine under a workload's ``fusion``."""
    if on_cpu and fusion == "engine":
        return ENGINE_KERNELS[engine]._replace(norm=NORM_ON_CPU)
    if fusion in ("compiled", "compiled_blocks"):
        return COMPILED if fusion == "compiled" else COMPILED_BLOCKS
    kernels = _TORCH if fusion == "eager" else ENGINE_KERNELS[engine]
    return kernels._replace(norm=COMPOSITE_NORM) if fusion in ("composite_norm", "eager") else kernels


DROPOUT = KernelTraffic(1, 5, 0, 2)
"""What dropout before both additions of a block adds to them, fused with them forward: a mask of one byte an element is written
forward and read backward, where the gradient is read and written besides."""


@dataclass(frozen=True, kw_only=True)
class MemoryFacts:
    """How an engine's kernels and buffers differ from our runtime's.

    Attributes:
        logit_bytes: of one logit with everything the loss makes of it at its peak.
        glu_tensors: tensors of the feed-forward width that a gated activation keeps with its output.
        qkv_copies: packed outputs of the query-key-value product beside what attention keeps: 1 where values are a view of
            them, so that all of it stays.
        kv_copies: further copies of keys and values.
        unfused_rmsnorm: an RMSNorm is several kernels and keeps its input in fp32 and normalised besides.
        keeps_all_outputs: of every operator of a block, also of those whose backward pass does not read them.
        keeps_fp32_gradients: of this rank's shard, from one step to the next.
        bucket_bytes: of the buffers gradients are reduced in.
        live_elements: of the parameters gathered at once under zero 3.
        keeps_expert_output: experts' results are weighted by themselves, which needs them again for the gradient of the weights;
            Megatron weights inside the activation instead.
    """

    logit_bytes: float
    glu_tensors: float
    qkv_copies: int = 0
    kv_copies: int = 0
    unfused_rmsnorm: bool = False
    keeps_all_outputs: bool = False
    keeps_fp32_gradients: bool = False
    bucket_bytes: float = 0.0
    live_elements: float = 0.0
    keeps_expert_output: bool = True


MEMORY: dict[Engine, MemoryFacts] = {
    # Logits, their fp32 softmax, their gradient; fused SwiGLU; rotary embedding makes new q and k, v stays a view.
    # [fitted: logit_bytes and qkv_copies to the four peaks of `meshwright validate --source simumax` without expert parallelism]
    "megatron": MemoryFacts(logit_bytes=8.0, glu_tensors=3, qkv_copies=1, keeps_expert_output=False),
    # Megatron's kernels under its own optimizer.
    "internevo": MemoryFacts(logit_bytes=8.0, glu_tensors=3, qkv_copies=1, keeps_expert_output=False),
    # Megatron's operators, one module each, so that any of them can be recomputed (Aceso, EuroSys 2024): inputs and outputs
    # of all of them stay. [fitted: 0.19 GiB a layer and sequence of OPT-350M at tp 4, `meshwright validate --source libai_sailor2`]
    "aceso": MemoryFacts(logit_bytes=10.0, glu_tensors=4, qkv_copies=1, keeps_all_outputs=True),
    # sharded_cross_entropy: logits, fp32 copy, less their maximum, exponentials; torch's silu and product; k and v concatenated.
    "nanotron": MemoryFacts(logit_bytes=14.0, glu_tensors=4, qkv_copies=1, kv_copies=1),
    # Megatron's vocab_parallel_cross_entropy: logits, their fp32 copy, softmax; eager activations;
    # reduce_bucket_size 5e8 twice (overlap_comm), max_live_parameters 1e9.
    # [fitted: 20 bytes a parameter and 3.7 GiB besides are what the runs of `meshwright validate --source sailor` hold]
    "deepspeed": MemoryFacts(
        logit_bytes=10.0,
        glu_tensors=4,
        unfused_rmsnorm=True,
        keeps_fp32_gradients=True,
        bucket_bytes=2 * 5e8 * 4,
        live_elements=1e9,
    ),
}


class DataParallelFacts(NamedTuple):
    """Data parallelism of one engine.

    Attributes:
        reduction_hides_from: lowest ZeRO stage at which reductions run beside the (last) backward pass.
        gather_hides_from: the same for gathers of parameters and the forward pass.
        bucket_bytes: parameters in the compute dtype whose whole gradients are reduced at once; infinite for a layer's.
        hides_in_chunks: whether with model chunks the communication of one runs beside the compute of the others.
        gathers_owned: whether parameters that are sharded over fewer ranks than the optimizer states are gathered from the
            owners of the states in every forward pass (and from the fewer in the backward pass), instead of once a step.
        sums_replicas_once: whether gradients that are sharded are summed over the replicas of the shards once a step.
        zero1_by_tensor: whether ZeRO-1 runs collectives tensor by tensor instead of on flat buckets.
    """

    reduction_hides_from: int
    gather_hides_from: int
    bucket_bytes: float
    hides_in_chunks: bool
    zero1_by_tensor: bool
    gathers_owned: bool = False
    sums_replicas_once: bool = False


DATA_PARALLEL: dict[Engine, DataParallelFacts] = {
    # Prefetches the next layer's parameters, reduces beside the next layer's backward pass: runtime/data_parallel.py.
    # reshard_after_forward=N keeps what a forward pass gathered within N ranks.
    "fsdp2": DataParallelFacts(0, 0, np.inf, hides_in_chunks=False, zero1_by_tensor=False, gathers_owned=True),
    # Megatron-Core's recipes: overlap_grad_reduce beside the last backward pass, overlap_param_gather beside the first forward
    # pass, chunk by chunk with align_param_gather; overlap_p2p_comm where there are model chunks.
    "megatron": DataParallelFacts(0, 0, np.inf, hides_in_chunks=True, zero1_by_tensor=False),
    # overlap_comm is false unless stage 3, and updated parameters are gathered in the step itself.
    # ZeRO++ reads its second partition (hpZ) in the backward pass only; MiCS sums over islands at the step's end.
    "deepspeed": DataParallelFacts(
        3, 3, np.inf, hides_in_chunks=False, zero1_by_tensor=False, gathers_owned=True, sums_replicas_once=True
    ),
    # v0.5 reduces after the backward pass: whole gradients in DistributedDataParallel's buckets (bucket_cap_mb = 25), under ZeRO-1
    # every tensor by itself (reduce_scatter_coalesced and all_gather_coalesced in optim/zero.py).
    "nanotron": DataParallelFacts(3, 3, 25 * MIB, hides_in_chunks=False, zero1_by_tensor=True),
    # hybrid_zero_optim.py: overlap_sync_grad, but ZeRO-1 deals out whole tensors: reduced to the owner, broadcast after the step.
    "internevo": DataParallelFacts(0, 3, np.inf, hides_in_chunks=False, zero1_by_tensor=True),
    "aceso": DataParallelFacts(3, 3, np.inf, hides_in_chunks=False, zero1_by_tensor=False),
}


FIRST_BLOCKS: frozenset[Engine] = frozenset({"megatron"})
"""Engines that recompute the same number of blocks on every stage, the first ones, and those fully.

Megatron-Core: recompute_granularity is one for the whole model; with full and recompute_method block the first
recompute_num_layers of every (virtual) stage are recomputed. Our runtime checkpoints block by block
(runtime/recompute.py), DeepSpeed wherever the model's code calls checkpoint().
"""
