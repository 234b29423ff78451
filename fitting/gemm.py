"""Fits gemm.npz: rooflines of measured devices and the residual they share.

Rows: bf16 and fp8 of aiconfigurator's tables (A100, H100, H200, B200, GB200, L40S; three software builds). A build is a column:
the same GPU differs 4 to 7 % between builds, and one of them runs large bf16 products at clocks that sustained load does not
reach. Planning in bf16 uses the build that covers every device and size. fp8 rows are TensorRT-LLM's alone, plain kernels of sizes
from 1024 on H100 and B200: those of vLLM include the quantisation of activations, those with scales per block the host's launches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.ensemble import HistGradientBoostingRegressor

from ..cost_models.learned import gemm
from ..cost_models.learned.calibration import least_squares, soften_outliers
from ..cost_models.learned.gemm import GemmCoefficients, GemmRates
from ..cost_models.learned.trees import ResidualModel
from ..schema.arrays import FloatArray
from .estimator import RooflineRegressor
from .operators import FittedModels

SOFTWARE = {"sglang": 0.0, "trtllm": 1.0, "vllm": 2.0, "trtllm-fp8": 3.0}
"""Software build -> column. The first two run large products with random operands at sustained clocks; large bf16 products of the
third exceed the highest rates published (0.96 of the peak on A100, where 0.87 is the best found by search)."""

FAMILIES = {
    "A100-SXM-80GB": "ampere",
    "H100-SXM-80GB": "hopper",
    "H200-SXM-141GB": "hopper",
    "B200-SXM-180GB": "blackwell",
    "GB200-186GB": "blackwell",
    "L40S-48GB": "ada",
}
_SYSTEMS = dict(zip(("a100_sxm", "h100_sxm", "h200_sxm", "b200_sxm", "gb200", "l40s"), FAMILIES, strict=True))
_CLASSES = {"A100-80GB": "A100-SXM-80GB", "H100-80GB": "H100-SXM-80GB", "B200": "B200-SXM-180GB"}
_START = GemmCoefficients(3.5e-6, 0.75, 0.8, 2.6, 0.1)
_LOOSE = np.array([1.0, 0.2, 0.2, 0.5, 1.0])
_NUM_TREES = 320
_MOST_FP8 = 6000  # rows of a device and build, so that fp8 does not outweigh bf16

Mask = NDArray[np.bool_]


def is_fp8(software: str) -> bool:
    """Whether a build's rows are fp8 products."""
    return software.endswith("fp8")


@cache
def device_rates(device: str, software: str) -> GemmRates:
    """Data sheet of a catalogue device in the format of a build, before any fit."""
    from ..cost_models.coefficients import packaged_coefficients
    from ..cost_models.hardware.device import gemm_device
    from ..schema.catalogue import find_device
    from ..schema.cluster_files import catalogue_device

    key, entry = find_device(device)
    sheet = gemm_device(
        catalogue_device(key, entry), "fp8" if is_fp8(software) else "bf16-mixed", packaged_coefficients()
    )
    return GemmRates(_START, sheet, SOFTWARE[software], 1.0 if is_fp8(software) else 2.0)


def read_rows(folder: Path) -> pd.DataFrame:
    """Measured products: device, family, software (with "-fp8" appended), m, n, k, seconds."""
    table = pd.read_parquet(folder / "operators/gemm.parquet")
    first = table.assign(device=table.system.map(_SYSTEMS), build=table.fw, seconds=table.latency / 1e3)
    table = pd.read_csv(folder / "measured_runs/gemm_kernels.csv")
    second = table.assign(device=table.gpu_class.map(_CLASSES), build="trtllm", seconds=table.latency_ms / 1e3)
    second = second.rename(columns={"dtype": "gemm_dtype"})
    columns = ["device", "build", "gemm_dtype", "m", "n", "k", "seconds"]
    rows = pd.concat([first[columns], second[columns]], ignore_index=True).astype(dict.fromkeys("mnk", float))
    fp8 = (rows.gemm_dtype == "fp8") & (rows.build == "trtllm")
    rows = rows[(rows.gemm_dtype == "bfloat16") | fp8].sample(frac=1, random_state=0)
    fp8 = rows.gemm_dtype == "fp8"
    rows = rows[~fp8 | (rows.groupby(["device", "build", "gemm_dtype"]).cumcount() < _MOST_FP8)].sort_index()
    software = rows.build + np.where(rows.gemm_dtype == "fp8", "-fp8", "")
    rows = rows.assign(software=software, family=rows.device.map(FAMILIES), flops=2 * rows.m * rows.n * rows.k)
    return rows.drop(columns=["build", "gemm_dtype"]).reset_index(drop=True)


