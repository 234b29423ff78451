"""A unit as a graph: its forward pass in the operators that autograd sees, by torch.export, and the graph run on local tensors.

Exported in its training form (28 operators of a BERT block: linear, attention and norms stay whole), so autograd does the backward
pass of whatever the operators work on: a rank's parts in the runtime, all ranks' parts in the gate.
"""

from __future__ import annotations

import operator
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram, export
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils._pytree import TreeSpec

from ...schema.errors import ConfigError
from ..module.trials import Attributes, attributes_of, first_line, stored_since
from .localise import Call
from .signatures import RANDOM

_REGIONS = (torch.ops.higher_order.wrap_with_set_grad_enabled, torch.ops.higher_order.wrap_with_autocast)


@dataclass(frozen=True)
class Value:
    """What a node puts out at a position; most put out one tensor, at 0."""

    node: str
    idx: int = 0


@dataclass
class UnitGraph:
    """The graph of a unit.

    Attributes:
        nodes: operators in order; calls: each as a call.
        inputs: names of the nodes of the user's tensors and constants, in the order of the flattened arguments.
        state: parameters and buffers by the name of their node: path in the unit.
        constants: tensors that the code makes, by the name of their node.
        outputs: what is put out, flattened: values, or constants; written: new values of buffers, by path.
        shapes: of every value of the traced call.
    """

    nodes: list[fx.Node]
    inputs: list[str]
    state: dict[str, str]
    parameters: frozenset[str]
    constants: dict[str, Tensor]
    outputs: list[Any]
    written: dict[str, fx.Node]
    out_spec: TreeSpec
    shapes: dict[Value, tuple[int, ...]]

    @cached_property
    def calls(self) -> dict[str, Call]:
        """The operators as calls, by the name of their node."""
        return {node.name: Call(node) for node in self.nodes}

    @property
    def ends(self) -> list[fx.Node]:
        """Nodes that are read of it: outputs that are values, and what buffers become."""
        return [node for node in (*self.outputs, *self.written.values()) if isinstance(node, fx.Node)]

    def value_of(self, node: fx.Node) -> Value:
        """Return what a node stands for, seen through picks of one of several outputs."""
        if node.op == "call_function" and node.target is operator.getitem:
            producer, idx = node.args
            assert isinstance(producer, fx.Node)
            assert isinstance(idx, int)
            return Value(producer.name, idx)
        return Value(node.name)

    @property
    def described(self) -> list[str]:
        """The operators with their constants, what they read, their axes and the dimensions of what they make, to compare graphs.

        Names come first and may differ.
        """
        positions = {name: f"input{idx}" for idx, name in enumerate(self.inputs)} | self.state
        positions |= {node.name: f"op{idx}" for idx, node in enumerate(self.nodes)}
        lines = []
        for node in self.nodes:
            call = self.calls[node.name]
            values = (self.value_of(producer) for producer in call.producers)
            wiring = [f"{positions.get(value.node, 'constant')}.{value.idx}" for value in values]
            made = [
                f"d{len(shape)}" for idx in range(4) if (shape := self.shapes.get(Value(node.name, idx))) is not None
            ]
            lines.append(f"{node.name} {node.target} {call.static} {' '.join([*wiring, *_axes(node), *made])}")
        return lines


def _axes(node: fx.Node) -> Iterator[str]:
    """Yield the axes that an operator is called with, as words: they are no sizes, which may be others for other samples."""
    arguments = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    for name, value in (*zip(arguments, node.args, strict=False), *node.kwargs.items()):
        if name in ("source", "destination") or name.rstrip("0123456789").endswith(("dim", "dims", "axis")):
            for axis in value if isinstance(value, list | tuple) else [value]:
                if type(axis) is int:
                    yield f"{name}_{'m' if axis < 0 else ''}{abs(axis)}"


MODAL = (*RANDOM, "batch_norm", "lstm", "gru", "rnn_")
"""Operators with an argument that says whether this is training."""


