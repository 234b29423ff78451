"""The search at the size of its goals: seconds, layouts, gap and memory of `plan`, of its sisters, and how they grow.

    python benchmarks/search.py [--out benchmarks] [--only PREFIX ...] [--no-tests] [--no-growth]

Of `plan` also the answers on the way: after how many CPU seconds Ctrl-C would have given one within 5 and 1 % of the last.

Writes search.json (every figure), search.md (the goals next to them) and, where matplotlib is installed, search.svg (growth). Each
case runs in a separate process, so that its peak memory is not that of others; imports do not count, all after them does. Wall and
CPU seconds are both given: the machine may be shared, and nothing here starts threads. With --only, cases whose names
begin otherwise keep the figures that search.json has.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.planner import cheapest, pareto, plan
from meshwright.schema import ClusterSpec, ModelSpec, Offer, Workload
from meshwright.schema.units import GIB

TRILLION = "moe-1t"
ROOT = Path(__file__).resolve().parent.parent


class Case(NamedTuple):
    """What is planned; ``num_blocks`` and ``memory_gib`` stand in for the model's and the device's."""

    model: str
    cluster: str
    global_batch_size: int
    seq_len: int
    engine: str = "megatron"
    space: str = "full"
    what: str = "plan"
    num_blocks: int | None = None
    memory_gib: float | None = None


GOALS = {
    "llama-3.1-405b on 16384": Case("llama-3.1-405b", "16384xH100-SXM-80GB", 2048, 8192),
    "llama-3.1-405b on 16384 fsdp2": Case("llama-3.1-405b", "16384xH100-SXM-80GB", 2048, 8192, "fsdp2"),
    "deepseek-v3 on 2048": Case("deepseek-v3", "2048xH800-SXM-80GB", 15360, 4096),
    "deepseek-v3 on 2048 fsdp2": Case("deepseek-v3", "2048xH800-SXM-80GB", 15360, 4096, "fsdp2"),
    "1T MoE on 100000": Case(TRILLION, "100000xH100-SXM-80GB", 25000, 4096),
    "1T MoE on 100000 fsdp2": Case(TRILLION, "100000xH100-SXM-80GB", 25000, 4096, "fsdp2"),
    "1T MoE on 98304": Case(TRILLION, "98304xH100-SXM-80GB", 24576, 4096),
    "qwen3-235b on 512": Case("qwen3-235b-a22b", "512xH100-SXM-80GB", 1024, 4096),
    "qwen3-235b on 512 fsdp2": Case("qwen3-235b-a22b", "512xH100-SXM-80GB", 1024, 4096, "fsdp2"),
    "llama-3.1-70b on 64": Case("llama-3.1-70b", "64xH100-SXM-80GB", 128, 8192),
    "llama-3.1-70b on 64 fsdp2": Case("llama-3.1-70b", "64xH100-SXM-80GB", 128, 8192, "fsdp2"),
    "llama-3.1-70b on 64 what apply runs": Case("llama-3.1-70b", "64xH100-SXM-80GB", 128, 8192, "fsdp2", "runnable"),
    "llama-2-7b on 8": Case("llama-2-7b", "8xA100-SXM-40GB", 64, 8192, "fsdp2", "runnable", memory_gib=36),
    "llama-2-7b on 8 full space": Case("llama-2-7b", "8xA100-SXM-40GB", 64, 8192, "fsdp2", memory_gib=36),
    "cheapest of 1 to 64 nodes": Case(
        "llama-3.1-70b", "64x8xH100-SXM-80GB", 1024, 8192, "fsdp2", "runnable", what="cheapest"
    ),
    "pareto of llama-3.1-70b on 64": Case(
        "llama-3.1-70b", "64xH100-SXM-80GB", 128, 8192, "fsdp2", "runnable", what="pareto"
    ),
    "pareto of llama-3.1-70b on 64 megatron": Case("llama-3.1-70b", "64xH100-SXM-80GB", 128, 8192, what="pareto"),
}
DEVICES = (8, 32, 128, 512, 2048, 8192, 32768, 131072)
BLOCKS = (16, 32, 64, 128, 256, 512)
GROWTH = {
    **{
        f"devices deepseek-v2-lite megatron {n}": Case("deepseek-v2-lite", f"{n}xH100-SXM-80GB", max(n, 512), 4096)
        for n in DEVICES
    },
    **{
        f"devices llama-3.1-8b fsdp2 {n}": Case("llama-3.1-8b", f"{n}xH100-SXM-80GB", max(n, 512), 8192, "fsdp2")
        for n in DEVICES
    },
    **{
        f"layers llama-3.1-8b megatron {n}": Case("llama-3.1-8b", "512xH100-SXM-80GB", 512, 8192, num_blocks=n)
        for n in BLOCKS
    },
    **{
        f"layers llama-3.1-8b fsdp2 {n}": Case("llama-3.1-8b", "512xH100-SXM-80GB", 512, 8192, "fsdp2", num_blocks=n)
        for n in BLOCKS
    },
}
CASES = GOALS | GROWTH

TESTS = {
    "equality with enumeration": "tests/unit/planner/test_exhaustive.py",
    "published layer-wise plan": "tests/unit/planner/test_layer_wise_plan.py",
}


def model_of(case: Case) -> ModelSpec:
    """A catalogue model, perhaps with another number of blocks, or a mixture of experts of 1.0e12 parameters."""
    model = _trillion() if case.model == TRILLION else ModelSpec.named(case.model)
    if case.num_blocks is None:
        return model
    runs = (run.replace(count=case.num_blocks) if run.layer.kind == "block" else run for run in model.layers)
    return model.replace(name=f"{model.name}, {case.num_blocks} blocks", layers=tuple(runs))


def _trillion() -> ModelSpec:
    """DeepSeek-V3's blocks with 384 experts and 64 heads."""
    text = ModelSpec.named("deepseek-v3").model_dump(mode="json")

    def larger(node: object) -> object:
        if isinstance(node, list):
            return [larger(item) for item in node]
        if not isinstance(node, dict):
            return node
        node = {key: larger(value) for key, value in node.items()}
        changes = {"num_heads": 64, "num_kv_heads": 64, "num_experts": 384, "num_groups": 1, "top_groups": 1}
        return node | {key: value for key, value in changes.items() if key in node}

    return ModelSpec.model_validate(larger(text) | {"name": TRILLION})


