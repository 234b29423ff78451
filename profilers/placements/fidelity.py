"""A unit's graph against the unit's code, on one rank: what torch.export traces is not always what the code computes.

A `torch.autograd.Function` is traced through its forward pass, operator by operator: its backward pass is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ...schema.errors import ConfigError
from ..module.trials import cause
from ..module.units import copied
from .export import UnitGraph, Value
from .localise import is_inexact, tensors_of
from .signatures import scale_of

TOLERANCE = 1e-3
"""Of the largest value or gradient: both in fp32, by the same operators but for how they lie in memory."""


def require_equal_to_code(graph: UnitGraph, module: nn.Module, call: Any, given: Mapping[str, Any]) -> None:
    """Refuse a graph that makes something else than the module's code: values, or gradients of parameters and inputs.

    Args:
        call: arguments; given: placeholders of the graph by name.

    Raises:
        ConfigError: they differ.
    """
    leaves, spec = tree_flatten(call)
    inputs = [copied(leaf) for leaf in leaves]
    trained = [t for t in (*module.parameters(), *inputs) if isinstance(t, Tensor) and t.requires_grad]

    before = {path: buffer.clone() for path, buffer in module.named_buffers()}

    def from_code() -> list[Tensor]:
        args, kwargs = tree_unflatten([t.clone() if isinstance(t, Tensor) else t for t in inputs], spec)
        made = tensors_of(module(*args, **kwargs))
        buffers = dict(module.named_buffers(remove_duplicate=False))
        return made + [buffers[path].clone() for path in graph.written]

    try:
        code, code_gradients = _ran(from_code, trained)
    except Exception as error:  # the module's own code
        raise ConfigError(f"its code fails in a pass by itself: {cause(error)}") from None
    finally:
        with torch.no_grad():
            for path, buffer in module.named_buffers():
                if buffer._version:
                    buffer.copy_(before[path])
    traced, traced_gradients = _ran(
        lambda: _outputs(graph, {**given, **dict(zip(graph.inputs, inputs, strict=True))}), trained
    )
    if not _alike(code, traced):
        raise ConfigError("its graph makes other values than its code")
    if not _alike(code_gradients, traced_gradients):
        raise ConfigError(
            "its graph has other gradients than its code: a torch.autograd.Function is traced without its backward pass"
        )


def _outputs(graph: UnitGraph, given: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that a graph puts out; buffers, which it may write into, are copies."""
    values: dict[Value, Any] = {
        Value(name): value.clone() if isinstance(value, Tensor) and not value.requires_grad else value
        for name, value in given.items()
    }
    for node in graph.nodes:
        call = graph.calls[node.name]
        made = call.run([values[graph.value_of(producer)] for producer in call.producers], "", 1)
        values |= {Value(node.name, idx): tensor for idx, tensor in enumerate(tensors_of(made))}
    return tensors_of([values[value] for value in map(graph.value_of, graph.ends)])


def _ran(run: Callable[[], list[Tensor]], trained: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return what a run puts out, with the same dropout each time, and the gradients of a random sum of it."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        outs = run()
    generator = torch.Generator().manual_seed(5)
    ends = [(out, torch.randn(out.shape, generator=generator, dtype=out.dtype)) for out in outs if out.requires_grad]
    if ends:
        torch.autograd.backward([out for out, _ in ends], [seed for _, seed in ends])
    gradients = [torch.zeros_like(of) if of.grad is None else of.grad for of in trained]
    for of in trained:
        of.grad = None
    return outs, gradients


def _alike(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    pairs = [(a.detach(), b.detach()) for a, b in zip(first, second, strict=True) if is_inexact(a.dtype)]
    largest = max((scale_of(a) for a, _ in pairs), default=0.0)
    return all(a.shape == b.shape and scale_of(a - b) <= TOLERANCE * largest for a, b in pairs)
