"""What one measurement of a profile is: a kernel, a layer, a collective, a copy, or several of them at once."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .base import Frozen, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from .layout import Recompute
from .model import Block, Embedding, Head

PointDtype = Literal["fp32", "tf32", "fp16", "bf16", "fp8"]
CollectiveOp = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p"]
Direction = Literal["forward", "backward"]
Stream = Literal["compute", "collective", "to_device", "to_host"]


class Timed(Frozen):
    """Abstract base: a median over repetitions, and over the ranks that measured it.

    Attributes:
        time_s: median seconds of one call.
        spread: interquartile range of the repetitions over their median, the largest of any rank; 0 where it was not recorded.
    """

    time_s: PositiveFloat
    spread: NonNegativeFloat = 0.0


class MatmulPoint(Timed):
    """One matrix product [m,k] x [k,n].

    Attributes:
        m, n, k: of the product that ran, also in the backward pass.
        which: how its operands lie in memory: as in a linear layer forward (second one transposed), in the gradient of its input
            (neither), or in the gradient of its weight (first one transposed).
    """

    dtype: PointDtype
    m: PositiveInt
    n: PositiveInt
    k: PositiveInt
    which: Literal["forward", "input_gradient", "weight_gradient"] = "forward"


class GroupedMatmulPoint(Timed):
    """``num_groups`` products [rows_g, k] x [k, n] in one call, as experts are computed; rows are spread evenly.

    Attributes:
        rows: of all groups together.
    """

    dtype: PointDtype
    num_groups: PositiveInt
    rows: PositiveInt
    n: PositiveInt
    k: PositiveInt
    direction: Direction = "forward"


class AttentionPoint(Timed):
    """Scaled dot product attention on [batch, heads, seq_len, head_dim]; backward is the three gradients alone."""

    dtype: PointDtype
    batch: PositiveInt
    seq_len: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    causal: bool = True
    direction: Direction = "forward"


class ElementwisePoint(Timed):
    """A kernel bound by memory.

    Attributes:
        traffic_bytes: read and written if each operand crosses memory once.
    """

    op: Literal["add", "scale", "copy", "rms_norm", "silu_mul", "softmax"]
    dtype: PointDtype
    num_elements: PositiveInt
    traffic_bytes: PositiveInt


class LayerPoint(Timed):
    """A real layer of a model, forward or backward, on one device: measured once for each distinct kind of layer.

    Attributes:
        layer: the layer as the model has it, whole; ``hidden_dim``: of the model.
        tp: this is the shard of one of so many tensor-parallel ranks, without their communication.
        dtype: of the products; parameters are kept in it.
        recompute: the backward pass includes what it recomputes.
    """

    layer: Embedding | Block | Head = Field(discriminator="kind")
    hidden_dim: PositiveInt
    micro_batch_size: PositiveInt
    seq_len: PositiveInt
    tp: PositiveInt = 1
    dtype: PointDtype
    recompute: Recompute = "none"
    direction: Direction


class LayerMemory(Frozen):
    """Logical bytes of one layer and one micro-batch.

    Attributes:
        parameter_bytes: of its parameters, in ``dtype``.
        saved_bytes: kept from the forward pass for the backward pass.
        transient_bytes: most that forward and backward hold at once beyond parameters, their gradients and ``saved_bytes``.
        source: counted on fake tensors, or by the device's allocator.
    """

    layer: Embedding | Block | Head = Field(discriminator="kind")
    hidden_dim: PositiveInt
    micro_batch_size: PositiveInt
    seq_len: PositiveInt
    tp: PositiveInt = 1
    dtype: PointDtype
    recompute: Recompute = "none"
    parameter_bytes: NonNegativeInt
    saved_bytes: NonNegativeInt
    transient_bytes: NonNegativeInt
    source: Literal["fake", "allocator"]


class StepMemory(Frozen):
    """Logical bytes of a whole training step of a model on one device, extrapolated from few layers of each kind.

    Attributes:
        forward_peak_bytes, backward_peak_bytes, optimizer_peak_bytes: most that is held in each phase, everything counted.
        flops: of the products of forward and backward pass.
        layers_traced: the two depths that the line goes through.
    """

    model: str
    micro_batch_size: PositiveInt
    seq_len: PositiveInt
    dtype: PointDtype
    recompute: Recompute = "none"
    parameter_bytes: PositiveInt
    optimizer_bytes: NonNegativeInt
    forward_peak_bytes: PositiveInt
    backward_peak_bytes: PositiveInt
    optimizer_peak_bytes: PositiveInt
    flops: PositiveInt
    layers_traced: tuple[PositiveInt, PositiveInt]


class AllocatorMemory(Frozen):
    """What a device's memory holds beside tensors, bytes.

    Attributes:
        context_bytes: taken before the first tensor: driver, libraries, communicators.
        allocated_bytes, reserved_bytes: peaks of the caching allocator over the measured layers; the second is 0 without one.
    """

    context_bytes: NonNegativeInt
    allocated_bytes: NonNegativeInt = 0
    reserved_bytes: NonNegativeInt = 0


class CollectivePoint(Timed):
    """One collective over ``group_size`` ranks; ``size_bytes`` is the full buffer (nccl-tests convention).

    Attributes:
        stride: distance of the ranks of a group: ranks r, r + stride, ..; 1 are neighbours.
        num_nodes: over which the group extends.
        concurrent_groups: how many such groups, disjoint, did the same at once.
    """

    op: CollectiveOp
    group_size: PositiveInt
    size_bytes: PositiveInt
    stride: PositiveInt = 1
    num_nodes: PositiveInt = 1
    concurrent_groups: PositiveInt = 1


class PairPoint(Timed):
    """A message of ``size_bytes`` from one rank to another; ``concurrent_pairs`` disjoint pairs sent at once."""

    first_rank: NonNegativeInt
    second_rank: NonNegativeInt
    size_bytes: PositiveInt
    concurrent_pairs: PositiveInt = 1


class HostCopyPoint(Timed):
    """A copy between host and device; ``both`` are two copies of ``size_bytes`` each, in opposite directions at once.

    Attributes:
        devices_at_once: devices of the host that copied at the same time.
    """

    direction: Literal["to_device", "to_host", "both"]
    host_memory: Literal["pinned", "pageable"]
    size_bytes: PositiveInt
    devices_at_once: PositiveInt = 1


class CpuAdamPoint(Timed):
    """One AdamW step of fp32 parameters on the host; ``ranks_at_once`` ranks of the host did so at the same time."""

    num_parameters: PositiveInt
    threads: PositiveInt
    ranks_at_once: PositiveInt = 1


class StoragePoint(Timed):
    """Blocks written to or read from a file; ``direct``: past the page cache."""

    operation: Literal["read", "write"]
    size_bytes: PositiveInt
    block_bytes: PositiveInt
    direct: bool
    ranks_at_once: PositiveInt = 1


class OverlapPoint(Frozen):
    """Streams that start at once, and when the last one ends.

    Attributes:
        streams: what ran; ``alone_s``: seconds of each by itself; ``together_s``: of all at once.
        matmul: m, n, k of the product that is repeated as the compute stream; ``dtype``: its.
    """

    streams: tuple[Stream, ...] = Field(min_length=2)
    alone_s: tuple[PositiveFloat, ...]
    together_s: PositiveFloat
    matmul: tuple[PositiveInt, PositiveInt, PositiveInt]
    dtype: PointDtype
    collective_op: CollectiveOp | None = None
    collective_bytes: NonNegativeInt = 0
    group_size: PositiveInt = 1
    copy_bytes: NonNegativeInt = 0
