"""Communication of one micro-batch within a layer, and to the next stage: tensor, pipeline and expert parallelism.

Tensor parallelism: two pairs of all-gather and reduce-scatter a block and pass (one where attention and feed-forward part read the
same norm: their sum is reduced, as in PaLM, arXiv:2204.02311 section 2), some of them hidden behind products.

Expert parallelism: within a stage ep * expert_tp * copies = ranks. A rank holds E / ep experts, each cut over expert_tp ranks. It
keeps T / tp of a micro-batch's tokens for itself (sequence parallelism), so that with an even router its experts get

    rows = top_k * T * expert_tp / tp

however many ranks share them: more ep brings more tokens and fewer experts. Tokens travel by all-to-all over ep (dispatch
and combine, forward, and the same backward), each of its top_k copies by itself, and are gathered and reduced over expert_tp,
before they are routed (ours) or the rows that reach a rank.
Experts that follow tp (ep = 1, expert_tp = tp) have no such traffic. The slowest rank decides: where loads of the experts were
measured (Workload.expert_imbalance), rows and bytes are those of the rank with most.
Source: MoE Parallel Folding (arXiv:2504.14960), Megatron's all-to-all dispatcher.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...schema import ClusterSpec, Workload
from ...schema.layers import Embedding, Head, MoE, SoftmaxAttention
from ...schema.layout_table import RECOMPUTES, LayoutTable
from ...schema.units import Array, FloatArray, IntArray
from ..coefficients import Scenario
from ..hardware.collectives import Op, collective_s, exposed_s, p2p_s, slowdown_law
from ..hardware.compute import OperatorTime
from ..hardware.machine import device_rates
from ..hardware.node_links import Hops
from .operators import CostInputs, Layer, Operator

# Tensor parallelism


def tensor_parallel_s(layer: Layer, inputs: CostInputs) -> tuple[FloatArray, FloatArray]:
    """Return exposed communication [N] of a layer forward and backward, what recompute repeats included in the latter.

    Two pairs of all-gather and reduce-scatter a block and pass, or two all-reduces without sequence parallelism; the embedding
    and the head have the half that faces the blocks.
    """
    gather, reduce = exchange_s(inputs)
    if layer.counted is not None:
        return _traced_s(layer, gather, reduce, inputs)
    if isinstance(layer, Embedding):
        return reduce, gather
    if isinstance(layer, Head):
        return gather, reduce
    once = reductions(layer, inputs) * (gather + reduce) + norm_sums_s(layer, inputs)
    return once, once + repeated_over_tp(once, reduce, inputs)


def repeated_over_tp(forward: FloatArray, last: FloatArray | float, inputs: CostInputs) -> FloatArray:
    """Return what recompute repeats [N] of something that tensor parallelism does in a forward pass.

    Ours repeats all but the ``last`` reduction, which nothing in the backward pass reads; Megatron under full recompute all of it,
    and none for the core of unfused attention alone.
    """
    workload, layouts = inputs.workload, inputs.layouts
    full = selective = np.maximum(forward - last, 0.0)
    if workload.engine_facts.is_eager_like_megatron:
        full, selective = forward, np.zeros_like(forward) if workload.attention == "math" else selective
    is_kind = [layouts.recompute == RECOMPUTES.index(kind) for kind in ("full", "selective")]
    return np.asarray(layouts.recompute_fraction * np.select(is_kind, [full, selective], 0.0))


def exchange_s(inputs: CostInputs) -> tuple[FloatArray, FloatArray]:
    """Return the seconds [N] of the gather before a part of a block, 0 without sequence parallelism, and the reduction after it."""
    copied = sequence_copy_s(inputs)
    gather = np.where(inputs.layouts.sequence_parallel == 1, _over_tp_s("all_gather", inputs) + copied, 0.0)
    return gather, _reduction_s(inputs) + copied


def _traced_s(
    layer: Layer, gather: FloatArray, reduce: FloatArray, inputs: CostInputs
) -> tuple[FloatArray, FloatArray]:
    """Return the same of a layer traced from code: a sum for each layer that is split by input, gathered logits.

    Embeddings are whole; with sequence parallelism the first block's input is cut, and gathered backward.
    """
    layouts, none = inputs.layouts, np.zeros(len(inputs.layouts))
    split = None if layer.counted is None else layer.counted.split
    if isinstance(layer, Embedding):
        return none, gather
    if split is None:
        return gather, none
    if isinstance(layer, Head):
        logits = inputs.hidden_bytes * (layer.vocab_size / inputs.hidden_dim)
        return gather + collective_s("all_gather", logits, layouts.tp, np.ones_like(layouts.tp), inputs.cluster), reduce
    once = split.num_sums * (gather + reduce)
    repeats = layouts.recompute_fraction * (layouts.recompute != RECOMPUTES.index("none"))
    return once, once + repeats * (once - reduce)


def overlapped_s(
    operators: tuple[Operator, ...], times: list[OperatorTime], inputs: CostInputs
) -> tuple[FloatArray, FloatArray]:
    """Return what of the tensor-parallel communication runs with products, forward and backward [N].

    Megatron reduces the gradient of a column-parallel product's input while it computes that of its weight, half of the product's
    backward time (arXiv:2205.05198 section 4.2.2 and LinearWithGradAccumulationAndAsyncCommunication), at each of the two positions
    of a block where a reduction is due.
    With userbuffers (``tp_overlap``) a product starts on the rank's own chunk while the others arrive, and sends finished chunks
    while it computes the next: of tp chunks one is exposed where a product's output is reduced, none of those it reads, as far
    as the product is long enough. Gathers of gradients hide behind the dgrad of the row-parallel products.
    Source: Transformer Engine, ring_exchange and pipeline methods of its communication overlap.
    """
    layouts, workload, none = inputs.layouts, inputs.workload, np.zeros(len(inputs.layouts))
    forward, backward, reduced = none, none, none
    timed = [(op.name, time) for op, time in zip(operators, times, strict=True)]
    if workload.engine_facts.hides_reduction_in_weight_gradient and workload.overlaps:
        one_s = _reduction_s(inputs)
        for name, time in timed:
            if name in ("qkv", "mlp_up", "logits"):
                reduced = reduced + np.minimum(one_s, time.backward_s / 2)
    chunked = (layouts.tp_overlap == 1) & (layouts.sequence_parallel == 1) & (layouts.tp > 1)
    if not chunked.any() or workload.adapters is not None:
        return none, reduced
    gather, scatter = _over_tp_s("all_gather", inputs), _over_tp_s("reduce_scatter", inputs) * (1 - 1 / layouts.tp)
    for name, time in timed:
        if name in ("qkv", "mlp_up"):
            forward = forward + np.minimum(gather, time.forward_s)
        elif name in ("attention_out", "mlp_down"):
            forward = forward + np.minimum(scatter, time.forward_s)
            backward = backward + np.minimum(gather, time.backward_s / 2)
    return np.where(chunked, forward, 0.0), reduced + np.where(chunked, backward, 0.0)


_ONE_QUEUE = frozenset({"volta", "turing", "ampere", "ada", "hopper"})
"""Architectures on which the order of kernels of several streams is certain with one queue only (CUDA_DEVICE_MAX_CONNECTIONS=1)."""


def exposed_communication(
    layer: Layer, operators: tuple[Operator, ...], times: list[OperatorTime], inputs: CostInputs
) -> tuple[tuple[FloatArray, FloatArray], tuple[FloatArray, FloatArray], FloatArray]:
    """Return the exposed seconds over tp and of tokens with experts, forward and backward [N], and those hidden of the latter.

    Before Blackwell communication over tp runs with products where a device has one queue, or else starts when they end; an
    exchange beside another micro-batch needs several. Of the two the one counts that hides more.
    Source: Megatron-LM, arguments.py, on --overlap-moe-expert-parallel-comm with tensor parallelism.
    """
    over_tp, overlapped = tensor_parallel_s(layer, inputs), overlapped_s(operators, times, inputs)
    with_products = [np.minimum(*pair) for pair in zip(over_tp, overlapped, strict=True)]
    exchanged, hidden = expert_parallel_s(layer, operators, times, inputs)
    if inputs.cluster.weakest_device.architecture in _ONE_QUEUE and inputs.layouts.ep_overlap.any():
        prefers_tp = with_products[0] + with_products[1] >= hidden
        exchanged = (exchanged[0] + prefers_tp * hidden / 2, exchanged[1] + prefers_tp * hidden / 2)
        with_products = [np.where((hidden > 0) & ~prefers_tp, 0.0, seconds) for seconds in with_products]
        hidden = np.where(prefers_tp, 0.0, hidden)
    return (over_tp[0] - with_products[0], over_tp[1] - with_products[1]), exchanged, hidden


def userbuffers_bytes(boundary_bytes: Array, layouts: Any, workload: Workload) -> Array:
    """Return the buffers for products in chunks, given the hidden states of a rank; of a StepShape or a LayoutTable.

    Each of the ten collectives of a block has one that ranks write into, for the hidden states of all tp ranks: six gathers, in fp8
    where products are, and four reductions.
    Source: Transformer Engine, initialize_ub; Megatron gives it [seq_len / cp * micro_batch_size, hidden_dim].
    """
    gathered = 1.0 if workload.precision in ("fp8", "nvfp4") else float(workload.compute_bytes)
    exchanged = boundary_bytes * layouts.tp * (6 * gathered / workload.compute_bytes + 4)
    return np.where(layouts.tp_overlap, exchanged, 0.0)


def reductions(layer: Layer, inputs: CostInputs) -> IntArray:
    """Return the outputs of a layer that tp reduces in a pass [N].

    Experts with axes of their own read tokens that no tensor-parallel collective gathers; shared experts still do. Our runtime
    gathers for shared experts and for those that follow tp, and reduces what each puts out.
    """
    moe, layouts = layer.experts, inputs.layouts
    parts = 2 if layer.inner_block is None else layer.inner_block.num_reductions
    if moe is None:
        return np.full(len(layouts), parts)
    if moe.shared is None:
        return np.where(layouts.experts_follow_tp, parts, parts - 1)
    return parts + (layouts.experts_follow_tp & inputs.workload.engine_facts.is_own_runtime)


def norm_sums(layer: Layer, inputs: CostInputs) -> int:
    """Return the sums over tp in a pass for norms of queries and of keys over all heads: one number a token each."""
    block, kernels = layer.inner_block, inputs.workload.engine_facts.kernels
    is_split = block is not None and isinstance(block.attention, SoftmaxAttention) and block.attention.qk_norm == "full"
    return 2 if is_split and kernels.split_norm.forward_kernels else 0


def norm_sums_s(layer: Layer, inputs: CostInputs) -> FloatArray:
    """Return the seconds of these sums in a pass, in fp32 [N]."""
    tp = inputs.layouts.tp
    one_s = collective_s(
        "all_reduce", np.asarray(4.0 * inputs.tokens, dtype=np.float64), tp, np.ones_like(tp), inputs.cluster
    )
    return np.asarray(norm_sums(layer, inputs) * one_s)


def _reduction_s(inputs: CostInputs) -> FloatArray:
    """Return the seconds of one reduction of hidden states over tp [N]: scattered with sequence parallelism, else unsharded."""
    scatter, unsharded = _over_tp_s("reduce_scatter", inputs), _over_tp_s("all_reduce", inputs)
    return np.where(inputs.layouts.sequence_parallel == 1, scatter, unsharded)


def sequence_copy_s(inputs: CostInputs) -> FloatArray:
    """Return what DTensor takes to join what it gathered, or cut what it scatters, along the sequence [N].

    Collectives work along the first dimension, which is the batch's: a copy of the hidden states of all ranks each time (chunk and
    cat of torch.distributed._functional_collectives). Megatron has the sequence first.
    """
    layouts, rates = inputs.layouts, device_rates(inputs.scenario)
    if not inputs.workload.engine_facts.uses_fully_shard:
        return np.zeros(len(layouts))
    copied = rates.kernel_s + 2 * inputs.hidden_bytes / rates.elementwise_bytes_per_s
    return np.where((layouts.tp > 1) & (layouts.sequence_parallel == 1), copied, 0.0)


def _over_tp_s(op: Op, inputs: CostInputs) -> FloatArray:
    """Return the seconds of one collective of hidden states over tp [N]; layouts that share the shapes are evaluated once."""
    rows, case_idx = inputs.layouts.operators
    of_shapes = inputs.select(rows)
    tp = of_shapes.layouts.tp
    return np.asarray(collective_s(op, of_shapes.hidden_bytes, tp, np.ones_like(tp), inputs.cluster)[case_idx])


# Pipeline


def transfer_s(
    boundary_bytes: FloatArray, forward_s: FloatArray, inputs: CostInputs, stage_links: ClusterSpec
) -> FloatArray:
    """Return the seconds one micro-batch's activations take to the next stage, once for each chunk (gradients the same) [N].

    Megatron and DeepSpeed send a tensor-parallel rank's share only and gather it on arrival (scatter-gather optimisation,
    arXiv:2104.04473 section 4.1; DeepSpeed's PipelineEngine.is_pipe_partitioned). ``boundary_bytes`` are hidden states between
    blocks on one rank [N], ``forward_s`` the seconds of all chunks of a rank, which transfers of other chunks may hide behind [N].
    """
    b, workload = inputs.layouts, inputs.workload
    sent, gathered = boundary_bytes, np.zeros(len(b))
    if workload.engine_facts.is_eager_like_megatron:
        is_cut = b.sequence_parallel == 1
        unsharded, ranks = np.where(is_cut, 0.0, sent), np.where(is_cut, 1, b.tp)
        sent = sent / ranks
        gathered = collective_s("all_gather", unsharded, ranks, np.ones_like(b.tp), inputs.cluster)
    # The pipeline is the outermost axis: some boundary crosses the outermost link it spans, and the slowest one decides.
    once = p2p_s(sent, Hops(b.pp, b.stage_ranks, "chain"), stage_links) + gathered
    if stage_links.bandwidth_matrix is not None:  # the last rank's chunks send to the first rank's next ones
        ring = p2p_s(sent, Hops(b.pp, b.stage_ranks, "loop"), stage_links) + gathered
        once = np.where(b.num_model_chunks > 1, ring, once)
    if workload.overlaps and workload.engine_facts.data_parallel.hides_in_chunks:
        hidden = np.maximum(once - forward_s / b.num_model_chunks, 0.0)
        once = np.where(b.num_model_chunks > 1, hidden, once)
    return np.asarray(np.where(b.pp > 1, b.num_model_chunks * once, 0.0))


# Expert parallelism


def sharded_params(params: Any, expert_params: Any, num_shards: Any, expert_shards: Any) -> Any:
    """Return the parameters of which one rank owns the states: of ``params``, experts' are sharded over groups of their own."""
    return params / num_shards + expert_params * (1 / expert_shards - 1 / num_shards)


