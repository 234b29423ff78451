"""LayerCost: everything one layer costs under every layout of a batch, one micro-batch at a time.

Composes operators (operators.py) with device rates (compute.py), tensor-parallel and data-parallel collectives (collectives.py)
and saved activations (activations.py). Stages and steps only add layers up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..schema import ClusterSpec, Workload
from ..schema.model import Block, Embedding, Head, MTPHead
from .activations import Kernels, Saved, saved_elements
from .coefficients import device_rates, host_costs
from .collectives import collective_s
from .compute import OperatorTime, operator_time
from .layouts import RECOMPUTES, FloatArray, LayoutBatch
from .memory import has_copies
from .operators import CORE_ATTENTION, FusedAttention, Gemm, Layer, Operator, Softmax, layer_operators


@dataclass(frozen=True)
class LayerCost:
    """Arrays [N], one entry per layout: seconds and bytes of one layer on one rank, for one micro-batch.

    Attributes:
        forward_s, backward_s: operators, without communication.
        recompute_s: forward work repeated in the backward pass.
        tp_forward_s, tp_backward_s: exposed tensor-parallel communication.
        gather_s: all-gather of the layer's parameters over dp_shard.
        reduce_s: reduction of its gradients over dp_shard and dp_replicate.
        num_params: parameters of this rank's tensor-parallel share.
        activation_bytes: kept from forward to backward.
        working_bytes: alive only while this layer runs backward.
    """

    forward_s: FloatArray
    backward_s: FloatArray
    recompute_s: FloatArray
    tp_forward_s: FloatArray
    tp_backward_s: FloatArray
    gather_s: FloatArray
    reduce_s: FloatArray
    num_params: FloatArray
    activation_bytes: FloatArray
    working_bytes: FloatArray

    @property
    def busy_s(self) -> FloatArray:
        """Seconds of forward and backward with recompute and tensor-parallel communication."""
        return self.forward_s + self.backward_s + self.recompute_s + self.tp_forward_s + self.tp_backward_s


def layer_cost(
    layer: Layer, hidden_dim: int, batch: LayoutBatch, workload: Workload, cluster: ClusterSpec
) -> LayerCost:
    """Cost of ``layer`` under every layout of ``batch``."""
    operators = layer_operators(layer, hidden_dim, workload.seq_len, unfused=softmax_kernels(workload))
    times = _operator_times(operators, batch, workload, cluster)
    tp_s = _tensor_parallel_s(layer, hidden_dim, batch, workload, cluster)
    tp_s = (tp_s[0], tp_s[1] - _hidden_reduction_s(hidden_dim, operators, times, batch, workload, cluster))
    compute = _compute_s(layer, operators, times, tp_s, batch, workload, cluster)
    num_params = tp_params(layer, hidden_dim, batch)
    gather, reduce = _data_parallel_s(num_params, batch, workload, cluster)
    kept, working = _activation_bytes(layer, hidden_dim, batch, workload, cluster)
    return LayerCost(*compute, *tp_s, gather, reduce, num_params, kept, working)


def softmax_kernels(workload: Workload) -> Softmax | None:
    """How unfused attention turns scores into probabilities; None for fused attention.

    Megatron's scale-mask-softmax kernel takes 16-bit inputs only (FusedScaleMaskSoftmax.is_kernel_available).
    """
    if workload.attention == "flash":
        return None
    return "fused" if is_megatron(workload) and workload.compute_bytes == 2 else "separate"


def is_megatron(workload: Workload) -> bool:
    """Whether the engine runs Megatron's layers (DeepSpeed's runs do, or something as eager)."""
    return workload.engine in ("megatron", "deepspeed")


def _operator_times(
    operators: tuple[Operator, ...], batch: LayoutBatch, workload: Workload, cluster: ClusterSpec
) -> list[OperatorTime]:
    rates = device_rates(cluster.weakest_device, workload)
    tokens = batch.micro_batch_size * workload.seq_len
    return [
        operator_time(op, tokens, batch.tp, batch.sequence_parallel, rates=rates, compute_bytes=workload.compute_bytes)
        for op in operators
    ]


def _compute_s(
    layer: Layer,
    operators: tuple[Operator, ...],
    times: list[OperatorTime],
    tp_s: tuple[FloatArray, FloatArray],
    batch: LayoutBatch,
    workload: Workload,
    cluster: ClusterSpec,
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Forward, backward and recompute seconds with the host's dispatch.

    On an accelerator the host runs ahead: a pass takes the longer of its dispatch and of kernels plus collectives.
    """
    host = host_costs(cluster.weakest_device, workload)
    zero = np.zeros(len(batch))
    forward = sum((time.forward_s for time in times), start=zero)
    backward = sum((time.backward_s for time in times), start=zero)
    has_block = isinstance(layer, Block | MTPHead)
    recompute, repeated = _recompute(operators, times, batch, workload) if has_block else (zero, zero)
    # Two pairs of all-gather and reduce-scatter a pass, or two all-reduces.
    collectives = np.where(batch.tp > 1, (2 if has_block else 0.5) * np.where(batch.sequence_parallel == 1, 2, 1), 0.0)
    repeats = np.where(batch.recompute == RECOMPUTES.index("full"), 1.0, 0.0)
    per_pass = collectives * host.collective_s + np.where(has_copies(batch, workload), host.fsdp_unit_s / 2, 0.0)
    host_forward = per_pass + host.operator_s * sum(time.forward_dispatches for time in times)
    host_backward = per_pass + host.operator_s * sum(time.backward_dispatches for time in times)
    host_recompute = repeated * host.operator_s + repeats * collectives * host.collective_s
    if host.adds:
        return forward + host_forward, backward + host_backward, recompute + host_recompute
    tp_forward, tp_backward = tp_s
    busy_backward = backward + recompute + tp_backward
    return (
        forward + waiting_s(forward + tp_forward, host_forward, host.overlap_norm),
        backward + waiting_s(busy_backward, host_backward + host_recompute, host.overlap_norm),
        recompute,
    )


