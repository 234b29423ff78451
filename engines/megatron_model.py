"""A ModelSpec in the words of Megatron-Core's GPT model (megatron/training/arguments.py, TransformerConfig)."""

from __future__ import annotations

from typing import Any

from ..schema.errors import ConfigError
from ..schema.model import Block, DenseMLP, LatentAttention, ModelSpec, MoE, SoftmaxAttention

Settings = dict[str, Any]
"""Option name with underscores -> value; True is a bare flag."""

ORIGINAL_YARN_LEN = 4096
"""MLATransformerConfig.original_max_position_embeddings, which has no option."""


def model_settings(model: ModelSpec, seq_len: int) -> Settings:
    """Every option that describes the model.

    Raises:
        ConfigError: the model has something that Megatron's GPT has not.
    """
    blocks = [block for block, _ in model.block_runs]
    attentions = {block.attention for block in blocks}
    dense = {block.mlp for block in blocks if isinstance(block.mlp, DenseMLP)}
    experts = {block.mlp for block in blocks if isinstance(block.mlp, MoE)}
    odd = [
        *(["attention that differs from layer to layer"] if len(attentions) > 1 else []),
        *(["dense parts of several widths"] if len(dense) > 1 else []),
        *(["experts of several kinds"] if len(experts) > 1 else []),
        *(reason for block in blocks for reason in _foreign(block)),
        *_foreign_rope(model),
        *(["heads for further tokens"] if model.num_layers > model.num_blocks + 2 else []),
    ]
    if odd:
        raise ConfigError(
            f"Megatron's GPT model has no {odd[0]}, which {model.name} needs", details=tuple(dict.fromkeys(odd[1:]))
        )
    settings: Settings = {
        "num_layers": model.num_blocks,
        "hidden_size": model.hidden_dim,
        **_attention(blocks[0].attention),
        **_norms(model, blocks[0]),
        **_positions(model, seq_len),
        "vocab_size": model.vocab_size,
        "make_vocab_size_divisible_by": 1,
        "untie_embeddings_and_output_weights": not model.tie_embeddings,
    }
    mlp: DenseMLP | MoE = next(iter(dense)) if dense else next(iter(experts))
    settings |= _feed_forward(mlp) | {"ffn_hidden_size": mlp.ffn_dim}
    if experts:
        settings |= _experts(model, next(iter(experts)))
    return settings


def _foreign(block: Block) -> list[str]:
    attention, mlp = block.attention, block.mlp
    found = []
    if block.num_norms != 2:
        found.append(f"blocks with {block.num_norms} norms")
    if block.parallel_residual:
        found.append("attention and feed-forward part side by side")
    if isinstance(attention, SoftmaxAttention):
        if attention.chunked:
            found.append("attention in chunks")
        if attention.logit_softcap:
            found.append("capped attention scores")
        if attention.sinks:
            found.append("attention sinks")
        if attention.qk_norm in ("full", "weightless"):
            found.append(f"query and key norm of the kind {attention.qk_norm}")
        if attention.qkv_bias and not attention.out_bias and mlp.bias:
            found.append("biases in q, k, v and the feed-forward part but not after attention")
    if isinstance(mlp, MoE):
        if mlp.router_bias:
            found.append("bias in the router")
        if mlp.router == "sigmoid" and not mlp.normalize:
            found.append("sigmoid router without normalisation")
    if mlp.activation == "relu":
        found.append("ReLU")
    if mlp.activation == "relu2" and mlp.gated:
        found.append("gated squared ReLU")
    return found


def _foreign_rope(model: ModelSpec) -> list[str]:
    rope = model.rope
    if rope is None or rope.scaling == "none":
        return []
    latent = any(isinstance(block.attention, LatentAttention) for block, _ in model.block_runs)
    if rope.scaling == "llama3" and (rope.low_freq_factor, rope.high_freq_factor) == (1.0, 4.0):
        return [] if rope.original_max_seq_len == 8192 else ["llama3 rope from another length than 8192"]
    if rope.scaling == "yarn" and latent:
        return [] if rope.original_max_seq_len == ORIGINAL_YARN_LEN else ["yarn from another length than 4096"]
    return [f"rope scaling {rope.scaling} with these factors"]