def token_share(layouts: LayoutTable, workload: Workload) -> FloatArray:
    """Return the routed rows of the rank with most over its tensor-parallel group's tokens, ``imbalance expert_tp / tp`` [N]."""
    return np.asarray(expert_imbalance(layouts, workload) * layouts.expert_tp / layouts.tp)


STASH_RATIO = 1.2
"""Buffers in which graphs keep the rows of experts over those of an even router: moe_paged_stash_buffer_size_factor_cuda of
Megatron Bridge's recipes with cuda_graph_impl full_iteration."""


def stored_share(layouts: LayoutTable, workload: Workload) -> FloatArray:
    """Return the routed rows for which a rank keeps tensors, as in `token_share` [N]."""
    return np.asarray(token_share(layouts, workload) * np.where(layouts.expert_graphs == 1, STASH_RATIO, 1.0))


def expert_imbalance(layouts: LayoutTable, workload: Workload) -> FloatArray:
    """Return the rows of the rank with most over the average [N]; 1 without measured loads, or with all experts on every rank."""
    ratio = np.ones(len(layouts))
    for ep, measured in workload.expert_imbalance:
        ratio[layouts.ep == ep] = measured
    return ratio


def expert_params(layer: Layer, hidden_dim: int, layouts: LayoutTable) -> FloatArray:
    """Return the parameters of routed experts on one rank [N]: E / ep experts, their products cut over expert_tp."""
    moe = layer.experts
    if moe is None:
        return np.zeros(len(layouts))
    weights = moe.expert.replace(bias=False).num_params(hidden_dim)
    biases = moe.expert.num_params(hidden_dim) - weights
    return np.asarray(moe.num_experts * (weights / layouts.expert_tp + biases) / layouts.ep)


