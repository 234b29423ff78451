"""Seconds of the operators of one layer that depend on rows alone, on one rank of an engine instance.

Kernels are those of serving engines: the addition of the residual is in the norm, rotation and the write to the cache are one
kernel, and so are silu, product and cast. Nothing counts for the host: engines replay captured graphs.

Under attention data parallelism each attention rank brings rows of its own; experts see all of them. A rank of a stage's D = tp *
attention_dp devices holds E / ep experts, each cut over D / ep ranks, and

    rows of its experts    r = rows * attention_dp * top_k / ep on average, more on the busiest rank (`busiest_over_mean`)
    experts reached        E / ep * (1 - (1 + cv^2 r ep / E)^(-1 / cv^2)), popularity by a gamma distribution
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import NormalDist

import numpy as np

from ...schema import ClusterSpec, ModelSpec, Workload
from ...schema.adapters import Adapters
from ...schema.engine_facts import OWN_ENGINE
from ...schema.engine_kernels import EngineKernels, KernelTraffic
from ...schema.layers import Block, Head, LatentAttention, MoE
from ...schema.recurrences import LinearAttention
from ...schema.serving import BYTES_OF, CacheDtype, ServingLayout, WeightDtype
from ...schema.units import FloatArray
from ..coefficients import Coefficients, Scenario
from ..hardware.compute import DeviceRates
from ..hardware.machine import device_rates
from ..layer import recurrences as _registered  # noqa: F401  operators of those kinds
from ..layer.operators import Elementwise, Gemm, Layer, Operator, OperatorRules, layer_operators
from ..learned.serving_kernels import ExpertShape, reached_fraction
from .adapters import adapters_bytes, adapters_s, changes
from .communication import all_reduce_s, group_s, to_experts_s
from .device_part import ENTIRE, DevicePart
from .engine import USUAL_KERNELS, Kernels
from .products import Products, plain_precision
from .tables import ROWS

KERNELS = EngineKernels(
    norm=KernelTraffic(4, 0, 1, 0),
    rotary=KernelTraffic(2, 0, 1, 0),
    gated=KernelTraffic(3, 0, 1, 0),
    plain=KernelTraffic(2, 0, 1, 0),
    loss=KernelTraffic(0, 0, 0, 0),
    residual=KernelTraffic(0, 0, 0, 0),
    qkv=KernelTraffic(0, 0, 0, 0),
    bias=KernelTraffic(0, 0, 0, 0),
)
"""A norm reads the input and the residual and writes the sum and the normed (vllm csrc/layernorm_kernels.cu)."""

PARTS = ("products", "experts", "communication")


@dataclass(frozen=True, kw_only=True, eq=False)
class Instance:
    """One engine instance: model, machine, layout, types, adapters.

    Attributes:
        experts: type of experts' weights; kernels: of its engine; part: of each device that its kernels have.
    """

    model: ModelSpec
    cluster: ClusterSpec
    layout: ServingLayout
    weights: WeightDtype
    experts: WeightDtype
    cache: CacheDtype
    coefficients: Coefficients
    adapters: Adapters | None = None
    kernels: Kernels = USUAL_KERNELS
    part: DevicePart = ENTIRE

    @cached_property
    def scenario(self) -> Scenario:
        """Return the scenario whose rates of the device hold."""
        precision = plain_precision(self.cluster.weakest_device, self.weights)
        workload = Workload(
            seq_len=4096, global_batch_size=1, precision=precision, engine=OWN_ENGINE, flash_generation=3
        )
        return Scenario.build(workload, self.cluster, self.coefficients)

    @cached_property
    def rates(self) -> DeviceRates:
        """Return the rates of the device, or of its part."""
        return self.part.rates(device_rates(self.scenario))

    @cached_property
    def products(self) -> Products:
        """Return the products of the device."""
        return Products.of(
            self.cluster, self.rates, self.weights, self.coefficients, self.part, fuses_casts=self.kernels.fuses_casts
        )

    @property
    def plain_dtype(self) -> WeightDtype:
        """Return the type of weights that are not quantised: embedding, head, routers, norms."""
        return "fp32" if self.weights == "fp32" else "bf16"

    @property
    def block_s(self) -> float:
        """Return the seconds of a product that its scales cost: mixtures are published in 8 bits by blocks, others by tensors."""
        if not (self.model.is_moe and self.weights == "fp8") or self.products.plain is None:
            return 0.0
        return float(self.coefficients["serving"]["block_s"].get(self.cluster.weakest_device.architecture, 0.0))

    def dtype_of(self, op: Gemm) -> WeightDtype:
        """Return the type of a product's weights.

        Mixtures are published in 4 bits for their routed experts alone (mxfp4: gpt-oss; int4: Kimi-K2.5), all else in 16; or for
        their feed-forward parts (nvfp4: DeepSeek-R1, Kimi-K2.5), where engines and later files take attention in 8 bits.
        """
        if op.routed:
            return self.experts
        if not op.quantized or (self.model.is_moe and self.weights in ("mxfp4", "int4")):
            return self.plain_dtype
        is_attention = not op.name.startswith(("mlp_", "shared_"))
        return "fp8" if self.model.is_moe and self.weights == "nvfp4" and is_attention else self.weights


def operators(instance: Instance, layer: Layer) -> tuple[Operator, ...]:
    """Return the operators of a layer as serving engines run them."""
    listed = layer_operators(layer, OperatorRules(hidden_dim=instance.model.hidden_dim, kernels=KERNELS))
    block = layer.inner_block
    if block is None:
        return listed
    if isinstance(block.attention, LatentAttention):
        listed = _fused_latent(listed) + _indexer(block.attention, instance.model.hidden_dim)
    if isinstance(block.attention, LinearAttention) and block.attention.delta:
        listed = _apart(listed, block.attention.head_gates * block.attention.num_heads)
    gated = layer.experts is not None and layer.experts.shared_gate
    return listed + _gate_of_shared(instance.model.hidden_dim) if gated else listed


def _indexer(attention: LatentAttention, hidden_dim: int) -> tuple[Operator, ...]:
    """Return what chooses the tokens that a query attends to, but for its scores (`attention.index_s`); whole on every rank.

    Source: vllm and sglang, Indexer: queries, a key with its norm, weights of heads; rotation, Hadamard transform and cast of both.
    """
    width = attention.index_heads * attention.index_dim
    if not attention.index_top_k:
        return ()
    return (
        Gemm("index_q", width, attention.q_lora_rank or hidden_dim, "none"),
        Gemm("index_k", attention.index_dim, hidden_dim, "none"),
        Gemm("index_weights", attention.index_heads, hidden_dim, "none", quantized=False),
        Elementwise("index_rotation", 6 * (width + attention.index_dim), 0, 7, 0, "none"),
    )


def _apart(listed: tuple[Operator, ...], gates: int) -> tuple[Operator, ...]:
    """Return a delta rule's operators with the projection of its gates apart, and a kernel that takes both outputs apart.

    Source: vllm and sglang, models/qwen3_next.py (in_proj_qkvz, in_proj_ba, fused_qkvzba_split_reshape_cat).
    """
    parts = list[Operator]()
    for op in listed:
        if isinstance(op, Gemm) and op.name == "state_in":
            split = Elementwise("state_split", 2 * op.n, 0, 1, 0, "column")
            parts += [replace(op, n=op.n - gates), replace(op, name="state_gates", n=gates, quantized=False), split]
        else:
            parts.append(op)
    return tuple(parts)


def _gate_of_shared(hidden_dim: int) -> tuple[Operator, ...]:
    """Return the gate of shared experts: a product, its sigmoid times their output, the sum with the routed ones."""
    return (
        Gemm("shared_gate", 1, hidden_dim, "none", quantized=False),
        Elementwise("shared_sum", 5 * hidden_dim, 0, 3, 0, "none"),
    )


def _fused_latent(listed: tuple[Operator, ...]) -> tuple[Operator, ...]:
    """Return latent attention's operators with both down-projections as one, their norms as one, and no copies of keys."""
    by_name = {op.name: op for op in listed}
    down, up = by_name["kv_down"], by_name.get("q_down")
    assert isinstance(down, Gemm)
    dropped = {"latent_copies"} | ({"q_norm", "q_down"} if up is not None else set())
    if isinstance(up, Gemm):
        by_name["kv_down"] = replace(down, n=down.n + up.n)
    return tuple(by_name[op.name] for op in listed if op.name not in dropped)


