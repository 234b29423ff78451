"""Pages that are made from the code: `python docs/generate` writes them, with `--check` it says which are out of date.

`python docs/generate picture` draws docs/picture.svg, which changes with every prediction and is therefore not checked.
"""

from __future__ import annotations

import sys

from pages import PAGES, ROOT, is_stale, write


def main(words: list[str]) -> int:
    """Exit code 1 where a page is not what the code says."""
    if words == ["picture"]:
        import picture

        (ROOT / "docs/picture.svg").write_text(picture.drawing())
        return 0
    if words != ["--check"]:
        for name in PAGES:
            write(name)
        return 0
    stale = [name for name in PAGES if is_stale(name)]
    for name in stale:
        print(f"{name} is not what the code says; run `make docs`", file=sys.stderr)
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
