"""`meshwright compare` with a launch file and a cluster: what is lost, and which settings to change."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from meshwright.cli.main import app
from meshwright.engines.launch import Given, read_job
from meshwright.planner import estimate
from meshwright.schema import ClusterSpec
from typer.testing import CliRunner

MODEL = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --vocab-size 128256"
)
SCRIPT = f"""TP=8
ARGS=(
    {MODEL}
    --tensor-model-parallel-size $TP --sequence-parallel
    --micro-batch-size 1
    --use-distributed-optimizer
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
)
torchrun --nnodes 2 --nproc_per_node 8 pretrain_gpt.py ${{ARGS[@]}} --seq-length 4096 --global-batch-size 64 --bf16 --lr 1e-4
"""
CLUSTER = "16xH100-SXM-80GB"


def run(folder: Path, text: str, *options: str, name: str = "run.sh") -> Any:
    (folder / name).write_text(text)
    return CliRunner().invoke(app, ["compare", str(folder / name), "--cluster", CLUSTER, *options])


@pytest.mark.long
def test_steps_lead_to_most_of_the_gain_in_the_engines_words(tmp_path: Path) -> None:
    answer = json.loads(run(tmp_path, SCRIPT, "--json").stdout)
    job = read_job(tmp_path / "run.sh", Given(num_devices=16))
    before = answer["estimate"]["step_time_s"]
    assert before == estimate(job.model, ClusterSpec.parse(CLUSTER), job.workload, job.layout).step_time_s
    best = answer["plan"]["estimate"]["step_time_s"]
    assert answer["difference"]["lost_fraction"] == pytest.approx(1 - best / before)
    ratio, interval = answer["difference"]["ratio"], answer["difference"]["ratio_interval"]
    assert interval["low"] < ratio < interval["high"] and ratio == before / best
    assert 0.5 < answer["difference"]["probability"] < 1
    steps = answer["steps"]
    assert 1 <= len(steps) <= 3
    times = [before, *(step["estimate"]["step_time_s"] for step in steps)]
    assert times == sorted(times, reverse=True) and all(step["estimate"]["fits"] for step in steps)
    assert before - times[-1] > 0.8 * (before - best)
    changes = {each["setting"]: each for step in steps for each in step["changes"]}
    assert changes["--recompute-method"]["before"] == "uniform" and changes["--recompute-method"]["place"] == "run.sh:7"
    assert changes["--tensor-model-parallel-size"]["variable"] == "TP"
    assert int(changes["--tensor-model-parallel-size"]["after"]) < 8


@pytest.mark.long
def test_the_last_steps_layout_costs_what_is_said(tmp_path: Path) -> None:
    """Changing the script as the diff says gives the step time that the diff promises."""
    answer = json.loads(run(tmp_path, SCRIPT, "--json").stdout)
    text = SCRIPT
    for step in answer["steps"]:
        for change in step["changes"]:
            if change["before"] is None and change["after"] is None:
                continue
            if change["variable"]:
                text = re.sub(
                    rf"^{change['variable']}=.*$", f"{change['variable']}={change['after']}", text, flags=re.M
                )
                continue
            old = f"{change['setting']} {change['before']}".strip() if change["before"] is not None else ""
            new = f" {change['setting']} {change['after']}".rstrip() if change["after"] is not None else ""
            text = text.replace(f" {old}", new) if old and f" {old}" in text else text.rstrip() + new + "\n"
    (tmp_path / "changed.sh").write_text(text)
    job = read_job(tmp_path / "changed.sh", Given(num_devices=16))
    costs = estimate(job.model, ClusterSpec.parse(CLUSTER), job.workload, job.layout)
    # Leading blocks of each stage come back as a fraction of its blocks.
    assert costs.step_time_s == pytest.approx(answer["steps"][-1]["estimate"]["step_time_s"], rel=1e-5)


@pytest.mark.long
def test_the_table_says_where_and_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = run(tmp_path, SCRIPT)
    assert result.exit_code == 0, result.output
    shown = result.stdout
    for text in ("run.sh:1 (TP)", "your job", "you lose", "- TP=8", "+ TP=", "assumed"):
        assert text in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert "meshwright plan llama-3.1-8b" in result.stderr


@pytest.mark.long
def test_a_job_that_is_the_plan_has_nothing_to_change(tmp_path: Path) -> None:
    best = json.loads(run(tmp_path, SCRIPT, "--json").stdout)["plan"]
    (tmp_path / "plan.json").write_text(json.dumps(best))
    runner = CliRunner()
    assert (
        runner.invoke(
            app, ["export", str(tmp_path / "plan.json"), "--to", "megatron", "--out", str(tmp_path)]
        ).exit_code
        == 0
    )
    answer = runner.invoke(app, ["compare", str(tmp_path / "pretrain.sh"), "--cluster", CLUSTER, "--json"])
    document = json.loads(answer.stdout)
    assert abs(document["difference"]["lost_fraction"]) < 2e-3 and document["steps"] == []


@pytest.mark.long
def test_a_job_that_does_not_fit_is_told_what_makes_it_fit(tmp_path: Path) -> None:
    text = SCRIPT.replace("TP=8", "TP=1").replace("--use-distributed-optimizer", "").replace("--sequence-parallel", "")
    answer = json.loads(run(tmp_path, text, "--json").stdout)
    assert not answer["estimate"]["fits"]
    assert answer["steps"] and answer["steps"][-1]["estimate"]["fits"]
    assert "does not fit" in run(tmp_path, text).stdout


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--set", "TP"], "--set 'TP' is not NAME=VALUE"),
        (["--set", "TP=3"], "does not divide 16 devices"),
        (["--model", "nonesuch"], "nonesuch"),
        (["--from", "torchtitan"], "starts no engine"),
    ],
)
def test_wrong_input_ends_with_its_reason(tmp_path: Path, options: list[str], reason: str) -> None:
    result = run(tmp_path, SCRIPT, *options)
    assert result.exit_code == 2 and reason in result.stderr and "Traceback" not in result.output


def test_options_of_one_form_mean_nothing_in_the_other(tmp_path: Path) -> None:
    result = run(tmp_path, SCRIPT, str(tmp_path / "plan.json"))
    assert result.exit_code == 2 and "--cluster with PLAN" in result.stderr
    alone = CliRunner().invoke(app, ["compare", str(tmp_path / "run.sh")])
    assert alone.exit_code == 2 and "--cluster" in alone.stderr
