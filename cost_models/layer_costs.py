"""LayerCost: everything one layer costs under every layout of a batch, one micro-batch at a time.

Composes operators (operators.py) with device rates (compute.py), tensor-parallel and data-parallel collectives (collectives.py)
and saved activations (activations.py). Stages and steps only add layers up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..schema import ClusterSpec, Workload
from ..schema.layout import Recompute
from ..schema.model import Block, Embedding, Head, MTPHead
from . import engine_memory
from .activations import Kernels, Saved, saved_elements, saved_for_weights
from .adapters import adapter_params, saved_beside, with_adapters
from .coefficients import HostCosts, coefficients, device_rates, host_costs
from .collectives import collective_s
from .compute import OperatorTime, operator_time
from .context import ring
from .engines import is_megatron, num_buckets, num_collectives
from .experts import dispatch_s, expert_params, routed_part, token_share
from .host_memory import host_link_bytes_per_s
from .layouts import OFFLOADS, RECOMPUTES, FloatArray, IntArray, LayoutBatch
from .memory import has_copies
from .operators import CORE_ATTENTION, FusedAttention, Gemm, Layer, Operator, Softmax, layer_operators


@dataclass(frozen=True)
class LayerCost:
    """Arrays [N], one entry per layout: seconds and bytes of one layer on one rank, for one micro-batch.

    Attributes:
        forward_s, backward_s: operators, without communication.
        recompute_s: forward work repeated in the backward pass.
        tp_forward_s, tp_backward_s: exposed tensor-parallel communication.
        cp_forward_s, cp_backward_s: exposed communication of context parallelism.
        ep_forward_s, ep_backward_s: communication of tokens with their experts.
        gather_s: all-gather of the layer's parameters over dp_shard.
        reduce_s: reduction of its gradients over dp_shard and dp_replicate.
        num_params: parameters of this rank's tensor-parallel share and of the experts it holds.
        frozen_bytes: of parameters that are not trained, as they are stored.
        num_trained: those of them, or of adapters beside them, that are trained.
        expert_params: those of the trained ones that are routed experts'.
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
    cp_forward_s: FloatArray
    cp_backward_s: FloatArray
    ep_forward_s: FloatArray
    ep_backward_s: FloatArray
    expert_params: FloatArray

    @property
    def busy_s(self) -> FloatArray:
        """Seconds of forward and backward with recompute and the communication inside a layer."""
        compute = self.forward_s + self.backward_s + self.recompute_s
        return compute + self.comm_forward_s + self.comm_backward_s

    @property
    def comm_forward_s(self) -> FloatArray:
        """Exposed communication inside the layer, forward."""
        return self.tp_forward_s + self.cp_forward_s + self.ep_forward_s

    @property
    def comm_backward_s(self) -> FloatArray:
        """Exposed communication inside the layer, backward."""
        return self.tp_backward_s + self.cp_backward_s + self.ep_backward_s


def layer_cost(
    layer: Layer, hidden_dim: int, batch: LayoutBatch, workload: Workload, cluster: ClusterSpec
) -> LayerCost:
    """Cost of ``layer`` under every layout of ``batch``."""
    operators = layer_operators(
        layer,
        hidden_dim,
        workload.attended_len,
        unfused=softmax_kernels(workload),
        engine=workload.engine,
        dropout=workload.dropout,
        fusion=workload.fusion,
    )
    if workload.adapters is not None:
        operators = with_adapters(operators, workload.adapters)
    times = _operator_times(operators, batch, workload, cluster)
    times, cp_s = _with_ring(layer, operators, times, batch, workload, cluster)
    tp_s = _tensor_parallel_s(layer, hidden_dim, batch, workload, cluster)
    tp_s = (tp_s[0], tp_s[1] - _hidden_reduction_s(hidden_dim, operators, times, batch, workload, cluster))
    ep_s = _expert_parallel_s(layer, hidden_dim, batch, workload, cluster)
    exposed_s = (tp_s[0] + cp_s[0] + ep_s[0], tp_s[1] + cp_s[1] + ep_s[1])
    forward, backward, recompute = _compute_s(layer, operators, times, exposed_s, batch, workload, cluster)
    num_params = tp_params(layer, hidden_dim, batch)
    num_trained = trained_params(layer, hidden_dim, num_params, batch, workload)
    routed = expert_params(layer, hidden_dim, batch) if workload.adapters is None else np.zeros(len(batch))
    num_tensors = sum(isinstance(op, Gemm) for op in operators) + 2 * isinstance(layer, Block | MTPHead)
    frozen = frozen_bytes(layer, num_params, batch, workload)
    gather, reduce = _data_parallel_s(frozen, num_trained, routed, num_tensors, batch, workload, cluster)
    kept, working = _activation_bytes(layer, hidden_dim, batch, workload, cluster)
    # What leaves for the host during the forward pass and comes back during the backward one hides behind them.
    moved_s = batch.offload_activations * kept / host_link_bytes_per_s(batch.offload_to_storage, cluster)
    forward, backward = np.maximum(forward, moved_s), np.maximum(backward, moved_s)
    kept = kept * (1 - batch.offload_activations)
    costs = (gather, reduce, num_params, frozen, num_trained, kept, working)
    return LayerCost(forward, backward, recompute, *tp_s, *costs, *cp_s, *ep_s, routed)


