"""How long it takes to profile and plan a model of many blocks that says nothing of how it is split.

    python benchmarks/module_seconds.py OUT.json [--blocks 12 48] [--tp 2 4 8]

A BERT of transformers (768 wide, on the meta device, two samples of 128 tokens) goes through `profile_module`, with operators
placed for each degree, and `plan` for eight H100. Seconds are those of processors, imports apart, and of the clock.
"""

from __future__ import annotations

import json
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from itertools import pairwise
from pathlib import Path

import torch
from meshwright.planner import plan
from meshwright.profilers import profile_module
from meshwright.schema import ClusterSpec, Workload

SEQ_LEN = 128


def seconds(num_blocks: int, degrees: tuple[int, ...]) -> dict[str, object]:
    """Return what a profile and a plan take, and the layout of the plan."""
    from transformers import BertConfig, BertForMaskedLM

    with torch.device("meta"):
        model = BertForMaskedLM(BertConfig(num_hidden_layers=num_blocks))
    times = [(time.process_time(), time.perf_counter())]
    tokens = torch.zeros((2, SEQ_LEN), dtype=torch.long)
    spec = profile_module(model, {"input_ids": tokens}, tp=degrees)
    times.append((time.process_time(), time.perf_counter()))
    workload = Workload(seq_len=SEQ_LEN, global_batch_size=64)
    planned = plan(spec, ClusterSpec.parse("8xH100-SXM-80GB"), workload)
    times.append((time.process_time(), time.perf_counter()))
    row: dict[str, object] = {"blocks": num_blocks, "tp": degrees, "layout": str(planned.layout)}
    for name, (before, after) in zip(("profile", "plan"), pairwise(times), strict=True):
        row |= {f"{name}_cpu_s": round(after[0] - before[0], 1), f"{name}_clock_s": round(after[1] - before[1], 1)}
    return row


def main() -> None:
    """Measure models of each number of blocks."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--blocks", type=int, nargs="+", default=[12, 48])
    parser.add_argument("--tp", type=int, nargs="+", default=[2, 4, 8])
    options = parser.parse_args()
    torch.set_num_threads(1)
    seconds(2, tuple(options.tp))  # what is imported on the way
    rows = [seconds(blocks, tuple(options.tp)) for blocks in options.blocks]
    options.out.write_text(json.dumps(rows, indent=1) + "\n")
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
