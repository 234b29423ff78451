"""Tables of measured runs: typed rows, and what is wrong named by line and column."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from meshwright.schema import ConfigError
from meshwright.validation import read_groups, read_runs
from meshwright.validation.rows import _OTHER_COLUMNS, framework_choices
from run_rows import GOOD, HEADER, table


def test_rows_are_typed_and_empty_cells_are_unknown(tmp_path) -> None:
    rows = read_runs(table(tmp_path, *GOOD))
    assert [row.id for row in rows] == ["a", "b", "c", "d"]
    assert (rows[0].hidden, rows[0].iter_time_s, rows[0].inter_interconnect) == (2048, 2.0, "")
    assert rows[1].peak_mem_gib is None
    assert [row.is_scored for row in rows] == [True, True, True, False]
    assert rows[2].is_oom


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        (HEADER, "no rows"),
        ("id;model\n1;2\n", "line 1: no column"),
        (HEADER.replace("n_gpus", "gpus") + "\n" + GOOD[0], "no column n_gpus"),
        (HEADER.replace("n_gpus", "n_gpus,n_gpus") + "\n" + GOOD[0], "n_gpus appears more than once"),
        (HEADER + "\n" + GOOD[0] + ",1,2", "line 2: 35 cells, the header has 33"),
        (
            HEADER + "\n" + GOOD[0].replace(",2048,16,16,", ",wide,16,16,"),
            "line 2 column hidden: 'wide' is not a number",
        ),
        (HEADER + "\n" + GOOD[0].replace(",24,2048", ",2.5,2048"), "line 2 column layers: '2.5' is not a whole number"),
        (HEADER + "\n" + GOOD[0].replace(",2.0,20,", ",-2,20,"), "column iter_time_s: '-2' is not a positive number"),
        (HEADER + "\n" + GOOD[0].replace(",2.0,20,", ",nan,20,"), "column iter_time_s: 'nan' is not a positive number"),
        (HEADER + "\n" + GOOD[0] + "\n" + GOOD[0], "line 3 column id: 'a' is already on line 2"),
        (HEADER + '\n"a', "is not CSV"),
    ],
)
def test_malformed_table_is_named_by_line_and_column(tmp_path, content, message) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        read_runs(path)
    assert str(path) in str(caught.value)


def test_binary_or_missing_file_is_a_config_error(tmp_path) -> None:
    (tmp_path / "runs.csv").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "runs.csv", tmp_path / "none.csv", tmp_path):
        with pytest.raises(ConfigError):
            read_runs(path)


def test_groups_table_is_read_strictly(tmp_path) -> None:
    path = tmp_path / "groups.csv"
    path.write_text("decision_group,n_rows\ng,3\nh,2\n")
    assert read_groups(path) == ["g", "h"]
    path.write_text("decision_group\ng\ng\n")
    with pytest.raises(ConfigError, match="line 3 column decision_group: repeated"):
        read_groups(path)


@pytest.mark.parametrize(
    ("column", "text", "read"),
    [
        ("sharding_class", "ZeRO-3", "zero3"), ("sharding_class", "ZeRO stage 2", "zero2"), ("sharding_class", "FSDP", "zero3"),
        ("sharding_class", "FULL_SHARD", "zero3"),
        ("sharding_class", "SHARD_GRAD_OP", "zero2"), ("sharding_class", "HSDP", "hybrid"),
        ("sharding_class", "distributed optimizer", "zero1"), ("sharding_class", "DDP", "none"),
        ("sharding_class", "zero1", "zero1"),
        ("sharding_class", "lora", "lora"), ("recompute_class", "yes", "full"), ("recompute_class", "off", "none"),
        ("recompute_class", "Selective (attention)", "selective"), ("recompute_class", "gradient checkpointing", "full"),
        ("recompute_class", "custom", "custom"), ("status", "OOM", "oom"), ("status", "CUDA out of memory", "oom"),
        ("status", "success", "ok"), ("status", "oom_or_crash", "oom_or_crash"), ("status", "nan", "nan"), ("quality", "a", "A"),
    ],
)  # fmt: skip
def test_other_spellings_of_a_word_are_read(tmp_path, column: str, text: str, read: str) -> None:
    path = tmp_path / "runs.csv"
    cells = {**dict(zip(HEADER.split(","), GOOD[0].split(","), strict=True)), column: text}
    path.write_text("\n".join((",".join(cells), ",".join(cells.values()))) + "\n")
    assert getattr(read_runs(path)[0], column) == read


def test_missing_column_is_suggested_under_the_name_it_has(tmp_path) -> None:
    header = HEADER.replace("n_gpus", "num_gpus")
    with pytest.raises(ConfigError) as caught:
        read_runs(table(tmp_path, *GOOD, header=header))
    assert caught.value.help == "rename 'num_gpus' to n_gpus"


def test_every_column_that_states_what_an_engine_does_is_documented() -> None:
    text = (Path(__file__).parents[3] / "docs/accuracy.md").read_text(encoding="utf-8")
    words = set(re.findall(r"\w+", text.partition("## Columns of a table of runs")[2]))
    columns = framework_choices().keys() - set(_OTHER_COLUMNS)
    assert not columns - words
