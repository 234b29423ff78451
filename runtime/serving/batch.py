"""The rows of one step of an attention rank, as plain numbers: what the driver sends to every rank, and what a rank computes with.

A row is a request's new tokens: one that it decodes, or a part of its prompt. Encoded as words of 64 bits: nothing that is
received is ever unpickled.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .requests import Sampling, StepRecord

_HEAD = 9
"""Words of a row before its tokens and blocks."""


@dataclass(frozen=True)
class Row:
    """New tokens of a request, at positions ``start, start + 1, ...``, whose cache lies in ``blocks``.

    Attributes:
        sampling: of the token that follows the last one; None where the prompt goes on in a later step.
        adapter: index of the low-rank adapter; 0: none.
    """

    tokens: tuple[int, ...]
    start: int
    blocks: tuple[int, ...]
    sampling: Sampling | None
    adapter: int = 0

    @property
    def end(self) -> int:
        """Return the tokens that the last new one attends to, itself included."""
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class StepBatch:
    """The rows of a step, those of one token first and by length, as `ordered` makes them."""

    rows: tuple[Row, ...]

    @property
    def num_tokens(self) -> int:
        """Return the new tokens of all rows."""
        return sum(len(row.tokens) for row in self.rows)

    @property
    def num_sampled(self) -> int:
        """Return the rows that get a token."""
        return sum(row.sampling is not None for row in self.rows)


def order(rows: Sequence[Row]) -> list[int]:
    """Return the order of rows in a step: single tokens first, alike lengths side by side."""
    return sorted(range(len(rows)), key=lambda i: (len(rows[i].tokens) > 1, -rows[i].end))


def encode(batches: Sequence[StepBatch]) -> list[int]:
    """Return batches, one for each attention rank, as words."""
    words = [len(batches)]
    for batch in batches:
        words.append(len(batch.rows))
        for row in batch.rows:
            sampling = row.sampling or Sampling()
            words += [
                len(row.tokens), row.start, len(row.blocks), int(row.sampling is not None), row.adapter, sampling.top_k,
                sampling.seed, _bits(sampling.temperature), _bits(sampling.top_p), *row.tokens, *row.blocks,
            ]  # fmt: skip
    return words


def decode(words: Sequence[int]) -> list[StepBatch]:
    """Return what `encode` encoded."""
    place, batches = 1, []
    for _ in range(words[0]):
        count, place = words[place], place + 1
        rows = []
        for _ in range(count):
            num_tokens, start, num_blocks, samples, adapter, top_k, seed, heat, share = words[place : place + _HEAD]
            first, place = place + _HEAD, place + _HEAD + num_tokens + num_blocks
            sampling = None
            if samples:
                sampling = Sampling(temperature=_float(heat), top_k=top_k, top_p=_float(share), seed=seed)
            tokens, blocks = words[first : first + num_tokens], words[first + num_tokens : place]
            rows.append(Row(tuple(tokens), start, tuple(blocks), sampling, adapter))
        batches.append(StepBatch(tuple(rows)))
    return batches


def record_of(
    rows: Sequence[Row],
    *,
    seconds: float = 0.0,
    start_s: float = 0.0,
    waiting: int = 0,
    running: int = 0,
    used_blocks: int = 0,
) -> StepRecord:
    """Return the record of a step's rows: single tokens with something before them decode, others are of prompts."""
    singles = [row for row in rows if len(row.tokens) == 1 and row.start]
    parts = [row for row in rows if not (len(row.tokens) == 1 and row.start)]
    new = sum(len(row.tokens) for row in parts)
    attended = sum(len(row.tokens) * (row.start + (len(row.tokens) + 1) / 2) for row in parts)
    return StepRecord(
        decode_rows=len(singles), cached_tokens=sum(row.end for row in singles), prefill_tokens=new,
        prefill_context=attended / new if new else 0.0, prompts=sum(row.sampling is not None for row in parts),
        waiting=waiting, running=running, used_blocks=used_blocks, start_s=start_s, seconds=seconds,
    )  # fmt: skip


def slots(row: Row, block_size: int) -> Iterator[int]:
    """Yield the place in the cache of every new token of a row."""
    for position in range(row.start, row.end):
        yield row.blocks[position // block_size] * block_size + position % block_size


def _bits(number: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def _float(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
