"""The page and the trace of a plan, as a user asks for them and as a browser shows them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import chdir
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import DESK, PHONE, in_scheme, opened, overhang, resize
from meshwright.cli.main import app
from meshwright.cli.page import glossary
from meshwright.cli.page.command import OPTIONS, command_of
from meshwright.cli.page.document import page
from meshwright.cli.page.groups import MAX_CARDS, axis_strides, group_map
from meshwright.cli.plan_options import TrainingOptions
from meshwright.planner import plan as fastest
from meshwright.schema import ClusterSpec, Layout, ModelSpec, TrainingPlan, Workload
from typer.testing import CliRunner, Result

ARGUMENTS = ["plan", "llama-3.1-8b", "--cluster", "16xH100-SXM-80GB", "--global-batch-size", "64", "--seq-len", "4096"]
FIXED = ["--fix", "pp=4,tp=1,cp=1,micro_batch_size=1", "--pareto"]
MAX_BYTES = 1_500_000
ROOT = Path(__file__).resolve().parents[3]


class Page(HTMLParser):
    """Scripts, the text of elements of a class, and addresses that a browser would load."""

    def __init__(self) -> None:
        super().__init__()
        self.data: list[str] = []
        self.loaded: list[str] = []
        self.in_data = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.in_data = tag == "script" and named.get("class") == "data"
        self.loaded += [value for name in ("src", "href") if (value := named.get(name)) and value != "data:,"]

    def handle_endtag(self, tag: str) -> None:
        self.in_data = False

    def handle_data(self, data: str) -> None:
        if self.in_data:
            self.data.append(data)


def run(*words: str, folder: Path) -> Result:
    with chdir(folder):
        return CliRunner().invoke(app, words)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan over a pipeline with its page and its trace."""
    place = tmp_path_factory.mktemp("report")
    done = run(
        *ARGUMENTS, *FIXED, "--report", "page.html", "--trace", "trace.json", "--explain-limit-s", "5", folder=place
    )
    assert done.exit_code == 0, done.stderr
    return place


@pytest.fixture(scope="module")
def browser(folder: Path) -> Iterator[Any]:
    """A browser that shows the page."""
    with opened(str(folder / "profile")) as driver:
        resize(driver, DESK)
        driver.get((folder / "page.html").as_uri())
        yield driver


def test_page_holds_all_it_needs(folder: Path) -> None:
    text = (folder / "page.html").read_text()
    content = Page()
    content.feed(text)
    assert content.loaded == [], "nothing is loaded from elsewhere"
    assert "default-src 'none'" in text, "and nothing could be"
    assert len(text.encode()) < MAX_BYTES
    (data,) = map(json.loads, content.data)
    assert len(data["panels"]) == 3 and len(data["panels"][0]) == 4, "warm-up, a period, cool-down; a row a rank"
    assert "H100 data sheet" in text or "Hopper" in text
    assert "1 GiB more of memory" in text, "explain is inside"


def test_page_draws_the_plans_numbers(folder: Path) -> None:
    text = (folder / "page.html").read_text()
    bars = re.findall(r'<i class="\w+" style="left:([\d.]+)%;width:([\d.]+)%"></i></span><span class="num">', text)
    bars = [
        tuple(map(float, bar)) for bar in bars[: text[: text.index('<section class="why"')].count('class="track"') - 1]
    ]
    assert bars[0][0] == 0 and bars[-1][0] + bars[-1][1] == pytest.approx(100, abs=0.5), "bars end where the step does"
    for (left, width), (following, _) in pairwise(bars):
        assert following >= left + width - 0.01
    plan = json.loads((folder / "plan.json").read_text())
    for other in plan["alternatives"]:
        assert f"{other['layout']['tp']}" and str(Layout(**other["layout"])) in text


