"""One rank of an engine instance: its part of the model, its cache, and the passes over a step's rows.

All ranks of an instance get the same batches, one for each attention rank, and each computes its own. Hidden states go from stage
to stage as they are; the last stage computes logits of the rows that get a token and samples them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ...schema.layers import LatentAttention, SoftmaxAttention
from ...schema.model import ModelSpec
from ...schema.serving import Pool
from ..models.attention import Rotary
from ..models.decoder import Decoder, DecoderBlock
from ..models.experts import MixtureOfExperts
from .adapters import AdapterSet
from .batch import StepBatch
from .paged_attention import PagedAttention, StepState
from .part import blocks_of, build_part, require_dtype
from .ranks import InstanceRanks
from .sampling import sample
from .transfer import CacheTransfer, Place


class Executor:
    """The layers of a rank with their caches.

    Attributes:
        outbox: for what other ranks wait for.
        on_sampled: called with the logits [B, V] and the tokens that were sampled from them, on the rank that samples.
        transfer: to and from other instances of the job; None without any.
        caches: of its layers, by block of the model: [slots, P, K, C] (see paged_attention.py).
    """

    def __init__(
        self,
        spec: ModelSpec,
        ranks: InstanceRanks,
        pool: Pool,
        *,
        device: torch.device,
        seed: int = 0,
        weights: Path | None = None,
        sites: Sequence[Place] = (),
        instance: int = 0,
        adapters: Sequence[Path] = (),
        fill: Callable[[Decoder], None] | None = None,
    ) -> None:
        """Build this rank's part of a pool's instance; see `build_part`."""
        limits, weight_dtype, cache_dtype = pool.limits, require_dtype(pool.weights), require_dtype(pool.cache)
        self.spec, self.ranks, self.device, self.dtype = spec, ranks, device, weight_dtype
        self._state = StepState(limits.block_size)
        self._adapters = AdapterSet() if adapters else None
        self.part: Decoder = build_part(
            spec, ranks, self._state, dtype=weight_dtype, device=device, seed=seed, weights=weights,
            adapters=self._adapters, adapter_folders=adapters, fill=fill,
        )  # fmt: skip
        self.outbox = Outbox(limit=2 * ranks.layout.pp)
        self.on_sampled: Callable[[Tensor, list[int]], None] | None = None
        self.caches: dict[int, Tensor] = {}
        self._rotaries: list[Rotary] = []
        slots = limits.cache_blocks * limits.block_size
        for name, block in self.part.model.layers.items():
            assert isinstance(block, DecoderBlock)
            attention = block.self_attn
            assert attention is not None
            shape = cache_shape(spec, int(name), ranks.layout.tp)
            cache = _zeros((slots, *shape), cache_dtype, device)
            self.caches[int(name)] = cache
            attention.context = PagedAttention(cache, self._state, _window(spec, int(name)))
            if attention.rotary is not None and attention.rotary not in self._rotaries:
                self._rotaries.append(attention.rotary)
        self.transfer = CacheTransfer(spec, self.caches, limits.block_size, sites, instance) if sites else None

    @property
    def cache_bytes(self) -> int:
        """Return the bytes of this rank's caches."""
        return sum(cache.numel() * cache.element_size() for cache in self.caches.values())

    @torch.inference_mode()
    def forward(self, batches: Sequence[StepBatch]) -> list[int] | None:
        """Compute this rank's part of a step; return the new tokens where this rank samples them."""
        batch = batches[self.ranks.attention_rank]
        widest = max(one.num_tokens for one in batches)
        if not batch.rows:
            return self._stand_by(widest)
        self._state.begin(batch, widest, self.device)
        if self._adapters is not None:
            self._adapters.begin(batch, self.device)
        positions = [position for row in batch.rows for position in range(row.start, row.end)]
        self._move(torch.tensor(positions, dtype=torch.long, device=self.device))
        trunk, hidden = self.part.model, self._inputs(batch)
        for block in trunk.layers.values():
            hidden = block(hidden)
        if not self.ranks.is_last_stage:
            self.outbox.send(hidden, self.ranks.neighbour(1))
            return None
        return self._tokens(hidden, batch)

    def _stand_by(self, widest: int) -> list[int] | None:
        """Take part in a step without rows of this attention rank's own: its experts compute what others' tokens ask for."""
        self._state.widest = widest
        hidden = torch.empty(1, 0, self.spec.hidden_dim, dtype=self.dtype, device=self.device)
        for block in self.part.model.layers.values():
            if isinstance(block.mlp, MixtureOfExperts):
                block.feed(hidden)
        return None

    def _move(self, positions: Tensor) -> None:
        for rotary in self._rotaries:
            rotary.move(positions)
        if self.part.model.embed_positions is not None:
            self.part.model.embed_positions.positions = positions

    def _inputs(self, batch: StepBatch) -> Tensor:
        """Return the hidden states [1, T, D] that this stage starts from."""
        trunk = self.part.model
        if not self.ranks.is_first_stage:
            hidden = torch.empty(1, batch.num_tokens, self.spec.hidden_dim, dtype=self.dtype, device=self.device)
            dist.recv(hidden, self.ranks.neighbour(-1))
            return hidden
        tokens = [token for row in batch.rows for token in row.tokens]
        assert trunk.embed_tokens is not None
        embedded: Tensor = trunk.embed_tokens(torch.tensor([tokens], dtype=torch.long, device=self.device))
        return embedded if trunk.embed_positions is None else trunk.embed_positions(embedded)

    def _tokens(self, hidden: Tensor, batch: StepBatch) -> list[int] | None:
        """Return the token of each sampled row, on the rank that samples; the others have None."""
        ends, place = [], 0
        for row in batch.rows:
            place += len(row.tokens)
            if row.sampling is not None:
                ends.append(place - 1)
        trunk, head = self.part.model, self.part.lm_head
        assert trunk.norm is not None
        assert head is not None
        samples = self.ranks.tp_rank == 0
        if not ends:
            return [] if samples else None
        logits = self._all_columns(head(trunk.norm(hidden[0, ends])))
        if not samples:
            return None
        sampled = [row for row in batch.rows if row.sampling is not None]
        tokens = sample(logits.float(), [row.sampling for row in sampled if row.sampling], [row.end for row in sampled])
        if self.on_sampled is not None:
            self.on_sampled(logits, tokens)
        return tokens

    def _all_columns(self, logits: Tensor) -> Tensor:
        """Return the logits of the entire vocabulary, of which each tensor rank has a part."""
        if self.ranks.tp is None:
            return logits
        width = -(-self.spec.vocab_size // self.ranks.layout.tp)
        padded = logits.new_zeros(len(logits), width)
        padded[:, : logits.shape[1]] = logits
        parts = [torch.empty_like(padded) for _ in range(self.ranks.layout.tp)]
        dist.all_gather(parts, padded, group=self.ranks.tp)
        return torch.cat(parts, dim=1)[:, : self.spec.vocab_size]


class Outbox:
    """Tensors on their way to other ranks, kept until they are there; at most ``limit``, then `send` waits for the oldest."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, tensor: Tensor, rank: int) -> None:
        """Send a tensor to a global rank, without waiting for it to be received."""
        if len(self._sent) >= self.limit:
            self._sent.popleft()[0].wait()
        work = dist.isend(tensor, rank)
        assert work is not None
        self._sent.append((work, tensor))


def cache_shape(spec: ModelSpec, block_idx: int, tp: int) -> tuple[int, int, int]:
    """Return what a token takes in a layer's cache on one of ``tp`` ranks: (P, K, C)."""
    attention = blocks_of(spec)[block_idx].attention
    if isinstance(attention, LatentAttention):
        return 1, 1, attention.kv_lora_rank + attention.qk_rope_head_dim
    return 2, attention.num_kv_heads // tp, attention.head_dim


def _window(spec: ModelSpec, block_idx: int) -> int | None:
    attention = blocks_of(spec)[block_idx].attention
    return attention.window if isinstance(attention, SoftmaxAttention) else None


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros; of a CPU's memory, most of which a planned cache is, pages are taken only when they are written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
