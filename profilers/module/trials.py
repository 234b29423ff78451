"""What can be done with a user's module, found out by trial on fake tensors: pipeline stages, and `fully_shard`.

The two halves of the module are made into stages and run one behind the other. They are the module if no parameter is on both
(but tied ends) and if autograd records what it records of the unsplit module; what a stage adds to that may only be additions (of
the zeros that stand for an embedding) and changes of shape or type. A factor on the embedding that is applied a second time, or a
position that is added again, is seen in this way without any weights.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ...schema.errors import RuntimeMismatchError
from .fakes import on_fakes
from .split_rules import Rule, checked_rules
from .structure import Structure, run_as_stage, stage_module

HARMLESS = (
    "Add",
    "View",
    "UnsafeView",
    "ReshapeAlias",
    "Alias",
    "ToCopy",
    "Clone",
    "Expand",
    "Unsqueeze",
    "Squeeze",
    "Slice",
)
"""Nodes of autograd that a stage may have and the unsplit module has not."""


def why_not_staged(module: nn.Module, structure: Structure, example_inputs: Sequence[Any] | Mapping[str, Any]) -> str:
    """Return why the blocks of a module cannot be the stages of a pipeline; empty where they can."""
    name = type(module).__name__
    if not structure.is_transformers:
        return f"{name} is a plain module, and stages are built of decoders of transformers only"
    if not (structure.head and structure.blocks and structure.embedding):
        lacking = [part for part in ("embedding", "blocks", "head") if not getattr(structure, part)]
        return f"{name} names no {', no '.join(lacking)}, which the first and the last stage of a decoder have"
    blocks = structure.blocks_of(module)
    if len(blocks) < 2 or not isinstance(module.get_submodule(structure.blocks), nn.ModuleList):
        return f"{structure.blocks} of {name} is no list of two or more blocks"
    named = (
        example_inputs.items()
        if isinstance(example_inputs, Mapping)
        else zip(("input_ids",), example_inputs, strict=False)
    )
    tensors = {key: value for key, value in named if isinstance(value, Tensor)}
    others = sorted(tensors.keys() - {"input_ids", "labels", "attention_mask"})
    if others or "input_ids" not in tensors:
        return f"the stages of {name} would get tokens only, and it takes {', '.join(others) or 'no input_ids'}"
    try:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        twin = fake_twin(module, mode)
        with on_fakes(twin, mode):
            tokens = torch.zeros((1, min(tensors["input_ids"].shape[1], 32)), dtype=torch.long)
            return _compare_stages(twin, structure, tokens, len(blocks))
    except Exception as error:  # the module's own code, which may raise anything
        return f"the second of two stages of {name} does not run: {first_line(error)}"


def _compare_stages(module: nn.Module, structure: Structure, tokens: Tensor, num_blocks: int) -> str:
    unsplit = module(input_ids=tokens, use_cache=False).logits
    half = 1 + num_blocks // 2
    halves = [range(half), range(half, num_blocks + 2)]
    parts = [stage_module(module, structure, idxs) for idxs in halves]
    first, second = ({p: name for name, p in part.named_parameters()} for part in parts)
    if both := [name for parameter, name in first.items() if parameter in second]:
        owner = both[0].rpartition(".")[0]
        return f"{owner} of {type(module).__name__} would be on every stage ({len(both)} parameters outside {structure.blocks})"
    hidden = tokens
    for part, idxs in zip(parts, halves, strict=True):
        run_as_stage(part, structure, idxs, num_blocks + 2)
        hidden = part(hidden)
    if hidden.shape != unsplit.shape:
        made, expected_shape = list(hidden.shape), list(unsplit.shape)
        return f"two stages of {type(module).__name__} make logits {made} where the module makes {expected_shape}"
    expected, staged = recorded(unsplit), recorded(hidden)
    more = [
        node for node in staged - expected if not node.removesuffix("0").removesuffix("Backward").startswith(HARMLESS)
    ]
    if more or expected - staged:
        what = f"{more[0]} more often" if more else f"{next(iter(expected - staged))} less often"
        return f"two stages of {type(module).__name__} compute {what} than the module by itself"
    return ""


def recorded(output: Tensor) -> Counter[str]:
    """Return how often each kind of node is in the graph that autograd recorded of a tensor, leaves not counted."""
    counts, seen, waiting = Counter[str](), set[Any](), [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        counts[node.name()] += 1
        waiting += [following for following, _ in node.next_functions]
    return Counter({name: count for name, count in counts.items() if "AccumulateGrad" not in name})


def fake_twin(module: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Return a copy of a module whose parameters and buffers are fake tensors on the CPU, tied where the module's are."""
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        with mode:
            fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            memo[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
    return copy.deepcopy(module, memo)


class SplitFacts(NamedTuple):
    """How tensor parallelism splits a module: the rule of each path, the widths that it must divide, and why not."""

    rules: Mapping[str, Rule]
    widths: tuple[int, ...] = ()
    not_split: str = ""
    not_along_sequence: str = ""


def split_facts(module: Any, structure: Structure) -> SplitFacts:
    """Return how tensor parallelism splits a module as its base_model_tp_plan says; an untied head of a decoder by output."""
    name = type(module).__name__
    if not structure.is_transformers:
        return SplitFacts({}, not_split=f"the code of {name}, a plain module, does not say how its layers are split")
    try:
        rules = checked_rules(module)
    except RuntimeMismatchError as error:
        return SplitFacts({}, not_split=error.message)
    config = module.config.get_text_config()
    heads = (getattr(config, key, None) for key in ("num_attention_heads", "num_key_value_heads"))
    widths = {count for count in heads if isinstance(count, int)}
    for path, rule in rules.items():
        if rule != "heads_norm":
            layer = module.get_submodule(path)
            widths.add(layer.out_features if rule in ("by_output", "gathered") else layer.in_features)
    inside = {path.rpartition(".")[0] for path in rules}
    loose = [
        path for path, parameter in module.get_submodule(structure.blocks).named_parameters(f"{structure.blocks}")
        if parameter.ndim > 1 and not any(path.startswith(f"{parent}.") for parent in inside)
    ]  # fmt: skip
    not_along = f"{loose[0]} of {name} may mix tokens, of which every rank would have a part" if loose else ""
    if not (structure.head and structure.embedding):
        not_along = f"{name} names no head or no embedding, between which the sequence would be cut"
    head = None if structure.is_tied or structure.head is None else module.get_submodule(structure.head)
    if isinstance(head, nn.Linear) and structure.head is not None:
        rules = {**rules, structure.head: "gathered"}
    return SplitFacts(rules, tuple(sorted(widths)), not_along_sequence=not_along)


def why_not_sharded(module: nn.Module, read_outside: Sequence[str]) -> str:
    """Return why `fully_shard` does not take a module; ``read_outside``: parameters of blocks that are read outside of them."""
    name = type(module).__name__
    scalars = [path for path, parameter in module.named_parameters() if parameter.ndim == 0]
    if scalars:
        return (
            f"{scalars[0]} of {name} is a scalar, of which torch's fully_shard has no part to give (make its shape [1])"
        )
    if read_outside:
        return (
            f"{name} reads {read_outside[0]} outside of its block's forward pass, where fully_shard has not gathered it"
        )
    return ""


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its class."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