def softmax_kernels(workload: Workload) -> Softmax | None:
    """How unfused attention turns scores into probabilities; None for fused attention.

    Megatron's scale-mask-softmax kernel takes 16-bit inputs only (FusedScaleMaskSoftmax.is_kernel_available).
    """
    if workload.attention == "flash":
        return None
    return "fused" if is_megatron(workload) and workload.compute_bytes == 2 else "separate"


def _operator_times(
    operators: tuple[Operator, ...], batch: LayoutBatch, workload: Workload, cluster: ClusterSpec
) -> list[OperatorTime]:
    rates = device_rates(cluster, workload)
    tokens, share = batch.tokens(workload.seq_len), token_share(batch)
    dtype = workload.compute_bytes
    return [
        operator_time(
            op, tokens * share, batch.expert_tp, batch.sequence_parallel, rates=rates, compute_bytes=dtype, ep=batch.ep
        )
        if getattr(op, "routed", False)
        else operator_time(op, tokens, batch.tp, batch.sequence_parallel, rates=rates, compute_bytes=dtype)
        for op in operators
    ]


def _with_ring(
    layer: Layer,
    operators: tuple[Operator, ...],
    times: list[OperatorTime],
    batch: LayoutBatch,
    workload: Workload,
    cluster: ClusterSpec,
) -> tuple[list[OperatorTime], tuple[FloatArray, FloatArray]]:
    """Attention's time with the further steps of the ring over cp, and the ring's exposed communication in both passes."""
    block = layer.block if isinstance(layer, MTPHead) else layer
    if not isinstance(block, Block) or np.all(batch.cp == 1):
        return times, (np.zeros(len(batch)), np.zeros(len(batch)))
    at = next(idx for idx, op in enumerate(operators) if isinstance(op, FusedAttention))
    rates, alone = device_rates(cluster, workload), times[at]
    added = ring(block.attention, (alone.forward_s, alone.backward_s), batch, workload, cluster, rates)
    with_ring = OperatorTime(
        alone.forward_s + added.forward_s,
        alone.backward_s + added.backward_s,
        alone.forward_dispatches + added.dispatches,
        alone.backward_dispatches + added.dispatches,
    )
    repeated = np.where(batch.recompute == RECOMPUTES.index("full"), added.exposed_forward_s, 0.0)
    exposed = (added.exposed_forward_s, added.exposed_backward_s + repeated)
    return [*times[:at], with_ring, *times[at + 1 :]], exposed


