"""Pipeline stages of a user's module: the steps of its taped call that a stage makes (profilers/module/stages.py).

Units run as modules, so that recompute, sharding and tensor parallelism of theirs do; the functions between them are called as they
were noted. What a stage sends is one flat tensor, whatever values it consists of: torch's schedules then need to know no more of a
module. Every stage gets the batch, of which it makes positions and masks again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ..profilers.module.stages import StageSteps, cut, layers_of, parameters_of
from ..profilers.module.structure import Structure, shell
from ..profilers.module.tape import Ref, State, Step, Tape, record
from ..profilers.module.trials import fake_twin
from .parallel_model import inputs_of

COPY = "_copy"

StageLoss = Callable[[Any, Any], Tensor]
"""What the module puts out, and the targets or the batch, to a mean loss [1]."""


@dataclass(frozen=True)
class _Call:
    """The tape of one kind of call, cut."""

    tape: Tape
    stages: list[StageSteps]
    dtypes: list[torch.dtype]


class UserStages:
    """A module and how its calls are cut.

    Args:
        stage_of_layer: by layer (`ModelSpec.iter_layers`).
        batch: tensors of a micro-batch, without contents: one, or several by position or by name.
        dtype: of products; numbers of the batch and parameters arrive in it.
    """

    def __init__(
        self, module: nn.Module, structure: Structure, stage_of_layer: Mapping[int, int], batch: Any, dtype: torch.dtype
    ) -> None:
        self._module, self._structure, self._stage_of_layer = module, structure, stage_of_layer
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._twin = fake_twin(module, self._mode, dtype)
        self._names, self._batch_spec = (
            list(batch) if isinstance(batch, Mapping) else len(batch),
            tree_flatten(batch)[1],
        )
        leaves, self._spec = tree_flatten(batch)
        self._leaves = [leaf.to(dtype) if leaf.is_floating_point() else leaf for leaf in leaves]
        self._calls: dict[Any, _Call] = {}
        call = self._call(self._leaves, is_training=module.training)
        self._paths = parameters_of(module, call.tape, call.stages)
        self._states = [{path for idx in stage.steps for path in call.tape.steps[idx].states} for stage in call.stages]
        by_id = defaultdict[int, list[str]](list)
        for path, parameter in module.named_parameters(remove_duplicate=False):
            by_id[id(parameter)].append(path)
        stages_of = [[stage for stage, paths in enumerate(self._paths) if paths & set(of)] for of in by_id.values()]
        self.shared = [
            (stages, set(of)) for stages, of in zip(stages_of, by_id.values(), strict=True) if len(stages) > 1
        ]

    def part(self, stage_idx: int) -> nn.Module:
        """Return the module with the parameters of one stage; of those that several have, later ones have copies."""
        names = self._paths[stage_idx]
        copied = [of for stages, of in self.shared if stage_idx in stages[1:]]
        copies: dict[str, nn.Parameter] = {}
        for of in copied:
            one = nn.Parameter(self._module.get_parameter(next(iter(of))).detach().clone())
            copies |= dict.fromkeys(of & names, one)
        return _with_parameters(self._module, names, copies, self._states[stage_idx])

    def run_as_stage(self, part: nn.Module, stage_idx: int, loss: StageLoss) -> None:
        """Let a part be called as a pipeline calls its stages: with what arrives, and leaves of the batch by name."""
        is_first, is_last = stage_idx == 0, stage_idx == len(self._paths) - 1

        def forward(arrived: Tensor, **given: Any) -> Tensor:
            leaves = [given[name] for name in sorted(given) if name.startswith("input")]
            call = self._call(leaves, is_training=part.training)
            values = dict(zip(call.tape.inputs, leaves, strict=True))
            if not is_first:
                values |= _unpacked(arrived, call.stages[stage_idx].receives, call.tape)
            for idx in call.stages[stage_idx].steps:
                _run(call.tape.steps[idx], values, part, arrived.device)
            if not is_last:
                return _packed([values[value] for value in call.stages[stage_idx].sends], call.dtypes[stage_idx])
            outs = [values[leaf.value] if isinstance(leaf, Ref) else leaf for leaf in call.tape.outputs]
            batch = [given[name] for name in sorted(given) if name.startswith("batch")]
            targets = given["targets"] if "targets" in given else tree_unflatten(batch, self._batch_spec)
            return loss(tree_unflatten(outs, call.tape.out_spec), targets)

        part.forward = forward  # type: ignore[method-assign]

    def given(self, batch: Any, *, has_targets: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the tensors of a batch that every stage gets by name, and those that the last one gets for its loss."""
        leaves = tree_leaves(inputs_of(batch, self._names))
        every = {f"input_{idx:03d}": leaf for idx, leaf in enumerate(leaves)}
        all_leaves, self._batch_spec = tree_flatten(batch)
        return every, {} if has_targets else {f"batch_{idx:03d}": leaf for idx, leaf in enumerate(all_leaves)}

    def boundary(self, stage_idx: int) -> Tensor:
        """Return what a stage sends, on the meta device."""
        call = self._call(self._leaves, is_training=self._module.training)
        count = sum(prod(call.tape.kinds[value].shape) for value in call.stages[stage_idx].sends)
        return torch.empty(count, dtype=call.dtypes[stage_idx], device="meta", requires_grad=True)

    def _call(self, leaves: Sequence[Tensor], *, is_training: bool) -> _Call:
        key = is_training, *((tuple(leaf.shape), leaf.dtype) for leaf in leaves)
        if key not in self._calls:
            batch = tree_unflatten([torch.empty_like(leaf, device="meta") for leaf in leaves], self._spec)
            with ThreadPoolExecutor(1) as tracing:  # so that modes and hooks of this thread do not count
                twin = self._twin.train(is_training)
                tape = tracing.submit(record, twin, self._mode, batch, self._structure.blocks).result()
            stages = cut(tape, layers_of(tape, self._structure.paths_of(self._twin)), self._stage_of_layer)
            self._calls[key] = _Call(tape, stages, [_common_dtype(tape, stage.sends) for stage in stages])
        return self._calls[key]