def _attention(attention: SoftmaxAttention | LatentAttention) -> Settings:
    if isinstance(attention, LatentAttention):
        return {
            "num_attention_heads": attention.num_heads,
            "multi_latent_attention": True,
            **({"q_lora_rank": attention.q_lora_rank} if attention.q_lora_rank else {}),
            "kv_lora_rank": attention.kv_lora_rank,
            "qk_head_dim": attention.qk_nope_head_dim,
            "qk_pos_emb_head_dim": attention.qk_rope_head_dim,
            "v_head_dim": attention.v_head_dim,
            "qk_layernorm": True,
        }
    return {
        "num_attention_heads": attention.num_heads,
        "kv_channels": attention.head_dim,
        **(
            {"group_query_attention": True, "num_query_groups": attention.num_kv_heads}
            if attention.num_kv_heads != attention.num_heads
            else {}
        ),
        "add_qkv_bias": attention.qkv_bias and not attention.out_bias,
        "qk_layernorm": attention.qk_norm == "per_head",
        **({"window_size": f"{attention.window - 1},0"} if attention.window else {}),
    }


def _norms(model: ModelSpec, block: Block) -> Settings:
    return {
        "normalization": "RMSNorm" if block.norm == "rmsnorm" else "LayerNorm",
        "norm_epsilon": model.norm_eps,
    }


def _positions(model: ModelSpec, seq_len: int) -> Settings:
    length = {"max_position_embeddings": max(seq_len, model.embedding.num_positions)}
    rope = model.rope
    if rope is None:
        return length | {"position_embedding_type": "learned_absolute"}
    attention = model.block_runs[0][0].attention
    settings = length | {"position_embedding_type": "rope", "rotary_base": int(rope.theta)}
    if isinstance(attention, SoftmaxAttention) and attention.rope_fraction < 1:
        settings["rotary_percent"] = attention.rope_fraction
    if rope.scaling == "llama3":
        settings |= {"use_rope_scaling": True, "rope_scaling_factor": rope.factor}
    if isinstance(attention, LatentAttention):
        settings["rope_type"] = "yarn" if rope.scaling == "yarn" else "rope"
    if rope.scaling == "yarn":
        settings |= {"rotary_scaling_factor": rope.factor, "mscale": rope.mscale or 1.0}
        settings["mscale_all_dim"] = rope.mscale_all_dim or 0.0
    return settings


def _feed_forward(mlp: DenseMLP | MoE) -> Settings:
    return {
        "swiglu": mlp.gated and mlp.activation == "silu",
        "squared_relu": mlp.activation == "relu2",
        "openai_gelu": mlp.activation == "gelu_tanh" and not mlp.gated,
        "disable_bias_linear": not mlp.bias,
    }


def _experts(model: ModelSpec, moe: MoE) -> Settings:
    is_moe = [isinstance(layer.mlp, MoE) for layer in model.iter_layers() if isinstance(layer, Block)]
    pattern = "+".join(f"[{int(kind)}]*{count}" for kind, count in _runs(is_moe))
    return {
        "num_experts": moe.num_experts,
        "moe_layer_freq": f"({pattern})",
        "moe_ffn_hidden_size": moe.ffn_dim,
        "moe_router_topk": moe.top_k,
        "moe_router_score_function": "sigmoid" if moe.router == "sigmoid" else "softmax",
        "moe_router_pre_softmax": moe.router == "softmax" and not moe.normalize,
        "moe_router_enable_expert_bias": moe.router == "sigmoid",
        **({"moe_router_topk_scaling_factor": moe.scale} if moe.scale != 1 else {}),
        **(
            {"moe_router_num_groups": moe.num_groups, "moe_router_group_topk": moe.top_groups}
            if moe.num_groups > 1
            else {}
        ),
        **({"moe_shared_expert_intermediate_size": moe.shared_ffn_dim} if moe.shared_ffn_dim else {}),
        "moe_shared_expert_gate": moe.shared_gate,
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_dtype": "fp32",
    }


def _runs(kinds: list[bool]) -> list[tuple[bool, int]]:
    runs: list[tuple[bool, int]] = []
    for kind in kinds:
        if runs and runs[-1][0] == kind:
            runs[-1] = (kind, runs[-1][1] + 1)
        else:
            runs.append((kind, 1))
    return runs