def fit_roofline(rows: pd.DataFrame, rates: GemmRates, most: int = 3000) -> GemmCoefficients:
    """Coefficients of one device and build: robust least squares of logarithms, every factor of two in time weighing the same."""
    if len(rows) > most:
        rows = rows.sample(most, random_state=0)
    m, n, k, seconds = (rows[name].to_numpy() for name in ("m", "n", "k", "seconds"))
    octave = np.clip(np.floor(np.log2(seconds / 2e-6)), 0, 12).astype(int)
    weight = np.sqrt(1 / np.bincount(octave)[octave])
    weight *= np.sqrt(len(rows) / np.sum(weight**2))
    prior = np.log(_START)

    def misfit(z: FloatArray) -> FloatArray:
        at = GemmCoefficients(*np.exp(z))
        error = np.log(gemm.roofline_s(m, n, k, at, rates.hardware, rates.element_bytes) / seconds)
        return np.concatenate([soften_outliers(error * weight, 0.1), (z - prior) / _LOOSE])

    return GemmCoefficients(*(float(value) for value in np.exp(least_squares(misfit, prior))))


Rooflines = Mapping[tuple[str, str], GemmCoefficients]


def fit_rooflines(rows: pd.DataFrame, train: Mask) -> dict[tuple[str, str], GemmCoefficients]:
    """(device, software) -> coefficients, from the rows in ``train``."""
    return {
        (device, software): fit_roofline(part, device_rates(device, software))
        for (device, software), part in rows[train].groupby(["device", "software"])
    }


def design(rows: pd.DataFrame, rooflines: Rooflines) -> tuple[list[str], FloatArray, FloatArray]:
    """Names and matrix [N, d] of the features, and roofline seconds [N]."""
    names: list[str] = []
    x, roofline = None, np.zeros(len(rows))
    for (device, software), at in rows.groupby(["device", "software"]).indices.items():
        m, n, k = (rows[name].to_numpy()[at] for name in "mnk")
        own, (_, sheet, column, size, *_) = rooflines[device, software], device_rates(device, software)
        columns = gemm.features(m, n, k, own, sheet, element_bytes=size, software=column)
        names = list(columns)
        x = np.zeros((len(rows), len(names))) if x is None else x
        x[at] = np.stack([columns[name] for name in names], axis=1)
        roofline[at] = gemm.roofline_s(m, n, k, own, sheet, size)
    assert x is not None
    return names, x, roofline


def fit_residual(x: FloatArray, roofline: FloatArray, seconds: FloatArray) -> RooflineRegressor:
    """The residual on rows [N, d] with their roofline."""
    trees = HistGradientBoostingRegressor(
        max_iter=_NUM_TREES, max_leaf_nodes=31, learning_rate=0.1, min_samples_leaf=40, random_state=0
    )
    return RooflineRegressor(roofline_column=x.shape[1], residual=trees).fit(np.column_stack([x, roofline]), seconds)


def fit(folder: Path, *, score: bool) -> FittedModels:
    """The artefact, with scores where asked for."""
    rows = read_rows(folder)
    rooflines = fit_rooflines(rows, np.ones(len(rows), dtype=bool))
    names, x, roofline = design(rows, rooflines)
    regressor = fit_residual(x, roofline, rows.seconds.to_numpy())
    scores: dict[str, Any] = {}
    errors = {"devices": 0.08, "architectures": 0.12, "unknown": 0.25}
    if score:
        scores, errors = scored(rows)
    provenance: dict[str, Any] = {
        "rows": len(rows),
        "sources": [
            "operators/gemm.parquet (ai-dynamo/aiconfigurator 095f58a, Apache-2.0), bf16, fp8",
            "measured_runs/gemm_kernels.csv (the same project, TensorRT-LLM builds), bf16, fp8",
            "operators/simumax/efficiency.csv (MooreThreads/SimuMax 4dcaae5, Apache-2.0), ratio of weight gradients",
        ],
        "rooflines": {
            "bf16": shipped_rooflines(rooflines, "sglang"),
            "fp8": shipped_rooflines(rooflines, "trtllm-fp8"),
        },
        "relative_error": errors,
        "weight_gradient_ratio": weight_gradient_ratio(folder),
    }
    return FittedModels({"gemm": regressor.to_model(names, provenance)}, scores)


def shipped_rooflines(rooflines: Rooflines, build: str) -> dict[str, Any]:
    """Coefficients that planning uses: of each device, of each architecture (mean of its devices), and the median of those."""
    devices = {device: list(own) for (device, software), own in rooflines.items() if software == build}
    architectures = {
        family: _mean([devices[device] for device in devices if FAMILIES[device] == family])
        for family in dict.fromkeys(FAMILIES[device] for device in devices)
    }
    median = np.exp(np.median(np.log(list(architectures.values())), axis=0))
    middle = [float(value) for value in median]
    return {"software": SOFTWARE[build], "devices": devices, "architectures": architectures, "median": middle}


def _mean(members: list[list[float]]) -> list[float]:
    return [float(value) for value in np.exp(np.mean(np.log(members), axis=0))]