def _expert_parallel_s(
    layer: Layer, hidden_dim: int, batch: LayoutBatch, workload: Workload, cluster: ClusterSpec
) -> tuple[FloatArray, FloatArray]:
    """Tokens to their experts and back, forward and backward; recomputing whole blocks sends them again."""
    once = dispatch_s(layer, hidden_dim, batch, workload, cluster)
    return once, once * np.where(batch.recompute == RECOMPUTES.index("full"), 2, 1)


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
    host = host_costs(cluster, workload)
    zero = np.zeros(len(batch))
    forward = sum((time.forward_s for time in times), start=zero)
    backward = sum((time.backward_s for time in times), start=zero)
    has_block = isinstance(layer, Block | MTPHead)
    recompute, repeated = _recompute(operators, times, batch, workload) if has_block else (zero, zero)
    recompute, repeated = batch.recompute_fraction * recompute, batch.recompute_fraction * repeated
    if workload.adapters is not None and workload.adapters.frozen == "nf4":
        written_s = _dequantise_s(operators, batch, workload, cluster)
        forward, backward = forward + written_s, backward + written_s
    # Two pairs of all-gather and reduce-scatter a pass, or two all-reduces.
    collectives = np.where(batch.tp > 1, (2 if has_block else 0.5) * np.where(batch.sequence_parallel == 1, 2, 1), 0.0)
    repeats = batch.recompute_fraction * (batch.recompute == RECOMPUTES.index("full"))
    each_s = host.collective_s + batch.tp * _between_nodes_s(host, batch, cluster)
    is_wrapped = has_copies(batch, workload) | (batch.cp > 1)
    per_pass = collectives * each_s + np.where(is_wrapped, host.fsdp_unit_s / 2, 0.0)
    if routed_part(layer) is not None and not host.adds:
        per_pass = per_pass + host.routing_s / 2
    host_forward = per_pass + host.operator_s * sum(time.forward_dispatches for time in times)
    host_backward = per_pass + host.operator_s * sum(time.backward_dispatches for time in times)
    host_recompute = repeated * host.operator_s + repeats * collectives * each_s
    if host.adds:
        return forward + host_forward, backward + host_backward, recompute + host_recompute
    tp_forward, tp_backward = tp_s
    busy_backward = backward + recompute + tp_backward
    return (
        forward + waiting_s(forward + tp_forward, host_forward, host.overlap_norm),
        backward + waiting_s(busy_backward, host_backward + host_recompute, host.overlap_norm),
        recompute,
    )


def _dequantise_s(
    operators: tuple[Operator, ...], batch: LayoutBatch, workload: Workload, cluster: ClusterSpec
) -> FloatArray:
    """Seconds to write a layer's frozen nf4 products out in the compute dtype, before they are used."""
    weights = sum(op.num_params for op in operators if isinstance(op, Gemm) and op.frozen)
    traffic = workload.adapters.frozen_bytes + workload.compute_bytes if workload.adapters else 0.0
    rates = device_rates(cluster, workload)
    return np.asarray(weights * traffic / batch.tp / rates.elementwise_bytes_per_s)


def _between_nodes_s(host: HostCosts, batch: LayoutBatch, cluster: ClusterSpec) -> FloatArray:
    """What one rank adds to a tensor-parallel collective [N] because of traffic between nodes, where the engine is known for it."""
    node = max(group.devices_per_node for group in cluster.groups)
    over_pipeline = np.where((batch.pp > 1) & (cluster.num_nodes > 1), host.pipelined_collective_s, 0.0)
    return np.asarray(over_pipeline + np.where(batch.tp > node, host.spanning_collective_s, 0.0))


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
    if workload.selective == "alternate_products":
        seconds[1] = seconds[1] + alternate_products_s(operators, times, batch)
    dispatches = [
        sum((time.forward_dispatches for time in chosen), start=np.zeros(len(batch))) for chosen in (full, cheap)
    ]
    return np.select(is_kind, seconds, 0.0), np.select(is_kind, dispatches, 0.0)


def alternate_products_s(operators: tuple[Operator, ...], times: list[OperatorTime], batch: LayoutBatch) -> FloatArray:
    """Forward seconds of every second product of a block [N]: of q, k, v, out, gate, up, down these are k, out and up.

    Source: torchtitan, distributed/activation_checkpoint.py: its policy counts the products and keeps those with an odd number.
    """
    repeated = np.zeros(len(batch))
    for op, time in zip(operators, times, strict=True):
        repeated += _repeated_share(op, operators) * time.forward_s if isinstance(op, Gemm) else 0.0
    return repeated


