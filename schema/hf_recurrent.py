"""config.json of models whose layers keep a state in place of keys and values: which layers, and what kind of mixer they have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import Field

from .base import Frozen, shown
from .errors import ConfigError
from .recurrences import GatedRecurrence, LinearAttention, Recurrence, SelectiveScan, ShortConvolution

STATE_TYPES = ("linear_attention", "mamba", "conv", "recurrent")
"""What published lists of layer types call a layer with a state."""

ATTENTION_TYPES = ("full_attention", "attention", "sliding_attention", "chunked_attention")

MIXERS: dict[str, type[Recurrence]] = {
    "linear": LinearAttention,
    "selective_scan": SelectiveScan,
    "short_convolution": ShortConvolution,
    "gated_recurrence": GatedRecurrence,
}


class StateRule(Frozen):
    """The table ``state`` of a family in catalogue/families.toml.

    Attributes:
        mixer: its kind and the fields that the family's code fixes.
        fields: of the mixer -> where the file has it, names separated by |; ``a.b`` is field b of the object a.
        defaults: of those that may be absent or null, by the first of those names.
        where: which layers have a state where the file does not list them (`WHERE`).
    """

    mixer: dict[str, Any]
    fields: dict[str, str] = Field(default_factory=dict)
    defaults: dict[str, Any] = Field(default_factory=dict)
    where: str = "all"

    def look_up(self, content: Mapping[str, Any], names: str) -> Any:
        """Return the first of ``names`` that the file has, else the default, else None."""
        for name in names.split("|"):
            part, _, field = name.rpartition(".")
            within = content.get(part) if part else content
            if isinstance(within, Mapping) and within.get(field) is not None:
                return within[field]
        return self.defaults.get(names.partition("|")[0])


Where = Callable[[Callable[[str], Any], int], bool]


def _integers(value: Any, name: str) -> Sequence[int]:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise ConfigError(f"{name} = {shown(value)}: must be a list of integers")
    return value


def _positive(value: Any, name: str) -> int:
    if type(value) is not int or value < 1:
        raise ConfigError(f"{name} = {shown(value)}: must be a positive integer")
    return value


def _in_cycle(find: Callable[[str], Any], idx: int) -> bool:
    types = find("block_types")
    if not isinstance(types, list) or not types:
        raise ConfigError(f"block_types = {shown(types)}: must be a list of layer types")
    return types[idx % len(types)] == "recurrent"


WHERE: dict[str, Where] = {
    "all": lambda find, idx: True,
    "every_other": lambda find, idx: idx % 2 == 1,
    "but_every_nth": lambda find, idx: (
        (idx + 1) % _positive(find("full_attention_interval"), "full_attention_interval") != 0
    ),
    "but_one_of_a_period": lambda find, idx: (
        idx % _positive(find("attn_layer_period"), "attn_layer_period") != find("attn_layer_offset")
    ),
    "but_listed": lambda find, idx: (
        idx not in _integers(find("attn_layer_indices|full_attn_idxs") or [], "attn_layer_indices")
    ),
    "listed_from_one": lambda find, idx: (
        idx + 1 in _integers(find("linear_attn_config.kda_layers") or [], "linear_attn_config.kda_layers")
    ),
    "in_cycle": _in_cycle,
}


def without_states(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content with its layers with a state listed as ones that see all tokens, which is what else they are."""
    types = content.get("layer_types")
    if not isinstance(types, list):
        return dict(content)
    plain = ["full_attention" if kind in (*STATE_TYPES, "attention") else kind for kind in types]
    return {**content, "layer_types": plain}


def state_mixers(
    rule: StateRule, content: Mapping[str, Any], num_layers: int, hidden_dim: int, num_heads: int
) -> list[Recurrence | None]:
    """Return the mixer of each layer that has a state, None for attention.

    Raises:
        ConfigError: a field is missing or wrong, or the list of layers has another length.
    """

    def find(names: str) -> Any:
        return rule.look_up(content, names)

    types = content.get("layer_types")
    if isinstance(types, list):
        if len(types) != num_layers:
            raise ConfigError(f"layer_types has {len(types)} entries but num_hidden_layers = {num_layers}")
        odd = next((idx for idx, kind in enumerate(types) if kind not in (*STATE_TYPES, *ATTENTION_TYPES)), None)
        if odd is not None:
            known = ", ".join((*STATE_TYPES, *ATTENTION_TYPES))
            raise ConfigError(f"layer_types.{odd} = {shown(types[odd])}: must be one of {known}")
        has_state = [kind in STATE_TYPES for kind in types]
    else:
        has_state = [WHERE[rule.where](find, idx) for idx in range(num_layers)]
    if not any(has_state):
        return [None] * num_layers
    mixer = _mixer(rule, find, hidden_dim, num_heads)
    return [mixer if is_state else None for is_state in has_state]


def _mixer(rule: StateRule, find: Callable[[str], Any], hidden_dim: int, num_heads: int) -> Recurrence:
    fields = {**rule.mixer, **{ours: find(names) for ours, names in rule.fields.items()}}
    kind, expand = fields["kind"], fields.pop("expand", None)
    if kind == "linear":
        for name in ("key_dim", "value_dim"):  # as wide as a head of attention; Mamba's "auto"
            if fields.get(name) in (None, "auto"):
                inner = hidden_dim if expand is None else _positive(expand, "expand") * hidden_dim
                fields[name] = inner // _positive(fields["num_heads"], "num_heads")
        fields.setdefault("num_key_heads", fields["num_heads"])
    elif kind == "selective_scan":
        fields["channels"] = fields.get("channels") or _positive(expand, "expand") * hidden_dim
        if fields.get("step_rank") == "auto":
            fields["step_rank"] = -(-hidden_dim // 16)
    elif kind == "short_convolution":
        fields["channels"] = hidden_dim
    elif kind == "gated_recurrence":
        fields |= {"num_heads": num_heads, "head_dim": (fields.pop("channels") or hidden_dim) // num_heads}
    missing = next((names for ours, names in rule.fields.items() if fields.get(ours, 0) is None), None)
    if missing is not None:
        raise ConfigError(f"field `{missing.partition('|')[0]}` is missing")
    return MIXERS[kind](**fields)


def _lfm2_width(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content with LFM2's feed-forward width: two thirds, times a factor, up to a multiple (Lfm2MLP)."""
    width = content.get("block_ff_dim", content.get("intermediate_size"))
    if not content.get("block_auto_adjust_ff_dim", True) or type(width) is not int:
        return dict(content)
    multiple = _positive(content.get("block_multiple_of", 256), "block_multiple_of")
    factor = content.get("block_ffn_dim_multiplier", 1.0)
    if type(factor) not in (int, float) or not 0 < factor < 1e6:
        raise ConfigError(f"block_ffn_dim_multiplier = {shown(factor)}: must be a positive number")
    scaled = int(factor * (2 * width // 3))
    return {**content, "intermediate_size": multiple * -(-scaled // multiple)}


def _half_width(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content with the width of one of the two halves that RecurrentGemma's intermediate_size counts."""
    width = content.get("intermediate_size")
    return {**content, "intermediate_size": width // 2} if type(width) is int else dict(content)


ADJUST: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {"lfm2": _lfm2_width, "half_width": _half_width}
"""How a family's code changes sizes of its config before it uses them."""
