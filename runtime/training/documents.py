"""Batches of documents for the built-in training: where documents end, their order, and the schedule of the next batch.

A document longer than the plan's sequences is cut into pieces of that length, each a document of its own. The run sees piece
``order(epoch, position)`` as its ``epoch * num_pieces + position``-th, as samples of one length are seen (samples.py), and that
count is all the state there is. The schedule of a batch follows from its lengths: every rank makes the same one, in the thread that
reads the batch while the one before is trained on.

Where documents end: with the files of text; in token files where the file of ends beside them says (``corpus.bin.ends.npy``, which
`meshwright tokens` writes), or behind each token of an id that is named.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

from ...schema import ConfigError, TrainingPlan
from ...schema.batch import LengthCosts
from ...solvers.batch_groups import BatchSchedule, instance_under, schedule_batch
from ..documents.packs import Batch, RankBatch
from ..parallel_model import ParallelModel
from .data_files import TokenFiles, TokenStream
from .samples import open_data, shuffled

_SCAN_TOKENS = 2**22
"""Tokens that are searched for ends at a time."""


def document_ends(stream: TokenStream, end_id: int | None = None) -> np.ndarray:
    """Return where the documents of a stream end, ascending, the last one with the stream.

    Raises:
        ConfigError: token files without ends, or ends that do not suit them.
    """
    if end_id is not None:
        return _ends_by_id(stream, end_id)
    if not isinstance(stream, TokenFiles):
        return np.array(stream.ends)
    return np.concatenate([start + _stored_ends(stream, idx) for idx, start in enumerate([0, *stream.ends[:-1]])])


def _ends_by_id(stream: TokenStream, end_id: int) -> np.ndarray:
    by_piece = [
        start + 1 + np.flatnonzero(stream.tokens(start, min(_SCAN_TOKENS, stream.num_tokens - start)) == end_id)
        for start in range(0, stream.num_tokens, _SCAN_TOKENS)
    ]
    # Files end documents too.
    return np.unique(np.concatenate([*by_piece, np.array(stream.ends)]))


def _stored_ends(stream: TokenFiles, idx: int) -> np.ndarray:
    file, count = stream.files[idx], len(stream.parts[idx])
    path = file.with_name(f"{file.name}.ends.npy")
    if not path.exists():
        raise ConfigError(
            f"where documents end in {file} is not known: {path.name} is not beside it",
            help="make the file anew with `meshwright tokens`, which writes both, or name the token that ends documents: --end-id",
        )
    try:
        ends = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    fits = isinstance(ends, np.ndarray) and ends.ndim == 1 and ends.dtype.kind in "iu" and len(ends) > 0
    if not fits or ends[0] < 1 or ends[-1] != count or (np.diff(ends.astype(np.int64)) <= 0).any():
        raise ConfigError(
            f"{path} does not suit {file}: its ends must ascend from above 0 to {count}, the tokens of the file",
            help="make both anew with `meshwright tokens`",
        )
    return ends.astype(np.int64)


class Documents:
    """The pieces of a stream's documents in their shuffled order, and the schedule of each batch.

    Args:
        max_len: longer documents are cut.
        per_batch: documents of a batch.

    Raises:
        ConfigError: the stream has no document of two tokens.
    """

    def __init__(
        self, stream: TokenStream, ends: np.ndarray, *, max_len: int, per_batch: int, costs: LengthCosts, seed: int = 0
    ) -> None:
        self._stream, self._seed, self._per_batch, self._costs = stream, seed, per_batch, costs
        starts = np.concatenate(([0], ends[:-1]))
        num_pieces = -(-(ends - starts) // max_len)
        within = np.arange(num_pieces.sum()) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
        self._starts = np.repeat(starts, num_pieces) + within * max_len
        self._lengths = np.minimum(np.repeat(ends, num_pieces) - self._starts, max_len)
        if self._lengths.max() < 2:
            raise ConfigError(f"no document of {stream.describe()} has a second token: there is nothing to learn")

    @property
    def lengths(self) -> np.ndarray:
        """Return the tokens of each piece."""
        return self._lengths

    def scheduled(self, seen: int) -> tuple[Batch, BatchSchedule]:
        """Return the batch of the step after the run has seen so many documents, and its schedule."""
        epochs, positions = np.divmod(seen + np.arange(self._per_batch), len(self._lengths))
        pieces = np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():
            is_its = epochs == epoch
            pieces[is_its] = shuffled(positions[is_its], len(self._lengths), seed=self._seed, epoch=epoch)
        lengths, starts = self._lengths[pieces].tolist(), self._starts[pieces].tolist()
        schedule = schedule_batch(instance_under(self._costs, lengths))

        def read(idx: int) -> torch.Tensor:
            return torch.from_numpy(self._stream.tokens(starts[idx], lengths[idx]).astype(np.int64))

        return Batch(tuple(lengths), read, schedule.micro_batches), schedule


class DocumentBatches:
    """What one rank takes of each batch of documents; the place of `TokenBatches`."""

    def __init__(self, documents: Documents, model: ParallelModel) -> None:
        self._documents, self._model = documents, model
        assert model.plan.batches is not None
        self._step_s = model.plan.batches.step_s

    def batch(self, seen: int) -> RankBatch:
        """Return this rank's part of the step after the run has seen so many documents."""
        batch, schedule = self._documents.scheduled(seen)
        predicted_s = schedule.seconds + self._step_s
        return self._model.prepare_batch(batch).scheduled(predicted_s, schedule.solve_seconds)


def open_documents(
    plan: TrainingPlan, paths: Sequence[str], *, seed: int, end_id: int | None = None
) -> tuple[Documents, str]:
    """Return the documents of a run, and what tells these data from others.

    Raises:
        ConfigError: the plan does not know what documents cost, or as `document_ends`.
    """
    if plan.batches is None:
        raise ConfigError(
            "the plan does not say what documents cost",
            help="run it by `meshwright apply --documents`, or plan with --lengths",
        )
    stream = open_data(paths, vocab_size=plan.model.vocab_size)
    ends = document_ends(stream, end_id)
    documents = Documents(
        stream,
        ends,
        max_len=plan.workload.seq_len,
        per_batch=plan.workload.global_batch_size,
        costs=plan.batches,
        seed=seed,
    )
    mark = hashlib.sha256(ends.astype(np.int64).tobytes()).hexdigest()
    return documents, hashlib.sha256(f"{stream.fingerprint} {mark} {plan.workload.seq_len}".encode()).hexdigest()
