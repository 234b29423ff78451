"""What survivors hold of a model's states, and a reader of torch.distributed.checkpoint that gets them from there.

A holding is the part that one process has of the states after one step: its live tensors, or copies in host memory. Pieces have
the names of the unsplit model and their place in its tensors, as in the index of a checkpoint on disk: so torch's load planner says
which parts of them another layout needs, and only where they come from differs. The new layout's tensors are filled from
the process's own pieces, and from those of one other holder each, all that goes from one to another in one message.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ..training.checkpoint import TrainingProgress
from .exchange import Exchange, as_bytes


@dataclass(frozen=True, order=True)
class Piece:
    """Place of a tensor in one of the unsplit model; JSON as a list of its fields."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    of: tuple[int, ...]
    dtype: str

    @classmethod
    def read(cls, value: Sequence[Any]) -> Piece:
        """Return what another process told."""
        name, offsets, sizes, of, dtype = value
        return cls(name, tuple(offsets), tuple(sizes), tuple(of), dtype)

    @property
    def key(self) -> tuple[str, tuple[int, ...]]:
        """Name and place, by which torch's load planner knows it."""
        return self.name, self.offsets

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensor."""
        return math.prod(self.sizes) * dtype_of(self.dtype).itemsize


def dtype_of(name: str) -> torch.dtype:
    """Return a dtype by its name."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


@dataclass(frozen=True)
class Holding:
    """What one process holds of the states after the step of ``progress``, under the layout of one generation."""

    generation: int
    progress: TrainingProgress
    tensors: Mapping[Piece, Tensor]

    @property
    def tag(self) -> str:
        """Holdings of all processes with the same tag are parts of one state."""
        return f"{self.generation}/{self.progress.step}"

    def joined(self, other: Holding) -> Holding:
        """Return what is held of the same state here and there."""
        return replace(self, tensors={**other.tensors, **self.tensors})


