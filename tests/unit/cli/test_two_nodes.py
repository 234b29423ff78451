"""A job on two nodes: network namespaces of this machine with a cable between them, where that is permitted.

Each namespace has its own addresses and its own loopback, so that a node that tells the others a name or an address that only it
understands never meets them. Where namespaces may not be made, the nodes are two launchers on this machine.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from meshwright.profilers.machine import num_cores
from meshwright.runtime.training.options import TrainOptions, list_checkpoints
from meshwright.schema import Layout
from small_jobs import assert_gone, losses, plan_elsewhere, read_lines, small_plan, train_here

pytestmark = [pytest.mark.job, pytest.mark.skipif(num_cores() < 2, reason="two ranks need two cores")]
WAIT_S = 240


@dataclass
class Nodes:
    """What starts a command on each of two nodes, and where they meet; ``names``: of the namespaces, if there are any."""

    names: tuple[str, ...]
    endpoint: str
    program: tuple[str, ...] = ("-m", "meshwright.cli")

    def start(self, node: int, *arguments: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        inside = ["ip", "netns", "exec", self.names[node]] if self.names else []
        command = [*inside, sys.executable, *self.program, "apply", "--nnodes", "2"]
        command += ["--rdzv-endpoint", self.endpoint, *arguments]
        environment = {**os.environ, "MESHWRIGHT_SECRET": "what both nodes know", **(environment or {})}
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def cut(self, *, down: bool) -> None:
        """Cut the cable, or mend it."""
        assert ip("-n", self.names[0], "link", "set", "v0", "down" if down else "up")


def ip(*words: str) -> bool:
    try:
        return subprocess.run(["ip", *words], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    names = tuple(f"mw{os.getpid()}{side}" for side in "ab")
    steps = [
        *(("netns", "add", name) for name in names),
        ("link", "add", "v0", "netns", names[0], "type", "veth", "peer", "name", "v1", "netns", names[1]),
        *(("-n", name, "addr", "add", f"10.77.3.{i + 1}/24", "dev", f"v{i}") for i, name in enumerate(names)),
        *(("-n", name, "link", "set", device, "up") for i, name in enumerate(names) for device in ("lo", f"v{i}")),
    ]
    try:
        if all(ip(*words) for words in steps):
            yield Nodes(names, "10.77.3.1:29400")
        else:
            yield Nodes((), f"127.0.0.1:{20_000 + os.getpid() % 10_000}")
    finally:
        for name in names:
            ip("netns", "del", name)


def ranks_of(launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    children = psutil.Process(launcher.pid).children(recursive=True)
    return [child for child in children if any("job.worker" in word for word in child.cmdline())]


def wait_for(condition: Callable[[], object], launchers: Sequence[subprocess.Popen[str]]) -> None:
    """Wait until something is so; no launcher may end before."""
    end = time.monotonic() + WAIT_S
    while not condition():
        ended = [launcher.communicate() for launcher in launchers if launcher.poll() is not None]
        assert not ended
        assert time.monotonic() < end
        time.sleep(0.1)


def listens(endpoint: str) -> bool:
    host, _, port = endpoint.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def exists(*files: Path) -> Callable[[], bool]:
    """A condition: the files are there."""
    return lambda: all(file.exists() for file in files)


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
    assert sum("peak memory" in text for text in messages) == 1  # rank 0 may be on either
    drawn = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in drawn if event.get("name") == "optimizer"} == {0, 1}


def launch_with_faults() -> None:
    """The command, with ranks that die where files say so (rank_with_faults.py)."""
    from types import SimpleNamespace

    from meshwright.cli.main import main
    from meshwright.runtime.job import launch

    launch.worker = SimpleNamespace(__name__="rank_with_faults")  # type: ignore[assignment]
    main()


@pytest.mark.long
def test_nodes_are_lost_and_come_back(nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One job of one rank on each node, whose losses are those of a run without faults all the same.

    Node 1's rank dies in step 3, is started anew and joins. The cable is cut for 3 s in a step: all go on. Node 1's launcher
    is killed in another; the command is given there again, and it joins. The cable is cut for good: node 1 ends with one message,
    node 0 trains to the end alone.
    """
    steps, faults = 12, tmp_path / "faults"
    faults.mkdir()
    alone = small_plan()
    plan = plan_elsewhere(num_nodes=2).replace(fallbacks=(alone,))
    plan.save(tmp_path / "plan.json")
    here, metrics = Path(__file__).parent, [tmp_path / f"metrics{i}.jsonl" for i in range(3)]
    nodes.program = ("-c", "import test_two_nodes; test_two_nodes.launch_with_faults()")
    folders = [here, here.parent, here.parent / "runtime", here.parents[1] / "parity", here.parents[1] / "fuzz"]
    environment = {"FAULTS": str(faults), "PYTHONPATH": ":".join(map(str, [*folders, *sys.path]))}
    options = ("--steps", str(steps), "--restart-ranks", "1", "--hang-timeout-s", "0", "--on-fault", "continue")

    def start(node: int, file: Path) -> subprocess.Popen[str]:
        words = (*options, "--metrics", str(file), "--node-rank", str(node), str(tmp_path / "plan.json"))
        return nodes.start(node, *words, environment=environment)

    def stop_at(step: int) -> None:
        (faults / f"stop-{step}").touch()

    def go_on_at(step: int) -> None:
        (faults / f"stop-{step}").unlink()

    def joined(first: int) -> int:
        """Wait until node 1's rank takes part again; the step in which it does."""
        wait_for(exists(faults / "waits-1"), launchers)
        (faults / "takes-in").touch()
        stop_at(first + 1)
        go_on_at(first)
        wait_for(exists(faults / f"at-{first + 1}-0", faults / f"at-{first + 1}-1"), launchers)
        (faults / "waits-1").unlink()
        return first + 1

    (faults / "die-3-1").touch()
    stop_at(5)
    launchers = [start(0, metrics[0]), start(1, metrics[1])]
    try:
        step = joined(5)
        if nodes.names:
            nodes.cut(down=True)
            stop_at(step + 1)
            go_on_at(step)
            time.sleep(3)
            nodes.cut(down=False)
            wait_for(exists(faults / f"at-{step + 1}-0", faults / f"at-{step + 1}-1"), launchers)
            step += 1
        launchers.pop().kill()
        stop_at(step + 1)
        go_on_at(step)
        wait_for(exists(faults / f"at-{step + 1}-0"), launchers)
        launchers.append(start(1, metrics[2]))
        step = joined(step + 1)
        if nodes.names:
            nodes.cut(down=True)
        go_on_at(step)
        messages = [launcher.communicate(timeout=WAIT_S)[1] for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()
    assert launchers[0].returncode == 0, messages
    if nodes.names:
        assert launchers[1].returncode == 1, messages
        assert "error: node 1 has lost the node with the store of the job" in messages[1]
    records = read_lines(metrics[0])
    assert [record["step"] for record in records if "step" in record] == list(range(1, steps + 1))
    causes = [cause for record in records if record.get("event") == "went on" for cause in record["causes"]]
    assert causes[:2] == ["rank 1 of 2 was killed by signal 9 (SIGKILL)", "rank 1 came back"]
    assert causes[2].startswith("node 1 of 2 said nothing for ")
    assert causes[3] == "rank 1 came back"
    assert len(causes) == 4 + bool(nodes.names)
    expected = losses(train_here(monkeypatch, alone, TrainOptions(steps=steps), tmp_path / "alone"))
    assert losses(records) == pytest.approx(expected, rel=1e-5)


@pytest.mark.long
def test_a_node_that_is_about_to_go_hands_over_what_it_holds_and_the_last_one_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is on a third machine. Each node holds half of the states, of which there are no copies.

    SIGTERM to node 1 in step 3: node 0 goes on with all of them. SIGTERM to node 0, which nobody can go on without: it saves.
    """
    nodes = Nodes((), f"127.0.0.1:{20_000 + os.getpid() % 10_000}")
    steps, faults, folder, metrics = 8, tmp_path / "faults", tmp_path / "checkpoints", tmp_path / "metrics.jsonl"
    faults.mkdir()
    alone = small_plan()
    plan = plan_elsewhere(num_nodes=2, layout=Layout(dp_shard=2, zero_stage=3)).replace(fallbacks=(alone,))
    plan.save(tmp_path / "plan.json")
    here = Path(__file__).parent
    nodes.program = ("-c", "import test_two_nodes; test_two_nodes.launch_with_faults()")
    folders = [here, here.parent, here.parent / "runtime", here.parents[1] / "parity", here.parents[1] / "fuzz"]
    environment = {"FAULTS": str(faults), "PYTHONPATH": ":".join(map(str, [*folders, *sys.path]))}
    options = ("--steps", str(steps), "--copy-every", "100", "--hang-timeout-s", "0")
    saving = ("--checkpoint-dir", str(folder), "--checkpoint-every", "100")

    def start(*words: str) -> subprocess.Popen[str]:
        return nodes.start(0, *options, *saving, *words, str(tmp_path / "plan.json"), environment=environment)

    (faults / "stop-3").touch()
    launchers = [start("--store-only")]
    try:
        wait_for(lambda: listens(nodes.endpoint), launchers)
        launchers += [start("--node-rank", "0", "--metrics", str(metrics)), start("--node-rank", "1")]
        wait_for(exists(faults / "at-3-0", faults / "at-3-1"), launchers)
        (faults / "takes-in").touch()
        (faults / "stop-6").touch()
        launchers[2].send_signal(signal.SIGTERM)
        (faults / "stop-3").unlink()
        messages = [launchers[2].communicate(timeout=WAIT_S)[1]]
        wait_for(exists(faults / "at-6-0"), launchers[:2])
        launchers[1].send_signal(signal.SIGTERM)
        (faults / "stop-6").unlink()
        messages += [launcher.communicate(timeout=WAIT_S)[1] for launcher in launchers[:2]]
    finally:
        for launcher in launchers:
            launcher.kill()
    assert [launcher.returncode for launcher in launchers] == [143] * 3, messages
    records = read_lines(metrics)
    done = [record["step"] for record in records if "step" in record]
    assert list_checkpoints(folder)[-1].name == f"step-{done[-1]:08d}"
    causes = [cause for record in records if record.get("event") == "went on" for cause in record["causes"]]
    assert causes == ["node 1 is about to be taken away"]
    expected = losses(train_here(monkeypatch, alone, TrainOptions(steps=steps), tmp_path / "alone"))
    assert losses(records) == pytest.approx(expected[: len(done)], rel=1e-5)


@pytest.mark.long
def test_the_loss_of_the_node_with_the_store_ends_the_others_with_one_message(tmp_path: Path) -> None:
    """SIGKILL to its launcher: no rank of either node is there afterwards, and nobody trains on alone."""
    nodes = Nodes((), f"127.0.0.1:{20_000 + os.getpid() % 10_000}")
    plan_elsewhere(num_nodes=2).replace(fallbacks=(small_plan(),)).save(tmp_path / "plan.json")
    metrics, options = tmp_path / "metrics.jsonl", ("--steps", "1000000", "--hang-timeout-s", "0")
    words = ("--metrics", str(metrics), str(tmp_path / "plan.json"))
    launchers = [nodes.start(0, *options, "--node-rank", str(node), *words) for node in range(2)]
    try:
        wait_for(lambda: metrics.exists() and metrics.stat().st_size > 0, launchers)  # they have met, and train
        ranks = [rank for launcher in launchers for rank in ranks_of(launcher)]
        launchers[0].kill()
        message = launchers[1].communicate(timeout=WAIT_S)[1]
    finally:
        for launcher in launchers:
            launcher.kill()
    assert launchers[1].returncode == 1, message
    assert message.count("error: ") == 1
    assert "error: node 1 has lost the node with the store of the job" in message
    assert_gone(ranks)
