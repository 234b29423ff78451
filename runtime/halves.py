"""Blocks by half-batches over tp (``tp_halves``): the collectives of one run while the products of the other are computed.

Of two half-batches A and B a part of a block (attention, feed-forward) does, in this order,

    norm A, norm B, start both gathers;  wait, products of A, start its reduction;  the same of B;  wait for both, add

so that the gather of B runs with the products of A, and the reduction of A with those of B. Autograd takes the nodes of a graph in
the reverse order of their making. Each collective is two nodes, which start it and wait for it, and backward the one that waited
starts the collective of the gradient and the other waits: both passes hide as much. Without sequence parallelism there is no gather
forward and no gathering of gradients backward.

Shapes: B half-batch, S sequence, D hidden_dim; with sequence parallelism a rank has S / tp of it between parts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from .models.decoder import DecoderBlock

# torch 2.13 has other names for the two, and warns of these.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

NUM_HALVES = 2

Move = Literal["none", "sum", "gather", "scatter"]
"""Nothing; all-reduce; all-gather and reduce-scatter along the sequence."""


class Transfer:
    """One collective under way; what it works on lives until it is waited for. ``owns``: a sum is made in place of ``value``."""

    def __init__(self, value: Tensor, move: Move, group: dist.ProcessGroup, *, owns: bool) -> None:
        self.move, ranks = move, group.size()
        self.sent = value.contiguous()
        self.received, self.work = self.sent, None
        if move == "sum":
            self.sent = self.received = self.sent if owns else self.sent.clone()
            self.work = dist.all_reduce(self.sent, group=group, async_op=True)
        elif move == "gather":
            self.received = self.sent.new_empty(ranks, *self.sent.shape)
            self.work = _all_gather(self.received, self.sent[None], group=group, async_op=True)
        elif move == "scatter":
            self.sent = self.sent.unflatten(1, (ranks, -1)).movedim(1, 0).contiguous()
            self.received = torch.empty_like(self.sent[:1])
            self.work = _reduce_scatter(self.received, self.sent, group=group, async_op=True)

    def wait(self) -> Tensor:
        """Return what arrived: [B, S, D], or this rank's [B, S / tp, D] of it."""
        if self.work is not None:
            self.work.wait()
        if self.move == "gather":
            return self.received.movedim(0, 1).flatten(1, 2)
        return self.received[0] if self.move == "scatter" else self.received


class _Exchange:
    """A collective of the forward pass and that of its gradient, each started by one node of the graph and awaited by the other."""

    def __init__(self, forward: Move, backward: Move, group: dist.ProcessGroup) -> None:
        self.moves, self.group = (forward, backward), group
        self.under_way: Transfer | None = None

    def start(self, value: Tensor, *, backward: bool) -> Tensor:
        """Start a collective; returns a tensor of nothing, which connects the two nodes."""
        # What a product puts out may be kept by selective recompute; of a gradient nothing else reads.
        self.under_way = Transfer(value, self.moves[backward], self.group, owns=backward)
        return value.new_empty(0)

    def wait(self) -> Tensor:
        """Return what it brings."""
        assert self.under_way is not None
        transfer, self.under_way = self.under_way, None
        return transfer.wait()


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.start(value, backward=False)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.wait(), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, started: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.start(gradients[0], backward=True), None


class _OnEveryRank(torch.autograd.Function):
    """A whole tensor for products that are split over tp; its gradient is this rank's summand."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, tp: DeviceMesh) -> Tensor:
        return DTensor.from_local(value, tp, [Replicate()], run_check=False)

    @staticmethod
    def backward(ctx: Any, *gradients: DTensor) -> tuple[Tensor, None]:
        return gradients[0].redistribute(placements=[Partial()]).to_local(), None


class Halves:
    """The forward pass of a block by half-batches.

    Attributes:
        before, after: what the collectives of a part do forward and backward, before its products and after them.
    """

    def __init__(self, tp: DeviceMesh, hidden: Placement) -> None:
        self.tp, self.group = tp, tp.get_group()
        self.before: tuple[Move, Move] = ("gather", "scatter") if hidden.is_shard() else ("none", "sum")
        self.after: tuple[Move, Move] = ("scatter", "gather") if hidden.is_shard() else ("sum", "none")

    def forward(self, block: DecoderBlock, hidden: Tensor) -> Tensor:
        """Map [B, S, D] to [B, S, D]; a micro-batch of one sequence is one half."""
        halves = list(hidden.chunk(NUM_HALVES))
        for norm, part in ((block.input_layernorm, block.self_attn), (block.post_attention_layernorm, block.mlp)):
            assert norm is not None
            assert part is not None
            halves = self._part(norm, part, halves)
        return torch.cat(halves)

    def _part(self, norm: nn.Module, part: nn.Module, halves: list[Tensor]) -> list[Tensor]:
        arriving = [self._started(norm(half), self.before) for half in halves]
        leaving = []
        for wait in arriving:
            unsharded: Tensor = _OnEveryRank.apply(wait(), self.tp)  # type: ignore[no-untyped-call]
            leaving.append(self._started(part(unsharded), self.after))
        return [half + wait() for half, wait in zip(halves, leaving, strict=True)]

    def _started(self, value: Tensor, moves: tuple[Move, Move]) -> Callable[[], Tensor]:
        """Start a collective and return how to wait for it."""
        exchange = _Exchange(*moves, self.group)
        started: Tensor = _Start.apply(value, exchange)  # type: ignore[no-untyped-call]
        return functools.partial(_Wait.apply, started, exchange)  # type: ignore[no-untyped-call]


def take_by_halves(block: DecoderBlock, tp: DeviceMesh, hidden: Placement) -> None:
    """Let a block whose products are split over tp take micro-batches by half-batches, in place; names of parameters stay."""
    block.forward = functools.partial(Halves(tp, hidden).forward, block)  # type: ignore[method-assign]
