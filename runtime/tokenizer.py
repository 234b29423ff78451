"""A tokenizer.json: read and tried once, so that one that the library cannot work with is refused where it is named.

The library is Rust behind Python: what it did not expect is a panic, which is no Exception and which it prints by itself. Nor does
it limit what a text grows to: thirty replacements of a letter by two of it make gigabytes of a word.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..schema import ConfigError
from ..schema.base import read_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_TRIED = "A first line, of two words.\n\n\u00e9\U0001f600 1,234\t"
_MAX_GROWTH = 2**10
"""How many times as long a text may become: 16 by what byte-level tokenizers (GPT-2, Llama 3) say."""


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
        content = json.loads(text)
        if prod(_growth(content.get(stage)) for stage in ("normalizer", "pre_tokenizer", "decoder")) > _MAX_GROWTH:
            raise ConfigError(f"{file} makes a text more than {_MAX_GROWTH} times as long")
        tokenizer = Tokenizer.from_str(text)
        tokenizer.no_padding()  # to a length that the file names, which no text of ours is to have
        tokenizer.no_truncation()
        tokenizer.encode(_TRIED)
        tokenizer.encode_batch([_TRIED, ""], add_special_tokens=False)
        return tokenizer


def _growth(stage: Any) -> float:
    """Return how many times as long a part of a tokenizer makes a text at most."""
    if isinstance(stage, list):
        return prod(map(_growth, stage))
    if not isinstance(stage, dict):
        return 1.0
    kind, inner = stage.get("type"), prod(map(_growth, stage.values()))
    if kind == "Replace":
        pattern = stage.get("pattern", {}).get("String", "")  # of an expression the shortest match is not known
        replaced = len(stage.get("content", "")) / max(len(pattern), 1)
        return inner * (replaced if pattern and replaced > 1 else 1.0 if pattern else 1.0 + replaced)
    return inner * {"ByteLevel": 4.0, "Metaspace": 2.0}.get(str(kind), 1.0)


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
