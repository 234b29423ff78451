"""The small models of tests/parity/zoo.py on gloo ranks: who has a plan, what runs with one rank's gradients, who holds how much.

    python benchmarks/module_zoo.py OUT.json [name ...] [--ranks N ...]
    python benchmarks/module_zoo.py - --blocks 48

Of each model: CPU seconds from its code to a plan with tp 2; every layout that `plan` offers for two ranks, with the largest
difference of a gradient in parts of the largest one; where operators are placed, what a rank of tp 2 holds of the parameters, and
on four and eight ranks tp 2 with zero 3, with two stages, and with stages that are sharded. A layout that is not offered has its
reason, one that ends with an error its last line. The last lines count.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "parity"))

import torch
import zoo
from harness import Case, Outcome, run_group
from meshwright.planner import plan
from meshwright.profilers import profile_module
from meshwright.schema import MeshwrightError, TrainingPlan
from plans import cpu_cluster
from zoo_plans import SHARDED, STAGED, errors, placed_plan, plans_of, share_of_parameters, workload_of

TOLERANCE = 1e-5
"""Of the largest gradient, in fp32."""

FURTHER: dict[str, dict[str, Any]] = {
    "tp 2": {},
    "tp 2, zero 3": SHARDED,
    "tp 2, pp 2": STAGED,
    "tp 2, pp 2, zero 1": {**STAGED, "dp_shard": 2, "zero_stage": 1},
    "pp 2, zero 3": {**STAGED, "tp": 1, "dp_shard": 2, "zero_stage": 3},
    "tp 2, pp 2, zero 3": {**STAGED, "dp_shard": 2, "zero_stage": 3},
}
"""With operators placed, for models that do not say how they are split; those that do are in the layouts of two ranks."""


def planned(name: str, layouts: Collection[str]) -> tuple[dict[str, TrainingPlan], dict[str, Any]]:
    """Return the plans of a model in these of FURTHER, and what there is to say of it without running any."""
    start = time.process_time()
    try:
        plans, refused = plans_of(name)
    except MeshwrightError as error:
        return {}, {"refused": {"all": reason(error)}}
    row: dict[str, Any] = {
        "plan_cpu_s": round(time.process_time() - start, 1),
        "refused": {layout: why.splitlines()[1].strip() for layout, why in refused.items()},
    }
    if "tp" in refused:
        for layout in layouts:
            start = time.process_time()
            try:
                plans[layout] = placed_plan(name, **FURTHER[layout])
            except MeshwrightError as error:
                row["refused"][layout] = reason(error)
            if layout == "tp 2":
                row["placed_cpu_s"] = round(time.process_time() - start, 1)
        if "tp 2" in plans:
            row["share"] = round(share_of_parameters(name, plans["tp 2"]), 3)
    return plans, row


def reason(error: MeshwrightError) -> str:
    """Return the line of a message that says why."""
    return (str(error).splitlines()[1:2] or [str(error)])[0].strip()


def attempt(case: Case, folder: Path) -> Outcome:
    """Run one step; an error, which all ranks meet at the same place, is an outcome."""
    try:
        return zoo.one_step(case, folder)
    except Exception as error:  # whatever a layout meets
        return Outcome(error=f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")


def add_differences(
    rows: Mapping[str, dict[str, Any]], plans: Mapping[str, Mapping[str, TrainingPlan]], size: int
) -> None:
    """Add, of each model and plan for so many ranks, the largest difference of a gradient, or how the run ended."""
    cases = [
        Case(f"{name}: {layout}", found, module=name, run=attempt)
        for name, of_model in plans.items()
        for layout, found in of_model.items()
        if found.layout.world_size == size
    ]
    if cases:
        with tempfile.TemporaryDirectory() as folder:
            outcomes = run_group(size, cases, Path(folder), timeout_s=3600.0)
    for case in cases:
        of_ranks, layout = outcomes[case.name], case.name.removeprefix(f"{case.module}: ")
        gradients = {key: grad for outcome in of_ranks for key, grad in outcome.gradients.items()}
        error = next((outcome.error for outcome in of_ranks if outcome.error), "")
        largest = 0.0 if error else max(errors(gradients, zoo.alone(case.module)).values())
        rows[case.module]["differences"][layout] = error or float(f"{largest:.1e}")
        print(size, case.name, rows[case.module]["differences"][layout], flush=True)


def deep(num_blocks: int) -> dict[str, float]:
    """Return CPU seconds of a profile for tp 2, 4 and 8, and of a plan for eight ranks, of a BERT 256 wide."""
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 8, "vocab_size": 1024}
    model = BertForMaskedLM(BertConfig(num_hidden_layers=num_blocks, **sizes))
    start = time.process_time()
    spec = profile_module(model, {"input_ids": torch.zeros(2, 64, dtype=torch.long)}, tp=(2, 4, 8))
    profiled = time.process_time()
    plan(spec, cpu_cluster(8), workload_of(spec), time_limit_s=600.0)
    return {"profile_cpu_s": round(profiled - start, 1), "plan_cpu_s": round(time.process_time() - profiled, 1)}


def summary(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Count what is planned, what runs and what is exact."""
    runs = Counter[str]()
    for row in rows.values():
        for layout, result in row["differences"].items():
            runs[f"{layout}: run"] += 1
            runs[f"{layout}: exact"] += isinstance(result, float) and result <= TOLERANCE
    shares = sorted(row["share"] for row in rows.values() if "share" in row)
    return {
        "models": len(rows), "with a plan": sum(bool(row["differences"]) for row in rows.values()), **runs,
        "shares": [shares[0], shares[len(shares) // 2], shares[-1]] if shares else [],
        "shares up to 0.6": sum(share <= 0.6 for share in shares),
        "placed_cpu_s, largest": max((row.get("placed_cpu_s", math.nan) for row in rows.values()), default=math.nan),
    }  # fmt: skip


def main() -> None:
    """Run the models and write the table."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("names", nargs="*", help="all models where none is given; rows of others in OUT.json stay")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="run the layouts of so many")
    parser.add_argument(
        "--further", nargs="*", choices=FURTHER, default=list(FURTHER), help="layouts of placed operators"
    )
    parser.add_argument("--blocks", type=int, help="time the profile and the plan of a BERT of so many, nothing else")
    given = parser.parse_args()
    if given.blocks:
        print(json.dumps({f"{given.blocks} blocks": deep(given.blocks)}))
        return
    rows = json.loads(given.out.read_text())["rows"] if given.out.exists() else {}
    plans: dict[str, dict[str, TrainingPlan]] = {}
    for name in given.names or zoo.MODELS:
        known = rows.get(name, {})
        plans[name], row = planned(name, given.further)
        print(name, json.dumps(row), flush=True)
        rows[name] = {**known, **row, "differences": known.get("differences", {})}
    for size in given.ranks:
        add_differences(rows, plans, size)
        given.out.write_text(json.dumps({"summary": summary(rows), "rows": rows}, indent=1) + "\n")
    print(json.dumps(summary(rows), indent=1))


if __name__ == "__main__":
    main()
