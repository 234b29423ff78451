"""What it takes to add an axis, schedule, objective, task, engine or block: a patch of few files, run on a copy of the tree.

The toys change no number of ours. Where a change of the tree moves the lines that a patch is for, write the patch again.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PATCHES = Path(__file__).parent / "patches"
FOLDERS = (
    "schema",
    "profilers",
    "cost_models",
    "solvers",
    "planner",
    "runtime",
    "engines",
    "cli",
    "validation",
    "fitting",
)

SETUP = """
from meshwright.cost_models.pipeline.orders import order_of_schedule
from meshwright.planner import cheapest, estimate, plan
from meshwright.schema import ClusterSpec, ConfigError, Layout, MeshwrightError, ModelSpec, Offer, TrainingPlan, Workload
model, workload = ModelSpec.named("llama-3.2-1b"), Workload(seq_len=2048, global_batch_size=32)
cluster = ClusterSpec.parse("8xH100-SXM-80GB")
def refusal(text):
    try:
        Layout.parse(text)
    except ConfigError as error:
        return str(error)
"""
AXIS = """
made = plan(model, cluster, workload, fixed={"spin": 2})
assert made.layout.spin == 2 and "spin=2" in str(made.layout), made.layout
assert TrainingPlan.model_validate_json(made.model_dump_json()) == made
plain = plan(model, cluster, workload)
assert plain.layout.spin == 1 and plain.estimate.step_time_s == made.estimate.step_time_s
assert "spin" in refusal("warp=2")
try:
    estimate(model, cluster, workload, Layout(spin=3, dp_shard=8))
except ConfigError as error:
    assert "[spin_divides_heads]" in str(error)
else:
    raise AssertionError("the rule of the new axis is not asked")
"""
SCHEDULE = """
made = plan(model, cluster, workload, fixed={"schedule": "toy", "pp": 2})
assert made.layout.schedule == "toy" and str(made.layout).endswith("toy"), made.layout
assert Layout.parse(str(made.layout)) == made.layout
assert TrainingPlan.model_validate_json(made.model_dump_json()) == made
usual = estimate(model, cluster, workload, made.layout.replace(schedule="1f1b"))
# Of an order from a table torch gathers before the passes.
assert 0.9 < made.estimate.step_time_s / usual.step_time_s <= 1
assert order_of_schedule("toy", 2, 4, 1) == order_of_schedule("1f1b", 2, 4, 1)
assert "'toy'" in refusal("schedule=warp")
"""
OBJECTIVE = """
offers = [Offer.from_cluster(ClusterSpec.parse("4x8xH100-SXM-80GB"), price_per_device_hour=2.0)]
made = cheapest(model, offers, workload.replace(global_batch_size=64), runnable=True, top=0, objective="device time")
assert made.cost.num_nodes == 1, made.cost
assert TrainingPlan.model_validate_json(made.model_dump_json()) == made
"""
TASK = """
from typer.testing import CliRunner
from meshwright.cli.main import app
from meshwright.schema import Plan
command = "plan llama-3.2-1b --cluster 8xH100-SXM-80GB --global-batch-size 32 --seq-len 2048".split()
shown = CliRunner().invoke(app, [*command, "--evaluate", "--out", "evaluation.json"])
assert shown.exit_code == 0, shown.output
assert "evaluate" in shown.stdout and "dp_shard" in shown.stdout and "tokens per s" in shown.stdout, shown.stdout
made = Plan.load("evaluation.json")
assert type(made).__name__ == "EvaluationPlan" and made.search.status != "stopped"
twice = plan(model, cluster, workload.replace(passes="zeroth_order"), fixed={"dp_shard": made.layout.dp_shard})
assert made.estimate.batch_s < twice.estimate.step_time_s
refused = CliRunner().invoke(app, [*command, "--evaluate", "--optimizer", "sgd"])
assert refused.exit_code == 2 and "--optimizer with --evaluate" in refused.stderr, refused.stderr
refused = CliRunner().invoke(app, ["apply", "evaluation.json"])
assert refused.exit_code == 2 and "a plan for evaluation; one for training is needed" in refused.stderr
"""
BLOCK = """
import torch
from meshwright.runtime.models.decoder import Decoder, DecoderTrunk
from meshwright.schema.layers import LayerRun, Recurrence
def hybrid(model):
    # The first half of the blocks has the recurrence in place of attention.
    first, blocks, *rest = model.layers
    heads, half = blocks.layer.attention, blocks.count // 2
    mixer = Recurrence(num_heads=heads.num_heads, head_dim=heads.head_dim)
    runs = (LayerRun(layer=blocks.layer.replace(attention=mixer), count=half), blocks.replace(count=blocks.count - half))
    return model.replace(name="hybrid", layers=(first, *runs, *rest))
