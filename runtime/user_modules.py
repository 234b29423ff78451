"""Apply a plan to a user's module, a model of `transformers` or a plain one: this rank's part of it as a ParallelModel."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import DeviceMesh

from ..profilers.module.stages import sample_of, why_not_cut
from ..profilers.module.structure import Structure, caching_configs, find_structure, has_parameters
from ..profilers.module.tape import called_with
from ..profilers.module.trials import why_not_sharded
from ..schema.errors import ConfigError, RuntimeMismatchError
from ..schema.model import ModelSpec
from ..schema.training_plan import TrainingPlan
from .batch_loss import BatchLoss, MeanLoss
from .data_parallel import compute_dtype, shard_units
from .documents.attention import DocumentAttention
from .documents.user_attention import attach, document_loss, require_user_documents
from .loss import cross_entropy
from .mesh import ParallelMesh, build_mesh, group_of_stages
from .models.decoder import init_weights
from .parallel_model import ParallelModel, inputs_of
from .pipeline_parallel import Copies
from .placements.execution import apply_placements
from .recompute import checkpoint_block
from .user_stages import COPY, UserStages, joined
from .user_tensor_parallel import split_plain, split_transformers
from .weights.load import Piece, find_weights, read_pieces

LossFunction = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""Module, inputs and targets of a micro-batch to its mean loss."""


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
    batch_loss: BatchLoss | None = None,
    per_micro_batch: bool = False,
    on_split: Callable[[ParallelMesh], object] | None = None,
    documents: bool = False,
) -> ParallelModel:
    """Apply a plan to a module that is no Decoder; see `parallelize`."""
    _check_size(module, plan)
    if batch_loss is not None and not per_micro_batch and plan.layout.dp * plan.num_microbatches > 1:
        batch_loss = MeanLoss(batch_loss)
    structure = find_structure(module, None if plan.model.code is None else plan.model.code.blocks)
    _check(module, structure, plan)
    if documents:
        require_user_documents(module, structure, plan, has_loss=loss_fn is not None or batch_loss is not None)
    is_meta = any(parameter.is_meta for parameter in module.parameters())
    if is_meta and not structure.is_transformers and on_split is None:
        raise RuntimeMismatchError(
            f"{type(module).__name__} is on the meta device and cannot say how it is initialised"
        )
    mesh = build_mesh(plan, device.type)
    for config in caching_configs(module):
        # A cache would be filled twice where a block is recomputed, and training has no use for one.
        config.use_cache = False
    if not is_meta:
        # `module.to(float32)` would take the imaginary parts of complex numbers away.
        module._apply(lambda tensor: tensor.to(device, torch.float32 if tensor.is_floating_point() else tensor.dtype))
    for parameter in module.parameters():
        parameter.data = parameter.data.contiguous()  # `fully_shard` takes no others: transposed ones, or channels last
    local = [plan.stages[idx] for idx in mesh.stage_idxs]
    parts, stages = [module], _stages(module, structure, plan, mesh)
    if stages is not None:
        parts = [stages.part(idx) for idx in mesh.stage_idxs]
    for part, stage, stage_idx in zip(parts, local, mesh.stage_idxs, strict=True):
        if mesh.tp is not None:
            _split(part, structure, mesh.tp, plan)
        _tie(part, structure)
        for idx, block in enumerate(structure.blocks_of(part)):
            if plan.layout.pp == 1 or idx + 1 in stage.layer_idxs:
                checkpoint_block(block, stage.recompute_of(min(idx + 1, plan.model.num_layers - 1)))
        if stages is not None:
            stages.run_as_stage(part, stage_idx, _token_loss if batch_loss is None else _loss_of(batch_loss))
        _shard(part, structure, mesh, plan, stage.layer_idxs)
    if on_split is not None:
        on_split(mesh)
    for part in parts if is_meta else ():
        if structure.is_transformers:
            _materialise(part, device)
        else:  # rehearsed: nothing has values
            part.to_empty(device=device)
        _tie(part, structure)
    module_of_rank = joined(parts)
    # A tied head alone on its stage starts as the embedding does.
    aliases = {f"{structure.head}.weight": f"{structure.embedding}.weight"} if structure.is_tied else {}
    if weights is not None:
        _load(module_of_rank, aliases, weights)
    elif is_meta:
        init_weights(module_of_rank, seed, aliases=aliases)
    shared, not_counted = _copies(stages, parts, module_of_rank, plan, mesh) if stages is not None else ([], set())
    of_batch = None if batch_loss is None else _of_module(batch_loss, plan.model)
    groups = _document_groups(module_of_rank, plan, mesh) if documents else None
    if groups is not None:
        loss_fn = document_loss(groups)
    return ParallelModel(
        plan, mesh, module_of_rank, device, parts=parts, shared=shared, not_counted=not_counted,
        loss_fn=of_batch or loss_fn or next_token_loss, batch_loss=batch_loss,
        stages=stages, documents=groups,
    )  # fmt: skip


