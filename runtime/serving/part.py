"""The part of a Decoder that a rank serves: layers of its stage, cut over tensor ranks, experts over the ranks of the stage.

The same modules as for training, and the same files and initial weights: parameters are cut as DTensors, filled, and become plain
local tensors then, since inference needs nothing else of DTensor and a step of one token would wait for it. Where a rank's output
is a part of a sum, it is reduced at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ...schema.errors import ConfigError, RuntimeMismatchError
from ...schema.layers import Block, LatentAttention, SoftmaxAttention
from ...schema.model import ModelSpec
from ...schema.serving import ServingLayout
from ..models.attention import LatentSelfAttention, SelfAttention
from ..models.decoder import Decoder, DecoderBlock, init_weights
from ..models.experts import MixtureOfExperts
from ..models.layers import FeedForward, shard_parameters
from ..weights.load import load_weights
from .adapters import AdapterSet
from .experts import place_experts
from .paged_attention import StepState
from .products import pack_products
from .ranks import InstanceRanks

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Types that our engine computes and caches in."""


def build_part(
    spec: ModelSpec,
    ranks: InstanceRanks,
    state: StepState,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    weights: Path | None,
    adapters: AdapterSet | None = None,
    adapter_folders: Sequence[Path] = (),
    fill: Callable[[Decoder], None] | None = None,
) -> Decoder:
    """Return this rank's part of a model, with plain local parameters and no gradients.

    Args:
        seed: of made weights; used where there are none to load.
        weights: folder of safetensors.
        fill: writes the weights of this rank's part, in place of both.
        adapters: of the steps; adapter_folders: of each, in order.

    Raises:
        ConfigError: the weights or an adapter are damaged or of another model.
        RuntimeMismatchError: this version cannot serve the model, or the layout does not divide it.
    """
    require_divisible(spec, ranks.layout)
    with torch.device("meta"):
        part = Decoder(spec)
    part.keep(stage_layers(spec, ranks))
    _cut(part, ranks)
    part.requires_grad_(False)
    part._apply(
        lambda tensor: torch.empty_like(tensor, device=device, dtype=dtype if tensor.is_floating_point() else None)
    )
    part.tie()
    if fill is not None:
        fill(part)
    elif weights is None:
        init_weights(part, seed, device)
    else:
        load_weights(part, spec, weights)
    _make_local(part)
    part.tie()
    pack_products(part)
    if adapters is not None:
        adapters.attach(part, ranks, adapter_folders, dtype)
    _connect(part, ranks, state)
    part.eval()
    return part


def stage_layers(spec: ModelSpec, ranks: InstanceRanks) -> set[int]:
    """Return the layers of this rank's stage, as `Decoder.keep` counts them: blocks evenly, the first stages take what is left."""
    blocks = blocks_of_stages(spec.num_blocks, ranks.layout.pp)[ranks.stage_idx]
    layers = {idx + 1 for idx in blocks}
    return layers | ({0} if ranks.is_first_stage else set()) | ({spec.num_blocks + 1} if ranks.is_last_stage else set())


