"""A taped call cut into the stages of a pipeline.

A step of the tape belongs to a layer (`ModelSpec.iter_layers`): a block to that of its number; what reads no block to the first;
what reads the last block to the last; everything else to the latest layer whose values it reads. What needs neither parameters nor
chance is made again on every stage that reads it (positions, masks, tables of angles); the other values travel from stage to stage
as far as they are read: hidden states, what an encoder made, a condition.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ...schema.errors import ConfigError
from ...schema.model import ModelSpec
from ...schema.traced import SampleTensor
from .structure import Structure
from .tape import Ref, Tape, record
from .trials import failure, fake_twin


@dataclass(frozen=True)
class StageSteps:
    """What a stage does: ``steps`` in order, with values that it ``receives`` from the stage before and ``sends`` to the next."""

    steps: tuple[int, ...]
    receives: tuple[int, ...]
    sends: tuple[int, ...]


def layers_of(tape: Tape, blocks: Sequence[str]) -> list[int | None]:
    """Return the layer of each step; None for what every stage makes for itself.

    Args:
        blocks: their paths, in order.

    Raises:
        ConfigError: a block reads what a later one makes.
    """
    number, num_blocks = {path: idx for idx, path in enumerate(blocks)}, len(blocks)
    layers: list[int | None] = []
    of_value: list[int | None] = [None] * len(tape.kinds)
    for step in tape.steps:
        read = [layer for value in step.reads if (layer := of_value[value]) is not None]
        block = number.get(step.path)
        has_parameters = bool(step.path) or any(path in tape.parameters for path in step.states)
        if block is not None:
            layer: int | None = block + 1
            if any(before > block + 1 for before in read):
                raise ConfigError(f"{step.path} reads what a later block makes")
        elif read or has_parameters or step.is_random or step.writes_state:
            latest = max(read, default=0)
            layer = num_blocks + 1 if latest == num_blocks else latest
        else:
            layer = None
        layers.append(layer)
        for value in step.makes:
            of_value[value] = layer
    return layers


def cut(tape: Tape, layers: Sequence[int | None], stage_of_layer: Mapping[int, int]) -> list[StageSteps]:
    """Return the stages of a tape."""
    num_stages = 1 + max(stage_of_layer.values())
    stage_of = [None if layer is None else stage_of_layer[layer] for layer in layers]
    maker = {value: idx for idx, step in enumerate(tape.steps) for value in step.makes}
    needed: list[set[int]] = []
    steps: list[list[int]] = []
    for stage in range(num_stages):
        on_stage = {idx for idx, of in enumerate(stage_of) if of == stage}
        waiting = [value for idx in on_stage for value in tape.steps[idx].reads]
        if stage == num_stages - 1:
            waiting += [leaf.value for leaf in tape.outputs if isinstance(leaf, Ref)]
        from_before = set[int]()
        while waiting:
            value = waiting.pop()
            idx = maker.get(value)
            if idx is None or idx in on_stage:
                continue
            if stage_of[idx] is None:
                on_stage.add(idx)
                waiting += tape.steps[idx].reads
            else:
                from_before.add(value)
        needed.append(from_before)
        steps.append(sorted(on_stage))
    made_on = {value: stage_of[idx] for value, idx in maker.items()}
    bounds = [
        tuple(sorted({
            value for later in needed[stage + 1:] for value in later if (made := made_on[value]) is not None and made <= stage
        }))
        for stage in range(num_stages - 1)
    ]  # fmt: skip
    return [
        StageSteps(tuple(steps[s]), bounds[s - 1] if s else (), bounds[s] if s < num_stages - 1 else ())
        for s in range(num_stages)
    ]


def parameters_of(module: nn.Module, tape: Tape, stages: Sequence[StageSteps]) -> list[set[str]]:
    """Return the paths of the parameters that each stage reads; those that nothing reads are where another name of theirs is."""
    tensors = dict(module.named_parameters(remove_duplicate=False))
    paths = list(tensors)
    within = defaultdict[str, list[str]](list)
    for unit in tape.units:
        within[unit] = [path for path in paths if path.startswith(f"{unit}.")]
    read = [
        {
            path
            for idx in stage.steps
            for path in (*within[tape.steps[idx].path], *tape.steps[idx].states)
            if path in tape.parameters
        }
        for stage in stages
    ]
    stage_of = {id(tensors[path]): paths for paths in reversed(read) for path in paths}
    for path in set(paths) - set[str]().union(*read):
        stage_of.get(id(tensors[path]), read[0]).add(path)
    return read


def why_not_cut(module: nn.Module, structure: Structure, batch: Any) -> str:
    """Return why a module cannot be cut into stages, of one layer each even; empty where it can.

    Args:
        batch: tensors by position or by name, their values do not count.
    """
    name = type(module).__name__
    if len(blocks := structure.paths_of(module)) < 2:
        return f"{name} has no list of two or more blocks, which stages are made of"
    try:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        tape = record(fake_twin(module, mode), mode, batch, structure.blocks)
        layers = layers_of(tape, blocks)
    except ConfigError as error:
        return f"its code cannot be cut into stages: {error.message}"
    except Exception as error:  # the module's own code, which may raise anything
        return f"{name} does not run without values: {failure(module, error)}"
    if lacking := set(range(1, len(blocks) + 1)) - set(layers):
        return f"{blocks[min(lacking) - 1]} of {name} is not called with this sample"
    for stage in cut(tape, layers, {layer: layer for layer in range(len(blocks) + 2)}):
        for kind in (tape.kinds[value] for value in stage.sends):
            if not kind.dtype.is_floating_point:
                return f"stages of {name} would hand on {list(kind.shape)} of {kind.dtype}, where only numbers travel"
    return ""


def sample_of(model: ModelSpec, num_samples: int, seq_len: int) -> Any:
    """Return what a model is called with, on the meta device: what its code was traced with, else tokens."""
    sample = () if model.code is None else model.code.sample
    if not sample:
        return [torch.empty((num_samples, seq_len), dtype=torch.long, device="meta")]
    tensors = [torch.empty((num_samples, *t.shape), dtype=getattr(torch, t.dtype), device="meta") for t in sample]
    return dict(zip((t.name for t in sample), tensors, strict=True)) if sample[0].name else tensors


def described_sample(example_inputs: Sequence[Any] | Mapping[str, Any]) -> tuple[SampleTensor, ...]:
    """Return the tensors of a call by position or by name; none where it takes other things, or a tensor without samples."""
    is_named = isinstance(example_inputs, Mapping)
    named = list(example_inputs.items()) if isinstance(example_inputs, Mapping) else [("", t) for t in example_inputs]
    if any(not isinstance(t, Tensor) or not t.ndim or (is_named and not isinstance(name, str)) for name, t in named):
        return ()
    return tuple(
        SampleTensor(name=name, shape=tuple(t.shape[1:]), dtype=str(t.dtype).removeprefix("torch."))
        for name, t in named
    )
