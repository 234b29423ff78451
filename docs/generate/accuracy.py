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


def _table() -> list[str]:
    head = ["runs of", "scored", "mean error of the step time", "predicted / measured (median)", "rank correlation"]
    rows = _rows()
    return table(
        head, ([title, rows[name][0], rows[name][1], rows[name][2], rows[name][3]] for name, title in SOURCES.items())
    )


def _rows() -> dict[str, tuple[str, str, str, str]]:
    """Scored rows, error, median ratio and rank correlation of each source in the first table of step times."""
    half = (
        (ROOT / "docs/accuracy.md").read_text().split("## The half that was held out")[1].split("memory, predicted")[0]
    )
    found = {}
    for line in half.splitlines():
        words = line.split()
        if words and words[0] in SOURCES:
            # source rows scored skipped flagged MAPE % ratio bias % correlation ...
            found[words[0]] = (words[2], f"{words[5]} %", words[7], words[10])
    return found
