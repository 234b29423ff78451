"""The value of a profile's matrix products: errors on a GPU family that the shipped model never saw, by the number of points.

    python benchmarks/gemm_points.py DATA OUT.json [FAMILY ...]

DATA holds operators/gemm.parquet and measured_runs/gemm_kernels.csv (docs/accuracy.md). Each family (Ampere, Ada, Hopper,
Blackwell) is left out of coefficients, trees and the prior of the correction in turn; that prior was fitted on the other families,
each with trees that saw neither. Points of each of its devices and software builds become the model's own data for the device,
as a profile's do; scored are the other rows, up to 4,000. Points are drawn at random, or chosen as the profiler chooses its
shapes (`most_informative_shapes`, from as many random rows of the table as it has candidates, by their shapes): three draws.
Families named are computed anew and join those that OUT.json has.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from meshwright.cost_models.learned import calibration, kernels
from meshwright.cost_models.learned.calibration import NUM_CANDIDATES, Covariance, most_informative_shapes
from meshwright.cost_models.learned.kernels import GemmRates, ResidualModel
from meshwright.fitting import gemm as gemm_fit

NUMBERS = (0, 10, 30, 100, 200, 500)
DRAWS = 3
CHOICES = ("chosen", "random")


def measured_order(
    part: pd.DataFrame, choice: str, seed: int, residual: ResidualModel, prior: GemmRates, kernel: Covariance
) -> np.ndarray:
    """Return positions of rows in the order in which they are measured, at most the largest of NUMBERS."""
    drawn = np.random.default_rng(seed).permutation(len(part))
    if choice == "random":
        return drawn[: max(NUMBERS)]
    candidates = drawn[:NUM_CANDIDATES]
    sizes = gemm_fit.sizes_of(part.iloc[candidates])
    return candidates[most_informative_shapes(*sizes, prior, max(NUMBERS), residual=residual, kernel=kernel)]


def point_errors(
    part: pd.DataFrame, residual: ResidualModel, prior: GemmRates, kernel: Covariance
) -> Iterator[tuple[str, int, tuple[float, float]]]:
    """Yield choice, number of points, and mean and median |predicted / measured - 1| on rows that are not points."""
    scored = np.random.default_rng(9).permutation(len(part))[:4000]
    for choice in CHOICES:
        for seed in range(DRAWS):
            order = measured_order(part, choice, seed, residual, prior, kernel)
            for number in NUMBERS:
                chosen = order[:number]
                points, others = part.iloc[chosen], part.iloc[np.setdiff1d(scored, chosen)]
                fields = *gemm_fit.sizes_of(points), points.seconds.to_numpy()
                rates = calibration.calibrate(*fields, prior, residual=residual, kernel=kernel)
                predicted = kernels.predict(*gemm_fit.sizes_of(others), rates, residual=residual)
                error = np.abs(predicted / others.seconds.to_numpy() - 1)
                yield choice, number, (float(error.mean()), float(np.median(error)))


def family_errors(rows: pd.DataFrame, family: str) -> dict[str, dict[str, list[float]]]:
    """Return choice -> number -> mean and median error, every device and build of the family weighing the same."""
    kernel = gemm_fit.nested_kernel(rows, family)
    residual, priors = gemm_fit.without_families(rows, (family,))
    records: list[tuple[str, int, str, float, float]] = []
    for key, prior in priors.items():
        part = rows[(rows.device == key[0]) & (rows.software == key[1])]
        for choice, number, (mean, median) in point_errors(part, residual, prior, kernel):
            records.append((choice, number, str(key), mean, median))
    table = pd.DataFrame(records, columns=["choice", "number", "build", "mean", "median"])
    table = table.groupby(["choice", "number", "build"]).mean().groupby(["choice", "number"]).mean()
    return {
        choice: {str(number): table.loc[choice, number].tolist() for number in NUMBERS}  # type: ignore[index]
        for choice in CHOICES
    }


def one_line(errors: dict[str, dict[str, list[float]]]) -> str:
    """Return the mean errors for people."""
    return "; ".join(
        f"{choice}: " + ", ".join(f"{number} {100 * mean:.1f} %" for number, (mean, _) in errors[choice].items())
        for choice in CHOICES
    )


def mean_over(families: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Return the mean over families."""
    return {
        choice: {
            str(n): np.mean([family[choice][str(n)] for family in families.values()], axis=0).tolist() for n in NUMBERS
        }
        for choice in CHOICES
    }


def main() -> None:
    """Score the families and write the table."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("families", nargs="*", choices=[*gemm_fit.FAMILIES, []], metavar="FAMILY")
    options = parser.parse_args()
    rows, out = gemm_fit.read_rows(options.data), options.out
    rows = rows[~rows.software.map(gemm_fit.is_fp8)].reset_index(drop=True)
    families = json.loads(out.read_text())["families"] if options.families and out.exists() else {}
    for family in options.families or gemm_fit.FAMILIES:
        families[family] = family_errors(rows, family)
        print(family, one_line(families[family]), flush=True)
    mean = mean_over(families)
    print("mean of", ", ".join(families), one_line(mean))
    result = {"columns": ["mean error", "median error"], "families": families, "mean": mean}
    out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
