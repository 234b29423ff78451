"""What a profile's matrix products are worth: errors on a GPU family that the shipped model never saw, by the number of points.

    python benchmarks/gemm_points.py DATA OUT.json

DATA holds operators/gemm.parquet and measured_runs/gemm_kernels.csv (docs/accuracy.md). Each family (Ampere, Ada, Hopper,
Blackwell) is left out of coefficients and trees in turn. Of each of its devices and software builds, points are drawn (three
draws) and become the model's own data for the device, as a profile's do; scored are the other rows, up to 4,000.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from meshwright.cost_models.learned import gemm, gemm_fit
from meshwright.cost_models.learned.gemm import GemmRates
from meshwright.cost_models.learned.trees import ResidualModel

NUMBERS = (0, 10, 30, 100, 200, 500)
DRAWS = 3


def errors_of(part: pd.DataFrame, residual: ResidualModel, prior: GemmRates, number: int) -> tuple[float, float]:
    """Mean and median |predicted / measured - 1| on rows that are not points."""
    found = []
    order = np.random.default_rng(9).permutation(len(part))[:4000]
    for seed in range(DRAWS if number else 1):
        chosen = np.random.default_rng(seed).choice(len(part), number, replace=False)
        points, others = part.iloc[chosen], part.iloc[np.setdiff1d(order, chosen)]
        columns = (points[name].to_numpy() for name in ("m", "n", "k", "seconds"))
        rates = gemm.calibrate(*columns, prior, residual=residual)
        sizes = (others[name].to_numpy() for name in "mnk")
        wrong = np.abs(gemm.predict(*sizes, rates, residual=residual) / others.seconds.to_numpy() - 1)
        found.append((wrong.mean(), np.median(wrong)))
    mean, median = np.mean(found, axis=0)
    return float(mean), float(median)


def main(data: str, out: str) -> None:
    """Score every family and write the table."""
    rows = gemm_fit.read_rows(Path(data))
    rows = rows[~rows.software.map(gemm_fit.is_fp8)].reset_index(drop=True)
    table = {}
    for family, residual, priors in gemm_fit.left_out_families(rows):
        parts = rows[rows.family == family].groupby(["device", "software"])
        scores = {
            number: np.mean([errors_of(part, residual, priors[key], number) for key, part in parts], axis=0).tolist()
            for number in NUMBERS
        }
        table[family] = {str(number): score for number, score in scores.items()}
        print(family, {number: f"{100 * mean:.1f} %" for number, (mean, _) in scores.items()}, flush=True)
    mean = {str(n): np.mean([table[family][str(n)] for family in table], axis=0).tolist() for n in NUMBERS}
    print("mean", {number: f"{100 * value[0]:.1f} %" for number, value in mean.items()})
    result = {"columns": ["mean error", "median error"], "families": table, "mean": mean}
    Path(out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