mixed = hybrid(model)
attention, mixer = (spec.block_runs[0][0].attention for spec in (model, mixed))
fewer = attention.num_params(model.hidden_dim) - mixer.num_params(model.hidden_dim)
assert model.num_params - mixed.num_params == model.num_blocks // 2 * fewer != 0
long = workload.replace(seq_len=32768)
made = plan(mixed, cluster, long)
assert TrainingPlan.model_validate_json(made.model_dump_json()) == made and made.model == mixed
usual, ours = (estimate(spec, cluster, long, Layout(dp_shard=8)) for spec in (model, mixed))
assert ours.step_time_s < 0.8 * usual.step_time_s, (ours.step_time_s, usual.step_time_s)
width, tokens = mixer.num_heads * mixer.head_dim, long.seq_len
saved = [2 * attention.q_dim + 2 * attention.kv_dim + 2 * attention.num_heads, 4 * width]  # two bytes each, statistics in fp32
less = usual.memory_bytes.activations - ours.memory_bytes.activations
assert abs(less / (2 * tokens * model.num_blocks // 2 * (saved[0] - saved[1])) - 1) < 1e-6, less
try:
    estimate(mixed, cluster, long, Layout(cp=8))
except ConfigError as error:
    assert "[attention_per_cp]" in str(error), error
else:
    raise AssertionError("a recurrence has no keys and values to pass round")
embedding, blocks, head = model.layers
heads = blocks.layer.attention.replace(num_heads=4, num_kv_heads=2, head_dim=8)
block = blocks.layer.replace(attention=heads, mlp=blocks.layer.mlp.replace(ffn_dim=64))
ends = [run.replace(layer=run.layer.replace(vocab_size=64)) for run in (embedding, head)]
small = hybrid(model.replace(hidden_dim=32, layers=(ends[0], LayerRun(layer=block, count=4), ends[1])))
assert sum(parameter.numel() for parameter in Decoder(small).parameters()) == small.num_params
hidden = DecoderTrunk(small, "math")(torch.zeros(2, 8, dtype=torch.long))
assert hidden.shape == (2, 8, 32) and torch.isfinite(hidden).all()
"""
ENGINE = """
import json
from pathlib import Path
from meshwright.cli.main import app
from typer.testing import CliRunner
def run(*words):
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    return done
options = ["--cluster", "8xH100-SXM-80GB", "--global-batch-size", "32", "--seq-len", "2048"]
said = run("plan", "llama-3.2-1b", *options, "--engine", "toy")
assert "next: meshwright export plan.json --to toy" in said.stderr, said.stderr
made = TrainingPlan.load(Path("plan.json"))
layout = made.layout
assert made.workload.engine == "toy" and (layout.cp, layout.pp) == (1, 1) and layout.zero_stage <= 2, layout
assert made.estimate.step_time_s != plan(model, cluster, workload).estimate.step_time_s
run("export", "plan.json", "--to", "toy")
assert json.loads(Path("toy/toy.json").read_text())["tp"] == layout.tp
try:
    plan(model, cluster, made.workload, fixed={"cp": 2})
except MeshwrightError as error:
    assert "toy_axes" in str(error), error
else:
    raise AssertionError("the rules of the new engine are not asked")
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "max_files", "script"),
    [
        ("axis", 5, AXIS),
        ("schedule", 2, SCHEDULE),
        ("objective", 1, OBJECTIVE),
        ("task", 4, TASK),
        ("engine", 3, ENGINE),
        ("block", 4, BLOCK),
    ],
)
def test_toy_is_a_patch_of_few_files(name: str, max_files: int, script: str, tmp_path: Path) -> None:
    patch = PATCHES / f"{name}.patch"
    assert len(re.findall(r"^\+\+\+ ", patch.read_text(), flags=re.MULTILINE)) <= max_files
    package = tmp_path / "meshwright"
    for folder in (*FOLDERS, "tests/parity"):
        shutil.copytree(ROOT / folder, package / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "api" / "__init__.py", package)  # without it an installed meshwright is imported instead
    subprocess.run(["git", "apply", "--whitespace=nowarn", str(patch)], cwd=package, check=True)
    run = subprocess.run(
        [sys.executable, "-c", SETUP + script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
