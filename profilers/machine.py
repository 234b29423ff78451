"""What this machine is, found out without importing torch: its identity, its cores and its memory.

Limits of a container count as the machine: a cgroup of two cores and 8 GiB on a large server is a machine of that size.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import psutil

from ..schema.base import shown
from ..schema.errors import ConfigError, MeshwrightError
from ..schema.profile import Machine
from ..schema.units import GIB, format_bytes

MIN_MEMORY_PER_RANK = GIB
"""A rank holds torch (about 0.3 GiB) and measures on buffers of some hundred MiB."""

MIN_ADDRESSES_PER_RANK = 3 * GIB // 2
"""Libraries of torch and stacks of threads, 0.75 GiB on a CPU, and as much for buffers."""

_CGROUPS = Path("/sys/fs/cgroup")
_PROCESS_CGROUPS = Path("/proc/self/cgroup")


def identify(num_ranks: int | None = None) -> Machine:
    """Return the identity of this machine when ``num_ranks`` processes share it.

    Args:
        num_ranks: default one for each GPU; without GPUs one for each core, fewer where they had less than 2 GiB each.
    """
    if num_ranks is not None and (type(num_ranks) is not int or num_ranks < 1):
        raise ConfigError(f"the number of ranks must be a whole number of at least 1, not {num_ranks!r}")
    gpus, driver = visible_gpus()
    memory = total_memory()
    if gpus:
        ranks = len(gpus) if num_ranks is None else num_ranks
        if ranks > len(gpus):
            raise ConfigError(f"{ranks} ranks need as many GPUs, here are {len(gpus)}", help=f"local:{len(gpus)}")
        device = ", ".join(dict.fromkeys(gpus[:ranks]))
    else:
        cores = num_cores()
        ranks = max(1, min(cores, memory // (2 * GIB))) if num_ranks is None else num_ranks
        device, driver = f"{cpu_name()}, {cores} cores", f"{ranks} ranks on {cores} cores"
    check_memory(memory, ranks)
    return Machine(
        device=device,
        num_devices=ranks,
        host_memory_bytes=memory,
        backend="nccl" if gpus else "gloo",
        torch=version("torch"),
        python=platform.python_version(),
        driver=driver,
    )


def check_memory(memory_bytes: int, num_ranks: int) -> None:
    """Refuse more ranks than the memory carries."""
    max_ranks = memory_bytes // MIN_MEMORY_PER_RANK
    if num_ranks > max_ranks:
        needed = format_bytes(MIN_MEMORY_PER_RANK)
        raise ConfigError(
            f"{num_ranks} ranks share {format_bytes(memory_bytes)} of host memory; each needs {needed}",
            help=f"use at most {max_ranks} ranks" if max_ranks else "free some memory",
        )


def require_free_memory(memory_bytes: int, num_ranks: int | None, *, of_process_bytes: int = sys.maxsize) -> None:
    """Refuse to begin while memory is nearly full; a condition of the moment, unlike `check_memory` of what the machine has."""
    ranks = num_ranks or 1
    if memory_bytes // ranks < MIN_MEMORY_PER_RANK:
        raise MeshwrightError(
            f"memory is nearly full: {format_bytes(memory_bytes)} of host memory are free, measuring with {ranks} "
            f"{'rank' if ranks == 1 else 'ranks'} needs {format_bytes(ranks * MIN_MEMORY_PER_RANK)}",
            help="end what uses the memory" + ("" if ranks == 1 else ", or measure with fewer ranks (--ranks)"),
        )
    if of_process_bytes < MIN_ADDRESSES_PER_RANK:
        raise MeshwrightError(
            f"the limit on address space leaves {format_bytes(of_process_bytes)} to a process; a rank needs "
            f"{format_bytes(MIN_ADDRESSES_PER_RANK)} to load torch and to measure",
            help="raise the limit (ulimit -v)",
        )


def busy_fraction() -> float:
    """Return the share of the machine's cores that other work uses now, 0..1, watched for a fifth of a second."""
    return float(psutil.cpu_percent(interval=0.2)) / 100


