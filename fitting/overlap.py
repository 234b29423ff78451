"""Fit the slow-downs of overlap.py: `python -m meshwright.fitting.overlap TABLE.csv` writes coefficients and errors.

The table has one line per measurement: the sizes of a matrix product, an all-reduce and copies to and from the device that ran at
once (0: not there) and the milliseconds until the last ended. Lines with one stream give its time alone. Half of the pairs of
a group shape and a product's size are held out (`is_held_out`); the fit minimises the log error over the others.
"""

from __future__ import annotations

import csv
import zlib
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares

from ..cost_models.hardware.overlap import STREAMS, Pair, pair_s, together_s
from ..schema.arrays import FloatArray
from ..schema.catalogue import find_device
from ..schema.units import MB
from .command import run_command

SIZES = ("gemm_n", "g2g_allreduce_MB", "c2g_MB", "g2c_MB")
"""Columns of the sizes, in the order of STREAMS."""

NUM_STREAMS = len(STREAMS)
OFF_DIAGONAL = ~np.eye(NUM_STREAMS, dtype=bool)


class Overlapped(NamedTuple):
    """One measurement: where, seconds of each stream alone [4] and of all at once.

    ``traffic`` is what an all-reduce alone sends from each device, over the bandwidth of its memory.
    """

    fabric: str
    shape: str
    alone_s: tuple[float, ...]
    together_s: float
    traffic: float


class Errors(NamedTuple):
    """Mean of |predicted / measured - 1| of the model, of the longest stream, and of the sum of streams."""

    rows: int
    model: float
    longest: float
    total: float


def read_overlaps(path: str | Path) -> list[Overlapped]:
    """Measurements of at least two streams whose times alone are in the table too."""
    with Path(path).open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    alone: dict[tuple[str, int, float], list[float]] = defaultdict(list)
    sizes = [tuple(float(line[name]) for name in SIZES) for line in lines]
    for line, size in zip(lines, sizes, strict=True):
        if sum(value > 0 for value in size) == 1:
            stream = int(np.argmax(size))
            alone[_shape(line), stream, size[stream]].append(float(line["latency_ms"]) / 1e3)
    found = []
    for line, size in zip(lines, sizes, strict=True):
        keys = [(_shape(line), stream, value) for stream, value in enumerate(size)]
        if sum(value > 0 for value in size) < 2 or any(key[2] > 0 and key not in alone for key in keys):
            continue
        times = tuple(float(np.median(alone[key])) if key[2] > 0 else 0.0 for key in keys)
        ranks = int(line["intra_group"]) * int(line["inter_group"])
        sent = 2 * (ranks - 1) / ranks * size[1] * MB / times[1] if size[1] else 0.0
        traffic = sent / _memory_bytes_per_s(line["gpu_type"])
        found.append(Overlapped(_fabric(line), _shape(line), times, float(line["latency_ms"]) / 1e3, traffic))
    return found


def _shape(line: dict[str, str]) -> str:
    return "/".join(line[name] for name in ("source", "nodes", "intra_group", "inter_group"))


@cache
def _memory_bytes_per_s(device: str) -> float:
    return float(find_device(device)[1]["memory_bandwidth_bytes_per_s"])


def _fabric(line: dict[str, str]) -> str:
    device = line["gpu_type"].split("-")[0]
    if int(line["inter_group"]) > 1:
        return "network-volta" if device == "v100" else "network"
    return {"v100": "nvlink-volta", "l4": "pcie"}.get(device, "nvlink")


def is_held_out(row: Overlapped) -> bool:
    """Half of the pairs of a group shape and a product's time, with all that ran beside that product there."""
    return bool(zlib.crc32(f"{row.shape}/{row.alone_s[0]:.4f}".encode()) % 2)


