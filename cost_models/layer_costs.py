"""LayerCost: everything one layer costs under every layout of a batch, one micro-batch at a time.

Composes operators (operators.py) with device rates (compute.py), tensor-parallel and data-parallel collectives (collectives.py)
and saved activations (activations.py). Stages and steps only add layers up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..schema import ClusterSpec, Workload
from ..schema.layout import Recompute
from ..schema.model import Block, Embedding, Head, MTPHead
from .activations import Kernels, Saved, saved_elements, saved_for_weights
from .adapters import adapter_params, saved_beside, with_adapters
from .coefficients import device_rates, host_costs
from .collectives import collective_s
from .compute import OperatorTime, operator_time
from .host_memory import host_link_bytes_per_s
from .layouts import OFFLOADS, RECOMPUTES, FloatArray, LayoutBatch
from .memory import has_copies
from .operators import FusedAttention, Gemm, Layer, Operator, layer_operators


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
        frozen_bytes: of parameters that are not trained, as they are stored.
        num_trained: those of them, or of adapters beside them, that are trained.
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
    frozen_bytes: FloatArray
    num_trained: FloatArray
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
    operators = layer_operators(layer, hidden_dim, workload.attended_len, unfused=workload.attention == "math")
    if workload.adapters is not None:
        operators = with_adapters(operators, workload.adapters)
    times = _operator_times(operators, batch, workload, cluster)
    tp_s = _tensor_parallel_s(layer, hidden_dim, batch, workload, cluster)
    compute = _compute_s(layer, operators, times, tp_s, batch, workload, cluster)
    num_params = tp_params(layer, hidden_dim, batch)
    num_trained = trained_params(layer, hidden_dim, num_params, batch, workload)
    frozen = frozen_bytes(layer, num_params, batch, workload)
    gather, reduce = _data_parallel_s(frozen, num_trained, batch, workload, cluster)
    kept, working = _activation_bytes(layer, hidden_dim, batch, workload, cluster)
    forward, backward, recompute = compute
    # What leaves for the host during the forward pass and comes back during the backward one hides behind them.
    moved_s = batch.offload_activations * kept / host_link_bytes_per_s(batch.offload_to_storage, cluster)
    forward, backward = np.maximum(forward, moved_s), np.maximum(backward, moved_s)
    kept = kept * (1 - batch.offload_activations)
    return LayerCost(
        forward, backward, recompute, *tp_s, gather, reduce, num_params, frozen, num_trained, kept, working
    )


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
    keeps_attention = workload.attention == "flash"
    recompute, repeated = _recompute(operators, times, batch, keeps_attention) if has_block else (zero, zero)
    recompute, repeated = batch.recompute_fraction * recompute, batch.recompute_fraction * repeated
    if workload.adapters is not None and workload.adapters.frozen == "nf4":
        written_s = _dequantise_s(operators, batch, workload, cluster)
        forward, backward = forward + written_s, backward + written_s
    collectives = np.where(batch.tp > 1, 4 if has_block else 1, 0)
    per_pass = collectives * host.collective_s + np.where(has_copies(batch, workload), host.fsdp_unit_s / 2, 0.0)
    host_forward = per_pass + host.operator_s * sum(time.forward_dispatches for time in times)
    host_backward = per_pass + host.operator_s * sum(time.backward_dispatches for time in times)
    host_recompute = repeated * host.operator_s
    if host.adds:
        return forward + host_forward, backward + host_backward, recompute + host_recompute
    tp_forward, tp_backward = tp_s
    return (
        np.maximum(forward, host_forward - tp_forward),
        np.maximum(backward, host_backward + host_recompute - recompute - tp_backward),
        recompute,
    )


def _dequantise_s(
    operators: tuple[Operator, ...], batch: LayoutBatch, workload: Workload, cluster: ClusterSpec
) -> FloatArray:
    """Seconds to write a layer's frozen nf4 products out in the compute dtype, before they are used."""
    weights = sum(op.num_params for op in operators if isinstance(op, Gemm) and op.frozen)
    traffic = workload.adapters.frozen_bytes + workload.compute_bytes if workload.adapters else 0.0
    rates = device_rates(cluster.weakest_device, workload)
    return np.asarray(weights * traffic / batch.tp / rates.elementwise_bytes_per_s)


