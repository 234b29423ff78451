"""A row's model: the published one where its shape is in the catalogue, else a plain decoder from the row's own columns."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from ..schema import ConfigError, ModelSpec
from ..schema.catalogue import model_names
from ..schema.layers import Block, DenseMLP, Embedding, FeedForward, Head, LayerRun, MoE, Rope, SoftmaxAttention
from .families import Traits, has_latent_attention, traits_of, with_known_experts, with_latent_attention
from .rows import RunRow
from .shapes import SIZES, Shape, canonical, shape_named, shape_of_size

PARAMS_TOLERANCE = 0.05
"""Stated and counted parameters may differ by this before a row says so: tables round, and leave out embeddings or biases."""

DEFAULT_VOCAB = 51200
"""GPT-2's 50257 tokens as Megatron pads them; only where a GPT's vocabulary is not stated."""

MAX_LAYERS = 2000
"""Cutting layers into stages takes time and memory that grow with their square."""

_MANY_POSITIONS = 2**20

_NOT_DECODERS = (
    r"hybrid|mamba|jamba|zamba|rwkv|retnet|hyena|recurrent|griffin|nemotron-h|\b(ro|de|al)?berta?\b|\bm?t5\b|flan|\bul2\b"
    r"|encoder|\bbart\b|vit\b|swin|diffusion|unet|\bdit\b|flux|whisper|\bclip\b|dlrm|resnet|\bgnn\b|retina"
)
"""State-space, recurrent, encoder, diffusion and recommendation models: not blocks of attention and feed-forward."""


class RowModel(NamedTuple):
    """A row's model, what had to be assumed about it and where it only comes close."""

    spec: ModelSpec
    assumed: tuple[str, ...]
    approximated: tuple[str, ...]


def model_of(row: RunRow) -> RowModel | str:
    """The model of a row, or why it cannot be built."""
    kind = f"{row.model_family} {row.model}" if "gpt" not in row.model.lower() else row.model
    if re.search(_NOT_DECODERS, kind.lower()):
        return "model: not a plain decoder"
    if (row.layers or 0) > MAX_LAYERS:
        return f"model: {row.layers} layers are more than any model has"
    if row.layers is None or row.hidden is None:
        return _named(row)
    shape = (row.layers, row.hidden, row.heads, row.kv_heads, row.ffn, row.vocab, row.experts, row.topk)
    return _model(row.model, row.model_family, shape, row.params_b, row.seq_len or 0)


@cache
def _model(
    name: str, family: str, shape: tuple[int | None, ...], params_b: float | None, seq_len: int
) -> RowModel | str:
    published = _published(shape)
    if published is not None:
        return RowModel(published, (), ())
    assumed = ("vocab",) if shape[5] is None else ()
    try:
        candidates = list(_candidates(name, traits_of(name, family), shape, seq_len))
    except ConfigError as error:
        return f"model: {error.message}"
    stands_in: tuple[str, ...] = ()
    if has_latent_attention(name, family):
        candidates, stands_in = [with_latent_attention(spec) for spec in candidates], ("latent attention",)
    if params_b is None:
        return RowModel(candidates[0], assumed, stands_in)
    best = min(candidates, key=lambda spec: abs(spec.num_params / 1e9 - params_b))
    off = abs(best.num_params / 1e9 / params_b - 1)
    return RowModel(best, assumed, (*stands_in, "parameters") if off > PARAMS_TOLERANCE else stands_in)


def _candidates(name: str, traits: Traits, shape: tuple[int | None, ...], seq_len: int) -> Iterator[ModelSpec]:
    """Both ways of a head, the family's usual one first, and experts that every token visits beside the routed ones.

    The stated parameter count decides which it is.
    """
    plain = [_decoder(name, traits, shape, seq_len, tied=tied) for tied in (not traits.gated, traits.gated)]
    known = [with_known_experts(spec) for spec in plain]
    yield from known
    if shape[6] and known == plain:
        for shared, tied in itertools.product((1, 2, 4, 8), (not traits.gated, traits.gated)):
            yield _decoder(name, traits, shape, seq_len, tied=tied, num_shared=shared)


def _decoder(
    name: str, traits: Traits, shape: tuple[int | None, ...], seq_len: int, *, tied: bool, num_shared: int = 0
) -> ModelSpec:
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
    mlp = _feed_forward(traits, ffn, experts, top_k)
    if isinstance(mlp, MoE) and num_shared:
        mlp = mlp.replace(shared_ffn_dim=num_shared * ffn)
    block = Block(attention=attention, mlp=mlp, **norm)  # type: ignore[arg-type]
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


def _named(row: RunRow) -> RowModel | str:
    """A model known by name, else one of the stated size."""
    for wanted in (row.model.lower().strip(), canonical(row.model)):
        if wanted in model_names():
            return RowModel(ModelSpec.named(wanted), (), ())
    approximated: tuple[str, ...] = ()
    shape = shape_named(row.model)
    if shape is None:
        if not row.params_b or row.experts:
            return "model: shape not stated"
        shape, approximated = shape_of_size(row.params_b * 1e9, row.vocab or DEFAULT_VOCAB), ("shape",)
    params_b = row.params_b or SIZES.get(canonical(row.model))
    return _of_shape(row.model, row.model_family, shape, params_b, row.seq_len or 0, approximated)


@cache
def _of_shape(
    name: str, family: str, shape: Shape, params_b: float | None, seq_len: int, approximated: tuple[str, ...]
) -> RowModel | str:
    *sizes, head_dim = shape
    found = _model(name, family, tuple(sizes), params_b, seq_len)
    if isinstance(found, str) or not head_dim or approximated:
        return found if isinstance(found, str) else found._replace(approximated=found.approximated + approximated)
    return found._replace(spec=_with_head_dim(found.spec, head_dim))


def _with_head_dim(spec: ModelSpec, head_dim: int) -> ModelSpec:
    """Heads of a width of their own, instead of hidden / heads."""
    runs = []
    for run in spec.layers:
        layer = run.layer
        if isinstance(layer, Block) and isinstance(layer.attention, SoftmaxAttention):
            layer = layer.replace(attention=layer.attention.replace(head_dim=head_dim))
        runs.append(run.replace(layer=layer))
    return spec.replace(layers=tuple(runs))


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
