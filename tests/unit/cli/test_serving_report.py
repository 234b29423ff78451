"""The page of a serving plan, and what is refused."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest
from meshwright.cli.page.document import serving_page
from meshwright.cli.page.serving import front_figure
from meshwright.cli.show.serving import serving_tables
from meshwright.planner import plan
from meshwright.planner.explain.serving import ServingChange, ServingExplanation
from meshwright.schema import ConfigError, ServingPlan
from meshwright.schema.requests_file import parse_requests
from meshwright.schema.serving import Serving
from typer.testing import CliRunner

RUN = CliRunner()


class Cells(HTMLParser):
    """Texts of table cells, and addresses that a browser would load."""

    def __init__(self) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.loaded: list[str] = []
        self.is_cell = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.is_cell = tag == "td"
        if self.is_cell:
            self.cells.append("")
        self.loaded += [value for name, value in attrs if name in ("src", "href") and value != "data:,"]

    def handle_endtag(self, tag: str) -> None:
        self.is_cell = False

    def handle_data(self, data: str) -> None:
        if self.is_cell:
            self.cells[-1] += data


@pytest.fixture(scope="module")
def served() -> ServingPlan:
    return plan(
        "llama-3.1-8b", "2xH100-SXM-80GB", Serving(requests=parse_requests("isl=512,osl=64,rate=5")), fixed={"pp": 1}
    )


def test_the_page_has_every_cell_that_plan_shows_and_loads_nothing(served: ServingPlan) -> None:
    change = ServingChange(change="<b>tpot</b>", difference="1 device fewer")
    text = serving_page(served, ServingExplanation(binds=("the load",), changes=(change,)))
    read = Cells()
    read.feed(text)
    assert not read.loaded and "<b>tpot</b>" not in text
    shown = {
        cell.plain for table in serving_tables(served) for rows in table.sections for row, _ in rows for cell in row
    }
    assert shown - {""} <= {*read.cells}
    assert {"<b>tpot</b>", "1 device fewer", "the load"} <= {*read.cells}


def test_points_of_the_front_lie_in_the_figure_in_order(served: ServingPlan) -> None:
    figure = front_figure(served)
    assert figure is not None
    xs, ys = ([point[axis] for point in figure["points"]] for axis in ("x", "y"))
    assert xs == sorted(xs, reverse=True) and ys == sorted(ys, reverse=True)
    assert all(0 < x < 560 and 0 < y < 300 for x, y in zip(xs, ys, strict=True))
    assert front_figure(served.replace(front=())) is None


def test_report_writes_the_page_and_refuses_a_trace(served: ServingPlan, tmp_path: Path) -> None:
    from meshwright.cli.main import app

    served.save(tmp_path / "serve.json")
    page = ["report", str(tmp_path / "serve.json"), "--report", str(tmp_path / "serve.html"), "--explain-limit-s", "0"]
    answer = RUN.invoke(app, page)
    assert answer.exit_code == 0, answer.output
    assert "llama-3.1-8b" in (tmp_path / "serve.html").read_text("utf-8")
    answer = RUN.invoke(app, [*page[:2], "--trace", str(tmp_path / "trace.json")])
    assert isinstance(answer.exception, ConfigError) or answer.exit_code == 2
    assert not (tmp_path / "trace.json").exists()
