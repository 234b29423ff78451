"""Validation and fitting are no part of planning, which imports nothing of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PLAN = """
import sys
from meshwright.cli.main import main

job = ["--cluster", "8xH100-SXM-80GB", "--seq-len", "4096", "--global-batch-size", "64"]
sys.argv = ["meshwright", "plan", "smollm2-135m", *job, "--out", sys.argv[1]]
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
offline = ("meshwright.validation", "meshwright.fitting", "pandas", "sklearn")
print([name for name in sys.modules if name.startswith(offline)], file=sys.stderr)
"""


def test_a_plan_imports_neither_validation_nor_fitting(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    result = subprocess.run([sys.executable, "-c", PLAN, str(out)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert out.exists()
    assert result.stderr.splitlines()[-1] == "[]"
