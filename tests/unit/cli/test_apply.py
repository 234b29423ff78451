"""``meshwright apply``: in this process with forked ranks; what signals do, as its users start it, in a process of its own."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest
import typer
from meshwright.cli.apply import ApplyCommand, apply
from meshwright.profilers.machine import identify, num_cores
from meshwright.runtime.training.options import list_checkpoints
from meshwright.schema import Layout, TrainingPlan
from meshwright.schema.profile import Profile
from small_jobs import assert_gone, losses, plan_elsewhere, read_lines, small_plan
from typer.testing import CliRunner
from warm_ranks import forked_ranks

COMMAND = (sys.executable, "-m", "meshwright.cli", "apply")
START_S = 240  # of a machine that is busy otherwise

needs_two_cores = pytest.mark.skipif(num_cores() < 2, reason="two ranks need two cores")


def saved(plan: TrainingPlan, folder: Path) -> str:
    path = folder / "plan.json"
    plan.save(path)
    return str(path)


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    output, messages = process.communicate(timeout=START_S)
    return process.returncode, output, messages


def training_ranks(parent: subprocess.Popen[str], metrics: Path) -> list[psutil.Process]:
    """The processes below a run that has done its first step."""
    end = time.monotonic() + START_S
    while not (metrics.exists() and metrics.read_text()) and parent.poll() is None and time.monotonic() < end:
        time.sleep(0.1)
    assert metrics.exists(), finish(parent)
    return psutil.Process(parent.pid).children(recursive=True)


def here(*arguments: str) -> tuple[int, str, str]:
    """Exit code, output and messages of the command run in this process; its ranks are forked."""
    app = typer.Typer()
    app.command(cls=ApplyCommand)(apply)
    with forked_ranks():
        result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.stdout, result.stderr


def in_process(*arguments: str) -> tuple[int, str]:
    """Exit code and messages of what is refused before anything starts."""
    code, _, messages = here(*arguments)
    return code, messages


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A run of twelve steps in a folder with its plan, metrics and weights; what it wrote to stdout and stderr."""
    folder = tmp_path_factory.mktemp("trained")
    files = ("--metrics", str(folder / "metrics.jsonl"), "--save-weights", str(folder / "weights"))
    options = ("--steps", "12", "--learning-rate", "0.02", *files, "--json")
    code, output, messages = here(*options, saved(small_plan(), folder))
    assert code == 0, messages
    return folder, output, messages


def test_loss_goes_down_and_prediction_is_compared(trained: tuple[Path, str, str]) -> None:
    folder, output, messages = trained
    plan, metrics = small_plan(), folder / "metrics.jsonl"
    records = [json.loads(line) for line in output.splitlines()]
    assert records == read_lines(metrics)
    assert [record["step"] for record in records[:-1]] == list(range(1, 13))
    assert losses(records)[-1] < losses(records)[0] - 0.5
    assert set(records[0]) >= {"step", "loss", "grad_norm", "step_time_s", "tokens_per_s", "peak_allocated_bytes"}
    parts_s = records[0]["parts_s"]
    assert sum(parts_s.values()) - parts_s["data"] - parts_s["preempted"] == pytest.approx(
        records[0]["step_time_s"], rel=1e-6
    )
    assert min(parts_s["forward"], parts_s["backward"], parts_s["optimizer"]) > 0
    assert records[-1]["predicted"]["step_time_s"] == plan.estimate.step_time_s
    assert (
        records[-1]["measured"]["peak_allocated_bytes"] == records[-1]["measured"]["ranks"][0]["peak_allocated_bytes"]
    )
    assert "step 12/12" in messages
    assert "peak memory" in messages


def test_profile_of_another_machine_is_refused_before_anything_starts(tmp_path: Path) -> None:
    machine = identify(2).replace(device="NVIDIA H200", torch="1.0")
    profile = Profile(
        machine=machine, created="2026-01-01", duration_s=1.0, memory_bandwidth_bytes_per_s=1e10, device_memory_bytes=2**32
    )  # fmt: skip
    profile.sealed().save(tmp_path / "profile.json")
    code, messages = in_process(
        "--profile", str(tmp_path / "profile.json"), saved(small_plan(Layout(dp_replicate=2)), tmp_path)
    )
    assert code == 2
    assert "device: measured on NVIDIA H200" in messages
    assert "torch: measured on 1.0" in messages
    assert "--allow-foreign-profile" in messages


BUSY_RANK = """
import os, sys, time
import torch
from meshwright.runtime.training.options import TrainOptions
from meshwright.runtime.training.train import train
from meshwright.schema import TrainingPlan

def busy(*_):
    end = time.thread_time() + 0.002
    while time.thread_time() < end:
        pass

if os.environ["RANK"] == "1":
    torch.nn.modules.module.register_module_forward_pre_hook(busy)
train(TrainingPlan.load(os.environ["MESHWRIGHT_PLAN"]), TrainOptions(steps=12), report=sys.argv[1])
"""


