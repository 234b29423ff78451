"""A row's model: the published one where its shape is in the catalogue, else a plain decoder from the row's own columns."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from ...schema import ConfigError, ModelSpec
from ...schema.catalogue import model_names
from ...schema.model import (
    Block,
    DenseMLP,
    Embedding,
    FeedForward,
    Head,
    LayerRun,
    MoE,
    Rope,
    SoftmaxAttention,
)
from .rows import RunRow

PARAMS_TOLERANCE = 0.05
"""Stated and counted parameters may differ by this before a row says so: tables round, and leave out embeddings or biases."""

DEFAULT_VOCAB = 51200
"""GPT-2's 50257 tokens as Megatron pads them; only where a GPT's vocabulary is not stated."""

_MANY_POSITIONS = 2**20


class Traits(NamedTuple):
    """What a family's name says and its columns do not: gated feed-forward, learned positions, LayerNorm with biases."""

    gated: bool
    learned_positions: bool
    biases: bool


_LLAMA = Traits(gated=True, learned_positions=False, biases=False)
_GPT = Traits(gated=False, learned_positions=True, biases=True)

FAMILIES: tuple[tuple[str, Traits], ...] = (
    ("mist-llama", _LLAMA),
    ("mist", _GPT),
    ("llama-2", _LLAMA),
    *(
        (name, _LLAMA)
        for name in ("nanotron", "llama", "qwen", "internlm", "glm", "mixtral", "mpf", "grok", "deepseek")
    ),
    *((name, _LLAMA) for name in ("tinyllama", "smollm", "simumax", "gpt-oss", "mistral")),
    ("mpt", Traits(gated=False, learned_positions=True, biases=False)),
    ("nemotron", Traits(gated=False, learned_positions=False, biases=False)),  # squared ReLU, rotary
    ("bloom", Traits(gated=False, learned_positions=False, biases=True)),  # ALiBi
    ("pythia", Traits(gated=False, learned_positions=False, biases=True)),
    ("falcon", Traits(gated=False, learned_positions=False, biases=False)),
)
"""First match at the start of the model's or the family's name; everything else is a GPT-2-like decoder."""

_NOT_DECODERS = ("hybrid", "mamba")

_CATALOGUE_ALIASES = {"pythia-1b": "pythia-1b", "llama 2 7 b": "llama-2-7b"}


class RowModel(NamedTuple):
    """A row's model, what had to be assumed about it and where it only comes close."""

    spec: ModelSpec
    assumed: tuple[str, ...]
    approximated: tuple[str, ...]


def model_of(row: RunRow) -> RowModel | str:
    """The model of a row, or why it cannot be built."""
    if any(word in row.model_family.lower() for word in _NOT_DECODERS):
        return "model: not a plain decoder"
    if row.layers is None or row.hidden is None:
        named = _named(row.model)
        return RowModel(named, (), ()) if named else "model: shape not stated"
    shape = (row.layers, row.hidden, row.heads, row.kv_heads, row.ffn, row.vocab, row.experts, row.topk)
    return _model(row.model, row.model_family, shape, row.params_b, row.seq_len or 0)


@cache
def _model(
    name: str, family: str, shape: tuple[int | None, ...], params_b: float | None, seq_len: int
) -> RowModel | str:
    published = _published(shape)
    if published is not None:
        return RowModel(published, (), ())
    if "deepseek" in (name + family).lower():
        return "model: latent attention of a shape that is not in the catalogue"
    assumed = ("vocab",) if shape[5] is None else ()
    try:
        candidates = list(_candidates(name, _traits(name, family), shape, seq_len))
    except ConfigError as error:
        return f"model: {error.message}"
    if params_b is None:
        return RowModel(candidates[0], assumed, ())
    best = min(candidates, key=lambda spec: abs(spec.num_params / 1e9 - params_b))
    off = abs(best.num_params / 1e9 / params_b - 1)
    return RowModel(best, assumed, ("parameters",) if off > PARAMS_TOLERANCE else ())


def _traits(name: str, family: str) -> Traits:
    for start, traits in FAMILIES:
        if name.lower().startswith(start) or family.lower().startswith(start):
            return traits
    return _GPT


