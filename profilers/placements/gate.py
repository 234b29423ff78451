"""The gate: placements of a unit run on all ranks in one process, every value and every gradient against the unsplit unit's.

Trials find signatures of operators on random tensors; a coincidence would pass them. So placements are run as a whole, forward and
backward, with conversions, until every signature of every operator has been in one: whatever a program then chooses is made of
signatures that were proved together with their conversions. Later operators can hide an error in a gradient, so each signature's
backward pass is compared by itself as well. One that computes something else is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...schema.errors import ConfigError
from ...schema.placement_forms import ENTIRE, Form
from ..module.trials import first_line
from .export import UnitGraph, Value
from .localise import Call, in_double, is_inexact, tensors_of
from .parts import converted, joined, part_of
from .signatures import RANDOM, Signature, largest, scale_of, short_name

DRAWN = ("rand", "bernoulli", "multinomial", "normal", "empty")
"""Operators whose values nothing determines."""

TOLERANCE = 1e-5
"""Of the largest entry of a value, in fp64; some operators round to fp32 inside."""


class Wrong(NamedTuple):
    """A node that computes something else where it is placed; empty where its gradients differ and no node's do by themselves."""

    node: str
    why: str


class Unsplit(NamedTuple):
    """A graph on one rank: what it is given, in fp64, every value, which have gradients, those with these seeds of its outputs.

    Attributes:
        node_gradients: those of a node's inputs, with random gradients of its outputs, by its name; noted as they are made.
    """

    given: dict[str, Any]
    values: dict[Value, Any]
    trained: frozenset[Value]
    seeds: list[Tensor | None]
    gradients: dict[str, Tensor]
    node_gradients: dict[str, list[Tensor]]

    @classmethod
    def of(cls, graph: UnitGraph, given: Mapping[str, Any]) -> Unsplit:
        """Run a graph; ``given``: placeholders by name, with ``requires_grad`` as in a run; parameters and inputs."""
        doubled = {name: _doubled(value) for name, value in given.items()}
        leaves = {name: _leaf(value) for name, value in doubled.items()}
        values: dict[Value, Any] = {Value(name): value for name, value in leaves.items()}
        for node in graph.nodes:
            call = _as_tried(graph.calls[node.name])
            try:
                made = call.run([values[graph.value_of(p)] for p in call.producers], "", 1)
            except Exception as error:  # whatever an operator says of fp64
                raise ConfigError(f"{node.name} ({node.target}) does not run in fp64: {first_line(error)}") from None
            values |= {Value(node.name, idx): tensor for idx, tensor in enumerate(tensors_of(made))}
        outs = [values[value] for value in map(graph.value_of, graph.ends)]
        generator = torch.Generator().manual_seed(5)
        drawn = [torch.randn(o.shape, generator=generator, dtype=o.dtype) if o.requires_grad else None for o in outs]
        trained = [(o, seed) for o, seed in zip(outs, drawn, strict=True) if seed is not None]
        torch.autograd.backward([o for o, _ in trained], [seed for _, seed in trained])
        has = {name: leaf.grad for name, leaf in leaves.items() if isinstance(leaf, Tensor) and leaf.grad is not None}
        detached = {value: t.detach() if isinstance(t, Tensor) else t for value, t in values.items()}
        in_backward = frozenset(value for value, t in values.items() if isinstance(t, Tensor) and t.requires_grad)
        return cls(doubled, detached, in_backward, drawn, has, {})


def proved(
    graph: UnitGraph,
    proposed: Mapping[str, Sequence[Signature]],
    parameters: Mapping[str, Sequence[Form]],
    given: Mapping[str, Any],
    num_ranks: int,
) -> dict[str, list[Signature]]:
    """Return the signatures of each operator that are right wherever they are combined with others.

    Args:
        found: by node, the whole ones first; parameters: forms of each parameter's node.

    Raises:
        ConfigError: one is wrong that every operator has, or gradients are.
    """
    retained = {name: list(signatures) for name, signatures in proposed.items()}
    unsplit = Unsplit.of(graph, given)
    right = set[tuple[str, Signature]]()
    turn = 0
    while turn < max((len(signatures) for signatures in retained.values()), default=0):
        # From the last one down, so that the first placements cut most.
        placed = {name: signatures[-1 - turn % len(signatures)] for name, signatures in retained.items()}
        forms = {name: of[-1 - turn % len(of)] for name, of in parameters.items()}
        wrong = why_wrong(graph, placed, forms, unsplit, num_ranks, right)
        if wrong is None:
            turn += 1
        elif wrong.node and not all(form.is_entire for form in placed[wrong.node].ins):
            retained[wrong.node].remove(placed[wrong.node])
        else:
            raise ConfigError(wrong.why)
    return retained


