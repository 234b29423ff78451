"""A model outside the catalogue as a ModelSpec: its repeated blocks are run on fake tensors and counted.

Weights are never read and never materialised: parameters and activations are torch's fake tensors, so that a model on the meta
device is traced like any other. One sequence (the first dimension of the inputs is the batch) goes through each distinct kind of
block forward and backward. Counted are the products and fused attentions of the forward pass, the elements that all other kernels
read and write in both passes, and what autograd keeps, by storage and without parameters. What lies before and after the blocks is
counted in one forward pass of the whole model; its backward kernels are taken to move twice what its forward ones do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...schema.errors import ConfigError
from ...schema.layers import Block, DenseMLP, Embedding, Head, LayerRun, SoftmaxAttention, Traced
from ...schema.model import ModelSpec

if TYPE_CHECKING:
    from torch import nn

    from .counting import Tracer

_STAND_INS = {
    "attention": SoftmaxAttention(kind="mha", num_heads=1, num_kv_heads=1, head_dim=1, rope_fraction=0),
    "mlp": DenseMLP(ffn_dim=1),
}


def profile_module(
    model: nn.Module,
    example_inputs: Sequence[Any] | Mapping[str, Any],
    *,
    name: str | None = None,
    blocks: str | None = None,
) -> ModelSpec:
    """The ModelSpec of any module with repeated blocks; `plan` cuts it by data, stages and recompute, not by tp, cp or ep.

    Args:
        model: on any device, also ``meta``.
        example_inputs: positional or keyword arguments of one call, tensors with the batch as their first dimension; tensors on the
            meta device do.
        blocks: name of the container (ModuleList, Sequential, ModuleDict) whose children are the blocks; found where unset.

    Raises:
        ConfigError: there are no repeated blocks, or a block takes and returns something else than hidden states
            [batch, tokens, width].
    """
    from .counting import Tracer, largest_container

    container = largest_container(model) if blocks is None else blocks
    if container is None:
        raise ConfigError(
            f"{type(model).__name__} has no repeated blocks: no list of two or more modules of one class",
            help="name the container of its blocks: profile_module(..., blocks='encoder.layers')",
        )
    tracer = Tracer(model, container)
    tracer.run(example_inputs)
    hidden_dim, seq_len = tracer.width, tracer.seq_len
    kinds = [tracer.traced_block(idx) for idx in range(len(tracer.blocks))]
    before, after = tracer.outside()
    title = name or type(model).__name__
    return ModelSpec(
        name=title,
        architecture=type(model).__name__,
        hidden_dim=hidden_dim,
        layers=(LayerRun(layer=_first(tracer, before)), *_runs(kinds), LayerRun(layer=_last(after))),
        tie_embeddings=False,
        max_seq_len=seq_len,
        source=f"traced from {type(model).__module__}.{type(model).__qualname__}, blocks {container}",
    )


def _first(tracer: Tracer, before: Traced) -> Embedding:
    """What lies before the blocks; parameters that both ends use (tied embeddings) are counted here."""
    return Embedding(vocab_size=1, traced=before)


def _last(after: Traced) -> Head:
    return Head(vocab_size=1, traced=after)


def _runs(kinds: Sequence[Traced]) -> tuple[LayerRun, ...]:
    runs: list[LayerRun] = []
    for traced in kinds:
        block = Block(traced=traced, **_STAND_INS)
        if runs and runs[-1].layer == block:
            runs[-1] = runs[-1].replace(count=runs[-1].count + 1)
        else:
            runs.append(LayerRun(layer=block))
    return tuple(runs)
