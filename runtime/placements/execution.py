"""Units of a user's module run as a plan places their operators: the exported graph on this rank's tensors.

A unit is exported when it is first called with tensors of some shape, from a copy without contents, and must be the graph that
was placed. Its parameters become DTensors (for checkpoints, clipping and `fully_shard`), its forward pass the graph's operators on
local tensors with conversions between them. Everything between units is the user's code on whole values.
"""

from __future__ import annotations

import hashlib
import warnings
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from ...profilers.module.fakes import on_fakes
from ...profilers.module.trials import fake_twin, first_line
from ...profilers.module.units import described, is_setting
from ...profilers.placements.export import UnitGraph, Value, export_unit, skeleton
from ...profilers.placements.gate import parsed
from ...profilers.placements.localise import Call, tensors_of
from ...profilers.placements.parts import is_cut
from ...profilers.placements.signatures import RANDOM, Signature, short_name
from ...schema.errors import ConfigError, RuntimeMismatchError
from ...schema.placement_forms import ENTIRE, Form
from ...schema.placements import UnitPlacement
from ..models.layers import local_tensor
from .conversions import convert


def apply_placements(module: nn.Module, placements: Sequence[UnitPlacement], tp: DeviceMesh) -> None:
    """Place the units of a module on the ranks of a mesh, in place.

    Raises:
        RuntimeMismatchError: a unit is missing, or has other parameters than were placed.
    """
    _warn_of_other_random_states(tp.get_group())
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    twin = fake_twin(module, mode)
    sharded: dict[int, nn.Parameter] = {}
    of_path = defaultdict[str, list[UnitPlacement]](list)
    for placement in placements:
        for path in placement.paths:
            of_path[path].append(placement)
    for path, graphs in of_path.items():
        unit = _submodule(module, path)
        if unit is None or not any(True for _ in unit.parameters()):
            continue  # of another pipeline stage
        _shard_parameters(module, unit, path, graphs[0], tp, sharded)
        unit.forward = _PlacedUnit(unit, twin.get_submodule(path), mode, path, graphs, tp)


def _warn_of_other_random_states(group: dist.ProcessGroup) -> None:
    """Say where ranks that hold copies would draw other numbers, by which these drift apart."""
    states = [""] * dist.get_world_size(group)
    dist.all_gather_object(states, hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(), group=group)
    if len(set(states)) > 1 and dist.get_rank(group) == 0:
        warnings.warn(
            "ranks of one tp group have other random states: noise and dropout outside of placed units would differ, and what each "
            "holds a copy of would drift apart; call torch.manual_seed with the same number on all of them",
            stacklevel=3,
        )


def _submodule(module: nn.Module, path: str) -> nn.Module | None:
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


def _shard_parameters(
    module: nn.Module,
    unit: nn.Module,
    path: str,
    placement: UnitPlacement,
    tp: DeviceMesh,
    sharded: dict[int, nn.Parameter],
) -> None:
    """Make parameters DTensors wherever the module has them: tied ones stay one parameter."""
    for name, written in placement.parameters:
        owner_path, _, attribute = name.rpartition(".")
        owner = _submodule(unit, owner_path)
        parameter = getattr(owner, attribute, None)
        if owner is None or not isinstance(parameter, nn.Parameter):
            raise RuntimeMismatchError(f"{path} has no parameter {name}, which the plan places")
        if any(parameter is made for made in sharded.values()):
            continue  # tied, and placed with another unit
        form = Form.parse(written)
        if form.kind == "S" and parameter.shape[form.dim] % tp.size():
            raise RuntimeMismatchError(
                f"{path}.{name} is {list(parameter.shape)}, dimension {form.dim} of which {tp.size()} ranks cannot hold equally",
                help="plan this module again",
            )
        cut = Shard(form.dim) if form.kind == "S" else Replicate()
        part = distribute_tensor(parameter.data, tp, [cut], src_data_rank=None)
        sharded[id(parameter)] = made = nn.Parameter(part, requires_grad=parameter.requires_grad)
        for other in module.modules():
            for key, value in other._parameters.items():
                if value is parameter:
                    other._parameters[key] = made


