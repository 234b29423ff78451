"""Islands that share responses: what a model learns from those of others, and what it no longer generates.

    python benchmarks/shared_rollouts.py [--steps 30] [--seeds 1] [--out benchmarks/shared_rollouts.json]

A model of 80,000 parameters counts on from its prompt (the counting task of docs/post-training.md), by GRPO, one rank an island.
Alone with 16 prompts a step, alone with as many as an island answers, and on 2 islands that share: mean reward of an island's
own responses in step 10, 20 and 30, over islands and seeds, and the processor seconds of a step.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, median
from typing import Any

from meshwright.planner import plan_rl
from meshwright.schema import ClusterSpec, ModelSpec, RlWorkload
from meshwright.schema.batch import Lengths
from meshwright.schema.rl import RlModel
from post_training_run import CONFIG

OUT = Path(__file__).resolve().parent / "shared_rollouts.json"
MODEL = {**CONFIG, "vocab_size": 16}
LENGTH = 16
REWARD = """
def count(sample):
    row = [sample["prompt"][-1], *sample["response"]]
    return sum(b == (a + 1) % 16 for a, b in zip(row, row[1:])) / len(sample["response"])
"""
CASES: dict[str, dict[str, Any]] = {
    "alone": {"prompts": 16},
    "alone, 8 prompts": {"prompts": 8},
    "2 islands, 8 of 16 prompts shared": {"prompts": 16, "islands": 2, "shared": 0.5},
}


def run(fields: dict[str, Any], steps: int, seed: int, folder: Path) -> list[list[dict[str, Any]]]:
    """Plan and run all islands at once; return the records of each."""
    workload = RlWorkload(
        models=(RlModel(role="actor", model=ModelSpec.from_hf(MODEL)),), reward_function="rewards.py:count", responses=8,
        prompt_len=4, lengths=Lengths(lengths=(LENGTH,), counts=(1,)), max_len=LENGTH, precision="fp32",
        generation_engine="meshwright", **fields,
    )  # fmt: skip
    plan_rl(workload, ClusterSpec.parse("local:1"), top=0).save(folder / "rl.json")
    (folder / "rewards.py").write_text(REWARD)
    rows = (json.dumps({"prompt": [(idx + k) % 16 for k in range(4)]}) for idx in range(16))
    (folder / "prompts.jsonl").write_text("\n".join(rows))
    command = [sys.executable, "-m", "meshwright.cli", "apply-rl", "rl.json", "--prompts", "prompts.jsonl", "--json"]
    command += ["--reward", "rewards.py:count", "--steps", str(steps), "--learning-rate", "3e-3", "--seed", str(seed)]
    shared = ["--exchange", "shared"] if workload.islands > 1 else []
    jobs = [
        subprocess.Popen([*command, *shared, *island], cwd=folder, stdout=subprocess.PIPE, text=True)
        for island in ([["--island", str(idx)] for idx in range(workload.islands)] if shared else [[]])
    ]
    ends = [job.communicate()[0] for job in jobs]
    if any(job.returncode for job in jobs):
        raise SystemExit(f"exit codes {[job.returncode for job in jobs]}")
    return [json.loads(end) for end in ends]


def main() -> None:
    """Run all cases, print a table, write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    marks = sorted({10, 20, options.steps})
    print(f"| | {' | '.join(f'reward, step {mark}' for mark in marks)} | CPU s a step | new of those received |")
    print("|---|" + "--:|" * (len(marks) + 2))
    results = {}
    for name, fields in CASES.items():
        runs = list[list[dict[str, Any]]]()
        for seed in range(options.seeds):
            with tempfile.TemporaryDirectory() as folder:
                runs += run(fields, options.steps, seed, Path(folder))
        rewards = [
            mean(records[mark - 1]["mean_reward"] for records in runs) for mark in marks if mark <= options.steps
        ]
        cpu_s = median(sum(record["cpu_s"]) for records in runs for record in records[2:])
        steps = [record for records in runs for record in records if record.get("received")]
        new = mean(record["received_new"] / record["received"] for record in steps) if steps else None
        results[name] = {"rewards": dict(zip(marks, rewards, strict=False)), "cpu_s": cpu_s, "new": new}
        row = [*(f"{reward:.2f}" for reward in rewards), f"{cpu_s:.2f}", "" if new is None else f"{new:.0%}"]
        print(f"| {name} | {' | '.join(row)} |", flush=True)
    options.out.write_text(
        json.dumps({"steps": options.steps, "seeds": options.seeds, "cases": results}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