def visible_gpus() -> tuple[tuple[str, ...], str]:
    """Return the names of the GPUs that torch will see, in its order, and the driver's version; empty without GPUs.

    A ROCm build of torch has to be imported for the answer; a CUDA build is answered by nvidia-smi.
    """
    build = version("torch")
    if "+cpu" in build:
        return (), ""
    if "+rocm" in build:
        import torch

        names = tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        return names, f"rocm {torch.version.hip}"
    rows = _nvidia_smi()
    indices = _visible_indices(os.environ.get("CUDA_VISIBLE_DEVICES"), [row[0] for row in rows])
    return tuple(rows[i][1] for i in indices), rows[0][2] if rows else ""


def gpu_state() -> dict[str, float]:
    """Return clocks and power limit of the first GPU as it runs now: fields of a ProfileProvenance, none without nvidia-smi."""
    query = {"clock_mhz": "clocks.sm", "memory_clock_mhz": "clocks.mem", "power_limit_w": "power.limit"}
    rows = _nvidia_smi(tuple(query.values()), units=False)
    numbers = zip(query, rows[0], strict=True) if rows else ()
    return {name: float(text) for name, text in numbers if re.fullmatch(r"[0-9.]+", text) and float(text) > 0}


def _nvidia_smi(fields: Sequence[str] = ("uuid", "name", "driver_version"), *, units: bool = True) -> list[list[str]]:
    """Return one row of fields for each GPU; none where there is no driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-gpu={','.join(fields)}", f"--format=csv,noheader{'' if units else ',nounits'}"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):  # a leftover program without its driver means: no GPU here
        return []
    rows = [[field.strip() for field in line.split(",")] for line in answer.stdout.splitlines()]
    return [row for row in rows if len(row) == len(fields)]


def _visible_indices(visible: str | None, uuids: list[str]) -> list[int]:
    """Return the visible GPUs by CUDA's rule: indices or beginnings of UUIDs, of which the first wrong one ends the list."""
    if visible is None:
        return list(range(len(uuids)))
    indices: list[int] = []
    for entry in (part.strip() for part in visible.split(",")):
        by_uuid = [i for i, uuid in enumerate(uuids) if entry and uuid.startswith(entry)]
        index = int(entry) if re.fullmatch(r"[0-9]{1,6}", entry) else next(iter(by_uuid), -1)
        if not 0 <= index < len(uuids) or index in indices:
            break
        indices.append(index)
    return indices