def fit_slowdowns(rows: list[Overlapped]) -> FloatArray:
    """Slow-downs [4, 4], none below 0, that minimise the robust log error."""
    alone, measured = _arrays(rows)

    def residuals(values: FloatArray) -> FloatArray:
        return np.asarray(np.log(together_s(alone, _matrix(values)) / measured))

    start = np.full(NUM_STREAMS * (NUM_STREAMS - 1), 0.3)
    solved = least_squares(residuals, start, bounds=(0, 10), loss="soft_l1", f_scale=0.1, max_nfev=30)
    return _matrix(solved.x)


def fit_pair(rows: list[Overlapped]) -> tuple[float, float, float]:
    """(channels, traffic, compute) of `overlap.pair_of` over all machines: robust log error of products beside an all-reduce."""
    _, measured = _arrays(rows)
    solved = least_squares(
        lambda law: np.log(predict_pair(rows, law) / measured),
        (0.1, 3.0, 0.05),
        bounds=(0, 20),
        loss="soft_l1",
        f_scale=0.05,
    )
    channels, traffic, compute = (float(value) for value in solved.x)
    return channels, traffic, compute


def predict_pair(rows: list[Overlapped], law: Sequence[float]) -> FloatArray:
    """Seconds of products and all-reduces at once under a law of `fit_pair`."""
    alone, _ = _arrays(rows)
    traffic = np.array([row.traffic for row in rows])
    return pair_s(alone[:, 0], alone[:, 1], Pair(law[0] + law[1] * traffic, law[2]))


def errors(rows: list[Overlapped], predicted_s: FloatArray) -> Errors:
    """How far predictions and the two naive answers are from the measurements."""
    alone, measured = _arrays(rows)

    def mape(seconds: FloatArray) -> float:
        return float(np.mean(np.abs(seconds / measured - 1)))

    return Errors(len(rows), mape(predicted_s), mape(alone.max(axis=1)), mape(alone.sum(axis=1)))


def _arrays(rows: list[Overlapped]) -> tuple[FloatArray, FloatArray]:
    return np.array([row.alone_s for row in rows]), np.array([row.together_s for row in rows])


def _matrix(values: FloatArray) -> FloatArray:
    matrix = np.zeros((NUM_STREAMS, NUM_STREAMS))
    matrix[OFF_DIAGONAL] = values
    return matrix


def report(path: str | Path) -> str:
    """The section [interference] of coefficients.toml and, as comments, held-out errors."""
    rows, lines = read_overlaps(path), ["[interference]"]
    for fabric in sorted({row.fabric for row in rows}):
        here = [row for row in rows if row.fabric == fabric]
        slowdown = fit_slowdowns([row for row in here if not is_held_out(row)])
        lines.append(f"{fabric} = {[[round(float(value), 3) for value in line] for line in slowdown]}")
        held_out = [row for row in here if is_held_out(row)]
        lines.append(_held_out(errors(held_out, together_s(_arrays(held_out)[0], slowdown))))
    pairs = [row for row in rows if row.alone_s[2] == row.alone_s[3] == 0]
    law = fit_pair([row for row in pairs if not is_held_out(row)])
    held_out = [row for row in pairs if is_held_out(row)]
    names = zip(("channels", "traffic", "compute"), law, strict=True)
    lines += ["[overlap]", *(f"{name} = {value:.3f}" for name, value in names)]
    lines.append(_held_out(errors(held_out, predict_pair(held_out, law))))
    return "\n".join(lines) + "\n"


def _held_out(found: Errors) -> str:
    return "# held out: {} rows, error {:.1%} (longest stream {:.1%}, sum {:.1%})".format(*found)


def main(arguments: list[str] | None = None) -> None:
    """Write the report of the table named on the command line."""
    parser = ArgumentParser(prog="python -m meshwright.fitting.overlap", description=__doc__)
    parser.add_argument("table", type=Path, help="overlap_interference.csv")
    run_command(parser, lambda options: report(options.table), arguments)


if __name__ == "__main__":
    main()
