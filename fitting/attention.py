"""Fits attention.npz: the terms of each kernel by non-negative least squares on relative errors, then the pooled residual.

Forward passes come from measured tables (one family of devices each); backward passes from SimuMax's tables and from the
FlashAttention-3 paper, as ratios to the forward pass of the same host. Needs scikit-learn, pandas and pyarrow.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import nnls
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

from ..cost_models.learned.attention import (
    PROCESSORS,
    TERMS,
    AttentionDevice,
    AttentionShape,
    residual_features,
    term_columns,
)
from ..schema.arrays import FloatArray
from .estimator import RooflineRegressor
from .operators import FittedModels

FAMILIES = {
    "a100_sxm": "ampere", "l40s": "ada", "h100_sxm": "hopper", "h200_sxm": "hopper", "b200_sxm": "blackwell", "gb200": "blackwell",
}  # fmt: skip
PEAKS = {
    "a100_sxm": (312e12, 2.039e12), "l40s": (362e12, 0.864e12), "h100_sxm": (989.5e12, 3.35e12), "h200_sxm": (989.5e12, 4.8e12),
    "b200_sxm": (2250e12, 7.672e12), "gb200": (2450e12, 8.0e12),
}  # fmt: skip
"""bf16 FLOP/s and bytes/s of the data sheets (schema/catalogue/devices.toml)."""

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


def fit(folder: Path, *, score: bool) -> FittedModels:
    """Terms of every kernel and the residual over all forward tables."""
    table = read_forward(folder / "operators" / "attention_prefill.parquet")
    forward = {family: fit_terms(part) for family, part in table.groupby("family")}
    forward["hopper_fa2"] = _published_forward("hopper_fa2", forward["ada"])
    forward["other"] = np.median([forward[name] for name in ("ampere", "ada", "hopper", "blackwell")], axis=0)
    slower = _backward_ratios(folder / "operators" / "simumax" / "efficiency.csv", forward)
    kernels = {
        name: {"forward": terms.tolist(), "backward": (terms * slower[name]).tolist()}
        for name, terms in forward.items()
    }
    sample = table.sample(min(len(table), 40_000), random_state=0)
    model = _fit_residual(sample, forward).to_model(
        _feature_names(sample, forward), {"rows": len(table), "sources": SOURCES, "terms": TERMS, "kernels": kernels}
    )
    return FittedModels({"attention": model}, _scores(table) if score else {})


def read_forward(path: Path) -> pd.DataFrame:
    """Fused bf16 prefill kernels of the table with their family, seconds and device; no fallback or decode kernels."""
    table = pd.read_parquet(path)
    fused = ~table.kernel_source.str.contains("triton|decode") & (table.kv_cache_dtype == "bfloat16")
    table = table[fused & (table.isl >= MIN_SEQ_LEN) & (table.head_dim <= MAX_WIDTH)]
    table = table.assign(family=table.system.map(FAMILIES), seconds=table.latency.astype(float) * 1e-3)
    return table.reset_index(drop=True)


def shape_of(table: pd.DataFrame) -> AttentionShape:
    """Causal calls of a table."""
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


def silicon_of(table: pd.DataFrame) -> AttentionDevice:
    """Data sheets of a table's devices."""
    peaks = np.array([PEAKS[name] for name in table.system])
    return AttentionDevice(peaks[:, 0], peaks[:, 1], table.family.map(PROCESSORS).to_numpy(dtype=float))


def least_relative_squares(
    columns: FloatArray, seconds: FloatArray, prior: FloatArray | None = None, weight: float = 0.05
) -> FloatArray:
    """Non-negative coefficients of least squared relative error, drawn towards a prior by ``weight`` rows each."""
    rows, target = columns / seconds[:, None], np.ones(len(seconds))
    if prior is not None:
        pull = np.sqrt(weight) / np.maximum(prior, [5e-7, 0.05, 0.05, 0.05, 0.05])
        rows, target = np.vstack([rows, np.diag(pull)]), np.concatenate([target, pull * prior])
    return np.asarray(nnls(rows, target)[0])


def fit_terms(table: pd.DataFrame, prior: FloatArray | None = None) -> FloatArray:
    """The five terms [5] of a table's forward kernels."""
    columns = term_columns(shape_of(table), silicon_of(table), backward=False)
    return least_relative_squares(columns, table.seconds.to_numpy(), prior)


