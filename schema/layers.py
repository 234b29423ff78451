"""Layers of a model (embedding, block, head, multi-token-prediction head) and their parts, with exact parameter counts.

Shapes: D hidden_dim, V vocab_size, H num_heads, K num_kv_heads, C head_dim, F ffn_dim, E num_experts.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from .base import Component, Count, CountOrNone, Frozen, Mixer, PositiveFloat
from .limits import MAX_EXPERTS, MAX_MODEL_LAYERS
from .recurrences import GatedRecurrence, LinearAttention, SelectiveScan, ShortConvolution
from .traced import Traced

NormKind = Literal["rmsnorm", "layernorm"]

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu"]


class SoftmaxAttention(Mixer):
    """Multi-head (K = H) or grouped-query (K < H) attention.

    Attributes:
        window: a token sees itself and at most ``window - 1`` before it (sliding or chunked attention); None is all of them.
        chunked: the sequence is cut into chunks of ``window`` and a token sees only its own chunk (Llama-4): on average
            half of what a sliding window of that size sees.
        rope_fraction: part of each head that is rotated; 0 for none.
        qk_norm: norm of queries and keys: over each head (weights [C], with biases for per_head_bias), over all heads (weights
            [H*C], [K*C]), or without weights.
        sinks: one learned logit per head is added to the softmax (gpt-oss).
        gate: the heads' outputs are multiplied by a sigmoid of the input, one for each head or element, or of the queries' own
            projection with its bias (Qwen3-Next).
        out_norm: norm [H*C] of what the output projection reads (BitNet).
    """

    kind: Literal["mha", "gqa"]
    num_heads: Count
    num_kv_heads: Count
    head_dim: Count
    window: Count | None = None
    chunked: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["none", "per_head", "per_head_bias", "full", "weightless"] = "none"
    gate: Literal["none", "per_head", "per_element", "with_query"] = "none"
    out_norm: bool = False
    rope_fraction: float = Field(default=1.0, ge=0, le=1)
    sinks: bool = False
    logit_softcap: PositiveFloat | None = None

    @model_validator(mode="after")
    def _kv_heads_divide(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if (self.kind == "mha") != (self.num_heads == self.num_kv_heads):
            raise ValueError(f"{self.kind} with {self.num_heads} heads and {self.num_kv_heads} kv heads")
        return self

    @property
    def q_dim(self) -> int:
        """Width of the queries, H*C."""
        return self.num_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of the keys (and of the values), K*C."""
        return self.num_kv_heads * self.head_dim

    @property
    def gate_dim(self) -> int:
        """Width of the gate of the heads' outputs; 0 for none."""
        return {"none": 0, "per_head": self.num_heads, "per_element": self.q_dim, "with_query": self.q_dim}[self.gate]

    def num_params(self, hidden_dim: int) -> int:
        """Return the parameters: q, k, v, gate and output projections, biases, norms, sinks."""
        weights = hidden_dim * (2 * self.q_dim + 2 * self.kv_dim + self.gate_dim)
        of_gate = self.q_dim * (self.gate == "with_query")
        biases = self.qkv_bias * (self.q_dim + 2 * self.kv_dim + of_gate) + self.out_bias * hidden_dim
        of_heads = {"per_head": 2 * self.head_dim, "per_head_bias": 4 * self.head_dim, "full": self.q_dim + self.kv_dim}
        norms = of_heads.get(self.qk_norm, 0) + self.out_norm * self.q_dim
        return weights + biases + norms + self.sinks * self.num_heads


