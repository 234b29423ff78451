"""Tensor parallelism by DTensor: column- and row-wise layers, a split vocabulary, and sequence parallelism.

Activations between blocks are plain local tensors: [B, S, D] on every rank, or with sequence parallelism [B, S / tp, D]. Inside a
region the input is a DTensor, so that the gradients of q, k and v (or gate and up) are added before they are reduced, once.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from ..schema.training_plan import TrainingPlan
from .halves import take_by_halves
from .loss import VocabShard
from .mesh import ParallelMesh
from .models.attention import LatentSelfAttention
from .models.decoder import Decoder, DecoderBlock
from .models.experts import MixtureOfExperts
from .models.layers import FeedForward, LocalModule, local_tensor, redistribute, shard_parameters


def apply_tensor_parallel(stage: Decoder, mesh: ParallelMesh, plan: TrainingPlan) -> None:
    """Split a stage's layers over tp, in place; nothing to do when tp is 1. All parameters become DTensors."""
    if mesh.tp is None:
        return
    hidden = Shard(1) if plan.layout.sequence_parallel else Replicate()
    for name, block in stage.model.layers.items():
        assert isinstance(block, DecoderBlock)
        by_halves = plan.is_by_halves(int(name) + 1)
        _split_block(block, mesh.tp, hidden, by_halves=by_halves)
        if by_halves:
            take_by_halves(block, mesh.tp, hidden)
        if isinstance(block.mlp, MixtureOfExperts):
            _split_mixture(block.mlp, mesh.tp, hidden)
    width = -(-plan.model.vocab_size // mesh.tp.size())  # DTensor cuts as torch.chunk does
    shard = VocabShard(offset=width * mesh.tp_rank, group=mesh.tp.get_group())
    if stage.model.embed_tokens is not None:
        _split_embedding(stage.model.embed_tokens, mesh.tp, shard, hidden)
    if stage.model.embed_positions is not None:
        # Added to the tokens of this rank, which under sequence parallelism has a part of the sequence.
        _replicate_norm(stage.model.embed_positions, mesh.tp, hidden)
        stage.model.embed_positions.share = (mesh.tp_rank, mesh.tp.size()) if hidden.is_shard() else (0, 1)
    if stage.model.norm is not None and stage.lm_head is not None:
        _replicate_norm(stage.model.norm, mesh.tp, hidden)
        # The logits stay split: the loss works on this rank's columns.
        _apply(stage.lm_head, mesh.tp, ColwiseParallel(input_layouts=hidden, output_layouts=Shard(-1)))
        stage.vocab_shard = shard
    stage.tie()


def _split_block(block: DecoderBlock, tp: DeviceMesh, hidden: Placement, *, by_halves: bool) -> None:
    """Split the products of a block; by half-batches the collectives around them are runtime/halves.py's."""
    if isinstance(block.mlp, FeedForward):
        _split_feed_forward(block, "mlp", tp, hidden, by_halves=by_halves)
    for norm in filter(None, (block.input_layernorm, block.post_attention_layernorm)):
        _replicate_norm(norm, tp, hidden)
    if block.self_attn is None:
        return
    to_region = PrepareModuleInput(input_layouts=(hidden,), desired_input_layouts=(Replicate(),))
    plan: dict[str, ParallelStyle] = {
        "self_attn.o_proj": RowwiseParallel(output_layouts=Partial() if by_halves else hidden)
    }
    is_latent = isinstance(block.self_attn, LatentSelfAttention)
    by_heads = ("q_proj", "q_b_proj", "kv_b_proj") if is_latent else ("q_proj", "k_proj", "v_proj")
    plan |= {f"self_attn.{name}": ColwiseParallel() for name in by_heads if hasattr(block.self_attn, name)}
    _apply(block, tp, plan if is_latent or by_halves else {"self_attn": to_region, **plan})
    if isinstance(block.self_attn, LatentSelfAttention):
        # Compressed vectors are on every rank, unsharded and with full gradients; the heads are split.
        block.self_attn.tp, block.self_attn.hidden = tp, hidden
        for module in block.self_attn.children():
            if isinstance(module, LocalModule):
                _replicate(module, tp, Replicate())
        return
    for head_norm in filter(None, (block.self_attn.q_norm, block.self_attn.k_norm)):
        if block.self_attn.norm_each_head:
            _replicate_norm(head_norm, tp, Shard(2))  # each rank sees its own heads
        else:  # over a dimension of which each rank has a part, with that part of the weight
            shard_parameters(head_norm, tp, lambda _: [Shard(0)])
            head_norm.tp = tp


def _split_feed_forward(
    parent: nn.Module, name: str, tp: DeviceMesh, hidden: Placement, *, by_halves: bool = False
) -> None:
    plan: dict[str, ParallelStyle] = {
        f"{name}.up_proj": ColwiseParallel(),
        f"{name}.down_proj": RowwiseParallel(output_layouts=Partial() if by_halves else hidden),
    }
    if not by_halves:
        plan[name] = PrepareModuleInput(input_layouts=(hidden,), desired_input_layouts=(Replicate(),))
    if getattr(parent, name).gate_proj is not None:
        plan[f"{name}.gate_proj"] = ColwiseParallel()
    _apply(parent, tp, plan)


def _split_mixture(mixture: MixtureOfExperts, tp: DeviceMesh, hidden: Placement) -> None:
    """Split the shared expert like any feed-forward part; of router and gate every rank has all. The experts: expert_parallel.py.

    A rank routes its own part of the tokens, or all of them for its part of each expert: either way its gradient is a part.
    """
    _replicate(mixture.gate, tp, Partial())
    if mixture.shared_expert is not None:
        _split_feed_forward(mixture, "shared_expert", tp, hidden)
    if mixture.shared_expert_gate is not None:
        _replicate(mixture.shared_expert_gate, tp, Partial() if hidden.is_shard() else Replicate())


def _split_embedding(embedding: nn.Embedding, tp: DeviceMesh, shard: VocabShard, hidden: Placement) -> None:
    """Split the rows of the vocabulary over tp.

    Not RowwiseParallel: under it DTensor computes the gradient of the full table on every rank.
    """
    shard_parameters(embedding, tp, lambda _: [Shard(0)])

    def forward(tokens: Tensor) -> Tensor:
        weight = local_tensor(embedding.weight)
        idx, is_local = shard.local_idx(tokens, width=len(weight))
        rows = F.embedding(idx, weight) * is_local[..., None]
        return redistribute(rows, tp, Partial(), hidden)

    embedding.forward = forward  # type: ignore[method-assign, assignment]


def _apply(module: nn.Module, tp: DeviceMesh, plan: ParallelStyle | dict[str, ParallelStyle]) -> None:
    # Without a source rank each rank cuts its own copy: nothing is sent, and it works on the meta device.
    parallelize_module(module, tp, plan, src_data_rank=None)


def _replicate_norm(norm: LocalModule, tp: DeviceMesh, activations: Placement) -> None:
    """Keep a weight unsharded on every rank; its gradient is a sum over ranks where each sees a part of the activations."""
    _replicate(norm, tp, Partial() if activations.is_shard() else Replicate())


def _replicate(module: LocalModule, tp: DeviceMesh, gradient: Placement) -> None:
    shard_parameters(module, tp, lambda _: [Replicate()])
    module.weight_grad = [gradient]
