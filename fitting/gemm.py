"""Fit the learned model of products: gemm.npz (rooflines of measured devices and the residual they share) and its correction.

Rows: aiconfigurator's tables of three software builds. A build is a column: the same GPU differs 4 to 7 % between builds, and one
of them runs large bf16 products at clocks that sustained load does not reach. Planning in bf16 uses the build that covers every
device and size. fp8 rows are TensorRT-LLM's only, plain kernels of sizes from 1024: those of vLLM include the quantisation of
activations, those with scales per block the host's launches.

The correction's kernel is fitted on families left out of coefficients and trees: coefficients through 100 random products, then
what the trees leave unexplained on others, each predicted from all others (leave one out). The loss is a Student t's with four
degrees of freedom, so that a few products on an odd kernel count little; every family weighs the same.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import minimize

from ..cost_models.coefficients import packaged_coefficients
from ..cost_models.hardware.machine import gemm_device, on_board
from ..cost_models.learned import calibration, kernels
from ..cost_models.learned.calibration import FEATURES, Covariance, covariance
from ..cost_models.learned.kernels import GemmCoefficients, GemmRates, ResidualModel
from ..schema.catalogue import find_device
from ..schema.cluster import Device
from ..schema.task import Precision
from ..schema.units import FloatArray
from .estimator import fit_residual, key_values, least_relative_squares, percent_error, score_lines, write_artefact

SOFTWARE = {"sglang": 0.0, "trtllm": 1.0, "vllm": 2.0, "trtllm-fp8": 3.0}
"""Software build -> column. The first two run large products with random operands at sustained clocks; large bf16 products of the
third exceed the highest rates published (0.96 of the peak on A100, where 0.87 is the best that a search reached)."""

SYSTEMS = {
    "a100_sxm": "A100-SXM-80GB", "h100_sxm": "H100-SXM-80GB", "h200_sxm": "H200-SXM-141GB", "b200_sxm": "B200-SXM-180GB",
    "gb200": "GB200-186GB", "l40s": "L40S-48GB",
}  # fmt: skip
"""System of aiconfigurator's tables -> device of the catalogue."""

FAMILIES = ("ampere", "hopper", "blackwell", "ada")
"""Architectures of these devices."""

_CLASSES = {"A100-80GB": "A100-SXM-80GB", "H100-80GB": "H100-SXM-80GB", "B200": "B200-SXM-180GB"}
_START = GemmCoefficients(3.5e-6, 0.75, 0.8, 2.6, 0.1)
_LOOSE = np.array([1.0, 0.2, 0.2, 0.5, 1.0])
_TREES = {"max_iter": 320, "max_leaf_nodes": 31, "learning_rate": 0.1}
_MAX_ROOFLINE_ROWS = 3000
_MAX_FP8_ROWS = 6000
"""Of a device and build, so that fp8 does not outweigh bf16."""

LARGE_S = 3e-4
"""Products that training of wide models is made of."""

_DEVIATION_OVER_MEAN_ERROR = 1.25
"""A normal error of mean magnitude e has a standard deviation of 1.25 e."""

_KERNEL_START = np.log([*[5.0] * len(FEATURES), 0.4, 0.12, 0.3, 0.08, 0.06])
_KERNEL_LOOSE = 1.0
"""Deviation of each logarithm around its start, which keeps lengths that do not matter where they are."""

_COEFFICIENT_POINTS, _POINTS, _DRAWS = 100, 120, 2
_DEGREES = 4.0

Build = tuple[str, str]
"""Device and software."""


@cache
def family_of(device: str) -> str:
    """Return a catalogue device's architecture."""
    return str(find_device(device)[1]["architecture"])


def data_sheet(device: str) -> tuple[float, float]:
    """Return bf16 FLOP/s and memory bytes/s of a catalogue device."""
    entry = find_device(device)[1]
    return float(entry["peak_flops_per_s"]["bf16"]), float(entry["memory_bandwidth_bytes_per_s"])


def is_fp8(software: str) -> bool:
    """Return whether a build's rows are fp8 products."""
    return software.endswith("fp8")


@cache
def device_rates(device: str, software: str) -> GemmRates:
    """Return the data sheet of a catalogue device in the format of a build, before any fit."""
    precision: Precision = "fp8" if is_fp8(software) else "bf16-mixed"
    sheet = gemm_device(Device.named(device), precision, packaged_coefficients())
    return GemmRates(_START, sheet, SOFTWARE[software], 1.0 if is_fp8(software) else 2.0)


