"""Fit the slow-downs of streams that run at once: [interference] and [overlap] of coefficients.toml, with held-out errors.

The table has one line per measurement: the sizes of a matrix product, an all-reduce and copies to and from the device that ran at
once (0: absent) and the milliseconds until the last ended. Lines with one stream give its isolated time. Half of the pairs of
a group shape and a product's size are held out (`is_held_out`); the fit minimises the log error over the others.
"""

from __future__ import annotations

import zlib
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import least_squares

from ..cost_models.hardware.collectives import Pair, pair_s
from ..cost_models.hardware.streams import STREAMS, together_s
from ..schema.catalogue import find_device
from ..schema.units import MB, FloatArray
from .estimator import percent_error

SIZES = ("gemm_n", "g2g_allreduce_MB", "c2g_MB", "g2c_MB")
"""Columns of the sizes, in the order of STREAMS."""

GROUP_SHAPE = ("source", "nodes", "intra_group", "inter_group")

NUM_STREAMS = len(STREAMS)
OFF_DIAGONAL = ~np.eye(NUM_STREAMS, dtype=bool)


class Overlaps(NamedTuple):
    """Measurements [n] of streams that ran at once.

    Attributes:
        fabric: what a collective runs over; shape: the machine and its group.
        isolated_s: of each stream [n, 4]; together_s: until the last ended.
        traffic: what an all-reduce sends from each device, over the bandwidth of its memory.
    """

    fabric: NDArray[np.str_]
    shape: NDArray[np.str_]
    isolated_s: FloatArray
    together_s: FloatArray
    traffic: FloatArray

    def take(self, rows: NDArray[np.bool_]) -> Overlaps:
        """Return the measurements of a mask."""
        return Overlaps(*(column[rows] for column in self))  # type: ignore[arg-type]


class Errors(NamedTuple):
    """Mean of |predicted / measured - 1| of the model, of the longest stream, and of the sum of streams."""

    rows: int
    model: float
    longest: float
    total: float