class LatentAttention(Mixer):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434 section 2.1): keys and values from one compressed vector.

    Attributes:
        index_top_k: tokens that a query attends to (DeepSeek-V3.2, arXiv:2512.02556), chosen by an indexer with ``index_heads``
            queries of ``index_dim`` and one key a token; 0: all. Serving alone knows it; parameters are without the indexer's.
    """

    kind: Literal["mla"] = "mla"
    num_heads: Count
    q_lora_rank: Count | None = None
    kv_lora_rank: Count
    qk_nope_head_dim: Count
    qk_rope_head_dim: Count
    v_head_dim: Count
    index_heads: CountOrNone = 0
    index_dim: CountOrNone = 0
    index_top_k: CountOrNone = 0
    bias: bool = False
    window: None = None

    @property
    def num_kv_heads(self) -> int:
        """Keys and values are expanded to one per head for training."""
        return self.num_heads

    @property
    def head_dim(self) -> int:
        """Width of one query or key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def q_dim(self) -> int:
        """Width of the queries, H*C."""
        return self.num_heads * self.head_dim

    def num_params(self, hidden_dim: int) -> int:
        """Return the parameters: down and up projections of queries and of keys/values, their norms, output projection."""
        rank = self.q_lora_rank
        query = hidden_dim * self.q_dim if rank is None else hidden_dim * rank + rank + rank * self.q_dim
        down = hidden_dim * (self.kv_lora_rank + self.qk_rope_head_dim)
        up = self.kv_lora_rank * self.num_heads * (self.qk_nope_head_dim + self.v_head_dim)
        out = self.num_heads * self.v_head_dim * hidden_dim
        biases = self.bias * ((rank or 0) + self.kv_lora_rank + self.qk_rope_head_dim + hidden_dim)
        return query + down + self.kv_lora_rank + up + out + biases


class NoMixer(Mixer):
    """Nothing: what stands in attention's place in the half of a block that is its feed-forward part (`Block.halves`)."""

    is_attention: ClassVar[bool] = False

    kind: Literal["nothing"] = "nothing"
    window: None = None

    @property
    def num_heads(self) -> int:
        """None, which tensor parallelism always divides."""
        return 0

    num_kv_heads = q_dim = head_dim = num_heads

    def num_params(self, hidden_dim: int) -> int:
        """Return none."""
        return 0


Attention = Annotated[
    SoftmaxAttention | LatentAttention | LinearAttention | SelectiveScan | ShortConvolution | GatedRecurrence | NoMixer,
    Field(discriminator="kind"),
]


class DenseMLP(Component):
    """Two projections [D,F] and [F,D], or three when gated (SwiGLU, GeGLU).

    Attributes:
        ffn_dim: F; 0 in a block that has no such part (Mamba).
        inner_norm: norm [F] of what the second projection reads (BitNet).
    """

    kind: Literal["dense"] = "dense"
    ffn_dim: CountOrNone
    gated: bool = True
    activation: Activation = "silu"
    bias: bool = False
    inner_norm: bool = False

    def num_params(self, hidden_dim: int) -> int:
        """Return the parameters with biases, and the two of an xIELU (arXiv:2411.13010)."""
        if not self.ffn_dim:
            return 0
        up = 2 if self.gated else 1
        extra = self.inner_norm * self.ffn_dim + 2 * (self.activation == "xielu")
        return (up + 1) * hidden_dim * self.ffn_dim + self.bias * (up * self.ffn_dim + hidden_dim) + extra


