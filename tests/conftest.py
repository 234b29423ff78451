"""Hands the files of the suite out to worker processes so that no core is idle.

First parity, up to eight ranks at a time, one file after the other on one worker; beside it the long computations of one process;
then tests that start jobs of their own and look at clocks; what is short last.

Property tests draw the same examples every time, so that a commit passes or fails alike everywhere; `make test-all` draws anew.
"""

from __future__ import annotations

import math
import os
import time
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("same", derandomize=True)
settings.load_profile("same")
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    # Read by libraries when they are loaded: with a worker on every core their threads would wait for each other's cores.
    os.environ.setdefault(_name, "1")
STARTED_S = time.monotonic()
PARITY = "tests/parity/"
ORDER = (
    PARITY,
    *(f"tests/unit/{folder}/" for folder in ("planner", "solvers", "cost_models", "cli", "runtime", "profilers")),
)


def place(nodeid: str) -> int:
    """Position of the test's folder in ``ORDER``; others come last."""
    return next((at for at, folder in enumerate(ORDER) if nodeid.startswith(folder)), len(ORDER))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: place(item.nodeid))  # stable: tests of a file stay together, as they were


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The scheduler of ``--dist loadfile`` to which parity is one file; it must not put those with the most tests first."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return PARITY if nodeid.startswith(PARITY) else super()._split_scope(nodeid)

    config.option.loadscopereorder = False
    return Scheduling(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--minutes", type=float, default=math.inf, help="skip the tests that have not begun after so many minutes"
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    minutes: float = item.config.getoption("minutes")
    if time.monotonic() - STARTED_S > 60 * minutes:
        pytest.skip(f"the {minutes:g} minutes that there were for tests are over")
