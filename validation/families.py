"""What families of models have and the columns of a table do not say: kinds of blocks, latent attention, shared experts."""

from __future__ import annotations

import re
from typing import NamedTuple

from ..schema import ModelSpec
from ..schema.layers import Block, DenseMLP, LatentAttention, LayerRun, MoE
from .shapes import canonical

_LATENT = r"deepseek.*(v[23]|r1)|kimi|moonlight"
"""Families with DeepSeek-V2's latent attention."""

_HIDDEN_OF_LITE = 2048
"""Width up to which queries are not compressed and tokens visit any group of experts (DeepSeek-V2-Lite, Moonlight)."""

_EXPERTS_OF_V3 = 256
"""Fewest routed experts of DeepSeek-V3 and what descends from it."""

_QWEN2_MOE = re.compile(r"qwen(1\.5|2)\b.*(moe|-a\d)")
"""Qwen's mixtures with shared experts; those of Qwen3 have none."""


class Traits(NamedTuple):
    """What a family's name says and its columns do not: gated feed-forward, learned positions, LayerNorm with biases."""

    gated: bool
    learned_positions: bool
    biases: bool


_LLAMA = Traits(gated=True, learned_positions=False, biases=False)
_GPT = Traits(gated=False, learned_positions=True, biases=True)

_LLAMA_LIKE = (
    "llama-2", "nanotron", "llama", "qwen", "internlm", "glm", "mixtral", "mpf", "grok", "deepseek", "tinyllama", "smollm",
    "simumax", "gpt-oss", "mistral", "yi-", "baichuan", "chatglm", "codellama", "vicuna", "gemma", "phi-3", "phi-4", "phi3",
    "phi4", "olmo", "dbrx", "minicpm", "aquila", "skywork", "orion", "solar", "command", "granite", "hunyuan", "kimi",
    "moonlight", "ernie", "exaone", "arctic", "phimoe", "minimax", "megrez", "stablelm-2",
)  # fmt: skip

FAMILIES: tuple[tuple[str, Traits], ...] = (
    ("mist-llama", _LLAMA),
    ("mist-", _GPT),
    *((name, _LLAMA) for name in _LLAMA_LIKE),
    ("phi", Traits(gated=False, learned_positions=False, biases=True)),
    ("stablelm", Traits(gated=False, learned_positions=False, biases=True)),
    ("gpt-neox", Traits(gated=False, learned_positions=False, biases=True)),
    ("gpt-j", Traits(gated=False, learned_positions=False, biases=True)),
    ("mpt", Traits(gated=False, learned_positions=True, biases=False)),
    ("nemotron", Traits(gated=False, learned_positions=False, biases=False)),  # squared ReLU, rotary
    ("bloom", Traits(gated=False, learned_positions=False, biases=True)),  # ALiBi
    ("pythia", Traits(gated=False, learned_positions=False, biases=True)),
    ("falcon", Traits(gated=False, learned_positions=False, biases=False)),
)
"""First match at the start of the model's or the family's name; everything else is a GPT-2-like decoder."""


def traits_of(name: str, family: str) -> Traits:
    """Traits of the first family whose name starts the model's or the family's; those of GPT-2 where none does."""
    for start, traits in FAMILIES:
        if name.lower().startswith(start) or canonical(name).startswith(start) or family.lower().startswith(start):
            return traits
    return _GPT


def has_latent_attention(name: str, family: str) -> bool:
    """Whether the family has DeepSeek-V2's latent attention."""
    return re.search(_LATENT, f"{name} {family}".lower()) is not None


def _latent_attention(num_heads: int, hidden_dim: int) -> LatentAttention:
    """Widths that all published ones share (arXiv:2405.04434 section 3.1.2, arXiv:2412.19437 section 4.2)."""
    return LatentAttention(
        num_heads=num_heads,
        q_lora_rank=None if hidden_dim <= _HIDDEN_OF_LITE else 1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    )


def with_latent_attention(spec: ModelSpec) -> ModelSpec:
    """The same with the latent attention that DeepSeek-V2, V3 and Kimi-K2 share; the small ones do not compress queries."""
    runs = []
    for run in spec.layers:
        layer = run.layer
        if isinstance(layer, Block):
            layer = layer.replace(attention=_latent_attention(layer.attention.num_heads, spec.hidden_dim))
        runs.append(run.replace(layer=layer))
    return spec.replace(layers=tuple(runs))


def with_known_experts(plain: ModelSpec) -> ModelSpec:
    """What families of experts have besides the routed ones, which columns do not say."""
    block, count = plain.block_runs[0]
    if not isinstance(block.mlp, MoE):
        return plain
    if "deepseek" in plain.name.lower():
        return _deepseek(plain)
    if not _QWEN2_MOE.search(plain.name.lower()):
        return plain
    # Gated, and as wide as the routed experts one token visits (config.json of Qwen1.5-MoE-A2.7B and Qwen2-57B-A14B).
    shared = block.mlp.replace(shared_ffn_dim=block.mlp.top_k * block.mlp.ffn_dim, shared_gate=True)
    experts = LayerRun(layer=block.replace(mlp=shared), count=count)
    return plain.replace(layers=(plain.layers[0], experts, plain.layers[-1]))


def _deepseek(plain: ModelSpec) -> ModelSpec:
    """DeepSeek's experts (arXiv:2401.06066), and from V2 on its latent attention, in a decoder of the same columns.

    All published ones share the widths of a head: 128 without and 64 with rotary, 128 for values, keys and values from 512, queries
    from 1536 but in Lite (arXiv:2405.04434 section 3.1.2, arXiv:2412.19437 section 4.2). V3 has one shared expert and three dense
    blocks, those before it two and one; a dense block is as wide as the experts one token visits. But in Lite, a token visits at
    most four (V3) or three of eight groups of experts.
    """
    (block, count), hidden = plain.block_runs[0], plain.hidden_dim
    assert isinstance(block.mlp, MoE)
    is_v3 = block.mlp.num_experts >= _EXPERTS_OF_V3
    is_lite = hidden <= _HIDDEN_OF_LITE
    num_shared, num_dense, top_groups = (1, 3, 4) if is_v3 else (2, 1, 3)
    groups = {} if is_lite else {"num_groups": 8, "top_groups": top_groups}
    num_dense = min(num_dense, count - 1) or 1
    heads, width = block.attention.num_heads, (block.mlp.top_k + num_shared) * block.mlp.ffn_dim
    latent = _latent_attention(heads, hidden)
    attention = block.attention if re.search(r"deepseek-?moe", plain.name.lower()) else latent
    experts = block.mlp.replace(shared_ffn_dim=num_shared * block.mlp.ffn_dim, **groups)
    routed = block.replace(attention=attention, mlp=experts)
    dense = block.replace(attention=attention, mlp=DenseMLP(ffn_dim=width))
    blocks = [LayerRun(layer=dense, count=num_dense)]
    if count > num_dense:
        blocks.append(LayerRun(layer=routed, count=count - num_dense))
    return plain.replace(layers=(plain.layers[0], *blocks, plain.layers[-1]))
