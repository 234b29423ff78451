"""Data of a training run: text as one long stream of bytes, or files of token ids, which `meshwright tokens` makes of text.

A ``.bin`` file is a header of 32 bytes and then ids, little-endian:

| bytes | content |
|---|---|
| 0-7 | ``MESHTOKS`` |
| 8-11 | version, 1 |
| 12-15 | bytes of one id, 2 or 4 (unsigned) |
| 16-23 | number of ids |
| 24-31 | largest id |

A ``.npy`` file holds one row of integers. Nothing is unpickled, and files are mapped, not read: their size is no matter.
"""

from __future__ import annotations

import hashlib
import os
import struct
import sysconfig
import tempfile
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import numpy as np

from ...schema import ConfigError, MeshwrightError
from ...schema.base import let_be_read
from ...schema.units import format_bytes
from ..tokenizer import open_tokenizer, refused

MAGIC = b"MESHTOKS"
_HEADER = struct.Struct("<8sIIQQ")
_VERSION = 1
_DTYPES = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
_NPY_MAGIC = b"\x93NUMPY"
_SCAN_TOKENS, _SCAN_PARTS = 2**24, 64
"""Ids of a file without a header that are looked at before a run, spread evenly; every batch is looked at when it is read."""

BYTE_VOCAB_SIZE = 256
"""Tokens of a byte-level vocabulary."""

_SNIFF_BYTES = 8192
_SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages", "node_modules"})
_PIECE_BYTES, _BATCH_PIECES = 2**18, 32
"""Text that is encoded in one go, to the end of its line; pieces that a tokenizer gets at a time."""


@dataclass(frozen=True)
class TokenStream(ABC):
    """Files of tokens joined end to end.

    Attributes:
        files: in the order of the stream.
        ends: ``ends[i]`` is the number of tokens in files 0..i.
    """

    files: tuple[Path, ...]
    ends: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Return the length of the stream."""
        return self.ends[-1]

    @property
    def fingerprint(self) -> str:
        """Return a hash of the files' names and sizes: equal on every machine that would read the same stream."""
        return hashlib.sha256("\n".join(self._labels()).encode(errors="surrogateescape")).hexdigest()

    def tokens(self, start: int, length: int) -> np.ndarray:
        """Return the tokens ``start .. start + length - 1`` of the stream."""
        pieces, idx = [], bisect_right(self.ends, start)
        while length > 0:
            begin = self.ends[idx - 1] if idx else 0
            piece = self._read(idx, start - begin, min(length, self.ends[idx] - start))
            pieces.append(piece)
            start, length = start + len(piece), length - len(piece)
            idx += start == self.ends[idx]
        return np.concatenate(pieces)

    @abstractmethod
    def describe(self) -> str:
        """Return the size, for messages."""

    @abstractmethod
    def _labels(self) -> list[str]: ...

    @abstractmethod
    def _read(self, idx: int, start: int, length: int) -> np.ndarray:
        """Return tokens of one file, at most so many."""


@dataclass(frozen=True)
class TokenFiles(TokenStream):
    """Files of token ids, mapped as ``parts``; ``largest`` is the highest id that is known to occur."""

    parts: tuple[np.ndarray, ...]
    largest: int

    def describe(self) -> str:
        """Return the size, for messages."""
        return f"{self.num_tokens} tokens in {len(self.files)} files"

    def _labels(self) -> list[str]:
        return [f"{file.name} {part.dtype} {len(part)}" for file, part in zip(self.files, self.parts, strict=True)]

    def _read(self, idx: int, start: int, length: int) -> np.ndarray:
        return self.parts[idx][start : start + length]


