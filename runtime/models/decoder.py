"""A decoder of the Llama family or GPT-2 in plain PyTorch, built from a ModelSpec.

Parameter names are those of transformers' Llama, so that Hugging Face checkpoints map one to one; a pipeline stage simply lacks the
other stages' layers. Initial weights depend on the seed and on a parameter's name only, never on the layout.

Shapes: B micro-batch, S sequence, D hidden_dim, H heads, K kv heads, C head_dim, F ffn_dim, V vocabulary. Under tensor
parallelism H, K, F and V are this rank's share, and with sequence parallelism the S between blocks is as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor, nn

from ...profilers.module.structure import shell
from ...schema.errors import RuntimeMismatchError
from ...schema.layers import Block, MoE, SoftmaxAttention
from ...schema.model import ModelSpec
from ...schema.runnable import why_not_runnable
from ..loss import VocabShard, cross_entropy
from .attention import AttentionKind, LatentSelfAttention, Rotary, SelfAttention
from .experts import MixtureOfExperts
from .layers import FeedForward, LayerNorm, PositionEmbedding, RMSNorm, build_norm, local_part, local_tensor

ADAPTER_DOWN, ADAPTER_UP = "lora_A", "lora_B"
"""Names of the two parameters of a low-rank adapter of a product."""

STD = 0.02
"""Standard deviation of all weights. Source: ``initializer_range`` of the published Llama, Qwen and Mistral configs."""


class DecoderBlock(nn.Module):
    """Attention and feed-forward, each behind a norm and a residual; a pipeline stage that ends inside lacks one of them."""

    def __init__(self, model: ModelSpec, spec: Block, rotary: Rotary | None, kind: AttentionKind) -> None:
        super().__init__()
        self.input_layernorm: RMSNorm | LayerNorm | None = build_norm(spec.norm, model.hidden_dim, model.norm_eps)
        self.self_attn: SelfAttention | LatentSelfAttention | None
        if isinstance(spec.attention, SoftmaxAttention):
            self.self_attn = SelfAttention(model.hidden_dim, spec.attention, rotary, model.norm_eps, kind)
        else:
            assert rotary is not None
            self.self_attn = LatentSelfAttention(model.hidden_dim, spec.attention, rotary, kind)
        self.post_attention_layernorm: RMSNorm | LayerNorm | None
        self.post_attention_layernorm = build_norm(spec.norm, model.hidden_dim, model.norm_eps)
        mlp, dim = spec.mlp, model.hidden_dim
        self.mlp: MixtureOfExperts | FeedForward | None
        self.mlp = MixtureOfExperts(dim, mlp) if isinstance(mlp, MoE) else FeedForward(dim, mlp)

    def keep(self, *, attention: bool, mlp: bool) -> None:
        """Drop the parts that are on another stage."""
        if not attention:
            self.input_layernorm = self.self_attn = None
        if not mlp:
            self.post_attention_layernorm = self.mlp = None

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [B, S, D] to [B, S, D]."""
        return self.feed(self.attend(hidden))

    def attend(self, hidden: Tensor) -> Tensor:
        """Add attention, if it is here."""
        if self.input_layernorm is None or self.self_attn is None:
            return hidden
        result: Tensor = hidden + self.self_attn(self.input_layernorm(hidden))
        return result

    def feed(self, hidden: Tensor) -> Tensor:
        """Add the feed-forward part, if it is here."""
        if self.post_attention_layernorm is None or self.mlp is None:
            return hidden
        result: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return result


