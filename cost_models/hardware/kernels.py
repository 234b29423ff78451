"""Memory-bound kernels: those of each engine (schema/engine_facts.py), and what compiling, old versions and CPUs change."""

from __future__ import annotations

from ...schema.engine_facts import (
    ENGINES,
    FUSED_GATED,
    FUSED_NORM,
    FUSED_ROTARY,
    TORCH_KERNELS,
    EngineKernels,
    KernelTraffic,
)


def add_traffic(one: KernelTraffic, other: KernelTraffic) -> KernelTraffic:
    """Return the sum of two kernels."""
    return KernelTraffic(
        one.forward + other.forward,
        one.backward + other.backward,
        one.forward_kernels + other.forward_kernels,
        one.backward_kernels + other.backward_kernels,
    )


COMPILED = TORCH_KERNELS._replace(
    norm=FUSED_NORM, rotary=FUSED_ROTARY, gated=FUSED_GATED, loss=KernelTraffic(2.5, 3.5, 3, 3)
)
"""torch.compile: each chain of pointwise kernels and its sum is one kernel."""


COMPILED_BLOCKS = COMPILED._replace(loss=TORCH_KERNELS.loss)
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
        return ENGINES[engine].kernels._replace(norm=NORM_ON_CPU)
    if fusion in ("compiled", "compiled_blocks"):
        return COMPILED if fusion == "compiled" else COMPILED_BLOCKS
    kernels = TORCH_KERNELS if fusion == "eager" else ENGINES[engine].kernels
    return kernels._replace(norm=COMPOSITE_NORM) if fusion in ("composite_norm", "eager") else kernels


DROPOUT = KernelTraffic(1, 5, 0, 2)
"""What dropout before both additions of a block adds to them, fused with them forward: a mask of one byte an element is written
forward and read backward, where the gradient is read and written besides."""
