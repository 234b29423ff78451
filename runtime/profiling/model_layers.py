"""One layer of a model as a module of its own, as one tensor-parallel rank has it: what a profile measures.

The shard of a rank is the layer with heads, feed-forward width and vocabulary divided by tp, without communication.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...schema.layers import Block, Embedding, Head, LayerRun, MoE, SoftmaxAttention
from ...schema.layout import Recompute
from ...schema.model import ModelSpec
from ..models.decoder import Decoder
from ..models.init import init_weights
from ..recompute import apply_recompute

MeasuredLayer = Embedding | Block | Head

MICRO_BATCHES = (1, 2, 4)
TENSOR_PARALLEL = (1, 2, 4, 8)
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")


class LayerCase(NamedTuple):
    """One kind of layer under one micro-batch, tensor-parallel degree and recompute option."""

    model: ModelSpec
    layer: MeasuredLayer
    micro_batch_size: int
    seq_len: int
    tp: int
    dtype: str
    recompute: Recompute

    def fields(self) -> dict[str, Any]:
        """As fields of a LayerPoint or LayerMemory."""
        shape = {name: getattr(self, name) for name in ("micro_batch_size", "seq_len", "tp", "dtype", "recompute")}
        return {"layer": self.layer.model_dump(mode="json"), "hidden_dim": self.model.hidden_dim, **shape}

    @property
    def label(self) -> str:
        """For the progress bar."""
        recompute = "" if self.recompute == "none" else f", {self.recompute} recompute"
        return f"{self.layer.kind} (micro-batch {self.micro_batch_size}, tp {self.tp}{recompute})"


def layer_cases(model: ModelSpec, *, seq_len: int, micro_batch_size: int, dtype: str, max_tp: int) -> list[LayerCase]:
    """Cases by value: each kind as it is, then recomputed, then its shards, then larger micro-batches."""
    kinds: list[MeasuredLayer] = [*dict.fromkeys(block for block, _ in model.block_runs), model.head, model.embedding]
    degrees = [tp for tp in TENSOR_PARALLEL if tp <= max_tp]

    def cases(micro_batch: int, tp: int, recompute: Recompute) -> list[LayerCase]:
        fitting = (kind for kind in kinds if is_divisible(kind, tp) and (recompute == "none" or kind.kind == "block"))
        return [LayerCase(model, kind, micro_batch, seq_len, tp, dtype, recompute) for kind in fitting]

    plain = [case for tp in degrees for case in cases(micro_batch_size, tp, "none")]
    again = [case for recompute in RECOMPUTES[1:] for case in cases(micro_batch_size, 1, recompute)]
    more = [
        case
        for factor in MICRO_BATCHES[1:]
        for tp in degrees
        for recompute in RECOMPUTES
        for case in cases(factor * micro_batch_size, tp, recompute)
    ]
    shards = [case for tp in degrees[1:] for r in RECOMPUTES[1:] for case in cases(micro_batch_size, tp, r)]
    return [*plain, *again, *shards, *more]


def is_divisible(layer: MeasuredLayer, tp: int) -> bool:
    """Whether tp ranks can share a layer evenly."""
    if not isinstance(layer, Block):
        return layer.vocab_size % tp == 0
    heads = [layer.attention.num_heads]
    if isinstance(layer.attention, SoftmaxAttention):
        heads.append(layer.attention.num_kv_heads)
    widths = [layer.mlp.ffn_dim, layer.mlp.shared_ffn_dim] if isinstance(layer.mlp, MoE) else [layer.mlp.ffn_dim]
    return all(size % tp == 0 for size in (*heads, *widths))


def shard_of(layer: MeasuredLayer, tp: int) -> MeasuredLayer:
    """The layer that one of tp ranks has."""
    if tp == 1:
        return layer
    if not isinstance(layer, Block):
        return layer.replace(vocab_size=layer.vocab_size // tp)
    heads = {"num_heads": layer.attention.num_heads // tp}
    if isinstance(layer.attention, SoftmaxAttention):
        heads["num_kv_heads"] = layer.attention.num_kv_heads // tp
    widths = {"ffn_dim": layer.mlp.ffn_dim // tp}
    if isinstance(layer.mlp, MoE):
        widths["shared_ffn_dim"] = layer.mlp.shared_ffn_dim // tp
    return layer.replace(attention=layer.attention.replace(**heads), mlp=layer.mlp.replace(**widths))


def build_layer(
    case: LayerCase, device: torch.device, *, is_fake: bool = False
) -> tuple[nn.Module, Callable[[], tuple[Tensor, ...]]]:
    """The layer on a device with weights as at the start of training, and what makes its inputs.

    It is a decoder with this shard as its only block, of which the other layers were dropped before any has memory. Fake tensors
    (``is_fake``) have none in any case, and cannot be materialised.
    """
    kind = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[case.dtype]
    before = torch.get_default_dtype()
    torch.set_default_dtype(kind)
    try:
        with device if is_fake else torch.device("meta"):
            decoder = Decoder(_shallow(case))
    finally:
        torch.set_default_dtype(before)
    decoder.keep({("embedding", "block", "head").index(case.layer.kind)})
    apply_recompute(decoder, lambda _: case.recompute)
    if not is_fake:
        decoder.to_empty(device=device)
        decoder.tie()
        init_weights(decoder, seed=0)
    return decoder, functools.partial(_inputs, case, device, kind)


def _shallow(case: LayerCase) -> ModelSpec:
    """The model with one block, all layers as one of tp ranks has them."""
    model = case.model
    block = case.layer if isinstance(case.layer, Block) else model.block_runs[0][0]
    layers = [shard_of(model.embedding, case.tp), block, shard_of(model.head, case.tp)]
    if isinstance(case.layer, Block):
        layers = [model.embedding, shard_of(block, case.tp), model.head]
    return model.replace(layers=tuple(LayerRun(layer=layer) for layer in layers))


def _inputs(case: LayerCase, device: torch.device, kind: torch.dtype) -> tuple[Tensor, ...]:
    shape = (case.micro_batch_size, case.seq_len)
    vocab_size = max(1, case.model.vocab_size // case.tp)
    if isinstance(case.layer, Embedding):
        return (torch.randint(vocab_size, shape, device=device),)
    hidden = torch.randn(*shape, case.model.hidden_dim, device=device, dtype=kind).requires_grad_()
    if isinstance(case.layer, Head):
        return hidden, torch.randint(vocab_size, shape, device=device)
    return (hidden,)