def waiting_s(device_s: FloatArray, host_s: FloatArray, norm: float) -> FloatArray:
    """How much longer than the device's own work a pass takes: (device^p + host^p)^(1/p) - device.

    Were the host always far ahead it would be the larger of the two (p without limit). Where both are alike, the host is ahead
    of the long kernels and behind the short ones.
    """
    return np.asarray((device_s**norm + host_s**norm) ** (1 / norm) - device_s)


def _recompute(
    operators: tuple[Operator, ...], times: list[OperatorTime], batch: LayoutBatch, workload: Workload
) -> tuple[FloatArray, FloatArray]:
    """Forward seconds and dispatches repeated under each layout's recompute.

    Ours stops once the last product has its input, and selective repeats neither products nor fused attention
    (runtime/recompute.py). Megatron repeats the whole layer, and selective is the core of unfused attention: scores, softmax,
    dropout and both products (arXiv:2205.05198 section 5).
    """
    if is_megatron(workload):
        full = times
        cheap = [time for op, time in zip(operators, times, strict=True) if _is_repeated_core(op, workload)]
    else:
        last_product = max(idx for idx, op in enumerate(operators) if isinstance(op, Gemm))
        full = [time for idx, time in enumerate(times) if idx != last_product]
        cheap = [time for op, time in zip(operators, times, strict=True) if not _is_kept(op)]
    is_kind = [batch.recompute == RECOMPUTES.index(kind) for kind in ("full", "selective")]
    seconds = [sum((time.forward_s for time in chosen), start=np.zeros(len(batch))) for chosen in (full, cheap)]
    dispatches = [float(sum(time.forward_dispatches for time in chosen)) for chosen in (full, cheap)]
    return np.select(is_kind, seconds, 0.0), np.select(is_kind, dispatches, 0.0)


def _is_repeated_core(op: Operator, workload: Workload) -> bool:
    """Megatron's selective recompute of unfused attention; with fused attention ours stands in for the engines' own choices."""
    return op.name in CORE_ATTENTION if workload.attention == "math" else not _is_kept(op)


def _is_kept(op: Operator) -> bool:
    """Whether our selective recompute keeps the output: products with weights and fused attention, not scores."""
    return isinstance(op, Gemm | FusedAttention) and op.name not in ("scores", "context")


def _tensor_parallel_s(
    layer: Layer, hidden_dim: int, batch: LayoutBatch, workload: Workload, cluster: ClusterSpec
) -> tuple[FloatArray, FloatArray]:
    """Exposed communication of a layer: two pairs of all-gather and reduce-scatter (or two all-reduces) a block and pass."""
    elements = batch.micro_batch_size * workload.seq_len * hidden_dim
    size = np.asarray(elements * workload.compute_bytes, dtype=np.float64)
    stride = np.ones_like(batch.tp)
    gather = collective_s("all_gather", size, batch.tp, stride, cluster)
    scatter = collective_s("reduce_scatter", size, batch.tp, stride, cluster)
    reduce = collective_s("all_reduce", size, batch.tp, stride, cluster)
    pair = np.where(batch.sequence_parallel == 1, gather + scatter, reduce)
    if isinstance(layer, Embedding):
        return np.where(batch.sequence_parallel == 1, scatter, reduce), np.where(
            batch.sequence_parallel == 1, gather, 0.0
        )
    if isinstance(layer, Head):
        return np.where(batch.sequence_parallel == 1, gather, 0.0), np.where(
            batch.sequence_parallel == 1, scatter, reduce
        )
    return 2 * pair, 2 * pair + _repeated_communication_s(
        pair, np.where(batch.sequence_parallel == 1, scatter, reduce), batch, workload
    )


