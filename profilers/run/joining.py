"""How a rank joins the others: where it stands among them, and whether there is memory to begin."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist

from ...schema.base import write_atomically
from ...schema.errors import MeshwrightError
from ...schema.units import GIB, format_bytes
from ..machine import num_cores
from ..measure.timing import Bench
from .task import Place, Task

MIN_FREE_BYTES = GIB // 2
"""Of a rank, beyond what the interpreter already holds: buffers out of cache need some hundred MiB."""


def join(task: Task) -> tuple[Place, torch.device]:
    """Meet the other ranks.

    Raises:
        MeshwrightError: nodes differ in their number of ranks.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")))
    on_gpu = task.backend == "nccl"
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    options = (
        {} if not task.folder else {"store": _store(Path(task.folder), rank, size), "rank": rank, "world_size": size}
    )
    timeout = timedelta(seconds=300)
    dist.init_process_group(task.backend, timeout=timeout, device_id=device if on_gpu else None, **options)
    bench = Bench(device, task.sample_s)
    node_key = os.environ.get("GROUP_RANK", os.environ.get("SLURM_NODEID", socket.gethostname()))
    nodes = [(key, len(list(same))) for key, same in groupby(bench.gather(node_key))]
    if len({count for _, count in nodes}) > 1 or len({key for key, _ in nodes}) < len(nodes):
        raise MeshwrightError(
            f"the {size} ranks are not spread evenly over the nodes, node by node: "
            + ", ".join(f"{count} on node {key}" for key, count in nodes),
            help="start the same number on each node, one for each device",
        )
    each = nodes[0][1]
    if not on_gpu:
        torch.set_num_threads(task.threads or max(1, num_cores() // each))
    place = Place(rank=rank, local_rank=local_rank, node=rank // each, num_nodes=len(nodes), ranks_per_node=each)
    return place, device


def _store(folder: Path, rank: int, size: int) -> dist.Store:
    """Where the ranks of one launcher meet: at a free port that the first one has noted in its folder."""
    note = folder / "port.txt"
    if rank == 0:
        store = dist.TCPStore("localhost", 0, size, is_master=True, wait_for_workers=False)
        write_atomically(note, str(store.port))
        return store
    while not note.exists():
        time.sleep(0.01)
    return dist.TCPStore("localhost", int(note.read_text()), size, is_master=False)


def require_memory(bench: Bench) -> None:
    """Refuse to begin where memory is nearly full.

    Raises:
        MeshwrightError: with the rank that has least.
    """
    free = [int(value) for value in bench.gather(bench.free_bytes())]
    if min(free) < MIN_FREE_BYTES:
        kind = "device" if bench.device.type == "cuda" else "host"
        raise MeshwrightError(
            f"too little memory is free to measure: {format_bytes(min(free))} of {kind} memory for rank "
            f"{free.index(min(free))}, {format_bytes(MIN_FREE_BYTES)} are needed",
            help="end what uses the memory, or measure with fewer ranks (--ranks)",
        )
