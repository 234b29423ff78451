"""Hugging Face ``config.json`` -> fields of ModelSpec: one small parser for each family of published decoder models.

Which projection has a bias, which norm has weights and which layer attends how far is read from transformers 5.23's
``modeling_<model_type>.py``; tests/unit/schema/test_catalogue_models.py compares the parameter counts with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from .errors import ConfigError
from .hf_fields import (
    Fields,
    activation,
    full_heads,
    heads,
    num_blocks,
    rms_model,
    rope,
    rotary_fraction,
    runs,
    windows,
)
from .layers import (
    MAX_LAYERS,
    Block,
    DenseMLP,
    Embedding,
    FeedForward,
    Head,
    LatentAttention,
    LayerRun,
    MoE,
    SoftmaxAttention,
)


def _rms(
    config: Fields,
    attention: Mapping[str, Any],
    mlp: Callable[[bool], FeedForward],
    *,
    widths: Iterable[int | None] | None = None,
    sparse: Iterable[bool] | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    num_norms: Literal[2, 4] = 2,
    **model: Any,
) -> dict[str, Any]:
    """Return the fields of a model of blocks with RMSNorm, grouped-query attention and rotary embedding.

    ``mlp`` makes the feed-forward part of a layer with experts, or without; ``model`` are defaults of the config class:
    max_seq_len, norm_eps, tied and theta.
    """
    shape = heads(config, config.integer("hidden_size"), kv_heads=kv_heads, head_dim=head_dim)
    count = num_blocks(config)
    keys = zip(widths or [None] * count, sparse or [False] * count, strict=True)

    def block(key: tuple[int | None, bool]) -> Block:
        window, is_sparse = key
        softmax = SoftmaxAttention(**shape, window=window, **attention)
        return Block(attention=softmax, mlp=mlp(is_sparse), num_norms=num_norms)

    return rms_model(config, runs(keys, block), **model)


def _biases(config: Fields, default: bool = False) -> dict[str, bool]:
    bias = config.boolean("attention_bias", default)
    return {"qkv_bias": bias, "out_bias": bias}


def _llama(config: Fields) -> dict[str, Any]:
    mlp = _swiglu(config, bias=config.boolean("mlp_bias", False))
    return _rms(config, _biases(config), lambda _: mlp, max_seq_len=2048)


def _mistral(config: Fields) -> dict[str, Any]:
    widths = [config.optional_integer("sliding_window", 4096)] * num_blocks(config)
    return _rms(config, {}, lambda _: _swiglu(config), widths=widths, kv_heads=8, max_seq_len=4096 * 32)


def _mixtral(config: Fields) -> dict[str, Any]:
    widths = [config.optional_integer("sliding_window")] * num_blocks(config)
    moe = _moe(config, "intermediate_size", "num_local_experts")
    others: dict[str, Any] = {"max_seq_len": 4096 * 32, "norm_eps": 1e-5, "theta": 1e6}
    return _rms(config, {}, lambda _: moe, widths=widths, kv_heads=8, **others)


def _qwen2(config: Fields) -> dict[str, Any]:
    attention, widths = {"qkv_bias": True}, _qwen_windows(config)
    return _rms(config, attention, lambda _: _swiglu(config), widths=widths, kv_heads=32, max_seq_len=32768)


def _qwen2_moe(config: Fields) -> dict[str, Any]:
    shared = config.integer("shared_expert_intermediate_size", default=5632)
    moe = _moe(config, "moe_intermediate_size", shared_ffn_dim=shared, shared_gate=True, **_normalized(config))
    last = config.integer("max_window_layers", default=28, minimum=0)
    return _rms(
        config,
        {"qkv_bias": config.boolean("qkv_bias", True)},
        lambda is_sparse: moe if is_sparse else _swiglu(config),
        widths=windows(config, _qwen_window(config), lambda idx: idx % 2 == 0 and idx < last),
        sparse=_qwen_sparse(config),
        kv_heads=16,
        max_seq_len=32768,
    )


def _qwen3(config: Fields) -> dict[str, Any]:
    attention, widths = {**_biases(config), "qk_norm": "per_head"}, _qwen_windows(config)
    others: dict[str, Any] = {"kv_heads": 32, "head_dim": 128, "max_seq_len": 32768}
    return _rms(config, attention, lambda _: _swiglu(config), widths=widths, **others)


def _qwen3_moe(config: Fields) -> dict[str, Any]:
    moe = _moe(config, "moe_intermediate_size", **_normalized(config))
    return _rms(
        config,
        {**_biases(config), "qk_norm": "per_head"},
        lambda is_sparse: moe if is_sparse else _swiglu(config),
        widths=[_qwen_window(config)] * num_blocks(config),
        sparse=_qwen_sparse(config),
        kv_heads=4,
        max_seq_len=32768,
    )


def _gemma2(config: Fields) -> dict[str, Any]:
    attention = {**_biases(config), "logit_softcap": config.optional_number("attn_logit_softcapping", 50.0)}
    mlp = _swiglu(config, activation=activation(config, "hidden_activation", "gelu_pytorch_tanh"))
    others: dict[str, Any] = {"kv_heads": 4, "head_dim": 256, "num_norms": 4, "max_seq_len": 8192, "tied": True}
    return _rms(config, attention, lambda _: mlp, widths=_alternating(config, 4096), **others)


def _olmoe(config: Fields) -> dict[str, Any]:
    if config.optional_number("clip_qkv") is not None:
        config.refuse("clip_qkv", "clipped queries, keys and values are not supported")
    moe = _moe(config, "intermediate_size", **_normalized(config))
    return _rms(config, {**_biases(config), "qk_norm": "full"}, lambda _: moe, max_seq_len=4096, norm_eps=1e-5)


def _gpt_oss(config: Fields) -> dict[str, Any]:
    config = config.with_default("rope_scaling", "rope_parameters", value=_GPT_OSS_ROPE)
    moe = _moe(config, "intermediate_size", "num_local_experts", bias=True, router_bias=True, router="top_k_softmax")
    attention = {**_biases(config, default=True), "sinks": True}
    others: dict[str, Any] = {"kv_heads": 8, "head_dim": 64, "max_seq_len": 131072, "norm_eps": 1e-5, "theta": 150000.0}
    return _rms(config, attention, lambda _: moe, widths=_alternating(config, 128), **others)


_GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}


def _deepseek_v2(config: Fields) -> dict[str, Any]:
    if config.boolean("mlp_bias", False):
        config.refuse("mlp_bias", "biases of DeepSeek's feed-forward are not supported")
    return rms_model(config, _deepseek_blocks(config, dense=0, shared=2, router="softmax"), max_seq_len=2048)


def _deepseek_v3(config: Fields) -> dict[str, Any]:
    # The checkpoint's multi-token-prediction module stays out, as in the published total and in transformers.
    return rms_model(config, _deepseek_blocks(config, dense=3, shared=1, router="sigmoid"), max_seq_len=4096)


def _deepseek_blocks(config: Fields, *, dense: int, shared: int, router: str) -> tuple[LayerRun, ...]:
    attention = LatentAttention(
        num_heads=config.integer("num_attention_heads"),
        q_lora_rank=config.optional_integer("q_lora_rank", 1536),
        kv_lora_rank=config.integer("kv_lora_rank"),
        qk_nope_head_dim=config.integer("qk_nope_head_dim"),
        qk_rope_head_dim=config.integer("qk_rope_head_dim"),
        v_head_dim=config.integer("v_head_dim"),
        bias=config.boolean("attention_bias", False),
    )
    if config.integer("moe_layer_freq", default=1) != 1:
        config.refuse("moe_layer_freq", "only 1 is supported, as in transformers")
    num_shared = config.optional_integer("n_shared_experts", shared, minimum=0) or 0
    shared_ffn_dim = num_shared * config.integer("moe_intermediate_size")
    groups = {
        "num_groups": config.optional_integer("n_group", 1) or 1,
        "top_groups": config.optional_integer("topk_group", 1) or 1,
    }
    scores = {"router": router, **_normalized(config, default=router == "sigmoid")}
    scores["scale"] = config.number("routed_scaling_factor", 2.5 if router == "sigmoid" else 1.0)
    moe = _moe(config, "moe_intermediate_size", "n_routed_experts", shared_ffn_dim=shared_ffn_dim, **groups, **scores)
    first = config.integer("first_k_dense_replace", default=dense, minimum=0)

    def block(sparse: bool) -> Block:
        return Block(attention=attention, mlp=moe if sparse else _swiglu(config))

    return runs((idx >= first for idx in range(num_blocks(config))), block)


def _layernorm(
    config: Fields,
    hidden_dim: int,
    attention: Mapping[str, Any],
    mlp: Mapping[str, Any],
    *,
    tied: bool = False,
    num_blocks_names: tuple[str, ...] = ("num_hidden_layers",),
    num_positions: int = 0,
    parallel_residual: bool = False,
    **model: Any,
) -> dict[str, Any]:
    """Return the fields of a model of equal blocks with LayerNorm and a feed-forward part without a gate."""
    vocab_size, tied = config.integer("vocab_size"), config.boolean("tie_word_embeddings", tied)
    norm: dict[str, Any] = {"norm": "layernorm", "norm_bias": True}
    part = DenseMLP(gated=False, **mlp)
    block = Block(attention=SoftmaxAttention(**attention), mlp=part, parallel_residual=parallel_residual, **norm)
    layers = (
        LayerRun(layer=Embedding(vocab_size=vocab_size, num_positions=num_positions)),
        LayerRun(layer=block, count=config.integer(*num_blocks_names, maximum=MAX_LAYERS)),
        LayerRun(layer=Head(vocab_size=vocab_size, tied=tied, **norm)),
    )
    return {"hidden_dim": hidden_dim, "layers": layers, "tie_embeddings": tied, **model}


def _gpt2(config: Fields) -> dict[str, Any]:
    if config.boolean("add_cross_attention", False):
        config.refuse("add_cross_attention", "only decoders without cross-attention are supported")
    hidden_dim = config.integer("n_embd", "hidden_size")
    attention = {**full_heads(config, hidden_dim, "n_head"), "qkv_bias": True, "out_bias": True, "rope_fraction": 0.0}
    gelu, ffn_dim = activation(config, "activation_function", "gelu_new"), config.optional_integer("n_inner")
    mlp = {"ffn_dim": ffn_dim or 4 * hidden_dim, "activation": gelu, "bias": True}
    max_seq_len = config.integer("n_positions", "max_position_embeddings", default=1024)
    model: dict[str, Any] = {
        "max_seq_len": max_seq_len,
        "norm_eps": config.number("layer_norm_epsilon", 1e-5),
        "rope": None,
    }
    names = ("n_layer", "num_hidden_layers")
    return _layernorm(
        config, hidden_dim, attention, mlp, tied=True, num_blocks_names=names, num_positions=max_seq_len, **model
    )


def _opt(config: Fields) -> dict[str, Any]:
    hidden_dim = config.integer("hidden_size")
    if not config.boolean("do_layer_norm_before", True) or config.boolean("_remove_final_layer_norm", False):
        config.refuse("do_layer_norm_before", "only the sizes of OPT that norm before each part are supported")
    if (config.optional_integer("word_embed_proj_dim") or hidden_dim) != hidden_dim:
        config.refuse("word_embed_proj_dim", "embeddings of another width than the blocks are not supported")
    bias = config.boolean("enable_bias", True)
    attention = {**full_heads(config, hidden_dim), "qkv_bias": bias, "out_bias": bias, "rope_fraction": 0.0}
    relu = activation(config, "activation_function", "relu")
    mlp = {"ffn_dim": config.integer("ffn_dim"), "activation": relu, "bias": bias}
    max_seq_len = config.integer("max_position_embeddings", default=2048)
    model: dict[str, Any] = {"max_seq_len": max_seq_len, "norm_eps": 1e-5, "rope": None}
    # The first two rows of the positions are for padding.
    return _layernorm(config, hidden_dim, attention, mlp, tied=True, num_positions=max_seq_len + 2, **model)


def _gpt_neox(config: Fields) -> dict[str, Any]:
    hidden_dim = config.integer("hidden_size")
    fraction = rotary_fraction(config, 0.25, "rotary_pct")
    attention = {**full_heads(config, hidden_dim), **_biases(config, default=True), "rope_fraction": fraction}
    gelu = activation(config, default="gelu")
    mlp = {"ffn_dim": config.integer("intermediate_size"), "activation": gelu, "bias": True}
    parallel = config.boolean("use_parallel_residual", True)
    max_seq_len = config.integer("max_position_embeddings", default=2048)
    model: dict[str, Any] = {"max_seq_len": max_seq_len, "norm_eps": config.number("layer_norm_eps", 1e-5)}
    rotary = rope(config, max_seq_len, theta_name="rotary_emb_base")
    return _layernorm(config, hidden_dim, attention, mlp, parallel_residual=parallel, rope=rotary, **model)


def _nemotron(config: Fields) -> dict[str, Any]:
    hidden_dim, fraction = config.integer("hidden_size"), rotary_fraction(config, 0.5)
    attention = {**heads(config, hidden_dim), **_biases(config), "rope_fraction": fraction}
    relu2, bias = activation(config, default="relu2"), config.boolean("mlp_bias", False)
    mlp = {"ffn_dim": config.integer("intermediate_size"), "activation": relu2, "bias": bias}
    max_seq_len = config.integer("max_position_embeddings", default=4096)
    model: dict[str, Any] = {"max_seq_len": max_seq_len, "norm_eps": config.number("norm_eps", 1e-5)}
    return _layernorm(config, hidden_dim, attention, mlp, rope=rope(config, max_seq_len), **model)


def _phi3(config: Fields) -> dict[str, Any]:
    widths = [config.optional_integer("sliding_window")] * num_blocks(config)
    attention = {"rope_fraction": rotary_fraction(config)}
    return _rms(config, attention, lambda _: _swiglu(config), widths=widths, max_seq_len=4096, norm_eps=1e-5)


def _llama4(config: Fields) -> dict[str, Any]:
    text = config.section("text_config")
    if text is None:
        raise ConfigError("field `text_config` is missing")
    return _llama4_text(text)


def _llama4_text(config: Fields) -> dict[str, Any]:
    bias = config.boolean("attention_bias", False)
    shape = heads(config, config.integer("hidden_size"), kv_heads=8, head_dim=128)
    shape |= {"qkv_bias": bias, "out_bias": bias}
    qk_norm = config.boolean("use_qk_norm", True)
    rotated = _llama4_rotated(config)
    chunk = config.optional_integer("attention_chunk_size", 8192)
    local = windows(config, chunk, lambda idx: rotated[idx], local="chunked_attention")
    shared = config.integer("intermediate_size")
    moe = _moe(
        config, "intermediate_size", "num_local_experts", shared_ffn_dim=shared, router="sigmoid", normalize=False
    )

    def block(key: tuple[bool, int | None, bool]) -> Block:
        rotate, window, sparse = key
        norm: Any = "weightless" if qk_norm and rotate else "none"
        attention = SoftmaxAttention(
            **shape, window=window, chunked=window is not None, qk_norm=norm, rope_fraction=float(rotate)
        )
        return Block(attention=attention, mlp=moe if sparse else _swiglu(config, "intermediate_size_mlp", 16384))

    blocks = runs(zip(rotated, local, _llama4_sparse(config), strict=True), block)
    return rms_model(config, blocks, max_seq_len=4096 * 32, norm_eps=1e-5, theta=500000.0)


def _llama4_rotated(config: Fields) -> list[bool]:
    """Return which layers rotate queries and keys; an empty no_rope_layers (as published) is the same as none."""
    count, listed = num_blocks(config), config.items("no_rope_layers", int)
    interval = config.integer("no_rope_layer_interval", default=4)
    if not listed:
        return [(idx + 1) % interval != 0 for idx in range(count)]
    if len(listed) < count:
        raise ConfigError(f"no_rope_layers has {len(listed)} entries but num_hidden_layers = {count}")
    return [flag != 0 for flag in listed[:count]]


def _llama4_sparse(config: Fields) -> list[bool]:
    step = config.integer("interleave_moe_layer_step", default=1)
    listed = config.items("moe_layers", int)
    chosen = None if listed is None else set(listed)
    return [(idx + 1) % step == 0 if chosen is None else idx in chosen for idx in range(num_blocks(config))]


def _swiglu(config: Fields, width: str = "intermediate_size", default: int | None = None, **rest: Any) -> DenseMLP:
    return DenseMLP(**{"ffn_dim": config.integer(width, default=default), "activation": activation(config), **rest})


def _normalized(config: Fields, *, default: bool = False) -> dict[str, Any]:
    return {"normalize": config.boolean("norm_topk_prob", default)}


def _moe(config: Fields, width: str, experts: str = "num_experts", **rest: Any) -> FeedForward:
    # transformers reads and writes the number under either of the first two names for most families
    num_experts = config.integer(experts, "num_experts", "num_local_experts")
    top_k = config.integer("num_experts_per_tok")
    if top_k > num_experts:
        config.refuse("num_experts_per_tok", f"exceeds the number of experts, {num_experts}")
    ffn_dim = config.integer(width)
    return MoE(num_experts=num_experts, top_k=top_k, ffn_dim=ffn_dim, activation=activation(config), **rest)


def _alternating(config: Fields, default: int) -> Iterable[int | None]:
    """Sliding, full, sliding, full ...: Gemma-2 and gpt-oss."""
    return windows(config, config.optional_integer("sliding_window", default), lambda idx: idx % 2 == 0)


def _qwen_window(config: Fields) -> int | None:
    # Read only where it is used: files that do not use it hold 0 or a length that means nothing.
    return config.optional_integer("sliding_window", 4096) if config.boolean("use_sliding_window", False) else None


def _qwen_windows(config: Fields) -> Iterable[int | None]:
    first = config.integer("max_window_layers", default=28, minimum=0)
    return windows(config, _qwen_window(config), lambda idx: idx >= first)


def _qwen_sparse(config: Fields) -> list[bool]:
    step = config.integer("decoder_sparse_step", default=1)
    dense = set(config.items("mlp_only_layers", int) or ())
    return [idx not in dense and (idx + 1) % step == 0 for idx in range(num_blocks(config))]


Parser = Callable[[Fields], dict[str, Any]]


FAMILIES: dict[str, tuple[str, Parser]] = {
    "llama": ("LlamaForCausalLM", _llama),
    "mistral": ("MistralForCausalLM", _mistral),
    "mixtral": ("MixtralForCausalLM", _mixtral),
    "qwen2": ("Qwen2ForCausalLM", _qwen2),
    "qwen2_moe": ("Qwen2MoeForCausalLM", _qwen2_moe),
    "qwen3": ("Qwen3ForCausalLM", _qwen3),
    "qwen3_moe": ("Qwen3MoeForCausalLM", _qwen3_moe),
    "gemma2": ("Gemma2ForCausalLM", _gemma2),
    "olmoe": ("OlmoeForCausalLM", _olmoe),
    "gpt_oss": ("GptOssForCausalLM", _gpt_oss),
    "deepseek_v2": ("DeepseekV2ForCausalLM", _deepseek_v2),
    "deepseek_v3": ("DeepseekV3ForCausalLM", _deepseek_v3),
    "gpt2": ("GPT2LMHeadModel", _gpt2),
    "opt": ("OPTForCausalLM", _opt),
    "gpt_neox": ("GPTNeoXForCausalLM", _gpt_neox),
    "nemotron": ("NemotronForCausalLM", _nemotron),
    "phi3": ("Phi3ForCausalLM", _phi3),
    "llama4": ("Llama4ForConditionalGeneration", _llama4),
    "llama4_text": ("Llama4ForCausalLM", _llama4_text),
}
