"""Random graphs of operators (tests/parity/random_modules.py): proved placements against one rank, and planted wrong signatures.

    python benchmarks/random_modules.py OUT.json [--graphs 500] [--on-ranks 0]

Every signature of every operator of a graph is found by trial and proved by the gate. Then signatures are drawn at random, whatever
they cost, and all ranks run in one process; and a signature that is wrong in one place is put at an operator, which the gate has to
name. Of the first ``--on-ranks`` graphs the program's placements and random ones run on two gloo ranks as well. Graphs are those of
the seeds from 0; the file has what was wrong, by seed.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "parity"))

import random_modules
from harness import run_group
from zoo_plans import differences

PLANTS = 4
"""Of a kind of unit; a graph has two."""


def add_graph(totals: dict[str, Any], seed: int) -> None:
    """Try one graph."""
    chance = random.Random(seed)
    units, whole = random_modules.gated(*random_modules.build(random_modules.steps_of(seed)))
    totals["graphs"] += 1
    totals["whole units"] += [[seed, unit.path, unit.why] for unit in whole]
    for unit in units:
        totals["units"] += 1
        totals["operators"] += len(unit.signatures)
        totals["signatures"] += sum(map(len, unit.signatures.values()))
        if (wrong := unit.why_wrong(*unit.placed(chance))) is not None:
            totals["wrong"].append([seed, wrong.why])
        for plant in filter(None, (random_modules.planted(unit, chance) for _ in range(PLANTS))):
            name, signature, named = plant
            totals["planted"] += 1
            if named is None or named.node != name:
                totals["not named"].append([seed, name, str(signature), named and named.why])


def on_ranks(count: int) -> dict[str, Any]:
    """Run the first graphs on two ranks."""
    cases = [case for seed in range(count) for case in random_modules.cases_of(seed)]
    with tempfile.TemporaryDirectory() as folder:
        outcomes = run_group(2, cases, Path(folder), timeout_s=3600.0)
    wrong = {}
    for case in cases:
        gradients = {key: grad for outcome in outcomes[case.name] for key, grad in outcome.gradients.items()}
        if problems := differences(gradients, random_modules.alone(json.loads(case.module))):
            wrong[case.name] = problems
    return {"runs": len(cases), "wrong": wrong}


def main() -> None:
    """Try the graphs and write what came out."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("--graphs", type=int, default=500)
    parser.add_argument("--on-ranks", type=int, default=0)
    given = parser.parse_args()
    start = time.process_time()
    totals: dict[str, Any] = {
        "graphs": 0, "units": 0, "operators": 0, "signatures": 0, "whole units": [], "wrong": [], "planted": 0, "not named": [],
    }  # fmt: skip
    if given.on_ranks:
        totals["on two ranks"] = on_ranks(given.on_ranks)
    for seed in range(given.graphs):
        add_graph(totals, seed)
        totals["cpu_s_a_graph"] = round((time.process_time() - start) / totals["graphs"], 2)
        if seed % 20 == 19 or seed == given.graphs - 1:
            given.out.write_text(json.dumps(totals, indent=1) + "\n")
            print(seed, {key: value for key, value in totals.items() if not isinstance(value, list)}, flush=True)
    print(json.dumps(totals, indent=1))


if __name__ == "__main__":
    main()
