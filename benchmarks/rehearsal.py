"""The memory model against rehearsals: layouts drawn at random over catalogue models at their real size.

    python benchmarks/rehearsal.py OUT.jsonl [--layouts 300] [--seed 21] [--max-work 24] [--kinds fullest] [--drawn 0.75]
        [--summary FILE]

Each layout is one that `plan` chooses with some fields fixed at random: sizes of axes, ZeRO stage, recompute, schedule; --drawn
says how many of them are, and what is chosen takes `plan` most of the time here. Rehearsed is the rank with the highest
prediction, or the first, a middle and the last stage (--kinds some), or all; one line each in OUT; the summary has the errors of
the peak, predicted over rehearsed less one, how many plans failed, and how many kinds of collectives have the bytes of their
formula. What a plan counts for libraries (cuBLAS), which a rehearsal does not see, is taken off the prediction first. Where all
stages were rehearsed (--kinds all), the step as it is laid out over streams stands next to the closed form's, by part, and the
summary has how far they are apart. Where OUT has lines already, it goes on after the last of them.
"""

from __future__ import annotations

import json
import random
import time
from argparse import ArgumentParser
from pathlib import Path
from statistics import median
from typing import Any

from meshwright.cost_models.coefficients import packaged_coefficients
from meshwright.planner import plan
from meshwright.planner.rehearse import predicted_parts
from meshwright.runtime.rehearsal.kinds import rank_kinds
from meshwright.runtime.rehearsal.run import rehearse
from meshwright.schema import ConfigError, InfeasibleError, MeshwrightError, TrainingPlan
from meshwright.schema.errors import SolverLimitError
from meshwright.schema.runnable import why_not_runnable

MODELS = (
    "llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b", "llama-3.2-1b", "qwen2.5-32b", "qwen3-8b", "gpt3-175b",
    "mixtral-8x7b", "qwen3-30b-a3b", "olmoe-1b-7b", "deepseek-v2-lite", "deepseek-v3", "smollm2-1.7b", "qwen3-235b-a22b",
)  # fmt: skip
FEW_NUMBERS = 2e-4
"""Part of the bytes over an axis that losses, votes and counts of rows may be, which no formula counts."""

DEVICES = ("H100-SXM-80GB", "H200-SXM-141GB", "A100-SXM-80GB", "B200-SXM-180GB")


