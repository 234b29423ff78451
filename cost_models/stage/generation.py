"""Seconds and bytes of generating text on one rank: passes of a prefill and of decoding, by kind of layer.

    one layer, one batch of b sequences    device = sum of operators (compute.py), rows b * prompt_len or b
                                           layer = (device^p + host^p)^(1/p) + 2 all-reduces of the rows over tp
    attention to t tokens before           2 kernels + max(b t kv / (W e), 2 b t H (dk + dv) / (P e))

so that decoding is bound by reading weights and keys and values from the device's memory until b is large. A mixture reads the
experts that its rows reach, E (1 - (1 - top_k / E)^b) of them where the router is even, but all of them travel where a layer is
not on the device: which ones are needed is known too late. Latent attention attends to the compressed vectors (absorbed form).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...schema import ClusterSpec, ConfigError, ModelSpec, Workload
from ...schema.engine_facts import OWN_ENGINE
from ...schema.generation import SumAlgorithm
from ...schema.layers import Block, Embedding, Head, LatentAttention, MoE
from ...schema.layout_table import LayoutTable
from ...schema.recurrences import Recurrence
from ...schema.task import Generation, Phase
from ...schema.units import FloatArray, IntArray
from ..coefficients import Coefficients, Scenario, packaged_coefficients
from ..hardware.all_reduce import ALGORITHMS, tensor_parallel_all_reduce_s
from ..hardware.compute import operator_time
from ..hardware.machine import device_rates, host_costs, measured_rates
from ..layer import recurrences as _registered  # noqa: F401  operators of those kinds
from ..layer.memory import tp_params
from ..layer.operators import CORE_ATTENTION, Gemm, Layer, OperatorRules, Scan, layer_operators


@dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """Layers that are alike: ``idxs`` of iter_layers; bytes of one on one rank; what a pass brings where they are elsewhere."""

    layer: Layer
    idxs: tuple[int, ...]
    weight_bytes: float
    moved_bytes: float
    may_store: bool = True


@dataclass(frozen=True, kw_only=True)
class PassCosts:
    """Of one batch of b sequences, arrays by phase [P] and by b [B]; bytes are of all blocks together.

    Attributes:
        compute_s: one layer of each kind without attention to what came before [C, P, B].
        attend_s: device, all blocks [P, B].
        read_bytes, new_bytes: keys and values that a pass attends to, that it makes [P, B].
        hidden_bytes: hidden states between two layers [P, B]; ask_bytes: queries down, or contexts up [P, B].
        cache_bytes: keys and values at the end [B]; slot_bytes: of the block with most [B].
        working_bytes: in use while the widest layer is computed [B].
    """

    compute_s: FloatArray
    attend_s: FloatArray
    read_bytes: FloatArray
    new_bytes: FloatArray
    hidden_bytes: FloatArray
    ask_bytes: FloatArray
    cache_bytes: FloatArray
    slot_bytes: FloatArray
    working_bytes: FloatArray


def layer_groups(model: ModelSpec, tp: int, element_bytes: int) -> tuple[LayerGroup, ...]:
    """Return the kinds of layers in order. An embedding looks its rows up where it lies, so that no pass brings it.

    Raises:
        ConfigError: the model is one that was traced from code.
    """
    if model.traced_len is not None:
        raise ConfigError(f"{model.name} was traced from code: how it generates is not known")
    positions: dict[Layer, list[int]] = {}
    for idx, layer in enumerate(model.iter_layers()):
        if isinstance(layer, Embedding | Block | Head):  # modules that predict further tokens take no part
            positions.setdefault(layer, []).append(idx)
    return tuple(_layer_group(model, layer, tuple(idxs), tp, element_bytes) for layer, idxs in positions.items())


def _layer_group(model: ModelSpec, layer: Layer, idxs: tuple[int, ...], tp: int, element_bytes: int) -> LayerGroup:
    one_layout = LayoutTable.filled(1, tp=np.array([tp]))
    moved = size = float(tp_params(layer, model.hidden_dim, one_layout)[0]) * element_bytes
    if layer.is_embedding:
        # A tied one is the head's matrix too, which every pass needs.
        moved = model.vocab_size * model.hidden_dim / tp * element_bytes if model.tie_embeddings else 0.0
    return LayerGroup(layer=layer, idxs=idxs, weight_bytes=size, moved_bytes=moved, may_store=not layer.is_embedding)


def cache_bytes_per_token(block: Block, tp: int, element_bytes: int) -> float:
    """Return the bytes of a token's keys and values in a block on a rank; too few heads, and compressed ones, are on all."""
    attention = block.attention
    if isinstance(attention, Recurrence):
        return 0.0
    if isinstance(attention, LatentAttention):
        return float((attention.kv_lora_rank + attention.qk_rope_head_dim) * element_bytes)
    return 2.0 * attention.head_dim * max(attention.num_kv_heads / tp, 1.0) * element_bytes


