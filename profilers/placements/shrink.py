"""A unit's graph with smaller sizes, on which operators are tried and placements are proved.

What an operator can do on parts follows from which sizes are alike and which divide, not from how large they are. So all sizes from
some limit on are divided by one number, where that changes no divisibility and makes no two sizes alike; the limit separates widths
from counts (of heads, of samples). A size that is no product of others (a vocabulary of 50,257) may become a small one by itself.
The smaller graph must run and make every value in its smaller size, or sizes stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .export import UnitGraph, Value
from .localise import MAX_SIZE, tensors_of
from .signatures import RUNS

FEW = 2**16
"""Elements of all values, parameters and inputs together that need no shrinking."""

FACTORS = (64, 32, 16, 8, 4, 2)

LARGE = 1024
"""Sizes above it may change by themselves; what is below is cheap."""


def shrunk(graph: UnitGraph, given: Mapping[str, Any], num_ranks: int) -> tuple[UnitGraph, dict[str, Any]]:
    """Return a graph and its placeholders' values with smaller sizes, or as they are."""
    given = dict(given)
    while _total(graph, {}) > FEW:
        numbers = {n for call in graph.calls.values() for n in call.numbers.values() if 1 < n < MAX_SIZE}
        sizes = sorted({size for shape in graph.shapes.values() for size in shape} | numbers)
        for smaller in sorted(_maps(sizes, num_ranks), key=lambda smaller: _total(graph, smaller)):
            shapes = {value: tuple(smaller.get(n, n) for n in shape) for value, shape in graph.shapes.items()}
            resized = replace(graph, shapes=shapes)
            resized.calls = {name: call.resized(smaller) for name, call in graph.calls.items()}
            values = {name: _resized(value, smaller) for name, value in given.items()}
            if _runs(resized, values):
                graph, given = resized, values
                break
        else:
            break
    return graph, given


def _total(graph: UnitGraph, smaller: Mapping[int, int]) -> int:
    return sum(math.prod(smaller.get(size, size) for size in shape) for shape in graph.shapes.values())


def _maps(sizes: list[int], num_ranks: int) -> Iterator[dict[int, int]]:
    parts = num_ranks * math.prod(RUNS)
    for factor in FACTORS:
        for limit in sizes:
            large = [size for size in sizes if size >= limit > factor]
            remaining = {size for size in sizes if size < limit}
            smaller = {size: size // factor for size in large}
            divide_alike = all(
                size % factor == 0 and math.gcd(size, parts) == math.gcd(size // factor, parts) for size in large
            )
            if large and divide_alike and remaining.isdisjoint(smaller.values()) and min(smaller.values()) > 1:
                yield smaller
    for size in sizes:
        divisor = math.gcd(size, parts)
        alike = (n for n in range(3 * divisor, size, divisor) if math.gcd(n, parts) == divisor and n not in sizes)
        if size > LARGE and (smallest := next(alike, 0)):
            yield {size: smallest}


def _resized(value: Any, smaller: Mapping[int, int]) -> Any:
    if not isinstance(value, Tensor):
        return smaller.get(value, value) if type(value) is int else value
    part = value.detach()[tuple(slice(smaller.get(size, size)) for size in value.shape)].clone()
    is_index = not (part.is_floating_point() or part.is_complex() or part.dtype == torch.bool)
    if is_index and part.numel() and int(part.max()) >= min(smaller.values()):
        part = part % min(smaller.values())  # indices into what is smaller now
    return part.requires_grad_(value.requires_grad)


def _runs(graph: UnitGraph, given: Mapping[str, Any]) -> bool:
    values: dict[Value, Any] = {Value(name): value for name, value in given.items()}
    try:
        with torch.no_grad():
            for node in graph.nodes:
                made = graph.calls[node.name].run(
                    [values[graph.value_of(p)] for p in graph.calls[node.name].producers], "", 1
                )
                for idx, tensor in enumerate(tensors_of(made)):
                    value = Value(node.name, idx)
                    values[value] = tensor
                    if tuple(tensor.shape) != graph.shapes[value]:
                        return False
    except Exception:  # whatever an operator says of sizes that do not fit
        return False
    return True