@needs_two_cores
def test_rank_with_busy_loops_is_named(tmp_path: Path) -> None:
    """Every module of rank 1 first burns 2 ms of its core, several times what the modules themselves take."""
    report, script = tmp_path / "report.jsonl", tmp_path / "busy.py"
    script.write_text(BUSY_RANK)
    code, _, messages = here(saved(small_plan(Layout(dp_replicate=2)), tmp_path), str(script), str(report))
    assert code == 0, messages
    measured = read_lines(report)[-1]["measured"]
    assert [slow["rank"] for slow in measured["stragglers"]] == [1]
    waiting, busy = (rank["parts_s"] for rank in measured["ranks"])
    assert busy["forward"] > 2 * waiting["forward"]
    assert waiting["communication"] > busy["forward"] / 2


@needs_two_cores
def test_checkpoint_resumes_under_another_layout(tmp_path: Path) -> None:
    """Two data-parallel ranks save, two pipeline stages go on, whose embedding and head are tied (parity: others); the sums of
    fp32 gradients differ in their last bits only.
    """
    folder = tmp_path / "checkpoints"
    common = ("--steps", "6", "--learning-rate", "0.01", "--checkpoint-dir", str(folder), "--json")
    first = small_plan(Layout(dp_replicate=2), tied=True)
    code, output, messages = here(*common, "--checkpoint-every", "2", saved(first, tmp_path))
    assert code == 0, messages
    whole = losses([json.loads(line) for line in output.splitlines()])
    kept = list_checkpoints(folder)
    assert [path.name for path in kept] == ["step-00000004", "step-00000006"]
    kept[-1].rename(folder / "aside")
    second = small_plan(Layout(pp=2), tied=True)
    code, output, messages = here(*common, "--resume", saved(second, tmp_path))
    assert code == 0, messages
    assert losses([json.loads(line) for line in output.splitlines()]) == pytest.approx(whole[4:], abs=1e-5)


@pytest.mark.long
@needs_two_cores
def test_checkpoint_of_model_chunks_resumes_over_shared_sequences(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    common = ("--learning-rate", "0.01", "--checkpoint-dir", str(folder), "--json")
    first = small_plan(Layout(pp=2, num_model_chunks=2, schedule="zb-v"), tied=True, num_blocks=4)
    code, output, messages = here("--steps", "4", "--checkpoint-every", "2", *common, saved(first, tmp_path))
    assert code == 0, messages
    whole = losses([json.loads(line) for line in output.splitlines()])
    list_checkpoints(folder)[-1].rename(folder / "aside")
    second = small_plan(Layout(cp=2, cp_ulysses=2), tied=True, num_blocks=4)
    code, output, messages = here("--steps", "4", "--resume", *common, saved(second, tmp_path))
    assert code == 0, messages
    assert losses([json.loads(line) for line in output.splitlines()]) == pytest.approx(whole[2:], abs=1e-5)


@pytest.mark.long
@needs_two_cores
@pytest.mark.job
@pytest.mark.parametrize(
    ("sent", "to", "message"),
    [
        pytest.param(signal.SIGKILL, "rank", "rank 1 of 2 was killed by signal 9 (SIGKILL)", marks=pytest.mark.long),
        pytest.param(
            signal.SIGINT,
            "parent",
            "interrupted by SIGINT; every rank of this node was stopped",
            marks=pytest.mark.long,
        ),
        (signal.SIGTERM, "parent", "interrupted by SIGTERM; every rank of this node was stopped"),
        (signal.SIGKILL, "parent", ""),
    ],
)
def test_signal_ends_the_whole_job(tmp_path: Path, sent: signal.Signals, to: str, message: str) -> None:
    metrics, plan = tmp_path / "metrics.jsonl", small_plan(Layout(dp_replicate=2))
    run = start("--steps", "1000000", "--metrics", str(metrics), saved(plan, tmp_path))
    ranks = training_ranks(run, metrics)
    assert len(ranks) == 2
    by_rank = {rank.environ()["RANK"]: rank for rank in ranks}
    (by_rank["1"] if to == "rank" else run).send_signal(sent)
    code, output, messages = finish(run)
    assert_gone(ranks)
    of_parent = -signal.SIGKILL if sent == signal.SIGKILL else 128 + sent
    assert code == (of_parent if to == "parent" else 1)
    assert output == ""
    errors = [line for line in messages.splitlines() if not line.startswith(("step", "  "))]
    assert errors == ([f"error: {message}"] if message else [])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the disk that is always full")
@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN], ids=["foreground", "background"])
def test_full_disk_ends_the_run(tmp_path: Path, handler: Callable[..., object] | int) -> None:
    before = signal.signal(signal.SIGINT, handler)
    try:
        code, _, messages = here("--steps", "1000000", "--metrics", "/dev/full", saved(small_plan(), tmp_path))
    finally:
        signal.signal(signal.SIGINT, before)
    assert code == 1
    assert "error: cannot write the metrics of the run: No space left on device" in messages


