"""Does `plan --cluster local` pick the layout that is measured to be the fastest? Two small shapes for which it differs.

    python benchmarks/two_shapes.py OUT.json [--rounds 3] [--steps 12]

With many tokens and few parameters data parallelism wins; with many parameters and few tokens tensor parallelism does (by about 1.4
over DDP and 4 over FSDP on two cores). For each shape the plan's choice and every other kind of layout for two ranks run under
`meshwright apply`, in turn within each round, so that a neighbour's load meets all of them. The choice is right where its median is
the lowest, or within 5 % of it.
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

from meshwright.planner import plan
from meshwright.profilers.local import measure_local
from meshwright.schema import ClusterSpec, ConfigError, InfeasibleError, ModelSpec, TrainingPlan, Workload
from meshwright.schema.layout import parse_assignments

WARMUP_STEPS = 2
TOLERANCE = 0.05
COMMON = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 2048, "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
SHAPES = {
    "many tokens, few parameters": (
        {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 512}, 32, 64,
    ),
    "few tokens, many parameters": (
        {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 16,
         "num_key_value_heads": 8, "vocab_size": 1024}, 4, 16,
    ),
}  # fmt: skip
LAYOUTS = {
    "ddp": "dp_replicate=2,recompute=none",
    "zero 2": "dp_shard=2,zero_stage=2,recompute=none",
    "fsdp": "dp_shard=2,zero_stage=3,recompute=none",
    "tp": "tp=2,sequence_parallel=false,recompute=none",
    "tp and sequence": "tp=2,sequence_parallel=true,recompute=none",
    "pipeline": "pp=2,recompute=none",
    "cp": "cp=2,recompute=none",
}
"""Kinds of layout for two ranks; what one of them leaves open (micro-batches, schedule) the plan decides."""

CLI = (sys.executable, "-m", "meshwright.cli")


def make_plan(shape: str, fixed: str, cluster: ClusterSpec) -> TrainingPlan | None:
    """Return the plan of a shape with some fields fixed; None where no layout has them."""
    sizes, batch, seq_len = SHAPES[shape]
    model = ModelSpec.from_hf({**COMMON, **sizes})
    workload = Workload(seq_len=seq_len, global_batch_size=batch, precision="fp32", optimizer="sgd")
    try:
        return plan(model, cluster, workload, fixed=parse_assignments(fixed), runnable=True)
    except (ConfigError, InfeasibleError):
        return None


def measure(path: Path, steps: int) -> float:
    """Return the median seconds of a step."""
    done = subprocess.run([*CLI, "apply", str(path), "--steps", str(steps), "--json"], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    records = [json.loads(line) for line in done.stdout.splitlines()]
    return statistics.median([r["step_time_s"] for r in records if "step" in r][WARMUP_STEPS:])


def run_shape(shape: str, folder: Path, cluster: ClusterSpec, rounds: int, steps: int) -> dict:
    """Plan, measure every layout, compare."""
    chosen = make_plan(shape, "", cluster)
    if chosen is None:
        raise SystemExit(f"no plan for {shape}")
    plans = {"the plan's choice": chosen}
    for name, fixed in LAYOUTS.items():
        other = make_plan(shape, fixed, cluster)
        if other is not None and other.layout != chosen.layout:
            plans[name] = other
    seconds: dict[str, list[float]] = {name: [] for name in plans}
    for turn in range(rounds):
        for name in list(plans) if turn % 2 else reversed(list(plans)):
            path = folder / "plan.json"
            plans[name].save(path)
            seconds[name].append(measure(path, steps))
            print(shape, turn, name, f"{seconds[name][-1] * 1e3:.1f} ms", flush=True)
    return report(plans, seconds)


def report(plans: dict[str, TrainingPlan], seconds: dict[str, list[float]]) -> dict:
    """Return medians, predictions, and the verdict."""
    rows = {
        name: {
            "layout": str(made.layout),
            "predicted_s": made.estimate.step_time_s,
            "measured_s": statistics.median(seconds[name]),
            "min_s": min(seconds[name]),
            "max_s": max(seconds[name]),
        }
        for name, made in plans.items()
    }
    best = min(rows, key=lambda name: rows[name]["measured_s"])
    excess = rows["the plan's choice"]["measured_s"] / rows[best]["measured_s"] - 1
    return {"fastest": best, "choice_over_fastest": excess, "is_right": excess <= TOLERANCE, "layouts": rows}


def main() -> None:
    """Run both shapes; write the result after each."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    setup = {"torch": version("torch"), "python": platform.python_version()}
    setup |= {"rounds": options.rounds, "steps": options.steps}
    results, cluster = {}, measure_local(2)
    for shape in SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            results[shape] = run_shape(shape, Path(folder), cluster, options.rounds, options.steps)
        options.out.write_text(json.dumps({**setup, "shapes": results}, indent=1) + "\n")
        print(
            shape, "right" if results[shape]["is_right"] else "wrong", json.dumps(results[shape]["fastest"]), flush=True
        )


if __name__ == "__main__":
    main()
