"""How far the ratio of two layouts' step times may be off: of one model on one machine most of the error is the same for both.

    log(predicted ratio / measured ratio) has a Laplace distribution around 0 with variance
    V = noise^2 + sum_k sd_k^2 d_k

with d_k the doublings between the two degrees of kind k (tp, cp, experts' ep etp, pp, micro-batch, model chunks), or 1 where they
recompute, shard, offload or schedule differently. sd_k are those of coefficients.toml, fitted to pairs of measured runs that differ
in nothing but their layout [fitted: python -m meshwright.fitting ratios RUNS.csv]; how often they hold for sources that they were
not fitted on, and what choosing by them costs, stands in docs/accuracy.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...schema.layout_table import LayoutTable
from ...schema.units import FloatArray, IntArray
from ..coefficients import packaged_coefficients

DEGREES: dict[str, Callable[[LayoutTable], IntArray]] = {
    "tp": lambda table: table.tp,
    "cp": lambda table: table.cp,
    "experts": lambda table: np.asarray(table.ep * table.expert_tp),
    "pp": lambda table: table.pp,
    "micro_batch": lambda table: table.micro_batch_size,
    "chunks": lambda table: table.num_model_chunks,
}
CHOICES: dict[str, Callable[[LayoutTable], FloatArray | IntArray]] = {
    "recompute": lambda table: np.asarray(2 * table.recompute + table.recompute_fraction),
    "sharding": lambda table: np.where(table.dp_shard > 1, table.zero_stage, 0),
    "offload": lambda table: np.asarray(2 * table.offload + table.offload_activations),
    "schedule": lambda table: table.schedule,
}
KINDS = ("noise", *DEGREES, *CHOICES)
"""Kinds of differences; noise is there between any two runs."""


def differences(table: LayoutTable, idx: int) -> FloatArray:
    """Return d_k between each layout and layout ``idx`` [N, KINDS]."""
    degrees = [np.log2(np.asarray(degree(table), dtype=np.float64)) for degree in DEGREES.values()]
    columns = [np.ones(len(table)), *(np.abs(values - values[idx]) for values in degrees)]
    columns += [values != values[idx] for values in (choice(table) for choice in CHOICES.values())]
    return np.stack(columns, axis=1).astype(np.float64)


def ratio_sd(table: LayoutTable, idx: int, sd: Mapping[str, float] | None = None) -> FloatArray:
    """Return the standard deviation of the error of log(time of each layout / time of layout ``idx``) [N]."""
    sd = sd or ratio_coefficients()["sd"]
    return np.asarray(np.sqrt(differences(table, idx) @ np.square([sd[kind] for kind in KINDS])))


def ratio_coefficients() -> Mapping[str, Any]:
    """Return the section [ratio] of coefficients.toml."""
    section: Mapping[str, Any] = packaged_coefficients()["ratio"]
    return section


def margin(sd: FloatArray, probability: float) -> FloatArray:
    """Return by how much the log of a ratio has to be above 0 that its truth is with this probability, at least 1/2."""
    return np.asarray(-np.log(2 * (1 - probability)) * sd / np.sqrt(2))


def probability_above(log_ratio: float, sd: float) -> float:
    """Return how probably the true log of a ratio is above 0."""
    tail = 0.5 * math.exp(-abs(log_ratio) * math.sqrt(2) / sd)
    return 1 - tail if log_ratio > 0 else tail
