"""Recompute only, against torch's own program for it (torch.distributed._tools.sac_ilp.sac_milp), on the same statistics.

    python benchmarks/recompute_milp.py [--limit-s 60]     writes benchmarks/recompute_milp.json and prints a table

Each model is L blocks and a head. Both get the same five points of every block's trade-off between bytes dropped and seconds of
recompute; sac_milp takes any fraction between them, the planner one of the points. The head's logits are the peak, where what all
blocks keep is still allocated; that both plans fit is recomputed here from torch's own definition of its peak.

sac_milp stops at 5 % of its bound or at its time limit, 180 s in torch; here ``--limit-s``, so that a run stays short. Seconds are
of the processor, of its solver's process too.
"""

from __future__ import annotations

import argparse
import json
import logging
import resource
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from meshwright.solvers.offload import schedule
from meshwright.solvers.offload.instance import OPTIONS, AllowedMoves, Links, OffloadInstance
from torch.distributed._tools import sac_ilp
from torch.distributed._tools.ilp_utils import Graph

GIB = 2**30
DROPPED = np.array([0.0, 0.25, 0.5, 0.75, 0.97])
REPEATED = np.array([0.0, 0.03, 0.14, 0.42, 0.80])
"""Share of a block's bytes that is dropped and of its forward pass that runs again: convex, cheap operators first."""

BLOCK_BYTES, BLOCK_MS, HEAD_BYTES = 2.0 * GIB, 25.0, 6.0 * GIB

LEAVES = 11
"""Modules without children in a Llama block: two norms, four projections and the kernel of attention, four of the MLP."""


