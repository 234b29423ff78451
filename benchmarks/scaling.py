"""What a training holds over time, on recordings of spot pools: policies of their first halves, from starts in the second.

    python benchmarks/scaling.py SPOT_TRACES.csv SUMMARY.csv [--deadline-h 24]

SPOT_TRACES.csv has columns trace, time_s and available; SUMMARY.csv trace and asked_nodes. Machines have one V100; on demand they
cost 3.06 USD an hour and of the pool 0.92 (p3.2xlarge, us-east-1, 2023). The work is a part of what all machines do until the
deadline. Replaces scaling.json next to this file.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from meshwright.planner import plan
from meshwright.planner.scaling import MIN_STARTS, STARTS_S, scale
from meshwright.planner.spot import Costs
from meshwright.schema import ClusterSpec, Offer, TrainingPlan
from meshwright.schema.machines_file import Change, read_pools
from meshwright.schema.scaling import HOLDING_RULES

RESULTS = Path(__file__).with_suffix(".json")
DEMAND_USD, SPOT_USD = 3.06, 0.92
SHARES = (0.3, 0.6)


@cache
def plan_of(machines: int) -> TrainingPlan:
    """Return the plan for so many machines."""
    cluster = ClusterSpec.parse(f"{machines}x1xV100-SXM2-16GB")
    return plan("gpt2", cluster, global_batch_size=64, seq_len=1024, runnable=True)


def row_of(pool: str, changes: Sequence[Change], machines: int, share: float, deadline_s: float) -> dict[str, Any]:
    """Return what each rule costs on a pool."""
    chosen, cpu = plan_of(machines), time.process_time()
    offers = [
        Offer.from_cluster(chosen.cluster, name="spot", price_per_device_hour=SPOT_USD, losses_per_node_day=1.0),
        Offer.from_cluster(chosen.cluster, name="on demand", price_per_device_hour=DEMAND_USD),
    ]
    policy = scale(
        chosen, offers, tokens=share * chosen.estimate.tokens_per_s * deadline_s, deadline_s=deadline_s,
        costs=Costs(save_s=30.0, restart_s=300.0), recording=(pool, changes),
    )  # fmt: skip
    assert policy.replay is not None
    row = {"pool": pool, "machines": machines, "share": share, "starts": policy.replay.starts}
    row |= {"cpu_s": round(time.process_time() - cpu, 2)}
    return row | {entry.rule: entry.model_dump(exclude={"rule"}) for entry in policy.replay.rules}


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what all rows say of each rule."""
    starts = sum(row["starts"] for row in rows)
    return {
        rule: {
            "met": sum(row[rule]["met"] * row["starts"] for row in rows) / starts,
            "to_hindsight_median": statistics.median(row[rule]["to_hindsight"] for row in rows),
            "to_hindsight_worst": max(row[rule]["to_hindsight"] for row in rows),
            "within_a_tenth": sum(row[rule]["to_hindsight"] <= 1.1 for row in rows),
            "policy_is_dearer": sum(row["policy"]["usd"] > 1.001 * row[rule]["usd"] for row in rows),
        }
        for rule in HOLDING_RULES
    }


def main() -> None:
    """Replay and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path)
    parser.add_argument("summary", type=Path)
    parser.add_argument("--deadline-h", type=float, default=24.0)
    given = parser.parse_args()
    nodes = {row["trace"]: int(row["asked_nodes"]) for row in csv.DictReader(given.summary.open(encoding="utf-8"))}
    rows, deadline_s = [], given.deadline_h * 3600
    for pool, changes in read_pools(given.traces).items():
        if changes[-1].time_s / 2 < deadline_s + MIN_STARTS * STARTS_S:
            print(f"{pool} is too short")
            continue
        for share in SHARES:
            rows.append(row_of(pool, changes, nodes[pool], share, deadline_s))
            print(json.dumps(rows[-1]), flush=True)
    answer = {"deadline_h": given.deadline_h, "summary": summary(rows), "rows": rows}
    RESULTS.write_text(json.dumps(answer, indent=1) + "\n")
    print(json.dumps(answer["summary"], indent=1))


if __name__ == "__main__":
    main()
