"""A model and a plan made into this rank's part of a training job."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from ..schema.engine_facts import require_our_engine
from ..schema.errors import RuntimeMismatchError
from ..schema.layout_rules import require_valid
from ..schema.offload import why_not_offloadable
from ..schema.runnable import why_not_runnable, why_not_trainable
from ..schema.training_plan import TrainingPlan
from .adapters import apply_adapters
from .batch_loss import BatchLoss
from .context_parallel import apply_context_parallel
from .data_parallel import apply_data_parallel, compute_dtype, materialise, set_products
from .documents.attention import DocumentAttention
from .expert_parallel import apply_expert_parallel
from .mesh import ParallelMesh, build_mesh
from .models.decoder import Decoder, init_weights
from .models.experts import MixtureOfExperts
from .offload.schedule import HostOffload
from .parallel_model import ParallelModel
from .pipeline_parallel import Copies
from .recompute import apply_recompute
from .tensor_parallel import apply_tensor_parallel
from .training.options import require_compilable, require_documents
from .user_modules import LossFunction, parallelize_user_module
from .weights.load import load_weights


def parallelize(
    model: nn.Module | None,
    plan: TrainingPlan,
    *,
    device: torch.device | None = None,
    seed: int = 0,
    weights: str | Path | None = None,
    compile_blocks: bool = False,
    loss_fn: LossFunction | None = None,
    batch_loss: BatchLoss | None = None,
    per_micro_batch: bool = False,
    on_split: Callable[[ParallelMesh], object] | None = None,
    documents: bool = False,
) -> ParallelModel:
    """Split a model over the ranks of the running torch.distributed job as the plan says.

    Args:
        model: None to build the plan's model with initial weights that depend on ``seed`` only; or a `Decoder`, a model of
            transformers (on the meta device too) or any module, taken over with its weights (the same ones on every rank) and no
            longer usable by itself afterwards. See docs/models.md for what of a plan other modules than a Decoder take.
        plan: its layout must have as many ranks as the default process group.
        device: of this rank; unset, the plan's kind of device (the current one).
        seed: of the initial weights.
        weights: folder of Hugging Face safetensors to start from instead; each rank reads what it holds. They replace those of
            ``model``.
        compile_blocks: let torch.compile fuse the operators of each block.
        loss_fn: of another module than a Decoder: module, inputs and targets of a micro-batch to its mean loss. Unset, the mean
            cross entropy of the next tokens, given logits [B, S, V] (or an object that has them as ``logits``).
        batch_loss: of another module than a Decoder, for any batch and any layout: what the module puts out for a micro-batch, and
            the micro-batch, to a mean loss. `ParallelModel.forward_backward` then takes such batches.
        per_micro_batch: compute ``batch_loss`` of each micro-batch by itself even where its first one shows that this is not the
            loss of the batch (negatives of a contrastive loss), which is refused otherwise.
        documents: train on batches of documents (`ParallelModel.backward_batch`, docs/batch.md): the plan's model, or one of
            transformers.
        on_split: called when every axis is applied and nothing has memory yet; a rehearsal takes it from there (rehearsal/).

    Raises:
        ConfigError: the plan breaks a rule that layouts must satisfy, or the weights are damaged or of another model.
        RuntimeMismatchError: this version or this job cannot execute the plan, or the model is not the plan's.
    """
    _check(model, plan)
    if compile_blocks:
        require_compilable(plan)
    set_products(plan)
    device = device or _default_device(plan)
    if documents:
        require_documents(plan, compiles=compile_blocks)
    if model is not None and not isinstance(model, Decoder):
        return parallelize_user_module(
            model,
            plan,
            device=device,
            seed=seed,
            weights=weights,
            loss_fn=loss_fn,
            batch_loss=batch_loss,
            per_micro_batch=per_micro_batch,
            on_split=on_split,
            documents=documents,
        )
    mesh = build_mesh(plan, device.type)
    batch_parts = mesh.layout.tp // plan.layout.tp
    plan = plan.model_copy(update={"layout": mesh.layout})  # from here on as this rank's stage has it
    stages = [plan.stages[idx] for idx in mesh.stage_idxs]
    with torch.device("meta"):
        module = Decoder(plan.model, attention=plan.workload.attention) if model is None else model
    half_blocks = plan.layout.half_blocks
    module.keep({idx for stage in stages for idx in stage.layer_idxs}, half_blocks=half_blocks)
    if model is not None:
        module.to(device, torch.float32)
    offload = HostOffload(plan, device) if plan.offload is not None else None
    parts = [module] if len(stages) == 1 else [module.part(stage.layer_idxs) for stage in stages]
    for part, stage in zip(parts, stages, strict=True):
        apply_tensor_parallel(part, mesh, plan)
        part.model.reshard = mesh.reshard
        if not documents:
            apply_context_parallel(part, mesh, plan, device)
        apply_expert_parallel(part, mesh, plan)
        apply_adapters(part, plan)
        apply_recompute(part, stage.recompute_of, half_blocks=half_blocks, by_halves=plan.is_by_halves)
        if compile_blocks:
            apply_compile(part)
        if offload is not None:
            offload.activations.apply(part, stage.offload_of)
        reduction = apply_data_parallel(part, mesh, plan, has_groups=documents)
    if on_split is not None:
        on_split(mesh)
    for part in parts if model is None else ():
        materialise(part, plan, device)
        part.tie()
    if weights is not None:
        load_weights(module, plan.model, weights)
    init_weights(module, seed, device, adapters_only=weights is not None or model is not None)
    is_shared = plan.model.tie_embeddings and mesh.pp is not None
    ends = [(end, "weight") for end in (module.model.embed_tokens, module.lm_head) if is_shared and end is not None]
    return ParallelModel(
        plan,
        mesh,
        module,
        device,
        parts=parts,
        offload=offload,
        shared=[Copies(ends, mesh.tied_group)],
        not_counted={"lm_head.weight"} if is_shared else (),  # the first stage counts the tied embedding
        reduction=reduction,
        batch_parts=batch_parts,
        documents=_document_groups(parts, mesh, plan) if documents else None,
    )


def _document_groups(parts: Sequence[Decoder], mesh: ParallelMesh, plan: TrainingPlan) -> DocumentAttention:
    heads = (getattr(block.attention, "num_kv_heads", 1) for block, _ in plan.model.block_runs)
    documents = DocumentAttention.of_plan(plan, mesh, math.gcd(*heads))
    documents.attach(parts)
    return documents


def _default_device(plan: TrainingPlan) -> torch.device:
    if plan.cluster.weakest_device.backend.is_host or not torch.accelerator.is_available():
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _check(model: nn.Module | None, plan: TrainingPlan) -> None:
    # Name and source say where a spec is from, not what it is.
    is_decoder = model is None or isinstance(model, Decoder)
    if isinstance(model, Decoder) and model.spec.replace(name=plan.model.name, source=plan.model.source) != plan.model:
        raise RuntimeMismatchError(f"the model ({model.spec.name}) is not the one the plan is for ({plan.model.name})")
    if plan.local_updates is not None:
        raise RuntimeMismatchError(
            "regions of this plan train by themselves, each a job of its own",
            help="meshwright apply without a script, or give parallelize the plan of one region: plan_of_island(plan, 0)",
        )
    require_our_engine(plan.workload.engine)
    lacking = why_not_runnable(plan.model, plan.workload) if is_decoder else why_not_trainable(plan.workload)
    lacking += why_not_offloadable(plan)
    if lacking:
        raise RuntimeMismatchError(f"this version cannot run {plan.model.name}", details=lacking)
    compute_dtype(plan)
    if not dist.is_initialized():
        raise RuntimeMismatchError(
            "there is no torch.distributed job",
            help="start with `meshwright apply`, or under torchrun call init_process_group()",
        )
    ranks, needed = dist.get_world_size(), plan.layout.world_size
    if ranks != needed:
        raise RuntimeMismatchError(
            f"the plan is for {needed} ranks, this job has {ranks}", help=f"start {needed} processes"
        )
    cluster = plan.cluster
    for layout in dict.fromkeys(plan.layout_of_stage(idx) for idx in range(len(plan.stages))):
        require_valid(
            plan.model, plan.workload, layout, world_size=cluster.num_devices, scaleup_domain=cluster.scaleup_domain
        )


def apply_compile(stage: Decoder) -> None:
    """Compile the blocks of a stage, in place; those with experts stay as they are, since their row counts change each step."""
    for block in stage.model.layers.values():
        if not isinstance(block.mlp, MixtureOfExperts):
            block.compile()