def skeleton(described: Sequence[str]) -> list[str]:
    """Return described operators without what may differ between calls that one placement is for.

    That is names, whole numbers, which change with the samples, the type of numbers, and what training changes of an operator.
    """

    def without(line: str) -> str:
        line = line.partition(" ")[2]
        if any(name in line.partition(" ")[0] for name in MODAL):
            return line.partition("[")[0] + line.rpartition("]")[2]
        line = re.sub(r"torch\.b?float\d+", "float", line)
        return re.sub(r"(?<![\w.])-?\d+(?![\w.])", "#", line)

    return list(map(without, described))


def export_unit(module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], *, path: str = "") -> UnitGraph:
    """Return the graph of a module for one call.

    Raises:
        ConfigError: the code cannot be traced, or does what a graph cannot say; the message says what.
    """
    if hooked := _hooked(module):
        raise ConfigError(f"{path or type(module).__name__}: a hook of {hooked} reads inside of it")
    before = attributes_of(module)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = _without_regions(export(module, tuple(args), dict(kwargs), strict=False))
    except Exception as error:  # the module's own code, or what torch does not trace
        raise ConfigError(f"{path or type(module).__name__} cannot be traced: {first_line(error)}") from None
    finally:
        stored = _put_back(before)
    if stored:
        raise ConfigError(keeps_a_tensor(path or type(module).__name__, stored))
    graph = _graph_of(program, path)
    if _what_is_written(graph):
        with warnings.catch_warnings(), suppress(Exception):  # whatever stops it: then the reason is what is written
            warnings.simplefilter("ignore")
            graph = _graph_of(_functional(program), path)
    if why := _what_is_written(graph):
        raise ConfigError(f"{path}: {why}")
    return graph


def _hooked(module: nn.Module) -> str:
    """Return the path of a part inside whose calls somebody hooks; empty: none. Weights that torch's own hooks make are traced."""
    for path, part in module.named_modules():
        hooks = (*part._forward_hooks.values(), *part._forward_pre_hooks.values()) if path else ()
        if not all(type(hook).__module__.startswith("torch.") for hook in hooks):
            return path
    return ""


def keeps_a_tensor(path: str, attribute: str) -> str:
    """Return why a unit stays whole whose code stores a tensor for code that a graph does not see."""
    return f"{path} keeps a tensor of the call in its attribute {attribute}"


def _put_back(before: Sequence[Attributes]) -> str:
    """Take tensors away that a trace has left in attributes, and return the path of one; empty: there are none."""
    attribute = ""
    for (path, part, values), name in stored_since(before):
        attribute = f"{path}.{name}".lstrip(".")
        if name in values:
            vars(part)[name] = values[name]
        else:
            del vars(part)[name]
    return attribute


def _without_regions(program: ExportedProgram) -> ExportedProgram:
    """Return a program with the operators of regions in their places: casts of autocast, values without gradients of no_grad."""
    regions = [node for node in program.graph.nodes if node.target in _REGIONS]
    for node in regions:
        if node.target is _REGIONS[0] and not node.args[0]:
            inside: Any = getattr(program.graph_module, node.args[1].target)
            _detach_inputs(inside.graph)
    return _functional(program) if regions else program


def _detach_inputs(region: fx.Graph) -> None:
    """Let what a region reads have no gradient there; what it writes into is written."""
    written = {node.args[0] for node in region.nodes if node.op == "call_function" and _is_writing(node)}
    inputs = [node for node in region.nodes if node.op == "placeholder" and node not in written]
    for value in inputs:
        if isinstance(value.meta.get("val"), Tensor):
            with region.inserting_after(inputs[-1]):
                detached = region.call_function(torch.ops.aten.detach.default, (value,))
            value.replace_all_uses_with(detached, delete_user_cb=lambda user, detached=detached: user is not detached)
            detached.meta["val"] = value.meta["val"].detach()
    assert region.owning_module is not None
    region.owning_module.recompile()


