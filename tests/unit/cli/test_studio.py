"""The studio as its user and as a stranger's page meet it: a server of its own process, asked over HTTP and by a browser."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import DESK, PHONE, in_scheme, opened, overhang, resize
from meshwright.cli.page.controls import Controls
from meshwright.planner import plan as fastest
from meshwright.planner.request import Deadline
from meshwright.schema import ClusterSpec, ModelSpec, Workload

pytest.importorskip("uvicorn", reason="the studio is an extra")

ASKED = {"model": "smollm2-135m", "cluster": "8xH100-SXM-80GB", "global_batch_size": 64, "seq_len": 2048}
SLOW = {
    "model": "llama-3.1-405b",
    "cluster": "4096xH100-SXM-80GB",
    "global_batch_size": 4096,
    "seq_len": 8192,
    "engine": "megatron",
}


def started(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "meshwright.cli", "studio", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A studio's port."""
    process = started("--port", "0")
    assert process.stdout is not None
    yield int(process.stdout.readline().strip().rstrip("/").rpartition(":")[2])
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0 and "the studio has ended" in said and "Traceback" not in said


def ask(port: int, path: str, body: Any = None, **headers: str) -> tuple[int, str]:
    """Send what the page sends; headers replace its own, and an empty one is left out."""
    own = {"Host": f"127.0.0.1:{port}", "Origin": f"http://127.0.0.1:{port}", "Content-Type": "application/json"}
    own |= {name.replace("_", "-"): value for name, value in headers.items()}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    text = None if body is None else body if isinstance(body, str) else json.dumps(body)
    connection.request("GET" if body is None else "POST", path, text, {k: v for k, v in own.items() if v})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def planned(port: int, page: str = "test", **changes: Any) -> dict[str, Any]:
    status, text = ask(port, "/plans", {"page": page, "controls": ASKED | changes})
    assert status == 200, text
    *progress, answer = map(json.loads, text.splitlines())
    assert all(line["kind"] == "progress" for line in progress)
    return answer


def figures_of(answer: dict[str, Any]) -> dict[str, Any]:
    return {figure["name"]: figure["value"] or figure["text"] for figure in answer["figures"]}


def test_only_the_loopback_is_listened_on(port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing: only which address this machine would use
        address = probe.getsockname()[0]
    if address.startswith("127."):
        pytest.skip("this machine has no other address")
    with pytest.raises(OSError):
        socket.create_connection((address, port), timeout=5).close()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 421),
        ({"Host": "127.0.0.1"}, 421),
        ({"Origin": ""}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Content_Type": "text/plain"}, 415),
    ],
)
def test_pages_of_others_are_refused(port: int, headers: dict[str, str], status: int) -> None:
    assert ask(port, "/plans", {"controls": ASKED}, **headers)[0] == status


@pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="only root may be another user")
def test_other_users_of_the_machine_are_refused(port: int) -> None:
    asks = (
        "import http.client, sys\n"
        "connection = http.client.HTTPConnection('127.0.0.1', int(sys.argv[1]))\n"
        "connection.request('GET', '/')\n"
        "print(connection.getresponse().status)"
    )
    command = ["/usr/bin/env", "python3", "-c", asks, str(port)]
    statuses = [
        subprocess.run(command, user=user, capture_output=True, text=True, check=True, cwd="/").stdout.strip()
        for user in (0, 65534)
    ]
    assert statuses == ["200", "403"]


@pytest.mark.parametrize(
    "body", ["", "[]", "{", "[" * 5000, '{"controls": 1}', json.dumps({"page": "x" * 20_000, "controls": ASKED})]
)
def test_bodies_that_mean_nothing_are_refused(port: int, body: str) -> None:
    assert ask(port, "/plans", body)[0] == 422
    assert ask(port, "/plans/none/explain", body)[0] == 404


def test_controls_get_the_planners_plan(port: int) -> None:
    answer = planned(port)
    plan = fastest(
        ModelSpec.named(ASKED["model"]),
        ClusterSpec.parse(ASKED["cluster"]),
        Workload(seq_len=2048, global_batch_size=64),
    )
    said = figures_of(answer)
    assert said["step"] == plan.estimate.step_time_s and said["layout"] == str(plan.layout)
    status, text = ask(port, f"/plans/{answer['id']}/plan.json")
    assert status == 200 and json.loads(text)["layout"] == json.loads(plan.layout.model_dump_json())
    status, text = ask(port, f"/plans/{answer['id']}/explain", {"page": "test"})
    *_, last = map(json.loads, text.splitlines())
    assert status == 200 and "1 GiB more of memory" in last["html"]


