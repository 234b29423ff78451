"""What one decoder block keeps for its backward pass: the figures that the memory model is built on."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from meshwright.cost_models.layer.memory import SavedTensorRules, saved_elements
from meshwright.runtime import Decoder
from meshwright.runtime.models.decoder import init_weights
from meshwright.runtime.recompute import apply_recompute
from meshwright.schema import ModelSpec, Workload
from meshwright.schema.layers import Block, DenseMLP, Embedding, Head, LayerRun, MoE, SoftmaxAttention
from meshwright.schema.layout import Recompute
from meshwright.schema.rope import Rope
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

B, S, D, H, K, C, F = 2, 64, 32, 4, 2, 16, 112
SPEC = ModelSpec(
    name="block",
    architecture="LlamaForCausalLM",
    hidden_dim=D,
    layers=(
        LayerRun(layer=Embedding(vocab_size=16)),
        LayerRun(
            layer=Block(
                attention=SoftmaxAttention(kind="gqa", num_heads=H, num_kv_heads=K, head_dim=C), mlp=DenseMLP(ffn_dim=F)
            )
        ),
        LayerRun(layer=Head(vocab_size=16)),
    ),
    tie_embeddings=False,
    max_seq_len=S,
    rope=Rope(),
)


class Allocations(TorchDispatchMode):
    """Remembers every storage that an operator returns, without keeping it alive."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.sizes[StorageWeakRef(leaf.untyped_storage())] = leaf.untyped_storage().nbytes()
        return result

    def alive_bytes(self) -> int:
        gc.collect()
        return sum(size for storage, size in self.sizes.items() if not storage.expired())


def expected_bytes(recompute: Recompute, dtype: torch.dtype, device: str) -> float:
    """What the memory model says of one block: its input and saved tensors (its output is the next block's input)."""
    precision = "fp32" if dtype == torch.float32 else "bf16-mixed"
    how = SavedTensorRules(Workload(seq_len=S, global_batch_size=B, precision=precision), unfused_norm=device == "cpu")
    saved = saved_elements(SPEC.block_runs[0][0], D, recompute, how)
    elements, fp32 = saved.unsharded + saved.tp + saved.tokens, saved.tp_fp32 + saved.fp32
    return B * S * (elements * dtype.itemsize + 4 * fp32)


def kept_bytes(decoder: Decoder, dtype: torch.dtype, device: str) -> int:
    """Bytes that the first block keeps from its forward to its backward pass, which then runs."""
    block = decoder.model.layers["0"]
    block(torch.randn(B, S, D, device=device, dtype=dtype))  # makes the rotary tables, which all blocks share
    leaf = torch.randn(B, S, D, device=device, dtype=dtype, requires_grad=True)
    parameters = {StorageWeakRef(parameter.untyped_storage()) for parameter in decoder.parameters()}
    with Allocations() as allocations:
        hidden = leaf * 1
        output = block(hidden)
        del hidden
    for storage in parameters | {StorageWeakRef(output.untyped_storage())}:
        allocations.sizes.pop(storage, None)
    kept = allocations.alive_bytes()
    output.sum().backward()
    return kept


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_block_keeps_what_the_memory_model_says(recompute: Recompute, dtype: torch.dtype) -> None:
    device = "cuda" if torch.cuda.is_available() and dtype == torch.bfloat16 else "cpu"
    decoder = Decoder(SPEC).to(device, dtype)
    apply_recompute(decoder, lambda _: recompute)
    kept = kept_bytes(decoder, dtype, device)
    slack = 0 if device == "cpu" else 1024  # CUDA attention also keeps the state of a random generator
    assert abs(kept - expected_bytes(recompute, dtype, device)) <= slack


@pytest.mark.parametrize("attention", ["none", "selective", "full"])
@pytest.mark.parametrize("mlp", ["none", "selective", "full"])
def test_half_blocks_keep_what_the_memory_model_says(attention: Recompute, mlp: Recompute) -> None:
    decoder, options = Decoder(SPEC), {1: attention, 2: mlp}
    apply_recompute(decoder, options.__getitem__, half_blocks=True)
    how = SavedTensorRules(Workload(seq_len=S, global_batch_size=B, precision="fp32"), unfused_norm=True)
    halves = SPEC.block_runs[0][0].halves
    first, second = (
        saved_elements(half, D, option, how) for half, option in zip(halves, options.values(), strict=True)
    )
    saved = first + second
    expected = 4 * B * S * (saved.unsharded + saved.tp + saved.tokens + saved.tp_fp32 + saved.fp32)
    assert kept_bytes(decoder, torch.float32, "cpu") == expected


ROUTED = MoE(num_experts=8, top_k=2, ffn_dim=48)
ROUTING_BYTES = 64
"""Of one token: positions of its rows and its experts (int64), their weights; not in the model, because they do not grow with D."""


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_block_with_experts_keeps_what_the_memory_model_says(recompute: Recompute) -> None:
    dense = SPEC.block_runs[0][0]
    layers = tuple(
        run.replace(layer=dense.replace(mlp=ROUTED)) if isinstance(run.layer, Block) else run for run in SPEC.layers
    )
    decoder = Decoder(SPEC.replace(layers=layers))
    init_weights(decoder, 0)
    apply_recompute(decoder, lambda _: recompute)
    kept = kept_bytes(decoder, torch.float32, "cpu")
    how = SavedTensorRules(Workload(seq_len=S, global_batch_size=B, precision="fp32"), unfused_norm=True)
    saved = saved_elements(dense.replace(mlp=ROUTED), D, recompute, how)
    expected = 4 * (saved.unsharded + saved.tp + saved.tokens + saved.routed + saved.tp_fp32 + saved.fp32)
    assert abs(kept / (B * S) - expected) <= (0 if recompute == "full" else ROUTING_BYTES)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("recompute", "again"), [("none", 0), ("selective", 0), ("full", 5)])
def test_last_product_of_neither_half_is_recomputed(recompute: Recompute, again: int) -> None:
    decoder = Decoder(SPEC)
    apply_recompute(decoder, lambda _: recompute, half_blocks=True)
    output = decoder.model.layers["0"](torch.randn(B, S, D, requires_grad=True))
    with Products() as products:
        output.sum().backward()
    assert products.count == 14 + again


@pytest.mark.parametrize(("recompute", "again"), [("none", 0), ("selective", 0), ("full", 6)])
def test_last_product_is_never_recomputed(recompute: Recompute, again: int) -> None:
    decoder = Decoder(SPEC)
    apply_recompute(decoder, lambda _: recompute)
    output = decoder.model.layers["0"](torch.randn(B, S, D, requires_grad=True))
    with Products() as products:
        output.sum().backward()
    assert products.count == 14 + again
