"""Profile: measurements of a machine, where and with which software; the points it consists of; calibration ratios."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import ClassVar, Literal, Self

from pydantic import Field

from .base import Document, Frozen, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from .layers import Block, Embedding, Head, Layer
from .layout import Recompute
from .serving import CacheDtype, ServingLayout, WeightDtype

PointDtype = Literal["fp32", "tf32", "fp16", "bf16", "fp8"]
CollectiveOp = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p"]
Direction = Literal["forward", "backward"]
ProfileSectionName = Literal["compute", "memory", "layers", "links", "host", "storage", "overlap", "serving"]

MAX_RATIO = 20.0
"""A ratio lies between its inverse and it: what is further off is another machine."""

Ratio = Field(default=1.0, ge=1 / MAX_RATIO, le=MAX_RATIO)


class Calibration(Frozen):
    """Ratios of what a cluster achieves to what the model assumes; all one where nothing was measured.

    Attributes:
        products: rate of matrix products.
        fp8_products, fp4_products: what products in these formats reach of that besides: their kernels and scaling recipes differ.
        attention: rate of fused attention.
        elementwise: bandwidth of memory-bound kernels.
        host: speed of the host's dispatch (its seconds are divided by this).
        scale_up, scale_out: bandwidth of links inside and between nodes.
        activations: bytes kept for the backward pass.
        overhead_bytes: what a device holds besides what the model counts.
        num_runs: measured runs the ratios come from.
        spread: standard deviation of log(measured / predicted) on runs that were left out in turn; None below two runs.
        error_before, error_after: mean |predicted / measured - 1| on runs left out in turn, without and with the ratios.
    """

    products: float = Ratio
    fp8_products: float = Ratio
    fp4_products: float = Ratio
    attention: float = Ratio
    elementwise: float = Ratio
    host: float = Ratio
    scale_up: float = Ratio
    scale_out: float = Ratio
    activations: float = Ratio
    overhead_bytes: NonNegativeFloat = 0.0
    num_runs: NonNegativeInt = 0
    spread: PositiveFloat | None = None
    error_before: float | None = None
    error_after: float | None = None

    def __str__(self) -> str:
        """Show the ratios that moved, and on how many runs they rest."""
        names = (name for name in type(self).model_fields if type(self).model_fields[name].default == 1.0)
        moved = [f"{name} x{getattr(self, name):.2f}" for name in names if abs(getattr(self, name) - 1) >= 0.005]
        if abs(self.overhead_bytes) >= 2**20:
            moved.append(f"{self.overhead_bytes / 2**30:+.2f} GiB")
        text = f"{', '.join(moved) or 'nothing moved'} from {self.num_runs} runs"
        if self.error_before is None or self.error_after is None:
            return text
        return f"{text}; on runs left out in turn {100 * self.error_before:.1f} % -> {100 * self.error_after:.1f} %"


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
    """``num_groups`` products [rows / num_groups, k] x [k, n] in one call, as experts are computed."""

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
    """A kernel bound by memory; ``traffic_bytes`` are read and written if each operand crosses memory once."""

    op: Literal["add", "scale", "copy", "rms_norm", "silu_mul", "softmax"]
    dtype: PointDtype
    num_elements: PositiveInt
    traffic_bytes: PositiveInt


class _LayerCase(Frozen):
    """Abstract base: a real layer of a model on one device, measured once for each distinct kind of layer.

    Attributes:
        layer: the layer as the model has it, unsharded; ``hidden_dim``: of the model.
        tp: this is the shard of one of so many tensor-parallel ranks, without their communication.
        dtype: of the products; parameters are stored in it.
        recompute: the backward pass includes what it recomputes.
        engine: whose code ran the layer; `meshwright profile` measures our own runtime.
    """

    layer: Embedding | Block | Head = Field(discriminator="kind")
    hidden_dim: PositiveInt
    micro_batch_size: PositiveInt
    seq_len: PositiveInt
    tp: PositiveInt = 1
    dtype: PointDtype
    recompute: Recompute = "none"
    engine: str = "fsdp2"


class LayerPoint(_LayerCase, Timed):
    """One layer, forward or backward."""

    direction: Direction


class LayerMemory(_LayerCase):
    """Logical bytes of one layer and one micro-batch.

    Attributes:
        saved_bytes: kept from the forward pass for the backward pass.
        transient_bytes: most that forward and backward hold at once beyond parameters, their gradients and ``saved_bytes``.
        source: counted on fake tensors, or by the device's allocator.
    """

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
    """Bytes taken before the first tensor (driver, libraries, communicators), and peaks of the caching allocator, 0 without one.

    Attributes:
        process_bytes: on CPUs what a process grows by in its first steps besides its tensors.
    """

    context_bytes: NonNegativeInt
    allocated_bytes: NonNegativeInt = 0
    reserved_bytes: NonNegativeInt = 0
    process_bytes: NonNegativeInt = 0


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
    """A copy between host and device while ``devices_at_once`` of the host copied; both: ``size_bytes`` each way at once."""

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


class _EngineCase(Frozen):
    """Abstract base: an instance of our serving engine.

    Attributes:
        model: its name; content: hash of its shape (`ModelSpec.content`).
        devices_in_use: of the machine, by instances that all did the same at once.
    """

    model: str
    content: str
    layout: ServingLayout
    weights: WeightDtype
    cache: CacheDtype
    devices_in_use: PositiveInt


class ServingStepPoint(_EngineCase, Timed):
    """A step of an attention rank: the arguments of a step's cost (`StepRecord`)."""

    decode_rows: NonNegativeInt
    cached_tokens: NonNegativeInt
    prefill_tokens: NonNegativeInt
    prefill_context: NonNegativeFloat
    prompts: NonNegativeInt


