"""Read TOML, JSON and YAML as tables of settings."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import yaml

from ..schema.base import HALF_A_CHARACTER, has_half_a_character, parse_toml
from ..schema.errors import ConfigError
from .adapter import Table

MAX_YAML_NODES = 100_000
"""Values of a YAML file, those that aliases stand for counted each time."""

_LONG_NUMBER = re.compile(r"[-+]?(?:[0-9][0-9_:.]{100,}|0x[0-9A-Fa-f_]{100,})")
"""Of sixties, as in 1:30:00, which take the square of their length, or of sixteens, which Python does not write in tens."""


def parse_table(suffix: str, text: str) -> Table:
    """Return the settings of a TOML, JSON or YAML file; nothing of it is run.

    Raises:
        ConfigError: it is not of that form, or holds something else.
    """
    try:
        content = PARSERS[suffix](text)
    except (ValueError, yaml.YAMLError, RecursionError, KeyError, TypeError) as error:  # PyYAML's last two: odd tags
        raise ConfigError(f"not valid {suffix[1:]}: {' '.join(str(error).split())[:200]}") from None
    if has_half_a_character(content, text):
        raise ConfigError(HALF_A_CHARACTER)
    if not isinstance(content, dict):
        raise ConfigError("holds no table of settings")
    if {"schema_version", "estimate"} <= content.keys():
        raise ConfigError(
            "is a plan, not an engine's configuration", help="meshwright explain, export and compare take it"
        )
    return content


def _parse_yaml(text: str) -> Any:
    """Parse YAML without code; an alias of what has aliases in it may stand for more than any memory holds, and is refused."""
    sizes: dict[str, int] = {}
    open_nodes: list[tuple[str | None, int]] = [(None, 0)]

    def add(size: int) -> None:
        anchor, before = open_nodes[-1]
        open_nodes[-1] = anchor, before + size
        if before + size > MAX_YAML_NODES:
            raise ValueError(f"its aliases stand for more than {MAX_YAML_NODES} values")

    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            add(sizes.get(event.anchor, MAX_YAML_NODES))
        elif isinstance(event, yaml.ScalarEvent):
            if event.implicit[0] and _LONG_NUMBER.fullmatch(event.value):
                raise ValueError("a number has more than 100 digits")
            sizes[event.anchor] = 1
            add(1)
        elif isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append((event.anchor, 1))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, size = open_nodes.pop()
            sizes[str(anchor)] = size
            add(size)
    return yaml.safe_load(text)


PARSERS: dict[str, Callable[[str], Any]] = {
    ".toml": parse_toml,
    ".json": json.loads,
    ".yaml": _parse_yaml,
    ".yml": _parse_yaml,
}
"""End of a file's name -> what parses it."""
