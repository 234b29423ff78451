"""A tokenizer.json: read and tried once, so that one that the library cannot work with is refused where it is named.

The library is Rust behind Python: what it did not expect is a panic, which is no Exception and which it prints by itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..schema import ConfigError
from ..schema.base import read_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_TRIED = "A first line, of two words.\n\n\u00e9\U0001f600 1,234\t"


def open_tokenizer(file: Path) -> Tokenizer:
    """Read a tokenizer.json.

    Raises:
        ConfigError: the package is not there, or the file is missing, damaged, or no tokenizer that works.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ConfigError("a tokenizer needs the package tokenizers", help="pip install 'meshwright[text]'") from None
    text = read_text(file)
    with refused(f"{file} is not a tokenizer that works"), _silent():
        tokenizer = Tokenizer.from_str(text)
        tokenizer.encode(_TRIED)
        tokenizer.encode_batch([_TRIED, ""], add_special_tokens=False)
        return tokenizer


@contextmanager
def refused(what: str) -> Iterator[None]:
    """Turn whatever the library raises inside, panics too, into a ConfigError that says what failed."""
    try:
        yield
    except ConfigError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ConfigError(f"{what}: {str(error)[:200]}") from None


@contextmanager
def _silent() -> Iterator[None]:
    """Drop what is written to standard error by code that is not Python's."""
    sys.stderr.flush()
    nowhere, before = os.open(os.devnull, os.O_WRONLY), os.dup(2)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(nowhere)
