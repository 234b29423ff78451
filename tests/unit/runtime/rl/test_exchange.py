"""The folder through which islands share responses is one that others write: their links and pipes harm nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from meshwright.runtime.rl.exchange import Answered, Exchange
from meshwright.schema import ConfigError, MeshwrightError
from rl_plans import rl_plan

WORK = rl_plan([(4, ("generator", "actor", "reference"))], {}).post_training


def test_a_link_in_place_of_the_folder_deletes_nothing(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "2.json").write_text("[]")
    (tmp_path / "island-0").symlink_to(theirs)
    with pytest.raises(ConfigError, match="it is a link"):
        Exchange(tmp_path, 0, WORK, timeout_s=1)
    assert (theirs / "2.json").exists()


def test_a_link_put_in_place_of_the_folder_later_changes_nothing_where_it_leads(tmp_path: Path) -> None:
    exchange = Exchange(tmp_path, 0, WORK, timeout_s=1)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    for step in (1, 5):
        (theirs / f"{step}.json").write_text("precious")
    (tmp_path / "island-0").rename(tmp_path / "moved")
    (tmp_path / "island-0").symlink_to(theirs)
    exchange.give(5, [Answered({"prompt": [1]}, ((1,),))])
    assert {path.name: path.read_text() for path in theirs.iterdir()} == {"1.json": "precious", "5.json": "precious"}
    assert (tmp_path / "moved" / "5.json").is_file()


def test_files_of_others_stay_and_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    ours, others = tmp_path / "island-0", tmp_path / "island-1"
    ours.mkdir()
    others.mkdir()
    (ours / "notes.txt").write_text("mine")
    (ours / "2.json").write_text("[]")
    os.mkfifo(others / "7.json")
    work = WORK.replace(islands=2, shared=0.5)
    exchange = Exchange(tmp_path, 0, work, timeout_s=0.1)
    assert [path.name for path in ours.iterdir()] == ["notes.txt"]
    with pytest.raises(MeshwrightError, match="no other island"):
        exchange.take(1)


def test_what_is_shared_goes_through_no_link(tmp_path: Path) -> None:
    exchange = Exchange(tmp_path, 0, WORK, timeout_s=1)
    target = tmp_path / "target"
    target.write_text("theirs")
    for name in (".3", "3.json"):
        (tmp_path / "island-0" / name).symlink_to(target)
    exchange.give(3, [Answered({"prompt": [1]}, ((1,),))])
    assert target.read_text() == "theirs"
    assert not (tmp_path / "island-0" / "3.json").is_symlink()