def test_what_if_changes_the_machine(port: int) -> None:
    usual = {"model": "llama-3.1-8b", "cluster": "16xH100-SXM-80GB", "fix": "tp=1,pp=1,recompute=full"}
    as_it_is, slow_links, free = (
        figures_of(planned(port, **usual, **change)) for change in ({}, {"bandwidth": 0.125}, {"headroom_percent": 40})
    )
    assert slow_links["step"] > as_it_is["step"]
    budget = ClusterSpec.parse(usual["cluster"]).memory_budget_bytes
    assert free["memory"] <= 0.6 * budget
    one, two = (planned(port, price_per_hour=price) for price in (1.0, 3.0))
    ratio = figures_of(two)["USD for 1e9 tokens"] / figures_of(one)["USD for 1e9 tokens"]
    assert ratio == pytest.approx(3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "llama-9"}, "llama-9"),
        ({"cluster": "8xFAST"}, "FAST"),
        ({"fix": "tp=3"}, "tp=3"),
        ({"seq_len": 0}, "seq_len"),
        ({"model": "llama-3.1-8b", "cluster": "1xH100-SXM-80GB", "memory": 0.2}, "no plan fits"),
    ],
)
def test_errors_are_the_planners_own(port: int, changes: dict[str, Any], words: str) -> None:
    answer = planned(port, **changes)
    assert answer["kind"] == "error"
    assert words in " ".join([answer["message"], *answer["details"]])
    assert "failed" not in answer["message"]


def test_a_newer_request_of_a_page_stops_the_older(port: int) -> None:
    answers: list[dict[str, Any]] = []
    older = threading.Thread(target=lambda: answers.append(planned(port, "one", **SLOW)))
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    headers = {"Origin": f"http://127.0.0.1:{port}", "Content-Type": "application/json"}
    connection.request("POST", "/plans", json.dumps({"page": "one", "controls": ASKED | SLOW}), headers)
    response = connection.getresponse()  # its headers: the search is under way
    older.start()
    *_, first = map(json.loads, response.read().decode().splitlines())
    assert first["stopped"], "the second request of the same page ended it"
    answer = planned(port, "two")
    assert answer["kind"] == "plan" and not answer["stopped"], "another page's goes on"
    newest = planned(port, "one")
    older.join()
    assert newest["kind"] == "plan" and answers[0]["kind"] in ("plan", "error")


def test_a_plan_gives_its_controls_back(tmp_path: Path) -> None:
    controls = Controls(**ASKED, fix="recompute=full")
    plan = controls.plan(Deadline())
    again = Controls.of_plan(plan)
    assert again.replace(precision="") == controls
    assert again.plan(Deadline()).layout == plan.layout


def test_a_port_in_use_is_said(port: int) -> None:
    process = started("--port", str(port))
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2 and f"port {port} is in use" in said and "--port 0" in said


@pytest.fixture(scope="module")
def browser(port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A browser that shows the studio with a small plan, explained."""
    with opened(str(tmp_path_factory.mktemp("profile"))) as driver:
        resize(driver, DESK)
        driver.get(f"http://127.0.0.1:{port}/#{json.dumps(ASKED)}")
        until_said(driver, "planned and explained")
        yield driver


def until_said(browser: Any, words: str) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, 60, 0.05).until(lambda driver: words in driver.find_element("id", "state").text)


def typed(browser: Any, name: str, value: str) -> None:
    """Type into a control, and wait until the page has taken notice."""
    from selenium.webdriver.support.ui import WebDriverWait

    element = browser.find_element("name", name)
    element.clear()
    element.send_keys(value)
    WebDriverWait(browser, 20, 0.05).until(
        lambda driver: f"%22{name}%22%3A{value}" in driver.current_url.replace("%22" + value, value)
    )


def test_moving_a_control_makes_the_plan_again(browser: Any) -> None:
    before = browser.find_element("css selector", "#now .step").text
    typed(browser, "global_batch_size", "128")
    until_said(browser, "planned and explained")
    assert browser.find_element("css selector", "#now .step").text != before
    assert "128 \N{MULTIPLICATION SIGN} 2,048" in browser.find_element("css selector", "#now .facts").text
    assert browser.find_element("css selector", "#now .why table").is_displayed()


def test_two_plans_stand_side_by_side(browser: Any) -> None:
    browser.find_element("id", "keep").click()
    typed(browser, "seq_len", "1024")
    until_said(browser, "planned and explained")
    first, second = (browser.find_element("css selector", f"#{name} .step") for name in ("kept", "now"))
    assert first.location["x"] < second.location["x"] or first.location["y"] < second.location["y"]
    rows = {
        row.find_element("tag name", "th").text: row.text
        for row in browser.find_elements("css selector", "#compared tbody tr")
    }
    assert "%" in rows["step"] and "x 1,024" in rows["batch"]
    browser.find_element("id", "drop").click()
    assert not browser.find_element("id", "compared").is_displayed()


def test_an_error_is_shown_and_goes(browser: Any) -> None:
    typed(browser, "seq_len", "100000000")
    until_said(browser, "no plan for this")
    assert browser.find_element("id", "error").is_displayed()
    typed(browser, "seq_len", "2048")
    until_said(browser, "planned and explained")
    assert not browser.find_element("id", "error").is_displayed()


def test_phone_and_dark_scheme_with_an_empty_console(browser: Any) -> None:
    resize(browser, PHONE)
    assert overhang(browser) == 0
    in_scheme(browser, "dark")
    assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(19, 20, 22)"
    in_scheme(browser, "light")
    resize(browser, DESK)
    assert browser.get_log("browser") == []