def drawn(rng: random.Random, models: tuple[str, ...], part: float) -> dict[str, Any]:
    """Draw a problem and this part of the fields of its layout."""
    model, ranks = rng.choice(models), 2 ** rng.randint(3, 14)
    fixed: dict[str, Any] = {}
    for name, values in {
        "pp": (1, 1, 2, 4, 8, 16), "tp": (1, 2, 4, 8), "cp": (1, 1, 1, 2, 4), "ep": (1, 2, 4, 8),
        "zero_stage": (0, 1, 2, 3), "recompute": ("none", "selective", "full", "mixed"), "micro_batch_size": (1, 2, 4),
        "schedule": ("1f1b", "gpipe", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min"), "num_model_chunks": (1, 1, 2),
        "sequence_parallel": (True, False), "cp_ulysses": (1, 2), "dp_replicate": (1, 2, 4), "etp": (1, 2),
        "half_blocks": (False, False, True),
    }.items():  # fmt: skip
        if rng.random() < part:
            fixed[name] = rng.choice(values)
    passes = rng.choice((1, 2, 4, 8))
    return {
        "model": model, "cluster": f"{ranks}x{rng.choice(DEVICES)}", "seq_len": rng.choice((1024, 2048, 4096, 8192, 16384)),
        "global_batch_size": max(1, ranks * passes // rng.choice((1, 2, 4, 8))),
        "precision": rng.choice(("bf16-mixed",) * 4 + ("fp32",)), "fixed": fixed,
    }  # fmt: skip


def planned(problem: dict[str, Any], max_work: int) -> TrainingPlan | None:
    """Return what `plan` makes of a problem; None where nothing fits, `apply` does not train it, or it is more work than that."""
    options = {name: value for name, value in problem.items() if name not in ("model", "cluster")}
    try:
        given = plan(problem["model"], problem["cluster"], **options, runnable=True, time_limit_s=5.0)
    except (InfeasibleError, ConfigError, SolverLimitError):
        return None
    if why_not_runnable(given.model, given.workload):
        return None
    ring = given.layout.cp // given.layout.cp_ulysses  # a ring's steps are operators of their own
    work = min(given.num_microbatches, 4) * given.model.num_blocks * ring // given.layout.pp
    return given if work <= max_work else None


def main() -> None:
    """Draw, rehearse, compare."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layouts", type=int, default=300)
    parser.add_argument("--seed", type=int, default=21)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no layout after so long")
    parser.add_argument("--max-work", type=int, default=10**9, help="skip ranks with more passes through blocks")
    parser.add_argument("--kinds", choices=("fullest", "some", "all"), default="fullest")
    parser.add_argument(
        "--drawn", type=float, default=0.75, help="part of a layout's fields; `plan` chooses the others"
    )
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--summary", type=Path, help="write the summary there as well")
    options = parser.parse_args()
    done = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    rng, begun_s, models = random.Random(options.seed), time.monotonic(), tuple(options.models.split(","))
    while done and drawn(rng, models, options.drawn) != done[-1]["problem"]:
        pass
    numbers = range(done[-1]["number"] + 1 if done else 0, options.layouts)
    with options.out.open("a") as file:
        for number in numbers:
            if time.monotonic() - begun_s > options.seconds:
                break
            while (given := planned(problem := drawn(rng, models, options.drawn), options.max_work)) is None:
                pass
            for row in compared(given, which=options.kinds):
                row = {"number": number, "problem": problem, "layout": str(given.layout), **row}
                done.append(row)
                file.write(json.dumps(row) + "\n")
                file.flush()
    about = {
        "seed": options.seed,
        "max_work": options.max_work,
        "kinds": options.kinds,
        "drawn": options.drawn,
    } | summary(done)
    print(text := json.dumps(about, indent=1))
    if options.summary is not None:
        options.summary.write_text(text + "\n")


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
            "largest": [list(one.model_dump().values()) for one in kind.largest[:12]],
            "time_parts": rehearsal.time_parts, "predicted_time_parts": predicted_parts(given) if rehearsal.time_parts else {},
            "collectives": [(one.axis, one.op, one.bytes, one.predicted_bytes) for one in kind.collectives],
        }
        for kind in rehearsal.kinds
    ]  # fmt: skip
    return rows + [{"failure": "; ".join((one.message, *one.details))} for one in rehearsal.failures]


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the errors over plans, each by its fullest rank, and how many sums of collectives are those of the formulas."""
    failed = {row["number"] for row in rows if "failure" in row}
    fullest: dict[int, dict[str, Any]] = {}
    for row in rows:
        if "off" in row and row["rehearsed"] > fullest.get(row["number"], {"rehearsed": 0})["rehearsed"]:
            fullest[row["number"]] = row
    off = sorted(row["off"] for row in fullest.values())
    counts = {"equal": 0, "other": 0, "without_formula": 0}
    for _, _, counted, predicted in (one for row in rows for one in row.get("collectives", ())):
        if predicted is None:
            counts["without_formula"] += 1
        else:  # a few numbers a message: losses, votes, counts of rows
            counts["equal" if abs(counted - predicted) <= FEW_NUMBERS * counted else "other"] += 1
    errors = {
        "mean_error": round(sum(map(abs, off)) / len(off), 4),
        "within_5_percent": round(sum(abs(one) <= 0.05 for one in off) / len(off), 4),
        "lowest": round(off[0], 4), "highest": round(off[-1], 4),
    } if off else {}  # fmt: skip
    errors |= times(list(fullest.values()))
    return {"plans": len(fullest | dict.fromkeys(failed)), "failed": len(failed), **errors, "collectives": counts}


def times(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how far the closed form's steps are from those laid out, and by which part: both over the step that is laid out."""
    pairs = [(row["time_parts"], row["predicted_time_parts"]) for row in rows if row.get("time_parts")]
    if not pairs:
        return {}
    off = sorted(sum(closed.values()) / sum(laid_out.values()) - 1 for laid_out, closed in pairs)
    names = {name for pair in pairs for parts in pair for name in parts}
    by_part = {
        name: median(
            [
                abs(closed.get(name, 0.0) - laid_out.get(name, 0.0)) / sum(laid_out.values())
                for laid_out, closed in pairs
            ]
        )
        for name in names
    }
    return {
        "steps": len(off), "median_step_difference": round(median(map(abs, off)), 4),
        "lowest_step_difference": round(off[0], 4), "highest_step_difference": round(off[-1], 4),
        "median_by_part": {name: round(share, 4) for name, share in sorted(by_part.items(), key=lambda item: -item[1])},
    }  # fmt: skip


if __name__ == "__main__":
    main()
