"""The scripts of docs/examples run as their first lines say."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from meshwright.profilers.machine import num_cores
from meshwright.runtime.job.launch import launch
from meshwright.runtime.job.worker import Job
from meshwright.runtime.training.options import list_checkpoints
from meshwright.schema import Layout, TrainingPlan
from small_jobs import plan_elsewhere, small_plan
from warm_ranks import forked_ranks

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"
TWO_LAYOUTS = {
    "sharded data": Layout(dp_shard=2, micro_batch_size=2),
    "tensor parallel": Layout(tp=2, micro_batch_size=4),
}

needs_two_cores = pytest.mark.skipif(num_cores() < 2, reason="two ranks need two cores")


def run(folder: Path, plan: TrainingPlan, script: str, *arguments: str) -> str:
    """What a script writes that is started as `apply` starts it, with forked ranks."""
    plan.save(folder / "plan.json")
    output = folder / "output.txt"
    with forked_ranks(output):
        launch(plan, Job(plan=str(folder / "plan.json"), script=(str(EXAMPLES / script), *arguments)))
    return output.read_text()


@needs_two_cores
@pytest.mark.parametrize("name", ["sharded data", pytest.param("tensor parallel", marks=pytest.mark.long)])
def test_plain_loop_runs(tmp_path: Path, name: str) -> None:
    output = run(tmp_path, small_plan(TWO_LAYOUTS[name]), "train_loop.py", "--steps", "2")
    losses = [float(value) for value in re.findall(r"loss (\S+)", output)]
    assert len(losses) == 2
    assert all(5.3 < loss < 5.8 for loss in losses)  # ln 256 = 5.55: random tokens


def installed(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"the example is for {package}, which is not installed")


@needs_two_cores
@pytest.mark.parametrize(
    "script",
    [
        pytest.param("accelerate_loop.py", marks=installed("accelerate")),
        pytest.param("lightning_strategy.py", marks=installed("lightning")),
    ],
)
def test_loops_of_others_do_the_same_steps_as_a_plain_one(tmp_path: Path, script: str) -> None:
    output = run(tmp_path, small_plan(TWO_LAYOUTS["sharded data"]), script, "--steps", "2")
    losses = [float(value) for value in re.findall(r"loss (\S+)", output)]
    assert len(losses) == 2
    assert all(5.3 < loss < 5.8 for loss in losses)


@needs_two_cores
@pytest.mark.job
@pytest.mark.long
@installed("ray")
@pytest.mark.timeout(600)  # half a dozen processes import torch before the first step
def test_ray_starts_the_ranks(tmp_path: Path) -> None:
    small_plan(TWO_LAYOUTS["sharded data"]).save(tmp_path / "plan.json")
    command = [sys.executable, str(EXAMPLES / "ray_train.py"), "plan.json", "--steps", "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stderr
    losses = dict(re.findall(r"step (\d) loss (\S+)", done.stdout + done.stderr))  # Ray prints a worker's lines twice
    assert sorted(losses) == ["0", "1"]
    assert all(5.3 < float(loss) < 5.8 for loss in losses.values())


@needs_two_cores
@pytest.mark.job
@pytest.mark.long
def test_slurm_script_trains_on_two_nodes(tmp_path: Path) -> None:
    """What its srun would start, twice, with the variables that srun sets in the tasks of a step; both nodes are this machine."""
    (line,) = (text for text in (EXAMPLES / "slurm.sbatch").read_text().splitlines() if text.startswith("srun "))
    command = line.removeprefix("srun ").replace("meshwright", f"{sys.executable} -m meshwright.cli", 1)
    plan_elsewhere(num_nodes=2).save(tmp_path / "plan.json")
    step = {
        "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "127.0.0.[1-2]",
        "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "STEPS": "3",
        "MESHWRIGHT_SECRET": "what the script makes before it",
    }  # fmt: skip
    nodes = [
        subprocess.Popen(
            ["bash", "-c", command], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **step, "SLURM_NODEID": str(node), "SLURM_PROCID": str(node), "SLURM_LOCALID": "0"},
        )
        for node in range(2)
    ]  # fmt: skip
    messages = [node.communicate(timeout=200)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], messages
    assert "peak memory" in messages[0]
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step-00000003"]


@pytest.mark.long
@needs_two_cores
def test_trainer_runs(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    output = run(tmp_path, small_plan(TWO_LAYOUTS["sharded data"]), "trainer.py")
    assert re.search(r"loss 5\.[45]\d* after 4 steps", output), output
