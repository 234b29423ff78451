"""Compare the ranks of a job before it begins: for some seconds each multiplies, reads memory and exchanges with two others.

``python -m meshwright.profilers.run.preflight TASK.json`` is one rank, in an environment with torchrun's variables; the ranks find
each other in the job's store, where the first one leaves the report. A slow rank's repetitions are beyond those of its peers by 5 %
and three median absolute deviations (comparison.py).
"""

from __future__ import annotations

import os
import socket
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from ...schema.base import Document, PositiveFloat, PositiveInt
from ...schema.preflight import PreflightReport
from ..machine import num_cores
from ..measure.links import tournament
from ..measure.timing import Bench
from .across_ranks import COMPARISON, rank_reports
from .comparison import Comparison, What, Work, allowed_cores, exchange, local_cores, product, stream
from .processes import serve_rank

OUTLIER_RATIO = 1.05
"""Of a rank's time over its peers'; a job waits for its slowest rank in every step."""

REPORT_KEY = "meshwright/preflight/report"
MIN_REPETITIONS, _BATCH = 24, 4
"""Of each work, however long they take: fewer say little about chance. So many are made between two looks at the clock."""


class PreflightTask(Document):
    """What every rank is given; ``nodes``: how many ranks each has."""

    backend: str
    seconds: PositiveFloat
    nodes: tuple[PositiveInt, ...]


def compare_ranks(task: PreflightTask) -> None:
    """Take part as one rank; the first leaves the report in the store."""
    rank, local_rank, size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    on_gpu = task.backend == "nccl"
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, num_cores() // size))
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*place, is_master=False, wait_for_workers=False)
    dist.init_process_group(
        task.backend,
        store=dist.PrefixStore("meshwright/preflight", store),
        rank=rank,
        world_size=sum(task.nodes),
        timeout=timedelta(seconds=60 + 10 * task.seconds),
        device_id=device if on_gpu else None,
    )
    report = _compared(Bench(device, 0.0, ranks_per_node=size), task, local_rank, size)
    if rank == 0:
        store.set(REPORT_KEY, report.model_dump_json())
    dist.barrier()


def _compared(bench: Bench, task: PreflightTask, local_rank: int, local_size: int) -> PreflightReport:
    """Return the report, on every rank."""
    on_gpu = bench.device.type == "cuda"
    cores = frozenset[int]() if on_gpu else local_cores(allowed_cores(), local_rank, local_size)
    works: dict[What, Work] = {"compute": product(bench), "memory": stream(bench)}
    if sum(task.nodes) > 2:  # of two nobody could tell which one is slow
        works["link"] = exchange(bench, rounds_of_two(task.nodes))
    comparison = Comparison(bench, cores, works)
    with torch.no_grad():
        shares_cores = not on_gpu and not comparison.repeat(1)
        if shares_cores:
            bench.sample_clock = time.process_time
        end = time.monotonic() + task.seconds
        count = 1 - (on_gpu or shares_cores)
        while count < MIN_REPETITIONS or bench.agree_min(end - time.monotonic()) > 0:
            count += _BATCH
            if on_gpu or shares_cores:
                comparison.repeat_unpinned(_BATCH)
            else:
                comparison.repeat(_BATCH)
    name = torch.cuda.get_device_name(bench.device) if on_gpu else "cpu"
    timed = [point for point in comparison.points() if point["repetition"]]  # the first one warms up
    by_rank = [{COMPARISON: points} for points in bench.gather(timed)]
    nodes = [node for node, num_ranks in enumerate(task.nodes) for _ in range(num_ranks)]
    names = bench.gather((name, socket.gethostname()))
    hosts = [names[nodes.index(node)][1] for node in range(len(task.nodes))]
    ranks, slow = rank_reports(by_rank, [name for name, _ in names], nodes, hosts, limit=OUTLIER_RATIO)
    return PreflightReport(
        seconds=task.seconds, repetitions=count, hosts=tuple(hosts), shares_cores=shares_cores, ranks=ranks, slow=slow
    )  # fmt: skip


def rounds_of_two(nodes: tuple[int, ...]) -> list[list[tuple[int, int]]]:
    """Return rounds of pairs of ranks by which each has two partners, or all there are.

    Of three nodes and more they are counterparts on other nodes; else they are on the same node, or nobody could tell which
    of two nodes is slow.
    """
    size = nodes[0]
    if len(nodes) > 2 or size == 1:
        rounds = tournament(len(nodes))
        return [[(a * size + i, b * size + i) for a, b in pairs for i in range(size)] for pairs in _two(rounds)]
    return [
        [(node * size + a, node * size + b) for a, b in pairs for node in range(len(nodes))]
        for pairs in _two(tournament(size))
    ]


def _two(rounds: list[list[tuple[int, int]]]) -> list[list[tuple[int, int]]]:
    """Return as many rounds as give everybody two partners; with an odd number of players one rests in each."""
    return rounds[: 2 + len(rounds) % 2]


def main() -> None:
    """Do the task named on the command line in this process."""
    compare_ranks(PreflightTask.load(sys.argv[1]))


if __name__ == "__main__":
    serve_rank(main)