def _is_writing(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _functional(program: ExportedProgram) -> ExportedProgram:
    """Return a program in which what is written in place is a new value, which whoever reads it later reads."""
    program = program.run_decompositions({})
    for node in list(program.graph.nodes):
        if node.target is not torch.ops.aten.copy.default:
            continue
        made, read = node.meta["val"], node.args[1].meta["val"]  # a copy has no gradient in torch
        value = node.args[1]
        with program.graph.inserting_before(node):
            if read.dtype != made.dtype:
                value = program.graph.call_function(torch.ops.aten.to.dtype, (value, made.dtype))
                value.meta["val"] = read.to(made.dtype)
            if read.shape != made.shape:
                value = program.graph.call_function(torch.ops.aten.expand.default, (value, list(made.shape)))
                value.meta["val"] = made
        node.replace_all_uses_with(value)
        program.graph.erase_node(node)
    program.graph.eliminate_dead_code()
    return program


def _graph_of(program: ExportedProgram, path: str) -> UnitGraph:
    """Return what a program computes.

    Raises:
        ConfigError: it does what a graph cannot say.
    """
    for node in list(program.graph.nodes):
        if (
            node.target is torch.ops.aten.contiguous.default
        ):  # there or not as attention's kernels lay out what they make
            node.replace_all_uses_with(node.args[0])
            program.graph.erase_node(node)
        elif str(node.target).startswith("aten._assert_") and not node.users:
            program.graph.erase_node(node)  # there or not as the tensors of the trace are fake
    signature = program.graph_signature
    names, state, parameters, constants = [], dict[str, str](), set[str](), dict[str, Tensor]()
    for spec in signature.input_specs:
        name = getattr(spec.arg, "name", "")
        if spec.kind is InputKind.USER_INPUT:
            names.append(name)
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            state[name] = str(spec.target)
            parameters |= {name} if spec.kind is InputKind.PARAMETER else set()
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            constants[name] = program.constants[str(spec.target)]
        else:
            raise ConfigError(f"{path} holds {spec.kind.name.lower()}, which is not placed")
    nodes, ends = [], []
    for node in program.graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            if not isinstance(node.target, torch._ops.OpOverload):
                raise ConfigError(f"{path}: {node.name} is a {node.target}, which is not placed")
            nodes.append(node)
        elif node.op == "get_attr":
            raise ConfigError(f"{path}: {node.name} is a graph within the graph, which is not placed")
        elif node.op == "output":
            ends = list(node.args[0])
    outputs, written = [], dict[str, fx.Node]()
    for spec, end in zip(signature.output_specs, ends, strict=True):
        if spec.kind is OutputKind.USER_OUTPUT:
            outputs.append(end)
        elif spec.kind is OutputKind.BUFFER_MUTATION:
            written[str(spec.target)] = end
        else:
            raise ConfigError(f"{path} puts out {spec.kind.name.lower()}, which is not placed")
    assert program.call_spec.out_spec is not None
    return UnitGraph(
        nodes, names, state, frozenset(parameters), constants, outputs, written, program.call_spec.out_spec,
        _shapes(program.graph),
    )  # fmt: skip


def _shapes(graph: fx.Graph) -> dict[Value, tuple[int, ...]]:
    shapes = {}
    for node in graph.nodes:
        made = node.meta.get("val")
        for idx, value in enumerate(made if isinstance(made, list | tuple) else [made]):
            if isinstance(value, Tensor):
                shapes[Value(node.name, idx)] = tuple(value.shape)
    return shapes


def _what_is_written(graph: UnitGraph) -> str:
    """Return the first operator that writes into what is read again, or that others see as well; empty where none does."""
    order = {node: idx for idx, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        assert isinstance(node.target, torch._ops.OpOverload)
        if not node.target._schema.is_mutable:
            continue
        target = node.args[0]
        assert isinstance(target, fx.Node)
        is_counter = target.op == "placeholder" and target.name in graph.state and target.name not in graph.parameters
        if is_counter and len(target.users) == 1:
            continue  # a buffer that counts: every rank has its own
        is_view = isinstance(target.target, torch._ops.OpOverload) and any(
            alias.alias_info is not None for alias in target.target._schema.returns
        )
        read_later = [user for user in target.users if user is not node and order.get(user, 0) > order[node]]
        has_twin = graph.calls[node.name].target is not node.target
        if target.op == "placeholder" or is_view or read_later or not has_twin:
            return f"{node.name} ({node.target}) writes into a value that is read elsewhere"
    return ""