def expected_distinct(num_groups: IntArray, picks: int) -> FloatArray:
    """Return the expected number of different groups among ``picks`` even picks of ``num_groups``: n (1 - (1 - 1/n)^k)."""
    return np.asarray(num_groups * (1 - (1 - 1 / num_groups) ** picks))


def dispatch_s(layer: Layer, inputs: CostInputs) -> FloatArray:
    """Return the seconds [N] in which one pass sends tokens to their experts and back; 0 where experts follow tp."""
    moe, layouts, cluster = layer.experts, inputs.layouts, inputs.cluster
    if moe is None:
        return np.zeros(len(layouts))
    token_bytes = inputs.tokens / layouts.tp * inputs.hidden_dim * float(inputs.workload.compute_bytes)
    token_bytes = token_bytes * expert_imbalance(layouts, inputs.workload)
    gathered, stride = token_bytes * layouts.expert_tp, np.ones_like(layouts.tp)
    gathers_first = inputs.workload.engine_facts.gathers_before_exchange
    exchanges_s = 2 * _exchange_s(gathered if gathers_first else token_bytes, moe, inputs)
    gathered = gathered * (1 if gathers_first else moe.top_k)
    gather = collective_s("all_gather", gathered, layouts.expert_tp, stride, cluster)
    scatter = collective_s("reduce_scatter", gathered, layouts.expert_tp, stride, cluster)
    return np.asarray(np.where(layouts.experts_follow_tp, 0.0, exchanges_s + gather + scatter))