def _repeated_share(op: Gemm, operators: tuple[Operator, ...]) -> float:
    """Part of a product's output that is repeated; gate and up, and q, k and v, are one product here."""
    if op.name == "qkv":
        q = sum(other.k for other in operators if isinstance(other, Gemm) and other.name == "attention_out")
        return (op.n - q) / 2 / op.n
    if op.name == "attention_out":
        return 1.0
    is_gated = any(isinstance(other, Gemm) and other.name == "mlp_down" and op.n == 2 * other.k for other in operators)
    return 0.5 if op.name == "mlp_up" and is_gated else 0.0


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
    elements = batch.tokens(workload.seq_len) * hidden_dim
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
    # Experts with axes of their own read tokens that no tensor-parallel collective gathers; shared experts still do.
    moe = routed_part(layer)
    pairs = np.where(batch.experts_follow_tp, 2, 1) if moe is not None and moe.shared is None else 2
    last = np.where(batch.sequence_parallel == 1, scatter, reduce)
    repeated = batch.recompute_fraction * _repeated_communication_s(pairs * pair, last, batch, workload)
    return pairs * pair, pairs * pair + repeated


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
    if workload.engine != "megatron" or not workload.overlap:
        return hidden
    size = np.asarray(batch.tokens(workload.seq_len) * hidden_dim * float(workload.compute_bytes))
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


def _repeated_communication_s(
    pairs_s: FloatArray, last: FloatArray, batch: LayoutBatch, workload: Workload
) -> FloatArray:
    """Recompute repeats the forward communication: Megatron all of it, and none for the core of unfused attention alone; ours all
    but the ``last`` reduction, which nothing in the backward pass reads.
    """
    full, selective = pairs_s - last, pairs_s - last
    if is_megatron(workload):
        full = pairs_s
        selective = np.zeros_like(pairs_s) if workload.attention == "math" else selective
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
    moe = routed_part(layer)
    whole_experts = moe.num_experts * moe.expert.num_params(hidden_dim) if moe else 0
    follow = total - split + split / batch.tp
    routed_split = sum(op.num_params for op in operators if isinstance(op, Gemm) and op.routed) if moe else 0
    dense_split = split - routed_split
    apart = total - whole_experts - dense_split + dense_split / batch.tp + expert_params(layer, hidden_dim, batch)
    return np.asarray(np.where(batch.experts_follow_tp, follow, apart), dtype=np.float64)


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
    frozen: FloatArray,
    num_trained: FloatArray,
    routed: FloatArray,
    num_tensors: int,
    batch: LayoutBatch,
    workload: Workload,
    cluster: ClusterSpec,
) -> tuple[FloatArray, FloatArray]:
    """All-gather and reduction over the ranks that share parameters; experts with axes of their own have their own groups.

    Where the engine runs them tensor by tensor, each further one costs the steps of a ring: its latency is not shared.
    Frozen parameters are gathered only where they are sharded. Offloaded ones reach the device over the host's link first.
    """
    together = np.where(batch.experts_follow_tp, num_trained, num_trained - routed)
    gathered = together * workload.compute_bytes + np.where(batch.zero_stage == 3, frozen, 0.0)
    buckets = num_buckets(batch, workload, together)
    groups = (batch.num_shards, batch.num_replicas, batch.tp)
    gather, reduce = _sharded_s(gathered, together * float(workload.gradient_bytes), *groups, buckets, cluster)
    further = num_collectives(batch, workload, num_tensors) - 1
    steps_s = further * batch.num_shards * coefficients()["data_parallel"]["tensor_step_s"]
    from_host = (num_trained * workload.compute_bytes + frozen) / batch.num_shards
    is_away = batch.offload == OFFLOADS.index("parameters")
    fetch_s = np.where(is_away, from_host / host_link_bytes_per_s(batch.offload_to_storage, cluster), 0.0)
    gather, reduce = gather + steps_s + fetch_s, reduce + steps_s
    if np.all(batch.experts_follow_tp):
        return gather, reduce
    alone = np.where(batch.experts_follow_tp, 0.0, routed)
    groups = (batch.expert_shards, batch.expert_replicas, batch.ep * batch.expert_tp)
    sizes = (alone * workload.compute_bytes, alone * float(workload.gradient_bytes))
    expert_gather, expert_reduce = _sharded_s(*sizes, *groups, num_buckets(batch, workload, alone), cluster)
    has_own = alone > 0
    return gather + np.where(has_own, expert_gather, 0.0), reduce + np.where(has_own, expert_reduce, 0.0)