def why_wrong(
    graph: UnitGraph,
    placed: Mapping[str, Signature],
    parameters: Mapping[str, Form],
    unsplit: Unsplit,
    num_ranks: int,
    right_backward: set[tuple[str, Signature]],
) -> Wrong | None:
    """Return the first node of a placed graph that computes something else than in the unsplit one; None where all is right.

    Args:
        placed: of each operator; parameters: form of each parameter's node.
        unsplit: what the graph makes on one rank.
        right_backward: signatures of nodes whose gradients were right by themselves; more are added.
    """
    given, entire = unsplit.given, unsplit.values
    parts: dict[tuple[Value, Form], Sequence[Any]] = {}
    for name, value in given.items():
        form = parameters.get(name, ENTIRE)
        of_ranks = [value] * num_ranks
        if isinstance(value, Tensor):
            of_ranks = [_leaf(part_of(value.detach(), form, r, num_ranks), template=value) for r in range(num_ranks)]
        parts[Value(name), form] = of_ranks
    inputs = {value.node: of_ranks for (value, _), of_ranks in parts.items()}
    forms = dict(parts.keys())
    for node in graph.nodes:
        call, signature = graph.calls[node.name], placed[node.name]
        read = [
            _read(parts, graph.value_of(producer), forms[graph.value_of(producer)], form)
            for producer, form in zip(call.producers, signature.ins, strict=True)
        ]
        still = _as_tried(call)
        expected = [entire[Value(node.name, idx)] for idx in range(len(signature.outs))]
        shape = expected[0].shape if len(expected) == 1 else None
        if any(part in short_name(call) for part in DRAWN):  # every rank draws the same, from one state
            drawn = list(zip(expected, signature.outs, strict=True))
            made = [[part_of(t, form, r, num_ranks).clone() for t, form in drawn] for r in range(num_ranks)]
            parts |= {
                (Value(node.name, idx), form): [of[idx] for of in made] for idx, form in enumerate(signature.outs)
            }
            forms |= {Value(node.name, idx): form for idx, form in enumerate(signature.outs)}
            continue
        try:
            made = [
                tensors_of(still.run([of[r] for of in read], signature.variant, num_ranks, shape))
                for r in range(num_ranks)
            ]
        except Exception as error:  # whatever an operator says of shapes that are not its own
            return Wrong(node.name, f"{node.name} ({node.target}) as {text(signature)}: {str(error).splitlines()[0]}")
        for idx, form in enumerate(signature.outs):
            value = Value(node.name, idx)
            parts[value, form], forms[value] = [of_rank[idx] for of_rank in made], form
            difference = _difference(parts[value, form], form, expected[idx])
            if difference > TOLERANCE:
                return Wrong(node.name, f"{node.name} ({node.target}) as {text(signature)} differs by {difference:.1e}")
    ends = [_read(parts, value, forms[value], ENTIRE) for value in map(graph.value_of, graph.ends)]
    if (by_itself := _wrong_backward(graph, placed, unsplit, num_ranks, right_backward)) is not None:
        return by_itself
    wrong, worst = _worst_gradient(unsplit, ends, inputs, parameters)
    return wrong if worst > TOLERANCE else None  # one that is small next to the largest may be rounding


def text(signature: Signature) -> str:
    """Return a signature as it is written in a plan."""
    variant = f";{signature.variant}" if signature.variant else ""
    return f"{','.join(map(str, signature.ins))}>{','.join(map(str, signature.outs))}{variant}"


def parsed(written: str) -> Signature:
    """Return the signature of a text."""
    forms, _, variant = written.partition(";")
    ins, _, outs = forms.partition(">")
    return Signature(*(tuple(Form.parse(form) for form in side.split(",") if form) for side in (ins, outs)), variant)


def _as_tried(call: Call) -> Call:
    """Return a call without dropout, in fp64: placements sum in other orders, and chains of sums that cancel show it."""
    name = short_name(call)
    return ((call.with_changed(RANDOM[name], 0.0) if name in RANDOM else None) or call).in_double()


def _doubled(value: Any) -> Any:
    if not isinstance(value, Tensor) or not is_inexact(value.dtype):
        return value
    return value.detach().to(in_double(value.dtype)).requires_grad_(value.requires_grad)


def _of_seeds(out: Tensor) -> torch.dtype:
    return in_double(out.dtype) if is_inexact(out.dtype) else torch.float64


def _leaf(value: Any, template: Any = None) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().requires_grad_((value if template is None else template).requires_grad)


def _read(parts: dict[tuple[Value, Form], Sequence[Any]], value: Value, made: Form, form: Form) -> Sequence[Any]:
    key = value, form
    if key not in parts:
        source = parts[value, made]
        is_tensor = isinstance(source[0], Tensor)
        parts[key] = converted(source, made, form) if is_tensor else source
    return parts[key]