def pass_costs(
    model: ModelSpec,
    cluster: ClusterSpec,
    generation: Generation,
    tp: int,
    batches: IntArray,
    coefficients: Coefficients | None = None,
) -> PassCosts:
    """Return the costs of batches [B] of sequences with ``tp`` ranks a replica."""
    phases, b = generation.phases, np.asarray(batches, dtype=np.float64)
    size, kinds = generation.element_bytes, layer_groups(model, tp, generation.element_bytes)
    scenario = _scenario(cluster, generation, coefficients)
    rows = np.stack([b * phase.tokens for phase in phases])
    compute = np.stack([_layer_s(kind.layer, model.hidden_dim, rows, b, phases, scenario, tp) for kind in kinds])
    zero = np.zeros_like(rows)
    attend, read, new, ask = zero, zero, zero, zero
    total, slot = np.zeros_like(b), 0.0
    for kind in kinds:
        if not isinstance(kind.layer, Block):
            continue
        per_token, n = cache_bytes_per_token(kind.layer, tp, size), len(kind.idxs)
        mixer = kind.layer.attention
        if isinstance(mixer, Recurrence):
            # A decoding pass reads the state and writes it; a prefill only writes it.
            state, rates = mixer.state_elements / tp * size * b, device_rates(scenario)
            decodes = np.array([[0.0 if phase.is_prefill else 1.0] for phase in phases])
            moved_s = 2 * rates.kernel_s + 2 * state / rates.elementwise_bytes_per_s
            attend, read = attend + n * decodes * moved_s, read + n * decodes * state
            # A state on the host is worked on there: what the products make goes down, what it puts out comes up.
            ask = ask + n * decodes * max(mixer.input_width, mixer.width) * size / tp * b
            new, total, slot = new + n * state, total + n * state, max(slot, mixer.state_elements / tp * size)
            continue
        window = kind.layer.attention.window or generation.total_len
        seen = np.array([[0.0 if p.is_prefill else np.minimum(np.array(p.contexts), window).mean()] for p in phases])
        attend = attend + n * _attend_s(kind.layer, b * seen, scenario, tp)
        read, new = read + n * per_token * b * seen, new + n * per_token * np.minimum(rows, b * window)
        dims = _context_dims(kind.layer)[2] * size / tp
        ask = ask + n * dims * b * (seen > 0)
        cached = per_token * min(window, generation.total_len)
        total, slot = total + n * cached * b, max(slot, cached)
    return PassCosts(
        compute_s=compute,
        attend_s=attend,
        read_bytes=read,
        new_bytes=new,
        hidden_bytes=rows * model.hidden_dim * size,
        ask_bytes=ask,
        cache_bytes=total,
        slot_bytes=slot * b,
        working_bytes=_working_bytes(model, generation, tp, b, scenario),
    )


def _scenario(cluster: ClusterSpec, generation: Generation, coefficients: Coefficients | None) -> Scenario:
    workload = Workload(
        seq_len=generation.prompt_len, global_batch_size=1, precision=generation.training_precision, engine=OWN_ENGINE
    )
    return Scenario.build(workload, cluster, coefficients)


def _layer_s(
    layer: Layer,
    hidden_dim: int,
    rows: FloatArray,
    batch: FloatArray,
    phases: tuple[Phase, ...],
    scenario: Scenario,
    tp: int,
) -> FloatArray:
    """Return the seconds [P, B] of one layer without attention to tokens of earlier passes; the head needs one row a sequence."""
    rates, host, workload = device_rates(scenario), host_costs(scenario), scenario.workload
    if isinstance(layer, Head):
        rows = np.broadcast_to(batch, rows.shape)
    flat, moe = rows.reshape(-1), layer.experts
    ranks, no_sequence_parallel = np.full(flat.shape, tp), np.zeros(flat.shape, dtype=np.int64)
    prefill = np.repeat([phase.is_prefill for phase in phases], len(batch))
    seconds, dispatches = np.zeros_like(flat), np.zeros_like(flat)
    for op in layer_operators(layer, OperatorRules(hidden_dim=hidden_dim, seq_len=workload.seq_len)):
        if op.name == "cross_entropy":
            continue
        # Experts that no row reaches are not read: as if other ranks had them.
        ep = _experts_over_reached(moe, flat) if moe is not None and isinstance(op, Gemm) and op.routed else 1
        time = operator_time(op, flat, ranks, no_sequence_parallel, rates=rates, ep=ep)
        # Attention of a decoding pass is `_attend_s`, and so is what becomes of a state.
        counted = prefill if op.name in CORE_ATTENTION or isinstance(op, Scan) else np.ones_like(prefill)
        seconds = seconds + np.where(counted, time.forward_s, 0.0)
        dispatches = dispatches + counted * time.forward_dispatches
    host_s = host.operator_s * dispatches
    if moe is not None:
        host_s = host_s + host.routing_s / 2
    if tp > 1:
        size = flat * hidden_dim * workload.compute_bytes
        seconds = seconds + _num_sums(layer) * tensor_parallel_all_reduce_s(size, tp, scenario.cluster)[0]
        host_s = host_s + _num_sums(layer) * host.collective_s
    norm = 1.0 if host.adds else host.overlap_norm
    return np.asarray((seconds**norm + host_s**norm) ** (1 / norm)).reshape(rows.shape)


