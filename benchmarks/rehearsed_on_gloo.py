"""Rehearsed peaks of memory against the tensors that real jobs on gloo count.

    python benchmarks/rehearsed_on_gloo.py OUT.jsonl [--layouts 30] [--seed 1]

Each layout is one that `plan` chooses on 1 to 8 CPU ranks of this machine with some fields fixed at random; it is rehearsed, then
runs two steps under `apply --count-memory`, of which the second counts. OUT has a line for each kind of rank; printed are the mean
and the largest error.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from apply_accuracy import SMALL

EXPERTS = SMALL | {
    "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2,
    "intermediate_size": 512,
}  # fmt: skip
FIELDS: dict[str, tuple[Any, ...]] = {
    "pp": (1, 1, 2), "tp": (1, 2), "cp": (1, 1, 2), "ep": (1, 2), "zero_stage": (0, 1, 2, 3), "micro_batch_size": (1, 2),
    "recompute": ("none", "selective", "full"), "schedule": ("1f1b", "gpipe", "zb-h1", "zb-v"), "num_model_chunks": (1, 1, 2),
}  # fmt: skip


def meshwright(*words: str) -> str:
    """Run a command; return what it printed, nothing where it failed."""
    command = [sys.executable, "-m", "meshwright.cli", *words, "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if ended.returncode else ended.stdout.strip()


def drawn(rng: random.Random, folder: Path) -> dict[str, Any]:
    """Draw a model, a number of ranks and fixed fields; write the model."""
    name, config = rng.choice((("dense", SMALL), ("experts", EXPERTS)))
    (folder / "config.json").write_text(json.dumps(config))
    fixed = {key: rng.choice(values) for key, values in FIELDS.items() if rng.random() < 0.6}
    return {
        "model": name,
        "ranks": rng.choice((1, 2, 2, 4, 4, 8)),
        "precision": rng.choice(("fp32", "bf16-mixed")),
        "fixed": fixed,
    }


def compared(problem: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Plan, rehearse and run; return a row for each kind of rank, nothing where there is no such plan."""
    fix = ("--fix", ",".join(f"{key}={value}" for key, value in problem["fixed"].items())) if problem["fixed"] else ()
    cluster, plan = f"local:{problem['ranks']}", str(folder / "plan.json")
    batch = ("--global-batch-size", "8", "--seq-len", "128", "--precision", problem["precision"])
    if not meshwright("plan", str(folder / "config.json"), "--cluster", cluster, *batch, *fix, "--out", plan):
        return []
    said = meshwright("rehearse", plan)
    ran = meshwright("apply", plan, "--steps", "2", "--count-memory")
    if not said or not ran:
        return [{**problem, "failed": "apply" if said else "rehearse"}]
    rehearsed, summary = json.loads(said), json.loads(ran.splitlines()[-1])
    counted = {rank["rank"]: rank["peak_allocated_bytes"] for rank in summary["measured"]["ranks"]}
    rows = []
    for kind in rehearsed["kinds"]:
        peak = kind["peak_allocated_bytes"]
        off = peak / counted[kind["rank"]] - 1
        row = {
            "layout": rehearsed["layout"],
            "rank": kind["rank"],
            "rehearsed": peak,
            "counted": counted[kind["rank"]],
            "off": off,
        }
        rows.append({**problem, **row})
    return rows


def main() -> None:
    """Draw, rehearse, run, compare."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layouts", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rng, rows, done = random.Random(options.seed), list[dict[str, Any]](), 0
    with tempfile.TemporaryDirectory() as name, options.out.open("w") as file:
        while done < options.layouts:
            found = compared(drawn(rng, Path(name)), Path(name))
            done += bool(found)
            rows += found
            file.writelines(json.dumps(row) + "\n" for row in found)
            file.flush()
    off = [abs(row["off"]) for row in rows if "off" in row]
    failed = sum("failed" in row for row in rows)
    print(
        f"{done} layouts, {len(off)} kinds of ranks: mean {sum(off) / len(off):.2%}, worst {max(off):.2%}, {failed} failed"
    )


if __name__ == "__main__":
    main()