def cluster_of(case: Case) -> ClusterSpec:
    """The cluster, with so much of each device's memory for a plan."""
    cluster = ClusterSpec.parse(case.cluster)
    if case.memory_gib is None:
        return cluster
    return cluster.replace(reserved_bytes=cluster.weakest_device.memory_bytes - int(case.memory_gib * GIB))


def measure(case: Case) -> dict[str, Any]:
    """Seconds, memory and the certificate of one case."""
    start, cpu_start = time.perf_counter(), time.process_time()
    model, cluster = model_of(case), cluster_of(case)
    workload = Workload(seq_len=case.seq_len, global_batch_size=case.global_batch_size, engine=case.engine)
    options: dict[str, Any] = {"runnable": case.space == "runnable", "time_limit_s": 600}
    figures: dict[str, Any]
    if case.what == "pareto":
        points = pareto(model, cluster, workload, **options)
        gap = max(1 - point.bound_s / point.step_time_s for point in points)
        figures = {"points": len(points), "gap": round(gap, 6), "step_time_s": round(points[0].step_time_s, 4)}
    elif case.what == "cheapest":
        best = cheapest(model, (Offer.from_cluster(cluster),), workload, **options)
        assert best.cost is not None
        cost = best.cost
        figures = {
            "sizes": len(cost.sizes),
            "layouts": sum(size.layouts for size in cost.sizes),
            "status": cost.status,
            "gap": round(cost.gap, 6),
            "nodes": cost.num_nodes,
            "usd_per_billion_tokens": round(cost.usd_per_billion_tokens, 2),
            "layout": str(best.layout),
        }
    else:
        answers: list[tuple[float, float]] = []

        def note(_evaluated: int, incumbent_s: float | None, _bound_s: float) -> None:
            if incumbent_s is not None and (not answers or incumbent_s < answers[-1][1]):
                answers.append((time.process_time() - cpu_start, incumbent_s))

        best = plan(model, cluster, workload, on_progress=note, **options)
        assert best.search is not None
        answers.append((time.process_time() - cpu_start, best.search.objective_s))
        figures = {
            "answers": [[round(cpu_s, 3), round(step_s, 4)] for cpu_s, step_s in answers],
            **{f"cpu_s_within_{percent}_percent": _until(answers, percent) for percent in (5, 1)},
            "layouts": best.search.evaluated + best.search.pruned,
            "evaluated": best.search.evaluated,
            "status": best.search.status,
            "gap": round(best.search.gap, 6),
            "price_of_simplicity": round(best.price_of_simplicity, 6),
            "step_time_s": round(best.estimate.step_time_s, 4),
            "layout": str(best.layout),
        }
    return {
        **{name: value for name, value in case._asdict().items() if value is not None},
        **figures,
        "wall_s": round(time.perf_counter() - start, 3),
        "cpu_s": round(time.process_time() - cpu_start, 3),
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def _until(answers: list[tuple[float, float]], percent: float) -> float:
    """Return the CPU seconds after which an answer was within so much of the last."""
    return round(next(cpu_s for cpu_s, step_s in answers if step_s <= answers[-1][1] * (1 + percent / 100)), 3)


def in_own_process(name: str) -> dict[str, Any]:
    """`measure` of one case in a new interpreter; its error where it has one."""
    done = subprocess.run([sys.executable, __file__, "--one", name], capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit {done.returncode}"}
    return dict(json.loads(done.stdout))


def run_tests(path: str) -> dict[str, Any]:
    """Outcome and seconds of one test file."""
    command = [sys.executable, "-m", "pytest", "-q", path]
    start = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    wall_s = round(time.perf_counter() - start, 1)
    return {"command": " ".join(["pytest", *command[3:]]), "result": lines[-1] if lines else "", "wall_s": wall_s}


def main() -> None:
    """Run the cases and write the files."""
    parser = argparse.ArgumentParser(description="Time the search at the size of its goals.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--only", nargs="+", default=[""])
    parser.add_argument("--no-tests", action="store_true")
    parser.add_argument("--no-growth", action="store_true", help="the goals only")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        sys.stdout.write(json.dumps(measure(CASES[arguments.one])))
        return
    from search_report import write_report

    path = arguments.out / "search.json"
    before: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    rows: dict[str, Any] = {name: row for name, row in before.get("cases", {}).items() if name in CASES}
    tests: dict[str, Any] = before.get("tests", {})
    names = GOALS if arguments.no_growth else CASES
    for name in (name for name in names if name.startswith(tuple(arguments.only))):
        rows[name] = in_own_process(name)
        sys.stderr.write(f"{name}: {json.dumps(rows[name])}\n")
        save(path, rows, tests)  # what was measured stays, whatever ends the run
    if not arguments.no_tests:
        tests = {name: run_tests(path) for name, path in TESTS.items()}
    write_report(save(path, rows, tests), arguments.out)


def save(path: Path, rows: dict[str, Any], tests: dict[str, Any]) -> dict[str, Any]:
    """Write search.json."""
    result = {
        "command": "python benchmarks/search.py",
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "cases": {name: rows[name] for name in CASES if name in rows},
        "tests": tests,
    }
    path.write_text(json.dumps(result, indent=2) + "\n")
    return result


if __name__ == "__main__":
    main()
