"""Names and notes of users stand in tables as they are: no tag in them is a style, and none ends a command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_lines import COMMANDS, documents
from hypothesis import given
from hypothesis import strategies as st
from meshwright.cli.main import app
from meshwright.cli.markup import plain, styled
from mutations import JSON, TOML
from typer.testing import CliRunner

HOSTILE = "[/] [bold]n\\[red]"
TEXTS = {"name", "_name_or_path", "device", "source", "created", "torch", "driver", "unit", "notes", "offer"}


@given(st.text(st.sampled_from("[]/\\ bold dim red green x")))
def test_any_text_is_shown_as_it_is(text: str) -> None:
    assert styled(plain(text)).plain == text
    styled(text)


def test_tags_of_ours_are_styles() -> None:
    shown = styled("[bold]layout [red]a[/] b[/] c [x] [/x]")
    assert shown.plain == "layout a b c [x] [/x]"
    assert [(span.start, span.end, span.style) for span in shown.spans] == [
        (0, 7, "bold"), (7, 8, "bold red"), (8, 10, "bold"),
    ]  # fmt: skip


def renamed(tree: Any) -> Any:
    """The document with a hostile text in place of each name that may be any text."""
    if isinstance(tree, list):
        return [renamed(each) for each in tree]
    if not isinstance(tree, dict):
        return tree
    return {
        key: HOSTILE + key
        if key in TEXTS and isinstance(value, str) and not is_catalogued(tree, key)
        else renamed(value)
        for key, value in tree.items()
    }


def is_catalogued(tree: dict[str, Any], key: str) -> bool:
    """A text that must be one of ours: a device or link of the catalogue."""
    return key == "device" and ("num_nodes" in tree or "price_per_device_hour" in tree)


SHOWN = [words for words in COMMANDS if words[0] in ("estimate", "explain", "goodput", "replay", "batch", "calibrate")]
SHOWN += [
    next(words for words in COMMANDS if words[: len(start)] == start)
    for start in (("plan",), ("profile", "show"), ("profile", "diff"), ("compare",))
]
SHOWN += [next(words for words in COMMANDS if flag in words) for flag in ("--infer", "--serve", "--objective")]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the documents of all commands, renamed."""
    folder = tmp_path_factory.mktemp("hostile")

    def run(words: Any, where: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(where)
            assert CliRunner().invoke(app, list(words)).exit_code == 0

    for name, document in documents(run).items():
        data = document.variants[0]
        if document.form in (JSON, TOML):
            data = document.form.render(renamed(document.form.parse(data)))
        (folder / f"{name}{document.suffix}").write_bytes(data)
    return folder


@pytest.mark.parametrize("words", SHOWN, ids=" ".join)
def test_hostile_names_are_shown_or_refused(
    words: tuple[str, ...], hostile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(hostile)
    files = {f"{{{path.stem}}}": path.name for path in hostile.iterdir()}
    result = CliRunner().invoke(app, [files.get(word, word) for word in words], env={"COLUMNS": "200"})
    assert result.exit_code in (0, 1, 2), result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "\\[/]" not in result.stdout  # that it was escaped for a style is not to be seen
    if "--json" in words and result.exit_code == 0:
        json.loads(result.stdout)
