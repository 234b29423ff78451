"""A batch of documents as a rank computes it: micro-batch by micro-batch the pieces of its group's documents, one after the other.

A group of d ranks is a ring of d / u exchange groups of u ranks. Each document is filled up to a multiple of twice the ring's size
R = d / u and cut as in context_parallel.py: place r of the ring has its pieces r and 2 R - 1 - r. What a place has of all documents
stands in a row, and each of its u ranks takes a run of that row. Filling behind the last document makes runs equal. It has no
targets, and comes after whatever attends; so does the last token of a document. A rank without a group in a micro-batch computes
one token that counts nothing, where others wait for it. Through a pipeline all packs are filled up to the tokens of the largest.

Everything follows from the lengths and the schedule: no message says who does what.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ...schema.batch import FILLING_LEN
from ...schema.errors import ConfigError
from ...solvers.batch_groups import BatchGroup

NOTHING = -1
"""Target of a token after which nothing counts."""


@dataclass(frozen=True)
class Batch:
    """Documents and who computes them.

    Attributes:
        lengths: tokens of each document.
        read: the tokens of one, given its index; asked only for those that this rank takes part in.
        micro_batches: groups of data ranks (plan ranks with tp left out), as `schedule_batch` makes them.
    """

    lengths: tuple[int, ...]
    read: Callable[[int], Tensor]
    micro_batches: tuple[tuple[BatchGroup, ...], ...]

    @classmethod
    def of(cls, tokens: Tensor, document_ends: Sequence[int], groups: Sequence[Sequence[BatchGroup]]) -> Batch:
        """Return the batch of documents that stand one after the other in ``tokens``, each up to its end.

        Raises:
            ConfigError: ends that do not ascend from above 0 to the number of tokens.
        """
        ends = [0, *document_ends]
        lengths = tuple(stop - start for start, stop in pairwise(ends))
        if min(lengths, default=0) < 1 or ends[-1] != len(tokens):
            raise ConfigError(
                f"document_ends must ascend from above 0 to {len(tokens)}, the tokens of the batch; they are "
                f"{list(document_ends)[:8]}"
            )
        return cls(lengths, lambda idx: tokens[ends[idx] : ends[idx + 1]], tuple(tuple(row) for row in groups))

    @property
    def num_targets(self) -> int:
        """Return the tokens that follow another one of their document."""
        return sum(self.lengths) - len(self.lengths)


@dataclass(frozen=True)
class Pack:
    """One rank's micro-batch.

    Attributes:
        inputs, targets, positions: [S] of this rank; targets are `NOTHING` where none counts.
        lengths: tokens of each document of this place of the ring, in order; they sum to S times the ranks of an exchange group.
        size: ranks of the group; 1 where it is this one alone.
        counts: it has documents.
    """

    inputs: Tensor
    targets: Tensor
    positions: Tensor
    lengths: tuple[int, ...]
    size: int
    counts: bool = True

    def to(self, device: torch.device) -> Pack:
        """Return the same on a device."""
        tensors = {name: getattr(self, name).to(device) for name in ("inputs", "targets", "positions")}
        return replace(self, **tensors)


@dataclass(frozen=True)
class RankBatch:
    """The packs of one rank; ``num_tokens`` and ``num_targets`` are of the batch, ``predicted_s`` of its schedule (0: unknown)."""

    packs: tuple[Pack, ...]
    num_tokens: int
    num_targets: int
    predicted_s: float = 0.0
    schedule_s: float = 0.0

    def scheduled(self, predicted_s: float, schedule_s: float) -> RankBatch:
        """Return the same with the seconds that a step is predicted to take, and those that its schedule took."""
        return replace(self, predicted_s=predicted_s, schedule_s=schedule_s)

    def to(self, device: torch.device) -> RankBatch:
        """Return the same on a device."""
        return replace(self, packs=tuple(pack.to(device) for pack in self.packs))


def rank_batch(
    batch: Batch,
    rank: int,
    *,
    ulysses_of: Callable[[int], int],
    multiple: int = 1,
    keeps_empty: bool = True,
    fills_up: bool = False,
) -> RankBatch:
    """Return what one data rank computes of a batch.

    Args:
        ulysses_of: ranks of an exchange group, by the size of the group.
        multiple: what the tokens of a rank are a multiple of (tp, where it splits sequences).
        keeps_empty: take part in micro-batches in which the rank has nothing. Where ranks need not, they still do for groups that
            do not come largest first: parameters are gathered with a rank's first pass and gradients reduced with its last, which
            must not be between the passes of a group. Largest first the first passes agree; the last one is then a rank's own.
        fills_up: give all packs of the batch as many tokens, as a pipeline takes them.

    Raises:
        ConfigError: groups that overlap or lack documents, or a batch in which no token follows another.
    """
    _check(batch)
    packs, keeps_empty = [], keeps_empty or not _is_largest_first(batch)
    tokens = multiple
    if fills_up:
        groups = [group for groups in batch.micro_batches for group in groups]
        tokens = max(_tokens_of_rank(batch, group, ulysses_of(group.size), multiple) for group in groups)
    for groups in batch.micro_batches:
        group = next((group for group in groups if group.first <= rank < group.first + group.size), None)
        if group is not None and group.sequences:
            ulysses = ulysses_of(group.size)
            filled = tokens if fills_up else _tokens_of_rank(batch, group, ulysses, multiple)
            packs.append(_pack(batch, group, rank - group.first, ulysses, filled))
        elif keeps_empty:
            packs.append(_empty(tokens))
    if not keeps_empty and packs and packs[-1].size > 1:
        packs.append(_empty(multiple))
    return RankBatch(tuple(packs or [_empty(multiple)]), sum(batch.lengths), batch.num_targets)


def _check(batch: Batch) -> None:
    taken = sorted(idx for groups in batch.micro_batches for group in groups for idx in group.sequences)
    if taken != list(range(len(batch.lengths))):
        raise ConfigError(f"the groups must compute each of the {len(batch.lengths)} documents once (C1)")
    for groups in batch.micro_batches:
        ranks = [rank for group in groups for rank in range(group.first, group.first + group.size)]
        if len(set(ranks)) < len(ranks):
            raise ConfigError("two groups of a micro-batch have a rank in common (C3)")
    if not batch.num_targets:
        raise ConfigError("no document of the batch has a second token: there is nothing to learn")


def _is_largest_first(batch: Batch) -> bool:
    sizes: dict[int, int] = {}
    for group in (group for groups in batch.micro_batches for group in groups):
        for rank in range(group.first, group.first + group.size):
            if group.size > sizes.get(rank, group.size):
                return False
            sizes[rank] = group.size
    return True


def _tokens_of_rank(batch: Batch, group: BatchGroup, ulysses: int, multiple: int) -> int:
    """Return the tokens of a rank of a group: what a place of its ring has, on the ranks of an exchange group."""
    ring_size = group.size // ulysses
    pieces = 2 * ring_size if ring_size > 1 else 1
    tokens = sum(-(-batch.lengths[idx] // pieces) for idx in group.sequences) * (2 if ring_size > 1 else 1)
    unit = int(np.lcm(2 if ring_size > 1 else 1, ulysses * multiple))
    return -(-tokens // unit) * unit // ulysses


def _pack(batch: Batch, group: BatchGroup, place: int, ulysses: int, num_tokens: int) -> Pack:
    """Return the pack of so many tokens of the rank at a place of its group."""
    ring_rank, exchange_rank = divmod(place, ulysses)
    ring_size = group.size // ulysses
    parts = [_share(batch.read(idx).numpy(), ring_rank, ring_size) for idx in group.sequences]
    lengths = [part.shape[1] for part in parts]
    if lacking := num_tokens * ulysses - sum(lengths):
        lengths += _pieces(lacking)
        parts.append(_filling(lacking))
    run = torch.from_numpy(np.concatenate(parts, axis=1)).chunk(ulysses, dim=1)[exchange_rank]
    inputs, targets, positions = run.contiguous()
    return Pack(inputs, targets, positions, tuple(lengths), group.size)


def _share(tokens: np.ndarray, ring_rank: int, ring_size: int) -> np.ndarray:
    """Return inputs, targets and positions [3, S] of one document at a place of a ring."""
    pieces = 2 * ring_size if ring_size > 1 else 1
    width = -(-len(tokens) // pieces)
    rows = np.zeros((3, pieces * width), dtype=np.int64)
    rows[0, : len(tokens)] = tokens
    rows[1] = NOTHING
    rows[1, : len(tokens) - 1] = tokens[1:]
    rows[2, : len(tokens)] = np.arange(len(tokens))
    if ring_size == 1:
        return rows
    by_piece = rows.reshape(3, pieces, width)
    return np.concatenate((by_piece[:, ring_rank], by_piece[:, pieces - 1 - ring_rank]), axis=1)


def _pieces(num_tokens: int) -> list[int]:
    """Return the lengths in which filling attends."""
    full, rest = divmod(num_tokens, FILLING_LEN)
    return [FILLING_LEN] * full + [rest] * (rest > 0)


def _filling(num_tokens: int) -> np.ndarray:
    rows = np.zeros((3, num_tokens), dtype=np.int64)
    rows[1] = NOTHING
    return rows


def _empty(num_tokens: int) -> Pack:
    inputs, targets, positions = torch.from_numpy(_filling(num_tokens))
    return Pack(inputs, targets, positions, tuple(_pieces(num_tokens)), 1, counts=False)
