"""Text as training data: every text file under the given paths as one long stream of bytes, or as token files made by a tokenizer.

A tokenizer is a ``tokenizer.json`` of the package `tokenizers`.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from ...schema import ConfigError, MeshwrightError
from ...schema.units import format_bytes
from .token_files import write_tokens

BYTE_VOCAB_SIZE = 256
"""Tokens of a byte-level vocabulary."""

_SNIFF_BYTES = 8192
_SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages", "node_modules"})


@dataclass(frozen=True)
class TextCorpus:
    """Text files joined end to end; bytes are read when they are needed.

    Attributes:
        files: in the order of the stream.
        ends: ``ends[i]`` is the number of bytes in files 0..i.
    """

    files: tuple[Path, ...]
    ends: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Return the length of the stream."""
        return self.ends[-1]

    @property
    def num_tokens(self) -> int:
        """Return the length of the stream: a token is a byte."""
        return self.num_bytes

    def tokens(self, start: int, length: int) -> np.ndarray:
        """Return the tokens ``start .. start + length - 1`` of the stream, uint8 [length]."""
        return np.frombuffer(self.read(start, length), dtype=np.uint8)

    def describe(self) -> str:
        """Return the size, for messages."""
        return f"{format_bytes(self.num_bytes)} in {len(self.files)} files"

    @property
    def fingerprint(self) -> str:
        """Return a hash of the files' names and sizes: equal on every machine that would read the same stream."""
        text = "\n".join(f"{file.name} {end}" for file, end in zip(self.files, self.ends, strict=True))
        return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()

    def read(self, start: int, length: int) -> bytes:
        """Return the bytes ``start .. start + length - 1`` of the stream."""
        pieces = []
        idx = bisect_right(self.ends, start)
        while length > 0:
            begin = self.ends[idx - 1] if idx else 0
            with self.files[idx].open("rb") as file:
                file.seek(start - begin)
                piece = file.read(min(length, self.ends[idx] - start))
            if not piece:
                raise ConfigError(f"{self.files[idx]} became shorter while it was being read")
            pieces.append(piece)
            start, length = start + len(piece), length - len(piece)
            idx += start == self.ends[idx]
        return b"".join(pieces)


def find_text(paths: Sequence[str | Path] = ()) -> TextCorpus:
    """Return the text files at ``paths``; with no path the Python standard library's own sources.

    Folders are searched to their full depth in sorted order; hidden files, empty files and files with a NUL byte in
    their first 8 KiB are left out.
    """
    suffix = "" if paths else ".py"
    roots = [Path(path) for path in paths] or [Path(sysconfig.get_path("stdlib"))]
    files = []
    for root in roots:
        if not root.exists():
            raise ConfigError(f"no such data file or folder: {root}", help="give a text file or a folder of text files")
        files += [(file, size) for file in _walk(root, suffix) if (size := _text_size(file))]
    if not files:
        raise ConfigError(
            f"no text found in {', '.join(str(root) for root in roots)}",
            details=("hidden files, empty files and binary files (a NUL byte in the first 8 KiB) are left out",),
            help="give a text file or a folder of text files",
        )
    return TextCorpus(tuple(file for file, _ in files), tuple(accumulate(size for _, size in files)))


def _walk(root: Path, suffix: str) -> Iterator[Path]:
    if root.is_file():
        yield root
        return
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in _SKIPPED_FOLDERS and not name.startswith("."))
        for name in sorted(names):
            path = Path(folder) / name
            if name.endswith(suffix) and not name.startswith(".") and path.is_file():
                yield path


def _text_size(path: Path) -> int:
    """Return the bytes of a text file, 0 for a binary one."""
    try:
        with path.open("rb") as file:
            return 0 if b"\0" in file.read(_SNIFF_BYTES) else os.fstat(file.fileno()).st_size
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None


_PIECE_BYTES = 2**18
"""Text that is encoded in one go, to the end of its line."""

_BATCH_PIECES = 32


def load_tokenizer(path: str | Path) -> Any:
    """Load the tokenizer of a ``tokenizer.json``, or of a folder that holds one; JSON only, no code runs."""
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
    """Return the file with the tokens of text files, made once and stored in ``$XDG_CACHE_HOME/meshwright/tokens``."""
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
    """Yield the ids of every file, piece by piece."""
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
    """Yield the text of a file in pieces of entire lines (a line longer than a piece is cut); what is not UTF-8 is replaced."""
    with file.open(encoding="utf-8", errors="replace", newline="") as text:
        while piece := text.read(_PIECE_BYTES):
            yield piece + text.readline(_PIECE_BYTES)
