"""Modules whose code does what most do not: placed as it computes, or whole, or refused with the name of the part."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from meshwright.profilers import profile_module
from meshwright.profilers.placements.export import export_unit
from meshwright.profilers.placements.work import bind, placed_units, trace_units, values_of
from meshwright.schema import ConfigError
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[2] / "parity"))
from zoo_others import Straight

X = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))


class Of(nn.Module):
    """A function with a layer before it."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(8, 8), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


class Blocks(nn.Module):
    """Two blocks, with a function between them."""

    def __init__(self, block: Callable[[], nn.Module], between: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.blocks, self.between = nn.ModuleList([block(), block()]), between

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.between(self.blocks[0](x)))


def writes(x: Tensor) -> Tensor:
    """Writes into views, with another type and another shape, and through an activation."""
    x[:, 0] += 1.0
    x[:, 1] = x[:, 2].half()
    x[..., 0] = 0.0
    table = torch.zeros_like(x)
    table[:, 1:] = torch.relu_(x)[:, :-1]
    return table.add_(x.mean())


def test_what_is_written_in_place_is_a_value_of_the_graph() -> None:
    module, x = Of(writes), X.clone().requires_grad_()
    graph = export_unit(module, (x,), {})
    assert not any(node.target._schema.is_mutable for node in graph.nodes)
    given = bind(graph, module, ((x,), {}))
    values = values_of(graph, given)
    made, expected = values[graph.value_of(graph.outputs[0])], module(x)
    assert torch.equal(made, expected)
    weight = values[next(value for value in values if graph.state.get(value.node) == "layer.weight")]
    (gradient,) = torch.autograd.grad(made.square().sum(), [weight])
    (of_code,) = torch.autograd.grad(expected.square().sum(), [module.layer.weight])
    assert torch.allclose(gradient, of_code)
    works, whole = placed_units(Blocks(lambda: Of(writes)), [X], (2,))
    assert not whole
    assert [path for work in works for path in work.paths] == ["blocks.0", "blocks.1"]


def test_what_writes_into_its_input_stays_whole() -> None:
    class Doubles(Of):
        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.mul_(2))

    _, whole = placed_units(Blocks(lambda: Doubles(torch.relu), lambda x: x + 0), [X], (2,))
    assert [unit.path for unit in whole] == ["blocks.0", "blocks.1"]
    assert "mul_" in whole[0].why


def test_a_function_with_a_backward_pass_of_its_own_stays_whole_or_is_refused_between_blocks() -> None:
    works, whole = placed_units(Blocks(lambda: Of(Straight.apply)), [X], (2,))
    assert not works
    assert {unit.path for unit in whole} == {"blocks.0", "blocks.1"}
    assert "torch.autograd.Function" in whole[0].why
    spec = profile_module(Blocks(lambda: Of(torch.relu), Straight.apply), [X])
    assert spec.code is not None
    assert "Straight, a torch.autograd.Function" in spec.code.not_staged


def test_parameters_that_are_read_transposed_stay_whole() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.top = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            assert self.top.weight.shape == (8, 8)
            return self.top(self.layer(x)) @ self.layer.weight.mT

    (layer, top), _ = trace_units(Tied(), [X], {})
    assert layer.read_outside == {"weight"}
    assert not top.read_outside


def test_an_error_of_the_code_names_the_part() -> None:
    wrong = Blocks(lambda: nn.Sequential(nn.Linear(8, 12), nn.Linear(10, 8)))
    with pytest.raises(ConfigError, match=r"in blocks\.0\.1 \(Linear\): RuntimeError"):
        profile_module(wrong, [X])
    with pytest.raises(ConfigError, match=r"in blocks\.0\.1 \(Linear\): RuntimeError"):
        trace_units(wrong, [X], {})
