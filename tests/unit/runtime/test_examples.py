"""The scripts of docs/examples run as their first lines say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from meshwright.profilers.machine import num_cores
from meshwright.schema import Layout, Plan
from small_jobs import small_plan

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"
TWO_LAYOUTS = {
    "sharded data": Layout(dp_shard=2, micro_batch_size=2),
    "tensor parallel": Layout(tp=2, micro_batch_size=4),
}

needs_two_cores = pytest.mark.skipif(num_cores() < 2, reason="two ranks need two cores")


def run(folder: Path, plan: Plan, script: str, *arguments: str) -> str:
    plan.save(folder / "plan.json")
    command = [sys.executable, "-m", "meshwright.cli", "apply", "plan.json", str(EXAMPLES / script), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_two_cores
@pytest.mark.parametrize("name", TWO_LAYOUTS)
def test_plain_loop_runs(tmp_path: Path, name: str) -> None:
    output = run(tmp_path, small_plan(TWO_LAYOUTS[name]), "train_loop.py", "--steps", "2")
    losses = [float(value) for value in re.findall(r"loss (\S+)", output)]
    assert len(losses) == 2
    assert all(5.3 < loss < 5.8 for loss in losses)  # ln 256 = 5.55: random tokens


@needs_two_cores
def test_trainer_runs(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    output = run(tmp_path, small_plan(TWO_LAYOUTS["sharded data"]), "trainer.py")
    assert re.search(r"loss 5\.[45]\d* after 4 steps", output), output