def _document_groups(module: nn.Module, plan: TrainingPlan, mesh: ParallelMesh) -> DocumentAttention:
    config: Any = module.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    groups = DocumentAttention.of_plan(plan, mesh, heads)
    attach(module, groups)
    return groups


def _stages(module: nn.Module, structure: Structure, plan: TrainingPlan, mesh: ParallelMesh) -> UserStages | None:
    """Return how a module is cut into the stages of a plan; None for one that is not."""
    if mesh.pp is None:
        return None
    stage_of_layer = {layer: idx for idx, stage in enumerate(plan.stages) for layer in stage.layer_idxs}
    batch = sample_of(plan.model, mesh.layout.micro_batch_size, plan.workload.seq_len)
    try:
        return UserStages(module, structure, stage_of_layer, batch, compute_dtype(plan))
    except ConfigError as error:
        raise RuntimeMismatchError(f"pp {plan.layout.pp}: {error.message}", help="plan with --fix pp=1") from None


def _copies(
    stages: UserStages, parts: Sequence[nn.Module], module_of_rank: nn.Module, plan: TrainingPlan, mesh: ParallelMesh
) -> tuple[list[Copies], set[str]]:
    """Return the parameters that this rank has copies of, and the names of those that an earlier stage counts."""
    shared, later = list[Copies](), set[int]()
    for holders, paths in stages.shared:
        group = group_of_stages(plan, holders)  # every rank makes every group
        attributes = []
        for part, stage_idx in zip(parts, mesh.stage_idxs, strict=True):
            of_part = {path: parameter for path, parameter in part.named_parameters() if path in paths}
            for path in of_part:
                owner, _, name = path.rpartition(".")
                attributes.append((part.get_submodule(owner), name))
            later |= set(map(id, of_part.values())) if stage_idx != holders[0] else set()
        shared.append(Copies(attributes, group))
    return shared, {name for name, parameter in module_of_rank.named_parameters() if id(parameter) in later}


def _token_loss(output: Any, targets: Tensor) -> Tensor:
    return cross_entropy(output if isinstance(output, Tensor) else output.logits, targets)


def _loss_of(batch_loss: BatchLoss) -> BatchLoss:
    return lambda output, batch: _one_number(batch_loss(output, batch))


def _one_number(loss: Tensor) -> Tensor:
    if loss.numel() != 1:
        raise RuntimeMismatchError(
            f"batch_loss returns {list(loss.shape)} numbers, where the loss of a micro-batch is one",
            help="return their mean",
        )
    return loss.reshape(1)


