"""What `plan` suggests can be done: `apply` and `export` are asked, and say the same when they are called."""

from __future__ import annotations

from pathlib import Path

import pytest
from meshwright.cli.main import app
from meshwright.engines import TARGETS
from meshwright.schema import TrainingPlan
from typer.testing import CliRunner

H100 = "--cluster 8xH100-SXM-80GB"
CASES = [
    ("llama-3.2-1b", H100, "apply"),
    ("llama-3.2-1b", "--cluster 8xTPU-v5p", "torch_xla"),
    ("llama-3.2-1b", "--cluster 8xGaudi3-128GB", "Intel's own build"),
    ("llama-3.2-1b", "--cluster 16xTrainium2-96GB", "torch_neuronx"),
    ("llama-3.2-1b", f"{H100} --train lora:r=16,targets=qkv", "dropout=false"),
    ("llama-3.2-1b", f"{H100} --train lora:r=16,targets=qkv,dropout=false", "apply"),
    ("llama-3.2-1b", f"{H100} --precision fp8", "fp8"),
    ("llama-3.2-1b", f"{H100} --engine megatron", "export"),
    ("llama-3.2-1b", f"{H100} --engine deepspeed", "export"),
    ("gpt-oss-20b", f"{H100} --fix recompute=none", "attention sinks"),
]


def run(*words: str):
    return CliRunner().invoke(app, words)


@pytest.mark.parametrize(("model", "options", "says"), CASES, ids=[f"{model} {options}" for model, options, _ in CASES])
def test_a_plan_suggests_only_what_is_not_refused(
    model: str, options: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    batch = ["--global-batch-size", "64", "--seq-len", "2048", "--top", "0"]
    planned = run("plan", model, *options.split(), *batch)
    assert planned.exit_code == 0, planned.output
    assert says in planned.stderr
    plan, lines = TrainingPlan.load("plan.json"), planned.stderr.splitlines()
    suggested = lines[-1].partition("next: ")[2]
    if "meshwright apply plan.json" in suggested:
        assert plan.why_not_applied() == ()
        return
    refused = run("apply", "plan.json")
    assert refused.exit_code in (1, 2)
    assert all(reason in refused.stderr for reason in plan.why_not_applied() if plan.workload.engine == "fsdp2")
    accepted = [target for target in TARGETS if run("export", "plan.json", "--to", target).exit_code == 0]
    if suggested.startswith("meshwright export"):
        assert suggested.split("--to ")[1].split()[0] in accepted
    else:
        assert accepted == []
        assert all(target in planned.stderr for target in TARGETS)
