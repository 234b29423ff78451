"""Caches of requests sent from the ranks that computed a prompt to the ranks that decode, whatever the two layouts.

A receiving rank needs its stage's layers and its share of the heads; each sending rank has some of both. Between every pair that
shares
something goes one message, in the order in which requests are handed over. Of latent attention every tensor rank has all: one
sends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ...schema.layers import LatentAttention
from ...schema.model import ModelSpec
from ...schema.serving import ServingLayout
from .part import blocks_of, blocks_of_stages

MAX_IN_TRANSIT = 64
"""Messages with caches that a rank has on their way; one more waits for the oldest. [chosen: bounds memory, not speed]"""


@dataclass(frozen=True)
class Peer:
    """An attention rank of an engine instance of the job, both by number."""

    instance: int
    attention_rank: int


@dataclass(frozen=True)
class Place:
    """An engine instance in the job: its layout and first rank."""

    layout: ServingLayout
    first: int


@dataclass(frozen=True)
class Piece:
    """What one rank has of another's cache: layers, and of each of them heads, as the two count them."""

    source: int
    target: int
    blocks: tuple[int, ...]
    source_heads: slice
    target_heads: slice


def pieces(spec: ModelSpec, source: Place, source_rank: int, target: Place, target_rank: int) -> list[Piece]:
    """Return the messages that take a cache from an attention rank of one instance to one of another."""
    messages = []
    layers = [blocks_of_stages(spec.num_blocks, place.layout.pp) for place in (source, target)]
    attention = blocks_of(spec)[0].attention
    is_latent, num_heads = isinstance(attention, LatentAttention), attention.num_kv_heads
    for target_stage, needed in enumerate(layers[1]):
        for source_stage, stored in enumerate(layers[0]):
            shared = tuple(idx for idx in needed if idx in stored)
            if not shared:
                continue
            for target_tp in range(target.layout.tp):
                for source_tp in range(source.layout.tp):
                    heads = _shared_heads(num_heads, source.layout.tp, source_tp, target.layout.tp, target_tp)
                    if is_latent:
                        heads = (slice(0, 1), slice(0, 1)) if source_tp == target_tp % source.layout.tp else None
                    if heads is not None:
                        sender = _rank(source, source_stage, source_rank, source_tp)
                        messages.append(
                            Piece(sender, _rank(target, target_stage, target_rank, target_tp), shared, *heads)
                        )
    return messages


def _rank(place: Place, stage: int, attention_rank: int, tp_rank: int) -> int:
    return place.first + stage * place.layout.stage_devices + attention_rank * place.layout.tp + tp_rank


def _shared_heads(heads: int, source_tp: int, source: int, target_tp: int, target: int) -> tuple[slice, slice] | None:
    """Return the heads that two tensor ranks both have, as the one and the other count them."""
    source_width, target_width = heads // source_tp, heads // target_tp
    first = max(source * source_width, target * target_width)
    stop = min((source + 1) * source_width, (target + 1) * target_width)
    if first >= stop:
        return None
    return (
        slice(first - source * source_width, stop - source * source_width),
        slice(first - target * target_width, stop - target * target_width),
    )


class CacheTransfer:
    """The caches of a rank, as they are sent to and taken in from other instances of the job.

    Attributes:
        sites: of all instances of the job.
        instance: which of them this rank belongs to.
    """

    def __init__(
        self, spec: ModelSpec, caches: Mapping[int, Tensor], block_size: int, sites: Sequence[Place], instance: int
    ) -> None:
        self.spec, self.sites, self.instance = spec, tuple(sites), instance
        self._caches, self._block_size = caches, block_size
        self._sent: list[tuple[dist.Work, Tensor]] = []
        self._arriving: dict[int, list[tuple[dist.Work, Tensor, Piece]]] = {}

    @torch.inference_mode()
    def give(self, target: Peer, attention_rank: int, blocks: Sequence[int], length: int) -> None:
        """Send what this rank has of a request's cache; its blocks may be used again at once."""
        slots = self._slots(blocks, length)
        for piece in self._pieces(Peer(self.instance, attention_rank), target):
            if piece.source != dist.get_rank():
                continue
            parts = [self._caches[idx][slots][:, :, piece.source_heads].flatten() for idx in piece.blocks]
            message = torch.cat(parts)
            work = dist.isend(message, piece.target)
            assert work is not None
            self._sent.append((work, message))
        while len(self._sent) > MAX_IN_TRANSIT:
            self._sent.pop(0)[0].wait()

    @torch.inference_mode()
    def expect(self, ticket: int, source: Peer, attention_rank: int, length: int) -> None:
        """Begin to receive a request's cache under a number."""
        arriving = []
        for piece in self._pieces(source, Peer(self.instance, attention_rank)):
            if piece.target == dist.get_rank():
                shapes = [self._shape(idx, piece, length) for idx in piece.blocks]
                cache = self._caches[piece.blocks[0]]
                message = torch.empty(sum(shape.numel() for shape in shapes), dtype=cache.dtype, device=cache.device)
                work = dist.irecv(message, piece.source)
                assert work is not None
                arriving.append((work, message, piece))
        self._arriving[ticket] = arriving

    @torch.inference_mode()
    def ingest(self, ticket: int, blocks: Sequence[int], length: int) -> None:
        """Wait for a cache and put it into blocks; without blocks it is dropped."""
        slots = self._slots(blocks, length) if blocks else None
        for work, message, piece in self._arriving.pop(ticket):
            work.wait()
            place = 0
            for idx in piece.blocks if slots is not None else ():
                shape = self._shape(idx, piece, length)
                part = message[place : place + shape.numel()].view(shape)
                place += shape.numel()
                self._caches[idx][:, :, piece.target_heads].index_copy_(0, slots, part)

    def _pieces(self, source: Peer, target: Peer) -> list[Piece]:
        return pieces(
            self.spec,
            self.sites[source.instance],
            source.attention_rank,
            self.sites[target.instance],
            target.attention_rank,
        )

    def _shape(self, block_idx: int, piece: Piece, length: int) -> torch.Size:
        _, parts, _, width = self._caches[block_idx].shape
        return torch.Size((length, parts, piece.target_heads.stop - piece.target_heads.start, width))

    def _slots(self, blocks: Sequence[int], length: int) -> Tensor:
        device = next(iter(self._caches.values())).device
        first = torch.tensor(list(blocks), device=device)[:, None] * self._block_size
        return (first + torch.arange(self._block_size, device=device)).flatten()[:length]