def _of_module(batch_loss: BatchLoss, model: ModelSpec) -> LossFunction:
    arguments = () if model.code is None else model.code.arguments
    names = list(arguments) if any(arguments) else len(arguments)

    def loss(module: nn.Module, batch: Any, _: Tensor) -> Tensor:
        args, kwargs = called_with(inputs_of(batch, names) if arguments else batch)
        return _one_number(batch_loss(module(*args, **kwargs), batch))

    return loss


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
    if plan.degrees_by_stage:
        raise RuntimeMismatchError(
            f"stages of different tp: hidden states between those of {name} are not dealt out anew",
            help="use parallelize(None, plan, weights=...) for the plan's own model, or plan with --fix tp=N",
        )
    if layout.half_blocks:
        raise RuntimeMismatchError(
            f"half_blocks: where attention ends in a block of {name} is its own code",
            help="use parallelize(None, plan, weights=...) for the plan's own model, or plan with --fix half_blocks=false",
        )
    if layout.tp_halves:
        raise RuntimeMismatchError(
            f"tp_halves: what stands between the products of a block of {name} is its own code",
            help="use parallelize(None, plan, weights=...) for the plan's own model, or plan with --fix tp_halves=false",
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
    if layout.tp > 1 and layout.sequence_parallel and not (structure.head and structure.embedding and structure.blocks):
        raise RuntimeMismatchError(
            f"sequence_parallel: {name} names no embedding, blocks or head, around which the sequence is cut",
            help="plan with --fix sequence_parallel=false",
        )
    seq_len = min(plan.workload.seq_len, 8) if plan.model.code is None else plan.workload.seq_len
    sample = sample_of(plan.model, layout.micro_batch_size, seq_len)
    if layout.pp > 1 and (reason := why_not_cut(module, structure, sample)):
        raise RuntimeMismatchError(f"pp {layout.pp}: {reason}", help="plan with --fix pp=1")
    is_replicated = layout.dp_shard == 1 and layout.pp == 1 and plan.workload.is_full_precision
    is_replicated = is_replicated and (layout.tp == 1 or layout.dp_replicate == 1)
    if (reason := why_not_sharded(module, ())) and not is_replicated:
        raise RuntimeMismatchError(reason, help="plan with --precision fp32 --fix dp_shard=1,pp=1,tp=1")
    _check_identity(module, structure, plan)


def _check_size(module: nn.Module, plan: TrainingPlan) -> None:
    """Refuse the plan of a module of another class or size than the one that was traced."""
    name, num_params = type(module).__name__, sum(parameter.numel() for parameter in module.parameters())
    code = plan.model.code
    if code is not None and (name, num_params) != (code.class_name, plan.model.num_params):
        raise RuntimeMismatchError(
            f"the plan is for {code.class_name} with {plan.model.num_params:,} parameters, this is {name} with {num_params:,}",
            help="trace this module with profile_module and plan what that returns",
        )


def _check_identity(module: nn.Module, structure: Structure, plan: TrainingPlan) -> None:
    """Refuse a plan of another model."""
    name, num_blocks = type(module).__name__, len(structure.blocks_of(module))
    if plan.model.code is not None:
        return
    if not structure.is_transformers:
        if num_blocks != plan.model.num_blocks:
            raise RuntimeMismatchError(
                f"the plan is for {plan.model.name} with {plan.model.num_blocks} blocks, {name} has {num_blocks or 'none'}",
                help="trace this module with profile_module and plan what that returns",
            )
        return
    try:
        spec = ModelSpec.from_hf({**module.config.to_dict(), "architectures": [name]})  # type: ignore[operator, union-attr]
    except ConfigError:
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
            help="plan the model's own config.json",
        )


def _split(part: nn.Module, structure: Structure, tp: DeviceMesh, plan: TrainingPlan) -> None:
    code = plan.model.code
    if code is not None and code.placements:
        apply_placements(part, [placed for placed in code.placements if placed.num_ranks == tp.size()], tp)
        return
    if not structure.is_transformers:
        split_plain(part, tp)
        return
    head = None if structure.is_tied else structure.head
    split_transformers(part, tp, blocks=structure.blocks, head=head, sequence_parallel=plan.layout.sequence_parallel)


def _shard(
    part: nn.Module, structure: Structure, mesh: ParallelMesh, plan: TrainingPlan, layer_idxs: Collection[int]
) -> None:
    """Shard blocks one by one; embedding, and last norm with head; all that remains, and what is tied, with the part itself."""
    code = plan.model.code
    if why_not_sharded(part, ()) or (code is not None and code.not_sharded):
        if mesh.data_degree > 1:  # whole fp32 replicas, of which not every parameter need have a gradient
            replicate(
                part, process_group=mesh.fsdp["dp_replicate"].get_group(), find_unused_parameters=True, init_sync=False
            )
        return
    called = [
        (idx, block) for idx, block in enumerate(structure.blocks_of(part), 1) if mesh.pp is None or idx in layer_idxs
    ]
    blocks = [(idx, block) for idx, block in called if has_parameters(block)]
    outer: list[list[nn.Module]] = []
    head = part.get_submodule(structure.head) if structure.head else None
    # A stage is the module that is called, its ends are not.
    if mesh.pp is None and structure.is_transformers and None in (_tied_ends(part, structure) or (None,)):
        base = part.get_submodule(structure.base)
        groups = [[base.get_submodule(name) for name in names] for names in (structure.before, structure.after)]
        groups[1] += [head] if head is not None else []
        outer = [sharded for group in groups if (sharded := list(filter(has_parameters, group)))]
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
    embedding, head = (end if getattr(end, "weight", None) is not None else None for end in ends)
    return embedding, head


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
        original = name.replace(COPY, "")
        piece = Piece(aliases.get(original, original), tuple(parameter.shape))
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
