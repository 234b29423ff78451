"""What operators can do on parts, found by trial, and the gate that runs all ranks: it names what is wrong."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from meshwright.profilers.module.units import find_units, sample_run
from meshwright.profilers.placements.export import export_unit
from meshwright.profilers.placements.gate import Unsplit, parsed, proved, text, why_wrong
from meshwright.profilers.placements.parts import ConvertAll, is_cut, joined, part_of
from meshwright.profilers.placements.shrink import shrunk
from meshwright.profilers.placements.signatures import RUNS, Sample, Signature, find_signatures
from meshwright.profilers.placements.work import bind, placed_units, trace_units, values_of
from meshwright.schema import ConfigError
from meshwright.schema.placement_forms import Form, moves
from torch import Tensor, nn


class Of(nn.Module):
    """A function as a module, with parameters."""

    def __init__(self, function: Any, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        generator = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes])

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs, *self.weights)


def graph_of(module: nn.Module, *inputs: Tensor) -> tuple[Any, dict[str, Any]]:
    graph = export_unit(module, inputs, {})
    return graph, bind(graph, module, (inputs, {}))


def signatures_of(function: Any, *inputs: Tensor, num_ranks: int = 2) -> set[str]:
    graph, given = graph_of(Of(function), *inputs)
    (node,) = graph.nodes
    out = function(*inputs)
    outs = [Sample.of(t) for t in (out if isinstance(out, tuple) else (out,))]
    read = [Sample.of(given[producer.name]) for producer in graph.calls[node.name].producers]
    return {text(s) for s in find_signatures(graph.calls[node.name], read, outs, num_ranks)}


def test_a_linear_layer_is_cut_by_output_by_input_or_along_rows() -> None:
    x, weight, bias = torch.randn(3, 8, 12), torch.randn(24, 12), torch.randn(24)
    found = signatures_of(F.linear, x, weight, bias)
    assert {"I,I,I>I", "R,R,R>R", "R,S0,S0>S2", "R,S0x3,S0x3>S2x3", "S2,S1,P>P", "S1,R,R>S1", "P,R,P>P"} <= found
    assert not {"S2,S1,R>P", "R,S0,R>S2", "S2,R,R>S2", "R,S1,R>P", "S0,R,R>S0"} & found  # three samples are not cut


def test_what_is_not_linear_takes_no_summands_and_what_mixes_is_not_cut() -> None:
    x = torch.randn(3, 8, 12)
    assert signatures_of(F.gelu, x) >= {"S1>S1", "S2x3>S2x3"}
    assert "P>P" not in signatures_of(F.gelu, x)
    softmax = signatures_of(lambda t: t.softmax(-1), x)
    assert "S1>S1" in softmax
    assert not any("S2" in signature or "P" in signature for signature in softmax)


def test_sizes_in_arguments_are_cut_with_what_they_are_sizes_of() -> None:
    x = torch.randn(3, 8, 24)
    assert "S2>S2;out:2" in signatures_of(lambda t: t.view(3, 8, 4, 6), x)
    assert "S2x3>S3;out:3" in signatures_of(lambda t: t.view(3, 8, 3, 4, 2), x)
    assert any(s.startswith("S2x3>S2,S2,S2;") for s in signatures_of(lambda t: t.split(8, 2), x))
    heads = [torch.randn(3, 4, 8, 6) for _ in range(3)]
    assert "S1,S1,S1>S1" in signatures_of(F.scaled_dot_product_attention, *heads)
    assert not any(s.startswith("S2,S2,S2>") for s in signatures_of(F.scaled_dot_product_attention, *heads))


def test_masks_next_to_which_every_difference_is_small_prove_nothing() -> None:
    mask, x = torch.rand(6, 4) < 0.5, torch.randn(6, 4)
    lowest = torch.finfo(torch.float32).min
    found = signatures_of(lambda m, t: torch.where(m, t, lowest), mask, x)
    assert "S0,S0>S0" in found
    assert "R,S0>S0" not in found


@pytest.mark.parametrize("source", ["I", "R", "S0", "S1", "S1x3", "P"])
@pytest.mark.parametrize("target", ["I", "R", "S0", "S1x3", "P"])
def test_conversions_keep_the_value_and_its_gradient(source: str, target: str) -> None:
    value, weight = torch.randn(4, 6), torch.randn(4, 6)
    a, b = Form.parse(source), Form.parse(target)
    parts = [part_of(value, a, rank, 2).detach().requires_grad_() for rank in range(2)]
    made = ConvertAll.apply(a, b, *parts)
    assert torch.allclose(joined(made, b), value, atol=1e-6)
    torch.autograd.backward(list(made), [part_of(weight, b.dual, rank, 2) for rank in range(2)])
    gradients = [part.grad for part in parts if part.grad is not None]
    assert torch.allclose(joined(gradients, a.dual), weight, atol=1e-6)
    assert moves(a, a) == ("none", "none")


def test_the_gate_names_a_planted_signature_and_leaves_it_out() -> None:
    module = Of(lambda x, w, v: F.linear(F.softmax(F.linear(x, w), -1), v), (8, 6), (6, 8))
    graph, given = graph_of(module, torch.randn(3, 4, 6, requires_grad=True))
    names = [node.name for node in graph.nodes]
    right = [parsed(s) for s in ("R,S0>S2", "I>I", "S2,S1>P")]
    forms = {name: Form("I") for name in graph.parameters}
    placed = dict(zip(names, right, strict=True))
    assert why_wrong(graph, placed, forms, Unsplit.of(graph, given), 2, set()) is None
    planted = {**placed, names[1]: parsed("S2>S2")}
    wrong = why_wrong(graph, planted, forms, Unsplit.of(graph, given), 2, set())
    assert wrong is not None
    assert wrong.node == names[1]
    assert "softmax" in wrong.why
    found = {name: [parsed(",".join("I" * len(s.ins)) + ">I"), s] for name, s in planted.items()}
    kept = proved(graph, found, {name: [Form("I")] for name in graph.parameters}, given, 2)
    assert [len(kept[name]) for name in names] == [2, 1, 2]


def test_a_gradient_that_is_a_part_where_all_is_asked_for_is_seen() -> None:
    """A whole input whose gradients are summands, taken for one with whole gradients: every value is right."""
    graph, given = graph_of(Of(F.linear, (8, 6)), torch.randn(3, 4, 6, requires_grad=True))
    (name,) = graph.calls
    wrong = why_wrong(
        graph,
        {name: parsed("I,S0>S2")},
        {next(iter(graph.parameters)): Form("S", 0)},
        Unsplit.of(graph, given),
        2,
        set(),
    )
    assert wrong is not None
    assert wrong.node == name
    assert "gradient" in wrong.why


STEPS: dict[str, tuple[Any, tuple[int, ...] | None]] = {
    "linear": (F.linear, (8, 8)), "norm": (lambda x: F.layer_norm(x, (8,)), None), "softmax": (lambda x: x.softmax(-1), None),
    "cat": (lambda x: torch.cat([x[..., :4], x[..., 4:].tanh()], -1), None),
    "split": (lambda x: x.chunk(2, -1)[0].repeat(1, 1, 2), None),
    "mix": (lambda x: x.transpose(1, 2).reshape(3, 4, 16).transpose(1, 2).reshape(3, 8, 8), None),
    "conv": (lambda x, w: F.conv1d(x, w, padding=1), (8, 8, 3)), "index": (lambda x: x[:, [1, 0, 3, 2, 5, 4, 7, 6]], None),
}  # fmt: skip


@pytest.mark.parametrize("count", [4, pytest.param(60, marks=pytest.mark.long)])
def test_random_graphs_are_right_in_every_signature_that_is_found(count: int) -> None:
    """Trials and gate agree: what the gate leaves out of what trials found is nothing, but for rounding that cancels."""
    cache: dict[Any, list[Signature]] = {}
    chance, left_out, total = random.Random(count), 0, 0
    for _ in range(count):
        steps = [STEPS[chance.choice(list(STEPS))] for _ in range(4)]
        shapes = [shape for _, shape in steps if shape is not None]

        def run(x: Tensor, *weights: Tensor, steps: Any = steps) -> Tensor:
            left = iter(weights)
            for step, shape in steps:
                x = x + step(x, next(left)) if shape is not None else step(x)
            return x

        graph, given = graph_of(Of(run, *shapes), torch.randn(3, 8, 8, requires_grad=True))
        found = {}
        values = values_of(graph, given)
        for node in graph.nodes:
            call = graph.calls[node.name]
            ins = [Sample.of(values[graph.value_of(p)]) for p in call.producers]
            outs = [Sample.of(values[key]) for key in values if key.node == node.name]
            key = call.name, str((ins, outs)), call.static
            if key not in cache:
                cache[key] = find_signatures(call, ins, outs, 2)
            found[node.name] = cache[key]
        forms = {
            name: [
                Form("I"),
                *(Form("S", d) for d, size in enumerate(given[name].shape) if is_cut(size, Form("S", d), 2)),
            ]
            for name in graph.parameters
        }
        kept = proved(graph, found, forms, given, 2)
        total += sum(map(len, found.values()))
        left_out += sum(map(len, found.values())) - sum(map(len, kept.values()))
    assert total > 20 * count
    assert left_out == 0


def test_units_are_blocks_chains_and_what_has_parameters_outside() -> None:
    block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    module = nn.ModuleDict({
        "embed": nn.Embedding(10, 8), "encoder": nn.TransformerEncoder(block, 2),
        "top": nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)),
    })  # fmt: skip
    assert [unit.path for unit in find_units(module)] == ["embed", "encoder.layers.0", "encoder.layers.1", "top"]


class Chooses(nn.Linear):
    """Computes by the values of its input."""

    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else x


class Reads(nn.Module):
    """Reads a layer's weight by itself, calls another layer on what depends on values, and one that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.fine, self.unused = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.chosen = Chooses()

    def forward(self, x: Tensor) -> Tensor:
        return self.chosen(self.fine(self.read(x))) * self.read.weight.mean()


