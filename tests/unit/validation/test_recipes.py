"""Published runs beside predictions and plans: facts with sources, figures in the unit of the measurement, nothing left out."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
from meshwright.cli.main import app
from meshwright.cli.recipes import figure, remarks
from meshwright.planner.request import Deadline
from meshwright.validation.recipes import FILE, recipes, with_plans
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[3]
SHARED = ROOT.parent / "shared/data/measured_runs/training_runs.csv"


def test_every_row_is_predicted_and_has_a_source() -> None:
    found = [recipe for recipe, _ in recipes()]
    assert 15 <= len(found) <= 30 and len({recipe.title for recipe in found}) == len(found)
    for recipe in found:
        assert recipe.predicted is not None, recipe.skipped
        assert recipe.source.startswith(("arXiv:", "github.com/"))
        assert recipe.error == recipe.predicted / recipe.measured - 1


def test_an_mfu_is_compared_with_an_mfu_and_tokens_with_tokens() -> None:
    for recipe, prediction in recipes():
        assert prediction.estimate is not None
        ours = prediction.estimate.mfu if recipe.is_mfu else prediction.estimate.tokens_per_s_per_device
        assert recipe.predicted == ours and (recipe.measured < 1) == recipe.is_mfu
        if not recipe.is_mfu:
            measured_s = prediction.estimate.step_time_s * recipe.predicted / recipe.measured
            tokens = prediction.inputs.workload.tokens_per_step if prediction.inputs else 0
            assert tokens / measured_s / recipe.num_devices == pytest.approx(recipe.measured)


@pytest.mark.skipif(not SHARED.exists(), reason="the table of measured runs is not here")
def test_rows_are_those_of_the_table_of_measured_runs() -> None:
    """Where the shared table has a run on as many devices at as many seconds, every other fact is the same."""
    with SHARED.open() as file:
        known = {(row["model"], row["n_gpus"], row["iter_time_s"]): row for row in csv.DictReader(file)}
    with FILE.open() as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if (row["model"], row["n_gpus"], row["iter_time_s"]) in known and row["iter_time_s"]
        ]
    assert len(rows) > 20
    for row in rows:
        shared = known[row["model"], row["n_gpus"], row["iter_time_s"]]
        differing = [
            name for name in row if name in shared and row[name] != shared[name] and name not in ("id", "source", "mfu")
        ]
        assert not differing, row["title"]


@pytest.mark.long
def test_a_plan_stands_beside_the_run() -> None:
    pairs = [pair for pair in recipes() if pair[0].title == "Qwen3-30B-A3B, NVIDIA Megatron Bridge"]
    (recipe,) = with_plans(pairs, time_limit_s=60, deadline=Deadline())
    assert recipe.planned is not None and recipe.planned.search is not None
    published = recipe.layout
    assert published is not None and recipe.planned.layout.world_size == published.world_size == 16
    assert recipe.planned_figure == recipe.planned.tokens_per_s_per_device
    assert recipe.predicted is not None and recipe.planned_figure is not None
    assert sum(recipe.planned.gains.values()) == pytest.approx(recipe.planned_figure / recipe.predicted - 1, abs=1e-6)
    assert recipe.planned.gains["waiting for the host"] > 0.1  # graphs, which the published run did not have
    assert recipe.gain is not None and recipe.axes_gain is not None
    assert 0 < recipe.axes_gain < recipe.gain - 0.1
    stopped = Deadline()
    stopped.stop()
    (recipe,) = with_plans(pairs, time_limit_s=60, deadline=stopped)
    assert recipe.planned is None and recipe.not_planned == "stopped"


def test_the_command_lists_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = CliRunner().invoke(app, ["recipes", "--only", "bloom"])
    assert shown.exit_code == 0 and "BLOOM-176B" in shown.stdout and "104" in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 80
    rows = json.loads(CliRunner().invoke(app, ["recipes", "--json"]).stdout)
    assert len(rows) == len(recipes()) and all(row["error"] is not None for row in rows)
    nothing = CliRunner().invoke(app, ["recipes", "--only", "nonesuch"])
    assert nothing.exit_code == 2 and "nonesuch" in nothing.stderr


def test_the_page_has_every_row_and_comes_from_its_figures(tmp_path: Path) -> None:
    """docs/recipes.md is what `python benchmarks/recipes.py page` writes."""
    content = json.loads((ROOT / "benchmarks/recipes.json").read_text())
    titles = [row["title"] for row in content["rows"]]
    assert titles == [recipe.title for recipe, _ in recipes()]
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'benchmarks')!r}); import json, recipes; "
    code += f"print(recipes.page(json.loads(open({str(ROOT / 'benchmarks/recipes.json')!r}).read())), end='')"
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert made.stdout == (ROOT / "docs/recipes.md").read_text()


def test_figures_are_shown_in_their_unit() -> None:
    row = recipes()[0][0].replace(measured=0.4, is_mfu=True, predicted=0.5)
    assert [figure(row, value) for value in (row.measured, row.predicted, None)] == ["40.0 %", "50.0 %", "-"]
    assert figure(row.replace(is_mfu=False), 1234.5) == "1,234" and figure(row.replace(is_mfu=False), 19.96) == "20.0"
    assert remarks(row.replace(fits=False, skipped="why"))[:2] == ["why", "we say that it does not fit"]
