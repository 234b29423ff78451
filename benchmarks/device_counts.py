"""Plans for every number of devices: how many have one, how much slower one is than the next smaller count, and what it costs.

    python benchmarks/device_counts.py [--out benchmarks/device_counts.json] [--only PREFIX ...] [--stride N] [--within A B]

A batch of 1,024 sequences of 8,192 tokens. ``nodes``: H100 in nodes of eight, 1 to 64 of them. ``domain``: 2 to 512 H100 that all
reach each other over NVLink, so that counts differ in nothing but their factors. A case is slower than the one before it by the
seconds that its plan predicts. ``sizes`` are those of a search for the cheapest: how many have no layout.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.planner import plan
from meshwright.planner.request import PlanRequest
from meshwright.planner.space import build_space
from meshwright.schema import ClusterSpec, ConfigError, InfeasibleError, ModelSpec, Workload

BATCH, SEQ_LEN = 1024, 8192
OUT = Path(__file__).resolve().parent / "device_counts.json"


class Case(NamedTuple):
    """Counts of one form: ``clusters`` names that of a count."""

    model: str
    engine: str
    clusters: str
    counts: range


NODES = range(8, 513, 8)
CASES = {
    "nodes, llama-3.1-8b": Case("llama-3.1-8b", "fsdp2", "{n}xH100-SXM-80GB", NODES),
    "domain, llama-3.1-8b": Case("llama-3.1-8b", "fsdp2", "1x{n}xH100-SXM-80GB", range(2, 513)),
    "nodes, llama-3.1-70b": Case("llama-3.1-70b", "fsdp2", "{n}xH100-SXM-80GB", range(32, 513, 24)),
    "nodes, mixtral-8x7b": Case("mixtral-8x7b", "fsdp2", "{n}xH100-SXM-80GB", range(16, 513, 24)),
    "nodes, llama-3.1-8b, megatron": Case("llama-3.1-8b", "megatron", "{n}xH100-SXM-80GB", range(8, 513, 24)),
}


def measured(case: Case, stride: int, within: tuple[int, int]) -> dict[str, Any]:
    """Plan every count of a case, or those within bounds."""
    rows: list[dict[str, Any]] = []
    start = time.process_time()
    work = Workload(seq_len=SEQ_LEN, global_batch_size=BATCH, engine=case.engine)
    for n in [n for n in case.counts[::stride] if within[0] <= n <= within[1]]:
        begun = time.process_time()
        row: dict[str, Any] = {"devices": n}
        try:
            found = plan(case.model, case.clusters.format(n=n), work)
            row |= {
                "used": found.cluster.num_devices,
                "step_s": found.estimate.step_time_s,
                "layout": str(found.layout),
            }
        except (ConfigError, InfeasibleError) as error:
            row["lacks"] = error.message
        rows.append(row | {"cpu_s": round(time.process_time() - begun, 3)})
    planned = [row for row in rows if "step_s" in row]
    slower = [(b["step_s"] / a["step_s"] - 1, b["devices"]) for a, b in itertools.pairwise(planned)]
    return {
        "counts": len(rows), "planned": len(planned), "idle": sum(row["used"] < row["devices"] for row in planned),
        "slower": sum(part > 1e-9 for part, _ in slower), "largest_slowdown": max(slower, default=(0.0, 0))[0],
        "at": max(slower, default=(0.0, 0))[1], "cpu_s": round(time.process_time() - start, 1), "rows": rows,
    }  # fmt: skip


def sizes_without_layout(engine: str, batch: int = BATCH, model: str = "llama-3.1-8b") -> dict[str, int]:
    """Count the sizes of 1 to 64 nodes of eight that have no layout at all."""
    spec, without = ModelSpec.named(model), 0
    for n in NODES:
        work = Workload(seq_len=SEQ_LEN, global_batch_size=batch, engine=engine)
        try:
            build_space(PlanRequest.create(spec, ClusterSpec.parse(f"{n}xH100-SXM-80GB"), work))
        except ConfigError:
            without += 1
    return {"sizes": len(NODES), "no layout": without}


def main() -> None:
    """Run the cases and write the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--only", nargs="*", default=[""])
    parser.add_argument("--stride", type=int, default=1, help="plan every N-th count only")
    parser.add_argument("--within", type=int, nargs=2, default=(2, 512), help="the first and the last count")
    options = parser.parse_args()
    results = json.loads(options.out.read_text()) if options.out.exists() else {}
    for name, case in CASES.items():
        if not name.startswith(tuple(options.only)):
            continue
        key = name if tuple(options.within) == (2, 512) else f"{name}, {options.within[0]} to {options.within[1]}"
        results[key] = measured(case, options.stride, tuple(options.within))
        print(key, {name: value for name, value in results[key].items() if name != "rows"}, flush=True)
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    if "sizes".startswith(tuple(options.only)):
        results["sizes"] = {engine: sizes_without_layout(engine) for engine in ("fsdp2", "megatron")}
        print("sizes", results["sizes"])
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
