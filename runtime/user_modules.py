"""Apply a plan to a user's module, a model of `transformers` or a plain one: this rank's part of it as a ParallelModel.

The blocks are those of the longest ModuleList. In a model of `transformers` the base model holds them; what it has before them
(embeddings) belongs to the first pipeline stage, what comes after (the last norm) and the head to the last one. A stage is the
model itself, in which layers of other stages let everything through: names stay those of the unsplit model, lists keep their
length (models look at a layer's index), and the model's own forward runs, so that positions and masks are made on every stage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..schema.errors import ConfigError, RuntimeMismatchError
from ..schema.model import ModelSpec
from ..schema.training_plan import TrainingPlan
from .data_parallel import shard_units
from .loss import cross_entropy
from .mesh import ParallelMesh, build_mesh
from .models.decoder import init_weights, shell
from .parallel_model import ParallelModel
from .recompute import checkpoint_block
from .user_tensor_parallel import split_plain, split_transformers
from .weights.load import Piece, find_weights, read_pieces

LossFunction = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""Module, inputs and targets of a micro-batch to its mean loss."""


@dataclass(frozen=True)
class Structure:
    """Names in a module.

    Attributes:
        blocks: path of the ModuleList; empty where there is none.
        base: path of the module that holds the blocks' list and runs them (empty: the module itself).
        before, after: children of the base with parameters, in order, before and after the blocks.
        embedding, head: paths of the token embedding and of the output projection; None where the module names none.
        is_tied: embedding and head are one parameter.
    """

    blocks: str
    base: str
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    embedding: str | None = None
    head: str | None = None
    is_tied: bool = False
    is_transformers: bool = False

    def blocks_of(self, module: nn.Module) -> list[nn.Module]:
        """Return the blocks; none where the module has no ModuleList."""
        return list(module.get_submodule(self.blocks).children()) if self.blocks else []


def find_structure(module: nn.Module) -> Structure:
    """Find the blocks of a module, what comes before and after them, its embedding and its head."""
    lists = {name: len(child) for name, child in module.named_modules() if isinstance(child, nn.ModuleList) and name}
    # The experts of a block are a list as well.
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    path = max(outer, key=lambda name: lists[name], default="")
    base, _, blocks = path.rpartition(".")
    before, after = list[str](), list[str]()
    place = before
    for name, child in module.get_submodule(base).named_children():
        if name == blocks:
            place = after
        elif _has_parameters(child):
            place.append(name)
    embedding, head = _named(module, "get_input_embeddings"), _named(module, "get_output_embeddings")
    weights = [getattr(module.get_submodule(end), "weight", None) for end in (embedding, head) if end is not None]
    is_tied = len(weights) == 2 and weights[0] is not None and weights[0] is weights[1]
    # transformers is not imported where nothing else has.
    is_transformers = any(cls.__name__ == "PreTrainedModel" for cls in type(module).__mro__)
    return Structure(path, base, tuple(before), tuple(after), embedding, head, is_tied, is_transformers)


def require_decoder(module: nn.Module, structure: Structure, what: str) -> None:
    """Refuse what only works on a decoder with a head."""
    if not (structure.is_transformers and structure.head and structure.blocks and structure.embedding):
        raise RuntimeMismatchError(
            f"{what} needs a decoder of transformers with an embedding, a list of layers and a head; "
            f"{type(module).__name__} is {'none' if structure.is_transformers else 'a plain module'}",
            help="plan without it, or build the plan's model with parallelize(None, plan)",
        )


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _named(module: nn.Module, method: str) -> str | None:
    """Return the path of the module that a method of another returns; None where it returns none."""
    function = getattr(module, method, None)
    try:
        child = function() if callable(function) else None
    except (NotImplementedError, AttributeError):
        return None
    return next((name for name, candidate in module.named_modules() if child is not None and candidate is child), None)