def _sharded_s(
    gathered: FloatArray,
    reduced: FloatArray,
    shards: IntArray,
    replicas: IntArray,
    stride: IntArray,
    buckets: FloatArray,
    cluster: ClusterSpec,
) -> tuple[FloatArray, FloatArray]:
    """All-gather of ``gathered`` bytes; reduce-scatter (and all-reduce over replicas, in buckets) of ``reduced`` bytes."""
    gather = collective_s("all_gather", gathered, shards, stride, cluster)
    scatter = collective_s("reduce_scatter", reduced, shards, stride, cluster)
    replicate = buckets * collective_s("all_reduce", reduced / shards / buckets, replicas, stride * shards, cluster)
    return gather, scatter + replicate


def _activation_bytes(
    layer: Layer, hidden_dim: int, batch: LayoutBatch, workload: Workload, cluster: ClusterSpec
) -> tuple[FloatArray, FloatArray]:
    """Bytes kept from forward to backward under each layout's recompute, and the working set of the backward pass."""
    how = Kernels(
        compute_bytes=workload.compute_bytes,
        unfused_norm=cluster.weakest_device.vendor == "cpu",
        score_width=workload.seq_len if workload.attention == "math" else 0,
        engine=engine_memory.ENGINES.get(workload.engine),
        every_second=workload.selective == "alternate_products",
        saves_fp8=workload.precision == "fp8" and workload.engine == "megatron",
        eager=workload.fusion == "eager",
        frozen=workload.adapters is not None,
    )
    choices = [_saved(layer, hidden_dim, recompute, how, workload) for recompute in RECOMPUTES]
    if is_megatron(workload) and workload.attention == "math":
        # Selective drops what lies between query, key, value and the output of attention, and nothing else.
        choices[RECOMPUTES.index("selective")] = _saved(
            layer, hidden_dim, "none", replace(how, score_width=0), workload
        )
    kept = np.stack([_saved_bytes(saved, batch, workload) for saved in choices])
    chosen = np.take_along_axis(kept, batch.recompute[None, :], axis=0)[0]
    mean = batch.recompute_fraction * chosen + (1 - batch.recompute_fraction) * kept[0]
    # While one layer runs backward, what it had dropped is there again, and gradients of its widest tensors beside it.
    gradients = 0.5 * kept[0]
    if how.engine is not None and how.score_width:
        # Each gradient of the scores takes the place of a saved tensor that has been used.
        fused = _saved(layer, hidden_dim, "none", replace(how, score_width=0), workload)
        gradients = 0.5 * _saved_bytes(fused, batch, workload)
    return mean, kept[0] - chosen + gradients


def _saved(layer: Layer, hidden_dim: int, recompute: Recompute, how: Kernels, workload: Workload) -> Saved:
    """What a layer keeps; a frozen one without what only gradients of weights read, but with what its adapters keep."""
    saved = saved_elements(layer, hidden_dim, recompute, how)
    if workload.adapters is None:
        return saved
    if workload.adapters.frozen != "nf4":  # its product keeps its input all the same
        saved -= saved_for_weights(layer, hidden_dim, recompute)
    return saved if recompute == "full" else saved + saved_beside(layer, hidden_dim, workload.adapters)


def _saved_bytes(saved: Saved, batch: LayoutBatch, workload: Workload) -> FloatArray:
    tokens = batch.tokens(workload.seq_len)
    along_sequence = np.where(batch.sequence_parallel == 1, batch.tp, 1)
    whole = saved.whole + saved.routed * token_share(batch)
    elements = whole + saved.tp / batch.tp + saved.tokens / along_sequence
    fp32 = saved.tp_fp32 / batch.tp + saved.fp32 / along_sequence
    return np.asarray(tokens * (workload.compute_bytes * elements + 4 * fp32), dtype=np.float64)