@needs_two_cores
@pytest.mark.job
@pytest.mark.long
def test_two_nodes_meet_and_train_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_SECRET", "what both nodes know")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    plan = saved(plan_elsewhere(num_nodes=2), tmp_path)
    options = ("--nnodes", "2", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "pair", "--steps", "3", "--json")
    nodes = [start(*options, "--node-rank", str(node), plan) for node in range(2)]
    results = [finish(node) for node in nodes]
    assert [code for code, _, _ in results] == [0, 0], results
    assert len(results[0][1].splitlines()) == 4
    assert results[1][1] == ""


def test_options_end_at_the_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script, jobs = tmp_path / "train.py", []
    script.touch()
    monkeypatch.setattr("meshwright.runtime.job.run.launch", lambda plan, job, **_: jobs.append(job))
    plan = saved(small_plan(), tmp_path)
    assert in_process(plan, "--collective-timeout-s", "7", str(script), "--steps", "3", "--", "x") == (0, "")
    assert in_process("--collective-timeout-s=7", plan, str(script), "--help") == (0, "")
    assert [job.script[1:] for job in jobs] == [("--steps", "3", "--", "x"), ("--help",)]
    assert [job.timeout_s for job in jobs] == [7, 7]


@pytest.mark.parametrize(
    ("plan", "options", "code", "message"),
    [
        (plan_elsewhere(device="H100-SXM-80GB"), (), 1, "the plan is for 2 x H100-SXM-80GB in each node"),
        (plan_elsewhere(num_nodes=2), (), 1, "2 ranks on 2 nodes; this job has 1 nodes"),
        (small_plan(), ("--steps", "0"), 2, "--steps"),
        (small_plan(), ("--data", "/nowhere"), 2, "no such data file or folder: /nowhere"),
        (small_plan(), ("--resume",), 2, "--resume without --checkpoint-dir"),
        (small_plan(), ("--nnodes", "2"), 2, "2 nodes need a place to meet"),
        (small_plan(vocab_size=97), (), 2, "256 kinds of byte, the model a vocabulary of 97"),
    ],
)
def test_what_cannot_run_is_refused_at_once(
    tmp_path: Path, plan: TrainingPlan, options: Sequence[str], code: int, message: str
) -> None:
    seen = in_process(saved(plan, tmp_path), *options)
    assert seen[0] == code
    assert f"error: {message}" in seen[1] or message in seen[1]


@pytest.mark.parametrize("arguments", [("nowhere.py",), ("--json", __file__)])
def test_script_that_cannot_run_is_refused(tmp_path: Path, arguments: Sequence[str]) -> None:
    code, message = in_process(saved(small_plan(), tmp_path), *arguments)
    assert code == 2
    assert message.startswith("error: ")


def test_folder_with_checkpoints_is_not_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "step-00000005"
    folder.mkdir(parents=True)
    (folder / "checkpoint.json").touch()
    code, message = in_process(saved(small_plan(), tmp_path), "--checkpoint-dir", str(folder.parent))
    assert code == 2
    assert "already holds step-00000005" in message


def test_weights_of_another_model_are_refused_before_anything_starts(tmp_path: Path) -> None:
    plan, folder = saved(small_plan(), tmp_path), tmp_path / "weights"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"cut off")
    code, messages = in_process(plan, "--weights", str(folder))
    assert code == 2
    assert "cannot read" in messages
    code, messages = in_process(plan, "--save-weights", str(folder))
    assert code == 2
    assert "already exists" in messages


def test_run_goes_on_from_the_weights_that_another_saved(trained: tuple[Path, str, str]) -> None:
    folder, output, _ = trained
    options = ("--steps", "1", "--json", "--weights", str(folder / "weights"))
    code, more, messages = here(*options, str(folder / "plan.json"))
    assert code == 0, messages
    first = losses([json.loads(line) for line in more.splitlines()])[0]
    before = losses([json.loads(line) for line in output.splitlines()])
    assert first < before[0] - 0.2  # the same first batch, after twelve updates


@pytest.mark.parametrize(
    "options",
    [
        ("--steps", "3"),
        ("--seed", "7"),
        ("--learning-rate", "0.5"),
        ("--schedule", "linear"),
        ("--warmup-steps", "2"),
        ("--router-bias-rate", "0.1"),
        ("--keep-checkpoints", "5"),
    ],
    ids=lambda options: options[0],
)
def test_options_of_the_training_loop_are_refused_with_a_script(options: tuple[str, str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit('this is not to be started')")
    code, messages = in_process(*options, saved(plan_elsewhere(device="H100-SXM-80GB"), tmp_path), str(script))
    assert code == 2, messages
    assert options[0] in messages
