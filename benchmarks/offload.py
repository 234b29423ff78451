"""Offload schedules against their bound, their simulation, uniform policies and other tools' defaults: one command.

    python benchmarks/offload.py [--quick]        writes benchmarks/offload.json and offload.md

All policies run in the same event simulation on the same rates, so the comparison is of choices, not of machines.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from meshwright.solvers import offload, offload_count
from offload_cases import MACHINES, best_uniform_s, cases, peers_s, problem, tuned_uniform_s


def large(quick: bool) -> list[dict[str, Any]]:
    """128 blocks, alike and not: seconds and gap."""
    rows = []
    for machine in MACHINES[:: 2 if quick else 1]:
        for spread in (0.0, 0.3):
            for microbatches in (1, 8):
                instance = problem(machine, 128, 8192, sequences=2, microbatches=microbatches, ranks=64, spread=spread)
                begun = time.perf_counter()
                offload_count.lower_bound_s(instance)
                count_s = time.perf_counter() - begun
                found = offload.solve(instance)
                rows.append(
                    {
                        "machine": machine.name, "spread": spread, "microbatches": microbatches, "status": found.status,
                        "solve_s": found.solve_s, "count_s": count_s, "gap": found.gap if found.choice else None,
                    }
                )  # fmt: skip
    return rows


def compared(quick: bool) -> list[dict[str, Any]]:
    """The forty cases against uniform policies and other tools' defaults."""
    rows = []
    for name, instance in list(cases())[:: 4 if quick else 1]:
        found = offload.solve(instance)
        if found.simulated is None:
            rows.append({"case": name, "status": found.status})
            continue
        step = found.simulated.step_s
        peers = peers_s(instance)
        rows.append(
            {
                "case": name, "status": found.status, "step_s": step, "bound_s": found.bound_s, "solve_s": found.solve_s,
                "gap": found.gap, "simulated_over_planned": step / found.objective_s - 1,
                "uniform": best_uniform_s(instance) / step, "tuned_uniform": tuned_uniform_s(instance) / step,
                "peers": {peer: seconds / step for peer, seconds in peers.items()},
            }
        )  # fmt: skip
        print(name, {k: v for k, v in rows[-1].items() if k != "case"}, file=sys.stderr)
    return rows


def _median(values: list[float]) -> float:
    finite = [value for value in values if np.isfinite(value)]
    return statistics.median(finite) if finite else float("nan")


def report(rows: list[dict[str, Any]], big: list[dict[str, Any]]) -> str:
    """The figures beside the goals."""
    solved = [row for row in rows if "step_s" in row]
    gaps = [row["gap"] for row in big if row["gap"] is not None]
    uniform, tuned = ([row[name] for row in solved] for name in ("uniform", "tuned_uniform"))
    best_peer = [min(row["peers"].values()) for row in solved]
    close = sum(abs(row["simulated_over_planned"]) <= 0.03 for row in solved)
    lines = [
        "# Offload schedules",
        "",
        "`python benchmarks/offload.py`; every policy in the same event simulation. Ratios are its seconds over the plan's;",
        "medians are of the policies that fit. A plan's objective is the smaller of the linear program with its whole layers and",
        "of its simulation, so where the program is the slower one its row of `plan against simulation` reads 0.",
        "",
        "| what | goal | found |",
        "|---|---|---|",
        f"| plan of 128 blocks, {len(big)} cases | <= 1 s | median {_median([row['solve_s'] for row in big]):.2f} s, "
        f"at most {max(row['solve_s'] for row in big):.2f} s |",
        f"| its gap | <= 2 %, median <= 0.5 % | median {100 * _median(gaps):.2f} %, at most {100 * max(gaps):.2f} % |",
        f"| count form | <= 50 ms | at most {1e3 * max(row['count_s'] for row in big):.0f} ms |",
        f"| plan against simulation, {len(solved)} cases | <= 3 % in 90 % | {close} of {len(solved)} |",
        f"| best uniform policy | never worse, >= 1.10x median | {_median(uniform):.2f}x median, least {min(uniform):.3f}x, "
        f"{sum(not np.isfinite(value) for value in uniform)} do not fit |",
        f"| with a tuned part of the states | | {_median(tuned):.2f}x median, least {min(tuned):.3f}x |",
        f"| best of the tools' defaults | >= 1.2x median | {_median(best_peer):.2f}x median, "
        f"{sum(not np.isfinite(value) for value in best_peer)} fit with none |",
        f"| gap of the {len(solved)} cases | | median {100 * _median([row['gap'] for row in solved]):.2f} %, "
        f"at most {100 * max(row['gap'] for row in solved):.2f} % |",
        "",
        f"{len(rows) - len(solved)} of the {len(rows)} cases fit with no schedule at all.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Run all of it and write the files."""
    quick = "--quick" in sys.argv
    rows, big = compared(quick), large(quick)
    folder = Path(__file__).parent
    text = report(rows, big)
    (folder / "offload.json").write_text(json.dumps({"cases": rows, "large": big}, indent=1, default=str) + "\n")
    (folder / "offload.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
