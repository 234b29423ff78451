"""`plan module:Model --sample-batch`: a user's own code is imported, traced and planned, and whatever fails in it is said."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from meshwright.cli.main import app
from meshwright.planner.request import resolve_model
from meshwright.profilers.module.user_code import load_batch, time_user_model
from meshwright.schema import ConfigError, TrainingPlan
from typer.testing import CliRunner

CODE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

class Looks(Model):
    def __init__(self):
        super().__init__()
        self.rates = torch.linspace(0, 1, 3).tolist()

class Broken(Model):
    def forward(self, x):
        return super().forward(x.view(7, -1))

def make():
    return Model(16)

def failing():
    raise KeyError("no such size")

made = Model()
inputs = {"x": torch.zeros(2, 5, 8)}
wide = lambda: (torch.zeros(2, 5, 16),)
"""


@pytest.fixture
def _package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "user_package_of_tests.py").write_text(CODE)
    (tmp_path / "batch.py").write_text("import torch\nsample_batch = torch.zeros(2, 5, 8)\n")
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "wrong.py").write_text("sample_batch = 1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "user_package_of_tests", raising=False)


@pytest.mark.usefixtures("_package")
@pytest.mark.parametrize(
    ("name", "batch", "width"),
    [("Model", "batch.py", 8), ("Looks", "batch.py", 8), ("made", "user_package_of_tests:inputs", 8),
     ("make", "user_package_of_tests:wide", 16)],
)  # fmt: skip
def test_classes_functions_and_modules_are_traced(name: str, batch: str, width: int) -> None:
    spec = resolve_model(f"user_package_of_tests:{name}", 5, batch)
    assert (spec.num_params, spec.traced_len) == (3 * (width**2 + width), 5)


@pytest.mark.usefixtures("_package")
@pytest.mark.parametrize(
    ("text", "batch", "why"),
    [
        ("user_package_of_tests:Model", None, "what it is called with is not known"),
        ("user_package_of_tests:Modle", "batch.py", "has no Modle"),
        ("user_package_of_tests:failing", "batch.py", "KeyError: 'no such size'"),
        ("user_package_of_tests:inputs", "batch.py", "is no torch.nn.Module but a dict"),
        ("user_package_of_tests:Broken", "batch.py", "does not run on the sample batch: .*RuntimeError"),
        ("user_package_of_tests:make", "batch.py", "does not run on the sample batch: in .*: RuntimeError"),
        ("user_package_of_tests:Model", "other.py", "there is no such file"),
        ("user_package_of_tests:Model", "empty.py", "does not define sample_batch"),
        ("user_package_of_tests:Model", "wrong.py", "ZeroDivisionError"),
        ("user_package_of_tests:Model", "user_package_of_tests:Model.__name__", "is a str, not a tensor"),
        ("user_package_of_tests:Model", "sample", "neither as a file .py nor as module:name"),
        ("no_package_of_tests:Model", "batch.py", "ModuleNotFoundError"),
        ("llama-3.1-8b", "batch.py", "no module of yours"),
    ],
)
def test_what_fails_is_said_without_a_traceback(text: str, batch: str | None, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        resolve_model(text, 5, batch)


@pytest.mark.usefixtures("_package")
def test_another_length_than_the_batchs_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a sample of batch\.py has 5 tokens"):
        resolve_model("user_package_of_tests:Model", 6, "batch.py")


@pytest.mark.usefixtures("_package")
def test_layers_of_a_users_model_are_timed_or_it_is_said_what_fails() -> None:
    points = time_user_model(
        "user_package_of_tests:Model", "user_package_of_tests:inputs", micro_batches=[2], cpu_seconds=False
    )
    assert {(point.direction, point.micro_batch_size) for point in points} == {("forward", 2), ("backward", 2)}
    with pytest.raises(ConfigError, match="does not run on the sample batch"):
        time_user_model(
            "user_package_of_tests:Broken", "user_package_of_tests:inputs", micro_batches=[2], cpu_seconds=False
        )


@pytest.mark.usefixtures("_package")
def test_a_batch_of_one_tensor_is_a_list_of_it() -> None:
    (tensor,) = load_batch("batch.py")
    assert tensor.shape == (2, 5, 8)


@pytest.mark.usefixtures("_package")
def test_a_users_model_is_planned_and_its_placements_are_shown() -> None:
    asked = ["plan", "user_package_of_tests:make", "--sample-batch", "user_package_of_tests:wide", "--seq-len", "5"]
    where = ["--cluster", "4xH100-SXM-80GB", "--global-batch-size", "8", "--fix", "tp=4"]
    planned = CliRunner().invoke(app, [*asked, *where])
    assert planned.exit_code == 0, planned.output
    plan = TrainingPlan.load("plan.json")
    assert plan.layout.tp == 4
    assert plan.model.code is not None
    assert plan.model.code.placed_degrees == (2, 4, 8)
    for placement in plan.model.code.placements:
        assert placement.objective_s == pytest.approx(placement.bound_s)
        assert placement.local_params <= placement.num_params * 0.6
    shown = CliRunner().invoke(app, ["explain", "plan.json", "--placements"])
    assert shown.exit_code == 0, shown.output
    assert "layers.1 and 1 more, tp 4" in shown.stdout
    assert "gap 0.0 %" in shown.stdout
    assert "aten.linear.default" in shown.stdout
    other = CliRunner().invoke(app, [*asked, *where[:-1], "tp=3"])
    assert other.exit_code == 2
    assert "Traceback" not in other.output


@pytest.mark.usefixtures("_package")
def test_placements_of_a_known_model_are_refused() -> None:
    layout = ["--cluster", "8xH100-SXM-80GB", "--global-batch-size", "8", "--seq-len", "512"]
    assert CliRunner().invoke(app, ["plan", "llama-3.1-8b", *layout]).exit_code == 0
    refused = CliRunner().invoke(app, ["explain", "plan.json", "--placements"])
    assert refused.exit_code == 2
    assert "was not traced from code" in refused.stderr


BUILT = """
import torch
from torch import nn

class Raises(nn.Module):
    def __init__(self):
        super().__init__()
        raise RuntimeError("no licence")

class Endless(nn.Module):
    def __init__(self):
        self.__init__()

class Tables(nn.Module):
    def __init__(self):
        super().__init__()
        self.rates = torch.linspace(0, 1, 3).numpy()
        self.register_buffer("order", torch.arange(8).flip(0))
        tied = nn.Parameter(torch.randn(8, 8))
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.first.weight = self.last.weight = tied
    def forward(self, x):
        assert int(self.order[0]) == 7
        x = self.first(x[..., self.order])
        for layer in self.layers:
            x = layer(x)
        return self.last(x)
"""


@pytest.mark.usefixtures("_package")
@pytest.mark.parametrize(("name", "why"), [("Raises", "RuntimeError: no licence"), ("Endless", "RecursionError")])
def test_constructors_that_fail_say_where(name: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "built_by_tests.py").write_text(BUILT)
    sys.modules.pop("built_by_tests", None)
    with pytest.raises(ConfigError, match=rf"{why}.*\(built_by_tests.py, line "):
        resolve_model(f"built_by_tests:{name}", 5, "batch.py")


@pytest.mark.usefixtures("_package")
def test_buffers_and_what_is_tied_are_as_the_constructor_made_them(tmp_path: Path) -> None:
    (tmp_path / "built_by_tests.py").write_text(BUILT)
    sys.modules.pop("built_by_tests", None)
    spec = resolve_model("built_by_tests:Tables", 5, "batch.py")
    assert spec.num_params == 64 + 2 * 8 + 2 * 72
    assert spec.code is not None
    assert not spec.code.unplaced
