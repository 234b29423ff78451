"""Several processes at once: whoever reads a file reads the whole of one that somebody wrote, and nothing is left behind."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from meshwright.profilers import local
from meshwright.runtime.training.data_files import find_text, make_token_file, open_token_files
from meshwright.schema import TrainingPlan
from meshwright.schema.base import write_atomically
from targets import small_plans, small_profile

PROCESSES, ROUNDS = 4, 12

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the processes of these tests are forked")


def at_once(work: Callable[..., None], *arguments: Any) -> None:
    """Run ``work(number, *arguments)`` in several processes that begin together; fails where one of them does."""
    context = multiprocessing.get_context("fork")
    begin = context.Barrier(PROCESSES)

    def run(number: int) -> None:
        begin.wait()
        work(number, *arguments)

    processes = [context.Process(target=run, args=(number,)) for number in range(PROCESSES)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * PROCESSES


def write_and_read_plans(number: int, path: Path) -> None:
    plans = small_plans()
    for _ in range(ROUNDS):
        plans[number % len(plans)].save(path)
        assert TrainingPlan.load(path) in plans


def test_plans_written_at_once_are_whole(tmp_path: Path) -> None:
    at_once(write_and_read_plans, tmp_path / "plan.json")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def make_tokens(number: int, text: Path, path: Path) -> None:
    corpus = find_text([text])
    for _ in range(ROUNDS):
        assert make_token_file(corpus, path) == corpus.num_tokens
        found = open_token_files([path])
        assert np.array_equal(found.tokens(0, corpus.num_tokens), corpus.tokens(0, corpus.num_tokens))


def test_token_files_made_at_once_are_whole(tmp_path: Path) -> None:
    text, cache = tmp_path / "text", tmp_path / "tokens"
    text.write_bytes(bytes(range(1, 128)) * 5000)
    cache.mkdir()
    at_once(make_tokens, text, cache / "tokens.bin")
    assert sorted(path.name for path in cache.iterdir()) == ["tokens.bin", "tokens.bin.ends.npy"]


def store_and_find(number: int) -> None:
    profile = small_profile().replace(machine=small_profile().machine.replace(num_nodes=1, num_devices=2))
    path = local._cache_file(profile.machine)
    assert path is not None
    said: list[str] = []
    for _ in range(ROUNDS):
        with local._measuring_lock(path, said.append):
            profile.save(path)
        assert local._cached(path, profile.machine, said.append) is not None
    assert not [line for line in said if "waiting" not in line]


def test_the_cache_of_measurements_is_whole_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    at_once(store_and_find)
    names = sorted(path.name for path in (tmp_path / "meshwright").iterdir())
    assert len(names) == 2 and names[1] == "local.lock"


def test_an_interrupted_write_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    write_atomically(path, "old")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, "new")
    assert [(found.name, found.read_text()) for found in tmp_path.iterdir()] == [("plan.json", "old")]