class Skipped(nn.Module):
    """A layer of another stage: hands its first argument on."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        # What a model may look up of a layer before it calls it: the kind of its attention.
        vars(self).update({k: v for k, v in vars(layer).items() if isinstance(v, str | int) and not k.startswith("_")})

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the hidden states as they are."""
        return hidden


class Nothing(nn.Module):
    """An embedding of another stage: adds nothing."""

    def forward(self, idxs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return zero [], whatever is looked up."""
        return torch.zeros((), device=idxs.device)


def stage_module(model: nn.Module, structure: Structure, layer_idxs: Collection[int]) -> nn.Module:
    """Return a model with these layers only, counted as in ``ModelSpec.iter_layers``; its modules are the given one's."""
    part = shell(model)
    parent = part
    for name in structure.base.split(".") if structure.base else ():
        child = shell(parent.get_submodule(name))
        parent.add_module(name, child)
        parent = child
    blocks = structure.blocks_of(model)
    stage_blocks = [block if idx + 1 in layer_idxs else Skipped(block) for idx, block in enumerate(blocks)]
    parent.add_module(structure.blocks.rpartition(".")[2], nn.ModuleList(stage_blocks))
    if 0 not in layer_idxs:
        for name in structure.before:
            parent.add_module(name, Nothing())
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Dropout):
                parent.add_module(name, nn.Identity())  # the first stage has dropped out already
    if len(blocks) + 1 not in layer_idxs:
        for name in structure.after:
            parent.add_module(name, Skipped(parent.get_submodule(name)))
        assert structure.head is not None
        part.set_submodule(structure.head, nn.Identity())
    elif 0 not in layer_idxs and structure.is_tied:
        assert structure.head is not None
        head = shell(model.get_submodule(structure.head))
        head.weight = nn.Parameter(head.weight.detach().clone())
        part.set_submodule(structure.head, head)
    return part