def read_overlaps(path: str | Path) -> Overlaps:
    """Return the measurements of at least two streams whose isolated times are in the table too."""
    table = pd.read_csv(path, dtype=dict.fromkeys(GROUP_SHAPE, str), keep_default_na=False)
    seconds, sizes = table.latency_ms.to_numpy(float) / 1e3, table[list(SIZES)].to_numpy(float)
    runs, shape = sizes > 0, table[list(GROUP_SHAPE)].agg("/".join, axis=1)
    isolated = np.zeros(sizes.shape)
    for stream in range(NUM_STREAMS):
        single = runs[:, stream] & (runs.sum(axis=1) == 1)
        median = pd.Series(seconds[single]).groupby([shape[single].to_numpy(), sizes[single, stream]]).median()
        isolated[:, stream] = median.reindex(pd.MultiIndex.from_arrays([shape, sizes[:, stream]])).to_numpy()
    isolated[~runs] = 0.0
    ranks = table.intra_group.astype(int) * table.inter_group.astype(int)
    sheets = {name: find_device(name)[1] for name in set(table.gpu_type)}
    bandwidth = table.gpu_type.map(
        {name: float(sheet["memory_bandwidth_bytes_per_s"]) for name, sheet in sheets.items()}
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        sent = 2 * (ranks - 1) / ranks * sizes[:, 1] * MB / isolated[:, 1]
    traffic = np.where(runs[:, 1], sent / bandwidth, 0.0)
    overlaps = Overlaps(_fabric(table), shape.to_numpy(str), isolated, seconds, traffic)
    return overlaps.take((runs.sum(axis=1) >= 2) & np.isfinite(isolated).all(axis=1))


def _fabric(table: pd.DataFrame) -> NDArray[np.str_]:
    device = table.gpu_type.str.split("-").str[0]
    spans_nodes, is_volta = table.inter_group.astype(int) > 1, device == "v100"
    return np.select(
        [spans_nodes & is_volta, spans_nodes, is_volta, device == "l4"],
        ["network-volta", "network", "nvlink-volta", "pcie"],
        "nvlink",
    )


def is_held_out(overlaps: Overlaps) -> NDArray[np.bool_]:
    """Return half of the pairs of a group shape and a product's time, with all that ran next to that product there."""
    keys = (
        f"{shape}/{product_s:.4f}" for shape, product_s in zip(overlaps.shape, overlaps.isolated_s[:, 0], strict=True)
    )
    return np.array([bool(zlib.crc32(key.encode()) % 2) for key in keys])


def fit_slowdowns(overlaps: Overlaps) -> FloatArray:
    """Return slow-downs [4, 4], none below 0, that minimise the robust log error."""

    def residuals(values: FloatArray) -> FloatArray:
        return np.asarray(np.log(together_s(overlaps.isolated_s, _matrix(values)) / overlaps.together_s))

    start = np.full(OFF_DIAGONAL.sum(), 0.3)
    return _matrix(least_squares(residuals, start, bounds=(0, 10), loss="soft_l1", f_scale=0.1, max_nfev=30).x)


def fit_pair(overlaps: Overlaps) -> FloatArray:
    """Return (channels, traffic, compute) of `collectives.slowdown_law` over all machines, by robust log error."""

    def residuals(law: FloatArray) -> FloatArray:
        return np.asarray(np.log(predict_pair(overlaps, law) / overlaps.together_s))

    return np.asarray(least_squares(residuals, (0.1, 3.0, 0.05), bounds=(0, 20), loss="soft_l1", f_scale=0.05).x)


def predict_pair(overlaps: Overlaps, law: Sequence[float] | FloatArray) -> FloatArray:
    """Return the seconds of products and all-reduces at once under a law of `fit_pair`."""
    pair = Pair(law[0] + law[1] * overlaps.traffic, law[2])
    return pair_s(overlaps.isolated_s[:, 0], overlaps.isolated_s[:, 1], pair)


def errors(overlaps: Overlaps, predicted_s: FloatArray) -> Errors:
    """Return how far predictions and the two naive answers are from the measurements."""
    answers = predicted_s, overlaps.isolated_s.max(axis=1), overlaps.isolated_s.sum(axis=1)
    return Errors(len(predicted_s), *(percent_error(seconds, overlaps.together_s) / 100 for seconds in answers))


def _matrix(values: FloatArray) -> FloatArray:
    matrix = np.zeros((NUM_STREAMS, NUM_STREAMS))
    matrix[OFF_DIAGONAL] = values
    return matrix


def report(options: Namespace) -> str:
    """Return the sections [interference] and [overlap] and, as comments, held-out errors."""
    overlaps, lines = read_overlaps(options.table), ["[interference]"]
    for fabric in sorted(set(overlaps.fabric)):
        rows = overlaps.take(overlaps.fabric == fabric)
        held_out = rows.take(is_held_out(rows))
        slowdown = fit_slowdowns(rows.take(~is_held_out(rows)))
        lines.append(f"{fabric} = {[[round(float(value), 3) for value in line] for line in slowdown]}")
        lines.append(_held_out_line(errors(held_out, together_s(held_out.isolated_s, slowdown))))
    pairs = overlaps.take((overlaps.isolated_s[:, 2:] == 0).all(axis=1))
    law, held_out = fit_pair(pairs.take(~is_held_out(pairs))), pairs.take(is_held_out(pairs))
    names = zip(("channels", "traffic", "compute"), law, strict=True)
    lines += ["[overlap]", *(f"{name} = {value:.3f}" for name, value in names)]
    lines.append(_held_out_line(errors(held_out, predict_pair(held_out, law))))
    return "\n".join(lines) + "\n"


def _held_out_line(error: Errors) -> str:
    return "# held out: {} rows, error {:.1%} (longest stream {:.1%}, sum {:.1%})".format(*error)
