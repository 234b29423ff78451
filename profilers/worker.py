"""One rank of a measurement: ``python -m meshwright.profilers.worker TASK``, started by torchrun's elastic agent.

A program of its own and not a function for multiprocessing: spawn would import the user's main module again (a script without
``if __name__ == "__main__"`` measures itself for ever), and a fork of a process that has used OpenMP hangs.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from ..schema.base import write_atomically
from .compute import CPU_LAYERS, GPU_LAYERS, measure_matmuls, measure_memory_bandwidth
from .links import SIZES, measure_collectives
from .timing import Bench

ORPHAN_EXIT_CODE = 3


@dataclasses.dataclass(frozen=True)
class Task:
    """What the launcher tells every rank.

    Attributes:
        folder: where each rank leaves ``rank<N>.json``.
        launcher_pid: the rank ends when this process does.
        memory_bytes: host memory of this rank; on a GPU the device's own counts.
        sample_s: time for the samples of one point.
        compute_s, links_s: after this time no further point is begun.
        num_layers, num_sizes: how many of the layers and message sizes to measure.
    """

    folder: str
    launcher_pid: int
    backend: str
    threads: int
    memory_bytes: int
    sample_s: float = 0.03
    compute_s: float = 4.0
    links_s: float = 4.0
    num_layers: int = len(CPU_LAYERS)
    num_sizes: int = len(SIZES)


def main() -> None:
    """Measure and leave the results in the task's folder."""
    from torch.distributed.elastic.multiprocessing.errors import record

    task = Task(**json.loads(sys.argv[1]))
    threading.Thread(target=_end_with, args=(task.launcher_pid,), daemon=True).start()
    record(_run)(task)
    # Without the interpreter's shutdown: gloo's threads were seen to abort it ("terminate called without an active exception").
    os._exit(0)


def _end_with(launcher_pid: int) -> None:
    """End this process when its launcher is gone, also when the launcher was killed and could not say so."""
    while os.getppid() == launcher_pid:
        time.sleep(0.2)
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
    result: dict[str, Any] = {"device_memory_bytes": memory}
    with torch.no_grad():
        result["memory_bandwidth_bytes_per_s"] = measure_memory_bandwidth(bench, memory)
        bench.start_budget(task.compute_s)
        result["matmuls"] = measure_matmuls(bench, (GPU_LAYERS if on_gpu else CPU_LAYERS)[: task.num_layers])
        bench.start_budget(task.links_s)
        alone = dist.get_world_size() == 1
        result["collectives"] = [] if alone else measure_collectives(bench, SIZES[: task.num_sizes])
    write_atomically(Path(task.folder) / f"rank{dist.get_rank()}.json", json.dumps(result))
    bench.agree(0.0)  # nobody leaves while another rank still measures


if __name__ == "__main__":
    main()
