"""A row's model: the published one where its shape is in the catalogue, else a plain decoder from the row's columns.

What columns do not say follows from the name: a published shape, kinds of blocks, latent attention, shared experts.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from ..schema import ConfigError, ModelSpec
from ..schema.catalogue import model_names
from ..schema.layers import (
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
from ..schema.limits import MAX_LAYERS
from ..schema.rope import Rope
from .rows import RunRow, read_table, stated

PARAMS_TOLERANCE = 0.05
"""Stated and counted parameters may differ by this before a row says so: tables round, and leave out embeddings or biases."""

DEFAULT_VOCAB = 51200
"""GPT-2's 50257 tokens as Megatron pads them; only where a GPT's vocabulary is not stated."""

_MANY_POSITIONS = 2**20

_MAX_DENSE = 3
"""First blocks without experts that any family has (experts.csv)."""

_FEW_EXPERTS = 16
"""Up to so many, a token visits two where nothing says how many (as Mixtral, Grok); of more, eight (DeepSeek, Qwen3, OLMoE)."""

_HIDDEN_OF_LITE = 2048
"""Width up to which queries are not compressed and tokens visit any group of experts (DeepSeek-V2-Lite, Moonlight)."""


class Shape(NamedTuple):
    """Numbers that a decoder is built from; None where a table does not say. ``ffn`` is the width of one matrix (of one expert)."""

    layers: int | None
    hidden: int | None
    heads: int | None
    kv_heads: int | None
    ffn: int | None
    vocab: int | None
    experts: int | None = None
    top_k: int | None = None
    head_dim: int | None = None


class Traits(NamedTuple):
    """What a family's name says: gated feed-forward, learned positions, LayerNorm with biases."""

    gated: bool
    learned_positions: bool
    biases: bool


class RowModel(NamedTuple):
    """A row's model, what had to be assumed about it and where it only comes close."""

    spec: ModelSpec
    assumed: tuple[str, ...] = ()
    approximated: tuple[str, ...] = ()


def model_of(row: RunRow) -> RowModel | str:
    """Return the model of a row: from its columns, else by name, else of the stated size; or why it cannot be built."""
    if stated("not a decoder", f"{row.model_family} {row.model}" if "gpt" not in row.model.lower() else row.model):
        return "model: not a plain decoder"
    if (row.layers or 0) > MAX_LAYERS:
        return f"model: {row.layers} layers are more than any model has"
    params_b = row.params_b
    approximated: tuple[str, ...] = ()
    if row.layers is not None and row.hidden is not None:
        shape = Shape(row.layers, row.hidden, row.heads, row.kv_heads, row.ffn, row.vocab, row.experts, row.topk)
    elif names := [name for name in (row.model.lower().strip(), canonical(row.model)) if name in model_names()]:
        spec = ModelSpec.named(names[0])
        return RowModel(_truncated(spec, row.layers, params_b) if row.layers else spec)
    elif known := shape_named(row.model):
        shape, params_b = known[0], params_b or known[1]
    elif params_b and not row.experts:
        shape, approximated = shape_of_size(params_b * 1e9, row.vocab or DEFAULT_VOCAB), ("shape",)
    else:
        return f"model: shape not stated: {row.model}"
    model = _model(row.model, row.model_family, shape, params_b, row.seq_len or 0)
    return model if isinstance(model, str) else model._replace(approximated=(*model.approximated, *approximated))


