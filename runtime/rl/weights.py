"""New weights for the generator: from the actor's shards to the parts of engine instances, whatever both layouts are.

The pieces that the actor's ranks hold have the names and places of the unsplit model, as when a run goes on without its dead
(supervision/holdings.py): torch's load planner says which parts an instance needs, and the reader gets them over the group of all
processes. In buckets of whole tensors, so that no process holds more than a bucket of what is on its way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch.distributed.checkpoint import load
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from ...schema.model import ModelSpec
from ..models.decoder import Decoder
from ..parallel_model import ParallelModel
from ..supervision.exchange import Exchange
from ..supervision.holdings import Piece, SurvivorReader, pieces_of
from ..training.checkpoint import stored_name
from .pools import Everyone

BUCKET_BYTES = 2**26
"""Of the unsplit tensors that move together."""


class WeightMover:
    """Every process has one, and calls `move` at the same time."""

    def __init__(self, everyone: Everyone, spec: ModelSpec, actor: ParallelModel | None) -> None:
        """Tell all processes what the actor's ranks hold; the tensors themselves are followed, not copied."""
        self._spec = spec
        self._exchange = Exchange(everyone, "weights", everyone.size)
        local: Mapping[Piece, torch.Tensor] = {}
        if actor is not None:
            local = pieces_of({stored_name(name, spec): value.detach() for name, value in actor.named_parameters()})
        self._local = local
        every = self._exchange.tell([list(_words(piece)) for piece in local])
        self._pieces = [[Piece.read(words) for words in of_member] for of_member in every]
        self._buckets = _buckets(self._pieces)

    def move(self, part: Decoder | None) -> None:
        """Fill a part of the model that will generate; processes without one send alone."""
        reader = SurvivorReader(self._exchange, self._pieces, self._local)
        state = {}
        if part is not None:
            state = {stored_name(name, self._spec): value for name, value in part.named_parameters()}
        for names in self._buckets:
            bucket = {name: state[name] for name in names if name in state}
            if bucket:
                load(bucket, storage_reader=reader, planner=DefaultLoadPlanner(), no_dist=True)
            else:
                reader.swap(())


def _words(piece: Piece) -> tuple[object, ...]:
    return piece.name, piece.offsets, piece.sizes, piece.of, piece.dtype


def _buckets(pieces: list[list[Piece]]) -> list[list[str]]:
    """Return the names of tensors that move together, the same on every process."""
    sizes = {piece.name: 4 * math.prod(piece.of) for of_member in pieces for piece in of_member}
    buckets, filled = list[list[str]](), BUCKET_BYTES
    for name in sorted(sizes):
        if filled + sizes[name] > BUCKET_BYTES and (filled or not buckets):
            buckets.append([])
            filled = 0
        buckets[-1].append(name)
        filled += sizes[name]
    return buckets
