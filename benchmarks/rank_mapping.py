"""Nodes in the order of the ranks on directed bandwidth matrices: our order against simulated annealing and the order as listed.

    python benchmarks/rank_mapping.py --json benchmarks/rank_mapping.json

Matrices of 8 to 64 nodes: independent rates, racks with oversubscribed links, links that are slower in one direction, and one ring
that is fast as listed. Axes: rings of data parallelism within stages, pipelines there and back, all-to-alls of experts, of random
weights. The annealer swaps two nodes at a time for `--annealer-s` seconds, from the order as listed, its temperature falling from a
tenth of (O) to a ten-thousandth; both are judged by `check`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from pathlib import Path

import numpy as np
from meshwright.schema.units import FloatArray, IntArray
from meshwright.solvers.rank_mapping import Axis, RankMappingInstance, check, solve

FAMILIES = ("independent", "racks", "one way", "as listed")


def matrix(family: str, size: int, rng: np.random.Generator) -> FloatArray:
    """Bytes/s from node to node."""
    if family == "independent":
        return 1e10 * rng.lognormal(0.0, 0.6, (size, size))
    if family == "racks":
        rack = rng.permutation(size) // 4
        return np.where(rack[:, None] == rack[None, :], 4e10, 1e10) * rng.uniform(0.7, 1.0, (size, size))
    if family == "one way":
        return 2e10 * rng.choice([1.0, 0.2], (size, size), p=[0.7, 0.3]) * rng.uniform(0.8, 1.0, (size, size))
    nodes = np.arange(size)
    fast = (nodes[:, None] + 1) % size == nodes[None, :]
    return np.where(fast, 2e10, 1e10) * rng.uniform(0.6, 1.0, (size, size))


def instance(seed: int, family: str, size: int) -> RankMappingInstance:
    """Stages of `size / pp` nodes, whose replicas form rings; every node sends to its counterpart of the next stage."""
    rng = np.random.default_rng(seed)
    stages = int(rng.choice([1, 2, 4]))
    width = size // stages
    nodes = np.arange(size).reshape(stages, width)
    rings = [(row[k], row[(k + 1) % width]) for row in nodes for k in range(width)]
    hops = [(a, b) for first, second in itertools.pairwise(nodes) for a, b in zip(first, second, strict=True)]
    group = int(rng.choice([2, 4]))
    exchanges = [(a, b) for row in nodes for start in range(0, width, group) for a in row[start : start + group]
                 for b in row[start : start + group] if a != b]  # fmt: skip
    kinds = [
        (rings, 1.0),
        (hops, 0.5),
        ([(b, a) for a, b in hops], 0.5),
        (exchanges if rng.random() < 0.5 else [], 0.7),
    ]
    axes = [Axis(float(weight * rng.uniform(0.3, 1.0) * 1e10), np.array(pairs)) for pairs, weight in kinds if pairs]
    return RankMappingInstance(matrix(family, size, rng), tuple(axes), np.zeros(size, dtype=np.int64), np.arange(size))


def anneal(problem: RankMappingInstance, seconds: float, seed: int) -> IntArray:
    """Swap any two nodes; return the best order seen."""
    rng = np.random.default_rng(seed)
    inverse = [(axis.weight / problem.bandwidth, *axis.pairs.T) for axis in problem.axes]

    def cost(order: IntArray) -> float:
        return float(sum(table[order[a], order[b]].max() for table, a, b in inverse))

    order = np.arange(problem.num_positions)
    current = best_s = scale = cost(order)
    best, start = order.copy(), time.process_time()
    while (part := (time.process_time() - start) / seconds) < 1:
        temperature = scale * 0.1 * 0.001**part
        for i, j in rng.integers(0, problem.num_positions, (50, 2)):
            order[[i, j]] = order[[j, i]]
            swapped = cost(order)
            if swapped <= current or rng.random() < math.exp((current - swapped) / temperature):
                current = swapped
                if current < best_s:
                    best, best_s = order.copy(), current
            else:
                order[[i, j]] = order[[j, i]]
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--annealer-s", type=float, default=8.0, help="CPU seconds")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 16, 32, 64])
    arguments = parser.parse_args()
    rows = []
    for size in arguments.sizes:
        for family in FAMILIES:
            for seed in range(arguments.seeds):
                problem = instance(100 * size + seed, family, size)
                start = time.process_time()
                ours = solve(problem)
                solve_cpu_s = time.process_time() - start
                assert ours.choice is not None
                ours_s, listed_s = check(problem, ours.choice), check(problem, tuple(range(size)))
                theirs_s = check(problem, tuple(anneal(problem, arguments.annealer_s, seed).tolist()))
                rows.append({
                    "nodes": size, "matrix": family, "seed": seed, "over_annealer": round(ours_s / theirs_s - 1, 4),
                    "over_listed": round(ours_s / listed_s - 1, 4), "gap": round(ours_s / ours.bound - 1, 4),
                    "solve_cpu_s": round(solve_cpu_s, 3),
                })  # fmt: skip
                print(rows[-1], flush=True)
    over = [row["over_annealer"] for row in rows]
    print(f"{sum(o > 0 for o in over)} of {len(over)} above the annealer, median {statistics.median(over):+.4f}, "
          f"most {max(over):+.4f}; {sum(row['over_listed'] > 0 for row in rows)} above the order as listed; "
          f"at most {max(row['solve_cpu_s'] for row in rows):.2f} CPU s")  # fmt: skip
    if arguments.json:
        arguments.json.write_text(json.dumps({"annealer_s": arguments.annealer_s, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
