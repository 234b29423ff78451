"""Two nodes: network namespaces of this machine with a cable between them, where that is permitted.

Each namespace has its own addresses and its own loopback, so that a node that tells the others a name or an address that only it
understands never meets them. Where namespaces may not be made, the nodes are two launchers on this machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

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
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )

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


def ranks_of(launcher: subprocess.Popen[str], module: str = "job.worker") -> list[psutil.Process]:
    children = psutil.Process(launcher.pid).children(recursive=True)
    return [child for child in children if any(module in word for word in child.cmdline())]


def wait_for(condition: Callable[[], object], launchers: Sequence[subprocess.Popen[str]]) -> None:
    """Wait until something is so; no launcher may end before."""
    end = time.monotonic() + WAIT_S
    while not condition():
        ended = [launcher.communicate() for launcher in launchers if launcher.poll() is not None]
        assert not ended, ended
        assert time.monotonic() < end
        time.sleep(0.1)


def exists(*files: Path) -> Callable[[], bool]:
    """A condition: the files are there."""
    return lambda: all(file.exists() for file in files)
