"""Options that a command knows, with values that its documentation gives them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import cache
from pathlib import Path
from random import Random
from typing import get_args

import typer
from meshwright.cli.main import app

DOCS = Path(__file__).resolve().parents[2]
NUMBERS = ("1", "2", "3", "4", "8", "16", "64", "100", "1000", "0.5", "0.1", "1.5", "0")
LASTING = ("limit-s", "budget-s", "drain-s", "steps", "host", "port", "endpoint", "nnodes", "store-only")
"""Options that order a long run, where something listens, or who is waited for."""


@cache
def documented() -> Mapping[str, Sequence[str]]:
    """Return the words that pages write after an option, by option."""
    found = defaultdict[str, set[str]](set)
    for page in (DOCS / "README.md", *sorted((DOCS / "docs").rglob("*.md"))):
        for option, value in re.findall(r"(--[a-z][a-z-]+)[ =]([\w.][^\s`|)\]\\]*)", page.read_text()):
            found[option].add(value.rstrip(".,;:"))
    return {option: sorted(values) for option, values in found.items()}


@cache
def options_of(*words: str) -> Sequence[tuple[str, tuple[str, ...]]]:
    """Return each option of a command with the values to give it, none for a flag; ``words`` name the command."""
    command = typer.main.get_command(app)
    for word in words:
        command = getattr(command, "commands", {}).get(word, command)
    found = []
    for parameter in command.params:
        name = max(parameter.opts, key=len)
        if not name.startswith("--") or name == "--help" or name.endswith(LASTING):
            continue
        if getattr(parameter, "is_flag", False):
            found += [(flag, ()) for flag in (name, *parameter.secondary_opts)]
            continue
        kind = parameter.type_descriptor.annotation
        choices = (
            tuple(str(each.value) for each in kind)
            if isinstance(kind, type) and issubclass(kind, Enum)
            else get_args(kind)
        )
        numbers = NUMBERS if {kind, *choices} & {int, float} else ()
        values = (*(each for each in choices if isinstance(each, str)), *numbers, *documented().get(name, ()))
        found += [(name, values)] if values else []
    return found


def with_options(words: Sequence[str], random: Random) -> list[str]:
    """Return a command line with one to four further options of its command."""
    added = list(words)
    for name, values in random.choices(options_of(*words[:2]), k=random.choice((1, 1, 2, 3, 4))):
        added += [name, random.choice(values)] if values else [name]
    return added
