"""docs/reference/commands.md: every command with its options, read off the functions behind them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import typer
from markdown import code, one_line, table
from meshwright.cli.main import app
from typer.models import ArgumentInfo, OptionInfo

INTRO = """# Commands

Data goes to stdout, talk to stderr; `--json` prints the data for a program. Exit codes: 0 done, 1 no answer (nothing fits, a
failed run), 2 bad input ([errors](errors.md)). `meshwright COMMAND --help` says the same on the terminal."""


def page() -> str:
    """All commands in the order of `meshwright --help`."""
    lines = [INTRO, "", *_contents()]
    for words, function in _commands(app, ("meshwright",)):
        lines += ["", *_section(words, function)]
    return "\n".join(lines)


def _contents() -> list[str]:
    rows = []
    for words, function in _commands(app, ("meshwright",)):
        first = _paragraphs(function)[0].split(". ")[0].rstrip(".")
        name = " ".join(words)
        rows.append([f"[`{name}`](#{name.replace(' ', '-')})", first])
    return table(["command", "what it does"], rows)


def _commands(group: typer.Typer, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Callable[..., Any]]]:
    for command in group.registered_commands:
        function = command.callback
        assert function is not None
        yield (*words, command.name or function.__name__.replace("_", "-")), function
    for inner in group.registered_groups:
        assert inner.typer_instance is not None
        own = inner.typer_instance.registered_callback
        if inner.typer_instance.info.invoke_without_command is True and own is not None and own.callback is not None:
            yield (*words, str(inner.name)), own.callback
        yield from _commands(inner.typer_instance, (*words, str(inner.name)))


def _paragraphs(function: Callable[..., Any]) -> list[str]:
    return [one_line(part) for part in (inspect.getdoc(function) or "").split("\n\n")]


def _section(words: tuple[str, ...], function: Callable[..., Any]) -> list[str]:
    hints = get_type_hints(function, include_extras=True)
    arguments, options = [], []
    for name, parameter in inspect.signature(function).parameters.items():
        kind, *extras = get_args(hints[name]) if hasattr(hints[name], "__metadata__") else (hints[name],)
        about = next((extra for extra in extras if isinstance(extra, ArgumentInfo | OptionInfo)), None)
        if isinstance(about, OptionInfo):
            options.append(_option(name, kind, about, parameter.default))
        elif isinstance(about, ArgumentInfo):
            arguments.append(_argument(name, about, parameter.default))
    usage = " ".join([*words, *(word for word, _ in arguments)])
    lines = [f"## {' '.join(words)}", "", f"`{usage} [OPTIONS]`", "", *"\n\n".join(_paragraphs(function)).split("\n")]
    if arguments:
        lines += ["", *table(["argument", "meaning"], ([code(word), text] for word, text in arguments))]
    if options:
        lines += ["", *table(["option", "default", "meaning"], options)]
    return lines


def _argument(name: str, about: ArgumentInfo, default: Any) -> tuple[str, str]:
    word = str(about.metavar or name.upper())
    return (word if default is inspect.Parameter.empty else f"[{word}]"), one_line(about.help or "")


def _option(name: str, kind: Any, about: OptionInfo, default: Any) -> list[str]:
    # In an Annotated the first name stands where a default would.
    names = [word for word in (about.default, *(about.param_decls or ())) if isinstance(word, str) and word[:1] == "-"]
    spelled = ", ".join(names or ["--" + name.replace("_", "-")])
    value = "" if kind is bool else " " + str(about.metavar or _values(kind))
    limits = [
        f"at least {about.min:g}" if about.min is not None else "",
        f"at most {about.max:g}" if about.max is not None else "",
    ]
    limit = ", ".join(filter(None, limits))
    return [code(spelled + value), _default(default), one_line(about.help or "") + (f" ({limit})" if limit else "")]


def _values(kind: Any) -> str:
    """What stands behind an option that names no value of its own."""
    inner = [part for part in get_args(kind) if part is not type(None)]
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    if inner:
        return _values(inner[0])
    return {int: "N", float: "X", Path: "PATH"}.get(kind, "TEXT")


def _default(value: Any) -> str:
    if value is inspect.Parameter.empty:
        return "needed"
    if value is None or value is False or value == "":
        return ""
    return code("on" if value is True else str(value))