def _candidates(name: str, traits: Traits, shape: tuple[int | None, ...], seq_len: int) -> Iterator[ModelSpec]:
    """Both ways of a head, the family's usual one first: the stated parameter count decides which it is."""
    for tied in (not traits.gated, traits.gated):
        yield _decoder(name, traits, shape, seq_len, tied=tied)


def _decoder(name: str, traits: Traits, shape: tuple[int | None, ...], seq_len: int, *, tied: bool) -> ModelSpec:
    layers, hidden, heads, kv_heads, ffn, vocab, experts, top_k = shape
    assert layers is not None
    assert hidden is not None
    heads = heads or _usual_heads(hidden)
    kv_heads = kv_heads or heads
    ffn = ffn or (4 * hidden)
    vocab = vocab or DEFAULT_VOCAB
    attention = SoftmaxAttention(
        kind="mha" if heads == kv_heads else "gqa",
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        qkv_bias=traits.biases,
        out_bias=traits.biases,
        rope_fraction=0.0 if traits.learned_positions else 1.0,
    )
    norm = {"norm": "layernorm" if not traits.gated else "rmsnorm", "norm_bias": traits.biases}
    block = Block(attention=attention, mlp=_feed_forward(traits, ffn, experts, top_k), **norm)  # type: ignore[arg-type]
    positions = seq_len if traits.learned_positions else 0
    return ModelSpec(
        name=name or "unnamed",
        architecture="decoder",
        hidden_dim=hidden,
        layers=(
            LayerRun(layer=Embedding(vocab_size=vocab, num_positions=positions)),
            LayerRun(layer=block, count=layers),
            LayerRun(layer=Head(vocab_size=vocab, tied=tied, **norm)),  # type: ignore[arg-type]
        ),
        tie_embeddings=tied,
        max_seq_len=_MANY_POSITIONS,
        rope=None if traits.learned_positions else Rope(),
    )


def _usual_heads(hidden: int) -> int:
    """As many heads as 128 wide ones; where those do not divide the width, the most below that do and that eight ranks share."""
    most = max(1, hidden // 128)
    shared = (heads for heads in range(most - most % 8, 0, -8) if hidden % heads == 0)
    return most if hidden % most == 0 else next(shared, most)


def _feed_forward(traits: Traits, ffn: int, experts: int | None, top_k: int | None) -> FeedForward:
    activation = "silu" if traits.gated else "gelu"
    if experts:
        return MoE(num_experts=experts, top_k=top_k or 1, ffn_dim=ffn, gated=traits.gated, activation=activation)  # type: ignore[arg-type]
    return DenseMLP(ffn_dim=ffn, gated=traits.gated, activation=activation, bias=traits.biases)  # type: ignore[arg-type]


def _named(name: str) -> ModelSpec | None:
    wanted = name.lower().strip()
    wanted = _CATALOGUE_ALIASES.get(wanted, wanted)
    return ModelSpec.named(wanted) if wanted in model_names() else None


@cache
def _published_shapes() -> tuple[tuple[tuple[int, ...], ModelSpec], ...]:
    shapes = []
    for name in model_names():
        spec = ModelSpec.named(name)
        block = spec.block_runs[-1][0]
        experts = (block.mlp.num_experts, block.mlp.top_k) if isinstance(block.mlp, MoE) else (0, 0)
        attention = block.attention
        heads = (attention.num_heads, attention.num_kv_heads, block.mlp.ffn_dim)
        shapes.append(((spec.num_blocks, spec.hidden_dim, *heads, spec.vocab_size, *experts), spec))
    return tuple(shapes)


def _published(shape: tuple[int | None, ...]) -> ModelSpec | None:
    """The catalogue's model of exactly this shape; of all but the layer count, with its last blocks left out."""
    layers, *widths = (value or 0 for value in shape)
    for (published_layers, *published_widths), spec in _published_shapes():
        if widths == published_widths and layers <= published_layers:
            return spec if layers == published_layers else _truncated(spec, layers)
    return None


def _truncated(spec: ModelSpec, num_blocks: int) -> ModelSpec:
    """The first ``num_blocks`` blocks of a model."""
    runs, left = [], num_blocks
    for run in spec.layers:
        if not isinstance(run.layer, Block):
            runs.append(run)
        elif left > 0:
            runs.append(LayerRun(layer=run.layer, count=min(run.count, left)))
            left -= run.count
    return spec.replace(layers=tuple(runs), name=f"{spec.name}-{num_blocks}-blocks")
