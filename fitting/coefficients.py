"""Coefficients of whole steps from measured runs.

    python -m meshwright.fitting.coefficients RUNS.csv [--names sustained.hopper,...] [--cap 40]

    minimise  mean over sources of mean |log(predicted / measured)|  +  PRIOR_WEIGHT sum ((log c - log c0) / width)^2

over the `fit` half of the rows, c within its range. Every source counts alike (less where it has few rows) and by at most ``cap``
rows, so that no table decides by its length; absolute values, so that no outlier does. A bounded pattern search along coordinates:
no randomness, no gradients of a model with maxima in it. Prints old and new values, the loss by source, and the held-out half.
"""

from __future__ import annotations

import zlib
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..cost_models.coefficients import packaged_coefficients
from ..schema import ConfigError
from ..validation.inputs import RunInputs, run_inputs
from ..validation.predict import estimate_runs
from ..validation.rows import RunRow, read_runs
from .command import run_command

PRIOR_WEIGHT = 0.001
"""A coefficient one width from its prior is worth a tenth of a percent of the mean error."""

MIN_ROWS = 10
"""Sources with fewer rows weigh in proportion."""

FIRST_STEP, LAST_STEP = 0.16, 0.02
"""Of log c."""


class Prior(NamedTuple):
    """What is known of a coefficient before any run.

    Attributes:
        value: c0; width: of log c; low, high: physical range.
        why: the reason.
        also: paths that share the value.
    """

    value: float
    width: float
    low: float
    high: float
    why: str
    also: tuple[str, ...] = ()


_CLOCK = "boost clock under the power limit over that of a short benchmark: data sheets' base over boost clock is the low end"
_PYTHON = "torch dispatches an operator with its autograd in 5 to 20 us on a fast core; Python modules and arguments come on top"

PRIORS: dict[str, Prior] = {
    "sustained.ampere": Prior(0.95, 0.05, 0.78, 1.0, _CLOCK),
    "sustained.hopper": Prior(0.90, 0.05, 0.70, 1.0, _CLOCK),
    "sustained.blackwell": Prior(0.90, 0.05, 0.70, 1.0, _CLOCK),
    "sustained.other": Prior(0.90, 0.05, 0.70, 1.0, _CLOCK),
    "sustained.power_exponent": Prior(0.5, 0.4, 0.33, 1.0, "dynamic power rises with f V^2: f^3 where the voltage follows, else f"),
    "fp8.gemm_efficiency_ratio": Prior(0.97, 0.05, 0.7, 1.05, "measured products of H100 and B200: 0.966, 0.999"),
    "nvfp4.gemm_efficiency_ratio": Prior(0.6, 0.3, 0.3, 1.0, "not measured: block scales and transforms beside products"),
    "host.megatron.operator_s": Prior(
        25e-6, 0.4, 8e-6, 80e-6, _PYTHON, ("host.deepspeed.operator_s",)
    ),
    "host.aceso.operator_s": Prior(50e-6, 0.5, 10e-6, 200e-6, "a module for each operator, which packs and unpacks its tensors"),
    "host.own_processor_ratio": Prior(1.2, 0.3, 0.8, 2.5, "Grace's cores at 3.4 GHz against x86 servers' at up to 4"),
    "host.megatron.collective_s": Prior(
        7e-5, 0.5, 2e-5, 3e-4, "an autograd function and NCCL's launch", ("host.aceso.collective_s", "host.deepspeed.collective_s")
    ),
    "host.megatron.routing_s": Prior(
        4e-3, 0.5, 0.5e-3, 12e-3, "60 to 200 small operators and a copy to the host that waits",
        ("host.aceso.routing_s", "host.deepspeed.routing_s", "host.nanotron.routing_s", "host.internevo.routing_s"),
    ),
    "host.deepspeed.fsdp_unit_s": Prior(1e-3, 0.5, 2e-4, 5e-3, "hooks before and after every module, forward and backward"),
    "host.fsdp2.operator_s": Prior(10e-6, 0.4, 4e-6, 40e-6, _PYTHON),
    "host.fsdp2.routing_s": Prior(3e-3, 0.5, 0.5e-3, 12e-3, "as Megatron's, with fewer choices"),
    "host.nanotron.operator_s": Prior(25e-6, 0.5, 8e-6, 80e-6, _PYTHON),
    "host.overlap_norm": Prior(3.0, 0.4, 1.0, 8.0, "1: never beside each other; without limit: the host is always far ahead"),
    "optimizer.memory_efficiency": Prior(0.8, 0.15, 0.4, 0.95, "below a plain copy's 0.9"),
    "data_parallel.tensor_step_s": Prior(4.2e-6, 0.3, 1e-6, 2e-5, "latency of a step of a ring"),
}  # fmt: skip


class Measured(NamedTuple):
    """Runs with a measured time."""

    sources: tuple[str, ...]
    inputs: tuple[RunInputs, ...]
    measured_s: tuple[float, ...]


