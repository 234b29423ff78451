"""Pages of docs/ that are made from the code: `python docs/generate` writes them, with `--check` it says which are out of date.

`python docs/generate picture` draws docs/picture.svg, which changes with every prediction and is therefore not checked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import accuracy
import commands
import documents
import errors
import problems

DOCS = Path(__file__).resolve().parents[1]

HEAD = "<!-- Made by `make docs` from the code: change it there. -->\n\n"


def _headed(page: Callable[[], str]) -> Callable[[], str]:
    return lambda: HEAD + page().rstrip() + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "../README.md": accuracy.front_page,
    "reference/commands.md": _headed(commands.page),
    "reference/documents.md": _headed(documents.page),
    "reference/errors.md": _headed(errors.page),
    "reference/problems.md": _headed(problems.page),
}


def main(words: list[str]) -> int:
    """Exit code 1 where a page is not what the code says."""
    if words == ["picture"]:
        import picture

        (DOCS / "picture.svg").write_text(picture.drawing())
        return 0
    stale = []
    for name, page in PAGES.items():
        path, text = DOCS / name, page()
        if words == ["--check"]:
            stale += [name] * (not path.exists() or path.read_text() != text)
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
    for name in stale:
        print(
            f"{(DOCS / name).resolve().relative_to(DOCS.parent)} is not what the code says; run `make docs`",
            file=sys.stderr,
        )
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
