"""Every table of the command line at 60 to 140 columns: each word of each cell is printed whole, and no line is too long."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
from meshwright.cli.main import app
from meshwright.cli.show.run import Screen
from meshwright.cli.terminal import Table, headed_table, show
from rich.console import Console, RenderableType
from typer.testing import CliRunner

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
INPUTS, DOCUMENTS = GOLDEN / "inputs", GOLDEN / "documents"
BATCH = "--global-batch-size 64 --seq-len 4096"
OFFERS = f"--objective cost --offers {INPUTS}/offers.toml --tokens 1e11"
RUN = f"{INPUTS}/local-plan.json {INPUTS}/metrics.jsonl --profile {DOCUMENTS}/profile.json --allow-foreign-profile"
QUICK = f"""
plan llama-3.1-8b --cluster 8xH100-SXM-80GB {BATCH} --fix tp=2 --top 0 --out other.json
plan llama-3.1-8b --cluster 2xRTX4090-24GB --infer --prompt-len 512 --generate-len 64 --host-memory-gib 256 --out infer.json
estimate llama-3.1-70b --cluster 8xH100-SXM-80GB {BATCH} --layout tp=8
explain other.json --why-not tp=16
experts synth --out loads.npz --num-layers 2 --num-experts 16
experts place loads.npz --num-gpus 4 --num-slots 20 --out placed.npz
experts evaluate placed.npz loads.npz
experts bench loads.npz --num-gpus 4
validate {INPUTS}/runs.csv
calibrate {RUN} --out corrected.json
profile show {DOCUMENTS}/profile.json
profile diff {DOCUMENTS}/profile.json {DOCUMENTS}/profile-corrected.json
models
devices
doctor
""".strip().splitlines()
SEARCHING = f"""
plan llama-3.1-8b --cluster 8xH100-SXM-80GB {BATCH} --pareto --out small.json
plan llama-3.1-70b --cluster 256xH100-SXM-80GB {BATCH} --fix pp=8,tp=8,num_model_chunks=4 --out deep.json
plan mixtral-8x7b --cluster 32xH100-SXM-80GB {BATCH} --top 0 --out moe.json
plan llama-3.2-1b --cluster 1xRTX4090-24GB {BATCH} --offload auto --host-memory-gib 256 --out moved.json
plan llama-3.2-1b {BATCH} {OFFERS} --out rented.json
plan llama-3.1-70b --cluster 8xH100-SXM-80GB {BATCH} --out none.json
explain small.json
explain small.json --why-not tp=2
explain small.json --why-not tp=16
explain deep.json --time-limit-s 3
explain moved.json --time-limit-s 5
compare other.json small.json
""".strip().splitlines()


LONG_WORD = 25
"""Paths of the machine from here on may be wider than their column, and go on in the next line."""


@pytest.fixture(
    scope="module", params=[QUICK, pytest.param(QUICK + SEARCHING, marks=pytest.mark.long)], ids=["quick", "all"]
)
def commands(request: pytest.FixtureRequest) -> list[str]:
    given: list[str] = request.param
    return given


@pytest.fixture(scope="module")
def printed(commands: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[tuple[str, Table]]]:
    """Return what the commands gave to Rich, with the command; each ran once and as it is."""
    everything: list[tuple[str, Table]] = []
    here, print_all = Path.cwd(), Console.print
    current = ""

    def note(console: Console, *renderables: RenderableType, **options: object) -> None:
        everything.extend((current, each) for each in renderables if isinstance(each, Table))
        print_all(console, *renderables, **options)  # type: ignore[arg-type]

    Console.print = note  # type: ignore[method-assign]
    os.chdir(tmp_path_factory.mktemp("widths"))
    try:
        for current in commands:
            result = CliRunner().invoke(app, current.split())
            assert result.exit_code in (0, 1), f"{current}\n{result.output}"
            assert result.exit_code == 0 or "none.json" in current or current == "doctor", f"{current}\n{result.output}"
        current = "apply"
        screen = Screen(1)
        screen.show(json.loads((INPUTS / "metrics.jsonl").read_text().splitlines()[-1]))
        screen.show_comparison()
    finally:
        Console.print = print_all  # type: ignore[method-assign]
        os.chdir(here)
    yield everything


def words(text: str) -> Counter[str]:
    """Return how often each word occurs; bars are left out."""
    return Counter(word for word in text.split() if set(word) != {"#"})


def content(table: Table) -> Counter[str]:
    """Return the words that a table was given."""
    cells = [cell.plain for section in table.sections for row, _ in section for cell in row]
    return words(" ".join((table.title, *table.columns, *cells)))


def at_width(table: Table, width: int) -> str:
    console = Console(file=StringIO(), width=width, force_terminal=False)
    console.print(table, highlight=False)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_the_commands_print_what_this_file_is_about(commands: list[str], printed: list[tuple[str, Table]]) -> None:
    names = {command for command, _ in printed}
    silent = ("experts synth", "plan llama-3.1-70b --cluster 8xH100")
    missing = {command for command in commands if command not in names and not command.startswith(silent)}
    assert not missing
    assert "apply" in names


@pytest.mark.parametrize("width", [*range(60, 141, 4), 61, 79, 81, 99, 139])
def test_no_character_of_any_cell_is_lost_at_a_width(printed: list[tuple[str, Table]], width: int) -> None:
    for command, table in printed:
        drawn = at_width(table, width)
        joined = "".join(drawn.split())
        lost = {word for word in content(table) - words(drawn) if len(word) < LONG_WORD or word not in joined}
        assert not lost, f"{command}: {lost}\n{drawn}"
        for line in drawn.splitlines():
            assert len(line) <= width, f"{command}: {len(line)} columns\n{line}"
            assert line == line.rstrip(), f"{command}: blanks at the end of\n{line}"


def test_figures_stay_whole_on_one_line(printed: list[tuple[str, Table]]) -> None:
    """A figure with its unit is not broken, even where the table is."""
    for command, table in printed:
        drawn = at_width(table, 60)
        figures = [idx for idx in range(len(table.columns) - table.words) if idx and idx not in table.text_columns]
        for section in table.sections:
            for cells, _ in section:
                assert all(cells[idx].plain in drawn for idx in figures), f"{command}\n{drawn}"


def test_a_pipe_keeps_to_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    table = headed_table("title", "name", *(f"figure {idx}" for idx in range(12)), "words", text=("name", "words"))
    table.add_row("row", *(f"{idx}.25 GiB" for idx in range(12)), "and so on " * 20)
    for columns in (60, 100):
        monkeypatch.setenv("COLUMNS", str(columns))
        show(table)
        out = capsys.readouterr().out
        assert max(map(len, out.splitlines())) <= columns
        assert not content(table) - words(out)


def test_a_row_stands_only_in_parts_where_it_has_figures() -> None:
    table = headed_table("title", "name", *(f"figure {idx}" for idx in range(8)), text=("name",))
    table.add_row("row", *("25 GiB",) * 8)
    table.add_section()
    table.add_row("sum", "99 GiB")
    table.add_row("bare")
    drawn = at_width(table, 60)
    assert drawn.count(" row ") == 2
    assert drawn.count(" sum ") == drawn.count("99 GiB") == drawn.count(" bare") == 1