class ServingHostPoint(_EngineCase, Timed):
    """The host between two steps with so many rows."""

    rows: PositiveInt


class OverlapPoint(Frozen):
    """Streams that start at once, and when the last one ends.

    Attributes:
        streams: what ran; ``alone_s``: seconds of each by itself; ``together_s``: of all at once.
        matmul: m, n, k of the product that is repeated as the compute stream; ``dtype``: its.
    """

    streams: tuple[Literal["compute", "collective", "to_device", "to_host"], ...] = Field(min_length=2)
    alone_s: tuple[PositiveFloat, ...]
    together_s: PositiveFloat
    matmul: tuple[PositiveInt, PositiveInt, PositiveInt]
    dtype: PointDtype
    collective_op: CollectiveOp | None = None
    collective_bytes: NonNegativeInt = 0
    group_size: PositiveInt = 1
    copy_bytes: NonNegativeInt = 0


class Machine(Frozen):
    """Identity of what was measured; a profile of another identity is refused.

    Attributes:
        num_devices: ranks of all nodes together; host_memory_bytes: of one node, the smallest.
    """

    device: str
    num_devices: PositiveInt
    host_memory_bytes: PositiveInt
    backend: Literal["nccl", "gloo"]
    torch: str
    python: str
    driver: str = ""
    num_nodes: PositiveInt = 1


class ProfileProvenance(Frozen):
    """Where and with what a profile was measured, beyond the identity of the machine.

    Attributes:
        hosts: names of the nodes, in the order of their ranks.
        nccl, cuda: versions; empty without them.
        cpu_seconds: points are seconds of a rank's processor, without those in which it waits or another process has it.
        clock_mhz, memory_clock_mhz, power_limit_w: of the first device under load; None where it does not say.
    """

    meshwright: str = ""
    hosts: tuple[str, ...] = ()
    nccl: str = ""
    cuda: str = ""
    cpu_seconds: bool = False
    clock_mhz: PositiveFloat | None = None
    memory_clock_mhz: PositiveFloat | None = None
    power_limit_w: PositiveFloat | None = None


class RankReport(Frozen):
    """Ratios of one rank to its peers.

    Attributes:
        node: position of its host in ``ProfileProvenance.hosts``.
        compute_ratio, memory_ratio, link_ratio: median over the points of its time over the median of all ranks; 1 where there
            is no such point.
    """

    rank: NonNegativeInt
    node: NonNegativeInt
    device: str
    compute_ratio: PositiveFloat = 1.0
    memory_ratio: PositiveFloat = 1.0
    link_ratio: PositiveFloat = 1.0


