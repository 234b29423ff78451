"""Small models that are not ours, the same on every rank: of transformers, and a plain one."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from meshwright.schema import ModelSpec
from plans import tiny_model
from torch import Tensor, nn

SIZES: dict[str, Any] = {
    "vocab_size": 98,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}
NAMES = ("llama", "qwen3", "gpt2", "plain")


def build(name: str, device: str = "cpu") -> nn.Module:
    """One of NAMES, with random weights, norms included."""
    torch.manual_seed(0)
    with torch.device(device):
        model = PlainModel() if name == "plain" else _of_transformers(name)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.0 if parameter.ndim > 1 else 0.7, 0.05)
    return model


def spec_of(name: str) -> ModelSpec:
    """What a plan says of it; of the plain model only sizes."""
    if name == "plain":
        return tiny_model(num_blocks=3, num_kv_heads=4, vocab_size=98)
    model = build(name, "meta")
    return ModelSpec.from_hf({**model.config.to_dict(), "architectures": [type(model).__name__]})


def _of_transformers(name: str) -> nn.Module:
    import transformers

    if name == "gpt2":
        sizes = {"vocab_size": 98, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 24}
        ids = {"bos_token_id": None, "eos_token_id": None}
        no_dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **ids, **no_dropout))
    if name == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True))
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True))


class PlainAttention(nn.Module):
    """Heads counted by the module itself."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = [p(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for p in (self.query, self.key, self.value)]
        out = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out_proj(out.transpose(1, 2).flatten(2))


class PlainBlock(nn.Module):
    """Two layers of the feed-forward part stand beside its norms, two in a Sequential, and one has no partner."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2, self.norm_3 = (nn.LayerNorm(width) for _ in range(3))
        self.attention = PlainAttention(width, 4)
        self.up = nn.Linear(width, 3 * width)
        self.act = nn.GELU()
        self.down = nn.Linear(3 * width, width)
        self.more = nn.Sequential(nn.Linear(width, 40, bias=False), nn.ReLU(), nn.Linear(40, width), nn.Tanh())
        self.last = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        x = x + self.down(self.act(self.up(self.norm_2(x))))
        return x + self.last(self.more(self.norm_3(x)))


class PlainModel(nn.Module):
    """Tokens to logits, with a parameter of its own."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(98, width)
        self.positions = nn.Parameter(torch.zeros(24, width))
        self.blocks = nn.ModuleList([PlainBlock(width) for _ in range(3)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 98)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
