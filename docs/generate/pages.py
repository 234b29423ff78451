"""Which page is made by what."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import accuracy
import commands
import documents
import errors
import families
import problems
import tour

ROOT = Path(__file__).resolve().parents[2]

HEAD = "<!-- Made by `make docs` from the code: change it there. -->\n\n"


def _headed(page: Callable[[], str]) -> Callable[[], str]:
    return lambda: HEAD + page().rstrip() + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "README.md": accuracy.front_page,
    "docs/reference/commands.md": _headed(commands.page),
    "docs/reference/documents.md": _headed(documents.page),
    "docs/reference/errors.md": _headed(errors.page),
    "docs/reference/families.md": _headed(families.page),
    "docs/reference/problems.md": _headed(problems.page),
    "docs/tour.md": _headed(tour.page),
}


def is_stale(name: str) -> bool:
    """Whether a page is not what the code says."""
    path = ROOT / name
    return not path.exists() or path.read_text() != PAGES[name]()


def write(name: str) -> None:
    """Make a page anew."""
    path, text = ROOT / name, PAGES[name]()
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
