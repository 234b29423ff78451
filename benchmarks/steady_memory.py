"""Memory and descriptors of a long run: they are those of its first tenth until its end.

    python benchmarks/steady_memory.py --steps 10000

`meshwright apply` trains a tiny model on one rank with checkpoints; launcher and rank are looked at twenty times. The first
tenth is the warm-up. Written to benchmarks/steady_memory.md: the largest difference from what the rest of the run began with.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from meshwright.planner import plan
from meshwright.schema import ClusterSpec, ModelSpec, Workload

CONFIG = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 256, "max_position_embeddings": 64,
}  # fmt: skip
CLUSTER = """
reserved_bytes = 1000000
[[groups]]
num_nodes = 1
devices_per_node = 1
device = { name = "cpu", vendor = "cpu", memory_gib = 4, memory_bandwidth_bytes_per_s = 1e10, peak_flops_per_s = { fp32 = 5e10 } }
[[levels]]
link = "eth10"
domain_size = 1
"""
LOOKS, WITHIN = 20, 0.02


def measured(steps: int, folder: Path) -> dict[str, list[tuple[int, int, int]]]:
    """Return (step, resident bytes, descriptors) of the launcher and of its rank over a run."""
    (folder / "cluster.toml").write_text(CLUSTER)
    workload = Workload(seq_len=32, global_batch_size=2, precision="fp32")
    plan(ModelSpec.from_hf(CONFIG), ClusterSpec.parse(str(folder / "cluster.toml")), workload).save(
        folder / "plan.json"
    )
    words = [
        "apply",
        "plan.json",
        "--steps",
        str(steps),
        "--metrics",
        "metrics.jsonl",
        "--checkpoint-dir",
        "checkpoints",
    ]
    command = [sys.executable, "-m", "meshwright.cli", *words, "--checkpoint-every", str(max(1, steps // 50))]
    launcher = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)
    looks: dict[str, list[tuple[int, int, int]]] = {"launcher": [], "rank": []}
    process, due = psutil.Process(launcher.pid), steps // LOOKS
    while launcher.poll() is None:
        time.sleep(0.02)
        step = last_step(folder / "metrics.jsonl")
        if step < due:
            continue
        due += steps // LOOKS
        for name, each in zip(looks, (process, *process.children()), strict=False):
            with contextlib.suppress(psutil.NoSuchProcess):
                resident, descriptors = each.memory_info().rss, each.num_fds()
                if resident:  # a process that has just ended holds nothing
                    looks[name].append((step, resident, descriptors))
    if launcher.returncode:
        raise SystemExit(launcher.stderr.read() if launcher.stderr else "the run failed")
    return looks


def last_step(path: Path) -> int:
    """Return the step that a file of metrics tells of last."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 20_000))
        lines = file.read().split(b"\n")[1:-1]
    return max((json.loads(line).get("step", 0) for line in lines), default=0)


def main() -> int:
    """Measure, write the page, and return whether anything grew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        looks = measured(options.steps, Path(name))
    lines = [
        "# Memory and descriptors of a long run\n",
        f"`python benchmarks/steady_memory.py --steps {options.steps}`: a tiny model on one CPU rank, a checkpoint every "
        f"{options.steps // 50} steps. From a tenth of the steps to the last look.\n",
        "| process | looks | resident at first | at last | largest difference | descriptors |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    grew = False
    for process, seen in looks.items():
        steady = [look for look in seen if look[0] >= options.steps / 10]
        first, last = steady[0][1], steady[-1][1]
        largest = max(abs(rss / first - 1) for _, rss, _ in steady)
        descriptors = sorted({count for _, _, count in steady})
        grew |= largest > WITHIN or descriptors[-1] - descriptors[0] > WITHIN * descriptors[0] + 1
        figures = f"{first / 2**20:.1f} MiB | {last / 2**20:.1f} MiB | {100 * largest:.2f} %"
        fewest_to_most = f"{descriptors[0]} to {descriptors[-1]}"
        lines.append(f"| {process} | {len(steady)} | {figures} | {fewest_to_most} |")
    options.out.write_text("\n".join(lines) + "\n")
    print(options.out.read_text())
    return int(grew)


if __name__ == "__main__":
    sys.exit(main())
