"""Which linear layers of a user's module tensor parallelism splits, and how.

| rule        | weight [out, in]         | input                     | output                |
|-------------|--------------------------|---------------------------|-----------------------|
| by_output   | rows over tp             | full                      | this rank's part      |
| by_input    | columns over tp          | this rank's part          | sum over ranks        |
| gathered    | rows over tp             | full                      | gathered: full        |
| by_slice    | columns over tp          | full, of which it takes   | sum over ranks        |
| heads_norm  | unsharded on every rank  | this rank's heads         | this rank's heads     |

A model of transformers states its rules itself (`base_model_tp_plan`). For any other module they are derived.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from ...schema.errors import RuntimeMismatchError

Rule = Literal["by_output", "by_input", "gathered", "by_slice", "heads_norm"]

_OF_STYLE: dict[str, Rule] = {
    "colwise": "by_output",
    "rowwise": "by_input",
    "colwise_gather_output": "gathered",
    "rowwise_split_input": "by_slice",
    "replicated_with_grad_allreduce": "heads_norm",
}

_QUERY = ("q_proj", "query", "wq", "to_q", "q_lin", "q", "query_proj", "q_linear")
_KEY = ("k_proj", "key", "wk", "to_k", "k_lin", "k", "key_proj", "k_linear")
_VALUE = ("v_proj", "value", "wv", "to_v", "v_lin", "v", "value_proj", "v_linear")
_OUT = ("o_proj", "out_proj", "wo", "to_out", "out_lin", "o", "out", "dense", "proj", "c_proj", "out_linear")

_ELEMENTWISE = (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.Mish, nn.Identity,
                nn.Dropout, nn.Softplus, nn.Hardswish)  # fmt: skip

HEAD_COUNTS = (
    "num_heads", "n_heads", "n_head", "nhead", "num_attention_heads", "num_kv_heads", "n_kv_heads", "num_key_value_heads",
)  # fmt: skip
"""Attributes of an attention module that count its heads; each rank has its part of them."""


@dataclass(frozen=True)
class Region:
    """Layers in the module ``parent`` that are split together, with the rule of each path; attention is split by heads."""

    parent: str
    rules: Mapping[str, Rule]
    is_attention: bool = False


def transformers_rules(model: Any) -> dict[str, Rule]:
    """Return the rules by path, from the model's own plan; none where it has none."""
    prefix = model.base_model_prefix
    inner = getattr(model.config, "base_model_tp_plan", None) or {}
    listed = {f"{prefix}.{name}" if hasattr(model, prefix) else name: style for name, style in inner.items()}
    patterns = {re.compile(name.replace(".", r"\.").replace("*", r"\d+")): style for name, style in listed.items()}
    rules: dict[str, Rule] = {}
    for path, _ in model.named_modules():
        style = next((style for pattern, style in patterns.items() if pattern.fullmatch(path)), None)
        if style is None:
            continue
        if style not in _OF_STYLE:
            raise RuntimeMismatchError(
                f"{type(model).__name__}: {path} is split as {style!r}, which only the plan's own model is",
                help="use parallelize(None, plan, weights=...), or plan with --fix tp=1",
            )
        rules[path] = _OF_STYLE[style]
    return rules


def checked_rules(model: Any) -> dict[str, Rule]:
    """Return the rules by path of a model whose own plan this version can execute.

    Raises:
        RuntimeMismatchError: it has none, splits something else than linear layers, or a part of a module only.
    """
    rules, name = transformers_rules(model), type(model).__name__
    if not rules:
        raise RuntimeMismatchError(
            f"{name} has no base_model_tp_plan, so tensor parallelism cannot split it"
            + (" (its c_attn makes queries, keys and values in one product)" if "GPT2" in name else ""),
            help="use parallelize(None, plan, weights=...) for the plan's own model, or plan with --fix tp=1",
        )
    for parent in sorted({path.rpartition(".")[0] for path in rules}):
        inside = {path: rule for path, rule in rules.items() if path.rpartition(".")[0] == parent}
        _require_all(model, parent, inside)
        for path, rule in inside.items():
            layer = model.get_submodule(path)
            if rule != "heads_norm" and not isinstance(layer, nn.Linear):
                raise RuntimeMismatchError(
                    f"{path} of {name} is a {type(layer).__name__}, of which no split is known: a Linear is split",
                    help="plan with --fix tp=1",
                )
    return rules


def derived_regions(module: nn.Module) -> list[Region]:
    """Return the regions of a plain module, outermost first.

    A module with projections of queries, keys, values and outputs is split by heads. Of the other linear layers in a row, one or
    several from D to F followed by one from F back are split along F, if there is nothing but element-wise modules between them.
    """
    regions = []
    for path, parent in module.named_modules():
        children = dict(parent.named_children())
        attention = _attention_of({name: child for name, child in children.items() if type(child) is nn.Linear})
        runs = _pairs({name: child for name, child in children.items() if name not in attention})
        for names in [list(attention), *runs] if attention else runs:
            *first, last = [f"{path}.{name}" if path else name for name in names]
            rules: dict[str, Rule] = {**dict.fromkeys(first, "by_output"), last: "by_input"}
            regions.append(Region(path, rules, is_attention=names == [*attention]))
    return regions


def _attention_of(linears: Mapping[str, nn.Linear]) -> tuple[str, ...]:
    """Return the names of the projections of queries, keys, values and outputs; none where one is missing."""
    projections = [next((name for name in given if name in linears), "") for given in (_QUERY, _KEY, _VALUE, _OUT)]
    is_attention = all(projections) and linears[projections[0]].out_features == linears[projections[3]].in_features
    return tuple(projections) if is_attention else ()


def _pairs(children: Mapping[str, nn.Module]) -> list[list[str]]:
    """Return runs of linear layers D to F with one from F to D behind them."""
    pairs, run, first = [], list[str](), None
    for name, child in children.items():
        if type(child) is not nn.Linear:
            run = run if isinstance(child, _ELEMENTWISE) else []
        elif run and first and (child.in_features, child.out_features) == (first.out_features, first.in_features):
            pairs.append([*run, name])
            run = []
        elif run and first and (child.in_features, child.out_features) == (first.in_features, first.out_features):
            run.append(name)
        else:
            run, first = [name], child
    return pairs


def _require_all(model: nn.Module, parent: str, inside: Mapping[str, Rule]) -> None:
    """Require a rule for every parameter of a region: the gradient of its input is summed over ranks."""
    named = {name.rpartition(".")[0] for name, _ in model.get_submodule(parent).named_parameters()}
    without = sorted(name for name in named if f"{parent}.{name}" not in inside)
    if without:
        raise RuntimeMismatchError(
            f"{type(model).__name__}: base_model_tp_plan splits a part of {parent} but not {', '.join(without)}",
            help="plan with --fix tp=1",
        )