def _published(name: str, direction: str, *, causal: bool | None = None) -> tuple[FloatArray, FloatArray]:
    """Columns [n, 5] and seconds [n] of the published rows of a kernel and pass."""
    columns, seconds = [], []
    h100 = AttentionDevice(*PEAKS["h100_sxm"], PROCESSORS["hopper"])
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
    return np.concatenate(columns), np.concatenate(seconds)


def _published_forward(name: str, prior: FloatArray) -> FloatArray:
    columns, seconds = _published(name, "forward")
    return least_relative_squares(columns, seconds, prior, weight=0.02)


def _backward_ratios(path: Path, forward: dict[str, FloatArray]) -> dict[str, FloatArray]:
    """How much larger each term is in the backward pass, FLOPs being counted 2.5 times [kernel -> 5]."""
    measured = {"ampere": _simumax(path, "a100_pcie", "ampere"), "blackwell": _simumax(path, "b200", "blackwell")}
    for name in ("hopper", "hopper_fa2"):
        ahead, behind = (_published(name, direction, causal=False) for direction in ("forward", "backward"))
        measured[name] = (*ahead, *behind)
    ratios = {name: _ratio(forward[name], *rows) for name, rows in measured.items()}
    typical = np.median(list(ratios.values()), axis=0)
    return {name: ratios.get(name, typical) for name in forward}


def _ratio(
    terms: FloatArray, ahead: FloatArray, ahead_s: FloatArray, behind: FloatArray, behind_s: FloatArray
) -> FloatArray:
    """Ratios of the products (with the softmax), the tail and the traffic that explain the backward times of one host.

    The host's own speed is what its forward passes say, so that a slow one does not pass for a slow backward kernel. The ratios
    are drawn towards BACKWARD_PRIOR, because runs of one number of tokens hardly tell the tail from the products.
    """
    host = np.median(ahead_s / (ahead @ terms))
    parts = np.stack([behind[:, 1:3] @ terms[1:3], behind[:, 3] * terms[3], behind[:, 4] * terms[4]], axis=1)
    left = np.maximum(behind_s / host - behind[:, 0] * terms[0], 0.2 * behind_s / host)
    rows = np.vstack([parts / left[:, None], np.diag(0.2 / BACKWARD_PRIOR)])
    ratios = nnls(rows, np.concatenate([np.ones(len(left)), np.full(3, 0.2)]))[0]
    return np.array([1.0, ratios[0], ratios[0], ratios[1], ratios[2]])


def _simumax(path: Path, system: str, family: str) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Forward columns and seconds, backward columns and seconds of SimuMax's table (its FLOPs count no mask)."""
    table = pd.read_csv(path)
    table = table[table.sys.str.startswith(system)]
    parts: list[FloatArray] = []
    for op, backward in (("sdp_fwd", False), ("sdp_bwd", True)):
        rows = table[table.op == op]
        value = {key: rows.key.str.extract(rf"(?:^|\W){key}=(\d+)")[0].to_numpy(dtype=float) for key in _SIMUMAX_KEYS}
        n, width = value["seq_len"], (value["qk_head_dim"] + value["v_head_dim"]) / 2
        heads = value["batch"] * value["head_num"]
        group = value["head_num"] / value["kv_head_num"]
        shape = AttentionShape(heads, group, n, (n + 1) / 2, n, width, np.full(len(n), 2.0))
        peak, bandwidth = PEAKS["a100_sxm" if family == "ampere" else "b200_sxm"]
        flops = 4 * heads * n * n * width * (2.5 if backward else 1.0)
        parts += [
            term_columns(shape, AttentionDevice(peak, bandwidth, PROCESSORS[family]), backward=backward),
            flops / (rows.eff.to_numpy() * rows.tflops.to_numpy() * 1e12),
        ]
    return parts[0], parts[1], parts[2], parts[3]


_SIMUMAX_KEYS = ("batch", "seq_len", "head_num", "kv_head_num", "qk_head_dim", "v_head_dim")


