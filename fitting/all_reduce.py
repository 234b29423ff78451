"""Fit all-reduces of serving engines: ``python -m meshwright.fitting all_reduce DATA [--score]`` prints [serving.all_reduce].

    minimise over a, s, e1, e2    mean |log(min(one-shot, two-shot, NCCL) / measured)|

for each engine and generation of devices, over messages of MIN_BYTES to MAX_BYTES in a node, in captured graphs. A score is the
error on a device of the constants that the generation's other one gives.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.optimize import minimize

from ..cost_models.learned.serving_kernels import ENGINES
from ..cost_models.serving.communication import AllReduceKernels, group_s, kernels_all_reduce_s, rate_to_peers
from ..schema import ClusterSpec
from ..schema.units import FloatArray
from .estimator import score_lines
from .gemm import SYSTEMS

GENERATIONS = {"ampere": ("a100_sxm",), "hopper": ("h100_sxm", "h200_sxm"), "blackwell": ("b200_sxm", "gb200")}
MIN_BYTES, MAX_BYTES = 4096, 2**26
LOW, HIGH = AllReduceKernels(1e-6, 1e-6, 0.1, 0.1), AllReduceKernels(2e-5, 2e-5, 1.0, 1.0)
START = AllReduceKernels(floor_s=5e-6, barrier_s=5e-6, one_shot=0.5, two_shot=0.6)


def report(options: Namespace) -> str:
    """Return the constants as lines of coefficients.toml, with the mean error of each in a comment."""
    table, text, scores = measured(options.data), "", {}
    for engine in ENGINES:
        text += f"[serving.all_reduce.{engine}]\n"
        for generation, systems in GENERATIONS.items():
            rows = table[(table.engine == engine) & table.system.isin(systems)]
            best = fitted(rows)
            constants = ", ".join(f"{name} = {value:.2g}" for name, value in best._asdict().items())
            text += f"{generation} = {{ {constants} }}  # {100 * mean_error(best, rows):.0f} %\n"
            for system in systems if options.score and len(systems) > 1 else ():
                other = fitted(rows[rows.system != system])
                error = mean_error(other, rows[rows.system == system])
                scores[f"{engine} {system} left out"] = round(100 * error, 1)
    return text + score_lines("all_reduce", scores)


def measured(data: Path) -> pd.DataFrame:
    """Return the rows of a fit, with bytes, seconds, what NCCL takes, and a device's rate to its peers."""
    table = pd.read_parquet(data / "serving/operators/custom_all_reduce.parquet")
    table = table[~table.kernel_source.str.contains("eager") & table.system.isin(sum(GENERATIONS.values(), ()))]
    table = table.assign(num_bytes=2.0 * table.message_size, seconds=table.latency / 1e3)
    table = table[table.num_bytes.between(MIN_BYTES, MAX_BYTES)]
    parts = []
    for (system, group), part in table.groupby(["system", "num_gpus"]):
        cluster = ClusterSpec.parse(f"{group}x{SYSTEMS[system]}")
        library_s = group_s("all_reduce", part.num_bytes.to_numpy(), int(group), 1, cluster)
        parts.append(part.assign(library_s=library_s, rate=rate_to_peers(cluster.levels[0], cluster, int(group))))
    return pd.concat(parts)


def fitted(rows: pd.DataFrame) -> AllReduceKernels:
    """Return the constants with the least mean error of rows."""

    def loss(logs: FloatArray) -> float:
        return mean_error(AllReduceKernels(*np.exp(logs)), rows)

    bounds = list(zip(np.log(LOW), np.log(HIGH), strict=True))
    return AllReduceKernels(*np.exp(minimize(loss, np.log(START), method="Nelder-Mead", bounds=bounds).x))


def mean_error(constants: AllReduceKernels, rows: pd.DataFrame) -> float:
    """Return the mean of |log(predicted / measured)| of rows."""
    sizes, groups, rates = (rows[name].to_numpy(dtype=float) for name in ("num_bytes", "num_gpus", "rate"))
    seconds = np.minimum(rows.library_s, kernels_all_reduce_s(sizes, groups, rates, constants))
    return float(np.abs(np.log(seconds / rows.seconds)).mean())