def read_rows(folder: Path) -> pd.DataFrame:
    """Return measured products: device, family, software (with "-fp8" appended), m, n, k, seconds."""
    table = pd.read_parquet(folder / "operators/gemm.parquet")
    first = table.assign(device=table.system.map(SYSTEMS), build=table.fw, seconds=table.latency / 1e3)
    table = pd.read_csv(folder / "measured_runs/gemm_kernels.csv")
    second = table.assign(device=table.gpu_class.map(_CLASSES), build="trtllm", seconds=table.latency_ms / 1e3)
    second = second.rename(columns={"dtype": "gemm_dtype"})
    columns = ["device", "build", "gemm_dtype", "m", "n", "k", "seconds"]
    rows = pd.concat([first[columns], second[columns]], ignore_index=True).astype(dict.fromkeys("mnk", float))
    fp8 = (rows.gemm_dtype == "fp8") & (rows.build == "trtllm")
    rows = rows[(rows.gemm_dtype == "bfloat16") | fp8].sample(frac=1, random_state=0)
    fp8 = rows.gemm_dtype == "fp8"
    rows = rows[~fp8 | (rows.groupby(["device", "build", "gemm_dtype"]).cumcount() < _MAX_FP8_ROWS)].sort_index()
    software = rows.build + np.where(rows.gemm_dtype == "fp8", "-fp8", "")
    rows = rows.assign(software=software, family=rows.device.map(family_of), flops=2 * rows.m * rows.n * rows.k)
    return rows.drop(columns=["build", "gemm_dtype"]).reset_index(drop=True)


