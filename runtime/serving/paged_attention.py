"""Attention of a step's rows over a paged cache, in the place of a model's own (``context`` of runtime/models/attention.py).

The modules stay as they are: what they hand over are the queries, keys and values of the step's new tokens, all rows one behind the
other as one sequence. New keys and values go into the cache; then rows of one token are computed in groups of alike lengths, each
from one copy of its requests' blocks, padded to the longest; a part of a prompt is computed by itself. What a step needs for that
is worked out once (`StepPlan`) and used by every layer.

Shapes: T new tokens, H heads and K kv heads of this rank, G = H / K, C width of a head, L tokens attended to. The cache of a layer
is [slots, P, K, C]: P = 2, keys and values; of latent attention P = K = 1, the compressed vector with the shared rotated part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .batch import Row, StepBatch, slots

PADDING_TOKENS = 256
"""Padded cache tokens that cost as much as another call of attention: 256 of 1 KiB at 10 GB/s are about 25 us."""


@dataclass(frozen=True)
class DecodeGroup:
    """Rows of one token each, which stand side by side.

    Attributes:
        rows: where they are among the new tokens.
        blocks: of all of them, flat, padded with the row's first block.
        width: blocks of a row.
        lengths: tokens that each attends to [B].
    """

    rows: slice
    blocks: Tensor
    width: int
    lengths: Tensor


@dataclass(frozen=True)
class PromptPart:
    """New tokens of one prompt: ``blocks`` hold what they attend to, None where that is only themselves."""

    rows: slice
    blocks: Tensor | None
    start: int


@dataclass(frozen=True)
class StepPlan:
    """What a step attends to."""

    slots: Tensor
    decodes: tuple[DecodeGroup, ...]
    prompts: tuple[PromptPart, ...]

    @classmethod
    def build(cls, batch: StepBatch, block_size: int, device: torch.device) -> StepPlan:
        """Work out a step's groups."""
        written = [slot for row in batch.rows for slot in slots(row, block_size)]
        num_single = next((i for i, row in enumerate(batch.rows) if len(row.tokens) > 1), len(batch.rows))
        groups = [
            _group(batch.rows[part], part, block_size, device) for part in _alike(batch.rows[:num_single], block_size)
        ]
        prompts, first = [], num_single
        for row in batch.rows[num_single:]:
            used = row.blocks[: -(-row.end // block_size)]
            blocks = torch.tensor(used, device=device) if row.start else None
            prompts.append(PromptPart(slice(first, first + len(row.tokens)), blocks, row.start))
            first += len(row.tokens)
        return cls(torch.tensor(written, device=device), tuple(groups), tuple(prompts))


def _alike(rows: tuple[Row, ...], block_size: int) -> list[slice]:
    """Return runs of rows, longest first, that waste less by padding than another call would cost."""
    runs, first, waste = [], 0, 0
    for i, row in enumerate(rows):
        waste += rows[first].end - row.end
        if waste > PADDING_TOKENS + sum(other.end for other in rows[first:i]) // 8:
            runs.append(slice(first, i))
            first, waste = i, 0
    return [*runs, slice(first, len(rows))] if rows else []


def _group(rows: tuple[Row, ...], part: slice, block_size: int, device: torch.device) -> DecodeGroup:
    width = max(-(-row.end // block_size) for row in rows)
    blocks = [block for row in rows for block in _padded(row, width, block_size)]
    lengths = torch.tensor([row.end for row in rows], device=device)
    return DecodeGroup(part, torch.tensor(blocks, device=device), width, lengths)


def _padded(row: Row, width: int, block_size: int) -> tuple[int, ...]:
    used = row.blocks[: -(-row.end // block_size)]
    return used + used[:1] * (width - len(used))


class StepState:
    """The running step, shared by all layers of a rank; ``widest``: tokens of the attention rank that has most."""

    plan: StepPlan
    widest = 0

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._masks: dict[Any, Tensor] = {}

    def begin(self, batch: StepBatch, widest: int, device: torch.device) -> None:
        """Work out what the next passes attend to."""
        self.widest = widest
        self.plan = StepPlan.build(batch, self.block_size, device)
        self._masks.clear()

    def decode_mask(self, group: DecodeGroup, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return what is added to each row's scores, minus infinity where it does not see a token [B, 1, 1, L]."""
        key = (group.rows.start, window, dtype)
        if key not in self._masks:
            key_positions = torch.arange(group.width * self.block_size, device=group.lengths.device)[None]
            seen = key_positions < group.lengths[:, None]
            if window is not None:
                seen &= key_positions >= group.lengths[:, None] - window
            hidden = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
            self._masks[key] = hidden[:, None, None]
        return self._masks[key]

    def prompt_mask(self, part: PromptPart, length: int, window: int | None, device: torch.device) -> Tensor:
        """Return which tokens each new one sees [T, L]."""
        key = (part.rows.start, window, length)
        if key not in self._masks:
            key_positions = torch.arange(length, device=device)[None]
            query_positions = torch.arange(part.start, part.start + part.rows.stop - part.rows.start, device=device)[
                :, None
            ]
            seen = key_positions <= query_positions
            if window is not None:
                seen &= key_positions > query_positions - window
            self._masks[key] = seen
        return self._masks[key]


class PagedAttention:
    """The cache of one layer, and attention over it."""

    def __init__(self, cache: Tensor, state: StepState, window: int | None = None) -> None:
        self.cache, self.state, self.window = cache, state, window
        self._by_block = cache.view(-1, state.block_size, *cache.shape[1:])

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend: query [1, H, T, C], key and value [1, K, T, C] of the step's new tokens to [1, H, T, C]."""
        plan = self.state.plan
        parts = (key, value) if self.cache.shape[1] == 2 else (key,)
        new = torch.stack([part[0].transpose(0, 1) for part in parts], dim=1)  # [T, P, K, C]
        self.cache.index_copy_(0, plan.slots, new.to(self.cache.dtype))
        queries = query[0].transpose(0, 1)  # [T, H, C]
        out = torch.empty(queries.shape, dtype=query.dtype, device=query.device)
        for group in plan.decodes:
            out[group.rows] = self._decode(queries[group.rows], group)
        for part in plan.prompts:
            out[part.rows] = self._prompt(query[:, :, part.rows], key[:, :, part.rows], value[:, :, part.rows], part)
        return out.transpose(0, 1)[None]

    def _decode(self, queries: Tensor, group: DecodeGroup) -> Tensor:
        """Map [B, H, C] to the same; the heads that share keys stand in the place of positions, so that these are read once."""
        num_rows, heads, width = queries.shape
        keys, values = self._read(group.blocks, num_rows, queries.dtype)
        by_kv_head = queries.view(num_rows, keys.shape[1], -1, width)
        mask = self.state.decode_mask(group, self.window, queries.dtype)
        mask = mask.expand(num_rows, 1, by_kv_head.shape[2], -1)
        return F.scaled_dot_product_attention(by_kv_head, keys, values, attn_mask=mask).view(num_rows, heads, width)

    def _prompt(self, query: Tensor, key: Tensor, value: Tensor, part: PromptPart) -> Tensor:
        """Map query [1, H, T, C], key and value [1, K, T, C] of one prompt to [T, H, C]."""
        is_grouped = query.shape[1] != key.shape[1]
        new = query.shape[2]
        if part.blocks is None and (self.window is None or self.window >= new):
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=is_grouped)
            return out[0].transpose(0, 1)
        if part.blocks is not None:
            key, value = self._read(part.blocks, 1, query.dtype)
        length = part.start + new
        key, value = key[:, :, :length], value[:, :, :length]
        mask = self.state.prompt_mask(part, length, self.window, query.device)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=is_grouped)
        return out[0].transpose(0, 1)

    def _read(self, blocks: Tensor, num_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, K, L, C] of blocks, as many for each row."""
        stored = self._by_block.index_select(0, blocks)  # [B W, block, P, K, C]
        stored = stored.view(num_rows, -1, *self.cache.shape[1:]).to(dtype).permute(2, 0, 3, 1, 4)
        return stored[0], stored[-1]
