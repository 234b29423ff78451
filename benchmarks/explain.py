"""How long `explain` takes: CPU seconds of making the plan and of explaining it, each case in a process of its own.

    python benchmarks/explain.py [--out benchmarks/explain.json]

Imports and the reading of the plan do not count.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from meshwright.planner import explain, plan
from meshwright.schema import ClusterSpec, ModelSpec, Workload

CASES: dict[str, tuple[str, str, int, float]] = {
    "llama-3.1-70b on 64": ("llama-3.1-70b", "64xH100-SXM-80GB", 128, 3),
    "llama-3.1-405b on 16384": ("llama-3.1-405b", "16384xH100-SXM-80GB", 2048, 8),
    "llama-3.1-405b on 98304": ("llama-3.1-405b", "98304xH100-SXM-80GB", 24576, 15),
}
"""Model, cluster, sequences of 8,192 tokens in a step, and the goal in seconds."""


def measure(name: str) -> dict[str, Any]:
    """Return the figures of one case."""
    model, cluster, batch, goal_s = CASES[name]
    workload = Workload(seq_len=8192, global_batch_size=batch)
    start_s = time.process_time()
    made = plan(ModelSpec.named(model), ClusterSpec.parse(cluster), workload, time_limit_s=600)
    planned_s = time.process_time()
    found = explain(made, time_limit_s=600)
    explained_s = time.process_time()
    return {
        "plan_cpu_s": round(planned_s - start_s, 2),
        "explain_cpu_s": round(explained_s - planned_s, 2),
        "goal_s": goal_s,
        "layout": str(made.layout),
        "searched": sum(value.best_s is not None for value in found.worth),
    }


def main() -> None:
    """Print one line for each case, and write them all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        sys.stdout.write(json.dumps(measure(options.one)))
        return
    figures = {}
    for name in CASES:
        done = subprocess.run([sys.executable, __file__, "--one", name], capture_output=True, text=True, check=True)
        figures[name] = json.loads(done.stdout)
        sys.stdout.write(f"{name}: {done.stdout}\n")
    if options.out is not None:
        options.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
