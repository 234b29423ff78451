"""Text made into token files by a tokenizer of the `tokenizers` package (``tokenizer.json``)."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...schema import ConfigError, MeshwrightError
from .text import BYTE_VOCAB_SIZE, TextCorpus
from .token_files import write_tokens

_PIECE_BYTES = 2**18
"""Text that is encoded in one go, to the end of its line."""

_BATCH_PIECES = 32


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer of a ``tokenizer.json``, or of a folder that holds one; JSON only, no code runs.

    Raises:
        ConfigError: the file is not there or not a tokenizer, or the package is missing.
    """
    path = Path(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"no tokenizer at {file}", help="give a tokenizer.json, or a folder that holds one")
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ConfigError("--tokenizer needs the package tokenizers", help="pip install 'meshwright[text]'") from None
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises plain Exceptions
        raise ConfigError(f"{file} is not a tokenizer: {error}") from None


def make_token_file(
    corpus: TextCorpus, path: Path, *, tokenizer: str | Path | None = None, end_token: str | None = None
) -> int:
    """Write the tokens of text files.

    Args:
        tokenizer: None makes every byte a token.
        end_token: a token of the tokenizer that is put after every file.

    Returns:
        The number of tokens.

    Raises:
        ConfigError: tokenizer or end token do not exist.
        MeshwrightError: the file cannot be written.
    """
    if tokenizer is None:
        if end_token is not None:
            raise ConfigError("--end-token needs a --tokenizer that knows it")
        pieces = (corpus.tokens(start, min(_PIECE_BYTES, corpus.num_tokens - start)) for start in _starts(corpus))
        return write_tokens(path, pieces, vocab_size=BYTE_VOCAB_SIZE)
    loaded = load_tokenizer(tokenizer)
    end = None if end_token is None else loaded.token_to_id(end_token)
    if end_token is not None and end is None:
        raise ConfigError(f"the tokenizer {tokenizer} has no token {end_token!r}")
    encoded = _encoded(corpus.files, loaded, end)
    return write_tokens(path, encoded, vocab_size=loaded.get_vocab_size(with_added_tokens=True))


def cached_token_file(corpus: TextCorpus, tokenizer: str | Path) -> Path:
    """The tokens of text files, made once and kept in ``$XDG_CACHE_HOME/meshwright/tokens``.

    Raises:
        ConfigError: the tokenizer does not exist.
        MeshwrightError: the file cannot be written.
    """
    load_tokenizer(tokenizer)
    source = Path(tokenizer)
    rules = (source / "tokenizer.json" if source.is_dir() else source).read_bytes()
    stamps = [f"{file.resolve()} {(stat := file.stat()).st_size} {stat.st_mtime_ns}" for file in corpus.files]
    digest = hashlib.sha256(rules + "\n".join(stamps).encode(errors="surrogateescape")).hexdigest()
    root = os.environ.get("XDG_CACHE_HOME")
    path = (Path(root) if root else Path.home() / ".cache") / "meshwright" / "tokens" / f"{digest[:32]}.bin"
    if not path.is_file():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise MeshwrightError(f"cannot make {path.parent}: {error.strerror}") from None
        make_token_file(corpus, path, tokenizer=tokenizer)
    return path


def _starts(corpus: TextCorpus) -> range:
    return range(0, corpus.num_tokens, _PIECE_BYTES)


def _encoded(files: Sequence[Path], tokenizer: Any, end: int | None) -> Iterator[np.ndarray]:
    """Ids of every file, piece by piece."""
    for file in files:
        batch: list[str] = []
        for piece in _text_pieces(file):
            batch.append(piece)
            if len(batch) == _BATCH_PIECES:
                yield from _encode(tokenizer, batch)
                batch = []
        yield from _encode(tokenizer, batch)
        if end is not None:
            yield np.array([end])


def _encode(tokenizer: Any, batch: list[str]) -> Iterator[np.ndarray]:
    for encoding in tokenizer.encode_batch(batch, add_special_tokens=False):
        yield np.array(encoding.ids, dtype=np.int64)


def _text_pieces(file: Path) -> Iterator[str]:
    """The text of a file in pieces of whole lines (a line longer than a piece is cut); what is not UTF-8 is replaced."""
    with file.open(encoding="utf-8", errors="replace", newline="") as text:
        while piece := text.read(_PIECE_BYTES):
            yield piece + text.readline(_PIECE_BYTES)