def _matrix(table: pd.DataFrame, forward: dict[str, FloatArray]) -> tuple[list[str], FloatArray, FloatArray]:
    """Feature names, features [n, d] and rooflines [n]."""
    shape, silicon = shape_of(table), silicon_of(table)
    terms = np.stack([forward[name] for name in table.family])
    columns = term_columns(shape, silicon, backward=False)
    features = residual_features(shape, silicon, columns, terms)
    return list(features), np.stack(list(features.values()), axis=1), (columns * terms).sum(axis=1)


def _feature_names(table: pd.DataFrame, forward: dict[str, FloatArray]) -> list[str]:
    return _matrix(table.head(1), forward)[0]


def _fit_residual(table: pd.DataFrame, forward: dict[str, FloatArray]) -> RooflineRegressor:
    _, features, roofline = _matrix(table, forward)
    trees = HistGradientBoostingRegressor(max_iter=300, max_leaf_nodes=24, min_samples_leaf=40, random_state=0)
    regressor = RooflineRegressor(roofline_column=0, residual=trees)
    return regressor.fit(np.column_stack([roofline, features]), table.seconds.to_numpy())


def _predict(regressor: RooflineRegressor, table: pd.DataFrame, forward: dict[str, FloatArray]) -> FloatArray:
    _, features, roofline = _matrix(table, forward)
    return np.asarray(regressor.predict(np.column_stack([roofline, features])))


def _scores(table: pd.DataFrame) -> dict[str, Any]:
    """Mean absolute percentage errors on rows, on the largest sizes and on device families that were left out."""
    work = table.isl.astype(float) ** 2 * table.batch_size * table.num_heads * table.head_dim
    largest = work > work.groupby(table.system).transform(lambda part: part.quantile(0.8))
    random = np.random.default_rng(0).random(len(table)) < 0.2
    scores = {}
    for name, left_out in (
        ("a random fifth of the rows", random),
        ("the largest fifth of the sizes", largest.to_numpy()),
    ):
        kept = table[~left_out]
        forward = {family: fit_terms(part) for family, part in kept.groupby("family")}
        regressor = _fit_residual(kept.sample(min(len(kept), 30_000), random_state=0), forward)
        scores[name] = _percent(_predict(regressor, table[left_out], forward), table[left_out])
    for family in sorted(set(table.family)):
        for points in (0, 10, 100):
            scores[f"{family} left out, {points} points"] = _family_score(table, family, points)
    return scores


def _family_score(table: pd.DataFrame, family: str, points: int) -> float:
    """Error on a family whose kernels were fitted on ``points`` rows of it, drawn towards the median of the others."""
    others, own = table[table.family != family], table[table.family == family]
    known = {name: fit_terms(part) for name, part in others.groupby("family")}
    median = np.median(list(known.values()), axis=0)
    regressor = _fit_residual(others.sample(20_000, random_state=0), known)
    errors = []
    for seed in range(3 if points else 1):
        seen = own.sample(points, random_state=seed) if points else own.head(0)
        terms = {family: fit_terms(seen, median) if points else median}
        rest = own.drop(seen.index)
        predicted = _predict(regressor, rest, terms)
        if points >= 50:
            predicted = predicted * np.exp(_local_residual(seen, _predict(regressor, seen, terms), rest))
        errors.append(_percent(predicted, rest))
    return round(float(np.mean(errors)), 2)


def _local_residual(seen: pd.DataFrame, predicted: FloatArray, rest: pd.DataFrame) -> FloatArray:
    """A smooth correction in the logarithms of the sizes, from the few rows of the new device."""

    def logs(part: pd.DataFrame) -> FloatArray:
        heads = part.batch_size * part.num_heads
        group = part.num_heads / part.num_key_value_heads
        sizes = np.column_stack([part.isl, heads, part.head_dim**2, group**0.5])
        return np.asarray(np.log2(sizes.astype(float)))

    smooth = ConstantKernel(0.02, "fixed") * RBF([3.0, 3.0, 2.0, 2.0], "fixed") + WhiteKernel(0.003, "fixed")
    process = GaussianProcessRegressor(smooth).fit(logs(seen), np.log(seen.seconds.to_numpy() / predicted))
    return np.asarray(process.predict(logs(rest)))


def _percent(predicted: FloatArray, table: pd.DataFrame) -> float:
    return round(float(100 * np.mean(np.abs(predicted / table.seconds.to_numpy() - 1))), 2)
