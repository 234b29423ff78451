"""``meshwright tokens``: text files made into a memory-mapped token file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .errors import exit_on_error


def tokens(
    text: Annotated[list[str], typer.Argument(metavar="TEXT", help="Text files and folders.", show_default=False)],
    *,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the ids are written, a .bin file.")],
    tokenizer: Annotated[
        str | None, typer.Option(metavar="FILE", help="tokenizer.json, or a folder that holds one. Default: bytes.")
    ] = None,
    end_token: Annotated[
        str | None, typer.Option(metavar="TOKEN", help="Put this token of the tokenizer after every file.")
    ] = None,
) -> None:
    """Make a token file for `meshwright apply --data` from text."""
    with exit_on_error():
        from ..runtime.data.text import find_text
        from ..runtime.data.tokenize import make_token_file
        from ..schema import ConfigError

        if out.suffix != ".bin":
            raise ConfigError(f"--out {out}: token files end in .bin")
        count = make_token_file(find_text(text), out, tokenizer=tokenizer, end_token=end_token)
        typer.echo(f"wrote {out} with {count} tokens; next: meshwright apply plan.json --data {out}", err=True)
