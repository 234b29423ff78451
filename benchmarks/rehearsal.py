"""The memory model against rehearsals: layouts drawn at random over catalogue models at their real size.

    python benchmarks/rehearsal.py OUT.jsonl [--layouts 300] [--seed 21] [--seconds 3600] [--kinds fullest] [--models A,B]

Each layout is one that `plan` chooses with some fields fixed at random: sizes of axes, ZeRO stage, recompute, schedule. Rehearsed
is the rank with the highest prediction, or the first, a middle and the last stage (--kinds some), or all; one line each in OUT;
stdout has the errors of the peak,
predicted over rehearsed less one, and how many plans failed. What a plan counts for libraries (cuBLAS), which a rehearsal does not
see, is taken off the prediction first. Lines that OUT has already are not done again.
"""

from __future__ import annotations

import json
import random
import time
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from meshwright.cost_models.coefficients import packaged_coefficients
from meshwright.planner import plan
from meshwright.runtime.rehearsal.kinds import rank_kinds
from meshwright.runtime.rehearsal.run import rehearse
from meshwright.schema import ConfigError, InfeasibleError, MeshwrightError, TrainingPlan
from meshwright.schema.errors import SolverLimitError

MODELS = (
    "llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b", "llama-3.2-1b", "qwen2.5-32b", "qwen3-8b", "gpt3-175b",
    "mixtral-8x7b", "qwen3-30b-a3b", "olmoe-1b-7b", "deepseek-v2-lite", "deepseek-v3", "smollm2-1.7b", "qwen3-235b-a22b",
)  # fmt: skip
FIXED = 0.75
"""Part of the fields of a layout that are drawn; the others are chosen by `plan`."""

DEVICES = ("H100-SXM-80GB", "H200-SXM-141GB", "A100-SXM-80GB", "B200-SXM-180GB")


def drawn(rng: random.Random, models: tuple[str, ...]) -> tuple[dict[str, Any], TrainingPlan | None]:
    """Draw a problem and some fixed fields; return them and what `plan` makes of them, None where nothing fits."""
    model, ranks = rng.choice(models), 2 ** rng.randint(3, 14)
    fixed: dict[str, Any] = {}
    for name, values in {
        "pp": (1, 1, 2, 4, 8, 16), "tp": (1, 2, 4, 8), "cp": (1, 1, 1, 2, 4), "ep": (1, 2, 4, 8),
        "zero_stage": (0, 1, 2, 3), "recompute": ("none", "selective", "full", "mixed"), "micro_batch_size": (1, 2, 4),
        "schedule": ("1f1b", "gpipe", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min"), "num_model_chunks": (1, 1, 2),
        "sequence_parallel": (True, False), "cp_ulysses": (1, 2), "dp_replicate": (1, 2, 4), "etp": (1, 2),
        "half_blocks": (False, False, True),
    }.items():  # fmt: skip
        if rng.random() < FIXED:
            fixed[name] = rng.choice(values)
    passes = rng.choice((1, 2, 4, 8))
    problem = {
        "model": model, "cluster": f"{ranks}x{rng.choice(DEVICES)}", "seq_len": rng.choice((1024, 2048, 4096, 8192, 16384)),
        "global_batch_size": ranks * passes // rng.choice((1, 2, 4, 8)), "precision": rng.choice(("bf16-mixed",) * 4 + ("fp32",)),
        "fixed": fixed,
    }  # fmt: skip
    problem["global_batch_size"] = max(problem["global_batch_size"], 1)
    try:
        options = {name: value for name, value in problem.items() if name not in ("model", "cluster")}
        return problem, plan(model, problem["cluster"], **options, runnable=True, time_limit_s=5.0)
    except (InfeasibleError, ConfigError, SolverLimitError):
        return problem, None


def main() -> None:
    """Draw, rehearse, compare."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layouts", type=int, default=300)
    parser.add_argument("--seed", type=int, default=21)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no layout after so long")
    parser.add_argument("--max-work", type=int, default=10**9, help="skip ranks with more passes through blocks")
    parser.add_argument("--kinds", choices=("fullest", "some", "all"), default="fullest")
    parser.add_argument("--models", default=",".join(MODELS))
    options = parser.parse_args()
    done = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    known, rng, begun_s = {row["number"] for row in done}, random.Random(options.seed), time.monotonic()
    number = 0
    with options.out.open("a") as file:
        while number < options.layouts and time.monotonic() - begun_s < options.seconds:
            problem, given = drawn(rng, tuple(options.models.split(",")))
            if given is None:
                continue
            work = min(given.num_microbatches, 4) * given.model.num_blocks // given.layout.pp
            if work > options.max_work:
                continue
            number += 1
            if number - 1 in known:
                continue
            for row in compared(given, which=options.kinds):
                row = {"number": number - 1, "problem": problem, "layout": str(given.layout), **row}
                done.append(row)
                file.write(json.dumps(row) + "\n")
                file.flush()
    print(json.dumps(summary(done), indent=2))


def compared(given: TrainingPlan, *, which: str) -> list[dict[str, Any]]:
    """Rehearse a plan; return a row for each kind of rank."""
    kinds, began_s = rank_kinds(given), time.monotonic()
    chosen = {
        "all": kinds,
        "some": [kinds[idx] for idx in sorted({0, len(kinds) // 2, len(kinds) - 1})],
        "fullest": [
            max(kinds, key=lambda kind: given.estimate.stages[given.rank_of_stage[kind.stages[0]]].memory_bytes.total)
        ],
    }[which]
    try:
        rehearsal = rehearse(given, ranks=[kind.rank for kind in chosen], worst=False)
    except MeshwrightError as error:
        return [{"failure": str(error)}]
    seconds = round((time.monotonic() - began_s) / len(chosen), 1)
    library = float(packaged_coefficients()["memory"]["workspace_bytes"])
    rows: list[dict[str, Any]] = [
        {
            "stage": kind.stage, "rank": kind.rank, "seconds": seconds, "rehearsed": kind.peak_allocated_bytes,
            "predicted": kind.predicted_allocated_bytes,
            "off": (kind.predicted_allocated_bytes - library) / kind.peak_allocated_bytes - 1,
            "reserved": kind.peak_reserved_bytes, "moment": kind.moment, "operator": kind.operator, "module": kind.module,
            "memory": kind.memory_bytes, "predicted_memory": kind.predicted_memory_bytes,
            "largest": [list(one.model_dump().values()) for one in kind.largest[:6]],
        }
        for kind in rehearsal.kinds
    ]  # fmt: skip
    return rows + [{"failure": "; ".join((one.message, *one.details))} for one in rehearsal.failures]


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the errors over plans, each by its fullest rank, and over all ranks."""
    failed = {row["number"] for row in rows if "failure" in row}
    fullest: dict[int, dict[str, Any]] = {}
    for row in rows:
        if "off" in row and row["rehearsed"] > fullest.get(row["number"], {"rehearsed": 0})["rehearsed"]:
            fullest[row["number"]] = row
    off = [row["off"] for row in fullest.values()]
    if not off:
        return {"plans": 0, "failed": len(failed)}
    return {
        "plans": len(fullest | dict.fromkeys(failed)), "failed": len(failed),
        "mean_error": sum(map(abs, off)) / len(off), "within_5_percent": sum(abs(one) <= 0.05 for one in off) / len(off),
        "lowest": min(off), "highest": max(off),
    }  # fmt: skip


if __name__ == "__main__":
    main()