@dataclass(frozen=True)
class TextCorpus(TokenStream):
    """Text files, of which every byte is a token, uint8; read when they are needed."""

    def describe(self) -> str:
        """Return the size, for messages."""
        return f"{format_bytes(self.num_tokens)} in {len(self.files)} files"

    def _labels(self) -> list[str]:
        return [f"{file.name} {end}" for file, end in zip(self.files, self.ends, strict=True)]

    def _read(self, idx: int, start: int, length: int) -> np.ndarray:
        with self.files[idx].open("rb") as file:
            file.seek(start)
            piece = file.read(length)
        if not piece:
            raise ConfigError(f"{self.files[idx]} became shorter while it was being read")
        return np.frombuffer(piece, dtype=np.uint8)


def open_token_files(paths: Sequence[Path]) -> TokenFiles:
    """Map token files, in this order.

    Raises:
        ConfigError: a file is none, is damaged or empty, or cannot be read.
    """
    parts, known = zip(*(_open(path) for path in paths), strict=True)
    return TokenFiles(tuple(paths), tuple(accumulate(map(len, parts))), parts, max(known))


def _open(path: Path) -> tuple[np.ndarray, int]:
    try:
        ids, largest = _open_npy(path) if path.suffix == ".npy" else _open_bin(path)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    if not len(ids):
        raise ConfigError(f"{path} holds no tokens")
    return ids, largest


def _open_bin(path: Path) -> tuple[np.ndarray, int]:
    with path.open("rb") as file:
        header = file.read(_HEADER.size)
    if len(header) < _HEADER.size or header[: len(MAGIC)] != MAGIC:
        raise ConfigError(
            f"{path} is not a token file: it does not begin with the header of one",
            help="make one with `meshwright tokens TEXT --out tokens.bin`, or save the ids with numpy as .npy",
        )
    _, version, width, count, largest = _HEADER.unpack(header)
    if version != _VERSION or width not in _DTYPES:
        raise ConfigError(f"{path}: version {version} with ids of {width} bytes; this version reads 1 with 2 or 4")
    size = path.stat().st_size
    if size != _HEADER.size + count * width:
        raise ConfigError(
            f"{path} is damaged: {count} ids of {width} bytes and the header take {_HEADER.size + count * width} bytes, "
            f"the file has {size}"
        )
    ids = np.memmap(path, dtype=_DTYPES[width], mode="r", offset=_HEADER.size, shape=(count,)) if count else np.empty(0)
    return ids, largest


