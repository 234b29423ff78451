"""More small models of the zoo: vision, diffusion, recurrences, tables of categories, graphs, fused attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH, LENGTH, WIDTH = 4, 16, 32


def randn(*shape: int, seed: int = 3) -> Tensor:
    """Noise that is the same on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def randint(limit: int, *shape: int, seed: int = 4) -> Tensor:
    """Indices that are the same on every rank."""
    return torch.randint(0, limit, shape, generator=torch.Generator().manual_seed(seed))


class FusedBlock(nn.Module):
    """Queries, keys and values of one product, which rows are cut in three."""

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.c_attn(self.norm_1(x)).split(width, dim=2)
        heads = (part.view(batch, length, 4, width // 4).transpose(1, 2) for part in parts)
        attended = (
            F.scaled_dot_product_attention(*heads, is_causal=True)
            .transpose(1, 2)
            .contiguous()
            .view(batch, length, width)
        )
        x = x + self.dropout(self.c_proj(attended))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm_2(x)))))


class NanoGPT(nn.Module):
    """A decoder with fused projections; the head is the embedding where tied."""

    def __init__(self, *, tied: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(96, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([FusedBlock(dropout=dropout) for _ in range(3)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 96, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Modulated(nn.Module):
    """A block whose norms are scaled and shifted by a condition, as in DiT."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = self.modulation(condition)[:, None].chunk(6, dim=-1)
        q, k, v = (
            self.qkv(self.norm(x) * (1 + scale_1) + shift_1).unflatten(-1, (3, 4, WIDTH // 4)).permute(2, 0, 3, 1, 4)
        )
        x = x + gate_1 * self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + gate_2 * self.down(F.gelu(self.up(self.norm(x) * (1 + scale_2) + shift_2)))


class DiT(nn.Module):
    """Noise of patches from noisy patches, a time and a class."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(4, WIDTH, 2, 2)
        self.time = nn.Sequential(nn.Linear(16, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.classes = nn.Embedding(10, WIDTH)
        self.blocks = nn.ModuleList([Modulated() for _ in range(3)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16)

    def forward(self, latents: Tensor, time: Tensor, label: Tensor) -> Tensor:
        angles = time[:, None] * torch.exp(-torch.arange(8, device=time.device))
        condition = self.time(torch.cat([angles.sin(), angles.cos()], dim=-1)) + self.classes(label)
        x = self.patches(latents).flatten(2).mT
        for block in self.blocks:
            x = block(x, condition)
        return self.head(self.norm(x))


class JointBlock(nn.Module):
    """Text and image tokens with weights of their own and one attention, as in SD3."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_x, self.norm_c = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv_x, self.qkv_c = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out_x, self.out_c = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp_x, self.mlp_c = (
            nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)) for _ in range(2)
        )

    def forward(self, x: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        joint = torch.cat([self.qkv_x(self.norm_x(x)), self.qkv_c(self.norm_c(c))], dim=1)
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in joint.chunk(3, dim=-1))
        both = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x, c = x + self.out_x(both[:, : x.shape[1]]), c + self.out_c(both[:, x.shape[1] :])
        return x + self.mlp_x(x), c + self.mlp_c(c)


class Joint(nn.Module):
    """Two streams of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.text = nn.Linear(12, WIDTH), nn.Linear(24, WIDTH)
        self.blocks = nn.ModuleList([JointBlock() for _ in range(3)])
        self.head = nn.Linear(WIDTH, 12)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        x, c = self.patches(x), self.text(c)
        for block in self.blocks:
            x, c = block(x, c)
        return self.head(x) + c.mean((1, 2), True)  # of each sample: a mean of all would depend on how many there are


class Residual(nn.Module):
    """Two convolutions with group norms around a sum, with a time where there is one."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.GroupNorm(4, inner), nn.GroupNorm(4, outer)
        self.conv_1, self.conv_2 = nn.Conv2d(inner, outer, 3, padding=1), nn.Conv2d(outer, outer, 3, padding=1)
        self.skip = nn.Conv2d(inner, outer, 1) if inner != outer else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv_1(F.silu(self.norm_1(x)))
        return self.skip(x) + self.conv_2(F.silu(self.norm_2(h)))


class UNet(nn.Module):
    """Down, across and up, with what the way down made beside what the way up reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.down = nn.ModuleList([Residual(16, 16), Residual(16, 32)])
        self.middle = Residual(32, 32)
        self.up = nn.ModuleList([Residual(64, 16), Residual(32, 16)])
        self.last = nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x, kept = self.first(x), list[Tensor]()
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2), kept.pop()], dim=1))
        return self.last(x)


class ConvNet(nn.Module):
    """Convolutions, pooling, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()
        )
        self.classifier = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images).mean((2, 3)))


class MLP(nn.Module):
    """Three linear layers that return to no width: D, F, F, out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Recurrent(nn.Module):
    """A recurrence over embedded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, WIDTH)
        self.layers = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, 96)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(tokens))[0])


class DLRM(nn.Module):
    """Tables of categories, dense features, and the products of all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.EmbeddingBag(rows, 16, mode="sum") for rows in (50, 30, 70)])
        self.bottom = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(22, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        x = self.bottom(dense)
        vectors = torch.stack([x, *(table(categories[:, i]) for i, table in enumerate(self.tables))], dim=1)
        pairs = (vectors @ vectors.mT).flatten(1)[:, [1, 2, 3, 6, 7, 11]]
        return self.top(torch.cat([x, pairs], dim=1))


class Graph(nn.Module):
    """Convolutions over a graph: widths that are alike, sums over neighbours between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor, sources: Tensor, targets: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(x).flatten(0, 1)
            first = torch.arange(x.shape[0], device=x.device)[:, None] * x.shape[1]
            sums = torch.zeros_like(h).index_add(0, (targets + first).flatten(), h[(sources + first).flatten()])
            x = x + F.relu(sums).view_as(x)
        return self.head(x)


def plain(module: Callable[[], nn.Module], **inputs: Tensor) -> Callable[[], tuple[nn.Module, dict[str, Tensor]]]:
    """A module of this file with its inputs by name."""
    return lambda: (module(), inputs)


def _transformers(
    name: str, inputs: dict[str, Tensor], **sizes: Any
) -> Callable[[], tuple[nn.Module, dict[str, Tensor]]]:
    def build() -> tuple[nn.Module, dict[str, Tensor]]:
        import transformers

        config = getattr(transformers, f"{name.partition('For')[0].removesuffix('Model')}Config")(**sizes)
        return getattr(transformers, name)(config), inputs

    return build


def _qwen2_vl() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    text = {
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    }  # fmt: skip
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 8, "mlp_ratio": 2}
    config = Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=5,
        vision_start_token_id=6,
        vision_end_token_id=7,
        video_token_id=8,
    )
    return Qwen2VLForConditionalGeneration(config), {"input_ids": randint(80, BATCH, LENGTH) + 10}


IMAGES = randn(BATCH, 3, 32, 32)
TOKENS = randint(96, BATCH, LENGTH)
GROUPED = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
WINDOWS = {"head_dim": 8, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
RESNET = {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 2], "layer_type": "basic"}

MORE: dict[str, Callable[[], tuple[nn.Module, dict[str, Tensor]]]] = {
    "llama": _transformers("LlamaForCausalLM", {"input_ids": TOKENS}, **GROUPED),
    "gemma3": _transformers("Gemma3TextModel", {"input_ids": TOKENS}, **GROUPED, **WINDOWS),
    "qwen2_vl": _qwen2_vl,
    "swin": _transformers("SwinForImageClassification", {"pixel_values": IMAGES}, **SWIN),
    "resnet": _transformers("ResNetForImageClassification", {"pixel_values": IMAGES}, **RESNET),
    "nanogpt": plain(NanoGPT, tokens=TOKENS),
    "dit": plain(DiT, latents=randn(BATCH, 4, 8, 8), time=torch.linspace(0, 1, BATCH), label=randint(10, BATCH)),
    "joint": plain(Joint, x=randn(BATCH, LENGTH, 12), c=randn(BATCH, 4, 24)),
    "unet": plain(UNet, images=IMAGES),
    "convnet": plain(ConvNet, images=IMAGES),
    "mlp": plain(MLP, x=randn(BATCH, WIDTH)),
    "lstm": plain(Recurrent, tokens=TOKENS),
    "dlrm": plain(DLRM, dense=randn(BATCH, 13), categories=randint(30, BATCH, 3, 2)),
    "graph": plain(
        Graph, x=randn(BATCH, 12, WIDTH), sources=randint(12, BATCH, 20), targets=randint(12, BATCH, 20, seed=5)
    ),
}