def blocks(count: int, variation: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Bytes and milliseconds of each block."""
    scale = np.random.default_rng(seed).uniform(1 - variation, 1 + variation, (2, count))
    return np.rint(BLOCK_BYTES * scale[0]), BLOCK_MS * scale[1]


def graph_of(bytes_: np.ndarray, milliseconds: np.ndarray) -> Graph:
    """A model of blocks with one leaf each, and a head, as torch's tools describe it."""
    names = ["model"]
    for idx in range(len(bytes_)):
        names += [f"model.{idx}", *(f"model.{idx}.{leaf}" for leaf in range(LEAVES))]
    names.append("model.head")
    each = [[*(f"model.{idx}.{leaf}" for leaf in range(LEAVES)), f"model.{idx}"] for idx in range(len(bytes_))]
    after = [*(name for names_ in each for name in names_), "model.head", "model"]
    graph = Graph(len(names))
    graph.fw_post_order = after
    slopes = np.diff(REPEATED) / np.diff(DROPPED)
    for index, name in enumerate(names):
        parts = name.split(".")
        is_block = len(parts) == 2 and parts[1].isdigit()
        idx = int(parts[1]) if len(parts) > 1 and parts[1].isdigit() else len(bytes_) - 1
        until = float(bytes_[: idx + 1].sum()) if parts[-1] != "model" else float(bytes_.sum())
        graph.add_node(
            {
                "fqn": name, "index": index, "pos_fw_post_order": after.index(name), "is_leaf": not is_block,
                "param_per_module": 0, "grad_per_module": 0, "grad_total": 0,
                "act_fw_per_module": float(bytes_[idx]) if is_block else 0.0, "act_bw_per_module": 0,
                "act_grad_per_module": HEAD_BYTES if name == "model.head" else 0.0, "act_total": until,
                "sac_runtime": float(milliseconds[idx]) if is_block else 0.0,
                "sac_memory": float(bytes_[idx]) if is_block else 0.0,
                "n_segments": len(slopes) if is_block else 0,
                "slopes": slopes.tolist() if is_block else [],
                "intercepts": (REPEATED[:-1] - slopes * DROPPED[:-1]).tolist() if is_block else [],
            }
        )  # fmt: skip
        for ancestor in range(index + 1):
            if name == names[ancestor] or name.startswith(names[ancestor] + "."):
                graph.ad_matrix[ancestor][index] = 1
    return graph


def peak_gib(graph: Graph, dropped: dict[str, float]) -> float:
    """torch's own peak: at each module what is kept before it and what it has in use."""
    discarded = {name: share * graph.name2node[name]["sac_memory"] for name, share in dropped.items()}
    peak = 0.0
    for node in graph.nodes:
        before = graph.fw_post_order[: node["pos_fw_post_order"]]
        saved = node["act_total"] + node["act_grad_per_module"] - sum(discarded.get(name, 0.0) for name in before)
        peak = max(peak, saved)
    return peak / GIB


def problem(bytes_: np.ndarray, milliseconds: np.ndarray, budget_bytes: float) -> OffloadInstance:
    """The same as a problem of the planner: five points as its five options, nothing moves."""
    size = len(bytes_) + 1
    each, seconds = np.append(bytes_, 0.0), np.append(milliseconds, 0.0) / 1e3
    is_block = np.arange(size) < size - 1
    alike = len(np.unique(bytes_)) == 1
    none = np.zeros(size)
    return OffloadInstance(
        forward_s=seconds, backward_s=2 * seconds, kind=np.where(is_block, 0, 1) if alike else np.arange(size),
        allowed=np.where(is_block, True, np.arange(len(OPTIONS))[:, None] == 0),
        repeated_s=REPEATED[:, None] * seconds, retained_bytes=(1 - DROPPED)[:, None] * each,
        moved_bytes=np.zeros((len(OPTIONS), size)), working_bytes=np.zeros((len(OPTIONS), size)),
        parameter_bytes=none, copy_bytes=none, streamable=np.zeros(size, dtype=bool), gradient_bytes=none,
        state_bytes=none, device_update_s=none, host_update_s=none,
        links=Links(to_host_bytes_per_s=1e10, to_device_bytes_per_s=1e10),
        may=AllowedMoves(host_optimizer=False, streamed_optimizer=False, parameters=False),
        fixed_bytes=0.0, turn_bytes=HEAD_BYTES, update_bytes=0.0, cap_bytes=budget_bytes,
    )  # fmt: skip


def _processor_s() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def compared(count: int, variation: float, share: float, limit_s: float) -> dict[str, Any]:
    """One model: ``share`` of all block bytes fit next to the head."""
    bytes_, milliseconds = blocks(count, variation, seed=count)
    budget = share * float(bytes_.sum()) + HEAD_BYTES
    graph = graph_of(bytes_, milliseconds)
    units = [f"model.{idx}" for idx in range(count)]
    sac_ilp.PULP_CBC_CMD = _limited(limit_s)
    begun, wall = _processor_s(), time.perf_counter()
    dropped, theirs_ms, peak = sac_ilp.sac_milp(graph, budget / GIB, ac_units=units)
    theirs_s, theirs_wall_s = _processor_s() - begun, time.perf_counter() - wall
    instance = problem(bytes_, milliseconds, budget)
    begun = _processor_s()
    solution = schedule.solve(instance)
    ours_s = _processor_s() - begun
    assert solution.choice is not None
    ours_ms = 1e3 * float(solution.choice.take(instance.repeated_s).sum())
    ours = {units[idx]: float(DROPPED[k]) for idx, k in enumerate(solution.choice.option[:-1]) if k}
    bound_ms = 1e3 * (solution.bound - instance.compute_s)
    return {
        "blocks": count, "spread": variation, "share": share, "limit_s": limit_s,
        "theirs_ms": theirs_ms if peak >= 0 else None, "ours_ms": ours_ms, "bound_ms": bound_ms,
        "theirs_s": theirs_s, "theirs_wall_s": theirs_wall_s, "ours_s": ours_s, "budget_gib": budget / GIB,
        "theirs_peak_gib": peak_gib(graph, dropped), "ours_peak_gib": peak_gib(graph, ours),
    }  # fmt: skip


def _limited(limit_s: float) -> Any:
    import pulp

    def command(**options: Any) -> Any:
        return partial(pulp.PULP_CBC_CMD, **{**options, "timeLimit": limit_s})()

    return command


def main() -> None:
    """All sizes, one after another."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit-s", type=float, default=60.0)
    parser.add_argument("--blocks", type=int, nargs="*", default=[8, 16, 32, 64])
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    rows = json.loads(given.out.read_text())["rows"] if given.out.exists() else []
    for count in given.blocks:
        for variation in (0.0, 0.3):
            row = compared(count, variation, 0.5, given.limit_s)
            rows = [old for old in rows if (old["blocks"], old["spread"]) != (count, variation)] + [row]
            given.out.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")
            print(table([row]), flush=True)


def table(rows: list[dict[str, Any]]) -> str:
    """Rows of the page."""
    lines = []
    for row in rows:
        theirs = "none" if row["theirs_ms"] is None else f"{row['theirs_ms']:.1f} ms"
        lines.append(
            f"| {row['blocks']}, +-{100 * row['spread']:.0f} % | {theirs} | {row['ours_ms']:.1f} ms | {row['bound_ms']:.1f} ms | "
            f"{row['theirs_s']:.2f} s | {row['ours_s']:.3f} s | {row['theirs_s'] / row['ours_s']:.0f}x |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
