"""Which linear layers of a module tensor parallelism splits, and how.

| rule        | weight [out, in]      | input                      | output                                  |
|-------------|-----------------------|----------------------------|-----------------------------------------|
| by_output   | rows over tp          | whole                      | this rank's part                        |
| by_input    | columns over tp       | this rank's part           | sum over ranks                          |
| gathered    | rows over tp          | whole                      | gathered: whole                         |
| by_slice    | columns over tp       | whole, of which it takes   | sum over ranks                          |
| heads_norm  | whole on every rank   | this rank's heads          | this rank's heads                       |

A model of transformers says so itself (`base_model_tp_plan`). For any other module it is derived: a module with projections of
queries, keys, values and outputs is split by heads; of the other linear layers that stand side by side, one or several from D to F
followed by one from F back are split along F, if nothing but element-wise modules and dropout stands between them. What a module's
own forward does between them is not seen: `foreign/tensor.py` tries each on random input.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
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
    """Layers that are split together.

    Attributes:
        parent: path of the module they stand in.
        rules: by path.
        is_attention: split by heads.
    """

    parent: str
    rules: Mapping[str, Rule]
    is_attention: bool = False


def transformers_rules(model: Any) -> dict[str, Rule]:
    """By path, from the model's own plan; empty where it has none.

    Raises:
        RuntimeMismatchError: the plan has a style that is not known here.
    """
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


def derived_regions(module: nn.Module) -> list[Region]:
    """Regions of a plain module, outermost first."""
    return [region for path, parent in module.named_modules() for region in _regions_in(path, parent)]


def _regions_in(path: str, parent: nn.Module) -> Iterator[Region]:
    children = dict(parent.named_children())
    linears = {name: child for name, child in children.items() if type(child) is nn.Linear}
    attention = _attention_of(linears)
    if attention:
        rules: dict[str, Rule] = {_joined(path, name): "by_output" for name in attention[:3]}
        yield Region(path, {**rules, _joined(path, attention[3]): "by_input"}, is_attention=True)
    rest = [name for name in children if name not in attention]
    for group in _pairs(rest, children):
        rules = {_joined(path, name): "by_output" for name in group[:-1]}
        yield Region(path, {**rules, _joined(path, group[-1]): "by_input"})


def _attention_of(linears: Mapping[str, nn.Linear]) -> tuple[str, ...]:
    """Names of the projections of queries, keys, values and outputs; empty where one is missing."""
    found = [next((name for name in names if name in linears), None) for names in (_QUERY, _KEY, _VALUE, _OUT)]
    if any(name is None for name in found):
        return ()
    names = tuple(str(name) for name in found)
    return names if linears[names[0]].out_features == linears[names[3]].in_features else ()


def _pairs(names: list[str], children: Mapping[str, nn.Module]) -> Iterator[list[str]]:
    """Runs of linear layers D to F with one from F to D behind them."""
    run: list[str] = []
    for name in names:
        child = children[name]
        if type(child) is not nn.Linear:
            run = run if isinstance(child, _ELEMENTWISE) else []
            continue
        first = children[run[0]] if run else None
        assert first is None or isinstance(first, nn.Linear)
        if first is not None and (child.in_features, child.out_features) == (first.out_features, first.in_features):
            yield [*run, name]
            run = []
        elif first is not None and (child.in_features, child.out_features) == (first.in_features, first.out_features):
            run.append(name)
        else:
            run = [name]


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
