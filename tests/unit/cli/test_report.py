"""The page and the trace of a plan, as a user asks for them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from plotly.graph_objects import Figure

ARGUMENTS = ["plan", "llama-3.1-8b", "--cluster", "16xH100-SXM-80GB", "--global-batch-size", "64", "--seq-len", "4096"]


class Page(HTMLParser):
    """Scripts, the ids of elements, and addresses that a browser would load."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.ids: list[str] = []
        self.loaded: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        named = dict(attrs)
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.loaded += [value for name in ("src", "href") if (value := named.get(name))]

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)


def run(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "meshwright.cli", *words], capture_output=True, text=True, cwd=folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan over a pipeline with its page and its trace."""
    place = tmp_path_factory.mktemp("report")
    done = run(*ARGUMENTS, "--fix", "pp=4", "--pareto", "--report", "page.html", "--trace", "trace.json", folder=place)
    assert done.returncode == 0, done.stderr
    return place


def test_page_holds_all_it_needs(folder: Path) -> None:
    text = (folder / "page.html").read_text()
    page = Page()
    page.feed(text)
    assert page.loaded == [], "nothing is loaded from elsewhere"
    data = next(script for script in page.scripts if script.startswith("const FIGURES"))
    drawn = json.loads(re.match(r"const FIGURES = (.*?);\nconst dark", data, re.DOTALL)[1])
    assert set(drawn) == set(page.ids) and len(drawn) == 5
    for figure in drawn.values():
        Figure(figure)  # raises where plotly knows no such property
    front, _, chosen = drawn["figure-3"]["data"]
    assert (front["name"], chosen["name"]) == ("front", "plan") and chosen["x"][0] in front["x"]
    assert "H100 data sheet" in text or "Hopper" in text


def test_page_draws_the_plans_numbers(folder: Path) -> None:
    plan = json.loads((folder / "plan.json").read_text())
    text = (folder / "page.html").read_text()
    data = json.loads(re.search(r"const FIGURES = (.*?);\nconst dark", text, re.DOTALL)[1])
    (waterfall,) = [t for figure in data.values() for t in figure["data"] if t["type"] == "waterfall"]
    assert sum(waterfall["y"]) == pytest.approx(plan["estimate"]["step_time_s"])
    stacks = [
        t for figure in data.values() for t in figure["data"] if t["type"] == "bar" and t.get("orientation") != "h"
    ]
    stage = plan["estimate"]["stages"][0]["memory_bytes"]
    assert sum(t["y"][0] for t in stacks) == pytest.approx(sum(stage.values()) / 2**30)


def test_trace_ends_with_the_step(folder: Path) -> None:
    plan, trace = (json.loads((folder / name).read_text()) for name in ("plan.json", "trace.json"))
    last = max(event["ts"] + event["dur"] for event in trace["traceEvents"] if event["ph"] == "X")
    assert last == pytest.approx(1e6 * plan["estimate"]["step_time_s"], rel=1e-6)


def test_names_cannot_break_out_of_the_page(folder: Path) -> None:
    plan = json.loads((folder / "plan.json").read_text())
    plan["model"]["name"] = "</script><script>alert(1)</script>"
    plan["alternatives"] = [dict(a, reason="</script><b>") for a in plan["alternatives"]]
    (folder / "evil.json").write_text(json.dumps(plan))
    done = run("report", "evil.json", "--report", "evil.html", folder=folder)
    assert done.returncode == 0, done.stderr
    text = (folder / "evil.html").read_text()
    assert "<script>alert" not in text and "</script><b>" not in text


def test_wrong_requests(folder: Path) -> None:
    nothing = run("report", "plan.json", folder=folder)
    assert nothing.returncode == 2 and "--report" in nothing.stderr
    nowhere = run("report", "plan.json", "--report", "no/such/page.html", folder=folder)
    assert nowhere.returncode == 2 and "Traceback" not in nowhere.stderr
