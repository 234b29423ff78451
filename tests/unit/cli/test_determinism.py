"""The same inputs give the same plan, whatever order a process hashes its strings in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

PLANS = [
    ["smollm2-135m", "--cluster", "2x8xA100-SXM-40GB", "--global-batch-size", "48", "--seq-len", "4096"],
    pytest.param(
        ["olmoe-1b-7b", "--cluster", "16xH100-SXM-80GB", "--global-batch-size", "64", "--seq-len", "4096", "--engine", "nemo"],
        marks=pytest.mark.long,
    ),
    pytest.param(
        ["llama-3.1-8b", "--cluster", "2x8xA100-SXM-40GB", "--global-batch-size", "48", "--seq-len", "4096"],
        marks=pytest.mark.long,
    ),
]  # fmt: skip


def planned(arguments: list[str], folder: str, hash_seed: str) -> Any:
    command = [sys.executable, "-m", "meshwright.cli", "plan", *arguments, "--json"]
    done = subprocess.run(
        command, check=True, capture_output=True, cwd=folder, env={**os.environ, "PYTHONHASHSEED": hash_seed}
    )
    plan = json.loads(done.stdout)
    del plan["provenance"]["created"], plan["search"]["search_s"]
    return plan


@pytest.mark.parametrize("arguments", PLANS, ids=lambda a: a[0])
def test_two_processes_plan_the_same(arguments, tmp_path) -> None:
    assert planned(arguments, str(tmp_path), "1") == planned(arguments, str(tmp_path), "2024")
