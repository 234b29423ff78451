"""Fit attention.npz: the terms of each kernel by non-negative least squares on relative errors, then the pooled residual.

Forward passes come from measured tables (one family of devices each); backward passes from SimuMax's tables and from the
FlashAttention-3 paper, as ratios to the forward pass of the same host.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.optimize import nnls
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

from ..cost_models.learned.kernels import (
    PROCESSORS,
    TERMS,
    AttentionDevice,
    AttentionShape,
    residual_features,
    term_columns,
)
from ..schema.units import FloatArray
from .estimator import (
    RooflineRegressor,
    fit_residual,
    key_values,
    least_relative_squares,
    percent_error,
    write_artefact,
)
from .gemm import SYSTEMS, data_sheet, family_of

PUBLISHED_SEQUENCES = (512, 1024, 2048, 4096, 8192, 16384)
PUBLISHED_TFLOPS: dict[tuple[str, str, int, bool], tuple[float, ...]] = {
    ("hopper_fa2", "forward", 64, False): (282, 306, 318, 321, 322, 324),
    ("hopper_fa2", "forward", 128, False): (309, 350, 362, 368, 370, 370),
    ("hopper_fa2", "forward", 128, True): (191, 260, 298, 319, 333, 335),
    ("hopper_fa2", "backward", 64, False): (198, 238, 264, 279, 287, 291),
    ("hopper_fa2", "backward", 128, False): (214, 260, 291, 310, 318, 322),
    ("hopper", "forward", 64, False): (333, 392, 460, 476, 496, 497),
    ("hopper", "forward", 128, False): (467, 565, 625, 638, 646, 648),
    ("hopper", "backward", 64, False): (272, 363, 422, 453, 472, 474),
    ("hopper", "backward", 128, False): (316, 424, 501, 542, 559, 561),
}
"""(kernel, pass, head width, causal) -> TFLOP/s on H100 SXM at 16k tokens and 2048 / width heads.

Source: arXiv:2407.08608, figures 5 and 6.
"""

SOURCES = (
    "attention_prefill.parquet (ai-dynamo/aiconfigurator 095f58a, Apache-2.0), SimuMax (Apache-2.0), arXiv:2407.08608"
)
BACKWARD_PRIOR = np.array([1.2, 1.0, 2.0])
"""Products: 0.8 of the forward efficiency (FlashAttention-2 paper); tail: as forward; traffic: dq adds up in fp32."""
MIN_SEQ_LEN, MAX_WIDTH = 128, 256


def report(options: Namespace) -> str:
    """Write terms of every kernel and the residual over all forward tables, with scores where requested."""
    table = read_forward(options.data / "operators" / "attention_prefill.parquet")
    forward = {family: fit_terms(part) for family, part in table.groupby("family")}
    forward["hopper_fa2"] = least_relative_squares(*_published("hopper_fa2", "forward"), forward["ada"], weight=0.02)
    forward["other"] = np.median([forward[name] for name in ("ampere", "ada", "hopper", "blackwell")], axis=0)
    ratios = _backward_ratios(options.data / "operators" / "simumax" / "efficiency.csv", forward)
    kernels = {
        name: {"forward": terms.tolist(), "backward": (terms * ratios[name]).tolist()}
        for name, terms in forward.items()
    }
    sample = table.sample(min(len(table), 40_000), random_state=0)
    provenance = {"rows": len(table), "sources": SOURCES, "terms": TERMS, "kernels": kernels}
    model = _fit_residual(sample, forward).to_model(list(_features(table.head(1), forward)[0]), provenance)
    return write_artefact(model, options.out, "attention", _scores(table) if options.score else {})


def read_forward(path: Path) -> pd.DataFrame:
    """Return fused bf16 prefill kernels of the table with family, seconds and device; no fallback or decode kernels."""
    table = pd.read_parquet(path)
    fused = ~table.kernel_source.str.contains("triton|decode") & (table.kv_cache_dtype == "bfloat16")
    table = table[fused & (table.isl >= MIN_SEQ_LEN) & (table.head_dim <= MAX_WIDTH)]
    table = table.assign(
        family=table.system.map({system: family_of(device) for system, device in SYSTEMS.items()}),
        seconds=table.latency.astype(float) * 1e-3,
    )
    return table.reset_index(drop=True)


def shape_of(table: pd.DataFrame) -> AttentionShape:
    """Return the causal calls of a table."""
    seq_len = table.isl.to_numpy(dtype=float)
    return AttentionShape(
        rows=(table.batch_size * table.num_heads).to_numpy(dtype=float),
        group=(table.num_heads / table.num_key_value_heads).to_numpy(dtype=float),
        seq_len=seq_len,
        context=(seq_len + 1) / 2,
        longest=seq_len,
        width=table.head_dim.to_numpy(dtype=float),
        element_bytes=np.full(len(table), 2.0),
    )


def device_of(table: pd.DataFrame) -> AttentionDevice:
    """Return the data sheets of a table's devices."""
    sheets = {system: data_sheet(device) for system, device in SYSTEMS.items()}
    peaks = np.array([sheets[name] for name in table.system])
    return AttentionDevice(peaks[:, 0], peaks[:, 1], table.family.map(PROCESSORS).to_numpy(dtype=float))


