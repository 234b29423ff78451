"""Typed access to the content of a config.json, and what all families share: heads, windows, rotary embedding, runs.

Every wrong value is a ConfigError that names the field and the value; nothing is repaired. A field that is absent takes
the default of transformers' config class for that model_type (transformers 5.23); the sizes themselves have no default
here, because a shape that was guessed is worse than an error.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import cache
from itertools import groupby
from typing import Annotated, Any, Literal, NoReturn, TypeVar, final

from pydantic import Field, TypeAdapter, ValidationError

from .errors import ConfigError
from .layers import MAX_LAYERS, Activation, Block, Embedding, Head, LayerRun, Rope

MAX_SIZE = 10**9
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
ROPE_SCALINGS: dict[str, Literal["none", "linear", "dynamic", "llama3", "yarn", "longrope"]] = {
    "default": "none",
    "linear": "linear",
    "dynamic": "dynamic",
    "llama3": "llama3",
    "yarn": "yarn",
    "longrope": "longrope",
    "su": "longrope",  # Phi-3's first spelling
}
_STRETCHED = ("llama3", "yarn", "longrope")

_POSITIVE = TypeAdapter(Annotated[float, Field(gt=0, lt=1e300)])
_FRACTION = TypeAdapter(Annotated[float, Field(ge=0, le=1)])
_BOOLEAN = TypeAdapter(bool)


@cache
def _integers(minimum: int, maximum: int) -> TypeAdapter[int]:
    return TypeAdapter(Annotated[int, Field(ge=minimum, le=maximum)])


K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@final
class Fields:
    """Fields of one JSON object; ``prefix`` is where it sits in the file, for messages."""

    def __init__(self, content: Mapping[str, Any], prefix: str = "") -> None:
        self._content = content
        self._prefix = prefix

    def has(self, name: str) -> bool:
        """Return whether the field is present, null included."""
        return name in self._content

    def with_default(self, *names: str, value: object) -> Fields:
        """Return the fields, with ``value`` under the first of ``names`` if none of these is present and not null."""
        if any(self._content.get(name) is not None for name in names):
            return self
        return Fields({**self._content, names[0]: value}, self._prefix)

    def refuse(self, name: str, why: str) -> NoReturn:
        """Raise for the value of ``name``."""
        raise ConfigError(f"{self._prefix}{name} = {shown(self._content.get(name))}: {why}")

    def integer(self, *names: str, default: int | None = None, minimum: int = 1, maximum: int = MAX_SIZE) -> int:
        """Read an integer under the first of ``names`` that is present; required where there is no default."""
        name = next((name for name in names if name in self._content), None)
        if name is not None:
            return int(self._valid(name, _integers(minimum, maximum), f"an integer from {minimum} to {maximum}"))
        if default is None:
            raise ConfigError(f"field `{self._prefix}{names[0]}` is missing")
        return default

    def optional_integer(self, name: str, default: int | None = None, *, minimum: int = 1) -> int | None:
        """Read an integer or null."""
        if not self.has(name):
            return default
        return None if self._content[name] is None else self.integer(name, minimum=minimum)

    def number(self, name: str, default: float) -> float:
        """Read a positive finite number."""
        return float(self._valid(name, _POSITIVE, "a positive number")) if self.has(name) else default

    def optional_number(self, name: str, default: float | None = None) -> float | None:
        """Read a positive finite number or null."""
        if not self.has(name):
            return default
        return None if self._content[name] is None else self.number(name, 1.0)

    def fraction(self, name: str, default: float) -> float:
        """Read a number from 0 to 1; null is the default."""
        is_null = self._content.get(name) is None
        return default if is_null else float(self._valid(name, _FRACTION, "a number from 0 to 1"))

    def boolean(self, name: str, default: bool) -> bool:
        """Read true or false."""
        return bool(self._valid(name, _BOOLEAN, "true or false")) if self.has(name) else default

    def choice(self, name: str, table: Mapping[str, V], default: str) -> V:
        """Return the value of ``table`` at the string under ``name``."""
        value = self._content.get(name, default)
        if not isinstance(value, str) or value not in table:
            self.refuse(name, f"must be one of {', '.join(table)}")
        return table[value]

    def items(self, name: str, kind: type[K]) -> list[K] | None:
        """Read a list of strings or integers; null or absent is None."""
        if self._content.get(name) is None:
            return None
        values: list[K] = self._valid(name, TypeAdapter(list[kind]), f"a list of {kind.__name__}")  # type: ignore[valid-type]
        return values

    def _valid(self, name: str, kind: TypeAdapter[Any], what: str) -> Any:
        try:
            return kind.validate_python(self._content[name], strict=True)
        except ValidationError:
            self.refuse(name, f"must be {what}")

    def section(self, name: str) -> Fields | None:
        """Return the object under ``name``; null or absent is None."""
        value = self._content.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            self.refuse(name, "must be an object")
        return Fields(value, f"{self._prefix}{name}.")

    def __bool__(self) -> bool:
        return bool(self._content)


def heads(
    config: Fields, hidden_dim: int, *, kv_heads: int | None = None, head_dim: int | None = None
) -> dict[str, Any]:
    """Return kind, num_heads, num_kv_heads and head_dim.

    Args:
        kv_heads: default where num_key_value_heads is absent; None (and null in the file) is num_attention_heads.
        head_dim: default where head_dim is absent; None (and null in the file) is hidden_size / num_attention_heads.
    """
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.optional_integer("num_key_value_heads", kv_heads) or num_heads
    width = config.optional_integer("head_dim", head_dim)
    if num_heads % num_kv_heads:
        config.refuse("num_attention_heads", f"must be a multiple of num_key_value_heads, which is {num_kv_heads}")
    if width is None:
        return {**full_heads(config, hidden_dim), "kind": _kind(num_heads, num_kv_heads), "num_kv_heads": num_kv_heads}
    return {
        "kind": _kind(num_heads, num_kv_heads),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": width,
    }


def full_heads(config: Fields, hidden_dim: int, name: str = "num_attention_heads") -> dict[str, Any]:
    """Return as many key/value heads as heads, of hidden_size / num_attention_heads each."""
    num_heads = config.integer(name, "num_attention_heads")
    if hidden_dim % num_heads:
        config.refuse(name, f"must divide the hidden size, {hidden_dim}, where there is no head_dim")
    return {"kind": "mha", "num_heads": num_heads, "num_kv_heads": num_heads, "head_dim": hidden_dim // num_heads}


def _kind(num_heads: int, num_kv_heads: int) -> str:
    return "mha" if num_heads == num_kv_heads else "gqa"


def num_blocks(config: Fields) -> int:
    """Return the number of decoder layers."""
    return config.integer("num_hidden_layers", maximum=MAX_LAYERS)


def activation(config: Fields, name: str = "hidden_act", default: str = "silu") -> Activation:
    """Return the activation in our spelling."""
    return config.choice(name, ACTIVATIONS, default)


def windows(
    config: Fields, window: int | None, rule: Callable[[int], bool], local: str = "sliding_attention"
) -> list[int | None]:
    """Return the attention window of every layer: from ``layer_types``, or ``rule(layer_idx)`` where the file has none."""
    count = num_blocks(config)
    types = config.items("layer_types", str)
    if types is None:
        return [window if rule(idx) else None for idx in range(count)]
    if len(types) != count:
        raise ConfigError(f"layer_types has {len(types)} entries but num_hidden_layers = {count}")
    for idx, kind in enumerate(types):
        if kind not in (local, "full_attention"):
            raise ConfigError(f"layer_types[{idx}] = {shown(kind)}: must be {local} or full_attention")
    return [window if kind == local else None for kind in types]


def runs(keys: Iterable[K], build: Callable[[K], Block]) -> tuple[LayerRun, ...]:
    """Return the run-length list of blocks: one block is built for each distinct key, equal neighbours are joined."""
    built: dict[K, Block] = {}
    joined = []
    for key, group in groupby(keys):
        if key not in built:
            built[key] = build(key)
        joined.append(LayerRun(layer=built[key], count=sum(1 for _ in group)))
    return tuple(joined)


def rope(config: Fields, max_seq_len: int, *, theta: float = 10000.0, theta_name: str = "rope_theta") -> Rope:
    """Read the rotary embedding from ``rope_parameters`` (transformers 5), or ``rope_scaling`` and ``rope_theta`` (before)."""
    scaling = rope_section(config)
    theta = config.number(theta_name, theta)
    if scaling is None:
        return Rope(theta=theta)
    theta = scaling.number("rope_theta", theta)
    kind = scaling.choice("rope_type" if scaling.has("rope_type") else "type", ROPE_SCALINGS, "default")
    if kind == "none":
        return Rope(theta=theta)
    original = scaling.optional_integer("original_max_position_embeddings") or config.optional_integer(
        "original_max_position_embeddings", max_seq_len if kind in _STRETCHED else None
    )
    # transformers, too, takes the ratio of the two lengths where the file names no factor
    stretch = max_seq_len / original if original else 1.0
    return Rope(
        theta=theta,
        scaling=kind,
        factor=scaling.optional_number("factor") or stretch,
        low_freq_factor=scaling.number("low_freq_factor", 1.0),
        high_freq_factor=scaling.number("high_freq_factor", 4.0),
        original_max_seq_len=original,
        **({} if kind != "yarn" else _yarn(scaling)),
    )


def _yarn(scaling: Fields) -> dict[str, Any]:
    names = ("mscale", "mscale_all_dim", "attention_factor")
    given = {name: scaling.optional_number(name) for name in names}
    betas = {"beta_fast": scaling.number("beta_fast", 32.0), "beta_slow": scaling.number("beta_slow", 1.0)}
    return {**given, **betas, "truncate": scaling.boolean("truncate", True)}


def rope_section(config: Fields) -> Fields | None:
    """Return the object with the rotary settings; of settings for each layer type the one of full attention."""
    section = config.section("rope_scaling") or config.section("rope_parameters")
    if section and section.has("full_attention"):
        return section.section("full_attention")
    return section or None


def rotary_fraction(config: Fields, default: float = 1.0, name: str = "partial_rotary_factor") -> float:
    """Return the part of each head that is rotated."""
    section = rope_section(config)
    outer = config.fraction(name, default)
    return section.fraction("partial_rotary_factor", outer) if section else outer


def rms_model(
    config: Fields,
    blocks: tuple[LayerRun, ...],
    *,
    max_seq_len: int,
    norm_eps: float = 1e-6,
    tied: bool = False,
    theta: float = 10000.0,
) -> dict[str, Any]:
    """Return the fields of a model with RMSNorm and rotary embedding; the keyword arguments are the config class's defaults."""
    max_seq_len = config.integer("max_position_embeddings", default=max_seq_len)
    tied = config.boolean("tie_word_embeddings", tied)
    vocab_size = config.integer("vocab_size")
    return {
        "hidden_dim": config.integer("hidden_size"),
        "layers": (
            LayerRun(layer=Embedding(vocab_size=vocab_size)),
            *blocks,
            LayerRun(layer=Head(vocab_size=vocab_size, tied=tied)),
        ),
        "tie_embeddings": tied,
        "max_seq_len": max_seq_len,
        "norm_eps": config.number("rms_norm_eps", norm_eps),
        "rope": rope(config, max_seq_len, theta=theta),
    }


def shown(value: object) -> str:
    """Show a value in a message: short, and safe for integers that Python refuses to print."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    if value is None or isinstance(value, bool | int | float | str):
        text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
        return text if len(text) <= 60 else text[:57] + "..."
    return f"a {type(value).__name__}"
