"""Post-training of a tiny model on this machine: what over-sampling, one step off and the plan's prediction are worth here.

    python benchmarks/post_training_run.py [--ranks 4] [--steps 20] [--only oversample] [--out benchmarks/post_training_run.json]
    python benchmarks/post_training_run.py --config-out counter
    meshwright profile --model counter --seq-len 512 --serve --weights fp32 --ranks 2 --out p.json
    python benchmarks/post_training_run.py --ranks 2 --profile p.json

A model of 84,000 parameters with 64 tokens answers prompts; responses end at one of the tokens: lengths have a long tail.
Prints responses a second without and with 1.5 times as many under way, and the period of split pools that wait and that may be a
step off, each beside the plan's. The median over steps after the second one counts. Steps of the slowest engine and seconds of all
processors are told as well, which other work on the machine hardly changes: beside the plan's period stands the one of the
busiest ranks' processors.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from meshwright.planner import plan_rl
from meshwright.profilers.profiled_cluster import profiled_cluster
from meshwright.runtime.rl.launch import launch_rl
from meshwright.runtime.rl.run import RlJob, RlOptions
from meshwright.schema import ClusterSpec, ModelSpec, Profile, RlPlan, RlWorkload
from meshwright.schema.batch import Lengths
from meshwright.schema.rl import RlModel

OUT = Path(__file__).resolve().parent / "post_training_run.json"
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "rope_theta": 10000.0, "hidden_act": "silu",
}  # fmt: skip
MAX_LEN, END, MEAN = 512, 3, 64
REWARD = "def even(sample):\n    return sum(token % 2 for token in sample['response']) / len(sample['response'])\n"
CASES: dict[str, dict[str, Any]] = {
    "colocated": {"placement": "colocated"},
    "colocated, over-sampled": {"placement": "colocated", "oversample": 1.5},
    "split": {"placement": "split"},
    "split, one step off": {"placement": "split", "staleness": 1.0},
}


def lengths() -> Lengths:
    """Return geometric lengths, of responses that end with a probability of 1/64 at each token."""
    stay = 1 - 1 / MEAN
    values = [
        min(length, MAX_LEN) for length in range(1, 1000) for _ in range(round(16000 / MEAN * stay ** (length - 1)))
    ]
    return Lengths.of(values)


def run(folder: Path, name: str, fields: dict[str, Any], cluster: ClusterSpec, steps: int) -> dict[str, Any]:
    """Plan and run a case."""
    workload = RlWorkload(
        models=(RlModel(role="actor", model=ModelSpec.from_hf(CONFIG)),), reward_function="rewards.py:even", prompts=16,
        responses=8, prompt_len=4, lengths=lengths(), max_len=MAX_LEN, precision="fp32", generation_engine="meshwright", **fields,
    )  # fmt: skip
    plan = plan_rl(workload, cluster, top=0)
    plan.save(folder / "rl.json")
    report = folder / f"{name}.jsonl"
    options = RlOptions(
        prompts=str(folder / "prompts.jsonl"),
        reward=f"{folder / 'rewards.py'}:even",
        steps=steps,
        learning_rate=1e-5,
        end_id=END,
    )
    launch_rl(plan, RlJob(plan=str(folder / "rl.json"), options=options, report=str(report)))
    records = [json.loads(line) for line in report.read_text().splitlines()][2:]
    result = {
        "pools": plan.summary["pools"],
        "samples_per_s": median(record["samples_per_s"] for record in records),
        "step_s": median(record["step_time_s"] for record in records),
        "planned_s": plan.estimate.step_time_s,
        "engine_steps": sum(record["engine_steps"] for record in records) / len(records),
        "samples": workload.samples,
        "cpu_s": sum(sum(record["cpu_s"]) for record in records) / len(records),
        "period_cpu_s": period_cpu_s(plan, records),
        "carried": sum("mean_ratio" in record for record in records),
        "parts_s": {
            part: median(record["parts_s"].get(part, 0) for record in records) for part in records[0]["parts_s"]
        },
    }
    parts = ", ".join(f"{part} {seconds:.3f}" for part, seconds in result["parts_s"].items())
    print(
        f"{name:24} {result['samples_per_s']:7.1f} responses/s, step {result['step_s']:.3f} s, "
        f"planned {result['planned_s']:.3f} s; {result['period_cpu_s']:.3f} of processors; "
        f"{result['engine_steps']:.1f} engine steps, {result['cpu_s']:.2f} CPU s; {parts}"
    )
    return result


def period_cpu_s(plan: RlPlan, records: list[dict[str, Any]]) -> float:
    """Return the period in processor seconds of ranks: pools one after the other, or side by side a step off."""
    pools, first = [], 0
    for pool in plan.pools:
        ranks = slice(first, first + pool.num_devices)
        pools.append(sum(max(record["cpu_s"][ranks]) for record in records) / len(records))
        first += pool.num_devices
    return max(pools) if plan.post_training.staleness else sum(pools)


def main() -> None:
    """Run every case and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", default="")
    parser.add_argument("--profile", type=Path, help="of this machine, with steps of our serving engine")
    parser.add_argument(
        "--config-out", type=Path, help="write the model there, for meshwright profile, and nothing else"
    )
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    if given.config_out is not None:
        given.config_out.mkdir(parents=True, exist_ok=True)
        (given.config_out / "config.json").write_text(json.dumps(CONFIG))
        return
    cluster = ClusterSpec.parse(f"local:{given.ranks}")
    if given.profile is not None:
        cluster = profiled_cluster(Profile.load(given.profile))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "rewards.py").write_text(REWARD)
        rows = [json.dumps({"prompt": [(idx + k) % 16 for k in range(4)]}) for idx in range(64)]
        (folder / "prompts.jsonl").write_text("\n".join(rows))
        chosen = {case: fields for case, fields in CASES.items() if given.only in case}
        results = {case: run(folder, case, fields, cluster, given.steps) for case, fields in chosen.items()}
    given.out.write_text(json.dumps({"ranks": given.ranks, "steps": given.steps, "cases": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
