"""Wrong inputs end with exit code 2 (or 1 where there is no answer), one clear message on stderr, no traceback, nothing written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from meshwright.cli.main import app
from typer.testing import CliRunner

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
}

GOOD = {"model": "smollm2-135m", "--cluster": "8xA100-SXM-80GB", "--global-batch-size": "64", "--seq-len": "2048"}


def run(*args: str):
    return CliRunner().invoke(app, list(args))


def plan_args(**changes: str) -> list[str]:
    values = {**GOOD, **{k if k == "model" else "--" + k.replace("_", "-"): v for k, v in changes.items()}}
    options = [part for name, value in values.items() if name != "model" for part in (name, value)]
    return ["plan", values["model"], *options]


def assert_refused(result, message: str, folder: Path, code: int = 2) -> None:
    assert result.exit_code == code, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert message.lower() in result.stderr.lower(), result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""
    assert not (folder / "plan.json").exists()


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


BAD_OPTIONS = [
    ({"model": "llama-3.1-71b"}, "did you mean llama-3.1-70b"),
    ({"model": "no-such-model-at-all"}, "unknown model"),
    ({"model": "missing/config.json"}, "cannot read"),
    ({"model": ""}, "unknown model"),
    ({"model": "x" * 5000}, "unknown model"),
    ({"cluster": "8xH100-SXM-81GB"}, "h100-sxm-80gb"),
    ({"cluster": "8xWarpDrive"}, "WarpDrive"),
    ({"cluster": ""}, "cluster"),
    ({"cluster": "0xA100-SXM-80GB"}, "0"),
    ({"cluster": "-8xA100-SXM-80GB"}, "-8"),
    ({"cluster": "1e3xA100-SXM-80GB"}, "1e3"),
    ({"cluster": "12xA100-SXM-80GB"}, "2x6xA100-SXM-80GB"),
    ({"cluster": "8xA100-SXM-80GB/warp"}, "warp"),
    ({"cluster": "missing.toml"}, "missing.toml"),
    ({"cluster": "99999999999999xA100-SXM-80GB"}, "99999999999999"),
    ({"global_batch_size": "0"}, "--global-batch-size"),
    ({"global_batch_size": "-64"}, "--global-batch-size"),
    ({"global_batch_size": "many"}, "--global-batch-size"),
    ({"seq_len": "0"}, "--seq-len"),
    ({"seq_len": "2.5"}, "--seq-len"),
    ({"precision": "bf17"}, "bf17"),
    ({"precision": "fp8"}, "fp8"),
    ({"cluster": "8xV100-SXM2-32GB", "precision": "bf16-mixed"}, "bf16"),
    ({"optimizer": "lion"}, "lion"),
    ({"attention": "magic"}, "magic"),
    ({"fix": "tp=3"}, "tp"),
    ({"fix": "tp"}, "name=value"),
    ({"fix": "tp=2,tp=4"}, "twice"),
    ({"fix": "warp=2"}, "unknown layout field"),
    ({"fix": "tp=two"}, "whole number"),
    ({"fix": "tp=0"}, "tp"),
    ({"fix": "recompute=most"}, "recompute"),
    ({"fix": "dp_shard=5"}, "world_size"),
    ({"model": "gpt2", "seq_len": "4096"}, "learned positions"),
    ({"out": "missing/folder/plan.json"}, "cannot write"),
    ({"time_limit_s": "-1"}, "time-limit-s"),
    ({"global_batch_size": "1000000000000000003"}, "--global-batch-size"),
    ({"seq_len": "9" * 23}, "--seq-len"),
    ({"fix": "tp=" + "9" * 23}, "tp"),
    ({"fix": "sequence_parallel=true,tp=1"}, "sequence_parallel needs tp > 1"),
    ({"fix": "dp_shard=1,cp=1,zero_stage=3"}, "dp_shard > 1"),
    ({"out": "/dev/null"}, "not a regular file"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_OPTIONS, ids=lambda v: str(v)[:50])
def test_bad_option_is_refused(changes, message, tmp_path) -> None:
    assert_refused(run(*plan_args(**changes)), message, tmp_path)


BAD_CONFIGS = [
    ("{", "not valid JSON"),
    (" \n", "is empty"),
    ("[]", "not an object"),
    (json.dumps({**LLAMA, "architectures": ["BertForMaskedLM"]}), "not supported"),
    (json.dumps({**LLAMA, "hidden_size": -256}), "hidden_size"),
    (json.dumps({**LLAMA, "hidden_size": "wide"}), "hidden_size"),
    (json.dumps({**LLAMA, "num_attention_heads": 7}), "num_attention_heads"),
    (json.dumps({k: v for k, v in LLAMA.items() if k != "vocab_size"}), "vocab_size"),
]


@pytest.mark.parametrize(("text", "message"), BAD_CONFIGS, ids=lambda v: v[-40:])
def test_bad_config_is_refused(text, message, tmp_path) -> None:
    (tmp_path / "config.json").write_text(text)
    assert_refused(run(*plan_args(model="config.json")), message, tmp_path)


def test_truncated_plan_is_refused(tmp_path) -> None:
    assert run(*plan_args(out="good.json")).exit_code == 0
    text = (tmp_path / "good.json").read_text()
    (tmp_path / "cut.json").write_text(text[: len(text) // 2])
    assert_refused(run("apply", "cut.json"), "not valid JSON", tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 99}, "schema version 99"),
        ({"schema_version": "one"}, "schema version"),
        ({"schema_version": 0}, "schema version 0"),
        ({"surprise": 1}, "surprise"),
        ({"rank_map": [0]}, "rank_map"),
        ({"layout": {"tp": 3}}, "layout"),
        ({"stages": []}, "stages"),
    ],
)
def test_changed_plan_is_refused(change, message, tmp_path) -> None:
    assert run(*plan_args(out="good.json")).exit_code == 0
    plan = json.loads((tmp_path / "good.json").read_text())
    (tmp_path / "changed.json").write_text(json.dumps({**plan, **change}))
    assert_refused(run("apply", "changed.json"), message, tmp_path)


@pytest.mark.long
def test_infeasible_request_exits_with_1(tmp_path) -> None:
    result = run(*plan_args(model="llama-3.1-405b", cluster="8xH100-SXM-80GB", fix="dp_replicate=1"))
    assert_refused(result, "no plan fits", tmp_path, code=1)
    assert "help:" in result.stderr


def test_missing_option_is_named(tmp_path) -> None:
    assert_refused(run("plan", "gpt2", "--seq-len", "1024"), "--global-batch-size", tmp_path)
    batch = ("--global-batch-size", "8")
    assert_refused(run("plan", "gpt2", "--seq-len", "1024", *batch), "--cluster", tmp_path)


def test_estimate_refuses_what_plan_refuses(tmp_path) -> None:
    args = plan_args()[1:]
    assert_refused(run("estimate", *args, "--layout", "tp=3"), "world_size", tmp_path)
    assert_refused(run("estimate", *args, "--layout", "tp=9,dp_shard=2"), "heads", tmp_path)


def test_optimizer_of_training_without_one_is_refused(tmp_path) -> None:
    assert_refused(run(*plan_args(train="zeroth-order", optimizer="sgd")), "--optimizer sgd with --train", tmp_path)
