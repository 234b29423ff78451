"""Tables of what rows of runs leave unsaid, read from ``data/``: frameworks, shapes and spellings of models, devices, networks.

Every line of a table has its source; its pattern is a regular expression, and the first line that matches counts. The tables hold
facts about frameworks, recipes and their time; nothing in them is chosen to make a prediction fit.
"""

from __future__ import annotations

import csv
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent / "data"


@cache
def read_table(name: str) -> tuple[dict[str, str], ...]:
    """Return the lines of ``data/NAME.csv`` by column."""
    with (_FOLDER / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return tuple(csv.DictReader(file))


def first_match(name: str, text: str) -> dict[str, str] | None:
    """Return the first line of a table whose pattern occurs in a text."""
    return next((line for line in read_table(name) if re.search(line["pattern"], text)), None)


@cache
def framework_choices() -> dict[str, list[dict[str, Any]]]:
    """Return frameworks.toml: by choice, lines with the start of a framework's name, its value and the source."""
    return tomllib.loads((_FOLDER / "frameworks.toml").read_text(encoding="utf-8"))


class FrameworkDefaults:
    """The choices of one framework, and a record of those that had to be assumed.

    Attributes:
        assumed: what the row does not state, as ``name=value``.
    """

    def __init__(self, framework: str) -> None:
        self.framework = framework
        self.assumed: list[str] = []

    def value(self, choice: str, detail: str = "") -> Any:
        """Return a choice; ``detail`` follows the framework's name where the table looks at more than that."""
        lines = framework_choices()[choice]
        text = self.framework + detail
        return next(line.get("value") for line in lines if re.match(line["framework"], text, re.IGNORECASE))

    def assume(self, choice: str, detail: str = "") -> Any:
        """Return a choice and record it."""
        value = self.value(choice, detail)
        self.assumed.append(f"{choice}={value}")
        return value
