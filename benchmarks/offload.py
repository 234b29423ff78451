"""Offload schedules against their bound, their simulation, uniform policies and other tools' defaults.

    python benchmarks/offload.py [--seed N] [--cases N] [--only cases|large]

Writes benchmarks/offload.json and the tables of benchmarks/offload.md. All policies run in the same event simulation on the same
rates, so the comparison is of choices, not of machines. ``--only`` runs one part and keeps the other part's rows.

Seconds are of the processor (one thread), as other programs may share the machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from meshwright.solvers.offload import bound, schedule
from offload_cases import MACHINES, best_uniform_s, cases, nothing_moves, peers_s, problem, tuned_uniform_s

FOLDER = Path(__file__).parent
START, END = "<!-- offload.py -->", "<!-- end -->"


def measured(name: str, instance: Any) -> dict[str, Any]:
    """One problem solved: seconds of the processor, the bound, the linear program of the choice, its simulation."""
    begun = time.process_time()
    bound.lower_bound_s(instance)
    counted = time.process_time()
    solution = schedule.solve(instance)
    row: dict[str, Any] = {"case": name, "status": str(solution.status), "count_s": counted - begun}
    row["solve_s"] = time.process_time() - counted
    if solution.choice is not None and solution.simulated is not None:
        step, planned = solution.simulated.step_s, solution.objective
        row |= {
            "bound_s": solution.bound, "program_s": planned, "simulated_s": step, "gap": solution.gap,
            "simulated_gap": 1 - solution.bound / step, "simulated_over_program": step / planned - 1,
            "moves": not nothing_moves(solution.choice),
        }  # fmt: skip
    return row


def large(seed: int) -> list[dict[str, Any]]:
    """128 blocks, alike and not."""
    rows = []
    for machine in MACHINES:
        for variation in (0.0, 0.3):
            for microbatches in (1, 8):
                name = f"{machine.name}, +-{100 * variation:.0f} %, {microbatches} micro-batches"
                instance = problem(
                    machine, 128, 8192, sequences=2, microbatches=microbatches, ranks=64, variation=variation, seed=seed
                )
                rows.append(measured(name, instance))
                print(rows[-1], file=sys.stderr, flush=True)
    return rows


def compared(seed: int, count: int) -> list[dict[str, Any]]:
    """Generated cases against uniform policies and other tools' defaults."""
    rows = []
    for name, instance in cases(seed, count):
        row = measured(name, instance)
        step = row.get("simulated_s", np.inf)
        others = {"uniform": best_uniform_s(instance), "tuned_uniform": tuned_uniform_s(instance)} | peers_s(instance)
        row["seconds_of"] = {other: seconds for other, seconds in others.items() if np.isfinite(seconds)}
        row["over_plan"] = {other: seconds / step for other, seconds in row["seconds_of"].items() if np.isfinite(step)}
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    return rows


def _spread(values: list[float], form: str = "{:.2f}") -> str:
    if not values:
        return "none"
    return f"median {form.format(statistics.median(values))}, at most {form.format(max(values))}"


def _ratios(rows: list[dict[str, Any]], names: tuple[str, ...]) -> list[float]:
    """Seconds of the best of some policies over the plan's, where one of them fits."""
    known = [[row["over_plan"][name] for name in names if name in row["over_plan"]] for row in rows]
    return [min(ratios) for ratios in known if ratios]


def report(data: dict[str, Any]) -> str:
    """Return the figures next to the goals."""
    rows, big = data["cases"], data["large"]
    solved, large_solved = ([row for row in part if "simulated_s" in row] for part in (rows, big))
    moving = [row for row in solved if row["moves"]]
    unproved = [row for part in (rows, big) for row in part if row["status"] == "unknown"]
    percent = "{:.2f} %"
    lines = [
        f"Seed {data['seed']}; {data['date']}. {len(rows)} generated cases: {len(solved)} solved, "
        f"{sum(row['status'] == 'infeasible' for row in rows)} proved not to fit, {len(moving)} of the solved ones move something. "
        f"{len(big)} cases of 128 blocks: {len(large_solved)} solved, {sum(row['status'] == 'infeasible' for row in big)} "
        f"proved not to fit. Neither solved nor proved: {len(unproved)}.",
        "",
        "| what | goal | result |",
        "|---|---|---|",
        f"| 128 blocks: seconds of one core | <= 1 s | {_spread([row['solve_s'] for row in large_solved])} |",
        "| their gap, linear program of the choice over the bound | <= 2 %, median <= 0.5 % | "
        f"{_spread([100 * row['gap'] for row in large_solved], percent)} |",
        f"| their gap, simulation over the bound | | {_spread([100 * row['simulated_gap'] for row in large_solved], percent)} |",
        f"| count form | <= 50 ms | {_spread([1e3 * row['count_s'] for row in [*rows, *big]], '{:.0f} ms')} |",
        f"| cases: seconds of one core | | {_spread([row['solve_s'] for row in solved])} |",
        f"| cases: gap of the linear program | | {_spread([100 * row['gap'] for row in solved], percent)} |",
        f"| cases: gap of the simulation | | {_spread([100 * row['simulated_gap'] for row in solved], percent)} |",
    ]
    for what, part in (
        ("all", [*solved, *large_solved]),
        ("that move something", [r for r in [*solved, *large_solved] if r["moves"]]),
    ):
        apart = [row["simulated_over_program"] for row in part]
        close = sum(abs(value) <= 0.03 for value in apart)
        lines.append(
            f"| simulation over linear program, {what} | <= 3 % in 90 % | {close} of {len(apart)} "
            f"({100 * close / max(len(apart), 1):.0f} %); {_spread([100 * value for value in apart], percent)} |"
        )
    defaults = ("ZeRO-Offload", "ZeRO-Infinity", "FSDP2 CPUOffloadPolicy")
    for what, goal, names in (
        ("best uniform policy", "never worse, >= 1.10x median", ("uniform",)),
        ("with a tuned part of the states", "", ("tuned_uniform",)),
        ("best of the tools' defaults", ">= 1.2x median", defaults),
    ):
        for which, part in (("all", solved), ("that move something", moving)):
            ratios = _ratios(part, names)
            text = f"{statistics.median(ratios):.3f}x median, lowest {min(ratios):.4f}x" if ratios else "none fit"
            lines.append(f"| {what}, cases {which} | {goal} | {text}; fits in {len(ratios)} of {len(part)} |")
    return "\n".join(lines)


def main() -> None:
    """Run what was asked for and write the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=8)
    parser.add_argument("--cases", type=int, default=40)
    parser.add_argument("--only", choices=("cases", "large"))
    parser.add_argument("--out", type=Path, default=FOLDER / "offload.json")
    given = parser.parse_args()
    data = json.loads(given.out.read_text()) if given.out.exists() else {}
    data = {"cases": [], "large": []} | data | {"seed": given.seed, "date": time.strftime("%Y-%m-%d", time.gmtime())}
    if given.only != "large":
        data["cases"] = compared(given.seed, given.cases)
    if given.only != "cases":
        data["large"] = large(given.seed)
    given.out.write_text(json.dumps(data, indent=1) + "\n")
    table = report(data)
    print(table)
    page = FOLDER / "offload.md"
    if given.out.parent == FOLDER and START in page.read_text():
        before, rest = page.read_text().split(START)
        page.write_text(f"{before}{START}\n{table}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
