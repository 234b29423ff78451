"""Fit the law of streams that run at once ([overlap] of coefficients.toml), and judge it on hosts left out.

The table has one line per measurement: the sizes of a matrix product, an all-reduce and copies to and from the device that ran at
once (0: absent) and the milliseconds until the last ended. Lines with one stream give its isolated time. Half of the pairs of
a group shape and a product's size are held out (`is_held_out`); the fit minimises the log error over the others: first of a product
and an all-reduce (`collectives.slowdown_law`), then of all sets of streams (`streams.interference`), hosts weighing alike.

Of a host nothing is fitted but told: whether copies wait for kernels there, by what they add to products that they run beside.
"""

from __future__ import annotations

import zlib
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import least_squares

from ..cost_models.coefficients import packaged_coefficients
from ..cost_models.hardware.collectives import Pair, pair_s
from ..cost_models.hardware.streams import STREAMS, interference, together_s
from ..schema.catalogue import find_device
from ..schema.units import MB, BoolArray, FloatArray
from .estimator import percent_error

SIZES = ("gemm_n", "g2g_allreduce_MB", "c2g_MB", "g2c_MB")
"""Columns of the sizes, in the order of STREAMS."""

GROUP_SHAPE = ("source", "nodes", "intra_group", "inter_group")

PAIR_LAW, COPY_LAW = ("channels", "traffic", "compute"), ("through_host", "both_ways")

WITHOUT_LINKS = ("l4",)
"""Devices of the table whose collectives within a node pass through the host."""