def expert_parallel_s(
    layer: Layer, operators: tuple[Operator, ...], times: list[OperatorTime], inputs: CostInputs
) -> tuple[tuple[FloatArray, FloatArray], FloatArray]:
    """Return the exposed seconds of tokens to experts and back, forward and backward [N], and those another micro-batch hides [N].

    Recomputing entire blocks sends them again, in our runtime recomputing what is cheap too. With ``ep_overlap`` a layer's
    forward pass on one micro-batch runs along with the backward pass of another, and communication of one beside compute of the
    other:

        communication   combine, backward    dispatch, forward and backward    combine, forward
        compute         before experts, forward     experts, both passes      before experts, backward

    Each hides as far as its compute is long enough and is not slowed down itself, times the share that runs of it show.
    Source: Megatron-LM, TransformerLayerSchedulePlan.run (model_chunk_schedule_plan.py).
    """
    layouts, (rows, case_idx) = inputs.layouts, inputs.layouts.operators
    once = dispatch_s(layer, inputs.select(rows))[case_idx]  # switches do not change what is sent
    repeats = layouts.recompute == RECOMPUTES.index("full")
    if "moe" in inputs.workload.recompute_modules or inputs.workload.engine_facts.is_own_runtime:
        repeats = layouts.recompute != RECOMPUTES.index("none")  # ours keeps products and attention only
    both = (once, once * np.where(repeats, 2, 1))
    if layer.experts is None or not layouts.ep_overlap.any():
        return both, np.zeros(len(layouts))
    compute_s = {
        (routed, which): np.zeros(len(layouts)) for routed in (False, True) for which in ("forward_s", "backward_s")
    }
    for op, time in zip(operators, times, strict=True):
        for which in ("forward_s", "backward_s"):
            key = (bool(getattr(op, "routed", False)), which)
            compute_s[key] = compute_s[key] + getattr(time, which)
    sent = layer.experts.top_k * inputs.tokens / layouts.tp * inputs.hidden_dim * float(inputs.workload.compute_bytes)
    rate = 2 * np.divide(sent, once, out=np.zeros(len(layouts)), where=once > 0)
    law = slowdown_law(rate / inputs.cluster.weakest_device.memory_bandwidth_bytes_per_s, inputs.scenario.coefficients)
    pairs = (
        (compute_s[False, "forward_s"], once / 2),
        (compute_s[True, "forward_s"] + compute_s[True, "backward_s"], once),
        (compute_s[False, "backward_s"], once / 2),
    )
    hidden = sum(sent_s - np.minimum(exposed_s(busy_s, sent_s, law), sent_s) for busy_s, sent_s in pairs)
    share = float(inputs.scenario.coefficients["overlap"]["exchange"])
    hidden = np.where(layouts.ep_overlap == 1, share * hidden, 0.0)
    return (both[0] - hidden / 2, both[1] - hidden / 2), hidden


