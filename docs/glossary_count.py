"""Count words that the glossary (docs/glossary.md) replaces, per folder, and fail where a count rises.

    python docs/glossary_count.py            compare with docs/glossary_count.json
    python docs/glossary_count.py --lower    store the counts of folders that fell

Counted are identifiers (functions, classes, arguments, variables, attributes that are assigned) that are one of WORDS or begin or
end with one, and docstrings whose first word is one of OPENINGS instead of an imperative. A stored number can only fall.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STORED = Path(__file__).with_suffix(".json")
FOLDERS = (
    "schema", "profilers", "cost_models", "solvers", "planner", "runtime", "engines", "cli", "validation", "fitting",
)  # fmt: skip
WORDS = frozenset((
    "found", "whole", "own", "kept", "held", "wanted", "mine", "beside", "told", "alone", "there", "worth", "fewest", "least",
    "most", "left", "places", "foreign", "trusted", "asked", "quickly", "further", "like", "once", "at", "some",
))  # fmt: skip
KEPT_NAMES = frozenset(("at_exit", "left_out"))
OPENINGS = frozenset(
    ("what", "whether", "which", "where", "how", "the", "those", "that", "this", "a", "an", "of", "as", "all")
)


def identifiers(tree: ast.AST) -> Iterator[str]:
    """Yield every name that a file gives to something."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


def is_banned(name: str) -> bool:
    """Return whether the glossary has another word for a name, or for its first or last word."""
    words = name.strip("_").lower().split("_")
    return name not in KEPT_NAMES and (words[0] in WORDS or words[-1] in WORDS)


def openings(tree: ast.AST) -> Iterator[str]:
    """Yield the first word of every function's docstring; of a property, which may be a noun, only "what" and "whether"."""
    for node in ast.walk(tree):
        text = ast.get_docstring(node) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else None
        if not text:
            continue
        word = re.split(r"\W+", text.strip(), maxsplit=1)[0].lower()
        if word in ("what", "whether") or not any("property" in ast.unparse(item) for item in node.decorator_list):
            yield word


def count(folder: str) -> dict[str, int]:
    """Count names and docstrings of one folder."""
    trees = [ast.parse(path.read_text()) for path in sorted((ROOT / folder).rglob("*.py"))]
    return {
        "names": sum(is_banned(name) for tree in trees for name in identifiers(tree)),
        "docstrings": sum(word in OPENINGS for tree in trees for word in openings(tree)),
    }


def main(arguments: list[str]) -> None:
    """Compare, or store what fell; exit with the folders whose counts rose."""
    stored = json.loads(STORED.read_text())
    counts = {folder: count(folder) for folder in FOLDERS}
    risen = [
        f"  {folder}: {number} {kind}, stored {stored[folder][kind]}"
        for folder, kinds in counts.items()
        for kind, number in kinds.items()
        if number > stored[folder][kind]
    ]
    if risen:
        sys.exit("\n".join(("more words that docs/glossary.md replaces:", *risen)))
    if "--lower" in arguments:
        STORED.write_text(json.dumps(counts, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
