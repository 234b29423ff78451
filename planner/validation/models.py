"""A row's model: the published one where its shape is in the catalogue, else a plain decoder from the row's own columns."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from functools import cache, partial
from typing import NamedTuple

from ...schema import ConfigError, ModelSpec
from ...schema.catalogue import model_names
from ...schema.model import (
    Block,
    DenseMLP,
    Embedding,
    FeedForward,
    Head,
    LatentAttention,
    LayerRun,
    MoE,
    Rope,
    SoftmaxAttention,
)
from .rows import RunRow
from .shapes import SIZES, Shape, canonical, shape_named, shape_of_size

PARAMS_TOLERANCE = 0.05
"""Stated and counted parameters may differ by this before a row says so: tables round, and leave out embeddings or biases."""

DEFAULT_VOCAB = 51200
"""GPT-2's 50257 tokens as Megatron pads them; only where a GPT's vocabulary is not stated."""

MAX_LAYERS = 2000
"""Cutting layers into stages takes time and memory that grow with their square."""

_MANY_POSITIONS = 2**20

_LATENT = r"deepseek.*(v[23]|r1)|kimi|moonlight"
_SMALL_LATENT = 2048
"""Hidden width up to which queries are not compressed (DeepSeek-V2-Lite, Moonlight)."""


class Traits(NamedTuple):
    """What a family's name says and its columns do not: gated feed-forward, learned positions, LayerNorm with biases."""

    gated: bool
    learned_positions: bool
    biases: bool


_LLAMA = Traits(gated=True, learned_positions=False, biases=False)
_GPT = Traits(gated=False, learned_positions=True, biases=True)

FAMILIES: tuple[tuple[str, Traits], ...] = (
    ("mist-llama", _LLAMA),
    ("mist-", _GPT),
    ("llama-2", _LLAMA),
    *(
        (name, _LLAMA)
        for name in ("nanotron", "llama", "qwen", "internlm", "glm", "mixtral", "mpf", "grok", "deepseek")
    ),
    *((name, _LLAMA) for name in ("tinyllama", "smollm", "simumax", "gpt-oss", "mistral")),
    *(
        (name, _LLAMA)
        for name in ("yi-", "baichuan", "chatglm", "codellama", "vicuna", "gemma", "phi-3", "phi-4", "phi3", "phi4")
    ),
    *(
        (name, _LLAMA)
        for name in ("olmo", "dbrx", "minicpm", "aquila", "skywork", "orion", "solar", "command", "granite")
    ),
    *(
        (name, _LLAMA)
        for name in (
            "hunyuan",
            "kimi",
            "moonlight",
            "ernie",
            "exaone",
            "arctic",
            "phimoe",
            "minimax",
            "megrez",
            "stablelm-2",
        )
    ),
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

_QWEN2_MOE = re.compile(r"qwen(1\.5|2)\b.*(moe|-a\d)")
_EXPERTS_OF_V3 = 256
_HIDDEN_OF_LITE = 2048

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
        candidates = list(_candidates(name, _traits(name, family), shape, seq_len))
    except ConfigError as error:
        return f"model: {error.message}"
    stands_in: tuple[str, ...] = ()
    if re.search(_LATENT, f"{name} {family}".lower()):
        candidates, stands_in = [_latent(spec) for spec in candidates], ("latent attention",)
    if params_b is None:
        return RowModel(candidates[0], assumed, stands_in)
    best = min(candidates, key=lambda spec: abs(spec.num_params / 1e9 - params_b))
    off = abs(best.num_params / 1e9 / params_b - 1)
    return RowModel(best, assumed, (*stands_in, "parameters") if off > PARAMS_TOLERANCE else stands_in)


def _latent(spec: ModelSpec) -> ModelSpec:
    """The same with the latent attention that DeepSeek-V2, V3 and Kimi-K2 share; the small ones do not compress queries."""
    attention = partial(LatentAttention, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    rank = 1536 if spec.hidden_dim > _SMALL_LATENT else None
    runs = []
    for run in spec.layers:
        layer = run.layer
        if isinstance(layer, Block):
            layer = layer.replace(attention=attention(num_heads=layer.attention.num_heads, q_lora_rank=rank))
        runs.append(run.replace(layer=layer))
    return spec.replace(layers=tuple(runs))


def _traits(name: str, family: str) -> Traits:
    for start, traits in FAMILIES:
        if name.lower().startswith(start) or canonical(name).startswith(start) or family.lower().startswith(start):
            return traits
    return _GPT


def _candidates(name: str, traits: Traits, shape: tuple[int | None, ...], seq_len: int) -> Iterator[ModelSpec]:
    """Both ways of a head, the family's usual one first, and experts that every token visits beside the routed ones.

    The stated parameter count decides which it is.
    """
    plain = [_decoder(name, traits, shape, seq_len, tied=tied) for tied in (not traits.gated, traits.gated)]
    known = [_with_shared_experts(spec) for spec in plain]
    yield from known
    if shape[6] and known == plain:
        for shared, tied in itertools.product((1, 2, 4, 8), (not traits.gated, traits.gated)):
            yield _decoder(name, traits, shape, seq_len, tied=tied, num_shared=shared)


def _with_shared_experts(plain: ModelSpec) -> ModelSpec:
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
    latent = LatentAttention(
        num_heads=heads,
        q_lora_rank=None if is_lite else 1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    )
    attention = block.attention if re.search(r"deepseek-?moe", plain.name.lower()) else latent
    experts = block.mlp.replace(shared_ffn_dim=num_shared * block.mlp.ffn_dim, **groups)
    routed = block.replace(attention=attention, mlp=experts)
    dense = block.replace(attention=attention, mlp=DenseMLP(ffn_dim=width))
    blocks = [LayerRun(layer=dense, count=num_dense)]
    if count > num_dense:
        blocks.append(LayerRun(layer=routed, count=count - num_dense))
    return plain.replace(layers=(plain.layers[0], *blocks, plain.layers[-1]))


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
