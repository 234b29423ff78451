"""A profile against training: measure the machine, predict layouts from the measurement, run them, compare.

    python benchmarks/profile_accuracy.py OUT.json [--ranks 2 4] [--rounds 3] [--budget-s 90]

For each number of ranks and each of two small models: `meshwright profile --model`, a plan of every layout below from that profile,
then `meshwright apply` of all layouts in turn, as often as there are rounds, so that a neighbour's load falls on all of them alike.
A layout's time is the median of its rounds, its noise their range over that; ``preempted`` is the part of its computing time in
which other work had the cores, which an idle machine has near zero. Ranked first is the layout with the lowest predicted time.
Memory is the allocated peak, every tensor counted in the warm-up of the first round; the resident one stands next to it.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

STEPS = 7
COMMAND = [sys.executable, "-m", "meshwright.cli"]

WIDE = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 512, "intermediate_size": 1408,
    "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 8192,
    "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip
DEEP = {**WIDE, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 16, "vocab_size": 16384}
MODELS = {"wide": (WIDE, 4, 128), "deep": (DEEP, 4, 256)}
"""Config, global batch and sequence length: 32 and 25 M parameters that divide by every axis."""

LAYOUTS = {
    2: (
        "dp_replicate=2,micro_batch_size=2", "dp_shard=2,zero_stage=1,micro_batch_size=1",
        "dp_shard=2,zero_stage=3,micro_batch_size=2", "tp=2,micro_batch_size=4", "pp=2,schedule=1f1b,micro_batch_size=1",
        "dp_replicate=2,micro_batch_size=2,recompute=full",
    ),
    4: (
        "dp_replicate=4,micro_batch_size=1", "dp_shard=4,zero_stage=3,micro_batch_size=1",
        "dp_replicate=2,tp=2,micro_batch_size=2", "tp=4,micro_batch_size=4", "pp=4,schedule=1f1b,micro_batch_size=1",
        "pp=2,dp_replicate=2,schedule=1f1b,micro_batch_size=1",
    ),
}  # fmt: skip


def run(*arguments: str) -> str:
    """Output of a command.

    Raises:
        RuntimeError: it failed; its messages.
    """
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"meshwright {' '.join(arguments)}\n{done.stderr}")
    return done.stdout


def measure(name: str, ranks: int, *, rounds: int, budget_s: float, folder: Path) -> dict[str, Any]:
    """Profile, plan and run every layout of one model on so many ranks."""
    config, batch, seq_len = MODELS[name]
    model, profile = folder / f"{name}.json", folder / "profile.json"
    model.write_text(json.dumps(config))
    common = ["--ranks", str(ranks), "--budget-s", str(budget_s), "--out", str(profile)]
    run("profile", "--model", str(model), "--seq-len", str(seq_len), "--micro-batch-size", "2", *common)
    cases: dict[str, dict[str, Any]] = {}
    for idx, layout in enumerate(LAYOUTS[ranks]):
        plan = folder / f"plan{idx}.json"
        choices = ["--global-batch-size", str(batch), "--seq-len", str(seq_len), "--fix", layout, "--out", str(plan)]
        try:
            planned = json.loads(run("plan", str(model), "--profile", str(profile), "--json", *choices))
        except RuntimeError as error:
            print(error, flush=True)
            continue
        estimate = planned["estimate"]
        cases[layout] = {
            "plan": str(plan), "predicted_s": estimate["step_time_s"], "runs": [], "breakdown_s": estimate["breakdown_s"],
            "predicted_bytes": estimate["peak_allocated_bytes"], "predicted_resident_bytes": estimate["peak_reserved_bytes"],
        }  # fmt: skip
    for turn in range(rounds):
        for layout, case in cases.items():
            counted = ["--count-memory"] if turn == 0 else []
            lines = run("apply", case["plan"], "--steps", str(STEPS), "--json", *counted).splitlines()
            case["runs"].append(json.loads(lines[-1])["measured"])
            print(
                name,
                ranks,
                layout,
                f"{case['runs'][-1]['step_time_s']:.3f} s, predicted {case['predicted_s']:.3f} s",
                flush=True,
            )
    return {layout: _summary(case) for layout, case in cases.items()}


def _summary(case: dict[str, Any]) -> dict[str, Any]:
    times = [run["step_time_s"] for run in case["runs"]]
    parts = {name: median(run["parts_s"][name] for run in case["runs"]) for name in case["runs"][0]["parts_s"]}
    allocated = case["runs"][0]["peak_allocated_bytes"]
    resident = median(run["peak_reserved_bytes"] for run in case["runs"])
    return {
        "predicted_s": case["predicted_s"],
        "measured_s": median(times),
        "noise": (max(times) - min(times)) / median(times),
        "preempted": parts["preempted"] / max(parts["compute"], 1e-9),
        "time_error": case["predicted_s"] / median(times) - 1,
        "memory_error": case["predicted_bytes"] / allocated - 1,
        "resident_error": case["predicted_resident_bytes"] / resident - 1,
        "breakdown_s": case["breakdown_s"],
        "parts_s": parts,
    }


def scored(cases: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Median errors, and what the layout ranked first costs over the measured best."""
    first = min(cases.values(), key=lambda case: case["predicted_s"])
    best = min(case["measured_s"] for case in cases.values())
    return {
        "layouts": len(cases),
        "median_time_error": median(abs(case["time_error"]) for case in cases.values()),
        "median_memory_error": median(abs(case["memory_error"]) for case in cases.values()),
        "median_resident_error": median(abs(case["resident_error"]) for case in cases.values()),
        "regret": first["measured_s"] / best - 1,
        "median_noise": median(case["noise"] for case in cases.values()),
        "median_preempted": median(case["preempted"] for case in cases.values()),
    }


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], choices=sorted(LAYOUTS))
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget-s", type=float, default=90.0)
    given = parser.parse_args()
    results: dict[str, Any] = {"torch": version("torch"), "python": platform.python_version(), "rounds": given.rounds}
    for ranks in given.ranks:
        for name in given.models:
            with tempfile.TemporaryDirectory() as folder:
                cases = measure(name, ranks, rounds=given.rounds, budget_s=given.budget_s, folder=Path(folder))
            results[f"{name}, {ranks} ranks"] = {**scored(cases), "cases": cases}
            print(name, ranks, json.dumps(scored(cases)), flush=True)
            given.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
