"""ModelSpec -> Hugging Face ``config.json``: what `schema/hf.py` reads, and transformers with it."""

from __future__ import annotations

from typing import Any

from .base import located
from .errors import ConfigError
from .hf import COMMON, families
from .layers import Block, DenseMLP, LatentAttention, MoE, SoftmaxAttention
from .model import ModelSpec
from .rope import Rope

WRITTEN = (
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "gpt2",
)  # fmt: skip
"""Families whose files transformers has read back (tests/parity/test_hf_weights.py)."""


def hf_config(model: ModelSpec) -> dict[str, Any]:
    """Write the config.json of a model; `ModelSpec.from_hf` of it is the model again.

    Raises:
        ConfigError: the family's config.json has no way to say what the model is.
    """
    model_type = next((name for name in WRITTEN if families()[name].architecture == model.architecture), None)
    if model_type is None:
        raise ConfigError(f"{model.name}: this version writes no config.json for {model.architecture}")
    family = families()[model_type]
    sizes = (size.split("|")[0] for size in (*family.base_sizes, *family.sizes))
    common = COMMON if family.extra_positions is None else ()  # GPT-2 has names of its own for all of them
    values = _values(model)
    names = dict.fromkeys((*sizes, *common, *family.defaults, *family.reads))
    config = {name: values[name] for name in names if name in values}
    if model_type == "deepseek_v2" and values["n_group"] > 1:
        config["topk_method"] = (
            "group_limited_greedy"  # transformers' V2 looks at the groups only where the method says so
        )
    config = {"architectures": [model.architecture], "model_type": model_type, **config}
    with located(f"{model.name} has no Hugging Face config.json"):
        back = ModelSpec.from_hf(config, name=model.name)
    lost = [name for name in ModelSpec.model_fields if name != "source" and getattr(back, name) != getattr(model, name)]
    if lost:
        raise ConfigError(
            f"{model.name} cannot be said in the config.json of {model.architecture}: {', '.join(lost)} would be lost"
        )
    return config


def _values(model: ModelSpec) -> dict[str, Any]:
    """Return what the model has under every name that some family reads."""
    blocks = [layer for layer in model.iter_layers() if isinstance(layer, Block)]
    attention, mlp, count = blocks[0].attention, blocks[0].mlp, len(blocks)
    dense = {idx: block.mlp for idx, block in enumerate(blocks) if isinstance(block.mlp, DenseMLP)}
    moe = next((block.mlp for block in blocks if isinstance(block.mlp, MoE)), None)
    windows = [block.attention.window for block in blocks]
    width = next(iter(dense.values()), mlp).ffn_dim
    values: dict[str, Any] = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_dim,
        "n_embd": model.hidden_dim,
        "num_hidden_layers": count,
        "n_layer": count,
        "num_attention_heads": attention.num_heads,
        "n_head": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "intermediate_size": width,
        "n_inner": width,
        "hidden_act": mlp.activation,
        "activation_function": "gelu_new" if mlp.activation == "gelu_tanh" else mlp.activation,
        "mlp_bias": mlp.bias,
        "max_position_embeddings": model.max_seq_len,
        "n_positions": model.embedding.num_positions,
        "rms_norm_eps": model.norm_eps,
        "layer_norm_epsilon": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        "sliding_window": next(filter(None, windows), None),
        "use_sliding_window": any(windows),
    }
    if model.rope is not None:
        values["rope_parameters"] = _rope(model.rope)
    if any(windows):
        values["layer_types"] = ["sliding_attention" if window else "full_attention" for window in windows]
    if isinstance(attention, LatentAttention):
        values |= attention.model_dump(exclude={"kind", "num_heads", "bias", "window"}) | {
            "attention_bias": attention.bias
        }
    elif isinstance(attention, SoftmaxAttention):
        bias = attention.qkv_bias
        values |= {"head_dim": attention.head_dim, "attention_bias": bias, "qkv_bias": bias}
    if moe is not None:
        values |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), moe.num_experts)
        values |= {
            "num_experts_per_tok": moe.top_k,
            "moe_intermediate_size": moe.ffn_dim,
            "shared_expert_intermediate_size": moe.shared_ffn_dim,
            "n_shared_experts": moe.shared_ffn_dim // moe.ffn_dim,
            "norm_topk_prob": moe.normalize,
            "routed_scaling_factor": moe.scale,
            "n_group": moe.num_groups,
            "topk_group": moe.top_groups,
            "first_k_dense_replace": len(dense),
            "decoder_sparse_step": 1,
            "mlp_only_layers": [*dense],
        }
    return values


def _rope(rope: Rope) -> dict[str, Any]:
    names = {
        "none": (),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        "yarn": ("factor", "mscale", "mscale_all_dim", "attention_factor", "beta_fast", "beta_slow", "truncate"),
    }.get(rope.scaling, ("factor",))
    settings = {
        "rope_type": "default" if rope.scaling == "none" else rope.scaling,
        "rope_theta": rope.theta,
        "original_max_position_embeddings": rope.original_max_seq_len,
        **{name: getattr(rope, name) for name in names},
    }
    return {name: value for name, value in settings.items() if value is not None}