def weight_gradient_ratio(folder: Path) -> float:
    """Median time of a weight gradient over that of the forward product with the same three sizes."""
    table = pd.read_csv(folder / "operators/simumax/efficiency.csv")
    table = table[table.op == "matmul"]
    sizes = [table.key.str.extract(rf"\b{name}=(\d+)")[0].astype(int) for name in ("m", "n", "k")]
    shape = [tuple(sorted(triple)) for triple in zip(*sizes, strict=True)]
    table = table.assign(layout=table.key.str.extract(r"layout=(\w+)")[0], shape=shape)
    efficiency = table.pivot_table(index=["sys", "shape"], columns="layout", values="eff").dropna()
    ratio = (efficiency.TN / efficiency.NT).groupby("sys").median()
    return round(float(ratio.mean()), 3)


def scored(rows: pd.DataFrame) -> tuple[dict[str, Any], dict[str, float]]:
    """Scores of rows, sizes and families left out, and the standard deviations that follow from them."""
    scores: dict[str, Any] = {}
    drawn = np.random.default_rng(0).random(len(rows)) < 0.8
    largest = rows.groupby(["device", "software"]).flops.transform(lambda flops: flops > flops.quantile(0.8)).to_numpy()
    for title, train in (("20 % of rows left out", drawn), ("largest 20 % left out", ~largest)):
        rooflines = fit_rooflines(rows, train)
        _, x, roofline = design(rows, rooflines)
        seconds = rows.seconds.to_numpy()
        regressor = fit_residual(x[train], roofline[train], seconds[train])
        ratio = regressor.predict(np.column_stack([x, roofline])[~train]) / seconds[~train]
        left = rows[~train].assign(error=np.abs(ratio - 1))
        by_build = left.groupby(["device", "software"]).error.mean()
        fp8 = [is_fp8(build) for _, build in by_build.index]
        scores[title] = round(float(by_build[np.invert(fp8)].mean()), 4)
        scores[f"{title}, fp8"] = round(float(by_build[fp8].mean()), 4)
        scores.update({f"{title}: {device} {build}": round(float(v), 4) for (device, build), v in by_build.items()})
    families = dict(_left_out_errors(rows[~rows.software.map(is_fp8)]))
    scores["family left out"] = round(float(np.mean(list(families.values()))), 4)
    scores.update({f"family left out: {family}": round(v, 4) for family, v in families.items()})
    known = (
        scores["20 % of rows left out"] * 1.25
    )  # a normal error of mean magnitude e has a standard deviation of 1.25 e
    unknown = scores["family left out"] * 1.25
    errors = {"devices": known, "architectures": (known + unknown) / 2, "unknown": unknown}
    return scores, {name: round(float(value), 3) for name, value in errors.items()}


def left_out_families(
    rows: pd.DataFrame,
) -> Iterator[tuple[str, ResidualModel, dict[tuple[str, str], GemmRates]]]:
    """Each family with the residual of all others, and for each of its (device, software) the rates that data sheet and the
    others' coefficients give.
    """
    for family in dict.fromkeys(FAMILIES.values()):
        yield family, *without_families(rows, (family,))


def without_families(
    rows: pd.DataFrame, families: Sequence[str]
) -> tuple[ResidualModel, dict[tuple[str, str], GemmRates]]:
    """The residual of all families but those, and for each of their (device, software) the rates that data sheet and the
    other families' coefficients give.
    """
    others = rows[~rows.family.isin(families)]
    rooflines = fit_rooflines(others, np.ones(len(others), dtype=bool))
    names, x, roofline = design(others, rooflines)
    residual = fit_residual(x, roofline, others.seconds.to_numpy()).to_model(names, {})
    mine = rows[rows.family.isin(families)].groupby(["device", "software"]).indices
    return residual, {
        (device, software): device_rates(device, software)._replace(coefficients=_prior(rooflines, software))
        for device, software in mine
    }


def _left_out_errors(rows: pd.DataFrame) -> Iterator[tuple[str, float]]:
    """Family and the mean error over its devices and builds, from data sheets; with points of it: benchmarks/gemm_points.py."""
    for family, residual, priors in left_out_families(rows):
        parts = rows[rows.family == family].groupby(["device", "software"])
        yield family, float(np.mean([_error(part, residual, priors[key]) for key, part in parts]))


def _prior(rooflines: Rooflines, software: str) -> GemmCoefficients:
    """Median over families, of the same build (of the reference build where families lack it)."""
    build = "sglang" if software == "trtllm" else software
    mine: dict[str, list[list[float]]] = {}
    for (device, other), own in rooflines.items():
        if other == build:
            mine.setdefault(FAMILIES[device], []).append(list(own))
    median = np.exp(np.median(np.log([_mean(members) for members in mine.values()]), axis=0))
    return GemmCoefficients(*(float(value) for value in median))


def _error(part: pd.DataFrame, residual: ResidualModel, prior: GemmRates) -> float:
    """Mean error on up to 4,000 of a device's rows."""
    rows = part.iloc[np.random.default_rng(9).permutation(len(part))[:4000]]
    predicted = gemm.predict(*_columns(rows), prior, residual=residual)
    return float(np.mean(np.abs(predicted / rows.seconds.to_numpy() - 1)))


def _columns(rows: pd.DataFrame) -> tuple[FloatArray, FloatArray, FloatArray]:
    m, n, k = (rows[name].to_numpy() for name in "mnk")
    return m, n, k