def measured(rows: Sequence[RunRow], cap: int | None = None) -> Measured:
    """Scored rows that can be predicted; of each source at most ``cap``, in the order of a checksum of their names."""
    by_source: dict[str, list[RunRow]] = defaultdict(list)
    for row in rows:
        if row.is_scored and row.measured_s is not None:
            by_source[row.source_set].append(row)
    known = [
        (source, inputs, float(row.measured_s or 0.0))
        for source, members in sorted(by_source.items())
        for row in sorted(members, key=lambda row: zlib.crc32(row.id.encode()))[:cap]
        if isinstance(inputs := run_inputs(row), RunInputs)
    ]
    return Measured(*(tuple(column) for column in zip(*known, strict=True))) if known else Measured((), (), ())


def errors(runs: Measured, values: Mapping[str, float]) -> dict[str, np.ndarray]:
    """Log(predicted / measured) by source, with these coefficients."""
    estimates = estimate_runs(runs.inputs, packaged_coefficients().replaced(_with_shared(values)))
    found: dict[str, list[float]] = defaultdict(list)
    for source, estimate, seconds in zip(runs.sources, estimates, runs.measured_s, strict=True):
        if not isinstance(estimate, str):
            found[source].append(float(np.log(estimate.step_time_s / seconds)))
    return {source: np.array(logs) for source, logs in found.items()}


def loss(by_source: Mapping[str, np.ndarray], values: Mapping[str, float]) -> float:
    """Weighted mean over sources of mean |log|, plus what the priors say."""
    weights = np.array([min(1.0, len(logs) / MIN_ROWS) for logs in by_source.values()])
    means = np.array([float(np.mean(np.abs(logs))) for logs in by_source.values()])
    away = [np.log(value / PRIORS[name].value) / PRIORS[name].width for name, value in values.items()]
    return float(weights @ means / weights.sum() + PRIOR_WEIGHT * np.sum(np.square(away)))


def fit(start: Mapping[str, float], value_of: Callable[[Mapping[str, float]], float]) -> dict[str, float]:
    """Pattern search: each coefficient up or down by a step of its logarithm as long as that helps, then by half the step."""
    found, best, step = dict(start), value_of(start), FIRST_STEP
    while step >= LAST_STEP:
        before = best
        for name in found:
            for sign in (1.0, -1.0):
                moved = found | {name: _bounded(name, found[name] * float(np.exp(sign * step)))}
                tried = value_of(moved)
                if tried < best:
                    found, best = moved, tried
                    break
        step = step if best < before - 1e-4 else step / 2
    return found


def _bounded(name: str, value: float) -> float:
    prior = PRIORS[name]
    return min(max(value, prior.low), prior.high)


def _with_shared(values: Mapping[str, float]) -> dict[str, float]:
    shared = {path: value for name, value in values.items() for path in PRIORS[name].also}
    return {**shared, **values}


def report(title: str, before: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray]) -> list[str]:
    """Lines with mean |log|, and mean log, by source."""
    lines = [f"# {title}: mean |log|, mean log, in percent, before -> after"]
    for source, logs in before.items():
        own = after[source]
        old, new = (f"{100 * np.mean(np.abs(x)):5.1f} {100 * np.mean(x):+6.1f}" for x in (logs, own))
        lines.append(f"# {source:18} {len(logs):4}  {old} -> {new}")
    return lines


def search(options: Namespace) -> str:
    """Fit on one half of the table, report on the other."""
    names = options.names.split(",") if options.names else list(PRIORS)
    unknown = [name for name in names if name not in PRIORS]
    if unknown:
        raise ConfigError(f"nothing is known of {', '.join(unknown)}; known are {', '.join(PRIORS)}")
    rows = read_runs(options.runs)
    halves = {part: measured([row for row in rows if row.part == part], options.cap) for part in ("fit", "held-out")}
    start = {name: float(packaged_coefficients().value(name)) for name in names}
    found = fit(start, lambda values: loss(errors(halves["fit"], values), values))
    lines = [f"{name}: {start[name]:.4g} -> {value:.4g}" for name, value in found.items()]
    for part, runs in halves.items():
        before, after = errors(runs, start), errors(runs, found)
        lines += [*report(part, before, after), f"# loss {loss(before, start):.4f} -> {loss(after, found):.4f}"]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> None:
    """Old and new value of each coefficient, with what that does to every source."""
    parser = ArgumentParser(prog="python -m meshwright.fitting.coefficients", description=__doc__)
    parser.add_argument("runs", type=Path, help="table of measured runs")
    parser.add_argument("--names", default="", metavar="A,B", help="coefficients to search (default: all of PRIORS)")
    parser.add_argument("--cap", type=int, default=40, metavar="N", help="most runs of one source")
    run_command(parser, search, arguments)


if __name__ == "__main__":
    main()
