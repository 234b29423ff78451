"""Search over the full space of an engine: seconds, layouts, gap and memory of `plan`'s two parts, enumeration and search.

    python benchmarks/search.py OUT.json [CASE...]

Each case runs in a process of its own, so that its peak memory is its own. Wall and CPU seconds are both given: the machine may be
shared, nothing here starts threads. Cases: the largest goals, and the same model on more and more devices.
"""

from __future__ import annotations

import json
import platform
import resource
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from meshwright.planner.choose import choose
from meshwright.planner.search import search
from meshwright.planner.space import build_space
from meshwright.schema import ClusterSpec, ModelSpec, Workload

TRILLION = "moe-1t"


class Case(NamedTuple):
    """A model, a cluster and a batch."""

    model: str
    cluster: str
    global_batch_size: int
    seq_len: int
    engine: str = "megatron"


CASES = {
    "llama-3.1-70b-64": Case("llama-3.1-70b", "64xH100-SXM-80GB", 128, 8192),
    "llama-3.1-405b-16384": Case("llama-3.1-405b", "16384xH100-SXM-80GB", 2048, 8192),
    "deepseek-v3-2048": Case("deepseek-v3", "2048xH800-SXM-80GB", 15360, 4096),
    "moe-1t-100000": Case(TRILLION, "100000xH100-SXM-80GB", 25000, 4096),
    "moe-1t-98304": Case(TRILLION, "98304xH100-SXM-80GB", 24576, 4096),
    **{
        f"growth-{devices}": Case("mixtral-8x22b", f"{devices}xH100-SXM-80GB", max(devices, 512), 4096)
        for devices in (8, 64, 512, 4096, 32768, 131072)
    },
}


def model_of(name: str) -> ModelSpec:
    """A catalogue model, or a mixture of experts of 1.0e12 parameters: DeepSeek-V3's blocks with 384 experts and 64 heads."""
    if name != TRILLION:
        return ModelSpec.named(name)
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


def measure(case: Case) -> dict[str, object]:
    """Seconds, counts and the certificate of one case."""
    model, cluster = model_of(case.model), ClusterSpec.parse(case.cluster)
    workload = Workload(seq_len=case.seq_len, global_batch_size=case.global_batch_size, engine=case.engine)
    start, cpu_start = time.perf_counter(), time.process_time()
    space = build_space(model, workload, cluster, {})
    enumerated = time.perf_counter()
    result = search(model, workload, cluster, space, time_limit_s=600, runner_ups=4)
    ended, cpu_ended = time.perf_counter(), time.process_time()
    chosen = choose(result, space.batch) if result.fitting else None
    certificate = result.certificate(chosen) if chosen else None
    best = result.fitting[0].estimate.step_time_s if result.fitting else None
    return {
        **case._asdict(),
        "parameters": model.num_params,
        "layouts": len(space.batch),
        "excluded_by_rules": space.num_excluded,
        "expanded": result.evaluated,
        "enumerate_s": round(enumerated - start, 3),
        "total_s": round(ended - start, 3),
        "cpu_s": round(cpu_ended - cpu_start, 3),
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "gap_of_fastest": best and round(1 - result.bound_s / best, 6),
        "gap_of_choice": certificate and round(certificate.gap, 6),
        "layout": str(chosen.layout(space.batch)) if chosen else None,
        "step_time_s": certificate and round(certificate.objective_s, 4),
    }


def main() -> None:
    """Run every case in its own process and write the table."""
    if sys.argv[1] == "--one":
        sys.stdout.write(json.dumps(measure(CASES[sys.argv[2]])))
        return
    out = Path(sys.argv[1])
    rows = {}
    for name in sys.argv[2:] or CASES:
        command = [sys.executable, __file__, "--one", name]
        rows[name] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        sys.stderr.write(f"{name}: {json.dumps(rows[name])}\n")
    machine = {"processor": platform.processor() or platform.machine(), "numpy": version("numpy")}
    out.write_text(
        json.dumps({"command": "python benchmarks/search.py " + out.name, **machine, "cases": rows}, indent=2) + "\n"
    )


if __name__ == "__main__":
    main()
