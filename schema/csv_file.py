"""Text files with an entry in each line, and CSV among them: read line by line, `.gz` unpacked on the way, to a limit.

A file of a megabyte can unpack to a gigabyte, and a device file has no end: so a reader never asks for all of one.
"""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from .errors import ConfigError
from .limits import MAX_LINE_BYTES, MAX_TABLE_BYTES, MAX_TABLE_LINES


def limited_lines(path: str | Path) -> Iterator[bytes]:
    """Yield the lines of a file with their ends.

    Raises:
        ConfigError: it cannot be read or unpacked, or has more than a table or a line of one may have.
    """
    path, size, count = Path(path), 0, 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            while line := file.readline(MAX_LINE_BYTES + 1):
                size, count = size + len(line), count + 1
                if len(line) > MAX_LINE_BYTES or size > MAX_TABLE_BYTES or count > MAX_TABLE_LINES:
                    raise ConfigError(
                        f"cannot read {path}: line {count} has {len(line)} bytes, all so far {size}",
                        help=f"at most {MAX_TABLE_LINES} lines of {MAX_LINE_BYTES} bytes, {MAX_TABLE_BYTES} bytes in all",
                    )
                yield line
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None


def limited_text(path: str | Path, max_bytes: int) -> bytes:
    """Return what is in such a file.

    Raises:
        ConfigError: it cannot be read or unpacked, or has more than so many bytes.
    """
    path = Path(path)
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            text = file.read(max_bytes + 1)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    if len(text) > max_bytes:
        raise ConfigError(f"cannot read {path}: it has more than {max_bytes:,} bytes, unpacked")
    return text


def table_rows(
    path: str | Path, required: Iterable[str], *, form: str, lines: Iterable[bytes] | None = None
) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield (line, cells by column) of a CSV file with a header; cells that a line lacks are empty.

    Args:
        form: what such a file has.
        lines: of the file, where they are read elsewhere; else `limited_lines`.

    Raises:
        ConfigError: it cannot be read, is no CSV, or lacks a column.
    """
    texts = (line.decode("utf-8", "replace") for line in (limited_lines(path) if lines is None else lines))
    reader = csv.reader(texts)
    try:
        header = [name.strip().removeprefix("\ufeff") for name in next(reader, [])]
        if missing := [name for name in required if name not in header]:
            raise ConfigError(f"{path} has no column {', '.join(missing)}", help=form)
        for cells in reader:
            if cells:
                yield reader.line_num, dict.fromkeys(header, "") | dict(zip(header, cells, strict=False))
    except csv.Error as error:
        raise ConfigError(f"{path} line {reader.line_num} is no CSV: {error}", help=form) from None
