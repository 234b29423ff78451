"""What is installed, what this machine has, and what of Meshwright will not work here and why.

Every line comes from trying: versions are read, a linear program is solved, a process group is made. Nothing is changed.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Literal

import psutil
from packaging.requirements import Requirement

from ..schema.base import Frozen
from ..schema.units import GIB, format_bytes
from .machine import available_memory, num_cores, total_memory, visible_gpus

Status = Literal["ok", "limited", "broken"]
GROUP_TIMEOUT_S = 60

EXTRAS: dict[str, str] = {
    "safetensors": "published weights cannot be loaded or saved",
    "tokenizers": "text is read as bytes; --tokenizer is refused",
    "transformers": "models of transformers cannot be parallelized",
    "torchao": "fp8 training is refused",
    "matplotlib": "validate --plot is refused",
    "pandas": "the learned cost model cannot be fitted again",
}
"""Packages that some features need -> what is missing without them."""


class Finding(Frozen):
    """One thing looked at.

    Attributes:
        status: limited: something is refused or predicted only; broken: what the README says does not work.
        found: what is there; means: what follows from it, empty where all is well.
        help: the smallest fix.
    """

    subject: str
    status: Status
    found: str
    means: str = ""
    help: str = ""


def examine() -> tuple[Finding, ...]:
    """Return every finding, in the order in which a user meets them."""
    return tuple(finding for check in _CHECKS for finding in check())


def _finding(subject: str, state: str, means: str = "", fix: str = "") -> Finding:
    """Return a finding that is limited where something follows from it."""
    status: Status = "limited" if means else "ok"
    return Finding(subject=subject, status=status, found=state, means=means, help=fix if means else "")


def _python() -> Iterator[Finding]:
    meshwright = _version("meshwright") or "not installed"
    yield _finding("python", f"{platform.python_version()} at {sys.prefix}, Meshwright {meshwright}")


def _packages() -> Iterator[Finding]:
    """Check what the package needs, in the versions that it states."""
    for line in requires("meshwright") or ():
        needed = Requirement(line)
        if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
            continue
        have = _version(needed.name)
        if have is None or not needed.specifier.contains(have, prereleases=True):
            have, fix = have or "not installed", f'pip install "{needed}"'
            yield Finding(subject=needed.name, status="broken", found=have, means=f"{needed} is needed", help=fix)
    torch = _version("torch")
    if torch is not None:
        is_old = tuple(int(part) for part in torch.split("+")[0].split(".")[:2]) < (2, 13)
        yield _finding("torch", torch, "experts with axes of their own (ep, etp) need torch 2.13" if is_old else "")
    for name, without in EXTRAS.items():
        have = _version(name)
        yield _finding(name, have or "not installed", "" if have else without, f"pip install {name}")


def _solvers() -> Iterator[Finding]:
    """Solve a linear program whose answer is known, through HiGHS, and load all solvers in one process."""
    script = (
        "import highspy, pulp\n"
        "from ortools.sat.python import cp_model\n"
        "m = pulp.LpProblem('check', pulp.LpMaximize); x = pulp.LpVariable('x', 0, 3); m += x\n"
        "m.solve(pulp.HiGHS(msg=False)); assert abs(x.value() - 3) < 1e-6\n"
    )
    yield _tried("solvers", script, "HiGHS, PuLP and OR-Tools load and solve", 'pip install "highspy<1.15"')


def _devices() -> Iterator[Finding]:
    names, driver = visible_gpus()
    memory = f"{format_bytes(total_memory())} of memory, {format_bytes(available_memory())} free"
    yield _finding("host", f"{num_cores()} cores, {memory}")
    if names:
        yield _finding("devices", f"{len(names)} x {', '.join(dict.fromkeys(names))}, driver {driver}")
        return
    means = "plans can be made for any cluster; `apply` and `profile` run on the cores of this machine, over gloo"
    fix = "install a CUDA build of torch" if shutil.which("nvidia-smi") else ""
    yield _finding("devices", "no GPU that torch sees", means, fix)


def _backends() -> Iterator[Finding]:
    """Sum a tensor in a group of one rank."""
    for backend in ("gloo", "nccl") if visible_gpus()[0] else ("gloo",):
        device = "cuda" if backend == "nccl" else "cpu"
        script = (
            "import tempfile, os, torch, torch.distributed as dist\n"
            "path = os.path.join(tempfile.mkdtemp(), 'store')\n"
            f"dist.init_process_group('{backend}', store=dist.FileStore(path, 1), rank=0, world_size=1)\n"
            f"t = torch.ones(2, device='{device}'); dist.all_reduce(t); assert t.sum().item() == 2\n"
            "dist.destroy_process_group()\n"
        )
        fix = "name the network interface: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME"
        yield _tried(backend, script, "a group sums a tensor", fix)


def _links() -> Iterator[Finding]:
    up = [name for name, link in psutil.net_if_stats().items() if link.isup and name != "lo"]
    rdma = Path("/sys/class/infiniband")
    cards = sorted(card.name for card in rdma.iterdir()) if rdma.is_dir() else []
    networks = f"interfaces {', '.join(up) or 'none but loopback'}; RDMA {', '.join(cards) or 'none'}"
    yield _finding("network", networks, "" if up else "jobs over several nodes cannot meet")


def _folders() -> Iterator[Finding]:
    shared = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    means = "ranks exchange through it; with little of it jobs fail with a bus error" if shared < GIB // 4 else ""
    yield _finding("/dev/shm", f"{format_bytes(shared)} free", means, "docker run --shm-size=8g")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    place = next((folder for folder in (cache, *cache.parents) if folder.exists()), cache)
    means = "not writable: this machine is measured again for every plan with --cluster local"
    yield _finding("cache", str(cache / "meshwright"), "" if os.access(place, os.W_OK) else means, "set XDG_CACHE_HOME")


def _compiler() -> Iterator[Finding]:
    compiler = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    means = "" if compiler else "torch.compile does not work on CPUs"
    yield _finding("compiler", compiler or "no C++ compiler", means)


_CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    _python, _packages, _solvers, _devices, _backends, _links, _folders, _compiler,
)  # fmt: skip


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _tried(subject: str, script: str, works: str, fix: str) -> Finding:
    """Run a script in a process of its own: what breaks there breaks nothing here."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", script]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=GROUP_TIMEOUT_S, cwd=folder)
        except subprocess.TimeoutExpired:
            silence = f"no answer in {GROUP_TIMEOUT_S} s"
            return Finding(subject=subject, status="broken", found=silence, means="it hangs", help=fix)
    if done.returncode == 0:
        return _finding(subject, works)
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return Finding(subject=subject, status="broken", found="it fails", means=last[:200], help=fix)
