"""Running the commands that fit what is shipped: a wrong argument, path or table ends in one line and exit code 2."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable

from ..schema.errors import ConfigError


def run_command(parser: ArgumentParser, main: Callable[[Namespace], str], arguments: list[str] | None = None) -> None:
    """Write what ``main`` says about the parsed arguments to stdout."""
    options = parser.parse_args(arguments)
    try:
        text = main(options)
    except ConfigError as error:
        parser.error("; ".join((error.message, *error.details)))
    except OSError as error:
        parser.error(f"cannot read {error.filename or 'the data'}: {error.strerror or error}")
    sys.stdout.write(text)
