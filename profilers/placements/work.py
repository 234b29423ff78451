"""What is placed of a module: its units traced, the signatures of their operators tried, and proved by the gate."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten, tree_map

from ...schema.errors import ConfigError
from ...schema.placement_forms import ENTIRE, REPEATED, Form
from ...schema.placements import OperatorWork, UnitWork, WholeUnit
from ..module.trials import Attributes, attributes_of, copy_of, failure, stored_since
from ..module.units import Unit, Values, find_units, sample_run
from .export import UnitGraph, Value, export_unit, keeps_a_tensor, skeleton
from .fidelity import require_equal_to_code
from .gate import proved, text
from .localise import Call, tensors_of
from .parts import is_cut
from .shrink import shrunk
from .signatures import RUNS, Sample, Signature, find_signatures, short_name

PRODUCTS = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum")


@dataclass
class TracedUnit:
    """A kind of unit that was traced: its graph, what it was called with, and the values of a run of it.

    Attributes:
        read_outside: parameters, by path in the unit, that are read outside of it: plain tensors, whole on every rank.
        evaluation: the graph of the same call in evaluation, where it is another one than in training.
    """

    paths: list[str]
    graph: UnitGraph
    given: dict[str, Any]
    module: nn.Module
    read_outside: frozenset[str]
    evaluation: TracedUnit | None = None


def placed_units(
    module: nn.Module, example_inputs: Sequence[Any] | Mapping[str, Any], degrees: Sequence[int]
) -> tuple[tuple[UnitWork, ...], tuple[WholeUnit, ...]]:
    """Return the work of each kind of unit for each degree, and the units that stay whole at some degree.

    A batch has a number of samples that no operator can be cut along, since it changes.
    """
    works = list[UnitWork]()
    if not degrees:
        return (), ()
    batch = rows_of(example_inputs, uncut_samples(degrees))
    args, kwargs = ((), batch) if isinstance(batch, Mapping) else (tuple(batch), {})
    traced, remaining = trace_units(module, args, kwargs)
    unplaced = {unit.path: unit for unit in remaining}
    shared = _shared_parameters(module)
    for num_ranks in degrees:
        cache: dict[Any, list[Signature]] = {}
        for unit in traced:
            try:
                works.append(unit_work(unit, num_ranks, shared, cache))
            except ConfigError as error:
                unplaced |= {path: WholeUnit(path=path, why=error.message) for path in unit.paths}
                continue
            if unit.evaluation is not None:
                with suppress(ConfigError):  # then it is computed whole there (runtime/placements/execution.py)
                    evaluated = unit_work(unit.evaluation, num_ranks, shared, cache)
                    works.append(evaluated.replace(in_evaluation=True))
    return tuple(works), tuple(unplaced.values())


def uncut_samples(degrees: Sequence[int]) -> int:
    """Return the fewest samples that share no divisor with the ranks or with the runs of a form: 5 for powers of 2.

    Of 3 samples on 2 ranks, rows of all samples one behind the other would be three runs that are cut alike.
    """
    return next(n for n in count(max(RUNS) + 1) if math.gcd(n, math.prod(degrees) * math.prod(RUNS)) == 1)


def _shared_parameters(module: nn.Module) -> dict[str, Form]:
    """Return the parameters, by path, that stand at several places: all units hold them in one form, cut in rows where even."""
    paths_of: dict[int, list[str]] = {}
    for path, parameter in module.named_parameters(remove_duplicate=False):
        paths_of.setdefault(id(parameter), []).append(path)
    return {path: Form("S", 0) for paths in paths_of.values() if len(paths) > 1 for path in paths}


def trace_units(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[TracedUnit], list[WholeUnit]]:
    """Return the kinds of units of a module, and the units that stay whole with the reason.

    Args:
        module: a copy is run once, in training mode; one on the meta device with random parameters.
    """
    units, unplaced = _called_units(module, args, kwargs), list[WholeUnit]()
    kinds: dict[str, TracedUnit | str] = {}
    for unit in units:
        why = "it is not called with this sample" if unit.call is None else ""
        if not why:
            kind = unit.kind
            if kind not in kinds:
                kinds[kind] = _traced(unit)
            traced = kinds[kind]
            if isinstance(traced, TracedUnit):
                traced.paths.append(unit.path)  # that of its graph in evaluation is the same list
            else:
                why = traced
        if why:
            unplaced.append(WholeUnit(path=unit.path, why=why))
    return [traced for traced in kinds.values() if isinstance(traced, TracedUnit)], unplaced


def _called_units(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Unit]:
    """Return the units of a copy of a module with what they are called with; each is run where one of a kind does not do."""
    for each in (False, True):
        copy = copy_of(module).train()
        units, before = find_units(copy), attributes_of(copy)
        try:
            sample_run(copy, units, args, kwargs, each=each)
            _note_stored(units, before)
            return units
        except Exception as error:  # the module's own code
            why = failure(copy, error)
    raise ConfigError(f"{type(module).__name__} does not run on the sample: {why}")


def _note_stored(units: Sequence[Unit], before: Sequence[Attributes]) -> None:
    """Let units know of attributes in which their code keeps tensors of a call; of one kind only one may have run."""
    stored = {(type(each.part), name) for each, name in stored_since(before)}
    for unit in units:
        parts = unit.module.named_modules()
        names = (f"{path}.{name}".lstrip(".") for path, part in parts for kind, name in stored if type(part) is kind)
        unit.stores = next(names, "")


def _traced(unit: Unit) -> TracedUnit | str:
    if unit.stores:
        return keeps_a_tensor(unit.path, unit.stores)
    Values().give(unit.module.modules())
    try:
        graph = _graph_of(unit)
        given = _proved_equal(graph, unit)
    except ConfigError as error:
        return error.message
    if not any(node for node in graph.nodes):
        return "it computes nothing"
    read_outside = frozenset(unit.read_outside)
    traced = TracedUnit([], graph, given, unit.module, read_outside)
    unit.module.eval()
    with suppress(ConfigError):
        evaluated = _graph_of(unit)
        if skeleton(evaluated.described) != skeleton(graph.described):
            given = _proved_equal(evaluated, unit)
            traced.evaluation = TracedUnit(traced.paths, evaluated, given, unit.module, read_outside)
    unit.module.train()
    return traced


def _graph_of(unit: Unit) -> UnitGraph:
    assert unit.call is not None
    return export_unit(unit.module, *unit.call, path=unit.path)


def _proved_equal(graph: UnitGraph, unit: Unit) -> dict[str, Any]:
    """Return the values of the placeholders of a unit's graph, which computes what its code does.

    Raises:
        ConfigError: it computes something else.
    """
    given = bind(graph, unit.module, unit.call)
    require_equal_to_code(graph, unit.module, unit.call, given)
    return given


def bind(graph: UnitGraph, module: nn.Module, call: Any) -> dict[str, Any]:
    """Return the values of a graph's placeholders: a unit's parameters and buffers, constants, and the arguments of a call."""
    leaves, _ = tree_flatten(call)
    state = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    given: dict[str, Any] = {name: state[path] for name, path in graph.state.items()}
    return {**given, **graph.constants, **dict(zip(graph.inputs, leaves, strict=True))}


def unit_work(
    traced: TracedUnit, num_ranks: int, tied: Mapping[str, Form], cache: dict[Any, list[Signature]]
) -> UnitWork:
    """Return the operators of a unit with their proved signatures; ``tied``: forms that parameters, by path, have elsewhere."""
    entire = traced.graph
    graph, given = shrunk(entire, traced.given, num_ranks)
    values = values_of(graph, given)
    proposed, facts = dict[str, list[Signature]](), dict[str, dict[str, Any]]()
    for node in graph.nodes:
        call = graph.calls[node.name]
        refs = [graph.value_of(producer) for producer in call.producers]
        shapes = [entire.shapes[ref] for ref in refs]
        ins = [values[ref] for ref in refs]
        outs = [values[Value(node.name, idx)] for idx in range(len([v for v in values if v.node == node.name]))]
        samples = [Sample.of(t) for t in ins], [Sample.of(t) for t in outs]
        key = call.name, str(samples), call.static, num_ranks
        if key not in cache:
            cache[key] = find_signatures(call, *samples, num_ranks)
        trained = [t.requires_grad for t in ins], [t.requires_grad for t in outs]
        proposed[node.name] = list(dict.fromkeys(_merged(signature, *trained) for signature in cache[key]))
        elements = tuple(math.prod(entire.shapes[Value(node.name, idx)]) for idx in range(len(outs)))
        facts[node.name] = {
            "op": short_name(call), "ins": tuple((ref.node, ref.idx) for ref in refs),
            "elements": elements, "element_bytes": outs[0].element_size() if outs else 4,
            "flops": _flops(call, shapes, sum(elements[:1])), "moves_nothing": _is_view(node), "is_trained": any(trained[1]),
        }  # fmt: skip
    forms = {
        name: _parameter_forms(
            [f"{path}.{graph.state[name]}" for path in traced.paths], traced.given[name], num_ranks, tied
        )
        for name in graph.parameters
        if graph.state[name] not in traced.read_outside
    }
    right = proved(graph, proposed, forms, given, num_ranks)
    operators = [
        _source(name, value, forms.get(name)) for name, value in traced.given.items() if isinstance(value, Tensor)
    ]
    operators += [
        OperatorWork(name=name, **facts[name], signatures=tuple(map(text, signatures)))
        for name, signatures in right.items()
    ]
    return UnitWork(
        paths=tuple(traced.paths), num_ranks=num_ranks, num_samples=_num_samples(traced), operators=tuple(operators),
        outs=tuple((v.node, v.idx) for v in map(graph.value_of, graph.ends)),
        described=tuple(entire.described),
        parameters=tuple((name, path) for name, path in graph.state.items() if name in forms),
        trained_inputs=tuple(isinstance(v, Tensor) and v.requires_grad for v in map(traced.given.get, graph.inputs)),
    )  # fmt: skip


def values_of(graph: UnitGraph, given: Mapping[str, Any]) -> dict[Value, Tensor]:
    """Return every value of a graph on whole tensors, with gradients as in a run."""
    values: dict[Value, Any] = {
        Value(name): value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
        for name, value in given.items()
    }
    for node in graph.nodes:
        call = graph.calls[node.name]
        made = call.run([values[graph.value_of(p)] for p in call.producers], "", 1)
        values |= {Value(node.name, idx): tensor for idx, tensor in enumerate(tensors_of(made))}
    return values


def _merged(signature: Signature, ins: Sequence[bool], outs: Sequence[bool]) -> Signature:
    """Write R as I where there is no gradient: the two are then one."""

    def merge(forms: Sequence[Form], trained: Sequence[bool]) -> tuple[Form, ...]:
        return tuple(ENTIRE if form == REPEATED and not has else form for form, has in zip(forms, trained, strict=True))

    return Signature(merge(signature.ins, ins), merge(signature.outs, outs), signature.variant)


def _parameter_forms(paths: Sequence[str], parameter: Tensor, num_ranks: int, tied: Mapping[str, Form]) -> list[Form]:
    if form := next((tied[path] for path in paths if path in tied), None):
        return [form if is_cut(parameter.shape[form.dim], form, num_ranks) else ENTIRE]
    cuts = [Form("S", dim) for dim, size in enumerate(parameter.shape) if is_cut(size, Form("S", dim), num_ranks)]
    return [ENTIRE, *cuts]


def _source(name: str, value: Tensor, forms: Sequence[Form] | None) -> OperatorWork:
    return OperatorWork(
        name=name, op="given" if forms is None else "parameter", elements=(value.numel(),), element_bytes=value.element_size(),
        is_trained=value.requires_grad, signatures=tuple(f">{form}" for form in forms or [ENTIRE]),
    )  # fmt: skip


def _is_view(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


def _flops(call: Call, shapes: Sequence[Sequence[int]], elements: int) -> int:
    name = short_name(call)
    if name in PRODUCTS and len(shapes) > 1:
        inner = shapes[0][-1] if name not in ("addmm", "baddbmm") else shapes[1][-1]
        return 2 * elements * inner
    if name.startswith("conv") and len(shapes) > 1:
        return 2 * elements * math.prod(shapes[1][1:])
    if name == "scaled_dot_product_attention":
        return 4 * math.prod(shapes[0]) * shapes[1][-2]
    return 0


def _num_samples(traced: TracedUnit) -> int:
    return max((t.shape[0] for t in _inputs(traced) if t.ndim), default=1) or 1


def _inputs(traced: TracedUnit) -> Iterator[Tensor]:
    return (traced.given[name] for name in traced.graph.inputs if isinstance(traced.given[name], Tensor))


def rows_of(value: Any, num_samples: int) -> Any:
    """Return a batch with so many samples, the first ones again where there are fewer."""

    def rows(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor) or not tensor.ndim:
            return tensor
        tensor = torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor
        return tensor[torch.arange(num_samples) % tensor.shape[0]]

    return tree_map(rows, value)
