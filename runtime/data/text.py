"""Byte-level training data: every text file under the given paths as one long stream of tokens 0..255."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from ...schema import ConfigError
from ...schema.units import format_bytes

BYTE_VOCAB_SIZE = 256
"""Tokens of a byte-level vocabulary."""

_SNIFF_BYTES = 8192
_SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages", "node_modules"})


@dataclass(frozen=True)
class TextCorpus:
    """Text files joined end to end; bytes are read when they are asked for.

    Attributes:
        files: in the order of the stream.
        ends: ``ends[i]`` is the number of bytes in files 0..i.
    """

    files: tuple[Path, ...]
    ends: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Length of the stream."""
        return self.ends[-1]

    @property
    def num_tokens(self) -> int:
        """A token is a byte."""
        return self.num_bytes

    def tokens(self, start: int, length: int) -> np.ndarray:
        """Tokens ``start .. start + length - 1`` of the stream, uint8 [length]."""
        return np.frombuffer(self.read(start, length), dtype=np.uint8)

    def describe(self) -> str:
        """Size, for messages."""
        return f"{format_bytes(self.num_bytes)} in {len(self.files)} files"

    @property
    def fingerprint(self) -> str:
        """Hash of the files' names and sizes: equal on every machine that would read the same stream."""
        text = "\n".join(f"{file.name} {end}" for file, end in zip(self.files, self.ends, strict=True))
        return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()

    def read(self, start: int, length: int) -> bytes:
        """Bytes ``start .. start + length - 1`` of the stream."""
        parts = []
        idx = bisect_right(self.ends, start)
        while length > 0:
            begin = self.ends[idx - 1] if idx else 0
            with self.files[idx].open("rb") as file:
                file.seek(start - begin)
                part = file.read(min(length, self.ends[idx] - start))
            if not part:
                raise ConfigError(f"{self.files[idx]} became shorter while it was being read")
            parts.append(part)
            start, length = start + len(part), length - len(part)
            idx += start == self.ends[idx]
        return b"".join(parts)


def find_text(paths: Sequence[str | Path] = ()) -> TextCorpus:
    """The text files at ``paths``; with no path the Python standard library's own sources.

    Folders are searched to their full depth in sorted order; hidden files, empty files and files with a NUL byte in
    their first 8 KiB are left out.

    Raises:
        ConfigError: a path does not exist or cannot be read, or there is no text in any of them.
    """
    suffix = "" if paths else ".py"
    roots = [Path(path) for path in paths] or [Path(sysconfig.get_path("stdlib"))]
    found = []
    for root in roots:
        if not root.exists():
            raise ConfigError(f"no such data file or folder: {root}", help="give a text file or a folder of text files")
        found += [(file, size) for file in _walk(root, suffix) if (size := _text_size(file))]
    if not found:
        raise ConfigError(
            f"no text found in {', '.join(str(root) for root in roots)}",
            details=("hidden files, empty files and binary files (a NUL byte in the first 8 KiB) are left out",),
            help="give a text file or a folder of text files",
        )
    return TextCorpus(tuple(file for file, _ in found), tuple(accumulate(size for _, size in found)))


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
    """Bytes of a text file, 0 for a binary one."""
    try:
        with path.open("rb") as file:
            return 0 if b"\0" in file.read(_SNIFF_BYTES) else os.fstat(file.fileno()).st_size
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
