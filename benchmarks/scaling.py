"""What a training holds over time, on recordings of spot pools: policies of their first halves, from starts in the second.

    python benchmarks/scaling.py SPOT_TRACES.csv SUMMARY.csv [--pools NAME ..]

SPOT_TRACES.csv has columns trace, time_s and available; SUMMARY.csv trace and asked_nodes. Machines have one V100; on demand they
cost 3.06 USD an hour and of the pool 0.92 (p3.2xlarge, us-east-1, 2023). The work is SHARE of what all machines do until the
deadline. Replaces scaling.json next to this file.
"""

from __future__ import annotations

import argparse
import csv
import json
import time
from pathlib import Path
from typing import Any

from meshwright.planner import plan
from meshwright.planner.scaling import scale
from meshwright.planner.spot import Costs
from meshwright.schema import ClusterSpec, InfeasibleError, Offer
from meshwright.schema.machines_file import read_pools

RESULTS = Path(__file__).with_suffix(".json")
DEMAND_USD, SPOT_USD = 3.06, 0.92
DEADLINES_H, SHARES = (12.0, 24.0), (0.3, 0.6)


def replayed(traces: Path, summary: Path, pools: list[str]) -> list[dict[str, Any]]:
    """A row for each pool, deadline and amount of work."""
    nodes = {
        row["trace"]: int(row["asked_nodes"]) for row in csv.DictReader(summary.open(newline="", encoding="utf-8"))
    }
    rows, plans = [], {}
    for name, changes in read_pools(traces).items():
        if pools and name not in pools:
            continue
        units = nodes[name]
        if units not in plans:
            cluster = ClusterSpec.parse(f"{units}x1xV100-SXM2-16GB")
            plans[units] = plan("gpt2", cluster, global_batch_size=64, seq_len=1024, runnable=True)
        chosen = plans[units]
        offers = [
            Offer.from_cluster(chosen.cluster, name="spot", price_per_device_hour=SPOT_USD, losses_per_node_day=1.0),
            Offer.from_cluster(chosen.cluster, name="on demand", price_per_device_hour=DEMAND_USD),
        ]
        for hours in DEADLINES_H:
            for share in SHARES:
                tokens = share * chosen.estimate.tokens_per_s * hours * 3600
                cpu = time.process_time()
                try:
                    policy = scale(
                        chosen, offers, tokens=tokens, deadline_s=hours * 3600, costs=Costs(save_s=30.0, restart_s=300.0),
                        recording=(name, changes),
                    )  # fmt: skip
                except InfeasibleError as error:
                    print(name, hours, share, error.message)
                    continue
                if policy.replay is None:
                    continue
                row = {
                    "pool": name,
                    "machines": units,
                    "deadline_h": hours,
                    "share": share,
                    "starts": policy.replay.starts,
                }
                row |= {"cpu_s": round(time.process_time() - cpu, 2)}
                row |= {
                    entry.rule: {"met": entry.met, "usd": entry.usd, "to_hindsight": entry.to_hindsight}
                    for entry in policy.replay.rules
                }
                rows.append(row)
                shown = {
                    key: (round(v["usd"], 2), round(v["to_hindsight"], 3), v["met"])
                    for key, v in row.items()
                    if isinstance(v, dict)
                }
                print(name, hours, share, row["starts"], row["cpu_s"], shown, flush=True)
    return rows


def main() -> None:
    """Replay and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path)
    parser.add_argument("summary", type=Path)
    parser.add_argument("--pools", nargs="*", default=[])
    given = parser.parse_args()
    rows = replayed(given.traces, given.summary, given.pools)
    if not given.pools:
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
