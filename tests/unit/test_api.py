"""`import meshwright as mw`: every public name loads, texts are read as on the command line, planning does without torch."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import meshwright as mw
import pytest
from meshwright.schema import ConfigError

ROOT = Path(__file__).resolve().parents[2]
STEP = {"global_batch_size": 64, "seq_len": 2048}


def test_every_public_name_is_what_its_home_has() -> None:
    assert all(callable(getattr(mw, name)) for name in mw.__all__)
    assert mw.plan.__module__ == "meshwright.planner.plan"
    assert re.fullmatch(r"\d+\.\d+.*", mw.__version__)
    with pytest.raises(AttributeError, match="no attribute 'plam'"):
        mw.plam  # noqa: B018


def test_type_checkers_see_the_names_that_are_loaded() -> None:
    tree = ast.parse((ROOT / "api" / "__init__.py").read_text())
    homes = {
        node.module: {alias.name for alias in node.names}
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level
    }
    assert homes == {home: set(names) for home, names in mw._HOMES.items()}


def test_page_names_every_public_name() -> None:
    page = (ROOT / "docs" / "python.md").read_text()
    assert not [name for name in mw.__all__ if f"`{name}`" not in page]


def test_texts_plan_as_objects_do() -> None:
    typed = mw.plan("llama-3.1-8b", "8xH100-SXM-80GB", **STEP)
    workload = mw.Workload(**STEP)
    built = mw.plan(mw.ModelSpec.named("llama-3.1-8b"), mw.ClusterSpec.parse("8xH100-SXM-80GB"), workload)
    assert (typed.layout, typed.estimate, typed.workload) == (built.layout, built.estimate, workload)
    assert mw.estimate("llama-3.1-8b", "8xH100-SXM-80GB", layout=str(built.layout), **STEP) == built.estimate
    generation = mw.plan("llama-3.1-8b", "1xH100-SXM-80GB", prompt_len=64, generate_len=8)
    assert generation.generation == mw.Generation(prompt_len=64, generate_len=8)


def test_plan_shows_itself_in_one_line_and_as_a_table() -> None:
    plan = mw.plan("llama-3.1-8b", "8xH100-SXM-80GB", **STEP)
    assert str(plan.layout) in repr(plan)
    assert len(repr(plan)) < 500
    table = plan._repr_html_()
    assert all(f">{text}<" in table for text in plan.summary.values())


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        (None, {}, "field `seq_len` is missing"),
        (None, {**STEP, "prompt_len": 3}, "global_batch_size"),
        (mw.Workload(**STEP), {"seq_len": 4096}, "unknown options seq_len"),
        (None, {**STEP, "batch": 3}, "batch"),
    ],
)
def test_wrong_fields_are_named(task: mw.Workload | None, options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        mw.plan("llama-3.1-8b", "8xH100-SXM-80GB", task, **options)


@pytest.mark.long
@pytest.mark.job
def test_planning_needs_no_torch_and_running_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "torch.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')"
    )
    path = os.pathsep.join(filter(None, [str(tmp_path / "blocked"), os.environ.get("PYTHONPATH", "")]))
    environment = os.environ | {"PYTHONPATH": path, "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    step = ["--global-batch-size", "64", "--seq-len", "2048"]

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "meshwright.cli", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    planned = run("plan", "llama-3.1-8b", "--cluster", "8xH100-SXM-80GB", *step)
    assert planned.returncode == 0, planned.stderr
    for arguments in (["apply", "plan.json"], ["plan", "smollm2-135m", "--cluster", "local", *step]):
        refused = run(*arguments)
        assert refused.returncode == 2, refused.stderr
        assert "pip install 'meshwright[run]'" in refused.stderr
        assert "Traceback" not in refused.stderr
