"""The table of the front page: rows of the held-out half of docs/accuracy.md."""

from __future__ import annotations

from pathlib import Path

from markdown import table

ROOT = Path(__file__).resolve().parents[2]

SOURCES = {
    "foundry": "llm-foundry, H100",
    "dgxc": "NVIDIA DGX Cloud benchmarks",
    "nvidia": "NVIDIA performance tables",
    "mlperf": "MLPerf training",
    "vtrain": "vTrain, A100",
    "bigscience_a100": "BigScience, A100",
    "torchtitan": "torchtitan",
    "ultrascale": "ultra-scale playbook (nanotron), H100",
}

BEGIN, END = "<!-- accuracy -->\n", "<!-- /accuracy -->\n"


def front_page() -> str:
    """README.md with the figures that docs/accuracy.md has."""
    text = (ROOT / "README.md").read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n".join(_table()) + "\n" + END + after


COLUMNS = {
    "mean error of the step time": "MAPE",
    "predicted / measured (median)": "ratio",
    "inside the 90 % interval": "inside",
    "regret of the choice": "ours",
    "rank correlation": "rank",
}
"""Of the front page, and of the tables of `meshwright validate`."""


def _table() -> list[str]:
    tables = _tables()
    rows = (
        [title, *(tables[name].get(column, "-") for column in ("timed", *COLUMNS.values()))]
        for name, title in SOURCES.items()
    )
    return table(["runs of", "rows", *COLUMNS], rows)


def _tables() -> dict[str, dict[str, str]]:
    """Return the cells of each source by column, of the tables of step times and of choices."""
    text = (
        (ROOT / "docs/accuracy.md").read_text().split("## The half that was held out")[1].split("memory, predicted")[0]
    )
    cells: dict[str, dict[str, str]] = {name: {} for name in SOURCES}
    columns: list[str] = []
    for line in text.splitlines():
        words = line.replace(" %", "%").split()
        if words[:1] == ["source"]:
            columns = words
        elif words and words[0] in SOURCES:
            cells[words[0]] |= {name: word.replace("%", " %") for name, word in zip(columns, words, strict=True)}
    return cells
