"""Published steps and largest models of offloading systems next to what the planner's simulation says.

    python benchmarks/published_offload.py        prints the tables of benchmarks/offload.md

Facts are in published_offload.csv with their sources. Steps: of each system one row, the middle size, calibrates one number, the
rate of one rank's storage; the others are predicted by the event simulation of the same policy (states updated by the host and on
storage for the update, full recompute). Largest models: 94 % of the host's memory by the bytes that the planner counts for a
parameter on it; nothing is calibrated. ZeRO-2 Offload is not predicted: no layout of the planner has only fp16 parameters on the
device. The updates of Deep Optimizer States are listed and not predicted.
"""

from __future__ import annotations

import csv
import sys
from argparse import ArgumentParser
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from meshwright.solvers.offload.instance import OffloadChoice, OffloadInstance
from meshwright.solvers.offload.simulation import simulate
from offload_cases import FULL, KEEP, MACHINES, Machine, problem

DEVICES = {machine.name: machine for machine in MACHINES}
STEPS = {"mlp-ds": "mlp-ds-70", "mlp": "mlp-70"}
"""Systems and the row that calibrates each."""

HOST_BYTES_PER_PARAMETER = 16
"""fp32 master, gradient and two states of each parameter, where parameters live on the host."""

HOST_SHARE = 0.94


def rows() -> dict[str, dict[str, str]]:
    """Return the facts by id."""
    with Path(__file__).with_suffix(".csv").open() as file:
        return {row["id"]: row for row in csv.DictReader(file)}


def published_instance(row: dict[str, str], storage_bytes_per_s: float) -> tuple[OffloadInstance, OffloadChoice]:
    """Return the published model with one sequence a rank: states of the blocks on storage, updated by the host."""
    ranks, machine = int(row["devices"]), DEVICES["h100"]
    tokens = int(row["seq_len"]) / 4096
    slower = Machine("h100", machine.flops_per_s / tokens, 80e9, machine.link_bytes_per_s, machine.host_params_per_s)
    instance = problem(slower, int(row["layers"]), int(row["hidden"]), sequences=1, microbatches=1, ranks=ranks)
    links = replace(instance.links, read_bytes_per_s=storage_bytes_per_s, write_bytes_per_s=storage_bytes_per_s)
    instance = replace(instance, links=links, storage_cap_bytes=1e15, host_cap_bytes=1e15)
    everywhere = np.ones(instance.num_layers, dtype=bool)
    option = np.where(instance.allowed[FULL], FULL, KEEP)
    return instance, OffloadChoice(
        option=option,
        host_optimizer=everywhere,
        streamed_optimizer=~everywhere,
        parameters=~everywhere,
        storage=everywhere,
    )


def step_s(row: dict[str, str], storage_bytes_per_s: float) -> float:
    """Return the seconds of the simulated step."""
    return simulate(*published_instance(row, storage_bytes_per_s)).step_s


def calibrated(row: dict[str, str]) -> float:
    """Return the storage rate with which the simulation takes as long as the published step, by bisection."""
    low, high = 1e8, 1e11
    for _ in range(60):
        rate = (low * high) ** 0.5
        low, high = (rate, high) if step_s(row, rate) > float(row["value"]) else (low, rate)
    return rate


def main() -> None:
    """Print both tables."""
    ArgumentParser(description=__doc__).parse_args()
    facts = rows()
    lines = ["| row | published | predicted | error |", "|---|---|---|---|"]
    for system, row_id in STEPS.items():
        rate = calibrated(facts[row_id])
        for name in (name for name in facts if name.rsplit("-", 1)[0] == system):
            published, predicted = float(facts[name]["value"]), step_s(facts[name], rate)
            what = (
                f"calibrates: {rate / 1e9:.2f} GB/s"
                if name == row_id
                else f"{100 * (predicted / published - 1):+.0f} %"
            )
            lines.append(
                f"| {facts[name]['what']}, {facts[name]['params_b']}e9 | {published} s | {predicted:.1f} s | {what} |"
            )
    for name in ("zero3-offload", "superoffload", "megatrain"):
        published = float(facts[name]["value"])
        predicted = HOST_SHARE * float(facts[name]["host_gb"]) / HOST_BYTES_PER_PARAMETER
        error = f"{100 * (predicted / published - 1):+.0f} %"
        lines.append(f"| largest model of {name} | {published:.0f}e9 | {predicted:.0f}e9 | {error} |")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
