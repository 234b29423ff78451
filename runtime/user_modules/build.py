"""Apply a plan to a user's module, a model of `transformers` or a plain one: this rank's part of it as a ParallelModel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...schema.errors import ConfigError, RuntimeMismatchError
from ...schema.model import ModelSpec
from ...schema.training_plan import TrainingPlan
from ..data_parallel import shard_units
from ..mesh import ParallelMesh, build_mesh
from ..models.decoder import init_weights
from ..parallel_model import LossScale, ParallelModel
from ..pipeline_parallel import build_schedule
from ..recompute import checkpoint_block
from ..weights.load import find_weights, read_pieces
from ..weights.names import Piece
from .structure import Structure, find_structure, next_token_loss, require_decoder, run_as_stage, stage_module
from .tensor import split_plain, split_transformers

LossFunction = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""Module, inputs and targets of a micro-batch to its mean loss."""

_SAME = ("hidden_dim", "layers", "tie_embeddings")


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
    is_tied = structure.is_tied(module)
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
        _split(part, structure, mesh, plan, is_tied=is_tied)
        _tie(part, structure, is_tied)
        for idx, block in enumerate(structure.blocks_of(part)):
            if plan.layout.pp == 1 or idx + 1 in stage.layer_idxs:
                checkpoint_block(block, stage.recompute_of(min(idx + 1, plan.model.num_layers - 1)))
        if mesh.pp is not None:
            run_as_stage(part, structure, stage.layer_idxs, plan.model.num_layers)
        _shard(part, structure, mesh, plan)
        if is_meta:
            _materialise(part, device)
            _tie(part, structure, is_tied)
    if weights is not None:
        _load(joined, structure, weights, is_tied=is_tied)
    elif is_meta:
        init_weights(joined, seed, aliases=_aliases(structure, is_tied))
    loss_scale = LossScale.from_plan(plan)
    schedule = None
    if mesh.pp is not None:
        schedule = build_schedule(parts, mesh, plan, device, lambda: loss_scale.value, is_sequence_unsharded=True)
    ends = _ends(joined, structure) if is_tied else None
    return ParallelModel(
        plan, mesh, joined, device, loss_scale, schedule, ends=ends, loss_fn=loss_fn or next_token_loss
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
    differing = [field for field in _SAME if getattr(spec, field) != getattr(plan.model, field)]
    if differing:
        raise RuntimeMismatchError(
            f"the {name} is not the model the plan is for ({plan.model.name}): {', '.join(differing)} differ",
            help="plan with --model and the model's config.json",
        )


def _split(part: nn.Module, structure: Structure, mesh: ParallelMesh, plan: TrainingPlan, *, is_tied: bool) -> None:
    if mesh.tp is None:
        return
    if structure.is_transformers:
        split_transformers(part, structure, mesh.tp, sequence_parallel=plan.layout.sequence_parallel, is_tied=is_tied)
    else:
        split_plain(part, mesh.tp)


def _shard(part: nn.Module, structure: Structure, mesh: ParallelMesh, plan: TrainingPlan) -> None:
    """Shard blocks one by one; embedding, and last norm with head; all that remains, and what is tied, with the part itself."""
    numbered = enumerate(structure.blocks_of(part), start=1)
    blocks = [(idx, block) for idx, block in numbered if any(True for _ in block.parameters())]
    outer: list[list[nn.Module]] = []
    head = part.get_submodule(structure.head) if structure.head else None
    if structure.is_transformers and not structure.is_tied(part):
        base = part.get_submodule(structure.base)
        groups = [[base.get_submodule(name) for name in names] for names in (structure.before, structure.after)]
        if head is not None:
            groups[1].append(head)
        outer = [sharded for group in groups if (sharded := [m for m in group if any(True for _ in m.parameters())])]
    shard_units(part, mesh, plan, blocks=blocks, outer=outer, head=head)


def _tie(part: nn.Module, structure: Structure, is_tied: bool) -> None:
    """Tie embedding and head of one part again: split or materialised, they had become two parameters."""
    if not is_tied:
        return
    embedding, head = _ends(part, structure)
    if embedding is not None and head is not None:
        head.weight = embedding.weight


def _ends(part: nn.Module, structure: Structure) -> tuple[nn.Module | None, nn.Module | None]:
    """Return embedding and head where the part has them."""
    assert structure.embedding is not None
    assert structure.head is not None
    modules = [part.get_submodule(name) for name in (structure.embedding, structure.head)]
    ends = [end if hasattr(end, "weight") else None for end in modules]
    return ends[0], ends[1]


def _join_stages(module: nn.Module, structure: Structure, parts: list[nn.Module], layer_idxs: set[int]) -> nn.Module:
    """Return the layers of several parts under their names; never called."""
    joined = stage_module(module, structure, layer_idxs)
    if structure.head is not None and len(module.get_submodule(structure.blocks)) + 1 in layer_idxs:  # type: ignore[arg-type]
        owner, _, name = structure.head.rpartition(".")
        head = next(h for part in parts if hasattr(h := part.get_submodule(structure.head), "weight"))
        joined.get_submodule(owner).add_module(name, head)
    return joined


def _materialise(part: nn.Module, device: torch.device) -> None:
    """Give memory to what is on the meta device; tables that are no parameters are computed as transformers does."""
    tables = [(owner, name) for owner in part.modules() for name, b in owner.named_buffers(recurse=False) if b.is_meta]
    part.to_empty(device=device)
    initialise: Any = getattr(part, "_init_weights", None)
    for owner in dict.fromkeys(owner for owner, _ in tables):
        if any(True for _ in owner.parameters(recurse=False)) or initialise is None:
            raise RuntimeMismatchError(
                f"{type(owner).__name__} keeps buffers beside parameters, which cannot be made from the meta device",
                help="build the model on the CPU",
            )
        initialise(owner)


def _aliases(structure: Structure, is_tied: bool) -> dict[str, str]:
    """Return which parameter another starts as: a tied head alone on its stage starts as the embedding does."""
    return {f"{structure.head}.weight": f"{structure.embedding}.weight"} if is_tied else {}


def _load(module: nn.Module, structure: Structure, folder: str | Path, *, is_tied: bool) -> None:
    """Load weights by the module's own names, each rank its part."""
    stored, aliases = find_weights(folder), _aliases(structure, is_tied)
    pieces = []
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