def test_trace_ends_with_the_step(folder: Path) -> None:
    plan, trace = (json.loads((folder / name).read_text()) for name in ("plan.json", "trace.json"))
    last = max(event["ts"] + event["dur"] for event in trace["traceEvents"] if event["ph"] == "X")
    assert last == pytest.approx(1e6 * plan["estimate"]["step_time_s"], rel=1e-6)


def test_names_cannot_break_out_of_the_page(folder: Path) -> None:
    plan = json.loads((folder / "plan.json").read_text())
    plan["model"]["name"] = "</script><script>alert(1)</script>"
    plan["alternatives"] = [dict(a, reason="</script><b>") for a in plan["alternatives"]]
    (folder / "evil.json").write_text(json.dumps(plan))
    done = run("report", "evil.json", "--report", "evil.html", "--explain-limit-s", "0", folder=folder)
    assert done.exit_code == 0, done.stderr
    text = (folder / "evil.html").read_text()
    assert "<script>alert" not in text and "</script><b>" not in text
    assert "config.json is that of" in text, "no catalogue has this name"


def test_wrong_requests(folder: Path) -> None:
    nothing = run("report", "plan.json", folder=folder)
    assert nothing.exit_code == 2 and "--report" in nothing.stderr
    nowhere = run("report", "plan.json", "--report", "no/such/page.html", "--explain-limit-s", "0", folder=folder)
    assert nowhere.exit_code == 2 and nowhere.stderr.startswith("error: ")
    lone = run("report", "plan.json", "--trace", "t.json", "--explain-limit-s", "3", folder=folder)
    assert lone.exit_code == 2 and "--explain-limit-s without --report" in lone.stderr


def test_the_command_makes_the_plan_again(folder: Path) -> None:
    plan = TrainingPlan.load(folder / "plan.json")
    words, unsaid = command_of(plan)
    assert unsaid == ()
    assert words == "meshwright " + " ".join([*ARGUMENTS, *FIXED])


def test_every_option_of_a_workload_is_in_the_command() -> None:
    assert {*OPTIONS} == {*TrainingOptions.model_fields} & {*Workload.model_fields}


def test_meanings_are_those_of_the_glossary() -> None:
    rows = re.findall(r"^\| ([^|]+) \|[^|]*\| ([^|]+) \|$", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)
    written = dict(rows)
    strange = [term for term, text in glossary.TERMS.items() if not written.get(term, "").startswith(text)]
    assert strange == [], "the page says what docs/glossary.md says first"
    assert set(glossary.FIELD_TERMS.values()) <= set(glossary.TERMS)


@pytest.fixture(scope="module")
def small() -> TrainingPlan:
    return fastest(
        ModelSpec.named("llama-3.1-8b"),
        ClusterSpec.parse("8xH100-SXM-80GB"),
        Workload(seq_len=2048, global_batch_size=64),
    )


