"""Seconds of streams that run at once and slow each other down: compute, collectives, copies to and from the device.

While the streams of a set A are active, stream i advances at

    rate_i = 1 / (1 + sum_{j in A, j != i} slowdown[i, j])

of its speed alone; when one ends, the others speed up. Collectives take multiprocessors and memory bandwidth from kernels, copies
share the host's links with what crosses a PCIe switch. For two streams this has the closed form of `pair_s`.
Source of the model: Mist (Zhu et al., EuroSys 2025); the slow-downs are fitted by `fit_overlap`: [interference] of
coefficients.toml for all four streams on one fabric, [overlap] for a product and a collective on any (`pair_slowdowns`).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from ...schema import ClusterSpec
from ...schema.arrays import FloatArray
from ..coefficients import coefficients, remembered

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


@remembered
def interference(fabric: Fabric) -> FloatArray:
    """Slow-down of stream i (row) by stream j (column), [4, 4] with an empty diagonal."""
    return np.array(coefficients()["interference"][fabric], dtype=np.float64)


def together_s(alone_s: FloatArray, slowdown: FloatArray) -> FloatArray:
    """Seconds until the last of some streams ends that start at once.

    Args:
        alone_s: seconds of each stream by itself, streams on the last axis [..., S]; 0 for a stream that is not there.
        slowdown: of row by column [S, S].
    """
    left, passed = alone_s.astype(np.float64), np.zeros(alone_s.shape[:-1])
    for _ in range(alone_s.shape[-1]):
        active = left > 0
        stretch = 1.0 + active @ slowdown.T
        until_end = np.where(active, left * stretch, np.inf)
        first = np.argmin(until_end, axis=-1, keepdims=True)
        elapsed = np.take_along_axis(until_end, first, axis=-1)
        elapsed = np.where(np.isfinite(elapsed), elapsed, 0.0)
        left = np.maximum(left - elapsed / stretch, 0.0)
        np.put_along_axis(left, first, 0.0, axis=-1)
        passed = passed + elapsed[..., 0]
    return np.asarray(passed)


def pair_s(compute_s: FloatArray, collective_s: FloatArray, pair: Pair) -> FloatArray:
    """`together_s` of kernels and a collective [N]: max(C + x a (1 + b) / (1 + a), x + C b (1 + a) / (1 + b)).

    a and b are the slow-downs of compute and of the collective; each side of the maximum is the case in which the other ends first.
    With a b < 1 it is never slower than one after the other.
    """
    a, b = pair
    by_compute = compute_s + collective_s * a * (1 + b) / (1 + a)
    by_collective = collective_s + compute_s * b * (1 + a) / (1 + b)
    return np.asarray(np.maximum(by_compute, by_collective))


def exposed_s(compute_s: FloatArray, collective_s: FloatArray, pair: Pair) -> FloatArray:
    """What a collective adds to the compute it runs beside [N]: the slow-down at least, what outlasts the compute at most."""
    return pair_s(compute_s, collective_s, pair) - compute_s


def pair_slowdowns(sent_bytes: FloatArray, collective_s: FloatArray, cluster: ClusterSpec) -> Pair:
    """Slow-downs [N] while a collective runs in which each device sends ``sent_bytes``: a fixed share for its channels'
    multiprocessors, and one for its traffic through the device's memory.
    """
    from ..measured import overlap_ratio

    rate = np.divide(sent_bytes, collective_s, out=np.zeros_like(collective_s), where=collective_s > 0)
    memory, profile = cluster.weakest_device.memory_bandwidth_bytes_per_s, cluster.profile
    law = slowdown_law(rate / memory)
    ratio = overlap_ratio(profile.overlaps, memory) if profile is not None and profile.overlaps else 1.0
    return Pair(compute=law.compute * ratio, collective=law.collective * ratio)


def slowdown_law(traffic: FloatArray | float) -> Pair:
    """Slow-downs of kernels and a collective; ``traffic``: bytes sent per second over the memory's bandwidth."""
    law = coefficients()["overlap"]
    return Pair(compute=law["channels"] + law["traffic"] * traffic, collective=law["compute"])
