"""Layouts estimated per second on one core: time and memory of entire spaces in one vectorised pass.

    python benchmarks/estimate_speed.py OUT.json

Each case builds the space of a model on a cluster, then bounds all its layouts (cost_models.stage.bounds: exact without a pipeline)
and estimates a sample of them exactly, stage by stage. Best of several repeats: the machine may be shared. Nothing in it
starts threads.
"""

from __future__ import annotations

import json
import platform
import time
from argparse import ArgumentParser
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from meshwright.cost_models.stage.bounds import memory_bounds, time_bounds
from meshwright.cost_models.stage.table import CostTable
from meshwright.planner.expand import expand
from meshwright.planner.request import PlanRequest
from meshwright.planner.space import build_space
from meshwright.schema import ClusterSpec, ModelSpec, Workload

REPEATS = 5
SAMPLE = 200


class Case(NamedTuple):
    """A model, a cluster and a batch."""

    model: str
    cluster: str
    global_batch_size: int
    seq_len: int


CASES = (
    Case("llama-3.1-8b", "8xH100-SXM-80GB", 128, 8192),
    Case("llama-3.1-70b", "256xH100-SXM-80GB", 1024, 8192),
    Case("llama-3.1-405b", "16384xH100-SXM-80GB", 2048, 8192),
    Case("mixtral-8x7b", "512xH100-SXM-80GB", 4096, 4096),
)


def best_of(function: Callable[[], object]) -> float:
    """Return the lowest seconds of a call over REPEATS."""
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def measure(case: Case) -> dict[str, object]:
    """Return the layouts per second of one case."""
    model, cluster = ModelSpec.named(case.model), ClusterSpec.parse(case.cluster)
    workload = Workload(seq_len=case.seq_len, global_batch_size=case.global_batch_size)
    layouts = build_space(PlanRequest(model, cluster, workload)).batch

    def bound() -> None:
        costs = CostTable.from_layouts(model, workload, cluster, layouts)
        time_bounds(costs)
        memory_bounds(costs)

    bound_s = best_of(bound)
    costs = CostTable.from_layouts(model, workload, cluster, layouts)
    sample = range(0, len(layouts), max(1, len(layouts) // SAMPLE))
    exact_s = best_of(lambda: [expand(costs, idx) for idx in sample])
    return {
        **case._asdict(),
        "layouts": len(layouts),
        "bounded_per_s": round(len(layouts) / bound_s),
        "estimated_with_stages_per_s": round(len(sample) / exact_s),
    }


def main() -> None:
    """Measure every case, then write the file."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    report = {
        "command": "python benchmarks/estimate_speed.py OUT.json",
        "cpu": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "cases": [measure(case) for case in CASES],
    }
    out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