def sizes_of(rows: pd.DataFrame) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return m, n, k [N]."""
    m, n, k = (rows[name].to_numpy() for name in "mnk")
    return m, n, k


def fit_roofline(rows: pd.DataFrame, rates: GemmRates) -> GemmCoefficients:
    """Fit one device and build by robust least squares of logarithms, every factor of two in time weighing the same."""
    if len(rows) > _MAX_ROOFLINE_ROWS:
        rows = rows.sample(_MAX_ROOFLINE_ROWS, random_state=0)
    sizes, seconds = sizes_of(rows), rows.seconds.to_numpy()
    octave = np.clip(np.floor(np.log2(seconds / 2e-6)), 0, 12).astype(int)
    weight = np.sqrt(1 / np.bincount(octave)[octave])
    weight *= np.sqrt(len(rows) / np.sum(weight**2))
    prior = np.log(_START)

    def misfit(z: FloatArray) -> FloatArray:
        moved = rates._replace(coefficients=GemmCoefficients(*np.exp(z)))
        error = np.log(kernels.roofline_s(*sizes, moved) / seconds)
        return np.concatenate([calibration.soften_outliers(error * weight, 0.1), (z - prior) / _LOOSE])

    return GemmCoefficients(*(float(value) for value in np.exp(calibration.least_squares(misfit, prior))))


Rooflines = Mapping[Build, GemmCoefficients]


def _fit_rooflines(rows: pd.DataFrame) -> dict[Build, GemmCoefficients]:
    return {build: fit_roofline(part, device_rates(*build)) for build, part in rows.groupby(["device", "software"])}


def design(rows: pd.DataFrame, rooflines: Rooflines) -> tuple[list[str], FloatArray, FloatArray]:
    """Return names and matrix [N, d] of the features, and roofline seconds [N]."""
    names: list[str] = []
    features, rooflines_s, order = [], [], []
    for build, idx in rows.groupby(["device", "software"]).indices.items():
        sizes, rates = sizes_of(rows.iloc[idx]), device_rates(*build)._replace(coefficients=rooflines[build])
        columns = kernels.features(*sizes, rates)
        names = list(columns)
        features.append(np.stack(list(columns.values()), axis=1))
        rooflines_s.append(kernels.roofline_s(*sizes, rates))
        order.append(idx)
    back = np.argsort(np.concatenate(order))
    return names, np.concatenate(features)[back], np.concatenate(rooflines_s)[back]


def report(options: Namespace) -> str:
    """Write the artefact, with scores where requested."""
    rows = read_rows(options.data)
    rooflines = _fit_rooflines(rows)
    names, x, roofline = design(rows, rooflines)
    regressor = fit_residual(x, roofline, rows.seconds.to_numpy(), **_TREES)
    scores: dict[str, Any] = {}
    errors = {"devices": 0.08, "architectures": 0.12, "unknown": 0.25}
    if options.score:
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
        "weight_gradient_ratio": weight_gradient_ratio(options.data),
    }
    return write_artefact(regressor.to_model(names, provenance), options.out, "gemm", scores)


def shipped_rooflines(rooflines: Rooflines, build: str) -> dict[str, Any]:
    """Return coefficients for planning: of each device, of each architecture (mean of its devices), and the median of those."""
    devices = {device: list(known) for (device, software), known in rooflines.items() if software == build}
    architectures = {
        family: np.exp(
            np.mean([np.log(devices[name]) for name in devices if family_of(name) == family], axis=0)
        ).tolist()
        for family in dict.fromkeys(map(family_of, devices))
    }
    median = np.exp(np.median(np.log(list(architectures.values())), axis=0)).tolist()
    return {"software": SOFTWARE[build], "devices": devices, "architectures": architectures, "median": median}


def weight_gradient_ratio(folder: Path) -> float:
    """Return the median time of a weight gradient over that of the forward product with the same three sizes."""
    table = pd.read_csv(folder / "operators/simumax/efficiency.csv")
    table = table[table.op == "matmul"]
    shape = [tuple(sorted(triple)) for triple in zip(*key_values(table.key, "mnk"), strict=True)]
    table = table.assign(layout=table.key.str.extract(r"layout=(\w+)")[0], shape=shape)
    efficiency = table.pivot_table(index=["sys", "shape"], columns="layout", values="eff").dropna()
    ratio = (efficiency.TN / efficiency.NT).groupby("sys").median()
    return round(float(ratio.mean()), 3)


def scored(rows: pd.DataFrame) -> tuple[dict[str, Any], dict[str, float]]:
    """Return scores of rows, sizes and families left out, and the standard deviations that follow from them."""
    scores: dict[str, Any] = {}
    drawn = np.random.default_rng(0).random(len(rows)) < 0.8
    largest = rows.groupby(["device", "software"]).flops.transform(lambda flops: flops > flops.quantile(0.8)).to_numpy()
    for title, train in (("20 % of rows left out", drawn), ("largest 20 % left out", ~largest)):
        by_build = _errors_of_others(rows, train)
        fp8 = by_build.index.get_level_values("software").map(is_fp8).to_numpy(dtype=bool)
        scores[title] = round(float(by_build[~fp8].mean()), 4)
        scores[f"{title}, fp8"] = round(float(by_build[fp8].mean()), 4)
        scores.update({f"{title}: {device} {build}": round(float(v), 4) for (device, build), v in by_build.items()})
    bf16 = rows[~rows.software.map(is_fp8)]
    families = pd.DataFrame({family: _family_errors(bf16, family) for family in FAMILIES})
    for title, errors_of in families.iterrows():
        scores[str(title)] = round(float(errors_of.mean()), 4)
        scores.update({f"{title}: {family}": round(float(v), 4) for family, v in errors_of.items()})
    known = scores["20 % of rows left out"] * _DEVIATION_OVER_MEAN_ERROR
    unknown = scores["family left out"] * _DEVIATION_OVER_MEAN_ERROR
    errors = {"devices": known, "architectures": (known + unknown) / 2, "unknown": unknown}
    return scores, {name: round(float(value), 3) for name, value in errors.items()}


def _errors_of_others(rows: pd.DataFrame, train: NDArray[np.bool_]) -> pd.Series:
    _, x, roofline = design(rows, _fit_rooflines(rows[train]))
    seconds = rows.seconds.to_numpy()
    regressor = fit_residual(x[train], roofline[train], seconds[train], **_TREES)
    ratio = regressor.predict(np.column_stack([roofline, x])[~train]) / seconds[~train]
    return rows[~train].assign(error=np.abs(ratio - 1)).groupby(["device", "software"]).error.mean()


def _family_errors(rows: pd.DataFrame, family: str) -> dict[str, float]:
    """Return mean errors over a family's devices and builds: from data sheets, and at their boards' clocks as planning asks; of
    products of LARGE_S and more besides. With points of it: benchmarks/gemm_points.py.
    """
    residual, priors = without_families(rows, (family,))
    packaged = packaged_coefficients()
    # What the family reaches of its peak is known from these very rows.
    others = {"other": packaged.value("clocks.large_efficiency.other")}
    coefficients, errors = packaged.replaced({"clocks.large_efficiency": others}), []
    for build, part in rows[rows.family == family].groupby(["device", "software"]):
        drawn = part.iloc[np.random.default_rng(9).permutation(len(part))[:4000]]
        sheet, is_large = priors[build], (drawn.seconds >= LARGE_S).to_numpy()
        clocked = on_board(sheet._replace(reference=sheet.hardware), Device.named(build[0]), coefficients, residual)
        of_build = {}
        for title, rates in (("family left out", sheet), ("family left out, at its boards' clocks", clocked)):
            predicted = kernels.predict(*sizes_of(drawn), rates, residual=residual)
            of_build[title] = percent_error(predicted, drawn.seconds) / 100
            of_build[f"{title}, large"] = percent_error(predicted[is_large], drawn.seconds[is_large]) / 100
        errors.append(of_build)
    return dict(pd.DataFrame(errors).mean())


def without_families(rows: pd.DataFrame, families: Sequence[str]) -> tuple[ResidualModel, dict[Build, GemmRates]]:
    """Return the residual of all families but those, and for each of their builds its data sheet with the others' coefficients."""
    others = rows[~rows.family.isin(families)]
    rooflines = _fit_rooflines(others)
    names, x, roofline = design(others, rooflines)
    residual = fit_residual(x, roofline, others.seconds.to_numpy(), **_TREES).to_model(names, {})
    builds = rows[rows.family.isin(families)].groupby(["device", "software"]).indices
    # The median over families is of the same build, or of the reference build where families lack it.
    reference = {"trtllm": "sglang"}
    median = {build: shipped_rooflines(rooflines, reference.get(build, build))["median"] for _, build in builds}
    return residual, {
        build: device_rates(*build)._replace(coefficients=GemmCoefficients(*median[build[1]])) for build in builds
    }


