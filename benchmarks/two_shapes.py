"""Does `plan --cluster local` pick the layout that is measured to be the fastest? Two small shapes for which it differs.

    python benchmarks/two_shapes.py OUT.json [ROUNDS] [STEPS]

With many tokens and few parameters data parallelism wins; with many parameters and few tokens tensor parallelism does (by about 1.4
over DDP and 4 over FSDP on two cores). For each shape the plan's choice and every other kind of layout for two ranks run under
`meshwright apply`, in turn within each round, so that a neighbour's load meets all of them. The choice is right where its median is
the least, or within 5 % of it.
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


def make_plan(shape: str, fixed: str, out: Path) -> dict | str:
    """The plan of a shape with some fields kept, as JSON; or why there is none."""
    sizes, batch, seq_len = SHAPES[shape]
    config = out.with_suffix(".config.json")
    config.write_text(json.dumps({**COMMON, **sizes}))
    workload = [
        "--global-batch-size",
        str(batch),
        "--seq-len",
        str(seq_len),
        "--optimizer",
        "sgd",
        "--precision",
        "fp32",
    ]
    command = [*CLI, "plan", str(config), "--cluster", "local", *workload, "--out", str(out)]
    done = subprocess.run([*command, *(["--fix", fixed] if fixed else [])], capture_output=True, text=True)
    return done.stderr.strip() if done.returncode else json.loads(out.read_text())


def measure(plan: Path, steps: int) -> float:
    """Median seconds of a step."""
    done = subprocess.run([*CLI, "apply", str(plan), "--steps", str(steps), "--json"], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    records = [json.loads(line) for line in done.stdout.splitlines()]
    return statistics.median([r["step_time_s"] for r in records if "step" in r][WARMUP_STEPS:])


def run_shape(shape: str, folder: Path, rounds: int, steps: int) -> dict:
    """Plan, measure every layout, compare."""
    chosen = make_plan(shape, "", folder / "chosen.json")
    if isinstance(chosen, str):
        raise SystemExit(chosen)
    plans = {"the plan's choice": chosen}
    for name, fixed in LAYOUTS.items():
        found = make_plan(shape, fixed, folder / f"{name.replace(' ', '-')}.json")
        if not isinstance(found, str) and found["layout"] != chosen["layout"]:
            plans[name] = found
    files = {name: folder / (f"{name.replace(' ', '-')}.json" if name in LAYOUTS else "chosen.json") for name in plans}
    seconds: dict[str, list[float]] = {name: [] for name in plans}
    for turn in range(rounds):
        for name in list(plans) if turn % 2 else reversed(list(plans)):
            seconds[name].append(measure(files[name], steps))
            print(shape, turn, name, f"{seconds[name][-1] * 1e3:.1f} ms", flush=True)
    return report(plans, seconds)


def report(plans: dict[str, dict], seconds: dict[str, list[float]]) -> dict:
    """Medians, predictions, and the verdict."""
    rows = {
        name: {
            "layout": {key: value for key, value in plan["layout"].items() if value not in (1, "none", False, None)},
            "predicted_s": plan["estimate"]["step_time_s"],
            "measured_s": statistics.median(seconds[name]),
            "least_s": min(seconds[name]),
            "largest_s": max(seconds[name]),
        }
        for name, plan in plans.items()
    }
    best = min(rows, key=lambda name: rows[name]["measured_s"])
    excess = rows["the plan's choice"]["measured_s"] / rows[best]["measured_s"] - 1
    return {"fastest": best, "choice_over_fastest": excess, "is_right": excess <= TOLERANCE, "layouts": rows}


def main(out: str, rounds: str = "3", steps: str = "12") -> None:
    """Both shapes; the result is written after each."""
    setup = {"torch": version("torch"), "python": platform.python_version(), "rounds": int(rounds), "steps": int(steps)}
    results = {}
    for shape in SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            results[shape] = run_shape(shape, Path(folder), int(rounds), int(steps))
        Path(out).write_text(json.dumps({**setup, "shapes": results}, indent=1) + "\n")
        print(
            shape, "right" if results[shape]["is_right"] else "wrong", json.dumps(results[shape]["fastest"]), flush=True
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