@cache
def _model(name: str, family: str, shape: Shape, params_b: float | None, seq_len: int) -> RowModel | str:
    """Return one object for the same arguments, so that its rows are estimated together."""
    published = _published(shape, params_b)
    if published is not None:
        return RowModel(published)
    assumed = ("vocab",) if shape.vocab is None else ()
    stands_in: tuple[str, ...] = ()
    try:
        candidates = list(_candidates(name, _traits_of(name, family, shape), shape, seq_len))
    except ConfigError as error:
        return f"model: {error.message}"
    if stated("latent attention", f"{name} {family}"):
        candidates, stands_in = [_with_latent_attention(spec) for spec in candidates], ("latent attention",)
    if params_b is None:
        return RowModel(candidates[0], assumed, stands_in)
    best = min(candidates, key=lambda spec: abs(spec.num_params / 1e9 - params_b))
    off = abs(best.num_params / 1e9 / params_b - 1)
    return RowModel(best, assumed, (*stands_in, "parameters") if off > PARAMS_TOLERANCE else stands_in)


@cache
def untied(spec: ModelSpec) -> ModelSpec:
    """Return the model with a head of its own; one object for the same model."""
    layers = (run.replace(layer=run.layer.replace(tied=False)) if run.layer.is_head else run for run in spec.layers)
    return spec.replace(tie_embeddings=False, layers=tuple(layers))


def _candidates(name: str, traits: Traits, shape: Shape, seq_len: int) -> Iterator[ModelSpec]:
    """Yield decoders with a head tied or not, the family's usual way first, and with experts that every token visits.

    The stated parameter count decides between them.
    """
    plain = [_decoder(name, traits, shape, seq_len, tied=tied) for tied in (not traits.gated, traits.gated)]
    known = [_with_known_experts(spec) for spec in plain]
    yield from known
    if known != plain:  # a cut model may have fewer dense blocks
        yield from (_with_known_experts(plain[0], max_dense=number) for number in range(_MAX_DENSE))
    elif shape.experts:
        for shared, tied in itertools.product((1, 2, 4, 8), (not traits.gated, traits.gated)):
            yield _decoder(name, traits, shape, seq_len, tied=tied, num_shared=shared)


def _decoder(name: str, traits: Traits, shape: Shape, seq_len: int, *, tied: bool, num_shared: int = 0) -> ModelSpec:
    assert shape.layers is not None
    assert shape.hidden is not None
    heads = shape.heads or _usual_heads(shape.hidden)
    kv_heads, vocab = shape.kv_heads or heads, shape.vocab or DEFAULT_VOCAB
    attention = SoftmaxAttention(
        kind="mha" if heads == kv_heads else "gqa",
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=shape.head_dim or shape.hidden // heads,
        qkv_bias=traits.biases,
        out_bias=traits.biases,
        rope_fraction=0.0 if traits.learned_positions else 1.0,
    )
    norm = {"norm": "layernorm" if not traits.gated else "rmsnorm", "norm_bias": traits.biases}
    ffn = shape.ffn or 4 * shape.hidden
    kind = {"ffn_dim": ffn, "gated": traits.gated, "activation": "silu" if traits.gated else "gelu"}
    mlp: FeedForward = DenseMLP(**kind, bias=traits.biases)  # type: ignore[arg-type]
    if shape.experts:
        top_k = shape.top_k or min(2 if shape.experts <= _FEW_EXPERTS else 8, shape.experts)
        shared = {"shared_ffn_dim": num_shared * ffn} if num_shared else {}
        mlp = MoE(num_experts=shape.experts, top_k=top_k, **kind, **shared)  # type: ignore[arg-type]
    block = Block(attention=attention, mlp=mlp, **norm)  # type: ignore[arg-type]
    positions = seq_len if traits.learned_positions else 0
    return ModelSpec(
        name=name or "unnamed",
        architecture="decoder",
        hidden_dim=shape.hidden,
        layers=(
            LayerRun(layer=Embedding(vocab_size=vocab, num_positions=positions)),
            LayerRun(layer=block, count=shape.layers),
            LayerRun(layer=Head(vocab_size=vocab, tied=tied, **norm)),  # type: ignore[arg-type]
        ),
        tie_embeddings=tied,
        max_seq_len=_MANY_POSITIONS,
        rope=None if traits.learned_positions else Rope(),
    )


