"""What `meshwright apply` costs over a hand-written script for the same model and layout.

    python benchmarks/overhead/overhead.py local OUT.json [ROUNDS] [STEPS]       # two CPU ranks
    python benchmarks/overhead/overhead.py 2xH100-SXM-80GB OUT.json              # GPUs; one GPU has one case

In each round every case runs both, in turn first and second, so that a neighbour's load meets both; the ratio is of the medians of
their steps in that round, the result the median over rounds with the least and the largest. The goal is 1.02.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

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
    """Those of one device, or of two."""
    return {name: fixed for name, fixed in CASES.items() if (name == "one device") == (num_devices == 1)}


def make_plan(cluster: str, fixed: str, folder: Path) -> Path:
    """The plan of a case."""
    is_local = cluster.startswith("local")
    (folder / "config.json").write_text(json.dumps(SMALL if is_local else LARGE))
    batch = ["--global-batch-size", "8", "--seq-len", "128" if is_local else "2048"]
    out = folder / "plan.json"
    command = [
        sys.executable,
        "-m",
        "meshwright.cli",
        "plan",
        str(folder / "config.json"),
        "--cluster",
        cluster,
        *batch,
    ]
    done = subprocess.run([*command, "--fix", fixed, "--out", str(out)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return out


def applied(plan: Path, steps: int) -> float:
    """Median seconds of a step of `apply`."""
    command = [sys.executable, "-m", "meshwright.cli", "apply", str(plan), "--steps", str(steps), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    records = [json.loads(line) for line in done.stdout.splitlines()]
    return statistics.median([r["step_time_s"] for r in records if "step" in r][WARMUP_STEPS:])


def plain(plan: Path, steps: int) -> float:
    """Median seconds of a step of the script."""
    ranks = len(json.loads(plan.read_text())["rank_map"])
    out = plan.with_name("plain.json")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run([*launcher, str(SCRIPT), str(plan), str(steps), str(out)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return statistics.median(json.loads(out.read_text())[WARMUP_STEPS:])


def main(cluster: str, out: str, rounds: str = "5", steps: str = "12", only: str = "") -> None:
    """Measure every case and write the result."""
    with tempfile.TemporaryDirectory() as folder:
        first = Path(folder) / "first"
        first.mkdir()
        devices = (
            2
            if cluster.startswith("local")
            else len(json.loads(make_plan(cluster, "recompute=none", first).read_text())["rank_map"])
        )
        plans = {}
        for name, fixed in cases(devices).items():
            if only in name:
                place = Path(folder) / name.replace(" ", "-")
                place.mkdir()
                plans[name] = make_plan(cluster, fixed, place)
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in plans}
        for turn in range(int(rounds)):
            for name, plan in plans.items():
                runs = [plain, applied] if turn % 2 else [applied, plain]
                found = {run.__name__: run(plan, int(steps)) for run in runs}
                seconds[name].append((found["applied"], found["plain"]))
                write(out, cluster, seconds, int(steps))
                print(name, turn, f"{found['applied']:.4f} s / {found['plain']:.4f} s", flush=True)


def write(out: str, cluster: str, seconds: dict[str, list[tuple[float, float]]], steps: int) -> None:
    """Everything measured so far."""
    results = {}
    for name, pairs in seconds.items():
        if not pairs:
            continue
        ratios = [mine / plain for mine, plain in pairs]
        results[name] = {
            "ratio": statistics.median(ratios),
            "ratio_least": min(ratios),
            "ratio_largest": max(ratios),
            "apply_s": statistics.median(mine for mine, _ in pairs),
            "plain_s": statistics.median(plain for _, plain in pairs),
            "rounds": pairs,
        }
    setup = {"cluster": cluster, "torch": version("torch"), "python": platform.python_version(), "steps": steps}
    Path(out).write_text(json.dumps({**setup, "goal": 1.02, "cases": results}, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