def pieces_of(state: dict[str, Any]) -> dict[Piece, Tensor]:
    """Return the local parts of a state, by reference: they follow the training."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    pieces: dict[Piece, Tensor] = {}
    for item in planner.create_local_plan().items:
        data = item.tensor_data
        assert data is not None
        if 0 in data.chunk.sizes:
            continue
        dtype = str(data.properties.dtype).removeprefix("torch.")
        place = (tuple(data.chunk.offsets), tuple(data.chunk.sizes), tuple(data.size))
        tensor = planner.resolve_data(item)
        assert isinstance(tensor, Tensor)
        pieces[Piece(item.index.fqn, *place, dtype)] = tensor
    return pieces


def packed_size(pieces: Sequence[Piece]) -> int:
    """Return the bytes of pieces one after the other."""
    return sum(piece.num_bytes for piece in pieces)


def unpacked(pieces: Sequence[Piece], buffer: Tensor) -> list[Tensor]:
    """Return the pieces that lie one after the other in a buffer of bytes, copied where they lie off their alignment."""
    tensors, start = [], 0
    for piece in pieces:
        part, dtype = buffer[start : start + piece.num_bytes], dtype_of(piece.dtype)
        start += piece.num_bytes
        aligned = part if part.storage_offset() % dtype.itemsize == 0 else part.clone()
        tensors.append(aligned.view(dtype).view(piece.sizes))
    return tensors


def missing(needed: Mapping[str, Sequence[int]], pieces: Sequence[Piece]) -> list[str]:
    """Return the tensors of which no piece holds some part: those of a model, by name and size, and all of which there are pieces.

    Pieces of one layout are equal or do not overlap, so that counting elements is enough. A part that nobody holds would not be
    missed in loading: torch's planner reads what there is of a tensor.
    """
    counts: dict[str, dict[tuple[int, ...], int]] = defaultdict(dict)
    for piece in pieces:
        counts[piece.name][piece.offsets] = math.prod(piece.sizes)
    sizes = {**needed, **{piece.name: piece.of for piece in pieces}}
    return [name for name, size in sizes.items() if sum(counts[name].values()) < math.prod(size)]


class SurvivorReader(StorageReader):
    """Reads a state from what the members of a generation hold of it.

    Args:
        pieces: of every member, in their order.
        local: this member's, with their tensors.
        means: names of tensors that are read as the mean of two others (neighbours.py), whatever is held of them.
    """

    def __init__(
        self,
        exchange: Exchange,
        pieces: Sequence[Sequence[Piece]],
        local: Mapping[Piece, Tensor],
        means: Mapping[str, tuple[str, str]] | None = None,
    ) -> None:
        self._exchange, self._means = exchange, means or {}
        self._local = {piece.key: tensor for piece, tensor in local.items()}
        self._pieces = {piece.key: piece for of_member in pieces for piece in of_member}
        self._holders: dict[Any, list[int]] = defaultdict(list)
        for member, of_member in enumerate(pieces):
            for piece in of_member:
                self._holders[piece.key].append(member)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index of all pieces."""
        entries: dict[str, TensorStorageMetadata] = {}
        pieces = [piece for piece in self._pieces.values() if piece.name not in self._means]
        lost = [replace(p, name=name) for name, (below, _) in self._means.items() for p in pieces if p.name == below]
        for piece in [*pieces, *lost]:
            properties = TensorProperties(dtype=dtype_of(piece.dtype))
            entry = entries.setdefault(piece.name, TensorStorageMetadata(properties, torch.Size(piece.of), []))
            entry.chunks.append(ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes)))
        return Metadata(dict(entries))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors of a plan."""
        names = [self._means.get(item.storage_index.fqn, (item.storage_index.fqn,)) for item in plan.items]
        values = iter(
            self.swap([_named(item, name) for item, of in zip(plan.items, names, strict=True) for name in of])
        )
        for item, of in zip(plan.items, names, strict=True):
            value = next(values) if len(of) == 1 else (next(values) + next(values)) / 2
            target = planner.resolve_tensor(item).detach()
            target.copy_(value)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def swap(self, items: Sequence[ReadItem]) -> list[Tensor]:
        """Return parts of pieces, own ones and those that others send; every member calls it, also where it needs nothing."""
        needed: dict[int, list[int]] = defaultdict(list)
        for i, item in enumerate(items):
            needed[self._holder(_key(item))].append(i)
        me = self._exchange.position
        requests = {
            str(member): [_words(items[i]) for i in of_member] for member, of_member in needed.items() if member != me
        }
        outgoing = {
            member: as_bytes([self._part(*words) for words in asks[str(me)]])
            for member, asks in enumerate(self._exchange.tell(requests))
            if str(me) in asks
        }
        parts = {
            member: [self._part_of(items[i]) for i in of_member] for member, of_member in needed.items() if member != me
        }
        incoming = {member: torch.empty(packed_size(pieces), dtype=torch.uint8) for member, pieces in parts.items()}
        for work in self._exchange.start(outgoing, incoming):
            work.wait()
        values: dict[int, Tensor] = {i: self._part(*_words(items[i])) for i in needed.get(me, ())}
        for member, buffer in incoming.items():
            values.update(zip(needed[member], unpacked(parts[member], buffer), strict=True))
        return [values[i] for i in range(len(items))]

    def _holder(self, key: tuple[str, tuple[int, ...]]) -> int:
        holders = self._holders[key]
        position = self._exchange.position
        return position if position in holders else holders[position % len(holders)]

    def _part(self, name: str, place: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
        tensor = self._local[name, tuple(place)]
        for dim, (start, length) in enumerate(zip(offsets, lengths, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        return tensor

    def _part_of(self, item: ReadItem) -> Piece:
        piece = self._pieces[_key(item)]
        return Piece(piece.name, (), tuple(item.lengths), (), piece.dtype)

    # --- what torch asks of a reader; nothing is on a disk ---

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing."""

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Tell that no place is needed."""
        return True


def _key(item: ReadItem) -> tuple[str, tuple[int, ...]]:
    return item.storage_index.fqn, tuple(item.storage_index.offset or ())


def _named(item: ReadItem, name: str) -> ReadItem:
    return replace(item, storage_index=replace(item.storage_index, fqn=name))


def _words(item: ReadItem) -> tuple[str, list[int], list[int], list[int]]:
    index = item.storage_index
    return index.fqn, list(index.offset or ()), list(item.storage_offsets), list(item.lengths)
