"""Reward functions of users: numbers, and everything else that they do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from meshwright.runtime.rl.rewards import RewardError, RewardProcess
from meshwright.schema import ConfigError

CODE = """
import time, math
import os

def length(sample):
    print("a line that is no answer")
    return len(sample["response"])

def misbehaves(sample):
    what = sample["what"]
    if what == "raises":
        raise KeyError("answer")
    if what == "hangs":
        time.sleep(60)
    if what == "ends":
        os._exit(3)
    return {"nan": math.nan, "text": "much", "none": None, "true": True, "inf": math.inf}[what]

number = 3
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rewards") / "rewards.py"
    path.write_text(CODE)
    return path


@pytest.fixture(scope="module")
def misbehaving(file: Path) -> Iterator[RewardProcess]:
    with RewardProcess(f"{file}:misbehaves", timeout_s=20) as process:
        yield process


def test_rewards_are_numbers_and_prints_are_no_answers(file: Path) -> None:
    with RewardProcess(f"{file}:length", timeout_s=20) as process:
        assert process.rewards([{"response": [1] * n} for n in (3, 0, 5)]) == [3.0, 0.0, 5.0]


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("raises", "KeyError: 'answer'"),
        ("nan", "nan"),
        ("inf", "inf"),
        ("text", "'much'"),
        ("none", "None"),
        ("true", "True"),
    ],
)
def test_what_is_no_reward_names_the_sample(misbehaving: RewardProcess, what: str, says: str) -> None:
    with pytest.raises(RewardError) as error:
        misbehaving.rewards([{"prompt": [7], "what": what}])
    assert says in str(error.value) and "sample 0 (prompt [7])" in str(error.value)
    assert what != "raises" or any("raise KeyError" in line for line in error.value.details)


def test_a_function_that_hangs_is_ended_and_no_process_stays(file: Path) -> None:
    process = RewardProcess(f"{file}:misbehaves", timeout_s=0.5)
    pid, start_s = process._process.pid, time.monotonic()
    with pytest.raises(RewardError, match=r"gave nothing for 0\.5 s at sample 0"):
        process.rewards([{"what": "hangs"}])
    assert time.monotonic() - start_s < 20 and not psutil.pid_exists(pid)


def test_a_function_that_ends_its_process_is_noticed(file: Path) -> None:
    with RewardProcess(f"{file}:misbehaves", timeout_s=20) as process, pytest.raises(RewardError, match="exit code 3"):
        process.rewards([{"what": "ends"}])


@pytest.mark.parametrize(
    ("name", "says"),
    [("rewards.py", "names no function"), ("none.py:f", "no file"), (":f", "names no function"), ("{file}:number", "no function"),
     ("{file}:absent", "AttributeError"), ("no_such_module:f", "No module named")],
)  # fmt: skip
def test_a_function_that_is_not_there_is_said_before_anything_runs(file: Path, name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        RewardProcess(name.format(file=file), timeout_s=20)