def fit_terms(table: pd.DataFrame, prior: FloatArray | None = None) -> FloatArray:
    """Return the coefficients [5] of a table's forward kernels."""
    columns = term_columns(shape_of(table), device_of(table), backward=False)
    return least_relative_squares(columns, table.seconds.to_numpy(), prior)


class Passes(NamedTuple):
    """Passes of one kernel: columns of the terms [n, 5] and seconds [n]."""

    columns: FloatArray
    seconds: FloatArray


def _published(name: str, direction: str, *, causal: bool | None = None) -> Passes:
    """Return the published rows of a kernel and pass."""
    columns, seconds = [], []
    h100 = AttentionDevice(*data_sheet("H100-SXM-80GB"), PROCESSORS["hopper"])
    for (kernel, which, width, masked), tflops in PUBLISHED_TFLOPS.items():
        if (kernel, which) != (name, direction) or causal not in (None, masked):
            continue
        n = np.array(PUBLISHED_SEQUENCES, dtype=float)
        rows, context = 16384 / n * (2048 / width), (n / 2 if masked else n)
        ones = np.ones_like(n)
        shape = AttentionShape(rows, ones, n, context, n, width * ones, 2 * ones)
        flops = 4 * rows * n * context * width * (2.5 if direction == "backward" else 1.0)
        columns.append(term_columns(shape, h100, backward=direction == "backward"))
        seconds.append(flops / (np.array(tflops) * 1e12))
    return Passes(np.concatenate(columns), np.concatenate(seconds))


def _backward_ratios(path: Path, forward: dict[str, FloatArray]) -> dict[str, FloatArray]:
    """Return how much larger each term is in the backward pass, FLOPs being counted 2.5 times [kernel -> 5]."""
    table = pd.read_csv(path)
    measured = {family: (_simumax(table, family, "sdp_fwd"), _simumax(table, family, "sdp_bwd")) for family in _SIMUMAX}
    for name in ("hopper", "hopper_fa2"):
        measured[name] = _published(name, "forward", causal=False), _published(name, "backward", causal=False)
    ratios = {name: _ratio(forward[name], *passes) for name, passes in measured.items()}
    typical = np.median(list(ratios.values()), axis=0)
    return {name: ratios.get(name, typical) for name in forward}


def _ratio(terms: FloatArray, forward: Passes, backward: Passes) -> FloatArray:
    """Return ratios of the products (with the softmax), the tail and the traffic that explain the backward times of one host.

    The host's speed is what its forward passes say, so that a slow one does not pass for a slow backward kernel. The ratios
    are drawn towards BACKWARD_PRIOR, because runs of one number of tokens hardly tell the tail from the products.
    """
    host = np.median(forward.seconds / (forward.columns @ terms))
    term_s, seconds = backward.columns * terms, backward.seconds / host
    columns = np.stack([backward.columns[:, 1:3] @ terms[1:3], term_s[:, 3], term_s[:, 4]], axis=1)
    remaining_s = np.maximum(seconds - term_s[:, 0], 0.2 * seconds)
    rows = np.vstack([columns / remaining_s[:, None], np.diag(0.2 / BACKWARD_PRIOR)])
    product, tail, traffic = nnls(rows, np.concatenate([np.ones(len(seconds)), np.full(3, 0.2)]))[0]
    return np.array([1.0, product, product, tail, traffic])


_SIMUMAX = {"ampere": ("a100_pcie", "A100-SXM-80GB"), "blackwell": ("b200", "B200-SXM-180GB")}
"""Family -> start of a system's name in SimuMax's table, data sheet."""


