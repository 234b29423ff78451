"""Seconds of streams that run at once and slow each other down: compute, collectives, copies to and from the device.

While the streams of a set A are active, stream i advances at

    rate_i = 1 / (1 + sum_{j in A, j != i} slowdown[i, j])

of its isolated speed; when one ends, the others speed up. Collectives take multiprocessors and memory bandwidth from kernels,
copies share the host's links with what crosses a PCIe switch. For two streams this has the closed form of `pair_s`.
Source of the model: Mist (Zhu et al., EuroSys 2025); the slow-downs are fitted by `fitting.overlap`: [interference] of
coefficients.toml for all four streams on one fabric, [overlap] for a product and a collective on any (`slowdown_law`).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from ...schema.units import FloatArray
from ..coefficients import Coefficients

STREAMS = ("compute", "collective", "to_device", "to_host")
"""Order of the streams in every array and matrix of this file."""

Fabric = Literal["nvlink", "nvlink-volta", "pcie", "network", "network-volta"]
"""What a collective runs over: links between devices, the host's PCIe, or the network between nodes; Volta was measured apart."""


class Pair(NamedTuple):
    """Slow-downs of two streams: extra seconds of one for each of its own seconds while the other runs. One element or [N].

    Attributes:
        compute: of kernels while a collective runs.
        collective: of the collective while kernels run.
    """

    compute: FloatArray | float
    collective: FloatArray | float


def interference(fabric: Fabric, coefficients: Coefficients) -> FloatArray:
    """Return the slow-down of stream i (row) by stream j (column), [4, 4] with an empty diagonal."""
    return np.array(coefficients["interference"][fabric], dtype=np.float64)


def slowdown_law(traffic: FloatArray | float, coefficients: Coefficients) -> Pair:
    """Return the slow-downs of kernels and a collective: a share for its channels' multiprocessors, one for its memory traffic.

    Args:
        traffic: bytes that a device sends per second over its memory's bandwidth.
        coefficients: those of [overlap].
    """
    law = coefficients["overlap"]
    return Pair(compute=law["channels"] + law["traffic"] * traffic, collective=law["compute"])


def together_s(isolated_s: FloatArray, slowdown: FloatArray) -> FloatArray:
    """Return the seconds until the last of some streams ends that start at once.

    Args:
        isolated_s: seconds of each stream by itself, streams on the last axis [..., S]; 0 for a stream that is not present.
        slowdown: of row by column [S, S].
    """
    remaining, passed = isolated_s.astype(np.float64), np.zeros(isolated_s.shape[:-1])
    for _ in range(isolated_s.shape[-1]):
        active = remaining > 0
        stretch = 1.0 + active @ slowdown.T
        until_end = np.where(active, remaining * stretch, np.inf)
        first = np.argmin(until_end, axis=-1, keepdims=True)
        elapsed = np.take_along_axis(until_end, first, axis=-1)
        elapsed = np.where(np.isfinite(elapsed), elapsed, 0.0)
        remaining = np.maximum(remaining - elapsed / stretch, 0.0)
        np.put_along_axis(remaining, first, 0.0, axis=-1)
        passed = passed + elapsed[..., 0]
    return np.asarray(passed)


def pair_s(compute_s: FloatArray, collective_s: FloatArray, pair: Pair) -> FloatArray:
    """Return `together_s` of kernels and a collective [N]: max(C + x a (1 + b) / (1 + a), x + C b (1 + a) / (1 + b)).

    a and b are the slow-downs of compute and of the collective; each side of the maximum is the case in which the other ends first.
    With a b < 1 it is never slower than one after the other.
    """
    a, b = pair
    by_compute = compute_s + collective_s * a * (1 + b) / (1 + a)
    by_collective = collective_s + compute_s * b * (1 + a) / (1 + b)
    return np.asarray(np.maximum(by_compute, by_collective))


def exposed_s(compute_s: FloatArray, collective_s: FloatArray, pair: Pair) -> FloatArray:
    """Return what a collective adds to the compute it overlaps [N]: at least the slow-down, at most what outlasts the compute."""
    return pair_s(compute_s, collective_s, pair) - compute_s