def _recompute(
    operators: tuple[Operator, ...], times: list[OperatorTime], batch: LayoutBatch, keeps_attention: bool
) -> tuple[FloatArray, FloatArray]:
    """Forward seconds and dispatches repeated: all but the last product if full, neither products nor attention if selective.

    Unfused attention is repeated by selective recompute too: its outputs are not kept (runtime/recompute.py).
    """
    last_product = max(idx for idx, op in enumerate(operators) if isinstance(op, Gemm))
    full = [time for idx, time in enumerate(times) if idx != last_product]
    kept = (Gemm, FusedAttention) if keeps_attention else (Gemm,)
    cheap = [time for op, time in zip(operators, times, strict=True) if not isinstance(op, kept)]
    is_kind = [batch.recompute == RECOMPUTES.index(kind) for kind in ("full", "selective")]
    seconds = [sum((time.forward_s for time in chosen), start=np.zeros(len(batch))) for chosen in (full, cheap)]
    dispatches = [float(sum(time.forward_dispatches for time in chosen)) for chosen in (full, cheap)]
    return np.select(is_kind, seconds, 0.0), np.select(is_kind, dispatches, 0.0)


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
    # Both kinds of recompute repeat the forward communication but the last reduction, which nothing in the backward pass reads.
    last = np.where(batch.sequence_parallel == 1, scatter, reduce)
    repeated = np.where(batch.recompute == RECOMPUTES.index("none"), 0.0, 2 * pair - last) * batch.recompute_fraction
    return 2 * pair, 2 * pair + repeated


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


def trained_params(
    layer: Layer, hidden_dim: int, num_params: FloatArray, batch: LayoutBatch, workload: Workload
) -> FloatArray:
    """Trained parameters of one rank's tensor-parallel share [N]: all of them, or those of the adapters."""
    if workload.adapters is None:
        return num_params
    whole, cut = adapter_params(layer, hidden_dim, workload.adapters)
    return np.asarray(whole + cut / batch.tp, dtype=np.float64)


def frozen_bytes(layer: Layer, num_params: FloatArray, batch: LayoutBatch, workload: Workload) -> FloatArray:
    """Bytes of one rank's frozen parameters [N]: quantised products of blocks, everything else in 16 bits."""
    if workload.adapters is None:
        return np.zeros(len(batch))
    is_quantised = isinstance(layer, Block) or (isinstance(layer, Head) and workload.adapters.frozen == "nf4")
    return num_params * (workload.adapters.frozen_bytes if is_quantised else 2.0)


def _data_parallel_s(
    frozen: FloatArray, num_trained: FloatArray, batch: LayoutBatch, workload: Workload, cluster: ClusterSpec
) -> tuple[FloatArray, FloatArray]:
    """All-gather of parameters in the compute dtype; reduce-scatter (and all-reduce over replicas) of gradients.

    Frozen parameters are gathered only where they are sharded. Offloaded ones reach the device over the host's link first.
    """
    stride = batch.tp
    size = num_trained * workload.compute_bytes + np.where(batch.zero_stage == 3, frozen, 0.0)
    gather = collective_s("all_gather", size, batch.dp_shard, stride, cluster)
    from_host = (num_trained * workload.compute_bytes + frozen) / batch.dp_shard
    is_away = batch.offload == OFFLOADS.index("parameters")
    gather = gather + np.where(is_away, from_host / host_link_bytes_per_s(batch.offload_to_storage, cluster), 0.0)
    element = float(workload.master_bytes)
    scatter = collective_s("reduce_scatter", num_trained * element, batch.dp_shard, stride, cluster)
    shard_bytes = num_trained * element / batch.dp_shard
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
        eager=workload.kernels == "eager",
        frozen=workload.adapters is not None,
    )
    choices = [_saved(layer, hidden_dim, recompute, how, workload) for recompute in RECOMPUTES]
    kept = np.stack([_saved_bytes(saved, batch, workload) for saved in choices])
    chosen = np.take_along_axis(kept, batch.recompute[None, :], axis=0)[0]
    mean = batch.recompute_fraction * chosen + (1 - batch.recompute_fraction) * kept[0]
    # While one layer runs backward, what it had dropped is there again, and gradients of its widest tensors beside it.
    return mean, kept[0] - chosen + 0.5 * kept[0]


def _saved(layer: Layer, hidden_dim: int, recompute: Recompute, how: Kernels, workload: Workload) -> Saved:
    """What a layer keeps; a frozen one without what only gradients of weights read, but with what its adapters keep."""
    saved = saved_elements(layer, hidden_dim, recompute, how)
    if workload.adapters is None:
        return saved
    if workload.adapters.frozen != "nf4":  # its product keeps its input all the same
        saved -= saved_for_weights(layer, hidden_dim, recompute)
    return saved if recompute == "full" else saved + saved_beside(layer, hidden_dim, workload.adapters)


def _saved_bytes(saved: Saved, batch: LayoutBatch, workload: Workload) -> FloatArray:
    tokens = batch.micro_batch_size * workload.seq_len
    along_sequence = np.where(batch.sequence_parallel == 1, batch.tp, 1)
    elements = saved.whole + saved.tp / batch.tp + saved.tokens / along_sequence
    fp32 = saved.tp_fp32 / batch.tp + saved.fp32 / along_sequence
    return np.asarray(tokens * (workload.compute_bytes * elements + 4 * fp32), dtype=np.float64)