class MoE(Component):
    """A router [D,E] and E experts of which a token visits top_k, plus shared experts that every token visits.

    Attributes:
        ffn_dim: width of one routed expert.
        shared_ffn_dim: width of all shared experts together; 0 for none.
        shared_gate: a learned scalar gate [D,1] on the shared experts (Qwen2-MoE).
        router: scores of a token's experts: softmax over all of them; top_k_softmax over the chosen ones; sigmoid of each.
        normalize: the scores of the chosen experts are divided by their sum.
        scale: factor on the sum of the routed experts.
        num_groups, top_groups: experts stand in groups, and a token visits those of at most top_groups of them (DeepSeek-V3).
    """

    kind: Literal["moe"] = "moe"
    num_experts: Annotated[Count, Field(le=MAX_EXPERTS)]
    top_k: Count
    ffn_dim: Count
    shared_ffn_dim: CountOrNone = 0
    shared_gate: bool = False
    router_bias: bool = False
    router: Literal["softmax", "top_k_softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    scale: PositiveFloat = 1.0
    num_groups: Count = 1
    top_groups: Count = 1
    gated: bool = True
    activation: Activation = "silu"
    bias: bool = False

    @model_validator(mode="after")
    def _top_k_in_range(self) -> Self:
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k {self.top_k} exceeds num_experts {self.num_experts}")
        return self

    @property
    def expert(self) -> DenseMLP:
        """One routed expert."""
        return DenseMLP(ffn_dim=self.ffn_dim, gated=self.gated, activation=self.activation, bias=self.bias)

    @property
    def shared(self) -> DenseMLP | None:
        """The shared experts as one MLP."""
        if not self.shared_ffn_dim:
            return None
        return DenseMLP(ffn_dim=self.shared_ffn_dim, gated=self.gated, activation=self.activation)

    def num_dense_params(self, hidden_dim: int) -> int:
        """Return the parameters of router and shared experts: those that every token goes through."""
        shared = self.shared.num_params(hidden_dim) if self.shared else 0
        router = (hidden_dim + self.router_bias) * self.num_experts
        return router + shared + self.shared_gate * hidden_dim

    def num_params(self, hidden_dim: int) -> int:
        """Return the parameters of router, shared and all routed experts."""
        return self.num_dense_params(hidden_dim) + self.num_experts * self.expert.num_params(hidden_dim)

    def num_active_params(self, hidden_dim: int) -> int:
        """Return the parameters that one token goes through."""
        return self.num_dense_params(hidden_dim) + self.top_k * self.expert.num_params(hidden_dim)


FeedForward = Annotated[DenseMLP | MoE, Field(discriminator="kind")]


class LayerKind(Component):
    """Abstract base of the layers: what costs, stages and the runtime need to know of a layer of any kind.

    A new kind of layer is a class here, its operators and saved bytes (registered for the class in cost_models/layer/), its module
    in runtime/models/ and its tests. Layers that are equal have equal costs.

    Attributes:
        is_block, is_embedding, is_head: its place: only blocks recompute, may be cut off as a stage, and are offloaded.
    """

    is_block: ClassVar[bool] = False
    is_embedding: ClassVar[bool] = False
    is_head: ClassVar[bool] = False

    @property
    def counted(self) -> Traced | None:
        """Numbers counted of a layer outside the catalogue; its own sizes are then stand-ins."""
        traced: Traced | None = getattr(self, "traced", None)
        return traced

    @property
    def inner_block(self) -> Block | None:
        """The block that the layer is, or contains."""
        return None

    @property
    def experts(self) -> MoE | None:
        """The mixture of experts of its block, if that has one."""
        block = self.inner_block
        return block.mlp if block is not None and isinstance(block.mlp, MoE) else None


class Embedding(LayerKind):
    """Token embedding [V,D], with learned positions [num_positions,D] and a LayerNorm (BLOOM) where the model has them.

    ``traced``: of a model outside the catalogue everything before its blocks; the sizes are then stand-ins.
    """

    is_embedding: ClassVar[bool] = True

    kind: Literal["embedding"] = "embedding"
    vocab_size: Count
    num_positions: CountOrNone = 0
    layernorm: bool = False
    traced: Traced | None = None

    def num_params(self, hidden_dim: int) -> int:
        """Return the parameters."""
        rows = self.vocab_size + self.num_positions + 2 * self.layernorm
        return self.traced.num_params if self.traced else rows * hidden_dim


class Block(LayerKind):
    """One decoder layer: attention and feed-forward with their norms.

    Attributes:
        num_norms: norms over D in the block: 2 (before each part, or after it: OLMo-2), 4 (before and after each part, Gemma-2),
            1 (shared by both parts, or of the only part).
        norm_weight: norms have weights; OLMo's have none.
        parallel_residual: attention and feed-forward read the same input (GPT-NeoX).
        traced: what was counted of a block outside the catalogue; attention and feed-forward are then stand-ins.
    """

    is_block: ClassVar[bool] = True

    kind: Literal["block"] = "block"
    attention: Attention
    mlp: FeedForward
    norm: NormKind = "rmsnorm"
    norm_bias: bool = False
    norm_weight: bool = True
    num_norms: Literal[1, 2, 4] = 2
    parallel_residual: bool = False
    traced: Traced | None = None

    @property
    def inner_block(self) -> Block:
        """The block itself."""
        return self

    @property
    def num_parts(self) -> int:
        """Two, or one where it has no feed-forward part (Mamba) or nothing else."""
        lacks_mlp = isinstance(self.mlp, DenseMLP) and not self.mlp.ffn_dim and self.traced is None
        return 1 if lacks_mlp or isinstance(self.attention, NoMixer) else 2

    @property
    def num_reductions(self) -> int:
        """Outputs that tensor parallelism reduces in a pass: of parts that read one norm the sum, or of the only part."""
        return 1 if self.parallel_residual and self.num_norms == 1 else self.num_parts

    @property
    def runs_in_halves(self) -> bool:
        """Return whether our runtime can take the block by half-batches (``tp_halves``): each part reads and adds by itself."""
        parts = isinstance(self.attention, SoftmaxAttention) and isinstance(self.mlp, DenseMLP) and self.mlp.ffn_dim > 0
        return parts and bool(self.halves)

    @property
    def halves(self) -> tuple[Block, ...]:
        """Attention and feed-forward part as blocks, each with its norm and residual; none where they share a norm or an input."""
        if self.num_parts == 1 or self.num_norms != 2 or self.parallel_residual or self.traced:
            return ()
        nothing = DenseMLP(ffn_dim=0, gated=False)
        return self.replace(mlp=nothing, num_norms=1), self.replace(attention=NoMixer(), num_norms=1)

    def num_params(self, hidden_dim: int) -> int:
        """Return the parameters."""
        return self._num_params(hidden_dim, self.mlp.num_params(hidden_dim))

    def num_active_params(self, hidden_dim: int) -> int:
        """Return the parameters that one token goes through."""
        return self._num_params(hidden_dim, self.mlp.num_active_params(hidden_dim))

    def _num_params(self, hidden_dim: int, of_mlp: int) -> int:
        norms = self.num_norms * (self.norm_weight + self.norm_bias) * hidden_dim
        return self.traced.num_params if self.traced else self.attention.num_params(hidden_dim) + of_mlp + norms


class Head(LayerKind):
    """Final norm and output projection [D,V]; a tied projection has no parameters of its own.

    ``traced``: of a model outside the catalogue everything after its blocks; the sizes are then stand-ins.
    """

    is_head: ClassVar[bool] = True

    kind: Literal["head"] = "head"
    vocab_size: Count
    tied: bool = False
    norm: NormKind = "rmsnorm"
    norm_bias: bool = False
    norm_weight: bool = True
    bias: bool = False
    traced: Traced | None = None

    def num_params(self, hidden_dim: int) -> int:
        """Return the parameters that the layer owns."""
        if self.traced:
            return self.traced.num_params
        projection = 0 if self.tied else hidden_dim * self.vocab_size
        return projection + self.bias * self.vocab_size + (self.norm_weight + self.norm_bias) * hidden_dim


class MTPHead(LayerKind):
    """One multi-token-prediction module (DeepSeek-V3, arXiv:2412.19437 section 2.2): two norms, a [2D,D] projection, a block.

    Embedding and output projection are shared with the main model.
    """

    kind: Literal["mtp"] = "mtp"
    block: Block

    @property
    def inner_block(self) -> Block:
        """Its block."""
        return self.block

    def num_params(self, hidden_dim: int) -> int:
        """Return the parameters that the layer owns."""
        return 2 * hidden_dim * hidden_dim + 3 * hidden_dim + self.block.num_params(hidden_dim)


Layer = Annotated[Embedding | Block | Head | MTPHead, Field(discriminator="kind")]


class LayerRun(Frozen):
    """``count`` equal layers in a row."""

    layer: Layer
    count: Annotated[int, Field(gt=0, le=MAX_MODEL_LAYERS)] = 1