def run_as_stage(part: nn.Module, structure: Structure, layer_idxs: Collection[int], num_layers: int) -> None:
    """Let a part be called as a pipeline calls its stages: tokens or hidden states to hidden states or the loss [1]."""
    is_first, is_last = 0 in layer_idxs, num_layers - 1 in layer_idxs
    forward_all, base = part.forward, part.get_submodule(structure.base)

    def forward(inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        given = {"input_ids": inputs} if is_first else {"inputs_embeds": inputs}
        if not is_last:
            hidden: Tensor = base(**given, use_cache=False).last_hidden_state
            return hidden
        logits: Tensor = forward_all(**given, use_cache=False).logits
        return logits if targets is None else cross_entropy(logits, targets)

    part.forward = forward  # type: ignore[method-assign]


def next_token_loss(module: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss [1] of the next tokens, of an unsplit module that makes logits of tokens."""
    out = module(inputs)
    logits = out if isinstance(out, Tensor) else out.logits
    return cross_entropy(logits, targets)


def parallelize_user_module(
    module: nn.Module,
    plan: TrainingPlan,
    *,
    device: torch.device,
    seed: int,
    weights: str | Path | None = None,
    loss_fn: LossFunction | None = None,
) -> ParallelModel:
    """Apply a plan to a module that is no Decoder; see `parallelize`."""
    structure = find_structure(module)
    _check(module, structure, plan)
    is_meta = any(parameter.is_meta for parameter in module.parameters())
    if is_meta and not structure.is_transformers:
        raise RuntimeMismatchError(
            f"{type(module).__name__} is on the meta device and cannot say how it is initialised"
        )
    mesh = build_mesh(plan, device.type)
    if structure.is_transformers:
        # A cache would be filled twice where a block is recomputed, and training has no use for one.
        module.config.use_cache = False  # type: ignore[union-attr]
    if not is_meta:
        module.to(device, torch.float32)
    stages = [plan.stages[idx] for idx in mesh.stage_idxs]
    parts, joined = [module], module
    if mesh.pp is not None:
        require_decoder(module, structure, f"pp {plan.layout.pp}")
        parts = [stage_module(module, structure, stage.layer_idxs) for stage in stages]
        local_layers = {idx for stage in stages for idx in stage.layer_idxs}
        joined = parts[0] if len(parts) == 1 else _join_stages(module, structure, parts, local_layers)
    for part, stage in zip(parts, stages, strict=True):
        if mesh.tp is not None:
            _split(part, structure, mesh.tp, plan)
        _tie(part, structure)
        for idx, block in enumerate(structure.blocks_of(part)):
            if plan.layout.pp == 1 or idx + 1 in stage.layer_idxs:
                checkpoint_block(block, stage.recompute_of(min(idx + 1, plan.model.num_layers - 1)))
        if mesh.pp is not None:
            run_as_stage(part, structure, stage.layer_idxs, plan.model.num_layers)
        _shard(part, structure, mesh, plan)
        if is_meta:
            _materialise(part, device)
            _tie(part, structure)
    # A tied head alone on its stage starts as the embedding does.
    aliases = {f"{structure.head}.weight": f"{structure.embedding}.weight"} if structure.is_tied else {}
    if weights is not None:
        _load(joined, aliases, weights)
    elif is_meta:
        init_weights(joined, seed, aliases=aliases)
    ends, loss_fn = _tied_ends(joined, structure), loss_fn or next_token_loss
    return ParallelModel(
        plan, mesh, joined, device, parts=parts, ends=ends, loss_fn=loss_fn, is_sequence_unsharded=True
    )


def _check(module: nn.Module, structure: Structure, plan: TrainingPlan) -> None:
    layout, name = plan.layout, type(module).__name__
    for axis in ("cp", "ep", "etp"):
        if getattr(layout, axis) > 1:
            raise RuntimeMismatchError(
                f"{axis} {getattr(layout, axis)}: the attention and the experts of {name} are its own code, which cannot be spread "
                "over cp, ep or etp",
                help=f"use parallelize(None, plan, weights=...) for the plan's own model, or plan with --fix {axis}=1",
            )
    if plan.workload.adapters is not None:
        raise RuntimeMismatchError(
            f"the plan trains adapters beside its own model; {name} is another",
            help="use parallelize(None, plan, weights=...), or put adapters into the module yourself and plan without",
        )
    if plan.offload is not None:
        raise RuntimeMismatchError(
            f"the plan offloads to the host, which takes the plan's own model; {name} is another",
            help="use parallelize(None, plan, weights=...), or plan without offload",
        )
    if layout.tp > 1 and layout.sequence_parallel and not structure.is_transformers:
        raise RuntimeMismatchError(
            f"sequence_parallel: what stands between the layers of {name} is not known",
            help="plan with --fix sequence_parallel=false",
        )
    if not structure.is_transformers:
        return
    try:
        spec = ModelSpec.from_hf({**module.config.to_dict(), "architectures": [name]})  # type: ignore[operator, union-attr]
    except ConfigError:
        num_blocks = len(structure.blocks_of(module))
        if num_blocks != plan.model.num_blocks:
            raise RuntimeMismatchError(
                f"{name} has {num_blocks} blocks, the model of the plan ({plan.model.name}) {plan.model.num_blocks}"
            ) from None
        return
    differing = [
        field
        for field in ("hidden_dim", "layers", "tie_embeddings")
        if getattr(spec, field) != getattr(plan.model, field)
    ]
    if differing:
        raise RuntimeMismatchError(
            f"the {name} is not the model the plan is for ({plan.model.name}): {', '.join(differing)} differ",
            help="plan with --model and the model's config.json",
        )


def _split(part: nn.Module, structure: Structure, tp: DeviceMesh, plan: TrainingPlan) -> None:
    if not structure.is_transformers:
        split_plain(part, tp)
        return
    if plan.layout.sequence_parallel:
        require_decoder(part, structure, "sequence parallelism")
    head = None if structure.is_tied else structure.head
    split_transformers(part, tp, blocks=structure.blocks, head=head, sequence_parallel=plan.layout.sequence_parallel)


def _shard(part: nn.Module, structure: Structure, mesh: ParallelMesh, plan: TrainingPlan) -> None:
    """Shard blocks one by one; embedding, and last norm with head; all that remains, and what is tied, with the part itself."""
    blocks = [(idx, block) for idx, block in enumerate(structure.blocks_of(part), start=1) if _has_parameters(block)]
    outer: list[list[nn.Module]] = []
    head = part.get_submodule(structure.head) if structure.head else None
    if structure.is_transformers and None in (_tied_ends(part, structure) or (None,)):
        base = part.get_submodule(structure.base)
        groups = [[base.get_submodule(name) for name in names] for names in (structure.before, structure.after)]
        groups[1] += [head] if head is not None else []
        outer = [sharded for group in groups if (sharded := list(filter(_has_parameters, group)))]
    shard_units(part, mesh, plan, blocks=blocks, outer=outer, head=head)


def _tie(part: nn.Module, structure: Structure) -> None:
    """Tie embedding and head of one part again: split or materialised, they had become two parameters."""
    embedding, head = _tied_ends(part, structure) or (None, None)
    if embedding is not None and head is not None:
        head.weight = embedding.weight


def _tied_ends(part: nn.Module, structure: Structure) -> tuple[nn.Module | None, nn.Module | None] | None:
    """Return embedding and head, each where the part has it; None where they are not tied."""
    if not structure.is_tied:
        return None
    ends = (part.get_submodule(name or "") for name in (structure.embedding, structure.head))
    embedding, head = (end if hasattr(end, "weight") else None for end in ends)
    return embedding, head


def _join_stages(module: nn.Module, structure: Structure, parts: list[nn.Module], layer_idxs: set[int]) -> nn.Module:
    """Return the layers of several parts under their names; never called."""
    joined = stage_module(module, structure, layer_idxs)
    if structure.head is not None and len(structure.blocks_of(module)) + 1 in layer_idxs:
        heads = (part.get_submodule(structure.head) for part in parts)
        joined.set_submodule(structure.head, next(head for head in heads if hasattr(head, "weight")))
    return joined


def _materialise(part: nn.Module, device: torch.device) -> None:
    """Give memory to what is on the meta device; tables that are no parameters are computed as transformers does."""
    owners = [owner for owner in part.modules() if any(table.is_meta for table in owner.buffers(recurse=False))]
    part.to_empty(device=device)
    initialise: Any = getattr(part, "_init_weights", None)
    for owner in owners:
        if initialise is None or any(True for _ in owner.parameters(recurse=False)):
            raise RuntimeMismatchError(
                f"{type(owner).__name__} keeps buffers beside parameters, which cannot be made from the meta device",
                help="build the model on the CPU",
            )
        initialise(owner)


def _load(module: nn.Module, aliases: Mapping[str, str], folder: str | Path) -> None:
    """Load weights by the module's own names, or what they start as, each rank its part."""
    stored, pieces = find_weights(folder), list[tuple[str, Piece, Tensor]]()
    for name, parameter in module.named_parameters():
        piece = Piece(aliases.get(name, name), tuple(parameter.shape))
        stored_name = stored.name(piece)
        if stored_name not in stored.file_of:
            raise ConfigError(
                f"{folder} lacks {piece.name}",
                help="models whose files hold every expert by itself: use parallelize(None, plan, weights=...)",
            )
        if stored.shapes[stored_name] != piece.shape:
            raise ConfigError(
                f"{stored_name} in {folder} is {list(stored.shapes[stored_name])}, the model's {list(piece.shape)}"
            )
        pieces.append((stored_name, piece, parameter))
    read_pieces(stored, pieces)
