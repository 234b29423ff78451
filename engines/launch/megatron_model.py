"""The model that Megatron-LM's options describe (arguments.py of core_v0.19)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import groupby
from typing import Any

from ...schema.base import shown
from ...schema.catalogue import model_names
from ...schema.errors import ConfigError
from ...schema.layers import (
    Attention,
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
from ...schema.model import ModelSpec
from ...schema.rope import Rope
from .. import adapter
from .job import model_called

VOCABULARIES = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000, "Llama3Tokenizer": 128256}
"""Tokenizer type -> tokens, of those that have one vocabulary."""


def model_of(settings: Mapping[str, Any]) -> tuple[ModelSpec, tuple[str, ...]]:
    """Return the model that the options describe, the catalogue's where it has one of that shape, and what was assumed.

    Raises:
        ConfigError: a size is missing, with the option that says it.
    """
    hidden, layers = _size(settings, "hidden_size"), _size(settings, "num_layers")
    gated = bool(settings.get("swiglu"))
    is_alibi = settings.get("position_embedding_type") == "alibi"
    is_rotary = settings.get("position_embedding_type") in ("rope", "yarn") or bool(
        settings.get("use_rotary_position_embeddings")
    )
    positions = adapter.optional_integer(settings, "max_position_embeddings") or adapter.optional_integer(
        settings, "seq_length"
    )
    norm: Any = "rmsnorm" if settings.get("normalization") == "RMSNorm" else "layernorm"
    norms: dict[str, Any] = {"norm": norm, "norm_bias": norm == "layernorm"}
    attention = _attention(settings, hidden, is_rotary=is_rotary)
    blocks = [
        Block(attention=attention, mlp=mlp, **norms) for mlp in _feed_forwards(settings, hidden, layers, gated=gated)
    ]
    runs = [LayerRun(layer=block, count=len(list(same))) for block, same in groupby(blocks)]
    known = _same_shape(blocks, hidden)
    vocab, assumed = _vocabulary(settings, known)
    tied = not settings.get("untie_embeddings_and_output_weights")
    if known is not None and known.vocab_size == vocab and known.tie_embeddings == tied:
        return known, assumed
    num_positions = 0 if is_rotary or is_alibi else positions or 0
    spec = ModelSpec(
        name=known.name if known else f"gpt-{layers}x{hidden}",
        architecture=known.architecture if known else "GPTModel",
        hidden_dim=hidden,
        layers=(
            LayerRun(layer=Embedding(vocab_size=vocab, num_positions=num_positions)),
            *runs,
            LayerRun(layer=Head(vocab_size=vocab, tied=tied, **norms)),
        ),
        tie_embeddings=tied,
        max_seq_len=max(positions or 0, known.max_seq_len if known else 1),
        rope=Rope(theta=float(settings.get("rotary_base") or 10000)) if is_rotary else None,
    )
    return spec, assumed


def _size(settings: Mapping[str, Any], name: str) -> int:
    value = adapter.optional_integer(settings, name)
    if value is None:
        raise ConfigError(
            f"the options describe no model: --{name.replace('_', '-')} is missing", help="add --model NAME"
        )
    return value


def _attention(settings: Mapping[str, Any], hidden: int, *, is_rotary: bool) -> Attention:
    heads = _size(settings, "num_attention_heads")

    def width(name: str, default: int) -> int:
        return adapter.optional_integer(settings, name) or default

    if settings.get("multi_latent_attention"):
        return LatentAttention(
            num_heads=heads,
            q_lora_rank=adapter.optional_integer(settings, "q_lora_rank"),
            kv_lora_rank=width("kv_lora_rank", 32),
            qk_nope_head_dim=width("qk_head_dim", 128),
            qk_rope_head_dim=width("qk_pos_emb_head_dim", 64),
            v_head_dim=width("v_head_dim", 128),
        )
    groups = width("num_query_groups", 1) if settings.get("group_query_attention") else heads
    has_biases = not settings.get("disable_bias_linear")
    return SoftmaxAttention(
        kind="mha" if groups == heads else "gqa",
        num_heads=heads,
        num_kv_heads=groups,
        head_dim=width("kv_channels", max(hidden // heads, 1)),
        qkv_bias=has_biases or bool(settings.get("add_qkv_bias")),
        out_bias=has_biases,
        qk_norm="per_head" if settings.get("qk_layernorm") else "none",
        rope_fraction=float(settings.get("rotary_percent") or 1.0) if is_rotary else 0.0,
    )


def _feed_forwards(settings: Mapping[str, Any], hidden: int, layers: int, *, gated: bool) -> list[FeedForward]:
    """Return the feed-forward part of each block."""
    width = adapter.optional_integer(settings, "ffn_hidden_size") or (
        int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden
    )
    kind: dict[str, Any] = {
        "gated": gated,
        "activation": "silu" if gated else "relu2" if settings.get("squared_relu") else "gelu",
        "bias": not settings.get("disable_bias_linear"),
    }
    dense = DenseMLP(ffn_dim=width, **kind)
    experts = adapter.optional_integer(settings, "num_experts")
    if experts is None:
        return [dense] * layers
    is_sigmoid = settings.get("moe_router_score_function") == "sigmoid"
    moe = MoE(
        num_experts=experts,
        top_k=adapter.optional_integer(settings, "moe_router_topk") or 2,
        ffn_dim=adapter.optional_integer(settings, "moe_ffn_hidden_size") or width,
        shared_ffn_dim=adapter.optional_integer(settings, "moe_shared_expert_intermediate_size") or 0,
        shared_gate=bool(settings.get("moe_shared_expert_gate")),
        router="sigmoid" if is_sigmoid else "softmax",
        num_groups=adapter.optional_integer(settings, "moe_router_num_groups") or 1,
        top_groups=adapter.optional_integer(settings, "moe_router_group_topk") or 1,
        **kind | {"bias": False},
    )
    return [moe if routed else dense for routed in _routed(settings.get("moe_layer_freq", 1), layers)]


def _routed(frequency: Any, layers: int) -> list[bool]:
    """Return which blocks have experts: every nth one, or as a list like ``([0]*3+[1]*58)`` says."""
    if isinstance(frequency, int) and not isinstance(frequency, bool) and frequency >= 1:
        return [idx % frequency == 0 for idx in range(layers)]
    pattern: list[bool] = []
    for values, times in re.findall(r"\[([01,\s]+)\](?:\s*\*\s*(\d{1,4}))?", str(frequency)):
        pattern += [digit == "1" for digit in re.findall("[01]", values)] * int(times or 1)
    if len(pattern) != layers:
        raise ConfigError(f"moe_layer_freq {shown(frequency)} has {len(pattern)} entries for {layers} layers")
    return pattern


def _same_shape(blocks: list[Block], hidden: int) -> ModelSpec | None:
    """Return the catalogue's model with the same sizes; norms and biases may differ."""

    def sizes(block: Block) -> tuple[object, ...]:
        attention, mlp = block.attention, block.mlp
        experts = (mlp.num_experts, mlp.top_k, mlp.shared_ffn_dim) if isinstance(mlp, MoE) else ()
        return (attention.kind, attention.num_heads, attention.num_kv_heads, mlp.ffn_dim, mlp.gated, *experts)

    ours = [sizes(block) for block in blocks]
    for name in model_names():
        spec = ModelSpec.named(name)
        if spec.hidden_dim == hidden and spec.num_blocks == len(blocks):
            theirs = [layer for layer in spec.iter_layers() if isinstance(layer, Block)]
            if all(block.attention.is_attention for block in theirs) and [sizes(block) for block in theirs] == ours:
                return spec
    return None


def _vocabulary(settings: Mapping[str, Any], known: ModelSpec | None) -> tuple[int, tuple[str, ...]]:
    for name in ("padded_vocab_size", "pad_vocab_size_to", "vocab_size"):
        if name in settings and isinstance(settings[name], int):
            return settings[name], ()
    kind = settings.get("tokenizer_type")
    if kind is None and "merge_file" in settings:
        kind = "GPT2BPETokenizer"
    if kind in VOCABULARIES:
        return VOCABULARIES[kind], (f"vocabulary {VOCABULARIES[kind]}: that of {kind}",)
    for name in ("tokenizer_model", "tokenizer_name_or_path"):
        if name in settings:
            try:
                named = model_called(str(settings[name]))
            except ConfigError:  # a path that the script is given
                named = None
            if named is not None:
                return named.vocab_size, (
                    f"vocabulary {named.vocab_size}: that of {named.name}, whose tokenizer is named",
                )
    if known is not None:
        return known.vocab_size, (f"vocabulary {known.vocab_size}: that of {known.name}, which has this shape",)
    raise ConfigError(
        "the vocabulary is that of a tokenizer that is not known here",
        help="add --set vocab_size=N, e.g. vocab_size=50257",
    )