def _num_sums(layer: Layer) -> int:
    """Return the all-reduces of a layer's hidden states over tensor-parallel ranks in a forward pass."""
    return layer.inner_block.num_reductions if layer.inner_block else 1


def _experts_over_reached(moe: MoE, rows: FloatArray) -> FloatArray:
    """Return experts over those that ``rows`` reach where the router is even."""
    return np.asarray(1 / (1 - (1 - moe.top_k / moe.num_experts) ** np.maximum(rows, 1)))


def _context_dims(block: Block) -> tuple[int, int, int]:
    """Return the width of a key, of a value, and of all queries and contexts (the wider) as they are attended to."""
    attention = block.attention
    if isinstance(attention, LatentAttention):
        key = attention.kv_lora_rank + attention.qk_rope_head_dim
        return key, attention.kv_lora_rank, attention.num_heads * key
    return attention.head_dim, attention.head_dim, attention.q_dim


def _attend_s(block: Block, tokens: FloatArray, scenario: Scenario, tp: int) -> FloatArray:
    """Return the seconds [P, B] of the device to attend to ``tokens`` tokens in one block; zero where there are none."""
    rates, key_value = device_rates(scenario), _context_dims(block)
    moved = tokens * cache_bytes_per_token(block, tp, scenario.workload.compute_bytes)
    flops = 2 * tokens * block.attention.num_heads / tp * (key_value[0] + key_value[1])
    roofline = np.maximum(moved / rates.elementwise_bytes_per_s, flops / rates.gemm_flops_per_s)
    return np.asarray(np.where(tokens > 0, 2 * rates.kernel_s + roofline, 0.0))


def _working_bytes(
    model: ModelSpec, generation: Generation, tp: int, batch: FloatArray, scenario: Scenario
) -> FloatArray:
    """Return the device bytes in use while a batch goes through the widest layer of the prefill, or its last rows through the head.

    With three copies of the hidden states (input, residual, norm): queries, keys, values and contexts; or what the feed-forward
    part makes and its activation. Logits in the compute dtype and in fp32.
    """
    widest = 0.0
    for block, _ in model.block_runs:
        mlp, attention = block.mlp, block.attention
        qkv = attention.q_dim + 2 * attention.num_kv_heads * attention.head_dim
        if isinstance(attention, Recurrence):
            qkv = attention.input_width
        width = (3 if mlp.gated else 2) * mlp.ffn_dim
        if isinstance(mlp, MoE):
            width = mlp.top_k * (width + 2 * tp * model.hidden_dim)
        widest = max(widest, max(qkv + attention.q_dim, width) / tp)
    tokens = batch * generation.prompt_len
    layer = tokens * (3 * model.hidden_dim + widest) * generation.element_bytes
    head = batch * model.vocab_size / tp * (4 + generation.element_bytes)
    is_host = scenario.cluster.weakest_device.backend.is_host  # whose libraries keep no workspace on a device
    return np.asarray(np.maximum(layer, head) + (0 if is_host else scenario.coefficients["memory"]["workspace_bytes"]))


def host_attention_bytes_per_s(cluster: ClusterSpec, coefficients: Coefficients | None = None) -> float:
    """Return the keys and values that the processors of a node attend to in a second, for one of its ranks when all do."""
    c = (coefficients or packaged_coefficients())["inference"]
    return float(c["host_attention_bytes_per_s"]) / cluster.largest_node


def copy_bytes_per_s(cluster: ClusterSpec, generation: Generation, coefficients: Coefficients | None = None) -> float:
    """Return the bytes that processors copy within their memory in a second, as measured, or half its traffic: read and written."""
    scenario = _scenario(cluster, generation, coefficients)
    return measured_rates(scenario).copy_bytes_per_s or device_rates(scenario).elementwise_bytes_per_s / 2


class Sums(NamedTuple):
    """All-reduces of a pass of one batch that cross machines: of ALGORITHMS that of the blocks, and seconds of all layers."""

    algorithm: SumAlgorithm
    seconds: float


def sums_across_machines(
    model: ModelSpec, cluster: ClusterSpec, generation: Generation, tp: int, batch: int
) -> list[Sums | None]:
    """Return the all-reduces of each phase; None where none crosses machines, or a library has its own."""
    size, sums = model.hidden_dim * generation.element_bytes, []
    kinds = layer_groups(model, tp, generation.element_bytes)
    counts = [(len(kind.idxs) * _num_sums(kind.layer), isinstance(kind.layer, Head)) for kind in kinds]
    of_head, others = (sum(count for count, is_head in counts if is_head == head) for head in (True, False))
    for phase in generation.phases:
        rows = np.array([float(batch * phase.tokens), float(batch)])  # the head has one row a sequence
        seconds, chosen = tensor_parallel_all_reduce_s(rows * size, tp, cluster)
        total = float(np.array([others, of_head]) @ seconds)
        sums.append(None if chosen[0] < 0 else Sums(ALGORITHMS[int(chosen[0])], total))
    return sums