class Sample(NamedTuple):
    """Products of one device and build: FEATURES [n], answer of the trees [n], log(measured / predicted) [n]."""

    family: str
    columns: dict[str, FloatArray]
    learned: FloatArray
    unexplained: FloatArray


def fit_kernel(samples: Sequence[Sample]) -> Covariance:
    """Return the kernel of the lowest loss, every family weighing the same."""
    families = [sample.family for sample in samples]
    weights = [1 / (families.count(family) * len(set(families))) for family in families]

    def loss(z: FloatArray) -> float:
        kernel, pull = _kernel(z), 0.5 * np.sum(((z - _KERNEL_START) / _KERNEL_LOOSE) ** 2)
        losses = (weight * leave_one_out_loss(sample, kernel) for weight, sample in zip(weights, samples, strict=True))
        return float(sum(losses) + pull / (_POINTS * len(samples)))

    kernel = _kernel(minimize(loss, _KERNEL_START, method="L-BFGS-B", options={"maxiter": 40}).x)
    return Covariance(tuple(float(f"{x:.3g}") for x in kernel.lengths), *(float(f"{x:.3g}") for x in kernel[1:]))


def _kernel(z: FloatArray) -> Covariance:
    values = np.exp(z).tolist()
    return Covariance(tuple(values[: len(FEATURES) + 1]), *values[len(FEATURES) + 1 :])


def leave_one_out_loss(sample: Sample, kernel: Covariance) -> float:
    """Return the mean loss of a sample's products, each predicted from the others of its draw."""
    losses = []
    for draw in range(_DRAWS):
        part = slice(draw * _POINTS, (draw + 1) * _POINTS)
        learned = sample.learned[part]
        columns = {name: column[part] for name, column in sample.columns.items()}
        inverse = np.linalg.inv(covariance(columns, learned, kernel) + kernel.noise**2 * np.eye(len(learned)))
        variance = 1 / np.diag(inverse)
        scaled_error = (inverse @ sample.unexplained[part]) ** 2 * variance
        losses.append(np.mean(0.5 * np.log(variance) + (_DEGREES + 1) / 2 * np.log1p(scaled_error / _DEGREES)))
    return float(np.mean(losses))


def family_samples(rows: pd.DataFrame, left_out: Sequence[str], family: str) -> list[Sample]:
    """Return samples of one of the families left out of coefficients and trees."""
    residual, priors = without_families(rows, left_out)
    samples = []
    for build, rates in priors.items():
        if family_of(build[0]) != family:
            continue
        part = rows[(rows.device == build[0]) & (rows.software == build[1])]
        part = part.iloc[np.random.default_rng(0).permutation(len(part))[: _COEFFICIENT_POINTS + _DRAWS * _POINTS]]
        first, rest = part.iloc[:_COEFFICIENT_POINTS], part.iloc[_COEFFICIENT_POINTS:]
        points = *sizes_of(first), first.seconds.to_numpy()
        fitted = calibration.calibrate(*points, rates, residual=residual, kernel=_kernel(_KERNEL_START))
        columns = kernels.features(*sizes_of(rest), fitted)
        learned = residual.log_residual(columns)
        unexplained = np.log(rest.seconds.to_numpy() / kernels.roofline_s(*sizes_of(rest), fitted)) - learned
        samples.append(Sample(family, {name: columns[name] for name in FEATURES}, learned, unexplained))
    return samples