def row_costs(instance: Instance, layer: Layer) -> dict[str, FloatArray]:
    """Return the seconds [G] of one layer at ROWS, by PARTS; of the head, ROWS are those that need logits."""
    rows = np.maximum(ROWS, 1.0)
    parts = dict.fromkeys(PARTS, np.zeros_like(rows))
    parts["products"] = products_s(instance, layer, operators(instance, layer), rows)
    if layer.experts is not None:
        parts["experts"] = experts_s(instance, layer.experts, rows)
    parts["communication"] = _communication_s(instance, layer, rows)
    return {name: np.where(ROWS > 0, seconds, 0.0) for name, seconds in parts.items()}


def products_s(instance: Instance, layer: Layer, listed: Iterable[Operator], rows: FloatArray) -> FloatArray:
    """Return the seconds [N] of operators of a layer, but for routed experts and attention itself, for so many rows [N]."""
    seconds = np.zeros_like(rows)
    for op in listed:
        if getattr(op, "routed", False):
            continue
        if isinstance(op, Gemm):
            seconds = seconds + _product_s(instance, op, rows)
            if instance.adapters is not None and layer.inner_block is not None and changes(instance.adapters, op):
                seconds = seconds + adapters_s(instance.adapters, op, instance.layout.tp, rows, instance.rates)
        elif isinstance(op, Elementwise):
            seconds = seconds + _elementwise_s(instance, op, rows)
    return seconds


