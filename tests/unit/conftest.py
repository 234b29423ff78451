"""Lets tests import the helpers that several folders share: hand-made plans, small jobs."""

import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS / name) for name in ("fuzz", "parity", "unit", "unit/runtime")]

from warm_ranks import warm_ranks  # noqa: E402, F401 - a fixture for all folders
