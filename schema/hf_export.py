"""ModelSpec -> Hugging Face ``config.json``: what `schema/hf.py` reads, and transformers with it."""

from __future__ import annotations

from typing import Any

from .errors import ConfigError
from .hf import families
from .layers import Block, DenseMLP, LatentAttention, MoE, Rope, SoftmaxAttention
from .model import ModelSpec

_WRITTEN = (
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "gpt2",
)  # fmt: skip
_EXPERT_WIDTH = {"mixtral": "intermediate_size", "olmoe": "intermediate_size"}
_EXPERT_COUNT = {
    "mixtral": "num_local_experts",
    "deepseek_v2": "n_routed_experts",
    "deepseek_v3": "n_routed_experts",
}
_GELU = {"gelu": "gelu", "gelu_tanh": "gelu_new"}


def hf_config(model: ModelSpec) -> dict[str, Any]:
    """Write the config.json of a model; `ModelSpec.from_hf` of it is the model again.

    Raises:
        ConfigError: the family's config.json has no way to say what the model is.
    """
    model_type = next((name for name in _WRITTEN if families()[name].architecture == model.architecture), None)
    if model_type is None:
        raise ConfigError(f"{model.name}: this version writes no config.json for {model.architecture}")
    config: dict[str, Any] = {"architectures": [model.architecture], "model_type": model_type}
    if model_type == "gpt2":
        config |= _gpt2(model)
    else:
        config |= _rms(model, model_type)
    _require_same(model, config)
    return config


def _require_same(model: ModelSpec, config: dict[str, Any]) -> None:
    """Check all of the above at once: reading back gives the model again."""
    try:
        back = ModelSpec.from_hf(config, name=model.name)
    except ConfigError as error:
        raise ConfigError(f"{model.name} has no Hugging Face config.json: {error.message}", help=error.help) from None
    lost = [name for name in ModelSpec.model_fields if name != "source" and getattr(back, name) != getattr(model, name)]
    if lost:
        raise ConfigError(
            f"{model.name} cannot be said in the config.json of {model.architecture}: {', '.join(lost)} would be lost"
        )


def _rms(model: ModelSpec, model_type: str) -> dict[str, Any]:
    blocks = [layer for layer in model.iter_layers() if isinstance(layer, Block)]
    first = blocks[0]
    config: dict[str, Any] = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_dim,
        "num_hidden_layers": len(blocks),
        "hidden_act": first.mlp.activation,
        "max_position_embeddings": model.max_seq_len,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        "rope_parameters": _rope(model.rope) if model.rope else None,
    }
    config |= _attention(first.attention, model_type) | _windows(blocks, model_type)
    mixtures = [block.mlp for block in blocks if isinstance(block.mlp, MoE)]
    dense = [block.mlp for block in blocks if isinstance(block.mlp, DenseMLP)]
    if dense:
        config |= {"intermediate_size": dense[0].ffn_dim}
        if model_type == "llama":
            config["mlp_bias"] = dense[0].bias
    if mixtures:
        config |= _experts(mixtures[0], model_type) | _sparse_layers(blocks, model_type)
        config.setdefault("intermediate_size", mixtures[0].ffn_dim)
    return config


def _rope(rope: Rope) -> dict[str, Any]:
    result: dict[str, Any] = {
        "rope_type": "default" if rope.scaling == "none" else rope.scaling,
        "rope_theta": rope.theta,
    }
    if rope.scaling != "none":
        result["factor"] = rope.factor
    if rope.original_max_seq_len is not None:
        result["original_max_position_embeddings"] = rope.original_max_seq_len
    if rope.scaling == "llama3":
        result |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.scaling == "yarn":
        names = ("mscale", "mscale_all_dim", "attention_factor", "beta_fast", "beta_slow", "truncate")
        result |= {name: getattr(rope, name) for name in names if getattr(rope, name) is not None}
    return result


def _attention(attention: SoftmaxAttention | LatentAttention, model_type: str) -> dict[str, Any]:
    result: dict[str, Any] = {"num_attention_heads": attention.num_heads, "num_key_value_heads": attention.num_kv_heads}
    if isinstance(attention, LatentAttention):
        names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        return {**result, **{name: getattr(attention, name) for name in names}, "attention_bias": attention.bias}
    if model_type == "qwen2_moe":
        return {**result, "qkv_bias": attention.qkv_bias}
    return {**result, "head_dim": attention.head_dim, "attention_bias": attention.qkv_bias}


def _windows(blocks: list[Block], model_type: str) -> dict[str, Any]:
    """Sliding windows, by layer where only some have one."""
    windows = [block.attention.window for block in blocks]
    present = [window for window in windows if window is not None]
    if model_type in ("llama", "olmoe", "deepseek_v2", "deepseek_v3") and not present:
        return {}
    if not present:
        return (
            {"sliding_window": None, "use_sliding_window": False}
            if model_type != "mistral"
            else {"sliding_window": None}
        )
    result: dict[str, Any] = {"sliding_window": present[0], "use_sliding_window": True}
    if len(present) < len(windows):
        result["layer_types"] = ["sliding_attention" if window else "full_attention" for window in windows]
    elif model_type == "qwen2" or model_type == "qwen3":
        result["max_window_layers"] = 0
    return result


def _experts(moe: MoE, model_type: str) -> dict[str, Any]:
    result: dict[str, Any] = {
        _EXPERT_COUNT.get(model_type, "num_experts"): moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        _EXPERT_WIDTH.get(model_type, "moe_intermediate_size"): moe.ffn_dim,
    }
    if model_type != "mixtral":
        result["norm_topk_prob"] = moe.normalize
    if model_type == "qwen2_moe":
        result["shared_expert_intermediate_size"] = moe.shared_ffn_dim
    if model_type.startswith("deepseek"):
        result |= {
            "n_shared_experts": moe.shared_ffn_dim // moe.ffn_dim,
            "n_group": moe.num_groups,
            "topk_group": moe.top_groups,
            "routed_scaling_factor": moe.scale,
        }
        # transformers' V2 looks at the groups only where the method says so.
        if model_type == "deepseek_v2" and moe.num_groups > 1:
            result["topk_method"] = "group_limited_greedy"
    return result


def _sparse_layers(blocks: list[Block], model_type: str) -> dict[str, Any]:
    dense = [idx for idx, block in enumerate(blocks) if isinstance(block.mlp, DenseMLP)]
    if model_type.startswith("deepseek"):
        return {"first_k_dense_replace": len(dense)}
    if model_type in ("qwen2_moe", "qwen3_moe"):
        return {"decoder_sparse_step": 1, "mlp_only_layers": dense}
    return {}


def _gpt2(model: ModelSpec) -> dict[str, Any]:
    block = model.block_runs[0][0]
    assert isinstance(block.mlp, DenseMLP)
    return {
        "vocab_size": model.vocab_size,
        "n_embd": model.hidden_dim,
        "n_layer": model.num_blocks,
        "n_head": block.attention.num_heads,
        "n_positions": model.embedding.num_positions,
        "n_inner": block.mlp.ffn_dim,
        "activation_function": _GELU.get(block.mlp.activation, block.mlp.activation),
        "layer_norm_epsilon": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
    }
