"""The tokens that every rank trains on: what ``--data`` names as a stream, and its samples, shuffled anew in each epoch.

Sample ``i`` of a stream are the tokens ``i * seq_len .. (i + 1) * seq_len``, the last one a target only. The run sees sample
``order(epoch, position)`` as its ``epoch * num_samples + position``-th, and that count is all the state there is: two layouts with
the same global batch see the same sequences, and a run that resumes, under whatever layout or batch, goes on with the next one.

The order is a Feistel network over the indices (four rounds make a pseudo-random permutation, Luby and Rackoff, 1988), walked on
where it leaves the range: no list of samples is stored, however many there are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from ...schema import ConfigError, TrainingPlan
from .data_files import BYTE_VOCAB_SIZE, MAGIC, TokenStream, cached_token_file, find_text, open_token_files

_ROUNDS = 6


def shuffled(positions: np.ndarray, num_samples: int, *, seed: int, epoch: int) -> np.ndarray:
    """Return the samples at ``positions`` [N] of an epoch's order: a permutation of 0 .. num_samples - 1."""
    half_bits = max(1, (max(1, num_samples - 1).bit_length() + 1) // 2)
    keys = np.random.default_rng((seed, epoch)).integers(2**63, size=_ROUNDS, dtype=np.uint64)
    result = _feistel(positions.astype(np.uint64), keys, half_bits)
    while (outside := result >= num_samples).any():
        result[outside] = _feistel(result[outside], keys, half_bits)
    return result.astype(np.int64)


def _feistel(values: np.ndarray, keys: np.ndarray, half_bits: int) -> np.ndarray:
    """Permute 0 .. 4**half_bits - 1."""
    shift, mask = np.uint64(half_bits), np.uint64(2**half_bits - 1)
    high, low = values >> shift, values & mask
    for key in keys:
        high, low = low, high ^ (_mixed(low + key) & mask)
    return (high << shift) | low


def _mixed(values: np.ndarray) -> np.ndarray:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class TokenBatches:
    """The part of every global batch that one data-parallel rank trains on.

    Args:
        seq_len: tokens of a sequence; one more is read as the last target.
        rows: which sequences of each global batch are this rank's.
        vocab_size: every token must be below it; None: not looked at.

    Raises:
        ConfigError: the stream is shorter than one sequence.
    """

    def __init__(
        self,
        stream: TokenStream,
        *,
        seq_len: int,
        rows: range,
        seed: int = 0,
        vocab_size: int | None = None,
    ) -> None:
        if stream.num_tokens <= seq_len:
            raise ConfigError(
                f"the data has {stream.describe()}; one sequence of "
                f"{seq_len} tokens and its last target needs {seq_len + 1}",
                help="give more with --data, or plan for a shorter sequence",
            )
        self._stream, self._seq_len, self._seed, self._vocab_size = stream, seq_len, seed, vocab_size
        self._rows = np.asarray(rows)
        self._num_samples = (stream.num_tokens - 1) // seq_len

    def batch(self, seen: int) -> torch.Tensor:
        """Return the tokens of the step after the run has seen so many sequences, int64 [local_batch, seq_len + 1]."""
        epochs, positions = np.divmod(seen + self._rows, self._num_samples)
        samples = np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():
            is_its = epochs == epoch
            samples[is_its] = shuffled(positions[is_its], self._num_samples, seed=self._seed, epoch=epoch)
        rows = [self._stream.tokens(sample * self._seq_len, self._seq_len + 1) for sample in samples.tolist()]
        tokens = np.stack(rows).astype(np.int64)
        if self._vocab_size is not None and not 0 <= tokens.min() <= tokens.max() < self._vocab_size:
            wrong = tokens.max() if tokens.max() >= self._vocab_size else tokens.min()
            raise ConfigError(f"the data holds the token id {wrong}; the model's vocabulary has {self._vocab_size}")
        return torch.from_numpy(tokens)


def open_batches(plan: TrainingPlan, paths: Sequence[str], *, seed: int, rows: range) -> tuple[TokenBatches, str]:
    """Return the sequences of one data-parallel rank, and what tells these data from others."""
    vocab_size, seq_len = plan.model.vocab_size, plan.workload.seq_len
    stream = open_data(paths, vocab_size=vocab_size)
    batches = TokenBatches(stream, seq_len=seq_len, rows=rows, seed=seed, vocab_size=vocab_size)
    return batches, hashlib.sha256(f"{stream.fingerprint} {seq_len}".encode()).hexdigest()


def open_data(paths: Sequence[str], *, vocab_size: int) -> TokenStream:
    """Open text as bytes, or token files: named ``.bin`` and ``.npy`` files, and folders that hold ``.bin`` files of ours."""
    token_files = [_token_files(Path(path)) for path in paths]
    if not any(token_files):
        if vocab_size < BYTE_VOCAB_SIZE:
            raise ConfigError(
                f"the data has {BYTE_VOCAB_SIZE} kinds of byte, the model a vocabulary of {vocab_size}",
                help="give token files, or a --tokenizer",
            )
        return find_text(paths)
    if not all(token_files):
        texts = [path for path, files in zip(paths, token_files, strict=True) if not files]
        raise ConfigError(f"--data names token files and text ({', '.join(texts)}); a run reads one kind")
    tokens = open_token_files([file for files in token_files for file in files])
    if tokens.largest >= vocab_size:
        raise ConfigError(
            f"the data holds the token id {tokens.largest}; the model's vocabulary has {vocab_size}",
            help="use the tokenizer that belongs to the model",
        )
    return tokens


def tokenize_paths(paths: Sequence[str], tokenizer: str | None) -> tuple[str, ...]:
    """Return the paths of ``--data`` with text made into tokens, where a tokenizer is given."""
    if tokenizer is None:
        return tuple(paths)
    if any(_token_files(Path(path)) for path in paths):
        raise ConfigError("--tokenizer is for text; --data names token files")
    return (str(cached_token_file(find_text(paths), tokenizer)),)


def _token_files(path: Path) -> list[Path]:
    """Return a file whose name says that it holds ids, or those files of a folder that `write_tokens` made."""
    if not path.is_dir():
        return [path] if path.is_file() and path.suffix in (".bin", ".npy") else []
    try:
        files = sorted(path.iterdir())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    return [file for file in files if file.suffix == ".bin" and _has_header(file)]


def _has_header(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False
