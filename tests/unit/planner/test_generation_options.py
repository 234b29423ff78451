"""Tables of docs/inference.md beside papers' figures are what benchmarks/generation_options.py prints."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT / "benchmarks"))

import generation_options  # noqa: E402


def table_after(heading: str, first_cell: str) -> list[list[str]]:
    """Return the cells of the rows of a table, from the one that begins so."""
    text = (ROOT / "docs" / "inference.md").read_text().split(f"\n{heading}\n")[1]
    lines = text[text.index(f"| {first_cell}") :].splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines]
    end = next((n for n, line in enumerate(lines) if not line.startswith("|")), len(lines))
    return [row for row in rows[:end] if not row[0].startswith("--")]


def test_table_of_drives_is_what_the_script_prints() -> None:
    table = table_after("## Drives that attend", "256 sequences, one drive attends (8.8)")
    rows = generation_options.drive_rows()
    assert len(table) == len(rows)
    for (_, published, _, _, ratio), cells in zip(rows, table, strict=True):
        assert float(cells[2]) == published
        assert float(cells[3]) == pytest.approx(ratio, rel=0.005, abs=0.005)  # three digits, or two decimals


def test_table_of_small_devices_is_what_the_script_prints() -> None:
    table = table_after("## Small devices over a slow network", "Llama-2-7B | in memory")
    rows = [
        (name, published, reads)
        for name, in_memory, read in generation_options.DEVICES
        for published, reads in ((in_memory, False), (read, True))
        if published is not None
    ]
    assert len(table) == len(rows)
    for (name, published, reads), cells in zip(rows, table, strict=True):
        assert (cells[0].lower(), cells[1]) == (name, "read" if reads else "in memory")
        figures = [float(re.sub(r"[^0-9.]", "", cell)) for cell in cells[2:]]
        assert figures[::2] == list(published)
        assert figures[1::2] == pytest.approx(generation_options.edge_pass(name, reads=reads), abs=0.06)  # one decimal


def test_one_device_alone_takes_what_the_document_says() -> None:
    alone, together = (generation_options.edge_pass("llama-2-70b", reads=True, tp=tp)[1] for tp in (1, 8))
    assert alone == pytest.approx(196, abs=1)
    assert 1 - together / alone == pytest.approx(0.88, abs=0.01)
