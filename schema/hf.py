"""Hugging Face ``config.json`` -> fields of ModelSpec, for the families of published decoder models.

`PublishedConfig` has every field that some family reads. catalogue/families.toml says which, with the defaults of transformers'
config class for that model_type and what the family's code fixes. The sizes have no defaults, because a shape that was guessed is
worse than an error. Biases, norms and windows are those of transformers' ``modeling_<model_type>.py``, with whose models
tests/unit/schema/test_hf.py compares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from itertools import groupby
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    field_validator,
    model_validator,
)

from .base import Frozen, located, shown
from .catalogue import family_entries, find_family
from .errors import ConfigError
from .hf_recurrent import ADJUST, StateRule, state_mixers, without_states
from .layers import (
    Block,
    DenseMLP,
    Embedding,
    Head,
    LatentAttention,
    LayerRun,
    MoE,
    SoftmaxAttention,
)
from .limits import MAX_LAYERS
from .recurrences import Recurrence
from .rope import Fraction, Positive, Rope, RopeSettings, Size

SizeOrZero = Annotated[int, Field(strict=True, ge=0, le=10**9)]

_OUR_ACTIVATIONS = {"swish": "silu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
ActivationName = Annotated[
    Literal["silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2", "xielu"],
    AfterValidator(lambda name: _OUR_ACTIVATIONS.get(name, name)),
]


_OUR_LAYER_TYPES = {"global": "full_attention", "local": "sliding_attention"}
LayerType = Annotated[
    Literal["sliding_attention", "chunked_attention", "full_attention"],
    BeforeValidator(lambda name: _OUR_LAYER_TYPES.get(name, name) if isinstance(name, str) else name),
]
SameForAll = Annotated[
    Size,
    BeforeValidator(lambda value: value[0] if isinstance(value, list) and len({*map(repr, value)}) == 1 else value),
]
"""A size, or a list that repeats one for each layer (Hunyuan)."""


def _under(*names: str, default: Any = ...) -> Any:
    """Return a field that stands in the file under the first of ``names`` that is present."""
    return Field(default, validation_alias=AliasChoices(*names))


class PublishedConfig(Frozen):
    """The fields of a config.json that some family reads."""

    model_config = ConfigDict(extra="ignore")

    vocab_size: Size
    hidden_size: Size = _under("n_embd", "hidden_size")
    num_hidden_layers: Annotated[Size, Field(le=MAX_LAYERS)] = _under("n_layer", "num_hidden_layers")
    max_position_embeddings: Size = _under("n_positions", "max_position_embeddings", default=2048)
    tie_word_embeddings: StrictBool = False
    norm_eps: Positive = _under("layer_norm_epsilon", "layer_norm_eps", "norm_eps", "rms_norm_eps", default=1e-6)
    use_parallel_residual: StrictBool = False

    rope_theta: Positive = _under("rotary_emb_base", "rope_theta", default=10000.0)
    rope_scaling: RopeSettings | None = None
    rope_parameters: RopeSettings | None = None
    original_max_position_embeddings: Size | None = None
    partial_rotary_factor: Fraction | None = _under("rotary_pct", "partial_rotary_factor", default=None)
    rotary_dim: Size | None = None

    num_attention_heads: Size = _under("n_head", "num_attention_heads")
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    attention_bias: StrictBool = _under("attention_bias", "enable_bias", default=False)
    qkv_bias: StrictBool | None = None
    out_bias: StrictBool | None = None
    multi_query: StrictBool = False
    attn_logit_softcapping: Positive | None = None
    use_qk_norm: StrictBool = False
    norms_each_head: StrictBool = False
    norms_each_head_with_bias: StrictBool = False
    norms_all_heads: StrictBool = False
    no_rope_layers: list[StrictInt] | None = None
    no_rope_layer_interval: Size | None = None
    kv_lora_rank: Size | None = None
    q_lora_rank: Size | None = None
    qk_nope_head_dim: Size | None = None
    qk_rope_head_dim: Size | None = None
    v_head_dim: Size | None = None
    index_n_heads: SizeOrZero = 0
    index_head_dim: SizeOrZero = 0
    index_topk: SizeOrZero = 0

    layer_types: list[LayerType] | None = None
    use_sliding_window: StrictBool = True
    max_window_layers: SizeOrZero = 0
    sliding_window: Size | None = None
    sliding_window_pattern: Size = _under("sliding_window_pattern", "_sliding_window_pattern", default=1)
    attention_chunk_size: Size | None = None

    intermediate_size: Size | None = _under(
        "ffn_dim", "n_inner", "intermediate_size_mlp", "intermediate_size", default=None
    )
    hidden_act: ActivationName = _under("activation_function", "hidden_activation", "hidden_act", default="silu")
    mlp_bias: StrictBool = _under("mlp_bias", "enable_bias", default=False)
    ffn_ratio: Size | None = None
    num_experts: SameForAll | None = _under("n_routed_experts", "num_experts", "num_local_experts", default=None)
    num_experts_per_tok: SameForAll | None = None
    moe_intermediate_size: Size | None = _under("moe_intermediate_size", "intermediate_size", default=None)
    shared_expert_intermediate_size: SizeOrZero | None = None
    n_shared_experts: SizeOrZero | None = None
    norm_topk_prob: StrictBool = True
    routed_scaling_factor: Positive = 1.0
    n_group: Size | None = None
    topk_group: Size | None = None
    first_k_dense_replace: SizeOrZero = 0
    decoder_sparse_step: Size = _under("interleave_moe_layer_step", "decoder_sparse_step", default=1)
    mlp_only_layers: list[StrictInt] | None = None
    moe_layers: list[StrictInt] | None = None
    expert_layer_period: Size | None = None
    expert_layer_offset: SizeOrZero = 0
    mlp_layer_types: list[Literal["dense", "sparse"]] | None = None
    moe_layer_end_index: StrictInt | None = None
    lm_head_bias: StrictBool = False
    use_post_norm: StrictBool = False
    new_decoder_architecture: StrictBool = False
    num_ln_in_parallel_attn: Size | None = None
    word_embed_proj_dim: Size | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_unused_window(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Files that do not use it hold 0 or a length that means nothing."""
        return {**data, "sliding_window": None} if data.get("use_sliding_window") is False else data

    @field_validator("rope_scaling", "rope_parameters", mode="before")
    @classmethod
    def _take_full_attention(cls, value: Any) -> Any:
        """Take the settings of full attention, where each layer type has its own; an empty object is the same as none."""
        return (value.get("full_attention", value) or None) if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        count, types, listed = self.num_hidden_layers, self.layer_types, self.no_rope_layers
        if types is not None and len(types) != count:
            raise ValueError(f"layer_types has {len(types)} entries but num_hidden_layers = {count}")
        if self.mlp_layer_types is not None and len(self.mlp_layer_types) != count:
            raise ValueError(f"mlp_layer_types has {len(self.mlp_layer_types)} entries but num_hidden_layers = {count}")
        if listed and len(listed) < count:
            raise ValueError(f"no_rope_layers has {len(listed)} entries but num_hidden_layers = {count}")
        if self.word_embed_proj_dim not in (None, self.hidden_size):
            raise ValueError(
                f"word_embed_proj_dim = {self.word_embed_proj_dim}: it must be hidden_size, {self.hidden_size}"
            )
        if self.head_dim is None and self.kv_lora_rank is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"num_attention_heads = {self.num_attention_heads} must divide hidden_size = {self.hidden_size}, where there is no "
                "head_dim"
            )
        return self

    def rotates(self, idx: int) -> bool:
        """Return whether a layer rotates queries and keys; an empty no_rope_layers (as published) is the same as none."""
        if self.no_rope_layers:
            return self.no_rope_layers[idx] != 0
        return self.no_rope_layer_interval is None or (idx + 1) % self.no_rope_layer_interval != 0

    def is_sparse(self, idx: int) -> bool:
        """Return whether a layer routes to experts."""
        if self.num_experts is not None and self.mlp_layer_types is not None:
            return self.mlp_layer_types[idx] == "sparse"
        if self.expert_layer_period is not None and (self.num_experts or 0) > 1:
            return idx % self.expert_layer_period == self.expert_layer_offset
        if self.expert_layer_period is not None:
            return False
        if self.moe_layer_end_index is not None and 0 <= self.moe_layer_end_index < idx:
            return False
        if self.num_experts is None or idx < self.first_k_dense_replace or idx in (self.mlp_only_layers or ()):
            return False
        return (idx + 1) % self.decoder_sparse_step == 0 if self.moe_layers is None else idx in self.moe_layers

    @property
    def qk_norm(self) -> str:
        """Norm of queries and keys by the switch that the family has."""
        by_switch = {
            "weightless": self.use_qk_norm,
            "per_head": self.norms_each_head,
            "per_head_bias": self.norms_each_head_with_bias,
            "full": self.norms_all_heads,
        }
        return next((kind for kind, is_on in by_switch.items() if is_on), "none")

    @property
    def rope_settings(self) -> RopeSettings:
        """Rotary embedding as the file states it."""
        return self.rope_scaling or self.rope_parameters or RopeSettings()

    @property
    def rope_fraction(self) -> float:
        """Part of each head that is rotated."""
        if self.rotary_dim is not None:
            return min(1.0, self.rotary_dim / (self.head_dim or self.hidden_size // self.num_attention_heads))
        stated = (self.rope_settings.partial_rotary_factor, self.partial_rotary_factor)
        return next((fraction for fraction in stated if fraction is not None), 1.0)

    def rope(self) -> Rope:
        """Return the rotary embedding."""
        settings = self.rope_settings
        theta, kind = settings.rope_theta or self.rope_theta, settings.rope_type
        if kind == "default":
            return Rope(theta=theta)
        length = None if kind in ("linear", "dynamic") else self.max_position_embeddings
        original = settings.original_max_position_embeddings or self.original_max_position_embeddings or length
        numbers = {"low_freq_factor", "high_freq_factor"}
        if kind == "yarn":
            numbers |= {"mscale", "mscale_all_dim", "attention_factor", "beta_fast", "beta_slow", "truncate"}
        return Rope(
            theta=theta,
            scaling="longrope" if kind == "su" else kind,  # Phi-3's first spelling
            # transformers, too, takes the ratio of the two lengths where the file names no factor
            factor=settings.factor or (self.max_position_embeddings / original if original else 1.0),
            original_max_seq_len=original,
            **settings.model_dump(include=numbers),
        )


def _even(config: PublishedConfig, idx: int) -> bool:
    return idx % 2 == 0


SLIDES: dict[str, Callable[[PublishedConfig, int], bool]] = {
    "all": lambda config, idx: True,
    "even": _even,
    "from_max_window_layers": lambda config, idx: idx >= config.max_window_layers,
    "even_before_max_window_layers": lambda config, idx: _even(config, idx) and idx < config.max_window_layers,
    "rotated": PublishedConfig.rotates,
    "but_every_nth": lambda config, idx: (idx + 1) % config.sliding_window_pattern != 0,
    "but_first_of_four": lambda config, idx: idx % 4 != 0,
    "odd": lambda config, idx: idx % 2 == 1,
}
"""Which layers have the window, where the file does not list them."""

COMMON = (
    "num_key_value_heads", "head_dim", "intermediate_size", "hidden_act", "max_position_embeddings", "tie_word_embeddings",
    "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings",
)  # fmt: skip
"""Fields that every family reads, where they are there."""


class Family(Frozen):
    """A model_type of catalogue/families.toml, which explains the fields."""

    architecture: str
    defaults: dict[str, Any] = Field(default_factory=dict)
    reads: tuple[str, ...] = ()
    base_sizes: tuple[str, ...] = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    sizes: tuple[str, ...] = ("intermediate_size",)
    slides: str = "all"
    attention: dict[str, Any] = Field(default_factory=dict)
    mlp: dict[str, Any] = Field(default_factory=dict)
    moe: dict[str, Any] = Field(default_factory=dict)
    block: dict[str, Any] = Field(default_factory=dict)
    norm: dict[str, Any] = Field(default_factory=dict)
    ffn_ratio: int = 0
    extra_positions: int | None = None
    refuses: dict[str, str] = Field(default_factory=dict)
    text_model: str | None = None
    state: StateRule | None = None
    adjust: str | None = None
    names: dict[str, str] = Field(default_factory=dict)
    embedding: dict[str, Any] = Field(default_factory=dict)
    head: dict[str, Any] = Field(default_factory=dict)
    rotates: Literal["as_listed", "sliding"] = "as_listed"
    fixed_positions: bool = False
    parallel_norms: int = 2
    also: tuple[str, ...] = ()

    def read(self, content: Mapping[str, Any]) -> PublishedConfig:
        """Read the content of a config.json.

        Raises:
            ConfigError: a size is missing, a value is wrong or not supported.
        """
        content = content if self.adjust is None else ADJUST[self.adjust](content)
        content, named = self._in_our_names(content), {ours: theirs for theirs, ours in self.names.items()}
        for name, why in self.refuses.items():
            if name in content and content[name] != self.defaults.get(name):
                raise ConfigError(f"{name} = {shown(content[name])}: {why}")
        optional = (name for name in (*COMMON, *self.defaults, *self.reads) if name in content)
        fields = self.defaults | {name: content[name] for name in optional}
        for names in (size.split("|") for size in (*self.base_sizes, *self.sizes)):
            present = next((name for name in names if name in content), None)
            if present is None:
                raise ConfigError(f"field `{named.get(names[0], names[0])}` is missing")
            fields[present] = content[present]
        return PublishedConfig(**fields)

    def _in_our_names(self, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the content with fields that this family alone names otherwise; ``a.b`` is field b of the object a."""
        renamed = dict(content)
        for theirs, ours in self.names.items():
            part, _, name = theirs.rpartition(".")
            within = content.get(part) if part else content
            if isinstance(within, Mapping) and name in within:
                renamed[ours] = within[name]
        return renamed

    def spec_fields(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of ModelSpec, but name, architecture and source, that the content of a config.json says."""
        config = self.read(content if self.state is None else without_states(content))
        count = config.num_hidden_layers
        mixers: list[Recurrence | None] = [None] * count
        if self.state is not None:
            mixers = state_mixers(self.state, content, count, config.hidden_size, config.num_attention_heads)
        block = cache(lambda *key: self._block(config, *key))
        keys = groupby(
            (self._window(config, idx), config.is_sparse(idx), self._rotates(config, idx), mixer)
            for idx, mixer in enumerate(mixers)
        )
        length, vocab, is_rotary = config.max_position_embeddings, config.vocab_size, self.extra_positions is None
        head = {"bias": config.lm_head_bias, **self.norm, **self.head}
        num_positions = 0 if self.extra_positions is None else length + self.extra_positions
        layers = (
            LayerRun(layer=Embedding(vocab_size=vocab, num_positions=num_positions, **self.embedding)),
            *(LayerRun(layer=block(*key), count=len(list(group))) for key, group in keys),
            LayerRun(layer=Head(vocab_size=vocab, tied=config.tie_word_embeddings, **head)),
        )
        return {
            "hidden_dim": config.hidden_size,
            "layers": layers,
            "tie_embeddings": config.tie_word_embeddings,
            "max_seq_len": length,
            "norm_eps": config.norm_eps,
            "rope": config.rope() if is_rotary and not self.fixed_positions else None,
            "also": self.also,
        }

    def _rotates(self, config: PublishedConfig, idx: int) -> bool:
        if self.rotates == "sliding" and config.sliding_window is not None:
            return self._window(config, idx) is not None
        return not self.fixed_positions and config.rotates(idx)

    def _window(self, config: PublishedConfig, idx: int) -> int | None:
        types = config.layer_types
        slides = types[idx] != "full_attention" if types else SLIDES[self.slides](config, idx)
        return (config.attention_chunk_size or config.sliding_window) if slides else None

    def _block(
        self, config: PublishedConfig, window: int | None, is_sparse: bool, rotates: bool, mixer: Recurrence | None
    ) -> Block:
        attention: Any = mixer
        if mixer is None:
            attention = self._latent(config) if config.kv_lora_rank else self._softmax(config, window, rotates)
        is_parallel = config.use_parallel_residual or self.block.get("parallel_residual", False)
        num_norms = self.parallel_norms if is_parallel else 2
        if config.new_decoder_architecture:
            num_norms = config.num_ln_in_parallel_attn or 2
        fields = {"parallel_residual": is_parallel, "num_norms": 4 if config.use_post_norm else num_norms}
        return Block(
            attention=attention,
            mlp=self._moe(config) if is_sparse else self._dense(config),
            **{**fields, **self.block, **self.norm},
        )

    def _softmax(self, config: PublishedConfig, window: int | None, rotates: bool) -> SoftmaxAttention:
        num_kv_heads = config.num_key_value_heads or config.num_attention_heads
        if config.multi_query and not config.new_decoder_architecture:
            num_kv_heads = 1
        fields = {
            "kind": "mha" if num_kv_heads == config.num_attention_heads else "gqa",
            "num_heads": config.num_attention_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": config.head_dim or config.hidden_size // config.num_attention_heads,
            "window": window,
            "chunked": window is not None and config.attention_chunk_size is not None,
            "qkv_bias": config.attention_bias if config.qkv_bias is None else config.qkv_bias,
            "out_bias": config.attention_bias if config.out_bias is None else config.out_bias,
            "qk_norm": config.qk_norm if rotates or not config.use_qk_norm else "none",
            "rope_fraction": config.rope_fraction if rotates else 0.0,
            "logit_softcap": config.attn_logit_softcapping,
        }
        return SoftmaxAttention(**{**fields, **self.attention})

    def _latent(self, config: PublishedConfig) -> LatentAttention:
        ranks = {"q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"}
        fields = config.model_dump(include=ranks)
        return LatentAttention(
            num_heads=config.num_attention_heads, bias=config.attention_bias, index_heads=config.index_n_heads,
            index_dim=config.index_head_dim, index_top_k=config.index_topk, **fields,
        )  # fmt: skip

    def _dense(self, config: PublishedConfig) -> DenseMLP:
        width = config.intermediate_size or (config.ffn_ratio or self.ffn_ratio) * config.hidden_size
        if not width and self.mlp.get("ffn_dim") != 0:
            raise ConfigError("field `intermediate_size` is missing")
        return DenseMLP(**{"ffn_dim": width, "activation": config.hidden_act, "bias": config.mlp_bias, **self.mlp})

    def _moe(self, config: PublishedConfig) -> MoE:
        width = config.moe_intermediate_size
        fields = {
            "num_experts": config.num_experts,
            "top_k": config.num_experts_per_tok,
            "ffn_dim": width,
            "shared_ffn_dim": config.shared_expert_intermediate_size or (config.n_shared_experts or 0) * (width or 0),
            "normalize": config.norm_topk_prob,
            "scale": config.routed_scaling_factor,
            "num_groups": config.n_group or 1,
            "top_groups": config.topk_group or 1,
            "activation": config.hidden_act,
        }
        return MoE(**{**fields, **self.moe})


@cache
def families() -> dict[str, Family]:
    """Return the supported families by model_type."""
    return {model_type: Family(**entry) for model_type, entry in family_entries().items()}


def fields_from_hf(content: Any, where: str) -> tuple[str, dict[str, Any]]:
    """Read the architecture and the fields of a ModelSpec, without vision and audio parts and multi-token-prediction modules.

    Raises:
        ConfigError: the content lacks a field, or is of an architecture that is not supported.
    """
    if not isinstance(content, Mapping):
        raise ConfigError(f"{where} is not a model's config.json: it holds a {type(content).__name__}, not an object")
    with located(where):
        family = families()[find_family(content)]
        if family.text_model is not None:
            family, content = families()[family.text_model], content.get("text_config")
            if not isinstance(content, Mapping):
                raise ConfigError(f"field `text_config` is {shown(content)}, not an object")
        return family.architecture, family.spec_fields(content)
