"""How far predictions may be off: intervals of step times and peaks, and the spread of the ratio of two layouts' times.

**Step time.** Nine of ten runs lie between exp(-low) and exp(high) times the prediction:

    high^2 = sum_k (width_k x_k)^2        low^2 = (width_noise)^2 + SKEW^2 sum_{k other than noise} (width_k x_k)^2

with x_k the causes of error that a prediction knows of (CAUSES): 1 where one is present, or how much of the step it is. Errors of
different causes are independent, so their squares add; what is not known makes runs slower rather than faster, so SKEW < 1. A
calibrated cluster uses the spread that its runs showed. Peaks: the same sum over the causes that [interval.memory] names, both ways
alike. The widths hold for sources of runs that they were not fitted on [fitted: python -m meshwright.fitting intervals RUNS.csv].

**Ratio.** Of one model on one machine most of the error is the same for two layouts:

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
from typing import Any, NamedTuple

import numpy as np

from ...schema import ModelSpec
from ...schema.engine_facts import OWN_ENGINE
from ...schema.layout_table import LayoutTable
from ...schema.training_plan import Interval, TimeBreakdown
from ...schema.units import FloatArray, IntArray
from ..coefficients import Scenario, packaged_coefficients
from ..hardware.machine import has_own_host, measured_architectures

TAIL = 1.645
"""Standard deviations of a normal distribution beyond which 5 % lie on one side."""

MIN_LOG_WIDTH = 0.03
"""Repeats of one run differ by 1-5 % on managed clusters (MLPerf submissions of one configuration)."""


class Basis(NamedTuple):
    """What a predicted step time rests on.

    Attributes:
        terms: of the step.
        zero_stage: of the layout; offloads: something waits in the host's memory.
    """

    model: ModelSpec
    scenario: Scenario
    terms: TimeBreakdown
    zero_stage: int
    offloads: bool


CAUSES: dict[str, Callable[[Basis], float]] = {
    "noise": lambda basis: 1.0,
    # Communication that nothing hides, and waiting for it, as shares of the step.
    "exposed": lambda basis: 1 - _kernel_share(basis.terms),
    # Runs of few sources on its architecture; not even products were measured on it.
    "architecture": lambda basis: float(not _is_known(basis.scenario, "architectures", _architecture(basis.scenario))),
    "products": lambda basis: float(_architecture(basis.scenario) not in measured_architectures()),
    # The host is the processor on the device's board.
    "own_host": lambda basis: float(has_own_host(basis.scenario)),
    # Few sources of runs with its engine; model code compiled or plain, in place of kernels that the engine brings.
    "engine": lambda basis: _rare_engine(basis.scenario),
    "code": lambda basis: float(basis.scenario.workload.code != "engine"),
    # Parameters gathered by hooks of an engine other than torch's.
    "hooks": lambda basis: float(basis.zero_stage == 3 and basis.scenario.workload.calibration_engine != OWN_ENGINE),
    "experts": lambda basis: float(basis.model.is_moe),
    "host_states": lambda basis: float(basis.offloads),
}
"""Of the error of a step time; what a table of runs leaves unstated comes on top (`widened`)."""

MEMORY_CAUSES: dict[str, Callable[[Scenario], float]] = {
    "noise": lambda scenario: 1.0,
    "engine": lambda scenario: _rare_engine(scenario),
    # Model code as it is written, whose temporaries nobody has counted; a compiler's are few.
    "plain_code": lambda scenario: float(scenario.workload.code == "eager"),
}
"""Of the error of a peak."""


def time_interval(basis: Basis) -> Interval:
    """Return the interval of a step time; it always holds the prediction."""
    scenario, step_s = basis.scenario, basis.terms.total
    c, calibration = scenario.coefficients["interval"], scenario.cluster.calibration
    if scenario.cluster.weakest_device.backend.is_host:
        low, high = (abs(math.log(float(end))) for end in c["time_cpu"])
    else:
        squares = {name: (c["time"]["width"][name] * cause(basis)) ** 2 for name, cause in CAUSES.items()}
        noise = squares["noise"]
        others = sum(squares.values()) - noise
        low, high = math.sqrt(noise + c["time"]["skew"] ** 2 * others), math.sqrt(noise + others)
    if calibration.spread is not None:
        # The model's width counts as much as a few runs; the runs' spread was measured with as many as there were.
        weight = calibration.num_runs / (calibration.num_runs + c["time"]["prior_runs"])
        low, high = (weight * TAIL * calibration.spread + (1 - weight) * width for width in (low, high))
    return Interval(low=step_s * math.exp(-max(low, MIN_LOG_WIDTH)), high=step_s * math.exp(max(high, MIN_LOG_WIDTH)))


def peak_interval(allocated: float, scenario: Scenario) -> Interval:
    """Return the interval of an allocated peak in bytes; it always holds the prediction."""
    c = scenario.coefficients["interval"]
    if scenario.cluster.weakest_device.backend.is_host:
        low, high = c["memory_cpu"]
        return Interval(low=low * allocated, high=high * allocated)
    width = math.hypot(*(c["memory"][name] * cause(scenario) for name, cause in MEMORY_CAUSES.items()))
    return Interval(low=allocated * math.exp(-width), high=allocated * math.exp(width))


def widened(interval: Interval, predicted: float, width: float, skew: float = 1.0) -> Interval:
    """Return the interval with one more independent cause of error of this width, below the prediction ``skew`` times it."""
    low, high = math.log(predicted / interval.low), math.log(interval.high / predicted)
    return Interval(
        low=predicted * math.exp(-math.hypot(low, skew * width)), high=predicted * math.exp(math.hypot(high, width))
    )


def _kernel_share(terms: TimeBreakdown) -> float:
    return (terms.compute + terms.recompute + terms.optimizer + terms.offload) / terms.total


def _architecture(scenario: Scenario) -> str:
    return scenario.cluster.weakest_device.architecture


def _rare_engine(scenario: Scenario) -> float:
    return float(not _is_known(scenario, "engines", scenario.workload.calibration_engine))


def _is_known(scenario: Scenario, kind: str, name: str) -> bool:
    return name in scenario.coefficients["interval"][kind]


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
