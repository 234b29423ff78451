"""Pieces of Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table; bars within cells are escaped."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return [*lines, *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)]


def one_line(text: str) -> str:
    """Text with single spaces."""
    return " ".join(text.split())


def plain(text: str) -> str:
    """A sentence of a docstring for Markdown: double backticks become single ones."""
    return one_line(text).replace("``", "`")


def code(text: str) -> str:
    """Code in a cell."""
    fence = "``" if "`" in text else "`"
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{space}{text}{space}{fence}" if text else ""