def nested_kernel(rows: pd.DataFrame, family: str) -> Covariance:
    """Return the kernel fitted on all families but this one, each with trees that saw neither."""
    others = [other for other in FAMILIES if other != family]
    return fit_kernel([sample for other in others for sample in family_samples(rows, (family, other), other)])


def report_correction(options: Namespace) -> str:
    """Return the kernel that is shipped: fitted on every family, with trees that had not seen it."""
    rows = read_rows(options.data)
    rows = rows[~rows.software.map(is_fp8)].reset_index(drop=True)
    return f"{fit_kernel([sample for family in FAMILIES for sample in family_samples(rows, (family,), family)])}\n"


_HOSTS = {"a100_pcie": "A100-PCIe-80GB", "b200_bf16_ceperm": "B200-SXM-180GB"}
_HOST_MEMORY_EFFICIENCY = 0.75
_STAGES = {"fwd": "forward", "bwd_grad_act": "dgrad", "bwd_grad_w": "wgrad"}


def report_grouped(options: Namespace) -> str:
    """Return [grouped_gemm] of coefficients.toml: what products of experts take over plain products of the same host.

    pass = experts * per_expert_s + ratio * max(F / (P e), bytes / (W e_m))        e: the host's plain products

    Measured on SimuMax's training passes (Transformer Engine, bf16).
    """
    table = read_passes(options.data / "operators" / "simumax" / "efficiency.csv")
    scores: dict[str, Any] = {}
    for stage, name in _STAGES.items():
        passes = table[table.stage == stage]
        expert_us, ratio = _solve(passes)
        scores[f"{name}: microseconds an expert, ratio"] = (round(float(expert_us), 2), round(float(ratio), 3))
        if options.score:
            scores[f"{name}: shapes left out"] = _excluded(passes)
    return score_lines("grouped_gemm", scores)


def read_passes(path: Path) -> pd.DataFrame:
    """Return grouped products: experts, rows of each, n, k, pass, seconds, and the roofline from the host's plain products."""
    table = pd.read_csv(path)
    plain = table[table.op == "matmul"].groupby("sys").eff.median()
    table = table[table.op == "group_matmul"].reset_index(drop=True)
    table["experts"], table["rows"], table["n"], table["k"] = key_values(table.key, ("ng", "M", "N", "K"))
    table["stage"] = table.key.str.extract(r"stage=(\w+)")[0]
    is_weights = table.stage == "bwd_grad_w"
    is_fp32 = table.key.str.contains("main_grad_dtype=fp32") & is_weights
    weight_bytes = np.where(is_weights, np.where(is_fp32, 8.0, 4.0), 2.0)
    flops = 2 * table.experts * table.rows * table.n * table.k
    moved_bytes = table.experts * (weight_bytes * table.n * table.k + 2 * table.rows * (table.n + table.k))
    table["seconds"] = flops / (table.eff * table.tflops * 1e12)
    peak, bandwidth = (table.sys.map({host: data_sheet(name)[i] for host, name in _HOSTS.items()}) for i in (0, 1))
    table["roofline"] = np.maximum(
        flops / (peak * table.sys.map(plain)), moved_bytes / (bandwidth * _HOST_MEMORY_EFFICIENCY)
    )
    return table.assign(experts_us=table.experts * 1e-6)


def _solve(table: pd.DataFrame) -> FloatArray:
    """Return microseconds an expert, and the ratio."""
    return least_relative_squares(table[["experts_us", "roofline"]].to_numpy(), table.seconds.to_numpy())


def _excluded(table: pd.DataFrame) -> float:
    """Return the mean absolute percentage error of shapes that were not fitted."""
    errors = []
    for _, shape in table.groupby(["experts", "rows", "n", "k"]):
        predicted = shape[["experts_us", "roofline"]].to_numpy() @ _solve(table.drop(shape.index))
        errors.append(percent_error(predicted, shape.seconds))
    return round(float(np.mean(errors)), 1)