def test_what_cannot_be_placed_stays_whole_with_the_reason() -> None:
    works, whole = placed_units(Reads(), [torch.randn(4, 8)], (2,))
    assert [work.paths for work in works] == [("read",), ("fine",)]
    assert [path for _, path in works[0].parameters] == ["bias"]  # the weight is read outside, and stays whole
    reasons = {unit.path: unit.why for unit in whole}
    assert "not called" in reasons["unused"]
    assert "cannot be traced" in reasons["chosen"]


def test_a_model_that_does_not_run_says_so() -> None:
    with pytest.raises(ConfigError, match="does not run on the sample"):
        trace_units(nn.Linear(4, 4), [torch.randn(2, 5)], {})


def test_forms_are_written_and_read() -> None:
    for kind, runs in itertools.product("IRSP", (1, 3)):
        form = Form(kind, 2, runs) if kind == "S" else Form(kind)
        assert Form.parse(str(form)) == form


class Vocabulary(nn.Module):
    """An embedding and a head."""

    def __init__(self, size: int, num_classes: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(size, 96), nn.Linear(96, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


def test_a_vocabulary_becomes_small_by_itself_and_is_placed_as_a_small_one() -> None:
    """Sizes that no factor divides: 32,003 is a prime, 30,522 is 6 times one."""
    tokens, divisors = torch.arange(5 * 8).view(5, 8), 2 * math.prod(RUNS)
    units, _ = trace_units(Vocabulary(32003, 30522), (tokens,), {})
    for unit in units:
        graph, given = shrunk(unit.graph, unit.given, 2)
        assert sum(given[name].numel() for name in graph.parameters) < 2**12
        for name in graph.parameters:
            before, after = ([math.gcd(n, divisors) for n in of[name].shape] for of in (unit.given, given))
            assert before == after
    large, small = (placed_units(Vocabulary(*sizes), (tokens % 7,), (2,))[0] for sizes in ((32003, 30522), (7, 18)))
    assert [[o.signatures for o in work.operators] for work in large] == [
        [o.signatures for o in work.operators] for work in small
    ]
    assert len(large) == 2


class Alike(nn.Module):
    """Blocks of one kind, one of which may be read outside of its forward pass."""

    def __init__(self, *, peeks: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12)) for _ in range(3))
        self.peeks = peeks

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x * self.blocks[2][2].bias if self.peeks else x


def test_of_blocks_of_a_kind_one_is_run_and_given_values() -> None:
    with torch.device("meta"):
        module = Alike(peeks=False)
    units = find_units(module)
    sample_run(module, units, (torch.randn(5, 4, 12, requires_grad=True),), {})
    assert [all(p.is_meta for p in unit.module.parameters()) for unit in units] == [False, True, True]
    assert len({unit.kind for unit in units}) == 1
    assert not any("forward" in vars(part) for part in module.modules())


def test_a_model_that_does_not_stand_that_is_run_with_all_of_them() -> None:
    with torch.device("meta"):
        module = Alike(peeks=True)
    works, whole = placed_units(module, (torch.zeros(2, 4, 12),), (2,))
    assert not whole
    assert sorted(path for work in works for path in work.paths) == ["blocks.0", "blocks.1", "blocks.2"]
    (read,) = (work for work in works if work.paths == ("blocks.2",))
    assert "2.bias" not in dict(read.parameters).values()
