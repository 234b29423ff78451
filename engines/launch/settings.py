"""Settings of a configuration with the place of each: what is read of them is a fact, what is not read says nothing.

Readers take a `Settings` for any mapping and need not know of places: reading a name records it.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...schema.base import Frozen
from ...schema.errors import ConfigError
from .shell_values import Field, Place


class Fact(Frozen):
    """Something that a file says of the job.

    Attributes:
        setting: as the file spells it: ``--tensor-model-parallel-size``, ``training.seq_len``.
        place: file and line of the value; ``variable`` is the shell variable that holds it.
    """

    setting: str
    value: str
    place: str
    variable: str = ""


@dataclass(frozen=True)
class Entry:
    """A value, where it is said, and why it is not known (empty: it is); without a setting: assumed, no fact."""

    value: Any
    setting: str
    place: Place
    variable: str = ""
    unknown: str = ""

    @property
    def fact(self) -> Fact:
        """The entry as a fact."""
        value = self.value
        text = "" if value is True else " ".join(map(str, value)) if isinstance(value, list) else str(value)
        return Fact(setting=self.setting, value=text, place=str(self.place), variable=self.variable)


class Settings(Mapping[str, Any]):
    """Values by name; what is read is recorded, also of the tables within."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self.entries = dict(entries)
        self.read: dict[str, None] = {}

    def __getitem__(self, name: str) -> Any:
        entry = self.entries[name]
        self.read[name] = None
        if entry.unknown:
            raise ConfigError(
                f"{entry.place}: {entry.setting} is {entry.unknown}, which is not known without running the script",
                help=f"add --set {suppliable(entry.unknown) or name}=VALUE",
            )
        return entry.value

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def table(self, name: str) -> Settings:
        """Return a table within; an absent one is empty.

        Raises:
            ConfigError: it is no table.
        """
        value = self.get(name)
        if value is None:
            return Settings({})
        if not isinstance(value, Settings):
            raise ConfigError(f"{self.entries[name].place}: {name} must be a table")
        return value

    def facts(self) -> Iterator[Fact]:
        """Yield what was read, in the order in which it was."""
        for entry in (self.entries[name] for name in self.read if name in self.entries):
            if isinstance(entry.value, Settings):
                yield from entry.value.facts()
            elif entry.setting:
                yield entry.fact

    def ignored(self) -> Iterator[str]:
        """Yield the settings that were not read, as they are spelled."""
        for name, entry in self.entries.items():
            if isinstance(entry.value, Settings):
                yield from entry.value.ignored()
            elif name not in self.read and entry.setting:
                yield entry.setting


def suppliable(unknown: str) -> str:
    """Return the variable behind a text like ``$NNODES``; empty for a command's output."""
    return unknown[1:] if re.fullmatch(r"\$[A-Za-z_0-9]+", unknown) else ""


def scalar(word: str) -> Any:
    """Return a word as a number where it is one; underscores are Python's."""
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return {"true": True, "True": True, "false": False, "False": False}.get(word, word)


def from_options(options: Iterator[tuple[Field, str, list[Field]]]) -> dict[str, Entry]:
    """Return the options of a command by their names with underscores: True for a bare flag, a scalar, or a list."""
    entries = {}
    for flag, name, words in options:
        values = [scalar(word.text) for word in words]
        source = words[0] if words else flag
        same_line = source.place == flag.place
        entries[name.replace("-", "_")] = Entry(
            True if not values else values[0] if len(values) == 1 else values,
            flag.text.partition("=")[0],
            source.place,
            "" if same_line else source.variable,
            next((word.unknown for word in words if word.unknown), ""),
        )
    return entries


_KEY = re.compile(r"""(?:"([^"\n]*)"|'([^'\n]*)'|(?<![^\s"'\[\]{},:=])([^\s"'\[\]{},:=]++))\s*+[:=\]]""")
"""What may name a setting: quoted, or a bare word, with dots where it is a header's."""


def from_table(table: Mapping[Any, Any], text: str, file: str) -> Settings:
    """Return the settings of a TOML, JSON or YAML file; lines are looked up in its text, which is gone through once."""
    keys: dict[str, list[int]] = {}
    for match in _KEY.finditer(text):
        name = match[1] or match[2] or match[3]
        keys.setdefault(name, []).append(match.start())
        if name != (last := name.rpartition(".")[2]):
            keys.setdefault(last, []).append(match.start())
    lines = [match.start() for match in re.finditer("\n", text)]

    def settings(table: Mapping[Any, Any], prefix: str, start: int) -> Settings:
        entries = {}
        for key, value in table.items():
            name = str(key)
            offsets = keys.get(name, [])
            following = bisect_left(offsets, start)
            place = offsets[following] if following < len(offsets) else start
            inner = settings(value, f"{prefix}{name}.", place) if isinstance(value, Mapping) else value
            entries[name] = Entry(inner, prefix + name, Place(file, bisect_left(lines, place) + 1))
        return Settings(entries)

    return settings(table, "", 0)


def given(sets: Mapping[str, str]) -> dict[str, Entry]:
    """Return what the user gave with --set, as settings."""
    return {
        name.replace("-", "_"): Entry(scalar(value), f"--set {name}", Place("command line", 0))
        for name, value in sets.items()
    }
