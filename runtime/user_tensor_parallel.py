"""Tensor parallelism of a user's module: which linear layers are split and how; the module's own code works on local tensors.

| rule        | weight [out, in]         | input                     | output                |
|-------------|--------------------------|---------------------------|-----------------------|
| by_output   | rows over tp             | full                      | this rank's part      |
| by_input    | columns over tp          | this rank's part          | sum over ranks        |
| gathered    | rows over tp             | full                      | gathered: full        |
| by_slice    | columns over tp          | full, of which it takes   | sum over ranks        |
| heads_norm  | unsharded on every rank  | this rank's heads         | this rank's heads     |

A model of transformers states its rules itself (`base_model_tp_plan`). For any other module they are derived, and each region is
tried on random input, because what a module's own forward does between its layers is not seen. Everything that is not split is
unsharded on every rank and gets full gradients. Sequence parallelism is for decoders of transformers: between the first block and
the last one a rank has its part of the sequence, and weights of norms there get parts of their gradient, which are summed at once.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from ..schema.errors import RuntimeMismatchError
from .models.layers import gathered, local_tensor, redistribute, shard_parameters

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

_HEAD_COUNTS = (
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


def split_transformers(
    model: nn.Module, tp: DeviceMesh, *, blocks: str, head: str | None, sequence_parallel: bool
) -> None:
    """Split a model of transformers over tp as it says itself, in place.

    Args:
        blocks: path of the list of blocks.
        head: path of a head that is not tied to the embedding, which is unsharded on every rank.
    """
    rules = transformers_rules(model)
    if not rules:
        raise RuntimeMismatchError(
            f"{type(model).__name__} has no base_model_tp_plan, so tensor parallelism cannot split it"
            + (" (its c_attn makes queries, keys and values in one product)" if "GPT2" in type(model).__name__ else ""),
            help="use parallelize(None, plan, weights=...) for the plan's own model, or plan with --fix tp=1",
        )
    hidden: Placement = Shard(1) if sequence_parallel else Replicate()
    for parent in sorted({path.rpartition(".")[0] for path in rules}):
        inside = {path: rule for path, rule in rules.items() if path.rpartition(".")[0] == parent}
        _require_all(model, parent, inside)
        _require_even(model, inside, tp)
        for path, rule in inside.items():
            _split(model.get_submodule(path), rule, tp, hidden, sums_inputs=False)
        _enter(model.get_submodule(parent), tp, hidden)
    if sequence_parallel:
        _cut_sequence(model, blocks, tp, set(rules))
    if head is not None:
        layer = model.get_submodule(head)
        if isinstance(layer, nn.Linear) and layer.out_features % tp.size() == 0:
            _split(layer, "gathered", tp, Replicate(), sums_inputs=True)


def split_plain(module: nn.Module, tp: DeviceMesh) -> None:
    """Split a plain module by derived rules, in place."""
    regions = derived_regions(module)
    if not regions:
        raise RuntimeMismatchError(
            f"{type(module).__name__} has no linear layers that tensor parallelism can split: neither query, key, value and "
            "output projections, nor layers from D to F and back",
            help="plan with --fix tp=1",
        )
    for region in regions:
        _require_even(module, region.rules, tp)
        before = _trial(module, region)
        if isinstance(before, str) and not region.is_attention:
            # Two layers in a row may be anything; names of projections are not there by chance.
            raise RuntimeMismatchError(
                f"{', '.join(region.rules)} look like layers that can be split together, which cannot be tried: {before}",
                help="plan with --fix tp=1",
            )
        if region.is_attention:
            _divide_heads(module.get_submodule(region.parent), region, tp)
        for path, rule in region.rules.items():
            _split(module.get_submodule(path), rule, tp, Replicate(), sums_inputs=rule == "by_output")
        _compare(region, before, _trial(module, region))


def _require_all(model: nn.Module, parent: str, inside: Mapping[str, Rule]) -> None:
    """Require a rule for every parameter of a region: the gradient of its input is summed over ranks."""
    named = {name.rpartition(".")[0] for name, _ in model.get_submodule(parent).named_parameters()}
    without = sorted(name for name in named if f"{parent}.{name}" not in inside)
    if without:
        raise RuntimeMismatchError(
            f"{type(model).__name__}: base_model_tp_plan splits a part of {parent} but not {', '.join(without)}",
            help="plan with --fix tp=1",
        )


def _require_even(module: nn.Module, rules: Mapping[str, Rule], tp: DeviceMesh) -> None:
    for path, rule in rules.items():
        layer = module.get_submodule(path)
        if rule == "heads_norm":
            continue
        if not isinstance(layer, nn.Linear):
            raise RuntimeMismatchError(
                f"{path} is a {type(layer).__name__}, of which no split is known: a Linear is split"
            )
        is_rows = rule in ("by_output", "gathered")
        width = layer.out_features if is_rows else layer.in_features
        if width % tp.size():
            raise RuntimeMismatchError(
                f"{path}: its {'outputs' if is_rows else 'inputs'}, {width}, are not a multiple of tp {tp.size()}",
                help=f"plan with a tp that divides {width}",
            )


def _split(layer: nn.Module, rule: Rule, tp: DeviceMesh, hidden: Placement, *, sums_inputs: bool) -> None:
    """Split one layer: its parameters over tp, and what happens to its input and output."""
    if rule == "heads_norm":
        _sum_weight_gradients(layer, tp)
        return
    is_rows = rule in ("by_output", "gathered")

    def placement(name: str) -> list[Placement]:
        return [Replicate() if name == "bias" and not is_rows else Shard(0 if is_rows else 1)]

    shard_parameters(layer, tp, placement)
    original = _with_local_weights(layer, has_bias=is_rows)

    def forward(x: Tensor) -> Tensor:
        if sums_inputs:
            x = gathered(x, tp, Replicate())
        if rule == "by_slice":
            x = redistribute(x, tp, Replicate(), Shard(x.ndim - 1))
        out: Tensor = original(x)
        if rule == "gathered":
            return redistribute(out, tp, Shard(out.ndim - 1), Replicate())
        if is_rows:
            return out
        out = redistribute(out, tp, Partial(), hidden)
        if layer.bias is None:
            return out
        bias = local_tensor(layer.bias)
        return out + (gathered(bias, tp, Replicate()) if hidden.is_shard() else bias)

    layer.forward = forward  # type: ignore[method-assign]


def _with_local_weights(
    layer: nn.Module, *, has_bias: bool = True, change: Callable[[Tensor], Tensor] = lambda local: local
) -> Callable[..., Any]:
    """Return the layer's forward on this rank's parts of its parameters; without the bias where that comes after a sum."""
    original = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        # An attribute of the instance is found before a parameter of the same name.
        weights: dict[str, Tensor | None] = {
            name: change(local_tensor(parameter)) for name, parameter in layer.named_parameters(recurse=False)
        }
        if not has_bias:
            weights["bias"] = None
        vars(layer).update(weights)
        try:
            return original(*args, **kwargs)
        finally:
            for name in weights:
                del vars(layer)[name]

    return forward


def _sum_weight_gradients(layer: nn.Module, tp: DeviceMesh) -> None:
    """Leave a layer unsharded of which each rank sees a part of the work: the gradients of its weights are summed."""
    change = functools.partial(gathered, mesh=tp, placement=Replicate())
    layer.forward = _with_local_weights(layer, change=change)  # type: ignore[method-assign]


def _enter(parent: nn.Module, tp: DeviceMesh, hidden: Placement) -> None:
    """Gather the first argument of a region, with a gradient that is summed, once for all layers that read it."""
    name = next(iter(inspect.signature(parent.forward).parameters))

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (gathered(args[0], tp, hidden), *args[1:]), kwargs
        return args, {**kwargs, name: gathered(kwargs[name], tp, hidden)}

    parent.register_forward_pre_hook(hook, with_kwargs=True)


def _cut_sequence(model: nn.Module, blocks: str, tp: DeviceMesh, split: set[str]) -> None:
    """Cut the sequence before the first block of this rank, gather it behind the last one."""
    inside = {path.rpartition(".")[0] for path in split}
    for path, layer in model.named_modules():
        is_outer = path.startswith(f"{blocks}.") and not any(path.startswith(f"{p}.") for p in inside)
        if is_outer and any(True for _ in layer.parameters(recurse=False)):
            _sum_weight_gradients(layer, tp)
    local = [block for block in model.get_submodule(blocks).children() if any(True for _ in block.parameters())]
    if not local:
        return

    def cut(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (redistribute(args[0], tp, Replicate(), Shard(1)), *args[1:])

    def gather(_: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
        return redistribute(out, tp, Shard(1), Replicate())

    local[0].register_forward_pre_hook(cut)
    local[-1].register_forward_hook(gather)


def _divide_heads(attention: nn.Module, region: Region, tp: DeviceMesh) -> None:
    for name in _HEAD_COUNTS:
        count = getattr(attention, name, None)
        if not isinstance(count, int) or isinstance(count, bool):
            continue
        if count % tp.size():
            raise RuntimeMismatchError(
                f"{region.parent}: {name} {count} is not a multiple of tp {tp.size()}",
                help=f"plan with a tp that divides {count}",
            )
        setattr(attention, name, count // tp.size())


@torch.no_grad()
def _trial(module: nn.Module, region: Region) -> Tensor | str:
    """Return what the module around a region makes of random input of the width of its first layer, or why it takes none."""
    parent, first = module.get_submodule(region.parent), module.get_submodule(next(iter(region.rules)))
    assert isinstance(first, nn.Linear)
    weight = local_tensor(first.weight)
    if weight.is_meta:
        return "it has no weights yet"
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 4, first.in_features, generator=generator).to(weight.device, weight.dtype)
    was_training = parent.training
    parent.eval()
    try:
        out = parent(x)
    except (TypeError, RuntimeError, NotImplementedError, ValueError, IndexError) as error:
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
    finally:
        parent.train(was_training)
    return out if isinstance(out, Tensor) else "it returns no tensor"


def _compare(region: Region, before: Tensor | str, after: Tensor | str) -> None:
    """Refuse a region that computes something else once it is split; one that takes other input cannot be tried."""
    if isinstance(before, str):
        return
    if isinstance(after, Tensor):
        if torch.allclose(after, before, rtol=1e-3, atol=1e-4 * float(before.abs().max())):
            return
        after = f"outputs differ by up to {float((after - before).abs().max()):.2g}"
    raise RuntimeMismatchError(
        f"{', '.join(region.rules)} look like layers that can be split together, but once they are: {after}",
        help="what stands between them is not element-wise, or counts its heads in its own way; plan with --fix tp=1",
    )