class Overlaps(NamedTuple):
    """Measurements [n] of streams that ran at once.

    Attributes:
        host: the machine; gpu: its devices; shape: the machine and its group.
        isolated_s: of each stream [n, 4]; together_s: until the last ended.
        traffic: what each stream sends or copies, over the bandwidth of the device's memory [n, 4].
        through_host: the all-reduce crosses the host, as between nodes.
    """

    host: NDArray[np.str_]
    gpu: NDArray[np.str_]
    shape: NDArray[np.str_]
    isolated_s: FloatArray
    together_s: FloatArray
    traffic: FloatArray
    through_host: BoolArray

    def take(self, rows: BoolArray) -> Overlaps:
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
    for stream in range(len(STREAMS)):
        single = runs[:, stream] & (runs.sum(axis=1) == 1)
        median = pd.Series(seconds[single]).groupby([shape[single].to_numpy(), sizes[single, stream]]).median()
        isolated[:, stream] = median.reindex(pd.MultiIndex.from_arrays([shape, sizes[:, stream]])).to_numpy()
    isolated[~runs] = 0.0
    ranks = table.intra_group.astype(int) * table.inter_group.astype(int)
    sheets = {name: find_device(name)[1] for name in set(table.gpu_type)}
    bandwidth = table.gpu_type.map(
        {name: float(sheet["memory_bandwidth_bytes_per_s"]) for name, sheet in sheets.items()}
    )
    # Bytes of each size: of a product none count, of an all-reduce those that a ring sends.
    sent = np.stack([np.zeros(len(table)), 2 * (ranks - 1) / ranks, np.ones(len(table)), np.ones(len(table))], axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        traffic = sent * sizes * MB / isolated / bandwidth.to_numpy()[:, None]
    spans_nodes = table.inter_group.astype(int) > 1
    overlaps = Overlaps(
        host=table.source.str.replace(r"-intra\d+-inter\d+", "", regex=True).to_numpy(str),
        gpu=table.gpu_type.to_numpy(str),
        shape=shape.to_numpy(str),
        isolated_s=isolated,
        together_s=seconds,
        traffic=np.where(runs, traffic, 0.0),
        through_host=(spans_nodes | table.gpu_type.str.split("-").str[0].isin(WITHOUT_LINKS)).to_numpy(),
    )
    return overlaps.take((runs.sum(axis=1) >= 2) & np.isfinite(isolated).all(axis=1))


def is_held_out(overlaps: Overlaps) -> BoolArray:
    """Return half of the pairs of a group shape and a product's time, with all that ran next to that product there."""
    keys = (
        f"{shape}/{product_s:.4f}" for shape, product_s in zip(overlaps.shape, overlaps.isolated_s[:, 0], strict=True)
    )
    return np.array([bool(zlib.crc32(key.encode()) % 2) for key in keys])


def copies_wait(overlaps: Overlaps) -> BoolArray:
    """Return whether copies run by themselves on the host of each measurement: beside a product they add most of what they take."""
    product, others = overlaps.isolated_s[:, 0], overlaps.isolated_s[:, 1:]
    is_copy = (product > 0) & (others[:, 0] == 0) & ((others > 0).sum(axis=1) == 1)
    pair = np.stack([product, others.sum(axis=1)])[:, is_copy]
    added = (overlaps.together_s[is_copy] - pair.max(axis=0)) / pair.min(axis=0)
    waits = pd.Series(added).groupby(overlaps.host[is_copy]).median() > 0.5
    return np.asarray(pd.Series(overlaps.host).map(waits).fillna(value=False), dtype=bool)


def fit_pair(overlaps: Overlaps) -> FloatArray:
    """Return (channels, traffic, compute) of `collectives.slowdown_law` over all machines, by robust log error."""

    def residuals(law: FloatArray) -> FloatArray:
        return np.asarray(np.log(predict_pair(overlaps, law) / overlaps.together_s))

    return np.asarray(least_squares(residuals, (0.1, 3.0, 0.05), bounds=(0, 20), loss="soft_l1", f_scale=0.05).x)


def predict_pair(overlaps: Overlaps, law: Sequence[float] | FloatArray) -> FloatArray:
    """Return the seconds of products and all-reduces at once under a law of `fit_pair`."""
    pair = Pair(law[0] + law[1] * overlaps.traffic[:, 1], law[2])
    return pair_s(overlaps.isolated_s[:, 0], overlaps.isolated_s[:, 1], pair)


def fit_law(overlaps: Overlaps) -> dict[str, float]:
    """Return the law of all four streams, that of products and all-reduces first."""
    pair = dict(zip(PAIR_LAW, fit_pair(overlaps.take(is_pair(overlaps))), strict=True))
    weight = 1 / np.sqrt(pd.Series(overlaps.host).groupby(overlaps.host).transform("size").to_numpy())

    def residuals(law: FloatArray) -> FloatArray:
        predicted_s = predict(overlaps, pair | dict(zip(COPY_LAW, law, strict=True)))
        return np.asarray(weight / weight.mean() * np.log(predicted_s / overlaps.together_s))

    copies = least_squares(residuals, (0.7, 0.4), bounds=(0, 2), loss="soft_l1", f_scale=0.1).x
    return pair | dict(zip(COPY_LAW, copies, strict=True))


def is_pair(overlaps: Overlaps) -> BoolArray:
    """Return which measurements are of a product and an all-reduce."""
    return np.asarray((overlaps.isolated_s[:, 2:] == 0).all(axis=1))


def predict(overlaps: Overlaps, law: Mapping[str, float]) -> FloatArray:
    """Return the seconds of streams at once under a law of `fit_law`."""
    coefficients = packaged_coefficients().replaced({f"overlap.{name}": value for name, value in law.items()})
    waits = copies_wait(overlaps)
    slowdown = interference(coefficients, overlaps.traffic, through_host=overlaps.through_host, copies_wait=waits)
    return together_s(overlaps.isolated_s, slowdown)


def errors(overlaps: Overlaps, predicted_s: FloatArray) -> Errors:
    """Return how far predictions and the two naive answers are from the measurements."""
    answers = predicted_s, overlaps.isolated_s.max(axis=1), overlaps.isolated_s.sum(axis=1)
    return Errors(len(predicted_s), *(percent_error(seconds, overlaps.together_s) / 100 for seconds in answers))


def report(options: Namespace) -> str:
    """Return the law as lines of [overlap] and, as comments, errors on held-out rows and on hosts left out."""
    overlaps = read_overlaps(options.table)
    fitted, held_out = overlaps.take(~is_held_out(overlaps)), overlaps.take(is_held_out(overlaps))
    law = fit_law(fitted)
    lines = ["[overlap]", *(f"{name} = {value:.3f}" for name, value in law.items())]
    pairs = held_out.take(is_pair(held_out))
    lines.append(_line("held out, a product and an all-reduce", errors(pairs, predict(pairs, law))))
    lines.append(_line("held out, all streams", errors(held_out, predict(held_out, law))))
    if len(set(overlaps.gpu)) > 1:
        lines.append(_line("a product and an all-reduce, fitted without the GPU", errors(*without_gpu(overlaps))))
    for host in sorted(set(overlaps.host)):
        members = overlaps.take(overlaps.host == host)
        of_others = fit_law(fitted.take(fitted.host != host))
        waits = ", copies wait" if copies_wait(members).any() else ""
        name = host.rpartition("/")[2].partition(".json")[0]
        lines.append(_line(f"fitted without {name}{waits}", errors(members, predict(members, of_others))))
    return "\n".join(lines) + "\n"


def without_gpu(overlaps: Overlaps) -> tuple[Overlaps, FloatArray]:
    """Return the pairs of products and all-reduces, and the seconds of each under the law of all other GPUs' pairs."""
    pairs = overlaps.take(is_pair(overlaps))
    predicted = np.zeros(len(pairs.together_s))
    for gpu in sorted(set(pairs.gpu)):
        rows = pairs.gpu == gpu
        predicted[rows] = predict_pair(pairs.take(rows), fit_pair(pairs.take(~rows)))
    return pairs, predicted


def _line(name: str, error: Errors) -> str:
    return "# {}: {} rows, error {:.1%} (longest stream {:.1%}, sum {:.1%})".format(name, *error)