@dataclass
class _Step:
    """An operator: what it reads in which form, made in which one, and what is no longer needed behind it."""

    name: str
    call: Call
    signature: Signature
    reads: list[tuple[Value, Form, Form]]
    out_shape: tuple[int, ...] | None
    is_random: bool
    done: list[Value]


@dataclass
class _Program:
    """A placed graph: its steps, how its outputs are read, and where its state is."""

    graph: UnitGraph
    steps: list[_Step]
    forms: dict[Value, Form]
    state: list[tuple[str, nn.Module, str]]


_Setting = tuple[str, str]
"""Path of a part of a unit, and the name of its attribute."""


MANY_CHANGES = 8
"""Changes of settings of a unit that are borne without a word."""


class _NotPlacedError(Exception):
    """No placement is for a call."""


class _PlacedUnit:
    """The forward pass of a unit, which has a placement in training and may have another one in evaluation.

    A graph is made of each kind of call, and anew where a setting of the unit (a rate, a temperature) is another one by now. A kind
    that has no placement is computed whole from then on, by the unit's own code, which reads its settings itself.
    """

    def __init__(
        self,
        unit: nn.Module,
        twin: nn.Module,
        mode: FakeTensorMode,
        path: str,
        placements: Sequence[UnitPlacement],
        tp: DeviceMesh,
    ) -> None:
        self._unit, self._twin, self._mode, self._path, self._placements = unit, twin, mode, path, placements
        self._forward, self._is_first = unit.forward, path == placements[0].paths[0]
        self._group, self._num_ranks = tp.get_group(), tp.size()
        self._programs: dict[str, _Program | None] = {}
        self._settings: dict[str, dict[_Setting, Any]] = {}
        self._num_changes = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the unit on whole values."""
        key, settings = f"{self._unit.training} {described((args, kwargs))}", self._settings_now()
        if key not in self._programs or (self._programs[key] is not None and self._settings[key] != settings):
            self._update(key, settings, args, kwargs)
        program = self._programs[key]
        if program is None:
            return self._run_unsplit(args, kwargs)
        graph = program.graph
        values: dict[tuple[Value, Form], Any] = {
            (Value(name), program.forms[Value(name)]): local_tensor(getattr(owner, attribute))
            for name, owner, attribute in program.state
        }
        leaves, _ = tree_flatten((args, kwargs))
        values |= {(Value(name), ENTIRE): leaf for name, leaf in zip(graph.inputs, leaves, strict=True)}
        values |= {(Value(name), ENTIRE): constant for name, constant in graph.constants.items()}
        for step in program.steps:
            read = [self._read(values, *which) for which in step.reads]
            made = self._run(step, read)
            for idx, (tensor, form) in enumerate(zip(made, step.signature.outs, strict=True)):
                values[Value(step.name, idx), form] = tensor
            for value in step.done:
                for entry in [known for known in values if known[0] == value]:
                    del values[entry]
        outs = [
            self._read(values, graph.value_of(out), program.forms[graph.value_of(out)], ENTIRE)
            if isinstance(out, torch.fx.Node)
            else out
            for out in graph.outputs
        ]
        self._write(graph, program, values)
        return tree_unflatten(outs, graph.out_spec)

    def _settings_now(self) -> dict[_Setting, Any]:
        return {
            (path, name): value
            for path, part in self._unit.named_modules()
            for name, value in vars(part).items()
            if is_setting(value)
        }

    def _update(self, key: str, settings: dict[_Setting, Any], args: Any, kwargs: Any) -> None:
        """Make the program of a kind of call, or make it anew for other settings, whether or not these change what it computes."""
        twins = dict(self._twin.named_modules())
        for (path, name), value in settings.items():
            if path in twins:
                vars(twins[path])[name] = value
        if key in self._programs:
            self._num_changes += 1
            if self._num_changes == MANY_CHANGES and self._is_first and dist.get_rank(self._group) == 0:
                changed = {each[1] for each, value in settings.items() if self._settings[key].get(each) != value}
                warnings.warn(
                    f"{self._path} is traced anew for the {MANY_CHANGES}th time, as these change: {', '.join(sorted(changed))}; "
                    "keep what only counts steps outside of the module",
                    stacklevel=3,
                )
        self._programs[key], self._settings[key] = self._program(args, kwargs), settings

    @torch.no_grad()
    def _write(self, graph: UnitGraph, program: _Program, values: dict[tuple[Value, Form], Any]) -> None:
        """Let buffers become what the call makes of them, the same on every rank."""
        for path, node in graph.written.items():
            value = graph.value_of(node)
            owner, attribute = _owner(self._unit, path)
            getattr(owner, attribute).copy_(self._read(values, value, program.forms[value], ENTIRE))

    def _read(self, values: dict[tuple[Value, Form], Any], value: Value, made: Form, form: Form) -> Any:
        if (value, form) not in values:
            source = values[value, made]
            values[value, form] = convert(source, made, form, self._group) if isinstance(source, Tensor) else source
        return values[value, form]

    def _run(self, step: _Step, read: Sequence[Any]) -> list[Tensor]:
        if not step.is_random:
            return tensors_of(step.call.run(read, step.signature.variant, self._num_ranks, step.out_shape))
        # Each rank drops out by itself on its part: from one number that all ranks draw, so that they stay in step.
        seed = int(torch.randint(2**31, (1,))) + dist.get_rank(self._group)
        devices = [t.device for t in read if isinstance(t, Tensor) and t.device.type != "cpu"][:1]
        with torch.random.fork_rng(devices, device_type=devices[0].type if devices else "cpu"):
            torch.manual_seed(seed)
            return tensors_of(step.call.run(read, step.signature.variant, self._num_ranks, step.out_shape))

    def _run_unsplit(self, args: Any, kwargs: Any) -> Any:
        """Run the unit's code on gathered parameters: every rank computes all of it."""
        slots = [(*_owner(self._unit, path), Form.parse(form)) for path, form in self._placements[0].parameters]
        local = [owner._parameters[attribute] for owner, attribute, _ in slots]
        try:
            for parameter, (owner, attribute, form) in zip(local, slots, strict=True):
                gathered = convert(local_tensor(parameter), form, ENTIRE, self._group)
                owner._parameters[attribute] = gathered  # type: ignore[assignment]
            return self._forward(*args, **kwargs)
        finally:
            for parameter, (owner, attribute, _) in zip(local, slots, strict=True):
                owner._parameters[attribute] = parameter

    def _program(self, args: Any, kwargs: Any) -> _Program | None:
        """Return the program for calls like this one; None where none is placed for them."""
        try:
            graph = self._traced(args, kwargs)
            placement = self._placement_of(graph, tree_flatten((args, kwargs))[0])
            program = self._placed(graph, placement)
        except _NotPlacedError as error:
            if self._is_first and dist.get_rank(self._group) == 0:
                warnings.warn(f"{self._path} is computed whole on every rank of tp: {error}", stacklevel=3)
            return None
        return program

    def _placement_of(self, graph: UnitGraph, leaves: Sequence[Any]) -> UnitPlacement:
        """Return the placement of a graph.

        Raises:
            _NotPlacedError: none is of this graph.
        """
        traced = skeleton(graph.described)
        placement = next((p for p in self._placements if skeleton(p.described) == traced), None)
        if placement is None:
            placed = self._placements[0].described
            pairs = zip(placed, skeleton(placed), graph.described, traced, strict=False)
            default = f"{len(placed)} operators", len(traced)
            was, now = next(((a, b) for a, of_a, b, of_b in pairs if of_a != of_b), default)
            raise _NotPlacedError(f"it computes {now} where the plan placed {was}")
        for idx, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.requires_grad and not placement.trained_inputs[idx]:
                raise _NotPlacedError(f"its input {idx} has a gradient, which it had not where it was placed")
        return placement

    def _placed(self, graph: UnitGraph, placement: UnitPlacement) -> _Program:
        signatures = [parsed(written) for written in placement.signatures]
        of_path = {path: Form.parse(form) for path, form in placement.parameters}
        forms = {Value(name): ENTIRE for name in (*graph.inputs, *graph.constants)}
        forms |= {Value(name): of_path.get(path, ENTIRE) for name, path in graph.state.items()}
        last: dict[Value, int] = {}
        ends = set(map(graph.value_of, graph.ends))
        steps: list[_Step] = []
        device = next(self._unit.parameters()).device
        graph.constants = {name: constant.to(device) for name, constant in graph.constants.items()}
        for idx, (node, signature) in enumerate(zip(graph.nodes, signatures, strict=True)):
            call = graph.calls[node.name].on_device(device)
            refs = [graph.value_of(producer) for producer in call.producers]
            last |= dict.fromkeys(refs, idx)
            reads = [(ref, forms[ref], form) for ref, form in zip(refs, signature.ins, strict=True)]
            forms |= {Value(node.name, i): form for i, form in enumerate(signature.outs)}
            self._require_even(graph, call, signature, refs)
            shape = tuple(node.meta["val"].shape) if isinstance(node.meta.get("val"), Tensor) else None
            is_random = short_name(call) in RANDOM and any(form.kind == "S" for form in signature.ins)
            is_random = (
                is_random and bool(call.argument(RANDOM[short_name(call)])) and call.argument("train") is not False
            )
            steps.append(_Step(node.name, call, signature, reads, shape, is_random, []))
        for value, idx in last.items():
            if value not in ends:
                steps[idx].done.append(value)
        state = [(name, *_owner(self._unit, path)) for name, path in graph.state.items()]
        return _Program(graph, steps, forms, state)

    def _require_even(self, graph: UnitGraph, call: Call, signature: Signature, refs: Sequence[Value]) -> None:
        """Refuse sizes of this call that the ranks cannot divide."""
        for ref, form in zip(refs, signature.ins, strict=True):
            shape = graph.shapes[ref]
            if form.kind == "S" and not is_cut(shape[form.dim], form, self._num_ranks):
                raise _NotPlacedError(f"{ref.node} is {list(shape)}, which it is not cut {form} for")
        if signature.variant and not signature.variant.startswith("out:"):
            sizes = [call.numbers[idx] for idx in map(int, signature.variant.split(","))]
            if any(size % self._num_ranks for size in sizes):
                raise _NotPlacedError(f"sizes {sizes} of {call.name} do not divide by {self._num_ranks}")

    def _traced(self, args: Any, kwargs: Any) -> UnitGraph:
        twin = self._twin
        local = {name: local_tensor(parameter).dtype for name, parameter in self._unit.named_parameters()}

        def fake(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return torch.empty(value.shape, dtype=value.dtype, device="cpu").requires_grad_(value.requires_grad)

        try:
            with on_fakes(twin, self._mode):
                for name, parameter in twin.named_parameters():  # `fully_shard` gathers them in the type of products
                    parameter.data = parameter.data.to(local[name])
                given, named = tree_map(fake, (args, kwargs))
            # In a thread of its own: a checkpoint that runs here would count what the trace saves.
            with ThreadPoolExecutor(1) as tracing:
                return tracing.submit(export_unit, twin, given, named, path=self._path).result()
        except ConfigError as error:
            raise _NotPlacedError(error.message) from None
        except Exception as error:  # the module's own code
            raise _NotPlacedError(f"it cannot be traced: {first_line(error)}") from None


def _owner(unit: nn.Module, path: str) -> tuple[nn.Module, str]:
    owner, _, attribute = path.rpartition(".")
    return unit.get_submodule(owner), attribute
