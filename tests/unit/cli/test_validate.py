"""`meshwright validate` as a user types it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import typer
from meshwright.cli.validate import validate
from meshwright.validation.rows import RunRow
from typer.testing import CliRunner

HEADER = (
    "id,split,source_set,decision_group,framework,gpu_type,n_gpus,model,model_family,layers,hidden,heads,ffn,"
    "vocab,seq_len,global_batch,micro_batch,dp,tp,pp,recompute_class,precision_class,offload,iter_time_s,"
    "status"
)
ROWS = (
    "a,dev,one,g,Megatron-LM,A100-SXM-80GB,8,gpt,GPT,24,2048,16,8192,51200,2048,64,2,4,2,1,none,fp16,none,2.0,ok",
    "b,dev,one,g,Megatron-LM,A100-SXM-80GB,8,gpt,GPT,24,2048,16,8192,51200,2048,64,1,8,1,1,full,fp16,none,3.0,ok",
    "c,other,two,,Megatron-LM,A100-SXM-80GB,8,T5-11B,GPT,24,2048,16,8192,51200,2048,64,1,8,1,1,full,fp16,cpu,3.0,ok",
)

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(validate)


@pytest.fixture
def runs(tmp_path) -> Path:
    path = tmp_path / "runs.csv"
    path.write_text("\n".join((HEADER, *ROWS)) + "\n")
    return path


@pytest.fixture
def groups(tmp_path) -> Path:
    path = tmp_path / "groups.csv"
    path.write_text("decision_group,n_rows\ng,2\n")
    return path


def invoke(*args: object):
    return CliRunner().invoke(app, [str(arg) for arg in args])


def test_tables_name_sources_scores_and_skip_reasons(runs, groups) -> None:
    result = invoke(runs, "--groups", groups)
    assert result.exit_code == 0, result.output
    for expected in ("one", "two", "MAPE", "bias", "false alarms", "not a plain decoder", "naive", "alike"):
        assert expected in result.stdout
    assert "next: meshwright validate" in result.stderr


def test_json_has_a_row_for_every_input_row(runs, groups) -> None:
    result = invoke(runs, "--groups", groups, "--json")
    document = json.loads(result.stdout)
    assert list(document) == ["rows", "sources", "all", "groups", "by", "calibrations", "cross_validation"]
    assert [row["id"] for row in document["rows"]] == ["a", "b", "c"]
    needed = {
        "id",
        "step_time_s",
        "measured_s",
        "step_time_interval_s",
        "breakdown_s",
        "mfu",
        "fits",
        "skipped",
        "stalled",
    }
    peaks = {"peak_allocated_bytes", "peak_reserved_bytes", "peak_device_bytes", "required_bytes"}
    assert all(needed | peaks <= row.keys() for row in document["rows"])
    first = document["rows"][0]
    assert sum(first["breakdown_s"].values()) == pytest.approx(first["step_time_s"])
    assert first["step_time_interval_s"]["low"] < first["step_time_s"] < first["step_time_interval_s"]["high"]
    assert sorted(peaks, key=lambda name: first[name])[0] == "peak_allocated_bytes"
    assert 0 < first["mfu"] < 1
    assert document["rows"][0]["step_time_s"] > 0
    assert document["rows"][2]["skipped"] == "model: not a plain decoder"
    assert document["sources"]["one"]["time"]["count"] == 2
    assert document["groups"]["g"]["regret"] >= 0


def test_groups_of_the_table_are_scored_without_a_list_of_them(runs, groups) -> None:
    alone, listed = (json.loads(invoke(runs, *options, "--json").stdout) for options in ((), ("--groups", groups)))
    assert alone["groups"] == listed["groups"]
    assert {"regret", "plain", "naive", "random", "rank"} <= alone["groups"]["g"].keys()


def test_errors_are_listed_by_fields_of_the_layout(runs) -> None:
    result = invoke(runs, "--by", "tp,micro_batch")
    assert result.exit_code == 0, result.output
    assert "step time by tp, micro_batch" in result.stdout
    parts = json.loads(invoke(runs, "--by", "tp,micro_batch", "--json").stdout)["by"]
    assert [(part["source"], part["tp"], part["micro_batch"], part["count"]) for part in parts] == [
        ("one", 1, 1, 1), ("one", 2, 2, 1),
    ]  # fmt: skip


def test_parts_split_a_table_and_keep_a_model_together() -> None:
    rows = [RunRow(line=1, id=str(n), gpu_type="g", model=f"m{n % 40}", source_set="s") for n in range(80)]
    parts = [row.part for row in rows]
    assert set(parts) == {"fit", "held-out"}
    assert parts[:40] == parts[40:]


@pytest.mark.parametrize(("option", "kept"), [(("--source", "one"), ["a", "b"]), (("--split", "other"), ["c"])])
def test_unselected_rows_stay_in_the_json(runs, option, kept) -> None:
    document = json.loads(invoke(runs, *option, "--json").stdout)
    selected = [
        row["id"] for row in document["rows"] if row["skipped"] != "not selected by --source, --split or --part"
    ]
    assert selected == kept


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--source", "three"), "no rows of --source three"),
        (("--split", "test"), "it has: dev, other"),
        (("--source", "one", "--split", "other"), "at once"),
        (("--groups", "none.csv"), "cannot read none.csv"),
        (("--by", "tp,colour"), "--by has no field 'colour'"),
    ],
)
def test_wrong_options_end_in_one_message(runs, args, message) -> None:
    result = invoke(runs, *args)
    assert result.exit_code == 2
    assert message in result.stderr


def test_malformed_table_ends_in_one_message(tmp_path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(f"{HEADER}\n{ROWS[0].replace('2048', 'x')}\n")
    result = invoke(path)
    assert result.exit_code == 2
    assert "line 2 column hidden: 'x' is not a number" in result.stderr


def test_plot_without_matplotlib_says_what_to_install(runs, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = invoke(runs, "--plot", tmp_path / "out.png")
    assert result.exit_code == 2
    assert "meshwright[plot]" in result.stderr
    assert not (tmp_path / "out.png").exists()


def test_plot_is_written(runs, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    result = invoke(runs, "--plot", tmp_path / "out.png")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out.png").stat().st_size > 0
