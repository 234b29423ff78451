"""Published post-training runs against predictions, generation step by step, and the search on its largest case.

    python benchmarks/post_training.py DATA [--out benchmarks/post_training.json] [--monte-carlo-s 10]

DATA is a folder with rl_runs.csv, rl_steps.csv and weight_sync.csv. One factor for each engine and version is the median over
every second row in the order of the file, from the first one on; errors are of the other rows. Ratios of measured to predicted
seconds by feature stand before any factor. Runs whose mean length is not published are predicted with the mean at which the update
of the colocated run takes as long as measured; only their ratio of split to colocated counts.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import time
from collections import defaultdict
from pathlib import Path
from statistics import NormalDist, median
from typing import Any

import numpy as np
from meshwright.planner import plan_rl
from meshwright.planner.post_training.costs import GENERATION
from meshwright.planner.request import PlanRequest
from meshwright.planner.tasks.post_training import search_post_training
from meshwright.schema import ClusterSpec, ModelSpec
from meshwright.schema.rl import RlModel, RlWorkload, lengths_of_mean
from meshwright.solvers.pools import PlacedPools, PoolsInstance, check, partitions, period
from meshwright.validation.post_training import (
    MODELS,
    Prediction,
    Run,
    explainable,
    factors,
    pairs,
    predict,
    predictions,
    r_squared,
    read_runs,
    scored,
    unseen_r_squared,
)

OUT = Path(__file__).resolve().parent / "post_training.json"
FEATURES = ("gpu", "model", "placement", "version")
LENGTHS = ("response_mean", "response_max")
RESPONSE_LIMIT = {"mi300-ppo-7b": 512.0}
"""Of runs whose share of cut responses is known, from which the spread of lengths is fitted."""


def runs_report(folder: Path) -> dict[str, Any]:
    """Predict every run and score it."""
    runs = read_runs(folder / "rl_runs.csv")
    stated = [run for run in runs if run.number("avg_len") is not None]
    made, without = list[Prediction](), dict[str, str]()
    for answer in predictions(stated):
        if isinstance(answer, Prediction):
            made.append(answer)
        else:
            without[answer[0].name] = answer[1]
    factor = factors(made)
    print(f"{'run':14} {'model':13} {'gpu':8} {'n':>4} {'placement':10} {'measured':>8} {'predicted':>9} {'ratio':>6}")
    for each in made:
        run = each.run
        print(
            f"{run.name:14} {run.fields['model']:13} {run.fields['gpu']:8} {run.gpus:4} {run.fields['placement']:10} "
            f"{run.step_s:8.1f} {each.step_s:9.1f} {run.step_s / each.step_s:6.2f}"
        )
    residuals = {}
    for name in FEATURES:
        groups = defaultdict(list)
        for each in made:
            groups[each.run.fields[name]].append(each.run.step_s / each.step_s)
        residuals[name] = {key: [round(median(values), 3), len(values)] for key, values in groups.items()}
    errors = [abs(each.step_s * factor[each.run.version] / each.run.step_s - 1) for each in scored(made)]
    print("measured / predicted by feature, before any factor:", json.dumps(residuals, indent=1))
    print(
        f"factors {factor}; held-out half: median error {median(errors):.1%} of {len(errors)} rows; without prediction: {without}"
    )
    every = [*pairs(made), *inferred_pairs([run for run in runs if run.number("avg_len") is None])]
    rows = []
    for shared, split in every:
        measured, predicted = split.run.step_s / shared.run.step_s, split.step_s / shared.step_s
        rows.append(
            {"colocated": shared.run.name, "split": split.run.name, "measured": measured, "predicted": predicted}
        )
        print(
            f"{shared.run.name:14} {split.run.name:14} split / colocated: measured {measured:.2f}, predicted {predicted:.2f}"
        )
    for title, chosen in (
        ("all", rows),
        ("NeMo RL", [row for row in rows if row["colocated"].startswith("nemo")]),
        ("verl", [row for row in rows if row["colocated"].startswith("verl")]),
    ):
        print(title, sides(chosen))
    return {
        "factors": factor, "median_error": median(errors), "rows_scored": len(errors),
        "residuals": residuals, "pairs": rows,
        "runs": [{"run": e.run.name, "measured_s": e.run.step_s, "predicted_s": e.step_s, "parts_s": e.parts_s} for e in made],
    }  # fmt: skip


def sides(rows: list[dict[str, Any]]) -> str:
    """Count pairs whose right side and whose ratio is predicted."""
    right = sum((row["measured"] < 1) == (row["predicted"] < 1) for row in rows)
    within = sum(abs(row["predicted"] / row["measured"] - 1) <= 0.25 for row in rows)
    return f"right side {right} of {len(rows)}, ratio within 25 % {within} of {len(rows)}"


def inferred_pairs(runs: list[Run]) -> list[tuple[Prediction, Prediction]]:
    """Return pairs of runs with one unknown: the mean length, from the update of the colocated one."""
    usable = [run for run in runs if run.number("samples") and run.number("max_len") and run.fields["model"] in MODELS]
    found, ratios = [], []
    for shared in (run for run in usable if not run.is_split and run.number("update_actor_s")):
        low, high = 100.0, float(shared.number("max_len") or 0) / 2
        for _ in range(6):
            middle = math.sqrt(low * high)
            seconds = predict(shared, middle).parts_s["update_actor"]
            low, high = (middle, high) if seconds < (shared.number("update_actor_s") or 0) else (low, middle)
        mean = math.sqrt(low * high)
        split = [
            run for run in usable if run.is_split and run.gpus == shared.gpus and "staleness" in run.fields["note"]
        ]
        print(f"{shared.name}: mean length {mean:.0f} by its update")
        both = [(predict(shared, mean), predict(run, mean)) for run in split]
        for each in {each.run.name: each for pair in both for each in pair}.values():
            phases = {key: each.run.number(key) for key in ("gen_s", "logprob_s", "update_actor_s")}
            parts = {name: round(seconds, 1) for name, seconds in each.parts_s.items()}
            print(f"{each.run.name}: measured {each.run.step_s:.0f} s {phases}, predicted {each.step_s:.0f} s {parts}")
        found += both
        ratios.append((shared.number("gen_s") or 0) / both[0][0].parts_s["generate"] * GENERATION)
    print(f"generation, measured / predicted: {[round(r, 2) for r in ratios]}; GENERATION is {GENERATION}")
    return found


def number(text: str) -> float:
    """Read a cell; nan where it is empty."""
    return float(text) if text else math.nan


def steps_report(folder: Path) -> dict[str, Any]:
    """Explain generation step by step by lengths, in each run and in all, and fit the spread of lengths.

    Decoding takes a step until the longest response ends, and each its rows: seconds are linear in longest and mean.
    """
    by_run = defaultdict(list)
    with (folder / "rl_steps.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            by_run[row["run"]].append(row)
    runs = {
        name: [row for row in rows[2:] if all(row[key] for key in ("gen_s", *LENGTHS))] for name, rows in by_run.items()
    }
    explained = {}
    print(f"generation seconds by step; {', '.join(LENGTHS)}; all columns: those that every step of the run has")
    for name, rows in {**runs, "all": [row for each in runs.values() for row in each]}.items():
        seconds = [number(row["gen_s"]) for row in rows]
        every = [key for key in rows[0] if key not in ("run", "step_s", "gen_s") and all(row[key] for row in rows)]
        columns = {
            "lengths": [[number(row[key]) for row in rows] for key in LENGTHS],
            "all columns": [[number(row[key]) for row in rows] for key in every],
        }
        explained[name] = {"steps": len(rows), "r2": r_squared(columns["lengths"], seconds)}
        for title, given in columns.items():
            explained[name] |= {
                f"{title}: trees fitted on half": unseen_r_squared(given, seconds),
                f"{title}: explainable": explainable(given, seconds),
            }
        print(name, {key: round(value, 2) for key, value in explained[name].items()})
    sigmas = [
        sigma_of(number(row["response_mean"]), number(row["clip_ratio"]), limit)
        for name, limit in RESPONSE_LIMIT.items()
        for row in runs[name]
        if number(row["clip_ratio"]) > 0.003
    ]
    print(f"spread of lengths: sigma {median(sigmas):.2f} (median of {len(sigmas)} steps with cut responses)")
    return {"explained": explained, "sigma": median(sigmas)}


def sigma_of(mean: float, cut: float, limit: float) -> float:
    """Return the sigma of lengths cut at a limit with this mean and share of cut ones."""
    z = NormalDist().inv_cdf(1 - cut)
    low, high = 0.05, 2.0
    for _ in range(50):
        middle = (low + high) / 2
        mu = math.log(limit) - z * middle
        value = math.exp(mu + middle**2 / 2) * NormalDist().cdf(z - middle) + limit * cut
        low, high = (middle, high) if value > mean else (low, middle)
    return (low + high) / 2


def weights_report(folder: Path) -> list[dict[str, Any]]:
    """Compare the sending of weights with measured seconds."""
    sizes = {
        "GLM-4.5-Air (BF16)": 2 * 106e9, "Qwen3-235B-A22B (BF16)": 2 * 235e9, "DeepSeek-V3.1 (FP8)": 671e9,
        "Kimi-K2 (FP8)": 1.03e12,
        "Qwen2.5-Math-7B": 2 * 7.6e9, "Qwen3-30B-A3B": 2 * 30.5e9, "Qwen3-235B-A22B": 2 * 235e9,
    }  # fmt: skip
    cluster = ClusterSpec.parse("16xH800-SXM-80GB")
    link = cluster.levels[-1].link
    rate = link.bandwidth_bytes_per_s * min(link.efficiency.p2p, 1.0)
    rows = []
    with (folder / "weight_sync.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            predicted, measured = sizes[row["model"]] / rate, float(row["seconds"])
            rows.append(
                {"model": row["model"], "method": row["method"], "measured_s": measured, "predicted_s": predicted}
            )
            print(
                f"weights {row['model']:24} {row['method'][:28]:28} measured {measured:6.2f} predicted {predicted:6.2f}"
            )
    return rows


def search_report(monte_carlo_s: float) -> dict[str, Any]:
    """Plan four models on 1,024 devices, and draw placements for a while on the same costs."""
    actor = ModelSpec.named("llama-3.1-8b")
    work = RlWorkload(
        algorithm="ppo", models=tuple(RlModel(role=role, model=actor) for role in ("actor", "critic", "reference")),
        reward_function="rewards.py:exact", prompts=512, responses=16, prompt_len=300, lengths=lengths_of_mean(1500, 8192),
        max_len=8192, updates=4, staleness=1.0,
    )  # fmt: skip
    cluster = ClusterSpec.parse("1024xH100-SXM-80GB")
    start = time.process_time()
    plan_rl(work, cluster)
    cpu_s = time.process_time() - start
    search = search_post_training(PlanRequest.create(actor, cluster, work))
    best = search.answer.objective
    drawn, count = monte_carlo(search.instance, monte_carlo_s)
    print(f"4 models x 1,024 devices: {cpu_s:.1f} CPU s; step {best:.3f} s; the best of {count} draws {drawn:.3f} s")
    return {"cpu_s": cpu_s, "step_s": best, "drawn_s": drawn, "draws": count}


def monte_carlo(instance: PoolsInstance, seconds: float) -> tuple[float, int]:
    """Return the best of a random walk over placements on the same costs (Metropolis), and how many it tried."""
    rng, every = np.random.default_rng(0), list(partitions(instance.num_copies))
    end, best, count = time.process_time() + seconds, math.inf, 0
    current, current_s = None, math.inf
    while time.process_time() < end:
        count += 1
        partition = every[rng.integers(len(every))] if current is None or rng.random() < 0.3 else current.partition
        sizes = list(current.size_idxs) if current is not None and partition == current.partition else []
        sizes = sizes or rng.integers(0, len(instance.sizes), len(partition)).tolist()
        sizes[int(rng.integers(len(sizes)))] = int(rng.integers(len(instance.sizes)))
        offloaded = frozenset(np.flatnonzero(rng.random(instance.num_copies) < 0.2).tolist())
        answer = PlacedPools(partition, tuple(sizes), offloaded)
        if check(instance, answer):
            continue
        value = period(instance, answer)
        if value < current_s or rng.random() < math.exp(-(value / current_s - 1) / 0.05):
            current, current_s = answer, value
        best = min(best, value)
    return best, count


def main() -> None:
    """Print every report and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--monte-carlo-s", type=float, default=10.0)
    given = parser.parse_args()
    result = {
        "runs": runs_report(given.data), "steps": steps_report(given.data), "weights": weights_report(given.data),
        "search": search_report(given.monte_carlo_s),
    }  # fmt: skip
    given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
