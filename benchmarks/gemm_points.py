"""What a profile's matrix products are worth: errors on a GPU family that the shipped model never saw, by the number of points.

    python benchmarks/gemm_points.py DATA OUT.json [FAMILY ...]

DATA holds operators/gemm.parquet and measured_runs/gemm_kernels.csv (docs/accuracy.md). Each family (Ampere, Ada, Hopper,
Blackwell) is left out of coefficients, trees and the prior of the correction in turn; that prior was fitted on the other families,
each with trees that saw neither. Points of each of its devices and software builds become the model's own data for the device,
as a profile's do; scored are the other rows, up to 4,000. Points are drawn at random, or chosen as the profiler chooses its
shapes (`most_informative_shapes`, from as many random rows of the table as it has candidates, by their shapes
alone): three draws of
either. Families named are computed anew and join those that OUT.json holds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from meshwright.cost_models.learned import calibration, gemm
from meshwright.cost_models.learned.calibration import NUM_CANDIDATES, most_informative_shapes
from meshwright.cost_models.learned.gemm import Covariance, GemmRates
from meshwright.cost_models.learned.trees import ResidualModel
from meshwright.fitting import gemm as gemm_fit

NUMBERS = (0, 10, 30, 100, 200, 500)
DRAWS = 3
CHOICES = ("chosen", "random")


def columns_of(rows: pd.DataFrame, *names: str) -> list[np.ndarray]:
    """Columns as arrays."""
    return [rows[name].to_numpy() for name in names]


def order_of(
    part: pd.DataFrame, choice: str, seed: int, residual: ResidualModel, prior: GemmRates, kernel: Covariance
) -> np.ndarray:
    """Positions of rows in the order in which they are measured, as many as are asked for at most."""
    drawn = np.random.default_rng(seed).permutation(len(part))
    if choice == "random":
        return drawn[: max(NUMBERS)]
    candidates = drawn[:NUM_CANDIDATES]
    sizes = columns_of(part.iloc[candidates], "m", "n", "k")
    return candidates[most_informative_shapes(*sizes, prior, max(NUMBERS), residual=residual, kernel=kernel)]


def errors_of(
    part: pd.DataFrame, residual: ResidualModel, prior: GemmRates, kernel: Covariance
) -> Iterator[tuple[str, int, tuple[float, float]]]:
    """Choice, number of points, and mean and median |predicted / measured - 1| on rows that are not points."""
    scored = np.random.default_rng(9).permutation(len(part))[:4000]
    for choice in CHOICES:
        for seed in range(DRAWS):
            order = order_of(part, choice, seed, residual, prior, kernel)
            for number in NUMBERS:
                chosen = order[:number]
                points, others = part.iloc[chosen], part.iloc[np.setdiff1d(scored, chosen)]
                fields = columns_of(points, "m", "n", "k", "seconds")
                rates = calibration.calibrate(*fields, prior, residual=residual, kernel=kernel)
                predicted = gemm.predict(*columns_of(others, "m", "n", "k"), rates, residual=residual)
                wrong = np.abs(predicted / others.seconds.to_numpy() - 1)
                yield choice, number, (float(wrong.mean()), float(np.median(wrong)))


def family_errors(rows: pd.DataFrame, family: str) -> dict[str, dict[str, list[float]]]:
    """Choice -> number -> mean and median error, every device and build of the family weighing the same."""
    kernel = gemm_fit.nested_kernel(rows, family)
    residual, priors = gemm_fit.without_families(rows, (family,))
    found: list[tuple[str, int, str, float, float]] = []
    for key, prior in priors.items():
        part = rows[(rows.device == key[0]) & (rows.software == key[1])]
        for choice, number, (mean, median) in errors_of(part, residual, prior, kernel):
            found.append((choice, number, str(key), mean, median))
    table = pd.DataFrame(found, columns=["choice", "number", "build", "mean", "median"])
    table = table.groupby(["choice", "number", "build"]).mean().groupby(["choice", "number"]).mean()
    return {
        choice: {str(number): table.loc[choice, number].tolist() for number in NUMBERS}  # type: ignore[index]
        for choice in CHOICES
    }


def shown(errors: dict[str, dict[str, list[float]]]) -> str:
    """For people."""
    return "; ".join(
        f"{choice}: " + ", ".join(f"{number} {100 * mean:.1f} %" for number, (mean, _) in errors[choice].items())
        for choice in CHOICES
    )


def mean_of(families: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Over families."""
    return {
        choice: {
            str(n): np.mean([family[choice][str(n)] for family in families.values()], axis=0).tolist() for n in NUMBERS
        }
        for choice in CHOICES
    }


def main(data: str, out: str, *wanted: str) -> None:
    """Score the families and write the table."""
    rows = gemm_fit.read_rows(Path(data))
    rows = rows[~rows.software.map(gemm_fit.is_fp8)].reset_index(drop=True)
    families = json.loads(Path(out).read_text())["families"] if wanted and Path(out).exists() else {}
    for family in wanted or gemm_fit.FAMILIES:
        families[family] = family_errors(rows, family)
        print(family, shown(families[family]), flush=True)
    mean = mean_of(families)
    print("mean of", ", ".join(families), shown(mean))
    result = {"columns": ["mean error", "median error"], "families": families, "mean": mean}
    Path(out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