def _open_npy(path: Path) -> tuple[np.ndarray, int]:
    with path.open("rb") as file:
        is_npy = file.read(len(_NPY_MAGIC)) == _NPY_MAGIC
    try:
        ids = np.load(path, mmap_mode="r", allow_pickle=False) if is_npy else None
    except OSError:
        raise
    except Exception as error:  # a damaged header can fail in any way
        raise ConfigError(f"{path} is damaged or is no array of numbers: {error}") from None
    if ids is None or ids.ndim != 1 or ids.dtype.kind not in "iu":
        actual = "no .npy file" if ids is None else f"an array {list(ids.shape)} of {ids.dtype}"
        raise ConfigError(f"{path} is {actual}; token ids are one row of integers")
    width, num_parts = (len(ids), 1) if len(ids) <= _SCAN_TOKENS else (_SCAN_TOKENS // _SCAN_PARTS, _SCAN_PARTS)
    starts = np.linspace(0, len(ids) - width, num_parts).astype(np.int64).tolist()
    parts = [ids[start : start + width] for start in starts]
    smallest = min(int(part.min(initial=0)) for part in parts)
    if smallest < 0:
        raise ConfigError(f"{path} holds the token id {smallest}; ids are not negative")
    return ids, max(int(part.max(initial=0)) for part in parts)


def write_tokens(path: Path, pieces: Iterable[np.ndarray], *, vocab_size: int) -> int:
    """Write ids, of two or four bytes, under another name until the file is complete; return their number."""
    width = 2 if vocab_size <= 2**16 else 4
    count = largest = 0
    try:
        # A name of its own: several processes may make the same file at once.
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
    except OSError as error:
        raise MeshwrightError(f"cannot write {path}: {error.strerror}") from None
    partial = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(bytes(_HEADER.size))
            for piece in pieces:
                file.write(piece.astype(_DTYPES[width]).tobytes())
                count += len(piece)
                largest = max(largest, int(piece.max(initial=0)))
            file.seek(0)
            file.write(_HEADER.pack(MAGIC, _VERSION, width, count, largest))
            let_be_read(file)
        if not count:
            raise ConfigError("the text has no tokens")
        partial.replace(path)
    except OSError as error:
        raise MeshwrightError(f"cannot write {path}: {error.strerror}") from None
    finally:
        partial.unlink(missing_ok=True)
    return count


def find_text(paths: Sequence[str | Path] = ()) -> TextCorpus:
    """Return the text files at ``paths``, folders searched in sorted order; with no path the Python standard library's sources.

    Hidden files, empty files and files with a NUL byte in their first 8 KiB are left out.
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


def load_tokenizer(path: str | Path) -> Any:
    """Load the tokenizer of a ``tokenizer.json``, or of a folder that holds one; JSON only, no code runs."""
    path = Path(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"no tokenizer at {file}", help="give a tokenizer.json, or a folder that holds one")
    return open_tokenizer(file)


def make_token_file(
    corpus: TextCorpus, path: Path, *, tokenizer: str | Path | None = None, end_token: str | None = None
) -> int:
    """Write the tokens of text files (bytes without a tokenizer), each with an ``end_token`` behind it; return their number."""
    if tokenizer is None:
        if end_token is not None:
            raise ConfigError("--end-token needs a --tokenizer that knows it")
        starts = range(0, corpus.num_tokens, _PIECE_BYTES)
        pieces = (corpus.tokens(start, min(_PIECE_BYTES, corpus.num_tokens - start)) for start in starts)
        count = write_tokens(path, pieces, vocab_size=BYTE_VOCAB_SIZE)
        _write_ends(path, corpus.ends)
        return count
    loaded = load_tokenizer(tokenizer)
    end = None if end_token is None else loaded.token_to_id(end_token)
    if end_token is not None and end is None:
        raise ConfigError(f"the tokenizer {tokenizer} has no token {end_token!r}")
    vocab_size = loaded.get_vocab_size(with_added_tokens=True)
    lengths = [0] * len(corpus.files)
    count = write_tokens(path, _encoded(corpus.files, loaded, end, lengths), vocab_size=vocab_size)
    _write_ends(path, list(accumulate(length for length in lengths if length)))
    return count


def _write_ends(path: Path, ends: Sequence[int]) -> None:
    """Write where documents end in a token file, beside it."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
        partial = Path(name)
        with os.fdopen(handle, "wb") as file:
            np.save(file, np.array(ends, dtype=np.int64), allow_pickle=False)
            let_be_read(file)
        partial.replace(path.with_name(f"{path.name}.ends.npy"))
    except OSError as error:
        raise MeshwrightError(f"cannot write the ends of documents beside {path}: {error.strerror}") from None


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


def _encoded(files: Sequence[Path], tokenizer: Any, end: int | None, lengths: list[int]) -> Iterator[np.ndarray]:
    """Yield the ids of every file, piece by piece, and count them in ``lengths``."""
    for idx, file in enumerate(files):
        pieces = _text_pieces(file)
        while batch := list(islice(pieces, _BATCH_PIECES)):
            with refused("the text cannot be tokenised"):
                encodings = tokenizer.encode_batch(batch, add_special_tokens=False)
            for encoding in encodings:
                lengths[idx] += len(encoding.ids)
                yield np.array(encoding.ids, dtype=np.int64)
        if end is not None:
            lengths[idx] += 1
            yield np.array([end])


def _text_pieces(file: Path) -> Iterator[str]:
    """Yield the text of a file in pieces of entire lines (a line longer than a piece is cut); what is not UTF-8 is replaced."""
    with file.open(encoding="utf-8", errors="replace", newline="") as text:
        while piece := text.read(_PIECE_BYTES):
            yield piece + text.readline(_PIECE_BYTES)
