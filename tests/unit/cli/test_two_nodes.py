"""A job on two nodes: two network namespaces of this machine with a cable between them, where that is permitted.

Each namespace has its own addresses and its own loopback, so that a node that tells the others a name or an address that only it
understands never meets them. Where namespaces may not be made, the nodes are two launchers on this machine.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from meshwright.profilers.machine import num_cores
from meshwright.runtime.training.options import list_checkpoints
from small_jobs import plan_elsewhere, read_lines

pytestmark = [pytest.mark.job, pytest.mark.skipif(num_cores() < 2, reason="two ranks need two cores")]
WAIT_S = 240


@dataclass
class Nodes:
    """What starts a command on each of two nodes, and where they meet."""

    prefixes: tuple[tuple[str, ...], tuple[str, ...]]
    endpoint: str

    def start(self, node: int, *arguments: str) -> subprocess.Popen[str]:
        command = [*self.prefixes[node], sys.executable, "-m", "meshwright.cli", "apply", "--nnodes", "2"]
        command += ["--rdzv-endpoint", self.endpoint, *arguments]
        environment = {**os.environ, "MESHWRIGHT_SECRET": "what both nodes know"}
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ip(*words: str) -> bool:
    try:
        return subprocess.run(["ip", *words], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    names = [f"mw{os.getpid()}{side}" for side in "ab"]
    steps = [
        *(("netns", "add", name) for name in names),
        ("link", "add", "v0", "netns", names[0], "type", "veth", "peer", "name", "v1", "netns", names[1]),
        *(("-n", name, "addr", "add", f"10.77.3.{i + 1}/24", "dev", f"v{i}") for i, name in enumerate(names)),
        *(("-n", name, "link", "set", device, "up") for i, name in enumerate(names) for device in ("lo", f"v{i}")),
    ]
    try:
        if all(ip(*words) for words in steps):
            first, second = (("ip", "netns", "exec", name) for name in names)
            yield Nodes((first, second), "10.77.3.1:29400")
        else:
            yield Nodes(((), ()), f"127.0.0.1:{20_000 + os.getpid() % 10_000}")
    finally:
        for name in names:
            ip("netns", "del", name)


def ranks_of(launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    children = psutil.Process(launcher.pid).children(recursive=True)
    return [child for child in children if any("job.worker" in word for word in child.cmdline())]


def wait_for(condition: object, launchers: list[subprocess.Popen[str]]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():  # type: ignore[operator]
        ended = [launcher.communicate() for launcher in launchers if launcher.poll() is not None]
        assert not ended
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.long
def test_killed_rank_of_one_node_brings_both_back(nodes: Nodes, tmp_path: Path) -> None:
    """kill -9 on the second node's rank, a restart from the last checkpoint on both, SIGTERM to one with a last checkpoint."""
    folder, metrics = tmp_path / "checkpoints", [tmp_path / f"metrics{node}.jsonl" for node in range(2)]
    plan_elsewhere(num_nodes=2).save(tmp_path / "plan.json")
    options = ("--steps", "1000000", "--checkpoint-every", "5", "--checkpoint-dir", str(folder), "--max-restarts", "1")
    launchers = [
        nodes.start(
            node, *options, "--metrics", str(metrics[node]), "--node-rank", str(node), str(tmp_path / "plan.json")
        )
        for node in range(2)
    ]  # fmt: skip

    def steps() -> list[int]:
        records = [record for path in metrics if path.exists() for record in read_lines(path)]
        return [record["step"] for record in records if "step" in record]

    try:
        wait_for(lambda: list_checkpoints(folder), launchers)
        first = [ranks_of(launcher) for launcher in launchers]
        first[1][0].kill()
        wait_for(lambda: not any(rank.is_running() for ranks in first for rank in ranks), launchers)
        wait_for(lambda: all(ranks_of(launcher) for launcher in launchers), launchers)
        before = len(steps())
        wait_for(lambda: len(steps()) > before + 2, launchers)
        launchers[0].send_signal(signal.SIGTERM)
        messages = [launcher.communicate(timeout=WAIT_S)[1] for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()
    assert [launcher.returncode for launcher in launchers] == [128 + signal.SIGTERM] * 2, messages
    assert all("restart 1 of 1" in text for text in messages)
    assert "was killed by signal 9 (SIGKILL)" in messages[1]
    done = steps()
    backs = [after for before, after in pairwise(done) if after != before + 1]
    assert len(backs) <= 1  # none where the kill came right after a checkpoint
    assert all(step % 5 == 1 for step in backs)
    assert list_checkpoints(folder)[-1].name == f"step-{done[-1]:08d}"


@pytest.mark.long
def test_nodes_without_numbers_train_and_both_end_well(nodes: Nodes, tmp_path: Path) -> None:
    plan_elsewhere(num_nodes=2).save(tmp_path / "plan.json")
    options = ("--steps", "3", "--trace", str(tmp_path / "trace.json"), str(tmp_path / "plan.json"))
    launchers = [nodes.start(node, *options) for node in range(2)]
    messages = [launcher.communicate(timeout=WAIT_S)[1] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], messages
    assert sum("measured /" in text for text in messages) == 1  # rank 0 may be on either
    drawn = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in drawn if event.get("name") == "optimizer"} == {0, 1}
