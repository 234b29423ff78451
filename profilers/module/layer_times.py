"""Seconds of the layers of a user's module on this machine: its code runs, and each kind of layer is timed by itself.

Counts of products and bytes do not say what Python, the dispatcher and kernels of small sizes take, and where steps are short
that is most of them. Blocks are called with what the model calls them with. What lies before and after them has the rest of a
pass of the entire model: forward by the clock when blocks begin and end, backward in the proportion of the forward pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ...schema.errors import ConfigError
from ...schema.layers import Block, Embedding, Head, Layer
from ...schema.model import ModelSpec
from ...schema.profile import Direction, LayerPoint, PointDtype
from ..measure.timing import summarise_samples
from ..placements.work import rows_of
from .fakes import without_caches

MICRO_BATCHES = (1, 2, 4)
MIN_SAMPLES, MAX_SAMPLES = 3, 40
SAMPLES_S = 0.3
"""Of all samples of one point, unless that is fewer than MIN_SAMPLES."""

_DTYPES: dict[torch.dtype, PointDtype] = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class _Call(NamedTuple):
    """What a module is called with, detached."""

    module: nn.Module
    args: Any
    kwargs: Any


class _Passes(NamedTuple):
    """Seconds of samples of a pass, forward and backward."""

    forward: list[float]
    backward: list[float]


def time_layers(
    model: nn.Module,
    example_inputs: Sequence[Any] | Mapping[str, Any],
    spec: ModelSpec,
    *,
    micro_batches: Sequence[int] = MICRO_BATCHES,
    cpu_seconds: bool = False,
) -> tuple[LayerPoint, ...]:
    """Return points of a profile for the layers of a module on the CPU, which `plan` then takes in place of their counts.

    Args:
        model: with values, in the mode and the type in which it is trained.
        spec: of this module for these inputs (`profile_module`).
        micro_batches: samples of a call; those of the inputs again where they are fewer.
        cpu_seconds: count those of this process's threads, on a machine that others use.

    Raises:
        ConfigError: the module has no values, or is not on the CPU.
    """
    if spec.code is None or spec.traced_len is None:
        raise ConfigError(f"{spec.name} was not traced from code", help="give the spec that profile_module returned")
    first = next(model.parameters())
    if any(p.device.type != "cpu" for p in model.parameters()) or first.dtype not in _DTYPES:
        raise ConfigError(
            f"layers are timed on the CPU in fp32, fp16 or bf16; the module is {first.dtype} on {first.device}"
        )
    blocks = list(model.get_submodule(spec.code.blocks).children()) if spec.code.blocks else [model]
    clock = time.process_time if cpu_seconds else time.perf_counter
    points = list[LayerPoint]()
    for size in micro_batches:
        shape = {
            "hidden_dim": spec.hidden_dim, "micro_batch_size": size, "seq_len": spec.traced_len, "dtype": _DTYPES[first.dtype],
        }  # fmt: skip
        with without_caches(model):
            layers = _layers_of(model, rows_of(example_inputs, size), spec, blocks, clock)
        for layer, passes in layers:
            pairs: list[tuple[Direction, list[float]]] = [("forward", passes.forward), ("backward", passes.backward)]
            points += [
                LayerPoint(layer=layer, direction=direction, **shape, **summarise_samples(samples)._asdict())
                for direction, samples in pairs
            ]
    return tuple(points)


def _layers_of(
    model: nn.Module, inputs: Any, spec: ModelSpec, blocks: Sequence[nn.Module], clock: Callable[[], float]
) -> list[tuple[Layer, _Passes]]:
    """Return the passes of each kind of layer of one micro-batch."""
    args, kwargs = ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})
    entire = _Call(model, args, kwargs)
    if blocks == [model]:
        return [(block, _timed(entire, clock)) for block, _ in spec.block_runs]
    calls, before, after = _watched(entire, blocks, clock)
    kinds, timed, inside = dict[Block, _Passes](), list[tuple[Layer, _Passes]](), 0.0
    first = 0
    for block, count in spec.block_runs:
        if block not in kinds:
            kinds[block] = _timed(calls[first], clock)
            timed.append((block, kinds[block]))
        inside += count * median(kinds[block].backward)
        first += count
    outside = max(median(_timed(entire, clock).backward) - inside, 0.0)
    both = median(before) + median(after)
    for run in spec.layers:
        forward = before if isinstance(run.layer, Embedding) else after
        if isinstance(run.layer, Embedding | Head) and _is_counted(run.layer) and outside > 0:
            timed.append((run.layer, _Passes(forward, [outside * median(forward) / both])))
    return timed


def _is_counted(layer: Embedding | Head) -> bool:
    """Return whether there is something that measured seconds are a ratio to."""
    traced = layer.counted
    return traced is not None and bool(traced.forward_kernels or traced.products)


def _watched(
    entire: _Call, blocks: Sequence[nn.Module], clock: Callable[[], float]
) -> tuple[list[_Call], list[float], list[float]]:
    """Return what each block is called with, and seconds before the first and after the last one."""
    calls, stamps = dict[nn.Module, _Call](), list[float]()

    def enter(block: nn.Module, args: Any, kwargs: Any) -> None:
        stamps.append(clock())
        calls.setdefault(block, _Call(block, *tree_map(_detached, (args, kwargs))))

    def leave(*_: Any) -> None:
        stamps.append(clock())

    before, after = list[float](), list[float]()
    with ExitStack() as hooks:
        for block in blocks:
            hooks.enter_context(block.register_forward_pre_hook(enter, with_kwargs=True))
            hooks.enter_context(block.register_forward_hook(leave))
        for idx in range(MIN_SAMPLES + 1):
            stamps.clear()
            start = clock()
            entire.module(*entire.args, **entire.kwargs)
            if idx:
                before.append(stamps[0] - start)
                after.append(clock() - stamps[-1])
    return [calls[block] for block in blocks], before, after


def _detached(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def _timed(call: _Call, clock: Callable[[], float]) -> _Passes:
    """Return the seconds of passes; gradients are not added up. The first, which chooses kernels, is dropped."""
    leaves = [
        t for t in (*tree_leaves((call.args, call.kwargs)), *call.module.parameters())
        if isinstance(t, Tensor) and t.requires_grad
    ]  # fmt: skip
    forward, backward, spent = list[float](), list[float](), 0.0
    while len(forward) <= MIN_SAMPLES or (spent < SAMPLES_S and len(forward) < MAX_SAMPLES):
        start = clock()
        output = call.module(*call.args, **call.kwargs)
        middle = clock()
        tensors = (t for t in tree_leaves(_values(output)) if isinstance(t, Tensor) and t.requires_grad)
        if (result := next(tensors, None)) is None:
            raise ConfigError(
                f"nothing that {type(call.module).__name__} returns has a gradient: its backward pass has no time",
                help="profile the model with parameters that are trained in every block",
            )
        gradient = torch.ones_like(result)
        begin = clock()
        torch.autograd.grad(result, leaves, gradient, allow_unused=True)
        end = clock()
        forward.append(middle - start)
        backward.append(end - begin)
        spent += middle - start + end - begin
    return _Passes(forward[1:], backward[1:])


def _values(output: Any) -> Any:
    """Return a mapping that torch's pytree does not know, as what transformers puts out, as a dict."""
    return dict(output) if isinstance(output, Mapping) else output
