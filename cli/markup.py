"""Styles within text: a few tags of ours, `[bold]`, `[red]`, `[/]`; whatever else a text has stands there as it is, but for control
characters, which would command the terminal.

Names and notes of users and files go through `plain`, so that a tag in them is no style. Rich's own markup would take any word in
brackets for one, and end with an error where a closing tag has nothing to close.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ..schema.errors import printable

if TYPE_CHECKING:
    from rich.text import Text

_TAG = re.compile(r"(\\?)\[(/|(?:bold )?(?:green|red|yellow|cyan)|bold|dim)\]")


def plain(text: object) -> str:
    """Return a text such that `styled` shows it as it is."""
    return _TAG.sub(lambda match: f"\\{match[0]}", str(text))


def styled(text: str) -> Text:
    """Return a text with the styles that its tags begin and end."""
    from rich.text import Text

    text = printable(text)
    shown, styles, end = Text(), list[str](), 0
    for match in _TAG.finditer(text):
        shown.append(text[end : match.start()], " ".join(styles))
        end = match.end()
        if match[1]:
            shown.append(match[0][1:], " ".join(styles))
        elif match[2] != "/":
            styles.append(match[2])
        elif styles:
            styles.pop()
    return shown.append(text[end:], " ".join(styles))
