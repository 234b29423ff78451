"""Memory-mapped files of token ids: what `meshwright tokens` writes and `meshwright apply --data` reads.

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
import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from ...schema import ConfigError, MeshwrightError

MAGIC = b"MESHTOKS"
_HEADER = struct.Struct("<8sIIQQ")
_VERSION = 1
_DTYPES = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
_NPY_MAGIC = b"\x93NUMPY"
_SCAN_TOKENS = 2**24
"""Ids of a file without a header that are looked at before a run, spread evenly; every batch is looked at when it is read."""

_SCAN_PARTS = 64


@dataclass(frozen=True)
class TokenFiles:
    """Token files joined end to end.

    Attributes:
        paths: in the order of the stream.
        parts: their ids, mapped.
        largest: the highest id that is known to occur.
    """

    paths: tuple[Path, ...]
    parts: tuple[np.ndarray, ...]
    largest: int

    @property
    def ends(self) -> list[int]:
        """Return the number of ids in files 0..i for each i."""
        return list(accumulate(len(part) for part in self.parts))

    @property
    def num_tokens(self) -> int:
        """Return the length of the stream."""
        return sum(len(part) for part in self.parts)

    @property
    def fingerprint(self) -> str:
        """Return a hash of the files' names, kinds and sizes: equal on every machine that would read the same stream."""
        lines = [f"{path.name} {part.dtype} {len(part)}" for path, part in zip(self.paths, self.parts, strict=True)]
        return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()

    def tokens(self, start: int, length: int) -> np.ndarray:
        """Return the ids ``start .. start + length - 1`` of the stream."""
        ends = self.ends
        pieces = []
        idx = bisect_right(ends, start)
        while length > 0:
            begin = ends[idx - 1] if idx else 0
            piece = self.parts[idx][start - begin : start - begin + length]
            pieces.append(piece)
            start, length, idx = start + len(piece), length - len(piece), idx + 1
        return np.concatenate(pieces)

    def describe(self) -> str:
        """Return the size, for messages."""
        return f"{self.num_tokens} tokens in {len(self.paths)} files"


def is_token_file(path: Path) -> bool:
    """Tell whether a file's name says that it holds ids: a ``.npy`` or ``.bin``."""
    return path.suffix in (".bin", ".npy")


def has_header(path: Path) -> bool:
    """Tell whether `write_tokens` made this file."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def open_token_files(paths: Sequence[Path]) -> TokenFiles:
    """Map token files, in this order.

    Raises:
        ConfigError: a file is none, is damaged or empty, or cannot be read.
    """
    opened = [_open(path) for path in paths]
    return TokenFiles(tuple(paths), tuple(part for part, _ in opened), max(largest for _, largest in opened))


def _open(path: Path) -> tuple[np.ndarray, int]:
    """Return the ids of a file, and the largest one known."""
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
    smallest, largest = _scan(ids)
    if smallest < 0:
        raise ConfigError(f"{path} holds the token id {smallest}; ids are not negative")
    return ids, largest


def _scan(ids: np.ndarray) -> tuple[int, int]:
    """Return the smallest and the largest id; of a long file, of parts of it."""
    if not len(ids):
        return 0, 0
    width = len(ids) if len(ids) <= _SCAN_TOKENS else _SCAN_TOKENS // _SCAN_PARTS
    starts = np.linspace(0, len(ids) - width, 1 if width == len(ids) else _SCAN_PARTS).astype(np.int64)
    parts = [ids[start : start + width] for start in starts.tolist()]
    return min(int(part.min()) for part in parts), max(int(part.max()) for part in parts)


def write_tokens(path: Path, pieces: Iterable[np.ndarray], *, vocab_size: int) -> int:
    """Write ids piece by piece, under another name until the file is complete.

    Args:
        vocab_size: decides between two and four bytes an id.

    Returns:
        The number of ids.
    """
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
        if not count:
            raise ConfigError("the text has no tokens")
        partial.chmod(0o644)
        partial.replace(path)
    except OSError as error:
        raise MeshwrightError(f"cannot write {path}: {error.strerror}") from None
    finally:
        partial.unlink(missing_ok=True)
    return count
