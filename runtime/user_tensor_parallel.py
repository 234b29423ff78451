"""Tensor parallelism of a user's module: layers are split as split_rules.py says; the module's own code works on local tensors.

A model of transformers states its rules itself (`base_model_tp_plan`). For any other module they are derived, and each region is
tried on random input, because what a module's own forward does between its layers is not seen. Everything that is not split is
unsharded on every rank and gets full gradients. Sequence parallelism is for decoders of transformers: between the first block and
the last one a rank has its part of the sequence, and weights of norms there get parts of their gradient, which are summed at once.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from ..profilers.module.split_rules import HEAD_COUNTS, Region, Rule, checked_rules, derived_regions
from ..schema.errors import RuntimeMismatchError
from .models.layers import gathered, local_tensor, redistribute, shard_parameters


def split_transformers(
    model: nn.Module, tp: DeviceMesh, *, blocks: str, head: str | None, sequence_parallel: bool
) -> None:
    """Split a model of transformers over tp as it says itself, in place.

    Args:
        blocks: path of the list of blocks.
        head: path of a head that is not tied to the embedding, which is unsharded on every rank.
    """
    rules = checked_rules(model)
    hidden: Placement = Shard(1) if sequence_parallel else Replicate()
    for parent in sorted({path.rpartition(".")[0] for path in rules}):
        inside = {path: rule for path, rule in rules.items() if path.rpartition(".")[0] == parent}
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


def _require_even(module: nn.Module, rules: Mapping[str, Rule], tp: DeviceMesh) -> None:
    for path, rule in rules.items():
        layer = module.get_submodule(path)
        if rule == "heads_norm":
            continue
        assert isinstance(layer, nn.Linear)
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
    for name in HEAD_COUNTS:
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
