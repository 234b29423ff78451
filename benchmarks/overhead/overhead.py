"""What `meshwright apply` costs over a hand-written script for the same model and layout.

    python benchmarks/overhead/overhead.py local OUT.json [--rounds 5] [--steps 12] [--only CASE]   # two CPU ranks
    python benchmarks/overhead/overhead.py 2xH100-SXM-80GB OUT.json      # GPUs; one GPU has one case

In each round every case runs both, in turn first and second, so that a neighbour's load meets both; the ratio is of the medians of
their steps in that round, the result the median over rounds with the lowest and the highest. The goal is 1.02.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from importlib.metadata import version
from pathlib import Path

from meshwright.planner import plan as plan_for
from meshwright.profilers.local import measure_local
from meshwright.schema import ClusterSpec, ModelSpec, Workload
from meshwright.schema.layout import parse_assignments

SCRIPT = Path(__file__).with_name("plain_training.py")
WARMUP_STEPS = 2
SMALL = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 512, "intermediate_size": 1408,
    "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 16384,
    "max_position_embeddings": 2048, "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
}  # fmt: skip
LARGE = {
    **SMALL, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16, "num_attention_heads": 16,
    "num_key_value_heads": 8, "vocab_size": 32768,
}  # fmt: skip
CASES = {
    "one device": "recompute=none",
    "ddp": "dp_replicate=2,recompute=none",
    "fsdp": "dp_shard=2,zero_stage=3,recompute=none",
    "tensor parallel": "tp=2,sequence_parallel=false,recompute=none",
    "tensor and sequence parallel": "tp=2,sequence_parallel=true,recompute=none",
    "pipeline": "pp=2,schedule=1f1b,micro_batch_size=1,recompute=none",
}


def cases(num_devices: int) -> dict[str, str]:
    """Return the cases of one device, or of two."""
    return {name: fixed for name, fixed in CASES.items() if (name == "one device") == (num_devices == 1)}


def make_plan(cluster: ClusterSpec, fixed: str, out: Path) -> Path:
    """Save the plan of a case."""
    is_cpu = cluster.weakest_device.backend.is_host
    model = ModelSpec.from_hf(SMALL if is_cpu else LARGE)
    precision = "fp32" if is_cpu else "bf16-mixed"
    workload = Workload(seq_len=128 if is_cpu else 2048, global_batch_size=8, precision=precision)
    plan_for(model, cluster, workload, fixed=parse_assignments(fixed), runnable=True).save(out)
    return out


def apply_s(plan: Path, steps: int) -> float:
    """Return the median seconds of a step of `apply`."""
    command = [sys.executable, "-m", "meshwright.cli", "apply", str(plan), "--steps", str(steps), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    records = [json.loads(line) for line in done.stdout.splitlines()]
    return statistics.median([r["step_time_s"] for r in records if "step" in r][WARMUP_STEPS:])


def plain_s(plan: Path, steps: int) -> float:
    """Return the median seconds of a step of the script."""
    ranks = len(json.loads(plan.read_text())["rank_map"])
    out = plan.with_name("plain.json")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run([*launcher, str(SCRIPT), str(plan), str(steps), str(out)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return statistics.median(json.loads(out.read_text())[WARMUP_STEPS:])


def main() -> None:
    """Measure every case and write the result."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("cluster")
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--only", default="", metavar="CASE", help="cases whose name contains this")
    options = parser.parse_args()
    machine = measure_local(2) if options.cluster == "local" else ClusterSpec.parse(options.cluster)
    with tempfile.TemporaryDirectory() as folder:
        plans = {
            name: make_plan(machine, fixed, Path(folder) / f"{idx}.json")
            for idx, (name, fixed) in enumerate(cases(machine.num_devices).items())
            if options.only in name
        }
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in plans}
        for turn in range(options.rounds):
            for name, plan in plans.items():
                runs = [plain_s, apply_s] if turn % 2 else [apply_s, plain_s]
                times = {run.__name__: run(plan, options.steps) for run in runs}
                seconds[name].append((times["apply_s"], times["plain_s"]))
                write(options.out, options.cluster, seconds, options.steps)
                print(name, turn, f"{times['apply_s']:.4f} s / {times['plain_s']:.4f} s", flush=True)


def write(out: Path, cluster: str, seconds: dict[str, list[tuple[float, float]]], steps: int) -> None:
    """Write everything measured so far."""
    results = {}
    for name, pairs in seconds.items():
        if not pairs:
            continue
        ratios = [apply_s / plain_s for apply_s, plain_s in pairs]
        results[name] = {
            "ratio": statistics.median(ratios),
            "min_ratio": min(ratios),
            "max_ratio": max(ratios),
            "apply_s": statistics.median(apply_s for apply_s, _ in pairs),
            "plain_s": statistics.median(plain_s for _, plain_s in pairs),
            "rounds": pairs,
        }
    setup = {"cluster": cluster, "torch": version("torch"), "python": platform.python_version(), "steps": steps}
    out.write_text(json.dumps({**setup, "goal": 1.02, "cases": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
