"""`meshwright plan --infer`, as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from meshwright.cli.main import app
from meshwright.schema.generation import GenerationPlan
from typer.testing import CliRunner

EDGE = str(Path(__file__).parents[3] / "docs" / "examples" / "edge-devices.toml")
INFER = [
    "plan", "llama-3.1-8b", "--cluster", "1xT4-16GB", "--infer", "--prompt-len", "128", "--generate-len", "8",
    "--batch-size", "16", "--host-memory-gib", "64",
]  # fmt: skip


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_table_says_batch_times_places_and_worth(tmp_path) -> None:
    result = CliRunner().invoke(app, INFER)
    assert result.exit_code == 0, result.output
    for expected in (
        "batch",
        "throughput",
        "latency",
        "prefill",
        "binds",
        "weights",
        "keys and values",
        "at the margin",
    ):
        assert expected in result.stdout
    assert "meshwright runs no generation" in result.stderr
    assert GenerationPlan.load(tmp_path / "plan.json").batch_size == 16


def test_json_is_the_plan(tmp_path) -> None:
    result = CliRunner().invoke(app, [*INFER, "--json", "--out", "infer.json"])
    assert json.loads(result.stdout) == json.loads((tmp_path / "infer.json").read_text())


def test_devices_of_several_machines_hold_a_model_together(tmp_path) -> None:
    """Llama-2-70B on eight machines of 3 GB: layers are read from storage, sums cross the network."""
    words = ["--tp", "8", "--across-nodes", "--nvme", ".", "--nvme-gib", "40", "--batch-size", "1"]
    cluster = tmp_path / "edge.toml"
    cluster.write_text(Path(EDGE).read_text().replace("memory_bytes = 8_000_000_000", "memory_bytes = 3_600_000_000"))
    command = ["plan", "llama-2-70b", "--cluster", str(cluster), "--infer", "--prompt-len", "16", "--generate-len", "8"]
    result = CliRunner().invoke(app, [*command, *words])
    assert result.exit_code == 0, result.output
    for expected in (
        "1 with tp 8 across 8 nodes",
        "sums by exchange",
        "on storage, read in each pass",
        "storage binds",
    ):
        assert expected in result.stdout
    assert "devices compute in the host's own memory" in result.stdout
    plan = GenerationPlan.load(tmp_path / "plan.json")
    assert plan.estimate.device_bytes <= 3.1e9 and plan.generation.precision == "fp32"


def test_drives_that_attend_are_in_the_table() -> None:
    drives = ["--nvme", ".", "--nvme-gib", "200", "--host-memory-gib", "16", "--storage-attention-gb-per-s", "30"]
    result = CliRunner().invoke(
        app, [*INFER, "--prompt-len", "2048", "--generate-len", "64", "--batch-size", "64", *drives]
    )
    assert result.exit_code == 0, result.output
    assert "the drives attend" in result.stdout and "attention in the drives" in result.stdout


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        (["--host-memory-gib", "2"], 1, ("host memory", "--host-memory-gib", "C8")),
        (["--latency-limit-s", "0.1"], 1, ("the fastest takes", "--latency-limit-s")),
        (["--fix", "tp=2"], 2, ("--fix with --infer",)),
        (["--global-batch-size", "8"], 2, ("--global-batch-size with --infer",)),
        (["--precision", "fp8"], 2, ("bf16, fp16, tf32 or fp32",)),
        (["--nvme-gib", "8"], 2, ("--nvme-gib without --nvme",)),
        (["--storage-attention-gb-per-s", "9"], 2, ("--storage-attention-gb-per-s without --nvme",)),
        (["--nvme", ".", "--nvme-gib", "9", "--storage-attention-gb-per-s", "0"], 2, ("--storage-attention-gb-per-s",)),
        (
            ["--nvme", ".", "--nvme-gib", "0", "--storage-attention-gb-per-s", "9"],
            2,
            ("none may be used", "--nvme-gib"),
        ),
        (["--prompt-len", "0"], 2, ("--prompt-len",)),
        (["--batch-size", "0"], 2, ("--batch-size",)),
        (["--cluster", EDGE], 2, ("--host-memory-gib", "no host apart")),
        (["--across-nodes"], 2, ("one node", "leave out --across-nodes")),
        (["--tp", "2"], 2, ("2 devices cannot hold", "use --tp 1")),
        (["--tp", "0"], 2, ("--tp",)),
    ],
)
def test_what_cannot_be_is_refused_with_its_cause(changes, code, words, tmp_path) -> None:
    result = CliRunner().invoke(app, [*INFER, *changes])
    assert result.exit_code == code, result.output
    assert all(word in result.stderr for word in words), result.stderr
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.parametrize(
    "options",
    [
        ("--optimizer", "sgd"),
        ("--attention", "math"),
        ("--min-tokens-per-s", "5"),
        ("--tokens", "1e9"),
        ("--deadline-h", "3"),
    ],
    ids=lambda options: options[0],
)
def test_every_option_of_training_is_refused(options: tuple[str, str], tmp_path) -> None:
    result = CliRunner().invoke(app, [*INFER, *options])
    assert result.exit_code == 2, result.output
    assert options[0] in result.stderr
    assert not (tmp_path / "plan.json").exists()


def test_lengths_and_infer_belong_together() -> None:
    alone = CliRunner().invoke(app, ["plan", "gpt2", "--cluster", "1xT4-16GB", "--prompt-len", "8"])
    assert alone.exit_code == 2 and "--prompt-len without --infer" in alone.stderr
    short = CliRunner().invoke(app, ["plan", "gpt2", "--cluster", "1xT4-16GB", "--infer", "--prompt-len", "8"])
    assert short.exit_code == 2 and "--infer without --generate-len" in short.stderr


def test_apply_refuses_a_plan_for_generation() -> None:
    assert CliRunner().invoke(app, INFER).exit_code == 0
    result = CliRunner().invoke(app, ["apply", "plan.json"])
    assert result.exit_code == 2
    assert "a plan for generation; one for training is needed" in result.stderr