@pytest.mark.parametrize(
    ("devices", "layout"),
    [
        (8, {"tp": 4, "dp_shard": 2, "zero_stage": 1}),
        (64, {"tp": 2, "cp": 2, "dp_shard": 4, "pp": 4, "zero_stage": 1}),
        (16384, {"tp": 8, "cp": 2, "dp_shard": 64, "pp": 16, "zero_stage": 1}),
        (16384, {"dp_shard": 16384, "zero_stage": 3}),
    ],
)
def test_groups_lie_where_their_ranks_do(small: TrainingPlan, devices: int, layout: dict[str, int]) -> None:
    """Brute force over all ranks: groups cover each rank once, and their nodes and links are those of their members."""
    cluster, given = ClusterSpec.parse(f"{devices}xH100-SXM-80GB"), Layout(**layout)
    order = np.arange(devices)
    plan = small.model_copy(update={"cluster": cluster, "layout": given, "rank_map": tuple(order.tolist())})
    drawn = group_map(plan)
    assert 0 < len(drawn["cards"]) <= MAX_CARDS
    shown = sorted(node for card in drawn["cards"] for a, b in card["nodes"] for node in range(a, b + 1))
    assert shown == list(range(cluster.num_nodes)), "every node is on one card"
    assert [axis["name"] for axis in drawn["axes"]] == list(axis_strides(given))
    for axis in drawn["axes"]:
        first = order - order // axis["stride"] % axis["size"] * axis["stride"]
        members = {base: order[first == base] for base in np.unique(first)[:50]}
        assert {len(ranks) for ranks in members.values()} == {axis["size"]}
        assert len(np.unique(first)) == axis["groups"]
        assert max(len(set(ranks // 8)) for ranks in members.values()) == axis["nodes"]
        assert axis["level"] == (0 if axis["nodes"] == 1 else 1)
    first_ranks = {tuple(card["ranks"]) for card in drawn["cards"]}
    assert len(first_ranks) == len(drawn["cards"])


def test_every_kind_of_plan_has_a_page(tmp_path: Path) -> None:
    for path in sorted((ROOT / "tests/golden/documents").glob("*.json")):
        document = json.loads(path.read_text())
        if "workload" not in document or "layout" not in document:
            continue
        text = page(TrainingPlan.load(path))
        assert len(text.encode()) < MAX_BYTES and "</html>" in text, path.name


def test_console_is_empty_and_dark_is_dark(browser: Any) -> None:
    luminance = (
        "return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).reduce((a, b) => a + +b, 0)"
    )
    in_scheme(browser, "dark")
    dark = browser.execute_script(luminance)
    in_scheme(browser, "light")
    assert dark < 150 < 600 < browser.execute_script(luminance)
    assert browser.get_log("browser") == []


def test_phone_has_no_horizontal_scroll(browser: Any) -> None:
    resize(browser, PHONE)
    assert overhang(browser) == 0
    browser.execute_script("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    assert overhang(browser) == 0, "opened details scroll within themselves"
    resize(browser, DESK)


def test_pointing_at_a_word_says_what_it_means(browser: Any) -> None:
    from selenium.webdriver import ActionChains

    word = browser.find_element("css selector", ".facts dfn")
    ActionChains(browser).move_to_element(word).perform()
    tip = browser.find_element("id", "tip")
    assert tip.is_displayed() and tip.text == glossary.meaning("MFU")


def test_a_click_shows_the_group_of_a_rank(browser: Any) -> None:
    """Data-parallel ranks of a pipeline of four on two nodes: rank 9 shares its group with 8, 10 and 11, in node 1."""
    section = browser.find_element("css selector", ".map")
    section.find_element("css selector", "[data-axis=dp_shard]").click()
    section.find_element("css selector", "[data-rank='9']").click()
    marked = [int(cell.get_attribute("data-rank")) for cell in section.find_elements("css selector", ".peer")]
    assert marked == [8, 9, 10, 11]
    assert "ranks 8\N{EN DASH}11 on node 1" in section.find_element("css selector", ".said").text
    assert "used" in section.find_element("css selector", ".level[data-level='0']").get_attribute("class")
    section.find_element("css selector", "[data-axis=pp]").click()
    marked = [int(cell.get_attribute("data-rank")) for cell in section.find_elements("css selector", ".peer")]
    assert marked == [1, 5, 9, 13]
    assert "on nodes 0\N{EN DASH}1" in section.find_element("css selector", ".said").text


def test_keys_go_through_ranks_and_passes(browser: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    cell = browser.find_element("css selector", "[data-rank='9']")
    browser.execute_script("arguments[0].focus()", cell)
    cell.send_keys(Keys.ARROW_RIGHT)
    assert browser.execute_script("return document.activeElement.dataset.rank") == "10"
    panel = browser.find_element("css selector", ".panels svg")
    browser.execute_script("arguments[0].scrollIntoView(); arguments[0].focus()", panel)
    panel.send_keys(Keys.ARROW_RIGHT)
    tip = browser.find_element("id", "tip")
    assert tip.is_displayed() and tip.text.startswith("forward of micro-batch 0, stage 0")
    assert browser.get_log("browser") == []
