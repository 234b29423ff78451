"""Batches of sequences of unequal lengths: lengths as a file, and batches that bring their own seconds."""

from __future__ import annotations

import gzip
import io
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field, NonNegativeFloat

from .base import MAX_TEXT_BYTES, Count, Frozen, read_json, shown
from .errors import ConfigError
from .units import FloatArray

MAX_SEQUENCES = 1_000_000


class SequenceCosts(Frozen):
    """Seconds of sequences in a micro-batch on a group of d ranks, which adds them up.

        (quadratic_s LEN^2 + linear_s LEN + exchange_s[d] LEN) / d

    Attributes:
        fixed_s: of every micro-batch, besides its slowest group.
        exchange_s: of a token, by degree; degrees that are not listed have those of the next smaller one.
    """

    fixed_s: NonNegativeFloat = 0.0
    linear_s: NonNegativeFloat
    quadratic_s: NonNegativeFloat = 0.0
    exchange_s: dict[Count, NonNegativeFloat] = Field(default_factory=dict)

    def seconds(self, lengths: FloatArray, degree: int) -> FloatArray:
        """Return the seconds of sequences of these lengths [S], each by itself in a group of ``degree`` ranks."""
        known = [entry for entry in self.exchange_s if entry <= degree]
        exchange_s = self.exchange_s[max(known)] if known and degree > 1 else 0.0
        return np.asarray((self.quadratic_s * lengths**2 + (self.linear_s + exchange_s) * lengths) / degree)


class Batch(Frozen):
    """A batch to schedule.

    Attributes:
        lengths: tokens of each sequence; ``multiple``: what they are padded up to.
        num_ranks: that share the batch; tokens_per_rank: that one holds in a micro-batch.
    """

    name: str = ""
    lengths: tuple[Annotated[int, Field(ge=1, le=10**9)], ...] = Field(min_length=1, max_length=MAX_SEQUENCES)
    multiple: Count = 1
    num_ranks: Annotated[int, Field(ge=1, le=2**16)]
    tokens_per_rank: Count
    costs: SequenceCosts

    @property
    def padded(self) -> tuple[int, ...]:
        """Return the lengths as they are computed."""
        return tuple(-(-length // self.multiple) * self.multiple for length in self.lengths)


def read_batches(path: str | Path) -> tuple[Batch, ...]:
    """Read one batch, or a list of them, from JSON.

    Raises:
        ConfigError: the file is not one, or a field is wrong.
    """
    data = read_json(path)
    entries = data if isinstance(data, list) else [data]
    if not entries or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(
            f"{path} holds no batch: an object with lengths, num_ranks, tokens_per_rank and costs, or a list of them"
        )
    return tuple(Batch(**entry) for entry in entries)


def read_lengths(path: str | Path) -> tuple[int, ...]:
    """Read the lengths of sequences, one in each line of a text file; ``.gz`` is decompressed.

    Raises:
        ConfigError: the file cannot be read, has no lengths, or a line that is no positive number.
    """
    path = Path(path)
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read(MAX_TEXT_BYTES + 1)
    except (OSError, EOFError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    if len(content) > MAX_TEXT_BYTES:
        raise ConfigError(f"cannot read {path}: it has more than {MAX_TEXT_BYTES // 2**20} MiB")
    lengths = []
    for number, line in enumerate(io.StringIO(content.decode("utf-8", "replace")), start=1):
        text = line.strip()
        if not text:
            continue
        value = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
        if value < 1:
            raise ConfigError(f"{path}, line {number}: {shown(text)} is no length: a positive number of tokens")
        lengths.append(value)
        if len(lengths) > MAX_SEQUENCES:
            raise ConfigError(f"{path} has more than {MAX_SEQUENCES:,} sequences", help="give one batch of them")
    if not lengths:
        raise ConfigError(f"{path} has no lengths", help="one number of tokens in each line")
    return tuple(lengths)
