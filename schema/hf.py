"""Hugging Face ``config.json`` -> fields of ModelSpec: one small parser for each family of published decoder models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from .base import read_json
from .errors import ConfigError
from .hf_fields import (
    Fields,
    activation,
    full_heads,
    heads,
    layernorm_model,
    num_blocks,
    rms_model,
    rope,
    rotary_fraction,
    runs,
    shown,
    windows,
)
from .layers import MAX_LAYERS, Block, DenseMLP, FeedForward, LatentAttention, LayerRun, MoE, SoftmaxAttention


def _llama(config: Fields) -> dict[str, Any]:
    hidden_dim = config.integer("hidden_size")
    bias = config.boolean("attention_bias", False)
    attention = SoftmaxAttention(**heads(config, hidden_dim), qkv_bias=bias, out_bias=bias)
    block = Block(attention=attention, mlp=_swiglu(config, bias=config.boolean("mlp_bias", False)))
    return rms_model(config, _equal(config, block), max_seq_len=2048)


def _mistral(config: Fields) -> dict[str, Any]:
    hidden_dim = config.integer("hidden_size")
    window = config.optional_integer("sliding_window", 4096)
    attention = SoftmaxAttention(**heads(config, hidden_dim, kv_heads=8), window=window)
    return rms_model(config, _equal(config, Block(attention=attention, mlp=_swiglu(config))), max_seq_len=4096 * 32)


def _mixtral(config: Fields) -> dict[str, Any]:
    hidden_dim = config.integer("hidden_size")
    window = config.optional_integer("sliding_window")
    attention = SoftmaxAttention(**heads(config, hidden_dim, kv_heads=8), window=window)
    block = Block(attention=attention, mlp=_moe(config, "intermediate_size", "num_local_experts"))
    return rms_model(config, _equal(config, block), max_seq_len=4096 * 32, norm_eps=1e-5, theta=1e6)


def _qwen2(config: Fields) -> dict[str, Any]:
    shape = heads(config, config.integer("hidden_size"), kv_heads=32)
    mlp = _swiglu(config)

    def block(window: int | None) -> Block:
        return Block(attention=SoftmaxAttention(**shape, window=window, qkv_bias=True), mlp=mlp)

    return rms_model(config, runs(_qwen_windows(config), block), max_seq_len=32768)


def _qwen2_moe(config: Fields) -> dict[str, Any]:
    shape = heads(config, config.integer("hidden_size"), kv_heads=16)
    bias = config.boolean("qkv_bias", True)
    shared = config.integer("shared_expert_intermediate_size", default=5632)
    moe = _moe(config, "moe_intermediate_size", shared_ffn_dim=shared, shared_gate=True, **_normalized(config))
    last = config.integer("max_window_layers", default=28, minimum=0)
    local = windows(config, _qwen_window(config), lambda idx: idx % 2 == 0 and idx < last)

    def block(key: tuple[int | None, bool]) -> Block:
        attention = SoftmaxAttention(**shape, window=key[0], qkv_bias=bias)
        return Block(attention=attention, mlp=moe if key[1] else _swiglu(config))

    return rms_model(config, runs(zip(local, _qwen_sparse(config), strict=True), block), max_seq_len=32768)


def _qwen3(config: Fields) -> dict[str, Any]:
    shape = heads(config, config.integer("hidden_size"), kv_heads=32, head_dim=128)
    bias = config.boolean("attention_bias", False)
    mlp = _swiglu(config)

    def block(window: int | None) -> Block:
        attention = SoftmaxAttention(**shape, window=window, qkv_bias=bias, out_bias=bias, qk_norm="per_head")
        return Block(attention=attention, mlp=mlp)

    return rms_model(config, runs(_qwen_windows(config), block), max_seq_len=32768)


def _qwen3_moe(config: Fields) -> dict[str, Any]:
    shape = heads(config, config.integer("hidden_size"), kv_heads=4)
    bias = config.boolean("attention_bias", False)
    window = _qwen_window(config)
    attention = SoftmaxAttention(**shape, window=window, qkv_bias=bias, out_bias=bias, qk_norm="per_head")
    moe = _moe(config, "moe_intermediate_size", **_normalized(config))

    def block(sparse: bool) -> Block:
        return Block(attention=attention, mlp=moe if sparse else _swiglu(config))

    return rms_model(config, runs(_qwen_sparse(config), block), max_seq_len=32768)


def _gemma2(config: Fields) -> dict[str, Any]:
    shape = heads(config, config.integer("hidden_size"), kv_heads=4, head_dim=256)
    bias = config.boolean("attention_bias", False)
    softcap = config.optional_number("attn_logit_softcapping", 50.0)
    mlp = _swiglu(config, activation=activation(config, "hidden_activation", "gelu_pytorch_tanh"))

    def block(window: int | None) -> Block:
        attention = SoftmaxAttention(**shape, window=window, qkv_bias=bias, out_bias=bias, logit_softcap=softcap)
        return Block(attention=attention, mlp=mlp, num_norms=4)

    return rms_model(config, runs(_alternating(config, 4096), block), max_seq_len=8192, tied=True)


def _olmoe(config: Fields) -> dict[str, Any]:
    if config.optional_number("clip_qkv") is not None:
        config.refuse("clip_qkv", "clipped queries, keys and values are not supported")
    shape = heads(config, config.integer("hidden_size"))
    bias = config.boolean("attention_bias", False)
    attention = SoftmaxAttention(**shape, qkv_bias=bias, out_bias=bias, qk_norm="full")
    block = Block(attention=attention, mlp=_moe(config, "intermediate_size", **_normalized(config)))
    return rms_model(config, _equal(config, block), max_seq_len=4096, norm_eps=1e-5)


def _gpt_oss(config: Fields) -> dict[str, Any]:
    config = config.with_default("rope_scaling", "rope_parameters", value=_GPT_OSS_ROPE)
    shape = heads(config, config.integer("hidden_size"), kv_heads=8, head_dim=64)
    bias = config.boolean("attention_bias", True)
    moe = _moe(config, "intermediate_size", "num_local_experts", bias=True, router_bias=True, router="top_k_softmax")

    def block(window: int | None) -> Block:
        attention = SoftmaxAttention(**shape, window=window, qkv_bias=bias, out_bias=bias, sinks=True)
        return Block(attention=attention, mlp=moe)

    blocks = runs(_alternating(config, 128), block)
    return rms_model(config, blocks, max_seq_len=131072, norm_eps=1e-5, theta=150000.0)


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


def _gpt2(config: Fields) -> dict[str, Any]:
    if config.boolean("add_cross_attention", False):
        config.refuse("add_cross_attention", "only decoders without cross-attention are supported")
    hidden_dim = config.integer("n_embd", "hidden_size")
    shape = full_heads(config, hidden_dim, "n_head")
    attention = SoftmaxAttention(**shape, qkv_bias=True, out_bias=True, rope_fraction=0.0)
    ffn_dim = config.optional_integer("n_inner") or 4 * hidden_dim
    gelu = activation(config, "activation_function", "gelu_new")
    mlp = DenseMLP(ffn_dim=ffn_dim, gated=False, activation=gelu, bias=True)
    block = Block(attention=attention, mlp=mlp, norm="layernorm", norm_bias=True)
    run = LayerRun(layer=block, count=config.integer("n_layer", "num_hidden_layers", maximum=MAX_LAYERS))
    max_seq_len = config.integer("n_positions", "max_position_embeddings", default=1024)
    return {
        **layernorm_model(config, hidden_dim, (run,), tied=True, num_positions=max_seq_len),
        "max_seq_len": max_seq_len,
        "norm_eps": config.number("layer_norm_epsilon", 1e-5),
        "rope": None,
    }


def _opt(config: Fields) -> dict[str, Any]:
    hidden_dim = config.integer("hidden_size")
    if not config.boolean("do_layer_norm_before", True) or config.boolean("_remove_final_layer_norm", False):
        config.refuse("do_layer_norm_before", "only the sizes of OPT that norm before each part are supported")
    if (config.optional_integer("word_embed_proj_dim") or hidden_dim) != hidden_dim:
        config.refuse("word_embed_proj_dim", "embeddings of another width than the blocks are not supported")
    bias = config.boolean("enable_bias", True)
    attention = SoftmaxAttention(**full_heads(config, hidden_dim), qkv_bias=bias, out_bias=bias, rope_fraction=0.0)
    relu = activation(config, "activation_function", "relu")
    mlp = DenseMLP(ffn_dim=config.integer("ffn_dim"), gated=False, activation=relu, bias=bias)
    block = Block(attention=attention, mlp=mlp, norm="layernorm", norm_bias=True)
    max_seq_len = config.integer("max_position_embeddings", default=2048)
    # The first two rows of the positions are for padding.
    return {
        **layernorm_model(config, hidden_dim, _equal(config, block), tied=True, num_positions=max_seq_len + 2),
        "max_seq_len": max_seq_len,
        "norm_eps": 1e-5,
        "rope": None,
    }


def _gpt_neox(config: Fields) -> dict[str, Any]:
    hidden_dim = config.integer("hidden_size")
    bias = config.boolean("attention_bias", True)
    fraction = rotary_fraction(config, 0.25, "rotary_pct")
    shape = full_heads(config, hidden_dim)
    attention = SoftmaxAttention(**shape, qkv_bias=bias, out_bias=bias, rope_fraction=fraction)
    ffn_dim = config.integer("intermediate_size")
    mlp = DenseMLP(ffn_dim=ffn_dim, gated=False, activation=activation(config, default="gelu"), bias=True)
    parallel = config.boolean("use_parallel_residual", True)
    block = Block(attention=attention, mlp=mlp, norm="layernorm", norm_bias=True, parallel_residual=parallel)
    max_seq_len = config.integer("max_position_embeddings", default=2048)
    return {
        **layernorm_model(config, hidden_dim, _equal(config, block), tied=False),
        "max_seq_len": max_seq_len,
        "norm_eps": config.number("layer_norm_eps", 1e-5),
        "rope": rope(config, max_seq_len, theta_name="rotary_emb_base"),
    }


def _nemotron(config: Fields) -> dict[str, Any]:
    hidden_dim = config.integer("hidden_size")
    bias = config.boolean("attention_bias", False)
    shape, fraction = heads(config, hidden_dim), rotary_fraction(config, 0.5)
    attention = SoftmaxAttention(**shape, qkv_bias=bias, out_bias=bias, rope_fraction=fraction)
    relu2, mlp_bias = activation(config, default="relu2"), config.boolean("mlp_bias", False)
    mlp = DenseMLP(ffn_dim=config.integer("intermediate_size"), gated=False, activation=relu2, bias=mlp_bias)
    max_seq_len = config.integer("max_position_embeddings", default=4096)
    block = Block(attention=attention, mlp=mlp, norm="layernorm", norm_bias=True)
    return {
        **layernorm_model(config, hidden_dim, _equal(config, block), tied=False),
        "max_seq_len": max_seq_len,
        "norm_eps": config.number("norm_eps", 1e-5),
        "rope": rope(config, max_seq_len),
    }


def _phi3(config: Fields) -> dict[str, Any]:
    hidden_dim = config.integer("hidden_size")
    window = config.optional_integer("sliding_window")
    attention = SoftmaxAttention(**heads(config, hidden_dim), window=window, rope_fraction=rotary_fraction(config))
    blocks = _equal(config, Block(attention=attention, mlp=_swiglu(config)))
    return rms_model(config, blocks, max_seq_len=4096, norm_eps=1e-5)


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
    """Which layers rotate queries and keys; an empty no_rope_layers (as published) is the same as none."""
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


def _equal(config: Fields, block: Block) -> tuple[LayerRun, ...]:
    return (LayerRun(layer=block, count=num_blocks(config)),)


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
    """Which layers route to experts."""
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


_BY_ARCHITECTURE = {architecture: model_type for model_type, (architecture, _) in FAMILIES.items()}


# The language model inside a multimodal one is what is planned, so this is the class it is.
_TEXT_ARCHITECTURE = {"Llama4ForConditionalGeneration": "Llama4ForCausalLM"}


def model_fields_from_hf(config: str | Path | Mapping[str, Any], *, name: str | None = None) -> dict[str, Any]:
    """Fields for ``ModelSpec(**fields)``.

    Args:
        config: path of a ``config.json``, a folder that holds one, or its parsed content.
        name: name of the model; otherwise ``_name_or_path`` of the file, the folder's name, or the architecture.

    Returns:
        name, architecture, hidden_dim, layers, tie_embeddings, max_seq_len, norm_eps, rope. Vision and audio parts and
        multi-token-prediction modules are not included.

    Raises:
        ConfigError: the file cannot be read, is not a JSON object, lacks a field, has a value that cannot be, or is of
            an architecture that is not supported.
    """
    if isinstance(config, Mapping):
        content, path, where = config, None, "config"
    else:
        path = _config_path(config)
        content, where = read_json(path), str(path)
    if not isinstance(content, Mapping):
        raise ConfigError(f"{where} is not a model's config.json: it holds a {type(content).__name__}, not an object")
    try:
        architecture, parse = _family(content)
        fields = parse(Fields(content))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message}", details=error.details, help=error.help) from None
    return {"name": name or _name(content, path) or architecture, "architecture": architecture, **fields}


def _config_path(config: str | Path) -> Path:
    path = Path(config)
    try:
        if path.is_dir() and not (path / "config.json").exists():
            raise ConfigError(f"cannot read {shown(str(path / 'config.json'))}: the folder holds no config.json")
        return path / "config.json" if path.is_dir() else path
    except OSError as error:  # a name longer than the file system allows
        raise ConfigError(f"cannot read {shown(str(path))}: {error.strerror}") from None


def _name(content: Mapping[str, Any], path: Path | None) -> str | None:
    stored = content.get("_name_or_path")
    if isinstance(stored, str) and stored:
        return stored
    if path is None:
        return None
    return path.absolute().parent.name if path.name == "config.json" else path.stem


def _family(content: Mapping[str, Any]) -> tuple[str, Parser]:
    """Architecture and parser: by ``architectures[0]`` (it names the head as well) or, without it, ``model_type``."""
    listed, model_type = content.get("architectures"), content.get("model_type")
    if listed is not None and not (isinstance(listed, list) and all(isinstance(item, str) for item in listed)):
        raise ConfigError(f"architectures = {shown(listed)}: must be a list of names")
    if model_type is not None and not isinstance(model_type, str):
        raise ConfigError(f"model_type = {shown(model_type)}: must be a name")
    if not listed and model_type is None:
        raise ConfigError("neither `architectures` nor `model_type` is there", help="is this a model's config.json?")
    first = listed[0] if listed else None
    known = model_type if first is None else _BY_ARCHITECTURE.get(first)
    if known not in FAMILIES:
        raise _unsupported(f"model_type {shown(model_type)}" if first is None else f"architecture {shown(first)}")
    if model_type not in (None, known):
        raise ConfigError(f"architecture {first} is of model_type {known}, but model_type = {shown(model_type)}")
    architecture, parse = FAMILIES[known]
    return _TEXT_ARCHITECTURE.get(architecture, architecture), parse


def _unsupported(what: str) -> ConfigError:
    return ConfigError(f"{what} is not supported", help=f"supported are {', '.join(sorted(_BY_ARCHITECTURE))}")