def cpu_name() -> str:
    """Return the model name of the processor."""
    match = re.search(r"^model name\s*:\s*(.+)$", _text(Path("/proc/cpuinfo")), re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine() or "cpu"


def num_cores() -> int:
    """Return the cores this process may use: its affinity, and entire cores of the cgroup's quota."""
    cores: int = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas: list[float] = [cores]
    for folder in _cgroup_folders("cpu"):
        version_2 = re.match(r"(\d+) (\d+)", _text(folder / "cpu.max"))
        quota, period = map(int, version_2.groups()) if version_2 else (
            _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us"),
        )  # fmt: skip
        quotas += [quota / period] if quota and period else []
    return max(1, int(min(quotas)))


def total_memory() -> int:
    """Return the bytes of host memory: the machine's or the cgroup's limit."""
    return int(min([psutil.virtual_memory().total, *(limit for limit, _ in _memory_limits())]))


def available_memory() -> int:
    """Return the bytes of host memory that can be had now without swapping."""
    return int(min([psutil.virtual_memory().available, *(max(0, limit - used) for limit, used in _memory_limits())]))


def memory_left_to_process() -> int:
    """Return the bytes of address space that this process may still take before its own limit (``ulimit -v``)."""
    try:
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    except ImportError:  # Windows
        return sys.maxsize
    return sys.maxsize if limit == resource.RLIM_INFINITY else max(0, int(limit - psutil.Process().memory_info().vms))


def process_age_s() -> float:
    """Return the seconds since this process was started, imports included; 0 where the system does not say."""
    uptime, fields = _text(Path("/proc/uptime")).split(), _text(Path("/proc/self/stat")).rpartition(")")[2].split()
    if not uptime or len(fields) < 20:
        return 0.0
    return max(0.0, float(uptime[0]) - int(fields[19]) / os.sysconf("SC_CLK_TCK"))


def pace(elapsed_s: float, cpu_s: float) -> float:
    """Return how many times longer something took than the processor needed for it: 1 on an idle machine, more on a busy one."""
    return max(1.0, elapsed_s / cpu_s) if cpu_s > 0 else 1.0


def _memory_limits() -> list[tuple[int, int]]:
    """Return (limit, used) of each cgroup around this process; page cache that can be dropped does not count as used."""
    limits = []
    for folder in _cgroup_folders("memory"):
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
        cache = re.search(r"^(?:total_)?inactive_file (\d+)$", _text(folder / "memory.stat"), re.MULTILINE)
        if limit:
            limits.append((limit, max(0, used - (int(cache[1]) if cache else 0))))
    return limits


def _cgroup_folders(controller: str) -> list[Path]:
    """Return the folders of this process's cgroup of a controller and of all that enclose it, version 2 and version 1."""
    folders: dict[Path, None] = {}
    for line in _text(_PROCESS_CGROUPS).splitlines():
        _, controllers, path = ([*line.split(":", 2), "", ""])[:3]
        if controllers and controller not in controllers.split(","):
            continue
        root = _CGROUPS / controller if controllers else _CGROUPS
        inside = root / path.lstrip("/")
        folders |= dict.fromkeys(folder for folder in (inside, *inside.parents) if folder.is_relative_to(root))
    return list(folders)


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:  # no such controller here, or not Linux
        return ""


def cpu_rank_environment() -> dict[str, str]:
    """Return variables, unless the user set them, by which memory that torch frees on the CPU stays with the process.

    Otherwise glibc returns every large tensor to the kernel and faults its pages in again: a step of SmolLM2-135M on two ranks
    took 7.0 s with glibc's defaults, 5.5 s without thresholds for mmap and trimming. One arena for all threads: with several, each
    keeps what its thread freed, and a 35 M model under zero 1 took 1.8 times the predicted memory instead of 1.1 times.
    """
    never = str(2**34)
    defaults = {"MALLOC_MMAP_THRESHOLD_": never, "MALLOC_TRIM_THRESHOLD_": never, "MALLOC_ARENA_MAX": "1"}
    return {name: os.environ.get(name, value) for name, value in defaults.items()}


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has an address."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address.partition("%")[0] for entry in entries):
            return name
    return None


def addresses_of(interface: str) -> list[str]:
    """Return the addresses of an interface that other machines can name, those of IPv4 first."""
    entries = psutil.net_if_addrs().get(interface, [])
    named = [e for e in entries if e.family in (socket.AF_INET, socket.AF_INET6) and not e.address.startswith("fe80")]
    return [entry.address for entry in sorted(named, key=lambda entry: entry.family != socket.AF_INET)]


def first_host(nodes: str) -> str:
    """Return the first of the names that a list of Slurm's stands for: ``gpu[003-007,12],login`` begins with gpu003."""
    first = re.split(r",(?![^\[]*\])", nodes)[0]
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)


def slurm_number(variables: Mapping[str, str], name: str, *, advice: str | None = None) -> int:
    """Return a whole number that Slurm has set in the environment of a step.

    Raises:
        ConfigError: it is none, or not there.
    """
    text = variables.get(name, "")
    if not re.fullmatch("[0-9]{1,18}", text):
        raise ConfigError(f"{name} = {shown(text)} in a step of Slurm's: must be a whole number", help=advice)
    return int(text)
