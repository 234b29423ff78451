"""Batches of sequences of unequal lengths: lengths as a file, and batches that bring their own seconds."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Annotated, Self

import numpy as np
from pydantic import Field, NonNegativeFloat, model_validator

from .base import Count, Frozen, read_json, shown
from .csv_file import limited_text
from .errors import ConfigError
from .limits import MAX_SEQUENCES
from .schedules import SCHEDULES, ScheduleName
from .units import FloatArray, IntArray

_MAX_DISTINCT = 256
"""Lengths that a distribution tells apart."""

_MAX_DIGITS, _MAX_LINE_BYTES = 9, 32
"""Of a length in a file, and on average of a line."""

_BLANKS = b" \t\n\r\v\f"

FILLING_LEN = 256
"""What fills packs up to one shape attends in pieces of so many tokens: less than the squares of what lacks, with few kernels."""


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

    @model_validator(mode="after")
    def _takes_time(self) -> Self:
        if self.linear_s + self.quadratic_s <= 0:
            raise ValueError("linear_s or quadratic_s must be above 0: sequences would take no time")
        return self

    def seconds(self, lengths: FloatArray, degree: int) -> FloatArray:
        """Return the seconds of sequences of these lengths [S], each by itself in a group of ``degree`` ranks."""
        known = [entry for entry in self.exchange_s if entry <= degree]
        exchange_s = self.exchange_s[max(known)] if known and degree > 1 else 0.0
        return np.asarray((self.quadratic_s * lengths**2 + (self.linear_s + exchange_s) * lengths) / degree)


class Lengths(Frozen):
    """A distribution of the lengths of sequences: ``counts[i]`` of every sum(counts) have ``lengths[i]`` tokens.

    Attributes:
        lengths: ascending.
    """

    lengths: tuple[Annotated[int, Field(ge=1, le=10**9)], ...] = Field(min_length=1, max_length=4096)
    counts: tuple[Count, ...]

    @model_validator(mode="after")
    def _ascends(self) -> Self:
        if list(self.lengths) != sorted(set(self.lengths)) or len(self.counts) != len(self.lengths):
            raise ValueError("lengths must ascend, and have a count each")
        return self

    @classmethod
    def of(cls, samples: Sequence[int], *, max_len: int | None = None) -> Lengths:
        """Return the distribution of lengths; those over ``max_len`` are cut into pieces of it and a rest.

        Of more than `_MAX_DISTINCT` distinct lengths those within one of as many intervals of equal ratio count as their mean.

        Raises:
            ConfigError: there are none, or one is not positive.
        """
        given = np.asarray(samples)
        if given.ndim != 1 or not len(given) or given.dtype.kind not in "iu":
            raise ConfigError("lengths are one row of at least one whole number")
        if given.min() < 1:
            raise ConfigError(f"sequence {int(given.argmin())} has {given.min()} tokens: a sequence has at least one")
        if max_len is not None:
            num_full, rest = np.divmod(given, max_len)
            given = np.concatenate([np.full(int(num_full.sum()), max_len), rest[rest > 0]])
        distinct, counts = np.unique(given, return_counts=True)
        if len(distinct) > _MAX_DISTINCT:
            edges = np.geomspace(distinct[0], distinct[-1] + 1, _MAX_DISTINCT + 1)
            place = np.clip(np.searchsorted(edges, distinct, side="right") - 1, 0, _MAX_DISTINCT - 1)
            counts_in = np.bincount(place, counts, _MAX_DISTINCT)
            tokens_in = np.bincount(place, counts * distinct, _MAX_DISTINCT)
            used = counts_in > 0
            means = np.rint(tokens_in[used] / counts_in[used]).astype(np.int64)
            means[-1] = distinct[-1]  # the longest decides what must fit
            distinct, place = np.unique(means, return_inverse=True)
            counts = np.bincount(place, counts_in[used]).astype(np.int64)
        return cls(lengths=tuple(distinct.tolist()), counts=tuple(counts.tolist()))

    @property
    def mean(self) -> float:
        """Return the mean tokens of a sequence."""
        return float(np.average(self.lengths, weights=self.counts))

    def attended_len(self, limit: int) -> int:
        """Return the length at which a token attends to as many others as the mean one here, none of them over ``limit``.

        sum LEN^2 / sum LEN
        """
        lengths, counts = np.minimum(self.lengths, limit).astype(float), np.array(self.counts, dtype=float)
        return max(1, round(float((counts * lengths**2).sum() / (counts * lengths).sum())))

    def draw(self, size: int, seed: int) -> tuple[int, ...]:
        """Return a batch of so many sequences."""
        weights = np.array(self.counts, dtype=float)
        return tuple(np.random.default_rng(seed).choice(self.lengths, size=size, p=weights / weights.sum()).tolist())


class PipelineCosts(Frozen):
    """The pipeline that packs of sequences go through.

    Attributes:
        schedule, pp, num_model_chunks: as in `Layout`; cp: ranks of a stage that share a pack.
        forward_s, backward_s, weight_s: of each stage, in the order of the model, of a pack that takes the busiest rank a second.
    """

    schedule: ScheduleName
    pp: Annotated[int, Field(ge=2, le=2**16)]
    num_model_chunks: Annotated[int, Field(ge=1, le=2**10)] = 1
    cp: Count = 1
    forward_s: tuple[NonNegativeFloat, ...] = Field(min_length=2)
    backward_s: tuple[NonNegativeFloat, ...]
    weight_s: tuple[NonNegativeFloat, ...]

    @model_validator(mode="after")
    def _one_of_each_stage(self) -> Self:
        sizes = {len(self.forward_s), len(self.backward_s), len(self.weight_s)}
        if sizes != {self.pp * self.num_model_chunks}:
            raise ValueError(
                f"{self.pp} x {self.num_model_chunks} stages have forward, backward and weight seconds each"
            )
        if why := why_no_packs(self.schedule):
            raise ValueError(why[0])
        return self

    @property
    def min_packs(self) -> int:
        """Return the fewest micro-batches that the schedule takes."""
        return self.pp if SCHEDULES[self.schedule].needs_full_pipeline else 1

    @property
    def unit(self) -> int:
        """Return what the number of micro-batches is a multiple of."""
        return 1 if self.num_model_chunks == 1 or SCHEDULES[self.schedule].any_num_microbatches else self.pp


def why_no_packs(schedule: ScheduleName) -> tuple[str, ...]:
    """Return why the packs of a batch, whose number differs from step to step, cannot go through a pipeline under a schedule."""
    record = SCHEDULES[schedule]
    if record.is_given:
        return (f"schedule {schedule} is an order of one number of micro-batches, which changes with the batch",)
    if record.all_forward_first:
        return (f"schedule {schedule} holds all micro-batches at once, whose number changes with the batch",)
    return ()


class LengthCosts(Frozen):
    """What sequences cost under a plan: seconds a token on groups of each size, linear between the lengths, as attention grows.

    Attributes:
        num_ranks: that share a batch; tokens_per_rank: that one of them holds in a micro-batch.
        fixed_s: of every micro-batch, besides its slowest group; step_s: of every step, besides its micro-batches.
        waits: ranks wait for each other after every micro-batch, not only after the last one.
        lengths: ascending.
        token_s: seconds of a token of a sequence of each length, for groups of 1, 2, 4, .. ranks; through a pipeline one row: on
            the busiest rank, in a pack.
        pipeline: that packs go through; None: groups are made anew for every batch.
    """

    num_ranks: Count
    tokens_per_rank: Count
    fixed_s: NonNegativeFloat
    step_s: NonNegativeFloat = 0.0
    waits: bool = True
    lengths: tuple[Count, ...] = Field(min_length=1)
    token_s: tuple[tuple[NonNegativeFloat, ...], ...] = Field(min_length=1, max_length=17)
    pipeline: PipelineCosts | None = Field(default=None, exclude_if=lambda value: value is None)

    @model_validator(mode="after")
    def _is_a_table(self) -> Self:
        if any(len(row) != len(self.lengths) for row in self.token_s):
            raise ValueError(f"each row of token_s must have {len(self.lengths)} entries, one for each length")
        if list(self.lengths) != sorted(set(self.lengths)):
            raise ValueError("lengths must ascend")
        if 2 ** (len(self.token_s) - 1) > self.num_ranks:
            raise ValueError(f"token_s has {len(self.token_s)} sizes of groups for {self.num_ranks} ranks")
        if self.pipeline is not None and (len(self.token_s) > 1 or self.num_ranks % self.pipeline.cp):
            raise ValueError(
                f"packs of {self.pipeline.cp} ranks, with {len(self.token_s)} rows of token_s, on {self.num_ranks} ranks"
            )
        return self

    def seconds(self, lengths: FloatArray, degree: int) -> FloatArray:
        """Return the seconds of sequences of these lengths [S], each by itself in a group of ``degree`` ranks."""
        row = self.token_s[degree.bit_length() - 1]
        return np.asarray(lengths * np.interp(lengths, self.lengths, row))


class BatchPart(Frozen):
    """What another chain of the model computes of each sequence of a batch: the patches of its images, say.

    Attributes:
        lengths: tokens of the chain, of each sequence; 0 where it has none.
        token_ratio: what one of them holds of a rank's memory, over a token of the batch's own lengths.
    """

    name: str = ""
    lengths: tuple[Annotated[int, Field(ge=0, le=10**9)], ...] = Field(min_length=1, max_length=MAX_SEQUENCES)
    costs: SequenceCosts
    token_ratio: Annotated[float, Field(ge=0, le=10**6)] = 1.0


class Batch(Frozen):
    """A batch to schedule.

    Attributes:
        lengths: tokens of each sequence; ``multiple``: what they are padded up to.
        num_ranks: that share the batch; tokens_per_rank: that one holds in a micro-batch.
        parts: of other chains, computed by the group of the sequence too.
    """

    name: str = ""
    lengths: tuple[Annotated[int, Field(ge=1, le=10**9)], ...] = Field(min_length=1, max_length=MAX_SEQUENCES)
    multiple: Count = 1
    num_ranks: Annotated[int, Field(ge=1, le=2**16)]
    tokens_per_rank: Count
    costs: SequenceCosts
    parts: tuple[BatchPart, ...] = Field(default=(), max_length=16)

    @model_validator(mode="after")
    def _has_every_part(self) -> Self:
        for number, part in enumerate(self.parts):
            if len(part.lengths) != len(self.lengths):
                raise ValueError(
                    f"parts[{number}] has {len(part.lengths)} lengths for {len(self.lengths)} sequences: one for each, 0 where "
                    f"it has none"
                )
        return self

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
    text = limited_text(path, _MAX_LINE_BYTES * MAX_SEQUENCES)
    lengths = _one_in_each_line(text)
    if lengths is None:
        for number, line in enumerate(BytesIO(text), start=1):
            word = line.strip()
            if word and not (word.isdigit() and len(word) <= _MAX_DIGITS and int(word)):
                what = shown(word.decode("utf-8", "replace"))
                raise ConfigError(
                    f"{path}, line {number}: {what} is no length: a positive number of tokens",
                    help="of text and images give `meshwright batch` a batch with parts" if b" " in word else None,
                )
    assert lengths is not None
    if len(lengths) > MAX_SEQUENCES:
        raise ConfigError(f"{path} has more than {MAX_SEQUENCES:,} sequences", help="give one batch of them")
    if not len(lengths):
        raise ConfigError(f"{path} has no lengths", help="one number of tokens in each line")
    return tuple(lengths.tolist())


def _one_in_each_line(text: bytes) -> IntArray | None:
    """Return the numbers of a text with one in each line that is not empty, all at once; None where a line is something else."""
    if text.translate(None, b"0123456789" + _BLANKS):
        return None
    array = np.frombuffer(text, dtype=np.uint8)
    edges = np.diff((array >= ord("0")).view(np.int8), prepend=0, append=0)
    starts, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    if not len(starts):
        return starts
    new_lines = np.add.reduceat(array == ord("\n"), starts, dtype=np.int32)  # from a number to the next one
    if not new_lines[:-1].all() or (ends - starts).max() > _MAX_DIGITS:
        return None
    numbers = np.fromstring(text, dtype=np.int64, sep=" ")
    return numbers if numbers.min() > 0 else None
