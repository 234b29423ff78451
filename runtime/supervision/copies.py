"""Copies of states in a peer's memory, for layouts in which a rank's states are nowhere else.

Every k steps a rank copies its states to host memory and sends them to the next rank, on another node where there are several,
while the next step computes. Before any rank ends that step, each waits for its transfer: once a later copy begins, every rank has
the one before. Until then another may lack it, so that the one before that stays. After a death all roll back to the last step of
which every part is there.

k follows from what the first copies kept the training waiting, on the rank that waited longest (`copy_steps`, cost_models.goodput)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ...cost_models.goodput import copy_steps
from ..training.checkpoint import TrainingProgress
from .exchange import Exchange, as_bytes
from .holdings import Holding, Piece, packed_size, unpacked

_MEASURED = 4
"""Copies, one each step, by which k is decided; the first one, which allocates, does not count."""


@dataclass(frozen=True)
class _Copy:
    progress: TrainingProgress
    local: Tensor
    peers: Tensor


class PeerCopies:
    """Copies of one rank's states and of one peer's, over the active members of a generation; every rank has one.

    Args:
        every: steps between copies; None: measured.
        mtbf_s: between faults of the job.
        stride: the peer that a copy goes to is so many ranks on.
        live: this rank's states, by reference.
        on_decided: called with the steps between copies, once they are decided, and the part of the time that copies then take.
    """

    def __init__(
        self,
        exchange: Exchange,
        *,
        generation: int,
        every: int | None,
        mtbf_s: float,
        stride: int,
        live: Mapping[Piece, Tensor],
        on_decided: Callable[[int, float], None] = lambda every, share: None,
    ) -> None:
        self._exchange, self._generation, self._every, self._live = exchange, generation, every or 1, live
        self._is_measured, self._mtbf_s, self._on_decided = every is not None, mtbf_s, on_decided
        me, size = exchange.position, exchange.size
        self._target, self._source = (me + stride) % size, (me - stride) % size
        answers = exchange.tell([(p.name, p.offsets, p.sizes, p.of, p.dtype) for p in live])
        self._local_pieces, self._peers_pieces = list(live), [Piece.read(words) for words in answers[self._source]]
        self._complete = list[_Copy]()
        self._coming: tuple[_Copy, list[Any]] | None = None
        self._next, self._waited_s, self._step_s = 0, list[float](), list[float]()

    def copy(self, progress: TrainingProgress, step_time_s: float) -> None:
        """Begin a copy after a step, where one is due."""
        self._step_s.append(step_time_s)
        if progress.step < self._next:
            return
        start_s = time.perf_counter()
        self.settle()
        self._complete = self._complete[-1:]
        local = as_bytes(list(self._live.values()))
        peers = torch.empty(packed_size(self._peers_pieces), dtype=torch.uint8)
        works = self._exchange.start({self._target: local}, {self._source: peers})
        self._coming = _Copy(progress, local, peers), works
        self._waited_s.append(time.perf_counter() - start_s)
        self._decide()
        self._next = progress.step + self._every

    def settle(self) -> None:
        """Wait for the copy on its way; to be called before what no rank gets past without all others."""
        if self._coming is None:
            return
        start_s = time.perf_counter()
        copy, works = self._coming
        for work in works:
            work.wait()
        self._complete.append(copy)
        self._coming = None
        self._waited_s[-1] += time.perf_counter() - start_s

    def _decide(self) -> None:
        """Decide how often to copy, once what the first copies took is known."""
        if self._is_measured or len(self._waited_s) <= _MEASURED:
            return
        self._is_measured = True
        copy_s, step_s = median(self._waited_s[1:-1]), median(self._step_s[-_MEASURED:])
        longest_s = max(self._exchange.tell([copy_s, step_s]))
        self._every = copy_steps(copy_s=longest_s[0], step_s=longest_s[1], mtbf_s=self._mtbf_s)
        self._on_decided(self._every, longest_s[0] / (longest_s[0] + self._every * longest_s[1]))

    def holdings(self) -> list[Holding]:
        """Return what is complete here."""
        return [
            Holding(
                self._generation,
                copy.progress,
                dict(zip(self._local_pieces, unpacked(self._local_pieces, copy.local), strict=True))
                | dict(zip(self._peers_pieces, unpacked(self._peers_pieces, copy.peers), strict=True)),
            )
            for copy in self._complete
        ]
