"""Options on a command line or in a shell script: writing them as arrays, and reading them back without running anything."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from ..schema.errors import ConfigError

_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_SEPARATORS = re.compile(r"[();&|\n]+")
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::?[-=?][^}]*)?\}|\$([A-Za-z_][A-Za-z0-9_]*)")


def option_words(settings: Mapping[str, Any]) -> list[str]:
    """``--name value`` of each setting; True is a bare flag, False and None say nothing."""
    lines = []
    for name, value in settings.items():
        if value is None or value is False:
            continue
        words = [] if value is True else [str(v) for v in value] if isinstance(value, list) else [str(value)]
        lines.append(" ".join([f"--{name.replace('_', '-')}", *map(shlex.quote, words)]))
    return lines


def bash_array(name: str, settings: Mapping[str, Any]) -> str:
    """``NAME=(`` one option a line ``)``."""
    return "\n".join([f"{name}=(", *(f"    {line}" for line in option_words(settings)), ")"])


def read_options(text: str) -> dict[str, Any]:
    """Options of a script or of a command line, by their names with underscores; variables that the text itself sets are put in.

    A value is True (a bare flag), a number, a text, or a list of those.

    Raises:
        ConfigError: a quote is not closed.
    """
    variables: dict[str, str] = {}
    found: dict[str, list[str]] = {}
    current: list[str] | None = None
    for word in _expanded(_words(text), variables):
        if _SEPARATORS.fullmatch(word) or _ASSIGNMENT.fullmatch(word):
            current = None
        elif word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            current = found[name.replace("-", "_")] = [value] if equals else []
        elif current is not None:
            current.append(word)
    return {name: _value(values) for name, values in found.items()}


def _words(text: str) -> list[str]:
    """Words of a shell script; the ends of commands are words too."""
    lexer = shlex.shlex(text.replace("\\\n", " "), posix=True, punctuation_chars=";&|\n")
    lexer.whitespace, lexer.whitespace_split = " \t\r", True
    try:
        return list(lexer)
    except ValueError as error:
        raise ConfigError(f"not a shell script: {error}") from None


def _expanded(words: list[str], variables: dict[str, str]) -> Iterator[str]:
    """The words with variables of the text put in; one that is a variable alone is taken apart, as the shell does."""
    for word in words:
        match = _ASSIGNMENT.fullmatch(word)
        if match and not match[2].startswith("("):
            variables[match[1]] = _filled(match[2], variables)
            yield word
        elif _VARIABLE.fullmatch(word):
            yield from _filled(word, variables).split()
        else:
            yield _filled(word, variables)


def _filled(word: str, variables: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda m: variables.get(m[1] or m[2], m[0]), word)


def _value(words: list[str]) -> Any:
    values = [_scalar(word) for word in words]
    return True if not values else values[0] if len(values) == 1 else values


def _scalar(word: str) -> Any:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word
