"""A real browser for the pages: Debian's chromium without a window, driven by selenium; tests skip where one is missing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

SWITCHES = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip

PHONE = {"width": 400, "height": 800, "deviceScaleFactor": 2, "mobile": True}
DESK = {"width": 1200, "height": 900, "deviceScaleFactor": 1, "mobile": False}


@contextmanager
def opened(profile: str) -> Iterator[Any]:
    """Yield a browser with a profile folder of its own; skip the test where there is none."""
    pytest.importorskip("selenium", reason="selenium drives the browser")
    binary, driver = (next(filter(None, map(shutil.which, names)), None) for names in (
        ("chromium", "chromium-browser", "google-chrome"), ("chromedriver",),
    ))  # fmt: skip
    if binary is None or driver is None:
        pytest.skip("no chromium with its driver on this machine")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for switch in (*SWITCHES, f"--user-data-dir={profile}"):
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield browser
    finally:
        browser.quit()


def resize(browser: Any, screen: dict[str, Any]) -> None:
    """Show the page on another screen."""
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)


def in_scheme(browser: Any, scheme: str) -> None:
    """Prefer a light or a dark scheme."""
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


def overhang(browser: Any) -> int:
    """Return by how many pixels the page is wider than the screen."""
    return int(browser.execute_script("return document.documentElement.scrollWidth - innerWidth"))