def _usual_heads(hidden: int) -> int:
    """Return the heads of 128; where those do not divide the width, the highest number below that eight ranks can share."""
    upper = max(1, hidden // 128)
    shareable = (heads for heads in range(upper - upper % 8, 0, -8) if hidden % heads == 0)
    return upper if hidden % upper == 0 else next(shareable, upper)


@cache
def _catalogue_shapes() -> tuple[tuple[int, tuple[int, ...], ModelSpec], ...]:
    """Return number of blocks, all other columns of a shape, and the model."""
    shapes = []
    for name in model_names():
        spec = ModelSpec.named(name)
        block = spec.block_runs[-1][0]
        experts = (block.mlp.num_experts, block.mlp.top_k) if isinstance(block.mlp, MoE) else (0, 0)
        heads = (block.attention.num_heads, block.attention.num_kv_heads)
        shapes.append((spec.num_blocks, (spec.hidden_dim, *heads, block.mlp.ffn_dim, spec.vocab_size, *experts), spec))
    return tuple(shapes)


def _published(shape: Shape, params_b: float | None) -> ModelSpec | None:
    """Return the catalogue's model of exactly this shape; of all but the layer count, cut to that many blocks."""
    num_blocks, *columns = (value or 0 for value in shape[:-1])
    for known_blocks, known_columns, spec in _catalogue_shapes():
        if tuple(columns) == known_columns and num_blocks <= known_blocks:
            return _truncated(spec, num_blocks, params_b)
    return None


def _truncated(spec: ModelSpec, num_blocks: int, params_b: float | None) -> ModelSpec:
    """Return the model with ``num_blocks`` of its blocks: the first, or with as many of its first kind as has the stated size."""
    if num_blocks >= spec.num_blocks:
        return spec
    available = spec.block_runs[0][1]
    usual = min(available, num_blocks)
    cuts = [
        _with_blocks(spec, count, num_blocks - count)
        for count in range(usual, -1, -1)
        if num_blocks - count <= spec.num_blocks - available
    ]
    return min(cuts, key=lambda cut: abs(cut.num_params / 1e9 - params_b)) if params_b else cuts[0]


def _with_blocks(spec: ModelSpec, num_first: int, num_others: int) -> ModelSpec:
    """Return the model with so many blocks of its first run, and so many of those after it."""
    first = next(idx for idx, run in enumerate(spec.layers) if isinstance(run.layer, Block))
    runs: list[LayerRun] = []
    for idx, run in enumerate(spec.layers):
        count = run.count
        if idx == first:
            count = num_first
        elif isinstance(run.layer, Block):
            count = min(run.count, num_others)
            num_others -= count
        if count:
            runs.append(run.replace(count=count))
    num_blocks = sum(run.count for run in runs if isinstance(run.layer, Block))
    return spec.replace(layers=tuple(runs), name=f"{spec.name}-{num_blocks}-blocks")


def canonical(name: str) -> str:
    """Return a name in the tables' spelling: lower case, words joined by hyphens, without what does not change the shape."""
    key = re.sub(r"[\s_/]+", "-", name.strip().lower().split("/")[-1])
    key = re.sub(r"(\d)-b\b", r"\1b", key)
    for line in read_table("spellings"):
        key = re.sub(line["pattern"], line["replacement"], key)
    return key.strip("-")


@cache
def published_shapes() -> dict[str, tuple[Shape, float | None]]:
    """Return shapes of published models outside the catalogue, and their 1e9 parameters where the shape leaves open what counts."""
    return {
        line["name"]: (
            Shape(*(int(line[column]) if line[column] else None for column in Shape._fields)),
            float(line["params_b"]) if line["params_b"] else None,
        )
        for line in read_table("shapes")
    }


def shape_named(name: str) -> tuple[Shape, float | None] | None:
    """Return the published shape and size that a table's spelling of a model's name means."""
    key, shapes = canonical(name), published_shapes()
    if key in shapes:
        return shapes[key]
    sized = shapes.get(re.sub(r"-\d+(\.\d+)?b$", "", key))
    return sized and (sized[0], None)


def shape_of_size(params: float, vocab: int) -> Shape:
    """Return a GPT of ``params`` parameters: 12 L h^2 + V h with h = 128 L, rounded to multiples of 128.

    The GPTs of arXiv:2104.04473 are 128 times as wide as deep within a factor of two.
    """
    hidden = max(128, 128 * round((128 * params / 12) ** (1 / 3) / 128))
    layers = max(1, round((params - vocab * hidden) / (12 * hidden**2)))
    heads = hidden // 128
    return Shape(layers, hidden, heads, heads, 4 * hidden, vocab)


def _traits_of(name: str, family: str, shape: Shape) -> Traits:
    """Return the traits of the first family whose name starts the model's or the family's.

    Of a family that no name tells: LLaMA's where it has experts or another width than four times the hidden one, else GPT-2's.
    """
    texts = (name.lower(), canonical(name), family.lower())
    line = next(line for line in read_table("families") if any(re.match(line["pattern"], text) for text in texts))
    is_like_gpt = not shape.experts and (shape.ffn or 0) in (0, 4 * (shape.hidden or 0))
    if not line["pattern"] and not is_like_gpt:
        return Traits(gated=True, learned_positions=False, biases=False)
    return Traits(*(line[column] == "1" for column in Traits._fields))


def _with_latent_attention(spec: ModelSpec) -> ModelSpec:
    runs = []
    for run in spec.layers:
        layer = run.layer
        if isinstance(layer, Block):
            layer = layer.replace(attention=_latent_attention(layer.attention.num_heads, spec.hidden_dim))
        runs.append(run.replace(layer=layer))
    return spec.replace(layers=tuple(runs))


def _latent_attention(num_heads: int, hidden_dim: int) -> LatentAttention:
    """Return the widths that all published ones share (arXiv:2405.04434 section 3.1.2, arXiv:2412.19437 section 4.2)."""
    return LatentAttention(
        num_heads=num_heads,
        q_lora_rank=None if hidden_dim <= _HIDDEN_OF_LITE else 1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    )


def _with_known_experts(plain: ModelSpec, max_dense: int = _MAX_DENSE) -> ModelSpec:
    """Add what families of experts have besides the routed ones, which columns do not say (experts.csv).

    Shared experts; first blocks that are dense and as wide as the experts one token visits; but in Lite, groups of experts of which
    a token visits a few; latent attention.
    """
    (block, count), name = plain.block_runs[0], plain.name.lower()
    if not isinstance(block.mlp, MoE):
        return plain
    mlp, hidden = block.mlp, plain.hidden_dim
    lines = (line for line in read_table("experts") if mlp.num_experts >= int(line["min_experts"]))
    line = next((line for line in lines if re.search(line["pattern"], name)), None)
    if line is None:
        return plain
    num_shared = mlp.top_k if line["num_shared"] == "top_k" else int(line["num_shared"])
    has_groups = line["top_groups"] and hidden > _HIDDEN_OF_LITE
    groups = {"num_groups": 8, "top_groups": int(line["top_groups"])} if has_groups else {}
    experts = mlp.replace(shared_ffn_dim=num_shared * mlp.ffn_dim, shared_gate=line["shared_gate"] == "1", **groups)
    if line["attention"] == "latent":
        block = block.replace(attention=_latent_attention(block.attention.num_heads, hidden))
    num_dense = min(int(line["num_dense"]), max(count - 1, 1), max_dense)
    dense = block.replace(mlp=DenseMLP(ffn_dim=(mlp.top_k + num_shared) * mlp.ffn_dim))
    runs = ((dense, num_dense), (block.replace(mlp=experts), count - num_dense))
    blocks = (LayerRun(layer=layer, count=number) for layer, number in runs if number)
    return plain.replace(layers=(plain.layers[0], *blocks, plain.layers[-1]))
