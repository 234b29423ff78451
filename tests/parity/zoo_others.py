"""More of the zoo: video, one head of keys, shared weights, writes in place, functions and operators that torch does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo_more import BATCH, LENGTH, WIDTH, plain, randint, randn

FRAMES = 4


class MultiQuery(nn.Module):
    """Attention of four heads of queries to one head of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.queries, self.keys_values = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH // 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q = self.queries(h).unflatten(-1, (4, -1)).transpose(1, 2)
        k, v = self.keys_values(h)[:, None].expand(-1, 4, -1, -1).chunk(2, dim=-1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class MultiQueryDecoder(nn.Module):
    """A decoder of such blocks with gated layers between them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(96, WIDTH)
        self.blocks = nn.ModuleList([nn.Sequential(MultiQuery(), Gated()) for _ in range(3)])
        self.head = nn.Linear(WIDTH, 96)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Gated(nn.Module):
    """Two fused projections, one of which gates the other."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 128), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(self.norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * value)


class SpaceTime(nn.Module):
    """Attention among the frames of a place, then among the places of a frame."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(3)])
        self.in_time, self.in_space = (nn.MultiheadAttention(WIDTH, 4, batch_first=True) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        batch, frames, places, width = x.shape
        h = self.norms[0](x).transpose(1, 2).reshape(batch * places, frames, width)
        x = x + self.in_time(h, h, h, need_weights=False)[0].view(batch, places, frames, width).transpose(1, 2)
        h = self.norms[1](x).reshape(batch * frames, places, width)
        x = x + self.in_space(h, h, h, need_weights=False)[0].view(batch, frames, places, width)
        return x + self.mlp(self.norms[2](x))


class Video(nn.Module):
    """Classes of clips: tubes of pixels, divided attention."""

    def __init__(self) -> None:
        super().__init__()
        self.tubes = nn.Conv3d(3, WIDTH, (2, 8, 8), (2, 8, 8))
        self.places = nn.Parameter(torch.zeros(1, FRAMES // 2, 4, WIDTH))
        self.blocks = nn.ModuleList([SpaceTime() for _ in range(3)])
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, clips: Tensor) -> Tensor:
        x = self.tubes(clips).flatten(3).permute(0, 2, 3, 1) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))


class Shared(nn.Module):
    """One block that is called three times, and a head that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.block = nn.Embedding(96, WIDTH), nn.Sequential(MultiQuery(), Gated())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for _ in range(3):
            x = self.block(x)
        return x @ self.tokens.weight.mT


class SharedBlocks(MultiQueryDecoder):
    """Blocks of a list whose second halves are one module."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block[1] = self.blocks[0][1]


class Writes(nn.Module):
    """Writes in place: into a view of what it reads, into a table that it makes, through an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        h[:, 0] += 1.0
        h = F.relu(self.up(h), inplace=True)
        table = torch.zeros_like(x)
        table[:, 1:] = self.down(h)[:, :-1]
        return x.clone().add_(table)


class Writing(nn.Module):
    """Blocks that write in place."""

    def __init__(self, block: Callable[[], nn.Module] = Writes) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(96, WIDTH), nn.Linear(WIDTH, 96)
        self.blocks = nn.ModuleList([block() for _ in range(3)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Straight(torch.autograd.Function):
    """Rounds; the gradient passes as if it did not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 8).round() / 8

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0]


class Rounds(nn.Module):
    """Quantizes its activations with a gradient of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(Straight.apply(F.gelu(self.up(x))))


@torch.library.custom_op("zoo::swish", mutates_args=())
def swish(x: Tensor, beta: float) -> Tensor:
    """Scaled by its own sigmoid."""
    return x * torch.sigmoid(beta * x)


@swish.register_fake
def _(x: Tensor, beta: float) -> Tensor:
    return torch.empty_like(x)


def _gradient(ctx: Any, gradient: Tensor) -> Any:
    (x,) = ctx.saved_tensors
    s = torch.sigmoid(ctx.beta * x)
    return gradient * (s + ctx.beta * x * s * (1 - s)), None


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.beta = inputs[1]


swish.register_autograd(_gradient, setup_context=_keep)


class Registered(nn.Module):
    """A layer around an operator that the model registers with torch."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(swish(self.up(x), 1.5))


class Rotated(nn.Module):
    """Attention whose positions are complex numbers that the model keeps, and whose temperature and step the loop may change."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.temperature, self.step = 1.0, 0

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)) for part in self.qkv(self.norm(x)).chunk(3, dim=-1))
        q, k = (
            torch.view_as_real(torch.view_as_complex(part.unflatten(-1, (-1, 2))) * turns[:, None]).flatten(-2)
            for part in (q, k)
        )
        scores = torch.einsum("bqhc,bkhc->bhqk", q, k) / self.temperature
        made = self.out(torch.einsum("bhqk,bkhc->bqhc", scores.softmax(-1), v).flatten(2))
        return x + (made if self.step < 2 else 2.0 * made)


class RotatedDecoder(nn.Module):
    """A decoder of such blocks, as the first Llama was written."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(96, WIDTH), nn.Linear(WIDTH, 96)
        self.blocks = nn.ModuleList([Rotated() for _ in range(2)])
        angles = torch.outer(torch.arange(float(LENGTH)), 10.0 ** -torch.arange(WIDTH / 8))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, self.turns[: tokens.shape[1]])
        return self.head(x)


class Wrong(nn.Module):
    """A block with a bug: it takes the wrong width for its second layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(48, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


CLIPS = randn(BATCH, 3, FRAMES, 16, 16)
TOKENS = randint(96, BATCH, LENGTH)

OTHERS: dict[str, Callable[[], tuple[nn.Module, dict[str, Tensor]]]] = {
    "multi_query": plain(MultiQueryDecoder, tokens=TOKENS),
    "video": plain(Video, clips=CLIPS),
    "shared": plain(Shared, tokens=TOKENS),
    "writing": plain(Writing, tokens=TOKENS),
    "rounding": plain(lambda: Writing(Rounds), tokens=TOKENS),
    "registered": plain(lambda: Writing(Registered), tokens=TOKENS),
}  # fmt: skip