def _hidden_reduction_s(
    hidden_dim: int,
    operators: tuple[Operator, ...],
    times: list[OperatorTime],
    batch: LayoutBatch,
    workload: Workload,
    cluster: ClusterSpec,
) -> FloatArray:
    """Backward reductions that run beside the gradient of a weight: Megatron reduces the gradient of a column-parallel product's
    input while it computes that of its weight, half of the product's backward time (arXiv:2205.05198 section 4.2.2 and
    LinearWithGradAccumulationAndAsyncCommunication). One for each of the two places of a block where a reduction is due.
    """
    hidden = np.zeros(len(batch))
    if workload.engine != "megatron":
        return hidden
    size = np.asarray(batch.micro_batch_size * workload.seq_len * hidden_dim * float(workload.compute_bytes))
    stride = np.ones_like(batch.tp)
    one_s = np.where(
        batch.sequence_parallel == 1,
        collective_s("reduce_scatter", size, batch.tp, stride, cluster),
        collective_s("all_reduce", size, batch.tp, stride, cluster),
    )
    for op, time in zip(operators, times, strict=True):
        if op.name in ("qkv", "mlp_up", "logits"):
            hidden = hidden + np.minimum(one_s, time.backward_s / 2)
    return hidden


def _repeated_communication_s(pair: FloatArray, last: FloatArray, batch: LayoutBatch, workload: Workload) -> FloatArray:
    """Recompute repeats the forward communication: Megatron all of it, and none for the core of unfused attention alone; ours all
    but the ``last`` reduction, which nothing in the backward pass reads.
    """
    full, selective = 2 * pair - last, 2 * pair - last
    if is_megatron(workload):
        full = 2 * pair
        selective = np.zeros_like(pair) if workload.attention == "math" else selective
    is_kind = [batch.recompute == RECOMPUTES.index(kind) for kind in ("full", "selective")]
    return np.select(is_kind, [full, selective], 0.0)


def tp_params(layer: Layer, hidden_dim: int, batch: LayoutBatch) -> FloatArray:
    """Parameters of one rank's tensor-parallel share [N]: products split, norms and routers whole."""
    total = layer.num_params(hidden_dim)
    if isinstance(layer, Embedding):
        split = layer.vocab_size * hidden_dim
    elif isinstance(layer, Head):
        # A tied projection is the embedding's weight; under a pipeline the last stage holds a copy of its own.
        copies = np.where(batch.pp > 1, 1, 0) if layer.tied else np.ones_like(batch.tp)
        split = layer.vocab_size * hidden_dim
        norm_and_bias = total - (0 if layer.tied else split)
        return np.asarray(norm_and_bias + copies * split / batch.tp, dtype=np.float64)
    else:
        operators = layer_operators(layer, hidden_dim, 1)
        split = sum(op.num_params for op in operators if isinstance(op, Gemm) and op.shard in ("column", "row"))
    return np.asarray(total - split + split / batch.tp, dtype=np.float64)


def _data_parallel_s(
    num_params: FloatArray, batch: LayoutBatch, workload: Workload, cluster: ClusterSpec
) -> tuple[FloatArray, FloatArray]:
    """All-gather of parameters in the compute dtype; reduce-scatter (and all-reduce over replicas) of fp32 gradients."""
    stride = batch.tp
    gather = collective_s("all_gather", num_params * workload.compute_bytes, batch.dp_shard, stride, cluster)
    scatter = collective_s("reduce_scatter", num_params * 4.0, batch.dp_shard, stride, cluster)
    shard_bytes = num_params * 4.0 / batch.dp_shard
    replicate = collective_s("all_reduce", shard_bytes, batch.dp_replicate, stride * batch.dp_shard, cluster)
    return gather, scatter + replicate


def _activation_bytes(
    layer: Layer, hidden_dim: int, batch: LayoutBatch, workload: Workload, cluster: ClusterSpec
) -> tuple[FloatArray, FloatArray]:
    """Bytes kept from forward to backward under each layout's recompute, and the working set of the backward pass."""
    how = Kernels(
        compute_bytes=workload.compute_bytes,
        unfused_norm=cluster.weakest_device.vendor == "cpu",
        score_width=workload.seq_len if workload.attention == "math" else 0,
    )
    choices = [saved_elements(layer, hidden_dim, recompute, how) for recompute in RECOMPUTES]
    if is_megatron(workload) and workload.attention == "math":
        # Selective drops what lies between query, key, value and the output of attention, and nothing else.
        choices[RECOMPUTES.index("selective")] = saved_elements(layer, hidden_dim, "none", replace(how, score_width=0))
    kept = np.stack([_saved_bytes(saved, batch, workload) for saved in choices])
    chosen = np.take_along_axis(kept, batch.recompute[None, :], axis=0)[0]
    # While one layer runs backward, what it had dropped is there again, and gradients of its widest tensors beside it.
    return chosen, kept[0] - chosen + 0.5 * kept[0]


def _saved_bytes(saved: Saved, batch: LayoutBatch, workload: Workload) -> FloatArray:
    tokens = batch.micro_batch_size * workload.seq_len
    along_sequence = np.where(batch.sequence_parallel == 1, batch.tp, 1)
    elements = saved.whole + saved.tp / batch.tp + saved.tokens / along_sequence
    fp32 = saved.tp_fp32 / batch.tp + saved.fp32 / along_sequence
    return np.asarray(tokens * (workload.compute_bytes * elements + 4 * fp32), dtype=np.float64)