def _with_parameters(
    module: nn.Module, paths: Set[str], copies: Mapping[str, nn.Parameter], read: Set[str], prefix: str = "",
    *, is_elsewhere: bool = False,
) -> nn.Module:  # fmt: skip
    """Return a module that has these of its parameters only; parts that have all of theirs are the module's.

    Parts with none of theirs are of other stages, which have their buffers too: a checkpoint would store those of all stages under
    one name. Some that are ``read`` between units stay.
    """
    inside = [f"{prefix}{path}" for path, _ in module.named_parameters(remove_duplicate=False)]
    is_elsewhere = is_elsewhere or (bool(inside) and paths.isdisjoint(inside))
    if not is_elsewhere and all(path in paths and path not in copies for path in inside):
        return module
    other = shell(module)
    for name in other._buffers if is_elsewhere else ():
        if f"{prefix}{name}" not in read:
            other._buffers[name] = None
    for name in [name for name, parameter in module._parameters.items() if parameter is not None]:
        path = f"{prefix}{name}"
        if path in copies:
            other._parameters[name] = copies[path]
        elif path not in paths:
            other._parameters[name] = None
    for name, child in module.named_children():
        other._modules[name] = _with_parameters(
            child, paths, copies, read, f"{prefix}{name}.", is_elsewhere=is_elsewhere
        )
    return other


def joined(parts: Sequence[nn.Module]) -> nn.Module:
    """Return the parameters of several stages under their names in one module, never called; a second copy as ``NAME_copy``."""
    holders = [part for part in parts if any(True for _ in part.parameters())] or parts[:1]
    if len(holders) == 1 or all(part is holders[0] for part in holders):
        return holders[0]
    other = shell(holders[0])
    for part in holders[1:]:
        for name, parameter in part._parameters.items():
            while parameter is not None and other._parameters.get(name) is not None:
                name += COPY
            other._parameters[name] = other._parameters.get(name) if parameter is None else parameter
    for name in other._modules:
        other._modules[name] = joined([part.get_submodule(name) for part in holders])
    return other


def _run(step: Step, values: dict[int, Any], part: nn.Module, device: torch.device) -> None:
    def meant(leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            return values[leaf.value]
        if isinstance(leaf, State):
            owner, _, name = leaf.path.rpartition(".")
            return getattr(part.get_submodule(owner), name)
        if isinstance(leaf, Tensor):
            return leaf.to(device)
        return device if isinstance(leaf, torch.device) else leaf

    args, kwargs = tree_unflatten([meant(leaf) for leaf in step.leaves], step.spec)
    with torch.set_grad_enabled(step.has_grad_mode and torch.is_grad_enabled()):
        made = (part.get_submodule(step.path) if step.function is None else step.function)(*args, **kwargs)
    values |= {new: values[old] for old, new in step.renamed if old in values}
    for value, leaf in zip(step.outs, tree_flatten(made)[0], strict=True):
        if value is not None:
            values[value] = leaf


def _common_dtype(tape: Tape, values: Sequence[int]) -> torch.dtype:
    dtype = torch.float16 if all(tape.kinds[value].dtype == torch.float16 for value in values) else torch.bfloat16
    for value in values:
        dtype = torch.promote_types(dtype, tape.kinds[value].dtype)
    return dtype


def _packed(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    flat = torch.cat([tensor.reshape(-1).to(dtype) for tensor in tensors])
    return flat if flat.requires_grad or not torch.is_grad_enabled() else flat.requires_grad_()


def _unpacked(flat: Tensor, values: Sequence[int], tape: Tape) -> dict[int, Tensor]:
    kinds = [tape.kinds[value] for value in values]
    pieces = flat.split([prod(kind.shape) for kind in kinds])
    return {
        value: (piece if kind.has_gradient else piece.detach()).view(kind.shape).to(kind.dtype)
        for value, piece, kind in zip(values, pieces, kinds, strict=True)
    }
