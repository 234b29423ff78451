"""Pages that are made from the code: `python docs/generate` writes them, with `--check` it says which are out of date.

`python docs/generate picture` draws docs/picture.svg and docs/plan.svg, which change with every prediction and are not checked.
"""

from __future__ import annotations

import sys

from pages import PAGES, ROOT, is_stale, write


def main(words: list[str]) -> int:
    """Exit code 1 where a page is not what the code says."""
    if words == ["picture"]:
        import annotated_plan
        import picture

        (ROOT / "docs/picture.svg").write_text(picture.drawing())
        (ROOT / "docs/plan.svg").write_text(annotated_plan.drawing())
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