class SlowComponent(Frozen):
    """A rank, node or link that is slower than its peers beyond their noise.

    Attributes:
        name: ``rank 3``, ``node gpu-17``, ``link gpu-17 - gpu-18``.
        what: was slow: compute, memory or link.
        ratio: its time over the median of its peers; ``noise``: what peers differ by.
        ranks: that are slow; none where it is a link.
    """

    kind: Literal["rank", "node", "link"]
    name: str
    what: Literal["compute", "memory", "link"]
    ratio: PositiveFloat
    noise: NonNegativeFloat
    ranks: tuple[NonNegativeInt, ...] = ()


class ProfileSection(Frozen):
    """One part of the measurement.

    Attributes:
        state: complete; shortened where its share of the budget ended it; skipped with the reason.
        reason: why it was shortened or skipped.
    """

    name: ProfileSectionName
    state: Literal["complete", "shortened", "skipped"]
    duration_s: NonNegativeFloat
    num_points: NonNegativeInt
    reason: str = ""


class Profile(Document):
    """Measurements of one machine, or of all nodes of a job.

    Attributes:
        duration_s: from the start of the ranks to the last point; ``budget_s``: what it was allowed, None where nobody said.
        foreign_load_fraction: part of the cores that other work used when the measurement began; above some tenths the figures
            are too low.
        parts: what was measured in which time; empty in a profile that only describes ``--cluster local``.
        node_bandwidth_bytes_per_s: node x node: what one device of a node gets to its counterpart while the others send as well.
        slow: what the report names.
        calibration: what runs of `apply` on the machine say about the model's rates (`meshwright calibrate`).
        content_sha256: of everything else; empty in a profile of an older version, or in one that is not finished.
    """

    document_kind: ClassVar[str] = "profile"

    machine: Machine
    created: str
    duration_s: PositiveFloat
    budget_s: PositiveFloat | None = None
    foreign_load_fraction: float = Field(default=0.0, ge=0, le=1)
    provenance: ProfileProvenance = ProfileProvenance()
    parts: tuple[ProfileSection, ...] = ()
    memory_bandwidth_bytes_per_s: PositiveFloat
    device_memory_bytes: PositiveInt
    matmuls: tuple[MatmulPoint, ...] = ()
    grouped_matmuls: tuple[GroupedMatmulPoint, ...] = ()
    attention: tuple[AttentionPoint, ...] = ()
    elementwise: tuple[ElementwisePoint, ...] = ()
    layers: tuple[LayerPoint, ...] = ()
    layer_memory: tuple[LayerMemory, ...] = ()
    step_memory: tuple[StepMemory, ...] = ()
    allocator: AllocatorMemory | None = None
    collectives: tuple[CollectivePoint, ...] = ()
    pairs: tuple[PairPoint, ...] = ()
    node_bandwidth_bytes_per_s: tuple[tuple[NonNegativeFloat, ...], ...] | None = None
    host_copies: tuple[HostCopyPoint, ...] = ()
    cpu_adam: tuple[CpuAdamPoint, ...] = ()
    storage: tuple[StoragePoint, ...] = ()
    overlaps: tuple[OverlapPoint, ...] = ()
    serving_steps: tuple[ServingStepPoint, ...] = ()
    serving_host: tuple[ServingHostPoint, ...] = ()
    ranks: tuple[RankReport, ...] = ()
    slow: tuple[SlowComponent, ...] = ()
    calibration: Calibration = Calibration()
    content_sha256: str = ""

    def engines_of(self, layers: Collection[Layer], hidden_dim: int) -> set[str]:
        """Return the engines under which any of these layers were measured."""
        return {point.engine for point in self.layers if point.hidden_dim == hidden_dim and point.layer in layers}

    def computed_sha256(self) -> str:
        """Hash of everything but ``content_sha256``; fields at their defaults do not count, so that later ones change nothing."""
        content = self.model_dump_json(exclude={"content_sha256"}, exclude_defaults=True)
        return hashlib.sha256(content.encode()).hexdigest()

    def sealed(self) -> Self:
        """Return the profile with the hash of its content."""
        return self.replace(content_sha256=self.computed_sha256())

    @property
    def is_altered(self) -> bool:
        """True if somebody changed it after it was sealed; a profile without a hash cannot tell."""
        return bool(self.content_sha256) and self.content_sha256 != self.computed_sha256()