class DecoderTrunk(nn.Module):
    """Embedding, blocks and final norm; a pipeline stage lacks those of other stages."""

    def __init__(self, spec: ModelSpec, kind: AttentionKind) -> None:
        super().__init__()
        self.embed_tokens: nn.Embedding | None = nn.Embedding(spec.vocab_size, spec.hidden_dim)
        learned = spec.embedding.num_positions
        self.embed_positions = PositionEmbedding(learned, spec.hidden_dim) if learned else None
        blocks = [layer for layer in spec.iter_layers() if isinstance(layer, Block)]
        rotaries = {dim: Rotary(spec.rope, dim) if spec.rope else None for dim in set(map(_rotated_dim, blocks))}
        self.layers = nn.ModuleDict(
            {str(i): DecoderBlock(spec, block, rotaries[_rotated_dim(block)], kind) for i, block in enumerate(blocks)}
        )
        self.reshard: Callable[[Tensor], Tensor] | None = (
            None  # of hidden states that arrive from a stage of another tp
        )
        self.norm: RMSNorm | LayerNorm | None = build_norm(spec.head.norm, spec.hidden_dim, spec.norm_eps)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map tokens [B, S] (first stage) or hidden states [B, S, D] to hidden states [B, S, D]."""
        inputs = inputs if self.reshard is None else self.reshard(inputs)
        hidden = inputs if self.embed_tokens is None else self.embed_tokens(inputs)
        if self.embed_positions is not None:
            hidden = self.embed_positions(hidden)
        for block in self.layers.values():
            hidden = block(hidden)
        return hidden if self.norm is None else self.norm(hidden)


def _rotated_dim(block: Block) -> int:
    attention = block.attention
    return attention.head_dim if isinstance(attention, SoftmaxAttention) else attention.qk_rope_head_dim


class Decoder(nn.Module):
    """The model, or after `keep` the layers of one pipeline stage; ``lm_head`` may compute a ``vocab_shard`` only."""

    def __init__(self, spec: ModelSpec, *, attention: AttentionKind = "flash") -> None:
        """Build the entire model with torch's default weights; see `init_weights`."""
        lacking = why_not_runnable(spec)  # what depends on the workload is checked by `parallelize`
        if lacking:
            raise RuntimeMismatchError(f"this version cannot run {spec.name}", details=lacking)
        super().__init__()
        self.spec = spec
        self.vocab_shard: VocabShard | None = None
        self.model = DecoderTrunk(spec, attention)
        self.lm_head: nn.Linear | None = nn.Linear(spec.hidden_dim, spec.vocab_size, bias=False)
        self.tie()

    def tie(self) -> None:
        """Let the head use the embedding's parameter, where the model ties them and this stage has both.

        To be called after whatever gives modules new parameters: tensor parallelism, ``to_empty``.
        """
        if self.spec.tie_embeddings and self.lm_head is not None and self.model.embed_tokens is not None:
            self.lm_head.weight = self.model.embed_tokens.weight

    def part(self, layer_idxs: Collection[int]) -> Decoder:
        """Return these layers as a decoder of their own, whose modules are this one's; a head alone gets a weight of its own."""
        part = shell(self)
        part.model = shell(self.model)
        part.model.layers = shell(self.model.layers)
        part.keep(layer_idxs)
        if part.lm_head is not None and part.model.embed_tokens is None:
            part.lm_head.weight = nn.Parameter(part.lm_head.weight.detach().clone())
        return part

    def keep(self, layer_idxs: Collection[int], *, half_blocks: bool = False) -> None:
        """Drop all layers but these, counted as in ``ModelSpec.iter_layers``: 0 is the embedding, the last one the head.

        With half blocks both parts of a block count (``ModelSpec.in_halves``).
        """
        if 0 not in layer_idxs:
            self.model.embed_tokens = self.model.embed_positions = None
        for name, block in list(self.model.layers.items()):
            attention, mlp = (idx in layer_idxs for idx in parts_of_block(int(name), half_blocks=half_blocks))
            if attention or mlp:
                assert isinstance(block, DecoderBlock)
                block.keep(attention=attention, mlp=mlp)
            else:
                del self.model.layers[name]
        if parts_of_block(self.spec.num_blocks, half_blocks=half_blocks)[0] not in layer_idxs:
            self.model.norm = None
            self.lm_head = None

    def forward(
        self, inputs: Tensor, targets: Tensor | None = None, *, read: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Run this stage's layers.

        Args:
            inputs: tokens [B, S] on the first stage, else hidden states [B, S, D].
            targets: tokens [B, S] that should come next; only the last stage reads them.
            read: what the last stage makes of its logits [B, S, V] (this rank's columns) in place of the mean loss; no view.

        Returns:
            Hidden states [B, S, D] before the last stage; there the mean loss [1], or logits [B, S, V] without targets. The loss
            is taken here so that logits are gone before anything else is allocated, and never stored by a pipeline schedule.
        """
        hidden: Tensor = self.model(inputs)
        if self.lm_head is None:
            return hidden
        logits: Tensor = self.lm_head(hidden)
        if read is not None:
            return read(logits)
        return logits if targets is None else cross_entropy(logits, targets, self.vocab_shard)


def parts_of_block(block_idx: int, *, half_blocks: bool) -> tuple[int, int]:
    """Return the indices of a block's attention and feed-forward part among the layers that stages are made of."""
    return (2 * block_idx + 1, 2 * block_idx + 2) if half_blocks else (block_idx + 1, block_idx + 1)


@torch.no_grad()
def init_weights(
    module: nn.Module,
    seed: int,
    device: torch.device | None = None,
    *,
    aliases: Mapping[str, str] | None = None,
    adapters_only: bool = False,
) -> None:
    """Fill every parameter, sharded or not: weights normal(0, 0.02), norms 1, biases and buffers 0.

    Each weight comes from a generator of its own on its device, and a shard is cut from the full tensor; only one full
    tensor exists at a time. CPU and CUDA generators differ, so equal weights need equal device types.

    Args:
        device: of the generators, where parameters lie elsewhere; unset, each parameter's own.
        aliases: parameters of a user's module that start as another one does, which may be on another rank.
        adapters_only: everything else has its values already.
    """
    # Those of users' modules are tables.
    for buffer in () if adapters_only or aliases is not None else module.buffers():
        buffer.zero_()
    tied = getattr(getattr(module, "spec", None), "tie_embeddings", False)
    for name, parameter in module.named_parameters():
        if adapters_only and not is_adapter(name):
            continue
        if name.endswith(f".{ADAPTER_UP}"):
            local_tensor(parameter).zero_()
            continue
        if parameter.ndim == 1:
            local_tensor(parameter).fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        # A tied head without the embedding, on the last pipeline stage, must start as the embedding does.
        source = "model.embed_tokens.weight" if tied and name == "lm_head.weight" else (aliases or {}).get(name, name)
        generator_device = device or parameter.device
        generator = torch.Generator(generator_device).manual_seed(parameter_seed(seed, source))
        _draw(parameter, generator)


def _draw(parameter: nn.Parameter, generator: torch.Generator) -> None:
    """Fill a parameter, or the part of it that is here, from normal(0, 0.02); the full tensor goes before the next one is made."""
    full = torch.empty(parameter.shape, dtype=parameter.dtype, device=generator.device)
    full.normal_(0.0, STD, generator=generator)
    local_tensor(parameter).copy_(local_part(full, parameter))


def is_adapter(name: str) -> bool:
    """Tell whether a parameter of a decoder belongs to a low-rank adapter."""
    return name.endswith((f".{ADAPTER_DOWN}", f".{ADAPTER_UP}"))


def parameter_seed(seed: int, name: str) -> int:
    """Return 63 bits from a seed and a parameter's name."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
