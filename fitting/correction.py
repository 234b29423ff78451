"""Fits the prior of the correction through measured points on devices that the trees had not seen; prints it.

    python -m meshwright.fitting.correction DATA_FOLDER

Of each device and software build of a family left out of coefficients and trees: coefficients through 100 random products
(`gemm.calibrate`), then what the trees leave unexplained on others. The kernel minimises the loss of each of them predicted from
all others (leave one out), a Student t's with four degrees of freedom, so that a few products on an odd kernel count little;
every family weighs the same. `nested_kernel` leaves a second family out of everything, to be scored on that.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.optimize import minimize

from ..cost_models.learned import calibration, gemm
from ..cost_models.learned.correction import FEATURES, Covariance, covariance_of
from ..schema.arrays import FloatArray
from . import gemm as gemm_fit
from .command import run_command

_START = np.log([*[5.0] * len(FEATURES), 0.4, 0.12, 0.3, 0.08, 0.06])
_LOOSE = 1.0
"""Deviation of each logarithm around its start, which keeps lengths that do not matter where they are."""

_COEFFICIENT_POINTS, _POINTS, _DRAWS = 100, 120, 2
_DEGREES = 4.0


class Sample(NamedTuple):
    """Products of one device and build: FEATURES [n, d], answer of the trees [n], log(measured / predicted) [n]."""

    family: str
    x: FloatArray
    learned: FloatArray
    left: FloatArray


def fit_kernel(samples: Sequence[Sample]) -> Covariance:
    """The kernel of the least loss, every family weighing the same."""
    families = [sample.family for sample in samples]
    share = [1 / (families.count(family) * len(set(families))) for family in families]

    def loss(z: FloatArray) -> float:
        kernel, pull = _kernel(z), 0.5 * np.sum(((z - _START) / _LOOSE) ** 2)
        each = (part * left_one_out(sample, kernel) for part, sample in zip(share, samples, strict=True))
        return float(sum(each) + pull / (_POINTS * len(samples)))

    found = minimize(loss, _START, method="L-BFGS-B", options={"maxiter": 40})
    rounded = _kernel(found.x)
    return Covariance(tuple(float(f"{x:.3g}") for x in rounded.lengths), *(float(f"{x:.3g}") for x in rounded[1:]))


def _kernel(z: FloatArray) -> Covariance:
    values = [float(value) for value in np.exp(z)]
    return Covariance(tuple(values[: len(FEATURES) + 1]), *values[len(FEATURES) + 1 :])


def left_one_out(sample: Sample, kernel: Covariance) -> float:
    """Mean loss of a sample's products, each predicted from the others of its draw."""
    losses = []
    for draw in range(_DRAWS):
        part = slice(draw * _POINTS, (draw + 1) * _POINTS)
        learned = sample.learned[part]
        x = np.column_stack([sample.x[part], learned]) / kernel.lengths
        inverse = np.linalg.inv(covariance_of(x, learned, kernel) + kernel.noise**2 * np.eye(len(x)))
        variance = 1 / np.diag(inverse)
        wrong = (inverse @ sample.left[part]) ** 2 * variance
        losses.append(np.mean(0.5 * np.log(variance) + (_DEGREES + 1) / 2 * np.log1p(wrong / _DEGREES)))
    return float(np.mean(losses))


def samples_of(rows: pd.DataFrame, left_out: Sequence[str], family: str) -> list[Sample]:
    """Samples of one of the families left out of coefficients and trees."""
    residual, priors = gemm_fit.without_families(rows, left_out)
    found = []
    for key, rates in priors.items():
        if gemm_fit.FAMILIES[key[0]] != family:
            continue
        part = rows[(rows.device == key[0]) & (rows.software == key[1])]
        part = part.iloc[np.random.default_rng(0).permutation(len(part))[: _COEFFICIENT_POINTS + _DRAWS * _POINTS]]
        m, n, k, seconds = (part[name].to_numpy() for name in ("m", "n", "k", "seconds"))
        first = slice(0, _COEFFICIENT_POINTS)
        points = m[first], n[first], k[first], seconds[first]
        own = calibration.calibrate(*points, rates, residual=residual, kernel=_kernel(_START)).coefficients
        rest = slice(_COEFFICIENT_POINTS, None)
        m, n, k, seconds = m[rest], n[rest], k[rest], seconds[rest]
        sheet, size = rates.hardware, rates.element_bytes
        columns = gemm.features(m, n, k, own, sheet, element_bytes=size, software=rates.software)
        learned = residual.log_residual(columns)
        left = np.log(seconds / gemm.roofline_s(m, n, k, own, sheet, size)) - learned
        found.append(Sample(family, np.stack([columns[name] for name in FEATURES], axis=1), learned, left))
    return found


def nested_kernel(rows: pd.DataFrame, family: str) -> Covariance:
    """The kernel fitted on all families but this one, each with trees that saw neither."""
    others = [other for other in dict.fromkeys(gemm_fit.FAMILIES.values()) if other != family]
    return fit_kernel([sample for other in others for sample in samples_of(rows, (family, other), other)])


def shipped_kernel(rows: pd.DataFrame) -> Covariance:
    """The kernel fitted on every family, with trees that had not seen it."""
    families = tuple(dict.fromkeys(gemm_fit.FAMILIES.values()))
    return fit_kernel([sample for family in families for sample in samples_of(rows, (family,), family)])


def fit(options: argparse.Namespace) -> str:
    """The kernel that is shipped, as text."""
    rows = gemm_fit.read_rows(options.data)
    return f"{shipped_kernel(rows[~rows.software.map(gemm_fit.is_fp8)].reset_index(drop=True))}\n"


def main(arguments: list[str] | None = None) -> None:
    """Command line of the fit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="folder that holds operators/ and measured_runs/")
    run_command(parser, fit, arguments)


if __name__ == "__main__":
    main()