def blocks_of_stages(num_blocks: int, pp: int) -> tuple[range, ...]:
    """Return the blocks of every stage."""
    sizes = [num_blocks // pp + (i < num_blocks % pp) for i in range(pp)]
    return tuple(range(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(pp))


def blocks_of(spec: ModelSpec) -> list[Block]:
    """Return the blocks of a model in order."""
    return [layer for layer in spec.iter_layers() if isinstance(layer, Block)]


def require_divisible(spec: ModelSpec, layout: ServingLayout) -> None:
    """Refuse a layout that does not divide a model's heads, widths or experts."""
    wrong = []
    if layout.pp > spec.num_blocks:
        wrong.append(f"pp {layout.pp} is more than its {spec.num_blocks} blocks")
    for block, _ in spec.block_runs:
        wrong += _why_not(block, layout)
    if layout.ep > 1 and not spec.is_moe:
        wrong.append(f"ep {layout.ep} without experts")
    if wrong:
        raise RuntimeMismatchError(
            f"our engine cannot spread {spec.name} over tp={layout.tp} pp={layout.pp} "
            f"attention_dp={layout.attention_dp} ep={layout.ep}",
            details=tuple(dict.fromkeys(wrong)),
        )


def _why_not(block: Block, layout: ServingLayout) -> list[str]:
    attention, wrong = block.attention, []
    if attention.num_heads % layout.tp:
        wrong.append(f"tp {layout.tp} does not divide {attention.num_heads} heads")
    if isinstance(attention, SoftmaxAttention):
        kv_heads = attention.num_kv_heads
        if kv_heads % layout.tp:
            wrong.append(f"tp {layout.tp} does not divide {kv_heads} key/value heads")
        if attention.chunked:
            wrong.append("attention in chunks")
    elif not isinstance(attention, LatentAttention):
        wrong.append(f"attention of kind {attention.kind}")
    dense = block.mlp if not hasattr(block.mlp, "num_experts") else block.mlp.shared
    if dense is not None and dense.ffn_dim % layout.tp:
        wrong.append(f"tp {layout.tp} does not divide a feed-forward width of {dense.ffn_dim}")
    if hasattr(block.mlp, "num_experts"):
        if block.mlp.num_experts % layout.ep:
            wrong.append(f"ep {layout.ep} does not divide {block.mlp.num_experts} experts")
        if block.mlp.expert.ffn_dim % layout.moe_tp:
            wrong.append(f"{layout.moe_tp} ranks do not divide an expert's width of {block.mlp.expert.ffn_dim}")
    return wrong


def _cut(part: Decoder, ranks: InstanceRanks) -> None:
    """Cut the parameters over tensor ranks, and experts over the stage, as DTensors."""
    tp, experts = ranks.tp_mesh, ranks.expert_mesh
    for block in part.model.layers.values():
        assert isinstance(block, DecoderBlock)
        if experts is not None and isinstance(block.mlp, MixtureOfExperts):
            shard_parameters(
                block.mlp.experts, experts, lambda name: [Shard(0), Shard(2 if name == "down_proj" else 1)]
            )
        if tp is None:
            continue
        attention = block.self_attn
        assert attention is not None
        by_rows = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj")
        for name in by_rows:
            if isinstance(linear := getattr(attention, name, None), nn.Linear):
                shard_parameters(linear, tp, lambda _: [Shard(0)])
        _cut_columns(attention.o_proj, tp)
        if isinstance(attention, SelfAttention) and not attention.norm_each_head:
            for norm in filter(None, (attention.q_norm, attention.k_norm)):
                shard_parameters(norm, tp, lambda _: [Shard(0)])
        dense = block.mlp.shared_expert if isinstance(block.mlp, MixtureOfExperts) else block.mlp
        if dense is not None:
            _cut_feed_forward(dense, tp)
    if tp is not None:
        for table in (part.model.embed_tokens, part.lm_head):
            if table is not None:
                shard_parameters(table, tp, lambda _: [Shard(0)])


def _cut_feed_forward(dense: FeedForward, tp: DeviceMesh) -> None:
    for linear in filter(None, (dense.gate_proj, dense.up_proj)):
        shard_parameters(linear, tp, lambda _: [Shard(0)])
    _cut_columns(dense.down_proj, tp)


def _cut_columns(linear: nn.Linear, tp: DeviceMesh) -> None:
    shard_parameters(linear, tp, lambda name: [Shard(1) if name == "weight" else Replicate()])


def _make_local(part: Decoder) -> None:
    """Replace every DTensor by this rank's part of it."""
    for module in part.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, DTensor):
                setattr(module, name, nn.Parameter(parameter.to_local(), requires_grad=False))


def _connect(part: Decoder, ranks: InstanceRanks, state: StepState) -> None:
    """Let modules whose rank has only a part of them reduce their outputs."""
    for block in part.model.layers.values():
        assert isinstance(block, DecoderBlock)
        attention, mlp = block.self_attn, block.mlp
        if isinstance(attention, LatentSelfAttention):
            attention.absorbs = True
            attention.tp = ranks.tp_mesh
        if isinstance(mlp, MixtureOfExperts):
            place_experts(mlp, ranks, state)
        if ranks.tp is None:
            continue
        assert attention is not None
        reduce_output(attention.o_proj, ranks.tp)
        if isinstance(attention, SelfAttention) and not attention.norm_each_head:
            for norm in filter(None, (attention.q_norm, attention.k_norm)):
                norm.tp = ranks.tp_mesh
        if isinstance(mlp, FeedForward):
            reduce_output(mlp.down_proj, ranks.tp)
    if ranks.tp is not None and part.model.embed_tokens is not None:
        _split_lookup(part.model.embed_tokens, ranks, part.spec.vocab_size)


def reduce_output(linear: nn.Linear, group: dist.ProcessGroup) -> None:
    """Let a product whose inputs are shared out add up over a group; a bias counts once."""
    bias, linear.bias = linear.bias, None
    product = linear.forward

    def forward(x: Tensor) -> Tensor:
        out = product(x)
        dist.all_reduce(out, group=group)
        return out if bias is None else out + bias

    linear.forward = forward  # type: ignore[method-assign]


def _split_lookup(table: nn.Embedding, ranks: InstanceRanks, vocab_size: int) -> None:
    width = -(-vocab_size // ranks.layout.tp)  # as torch.chunk cuts
    first = width * ranks.tp_rank

    def forward(tokens: Tensor) -> Tensor:
        local = tokens - first
        is_local = (local >= 0) & (local < len(table.weight))
        rows = F.embedding(local.clamp(0, max(len(table.weight) - 1, 0)), table.weight) * is_local[..., None]
        dist.all_reduce(rows, group=ranks.tp)
        return rows

    table.forward = forward  # type: ignore[method-assign]


def require_dtype(name: str) -> torch.dtype:
    """Return torch's type of weights or a cache."""
    if name not in DTYPES:
        raise ConfigError(
            f"our engine has no {name} weights or caches",
            help=f"plan with one of {', '.join(DTYPES)}, or export the plan",
        )
    return DTYPES[name]
