"""Batches of unequal lengths against FlexSP's answers under its own cost model, and CPU seconds on larger ones.

python benchmarks/batch_groups.py            # needs ../shared/data
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from meshwright.planner.batch import batch_instance
from meshwright.schema.batch import Batch, BatchPart, SequenceCosts
from meshwright.solvers.batch_groups import check_batch, schedule_batch

DATA = Path(__file__).parents[1] / "../shared/data/variable_length"
PUBLISHED = Path(__file__).parents[1] / "../shared/data/sequences/flexsp/flexsp_cases.json"
LINK = {2: 119.54, 4: 104.07, 8: 96.5, 16: 10.33, 32: 5.94, 64: 4.87}
COSTS = SequenceCosts(
    fixed_s=0.6293563,
    linear_s=1.839576e-4,
    quadratic_s=5.128e-9,
    exchange_s={d: 2e-3 / rate for d, rate in LINK.items()},
)
"""GPT-7B on A100 as the README beside the data states it; beyond 64 ranks as at 64."""


def main() -> None:
    """Print a row for each batch."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with (DATA / "flexsp_results.csv").open() as file:
        results = {row["batch"]: row for row in csv.DictReader(file)}
    print(f"{'batch':44s} seconds  of bound  of FlexSP  of adaptive  CPU s")
    for entry in json.loads((DATA / "batches.json").read_text()):
        row = results.get(entry["name"])
        if row is not None:
            tokens = int(row["device_token_capacity"])
            _row(
                entry["name"], entry["lengths"], entry["gpus"], tokens, float(row["flexsp_ms"]), float(row["adaptive_ms"])
            )  # fmt: skip
    for case in json.loads(PUBLISHED.read_text()):
        for number, entry in enumerate(case["iters"]):
            others = [entry["methods"][method]["time_ms"] for method in ("flexSP", "adaptive")]
            ranks, tokens = case["cost_model"]["cluster_size"], case["device_token_capacity"]
            _row(f"{case['name']} {number}", entry["lengths"], ranks, tokens, *others, costs=_costs(case["cost_model"]))
    with gzip.open(DATA / "code_files.txt.gz", "rt") as file:
        pool = np.minimum([int(line) for line in file], 196_608)
    for count, ranks in ((512, 64), (8_192, 1_024)):
        lengths = np.random.default_rng(0).choice(pool, count).tolist()
        _row(f"{count} code files on {ranks} ranks (seed 0)", lengths, ranks, 6_449)
    unlike = np.random.default_rng(0).integers(1_000, 24_000, 512).tolist()
    _row("512 unlike lengths on 16 ranks (seed 0)", unlike, 16, 6_449)
    for ranks in (64, 16):
        _row_of_parts(np.random.default_rng(0).choice(pool, 512).tolist(), ranks)


def _costs(model: dict[str, Any]) -> SequenceCosts:
    """Return the costs of a published run; exchange is of queries, keys, values and outputs of 2 bytes, forward and backward."""
    megabytes = 2 * 4 * 2 * model["layer_num"] * model["hidden_size"] / 2**20
    links = {int(degree): float(rate) for degree, rate in model["alltoall_bandwidth_dict_gbs"].items()}
    return SequenceCosts(
        fixed_s=model["cpt_beta1"] / 1000,
        linear_s=model["cpt_alpha2"] / 1000,
        quadratic_s=model["cpt_alpha1"] / 1000,
        exchange_s={degree: megabytes / rate / 1000 for degree, rate in links.items() if degree > 1},
    )


def _row(
    name: str, lengths: list[int], ranks: int, tokens: int, *others_ms: float, costs: SequenceCosts = COSTS
) -> None:
    batch = Batch(lengths=tuple(lengths), multiple=128, num_ranks=ranks, tokens_per_rank=tokens, costs=costs)
    instance = batch_instance(batch)
    start = time.process_time()
    answer = schedule_batch(instance)
    cpu_s = time.process_time() - start
    assert check_batch(instance, answer) == []
    ratios = [1000 * answer.seconds / other for other in others_ms] or [float("nan")] * 2
    print(
        f"{name:44s} {answer.seconds:7.3f}  {answer.seconds / answer.bound_seconds:8.3f}  {ratios[0]:9.3f}  {ratios[1]:11.3f}  "
        f"{cpu_s:5.2f}"
    )


def _row_of_parts(tokens: list[int], ranks: int) -> None:
    """Print the row of samples of which half have images; encoder and decoder as Qwen2-VL-2B's, 675 M and 1.5 B parameters."""
    rng = np.random.default_rng(0)
    patches = (rng.integers(256, 16_384, len(tokens)) * rng.integers(0, 2, len(tokens))).tolist()
    costs = SequenceCosts(linear_s=0.45 * COSTS.linear_s, quadratic_s=0.45 * COSTS.quadratic_s)
    part = BatchPart(name="images", lengths=tuple(patches), costs=costs, token_ratio=0.95)
    batch = Batch(lengths=tuple(tokens), num_ranks=ranks, tokens_per_rank=6_449, costs=COSTS, parts=(part,))
    instance, of_text = batch_instance(batch), batch_instance(batch.replace(parts=()))
    start = time.process_time()
    answer = schedule_batch(instance)
    cpu_s = time.process_time() - start
    assert check_batch(instance, answer) == []
    alone_s = instance.step_s(schedule_batch(replace(instance, seconds=of_text.seconds)).micro_batches)
    print(
        f"{f'512 code files, half with images, on {ranks} ranks':44s} {answer.seconds:7.3f}  "
        f"{answer.seconds / answer.bound_seconds:8.3f}  {cpu_s:33.2f}   {alone_s / answer.seconds:.2f} by the tokens alone"
    )


if __name__ == "__main__":
    main()