def exchange_buffer_bytes(boundary_bytes: Array, experts: tuple[Array, Array], scenario: Scenario) -> Array:
    """Return a rank's buffers of a dispatcher that sends tokens once a node, given its hidden states, ep and expert_tp.

    One has room for the tokens of all ep ranks, as if the experts of one got every one of them. Between nodes there are three more
    of the others' tokens, and one of the rank's own.
    Source: max_num_of_tokens and use_shared_buffer of HybridEP, rdma_inter_node_group_token, rdma_intra_node_red_token and
    attn_input_token of its connections between nodes (DeepEP, branch hybrid-ep, csrc/hybrid_ep/buffer).
    """
    ep, expert_tp = experts
    if not scenario.workload.sends_tokens_once_per_node:
        return 0.0 * boundary_bytes
    domains = ep // _within_domain(ep, expert_tp, scenario.cluster)
    num_tokens = ep + np.where(domains > 1, 3 * (domains - 1) + 1, 0)
    return np.where(ep > 1, num_tokens * boundary_bytes, 0.0)


def _within_domain(ep: Array, expert_tp: Array, cluster: ClusterSpec) -> IntArray:
    """Return the ranks of an expert-parallel group that the fastest links join [N]."""
    return np.asarray(np.gcd(np.maximum(cluster.scaleup_domain // expert_tp, 1), ep))


def _exchange_s(token_bytes: FloatArray, moe: MoE, inputs: CostInputs) -> FloatArray:
    """Return the seconds of an all-to-all over ep of ``token_bytes`` [N] bytes, top_k copies of them.

    Megatron's recipes for experts that span nodes use dispatchers that send a token once to each node and copy it there
    (DeepEP, HybridEP): a node gets it if any of its experts does, and of all nodes at most those of the token's groups. Their
    kernels write to the other nodes at the rate of a plain send.
    Source: 44 to 46 of 50 GB/s between two and four nodes, local tokens left out (DeepEP, README of V2; V1 on four and eight 44).
    """
    top_k, layouts, cluster = moe.top_k, inputs.layouts, inputs.cluster
    plain = collective_s("all_to_all", top_k * token_bytes, layouts.ep, layouts.expert_tp, cluster)
    if not inputs.workload.sends_tokens_once_per_node or len(cluster.levels) == 1:
        return plain
    within = _within_domain(layouts.ep, layouts.expert_tp, cluster)
    domains = layouts.ep // within
    reached = np.minimum(domains, moe.top_groups * np.maximum(domains // moe.num_groups, 1))
    between_bytes = expected_distinct(reached if moe.num_groups > 1 else domains, top_k) * token_bytes
    sent_bytes = between_bytes * (domains - 1) / domains
    between_s = p2p_s(sent_bytes, Hops(domains, layouts.expert_tp * within, "all"), cluster)
    within_s = collective_s("all_to_all", top_k * token_bytes, within, layouts.expert_tp, cluster)
    return np.minimum(plain, np.maximum(between_s, within_s))
