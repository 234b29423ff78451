"""One rank of a measurement: ``python -m meshwright.profilers.worker TASK``, started by torchrun's elastic agent.

A program of its own and not a function for multiprocessing: spawn imports the user's main module again (fatal where it
has no ``if __name__ == "__main__"`` or is a notebook), and a fork of a process that has used OpenMP can hang.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

from ..schema.base import write_atomically
from .compute import CPU_LAYERS, GPU_LAYERS, measure_matmuls, measure_memory_bandwidth
from .links import SIZES, measure_collectives
from .timing import Bench, quietest

ORPHAN_EXIT_CODE = 3


@dataclasses.dataclass(frozen=True)
class Task:
    """What the launcher tells every rank.

    Attributes:
        folder: where each rank leaves ``rank<N>.json``.
        launcher_pid: the rank ends when this process does.
        memory_bytes: host memory of this rank; on a GPU the device's own counts.
        num_rounds: how often everything is measured; the quietest time of each point counts.
        sample_s: time for the samples of one point in one round.
        compute_s, links_s: after this time in one round no further point is begun.
        num_layers, num_sizes: how many of the layers and message sizes to measure.
    """

    folder: str
    launcher_pid: int
    backend: str
    threads: int
    memory_bytes: int
    num_rounds: int = 2
    sample_s: float = 0.02
    compute_s: float = 2.0
    links_s: float = 2.0
    num_layers: int = len(CPU_LAYERS)
    num_sizes: int = len(SIZES)


def main() -> None:
    """Measure and leave the results in the task's folder."""
    task = Task(**json.loads(sys.argv[1]))
    threading.Thread(target=_end_with, args=(task.launcher_pid, task.folder), daemon=True).start()
    from torch.distributed.elastic.multiprocessing.errors import record  # takes seconds: the launcher may end meanwhile

    record(_run)(task)
    # Not the interpreter's shutdown: gloo's threads were seen to abort it, "terminate called without an active exception".
    os._exit(0)


def _end_with(launcher_pid: int, folder: str) -> None:
    """End this process when its launcher is gone, also when it was killed and could neither say so nor clean up."""
    while os.getppid() == launcher_pid:
        time.sleep(0.2)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(ORPHAN_EXIT_CODE)


def _run(task: Task) -> None:
    import torch
    import torch.distributed as dist

    local_rank = int(os.environ["LOCAL_RANK"])
    on_gpu = task.backend == "nccl"
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.set_num_threads(task.threads)
    dist.init_process_group(task.backend, timeout=timedelta(seconds=120), device_id=device if on_gpu else None)
    bench = Bench(device, task.sample_s)
    memory = torch.cuda.get_device_properties(device).total_memory if on_gpu else task.memory_bytes
    layers = (GPU_LAYERS if on_gpu else CPU_LAYERS)[: task.num_layers]
    sizes = SIZES[: task.num_sizes] if dist.get_world_size() > 1 else ()
    streams, matmuls, collectives = [], [], []
    with torch.no_grad():
        for _ in range(task.num_rounds):
            streams.append(measure_memory_bandwidth(bench, memory))
            bench.start_budget(task.compute_s)
            matmuls.append(measure_matmuls(bench, layers))
            bench.start_budget(task.links_s)
            collectives.append(measure_collectives(bench, sizes))
    result = {
        "device_memory_bytes": memory,
        "memory_bandwidth_bytes_per_s": max(streams),
        "matmuls": quietest(matmuls),
        "collectives": quietest(collectives),
    }
    write_atomically(Path(task.folder) / f"rank{dist.get_rank()}.json", json.dumps(result))
    bench.agree(0.0)  # nobody leaves while another rank still measures


if __name__ == "__main__":
    main()