def _difference(parts: Sequence[Tensor], form: Form, entire: Tensor) -> float:
    with torch.no_grad():
        if any(part.shape != part_of(entire, form, 0, len(parts)).shape for part in parts):
            return math.inf
        of_ranks = parts if form.is_entire else [joined(parts, form)]
        if not is_inexact(entire.dtype):
            return max(float(not torch.equal(part, entire)) for part in of_ranks)
        scale = max(scale_of(entire), 1e-6)
        of_scale = max(largest(part - entire) for part in of_ranks) / scale
        if of_scale <= TOLERANCE:  # not so where an entry is infinite or NaN
            return of_scale
        finite = torch.isfinite(entire)
        return max(largest(((part - entire).abs() / (scale + entire.abs()))[finite]) for part in of_ranks)


def _worst_gradient(
    unsplit: Unsplit,
    ends: Sequence[Sequence[Tensor]],
    inputs: Mapping[str, Sequence[Any]],
    parameters: Mapping[str, Form],
) -> tuple[Wrong | None, float]:
    """Return a gradient that differs by more than rounding of its own largest entry, and the largest difference, of all of them."""
    flat = [
        (part, seed) for end, seed in zip(ends, unsplit.seeds, strict=True) if seed is not None
        for part in end if part.requires_grad
    ]  # fmt: skip
    torch.autograd.backward([tensor for tensor, _ in flat], [seed for _, seed in flat])
    of_all = max(max(map(largest, unsplit.gradients.values()), default=0.0), 1e-12)
    wrong, worst = None, 0.0
    for name, expected in unsplit.gradients.items():
        form = parameters.get(name, ENTIRE)
        gradients = [part.grad if part.grad is not None else torch.zeros_like(part) for part in inputs[name]]
        wholes = gradients if form.is_entire else [joined(gradients, form)]
        error = max(largest(gradient - expected) for gradient in wholes)
        if error > TOLERANCE * max(largest(expected), TOLERANCE * of_all) and error / of_all >= worst:
            wrong = Wrong("", f"the gradient of {name}, {form}, differs by {error / of_all:.1e} of the largest")
        worst = max(worst, error / of_all)
    return wrong, worst


def _wrong_backward(
    graph: UnitGraph,
    placed: Mapping[str, Signature],
    unsplit: Unsplit,
    num_ranks: int,
    right: set[tuple[str, Signature]],
) -> Wrong | None:
    """Return the first node, from the end, whose gradients by themselves differ from the unsplit graph's."""
    for node in reversed(graph.nodes):
        if (key := (node.name, signature := placed[node.name])) in right:
            continue
        error = _backward_error(graph, node, signature, unsplit, num_ranks)
        if error > TOLERANCE:
            why = f"{node.name} ({node.target}) as {text(signature)}: a gradient differs by {error:.1e}"
            return Wrong(node.name, why)
        right.add(key)
    return None


def _backward_error(
    graph: UnitGraph, node: torch.fx.Node, signature: Signature, unsplit: Unsplit, num_ranks: int
) -> float:
    """Return the largest difference of a gradient that a node makes on parts, of outputs with random gradients."""
    call = _as_tried(graph.calls[node.name])
    refs = [graph.value_of(producer) for producer in call.producers]
    values = [unsplit.values[ref] for ref in refs]
    outs = [unsplit.values[Value(node.name, idx)] for idx in range(len(signature.outs))]
    generator = torch.Generator().manual_seed(7)
    seeds = [torch.randn(out.shape, generator=generator, dtype=_of_seeds(out)).to(out.dtype) for out in outs]

    def gradients(read: Sequence[Any], seeds: Sequence[Tensor], variant: str) -> list[Tensor]:
        leaves = [
            _leaf(value).requires_grad_(ref in unsplit.trained) if isinstance(value, Tensor) else value
            for ref, value in zip(refs, read, strict=True)
        ]
        made = tensors_of(call.run(leaves, variant, num_ranks, outs[0].shape if len(outs) == 1 else None))
        ends = [(t, seed) for t, seed in zip(made, seeds, strict=True) if t.requires_grad]
        torch.autograd.backward([t for t, _ in ends], [seed for _, seed in ends])
        trained = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in trained]

    if not any(Value(node.name, idx) in unsplit.trained for idx in range(len(outs))):
        return 0.0
    duals = [form.dual for form in signature.outs]
    of_ranks = [
        gradients(_parts(values, signature.ins, r, num_ranks), _parts(seeds, duals, r, num_ranks), signature.variant)
        for r in range(num_ranks)
    ]
    forms = [form.dual for ref, form in zip(refs, signature.ins, strict=True) if ref in unsplit.trained]
    if node.name not in unsplit.node_gradients:
        unsplit.node_gradients[node.name] = gradients(values, seeds, "")
    compared = zip(forms, zip(*of_ranks, strict=True), unsplit.node_gradients[node.name], strict=True)
    return max((_difference(parts, form, entire) for form, parts, entire in compared), default=0.0)


def _parts(values: Sequence[Any], forms: Sequence[Form], rank: int, num_ranks: int) -> list[Any]:
    return [
        part_of(value, form, rank, num_ranks) if isinstance(value, Tensor) else value
        for value, form in zip(values, forms, strict=True)
    ]