def _product_s(instance: Instance, op: Gemm, rows: FloatArray) -> FloatArray:
    tp = instance.layout.tp
    n = np.full_like(rows, op.n / tp if op.shard == "column" else op.n)
    k = np.full_like(rows, op.k / tp if op.shard == "row" else op.k)
    dtype = instance.dtype_of(op)
    blocks_s = instance.block_s if dtype == "fp8" else 0.0
    return instance.products.seconds(rows * op.rows_per_token, n, k, dtype) + blocks_s


def experts_s(instance: Instance, moe: MoE, rows: FloatArray) -> FloatArray:
    """Return the seconds of all routed experts of one rank for ``rows`` of each attention rank."""
    return instance.products.experts(expert_shape(instance, moe, rows), instance.experts)


def expert_shape(instance: Instance, moe: MoE, rows: FloatArray) -> ExpertShape:
    """Return the call of all routed experts of the busiest rank for ``rows`` of each attention rank."""
    layout, everyone = instance.layout, rows * instance.layout.attention_dp
    experts = moe.num_experts / layout.ep
    sizes = {
        "hidden_dim": instance.model.hidden_dim,
        "ffn_dim": moe.ffn_dim / layout.moe_tp,
        "experts": experts,
        "gated": moe.gated,
        "weight_bytes": BYTES_OF[instance.experts],
        "faster": instance.products.faster.get(instance.experts, 1.0),
        "cutlass": instance.kernels.cutlass_experts,
    }
    cv = instance.coefficients["serving"]["popularity_cv"]
    mean = everyone * moe.top_k / layout.ep
    busiest = busiest_over_mean(mean, layout.ep, experts, cv)
    return ExpertShape(
        rows=mean * busiest,
        tokens=everyone * (1 - (1 - 1 / layout.ep) ** moe.top_k if layout.attention_dp > 1 < layout.ep else 1.0),
        reached=experts * reached_fraction(everyone * busiest * moe.top_k / moe.num_experts, cv),
        **{name: np.asarray(size, dtype=np.float64) for name, size in sizes.items()},
    )