def _simumax(table: pd.DataFrame, family: str, op: str) -> Passes:
    """Return the passes of SimuMax's table, whose FLOPs count no mask."""
    system, sheet = _SIMUMAX[family]
    rows = table[table.sys.str.startswith(system) & (table.op == op)]
    names = ("batch", "seq_len", "head_num", "kv_head_num", "qk_head_dim", "v_head_dim")
    batch, n, num_heads, num_kv_heads, qk_dim, v_dim = key_values(rows.key, names)
    heads, width, is_backward = batch * num_heads, (qk_dim + v_dim) / 2, op == "sdp_bwd"
    shape = AttentionShape(heads, num_heads / num_kv_heads, n, (n + 1) / 2, n, width, np.full(len(n), 2.0))
    device = AttentionDevice(*data_sheet(sheet), PROCESSORS[family])
    flops = 4 * heads * n * n * width * (2.5 if is_backward else 1.0)
    seconds = flops / (rows.eff.to_numpy() * rows.tflops.to_numpy() * 1e12)
    return Passes(term_columns(shape, device, backward=is_backward), seconds)


def _features(table: pd.DataFrame, forward: dict[str, FloatArray]) -> tuple[dict[str, FloatArray], FloatArray]:
    """Return named features [n] and rooflines [n]."""
    shape, device = shape_of(table), device_of(table)
    terms = np.stack([forward[name] for name in table.family])
    columns = term_columns(shape, device, backward=False)
    return residual_features(shape, device, columns, terms), (columns * terms).sum(axis=1)


def _fit_residual(table: pd.DataFrame, forward: dict[str, FloatArray]) -> RooflineRegressor:
    features, roofline = _features(table, forward)
    x = np.stack(list(features.values()), axis=1)
    return fit_residual(x, roofline, table.seconds.to_numpy(), max_iter=300, max_leaf_nodes=24)


def _predict(regressor: RooflineRegressor, table: pd.DataFrame, forward: dict[str, FloatArray]) -> FloatArray:
    features, roofline = _features(table, forward)
    return regressor.predict(np.column_stack([roofline, *features.values()]))


def _scores(table: pd.DataFrame) -> dict[str, Any]:
    """Return mean absolute percentage errors on rows, on the largest sizes and on device families that were left out."""
    work = table.isl.astype(float) ** 2 * table.batch_size * table.num_heads * table.head_dim
    largest = work > work.groupby(table.system).transform(lambda part: part.quantile(0.8))
    random = np.random.default_rng(0).random(len(table)) < 0.2
    parts = {"a random fifth of the rows": random, "the largest fifth of the sizes": largest.to_numpy()}
    scores = {}
    for name, left_out in parts.items():
        train, rest = table[~left_out], table[left_out]
        forward = {family: fit_terms(part) for family, part in train.groupby("family")}
        regressor = _fit_residual(train.sample(min(len(train), 30_000), random_state=0), forward)
        scores[name] = round(percent_error(_predict(regressor, rest, forward), rest.seconds), 2)
    for family in sorted(set(table.family)):
        for points in (0, 10, 100):
            scores[f"{family} left out, {points} points"] = _family_score(table, family, points)
    return scores


def _family_score(table: pd.DataFrame, family: str, points: int) -> float:
    """Return the error on a family whose kernels were fitted on ``points`` rows of it, drawn towards the median of the others."""
    others, members = table[table.family != family], table[table.family == family]
    known = {name: fit_terms(part) for name, part in others.groupby("family")}
    median = np.median(list(known.values()), axis=0)
    regressor = _fit_residual(others.sample(20_000, random_state=0), known)
    errors = []
    for seed in range(3 if points else 1):
        seen = members.sample(points, random_state=seed) if points else members.head(0)
        terms = {family: fit_terms(seen, median) if points else median}
        rest = members.drop(seen.index)
        predicted = _predict(regressor, rest, terms)
        if points >= 50:
            predicted = predicted * np.exp(_local_residual(seen, _predict(regressor, seen, terms), rest))
        errors.append(percent_error(predicted, rest.seconds))
    return round(float(np.mean(errors)), 2)


def _local_residual(seen: pd.DataFrame, predicted: FloatArray, rest: pd.DataFrame) -> FloatArray:
    """Return a smooth correction in the logarithms of the sizes, from the few rows of the new device."""

    def logs(part: pd.DataFrame) -> FloatArray:
        shape = shape_of(part)
        return np.log2(np.column_stack([shape.seq_len, shape.rows, shape.width**2, shape.group**0.5]))

    smooth = ConstantKernel(0.02, "fixed") * RBF([3.0, 3.0, 2.0, 2.0], "fixed") + WhiteKernel(0.003, "fixed")
    process = GaussianProcessRegressor(smooth).fit(logs(seen), np.log(seen.seconds.to_numpy() / predicted))
    return np.asarray(process.predict(logs(rest)))
