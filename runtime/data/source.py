"""What ``--data`` names, as a stream of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...schema import ConfigError
from .text import BYTE_VOCAB_SIZE, TextCorpus, find_text
from .token_files import TokenFiles, has_header, is_token_file, open_token_files


def open_data(paths: Sequence[str], *, vocab_size: int) -> TextCorpus | TokenFiles:
    """Text as bytes, or token files: ``.bin`` and ``.npy`` files that are named, and folders that hold ``.bin`` files of ours.

    Raises:
        ConfigError: nothing there, both kinds mixed, or a token that the model's vocabulary lacks.
    """
    found = [_token_files(Path(path)) for path in paths]
    if not any(found):
        if vocab_size < BYTE_VOCAB_SIZE:
            raise ConfigError(
                f"the data has {BYTE_VOCAB_SIZE} kinds of byte, the model a vocabulary of {vocab_size}",
                help="give token files, or a --tokenizer",
            )
        return find_text(paths)
    if not all(found):
        texts = [path for path, files in zip(paths, found, strict=True) if not files]
        raise ConfigError(f"--data names token files and text ({', '.join(texts)}); a run reads one kind")
    tokens = open_token_files([file for files in found for file in files])
    if tokens.largest >= vocab_size:
        raise ConfigError(
            f"the data holds the token id {tokens.largest}; the model's vocabulary has {vocab_size}",
            help="use the tokenizer that belongs to the model",
        )
    return tokens


def tokenized(paths: Sequence[str], tokenizer: str | None) -> tuple[str, ...]:
    """``--data`` with text made into tokens, where a tokenizer is given.

    Raises:
        ConfigError: the data are tokens already, or there is no such text or tokenizer.
    """
    if tokenizer is None:
        return tuple(paths)
    if any(_token_files(Path(path)) for path in paths):
        raise ConfigError("--tokenizer is for text; --data names token files")
    from .tokenize import cached_token_file

    return (str(cached_token_file(find_text(paths), tokenizer)),)


def _token_files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path] if path.is_file() and is_token_file(path) else []
    try:
        files = sorted(path.iterdir())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    return [file for file in files if file.suffix == ".bin" and has_header(file)]