def busiest_over_mean(rows: FloatArray, ranks: int, experts: float, popularity_cv: float) -> FloatArray:
    """Return the rows of the busiest of ``ranks`` over their mean ``rows``: a sum over ``experts`` of unlike popularity, drawn.

    1 + z sqrt((1 - 1/ranks) (1 / rows + cv^2 / experts)), z the expected largest of so many normal numbers (Blom's formula).
    """
    if ranks == 1:
        return np.ones_like(rows)
    largest = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
    return 1 + largest * np.sqrt((1 - 1 / ranks) * (1 / np.maximum(rows, 1.0) + popularity_cv**2 / experts))


def _elementwise_s(instance: Instance, op: Elementwise, rows: FloatArray) -> FloatArray:
    rates, cut = instance.rates, instance.layout.tp if op.shard == "column" else 1
    size = (op.element_bytes or rates.compute_bytes) * op.forward_elements * rows / cut
    return np.asarray(op.forward_kernels * rates.kernel_s + size / rates.elementwise_bytes_per_s)


def _communication_s(instance: Instance, layer: Layer, rows: FloatArray) -> FloatArray:
    """Return the seconds of what the ranks of a stage exchange in one layer.

    Outputs are reduced over tp, rows of attention ranks sent to experts and back, logits gathered.
    """
    layout, cluster, element_bytes = instance.layout, instance.cluster, instance.rates.compute_bytes
    size = rows * instance.model.hidden_dim * element_bytes
    if isinstance(layer, Head):
        logits = rows * layer.vocab_size * element_bytes
        return group_s("all_gather", logits, layout.tp, 1, cluster) if layout.tp > 1 else np.zeros_like(rows)
    reduced = layer.inner_block.num_reductions if isinstance(layer, Block) else 1
    seconds = np.zeros_like(rows)
    if layer.experts is not None and layout.attention_dp > 1:
        reduced -= 1
        ranks = (layout.attention_dp, layout.tp)
        seconds = to_experts_s(
            rows, instance.model.hidden_dim, layer.experts.top_k, ranks, cluster, instance.coefficients
        )
        if layout.tp > 1:
            seconds = seconds + group_s("all_gather", size, layout.tp, 1, cluster)
    return seconds + reduced * all_reduce_s(
        size, layout.tp, cluster, instance.coefficients, instance.kernels.all_reduce
    )


def expert_bytes(instance: Instance, layer: Layer) -> float:
    """Return the bytes of one routed expert of a layer on one rank, of those that it has."""
    assert layer.experts is not None
    routed = (op for op in operators(instance, layer) if isinstance(op, Gemm) and op.routed)
    total = sum(op.num_params * BYTES_OF[instance.dtype_of(op)] for op in routed)
    return total / instance.layout.moe_tp / layer.experts.num_experts


def weight_bytes(instance: Instance, layer: Layer) -> float:
    """Return the bytes of one layer's weights on one rank: products cut and in their types, all else whole and in 16 bits."""
    layout, plain = instance.layout, BYTES_OF[instance.plain_dtype]
    if layer.is_embedding or isinstance(layer, Head):
        params = layer.num_params(instance.model.hidden_dim)
        if isinstance(layer, Head) and layer.tied and layout.pp > 1:
            params += layer.vocab_size * instance.model.hidden_dim
        return params * plain / layout.tp
    listed = operators(instance, layer)
    counted = sum(op.num_params for op in listed if isinstance(op, Gemm) and not op.name.startswith("index_"))
    return products_bytes(instance, listed) + (layer.num_params(instance.model.hidden_dim) - counted) * plain


def products_bytes(instance: Instance, listed: Iterable[Operator]) -> float:
    """Return the bytes of the weights of products on one rank, in their types, with what adapters add."""
    layout, total = instance.layout, 0.0
    for op in listed:
        if isinstance(op, Gemm):
            cut = layout.stage_devices if op.routed else layout.tp if op.shard != "none" else 1
            total += op.num_params * BYTES_OF[instance.dtype_of(op)] / cut
            if instance.adapters is not None and changes(instance.adapters, op):
                total += adapters_bytes(instance.adapters, op, layout.tp)
    return total
