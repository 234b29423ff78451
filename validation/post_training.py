"""Published post-training runs against predictions: the step of a run under its layouts, and who should share devices.

A run is predicted with the layouts that were published (degrees of training, tp of generation); lengths of responses are spread
around the published mean (`lengths_of_mean`). Nothing is known of overheads between calls, so that one factor for each engine and
version is fitted on every second row and scored on the others.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
from sklearn.ensemble import HistGradientBoostingRegressor

from ..planner.post_training.costs import CostBook
from ..planner.request import PlanRequest
from ..planner.tasks.post_training import instance_of
from ..schema import ClusterSpec, ConfigError, InfeasibleError, ModelSpec
from ..schema.rl import RlModel, RlWorkload, lengths_of_mean
from ..schema.task import Precision
from ..schema.units import FloatArray
from ..solvers.pools import Partition, PlacedPools, period

MODELS = {
    "LLAMA3.1_8B": "llama-3.1-8b", "DeepSeek V3": "deepseek-v3", "Qwen3-235B": "qwen3-235b-a22b", "Qwen3-30B3A": "qwen3-30b-a3b",
    "Qwen3-32B": "qwen3-32b", "Qwen2.5-Math-7B": "qwen2.5-7b",
}  # fmt: skip
DEVICES = {"H100-80": "H100-SXM-80GB", "GB200": "GB200-186GB", "H20": "H20-96GB"}

UNKNOWN_PROMPT = 200
"""Tokens of a prompt where a run does not say."""


FETCHES = 4
"""Of a step by verl's fully asynchronous trainer in the runs that it publishes (fully_async.md: a fetch takes 4 of 16
mini-batches)."""


@dataclass(frozen=True)
class Run:
    """A row of a table of runs; seconds are measured."""

    fields: Mapping[str, str]

    @property
    def name(self) -> str:
        """Return its identifier."""
        return self.fields["id"]

    @property
    def version(self) -> str:
        """Return engine and version."""
        return f"{self.fields['framework']} {self.fields['version']}"

    @property
    def is_split(self) -> bool:
        """Tell whether generator and actor have devices of their own."""
        return self.fields["placement"] == "split"

    @property
    def gpus(self) -> int:
        """Return the devices of the run."""
        return int(self.fields["gpus"])

    @property
    def step_s(self) -> float:
        """Return the measured seconds of a step."""
        return float(self.fields["step_s"])

    def number(self, name: str) -> float | None:
        """Return a field as a number; None where it is empty or words."""
        try:
            return float(self.fields[name])
        except ValueError:
            return None


@dataclass(frozen=True)
class Prediction:
    """Seconds of a run by part, and of its step before any factor."""

    run: Run
    step_s: float
    parts_s: dict[str, float]


def read_runs(path: str | Path) -> list[Run]:
    """Return the rows of rl_runs.csv with a measured step, of models and devices that are known here."""
    with Path(path).open(newline="") as file:
        rows = [Run(row) for row in csv.DictReader(file)]
    return [
        run for run in rows if run.number("step_s") and run.fields["model"] in MODELS and run.fields["gpu"] in DEVICES
    ]


def workload_of(run: Run, mean_len: float) -> RlWorkload:
    """Return the workload of a run whose responses have so many tokens on average."""
    longest, samples = int(run.number("max_len") or 0), int(run.number("samples") or 0)
    prompt = UNKNOWN_PROMPT
    if (rate := run.number("tokens_per_s_per_gpu")) is not None:
        prompt = max(1, round(rate * run.step_s * run.gpus / samples - mean_len))
    actor = ModelSpec.named(MODELS[run.fields["model"]])
    longest = max(longest - prompt, math.ceil(mean_len))  # the published limit is of prompt and response
    precision: Precision = "fp8" if "Training FP8" in run.fields["precision"] else "bf16-mixed"
    is_verl = run.fields["framework"] == "verl"
    staleness = staleness_of(run)
    # verl's fully asynchronous trainer takes the generator's log-probabilities and interrupts rollouts (its fully_async.md).
    is_partial = is_verl and 0 < staleness < 1
    models = (RlModel(role="actor", model=actor), RlModel(role="reference", model=actor))
    return RlWorkload(
        models=models[: 1 if is_verl else 2],
        reward_function="rewards.py:exact",
        prompts=samples // 16,
        responses=16,
        prompt_len=prompt,
        lengths=lengths_of_mean(mean_len, longest),
        max_len=longest,
        updates=samples // int(run.number("train_batch") or 512),
        staleness=staleness,
        fetches=FETCHES if run.fields["policy"] == "fully asynchronous" else 1,
        oversample=1.0 + staleness if is_partial else 1.0,
        log_probs="generator" if run.fields["policy"] == "fully asynchronous" else "actor",
        engine="fsdp2" if is_verl else "megatron",
        precision=precision,
    )


def staleness_of(run: Run) -> float:
    """Return by how many steps weights may be behind: what the run says, or one step where pools are split."""
    stated = re.search(r"staleness ([\d.]+)", run.fields["note"])
    return float(stated[1]) if stated else float(run.is_split)


def layout_of(run: Run) -> tuple[dict[str, object], dict[str, object]]:
    """Return the published degrees of training, and those of generation."""
    numbers = re.findall(r"\d+|n/a", run.fields["train_layout"].partition("=")[2])
    fixed: dict[str, object] = {}
    if len(numbers) >= 5:
        names = ("tp", "cp", "ep", "pp")
        fixed = {name: int(value) for name, value in zip(names, numbers[-5:-1], strict=True)}
    tp = run.number("gen_tp")
    return fixed, {} if tp is None else {"tp": int(tp)}


def predict(run: Run, mean_len: float | None = None) -> Prediction:
    """Return the predicted step of a run.

    Raises:
        ConfigError, InfeasibleError: the run's layout has no prediction here.
    """
    mean = mean_len if mean_len is not None else run.number("avg_len")
    if mean is None:
        raise ConfigError(f"{run.name}: no mean length is published")
    workload = workload_of(run, mean)
    cluster = ClusterSpec.parse(f"{run.gpus}x{DEVICES[run.fields['gpu']]}")
    request = PlanRequest.create(workload.model_of("actor"), cluster, workload, time_limit_s=600.0)
    fixed, instances = layout_of(run)
    book = CostBook(request, workload, fixed=fixed, instances=instances)
    trainers = int(run.number("trainer_gpus") or run.gpus)
    generators = int(run.number("generation_gpus") or run.gpus)
    sizes = tuple(sorted({trainers, generators}))
    others = tuple(range(1, len(workload.roles)))
    partition: Partition = ((0,), others) if run.is_split else ((0, *others),)
    devices = (generators, trainers) if run.is_split else (run.gpus,)
    known = {(copy, sizes.index(devices[pool])) for pool, block in enumerate(partition) for copy in block}
    instance = replace(instance_of(book, sizes, known), budget_bytes=math.inf)
    step_s = period(instance, PlacedPools(partition, tuple(map(sizes.index, devices)), frozenset()))
    if not math.isfinite(step_s):
        reasons = "; ".join(f"{role}: {reason}" for role, reason in book.reasons.items())
        raise InfeasibleError(f"{run.name}: {reasons}")
    of = {copy: devices[pool] for pool, block in enumerate(partition) for copy in block}
    parts: dict[str, float] = {
        call: float(instance.seconds[q, sizes.index(of[instance.copy_of[q]])]) for q, call in enumerate(workload.calls)
    }
    return Prediction(run, step_s, {**parts, "weights": float(instance.send_s.min())})


def predictions(runs: Iterable[Run]) -> Iterator[Prediction | tuple[Run, str]]:
    """Yield a prediction of each run, or why there is none."""
    for run in runs:
        try:
            yield predict(run)
        except (ConfigError, InfeasibleError) as error:
            yield run, error.message


def factors(made: Iterable[Prediction]) -> dict[str, float]:
    """Return the median of measured over predicted seconds for each engine and version, over every second of its rows."""
    by_version: dict[str, list[float]] = {}
    for each in made:
        by_version.setdefault(each.run.version, []).append(each.run.step_s / each.step_s)
    return {version: median(ratios[::2]) for version, ratios in by_version.items()}


def scored(made: Iterable[Prediction]) -> list[Prediction]:
    """Return the rows on which no factor was fitted."""
    seen: dict[str, int] = {}
    rows = []
    for each in made:
        seen[each.run.version] = seen.get(each.run.version, -1) + 1
        if seen[each.run.version] % 2:
            rows.append(each)
    return rows


def pairs(made: Iterable[Prediction]) -> Iterator[tuple[Prediction, Prediction]]:
    """Yield the colocated and the split run of the same model, devices, version and limits."""
    groups: dict[tuple[str, ...], list[Prediction]] = {}
    for each in made:
        key = tuple(
            each.run.fields[name] for name in ("framework", "version", "gpu", "gpus", "model", "algorithm", "max_len")
        )
        groups.setdefault((*key, each.run.fields["precision"]), []).append(each)
    for group in groups.values():
        shared = [each for each in group if not each.run.is_split]
        yield from ((shared[0], each) for each in group if each.run.is_split and shared)


NEIGHBOURS = 10
"""Of each row, in the estimate of what no function explains."""


def explainable(columns: Iterable[Iterable[float]], values: Iterable[float]) -> float:
    """Return the share of the variance of values that any smooth function of columns explains: one less the share of noise.

    Half the mean squared difference of values from those of the k-th nearest row, against its mean squared distance, is a line
    whose intercept is the variance of the noise (the Gamma test: Evans and Jones, Proc. R. Soc. A 458, 2002). Columns count in
    units of their deviations.
    """
    measured, table = _arrays(columns, values)
    table = table[:, table.std(axis=0) > 0]
    table = (table - table.mean(axis=0)) / table.std(axis=0)
    squares = ((table[:, None, :] - table[None, :, :]) ** 2).sum(axis=2)
    np.fill_diagonal(squares, math.inf)
    nearest = np.argsort(squares, axis=1, kind="stable")[:, :NEIGHBOURS]
    distances = np.take_along_axis(squares, nearest, axis=1).mean(axis=0)
    halves = ((measured[nearest] - measured[:, None]) ** 2).mean(axis=0) / 2
    noise = float(np.polyfit(distances, halves, 1)[1])
    return 1 - noise / float(measured.var())


def unseen_r_squared(columns: Iterable[Iterable[float]], values: Iterable[float]) -> float:
    """Return the share of the variance of every second value that boosted trees explain that were fitted on the others."""
    measured, table = _arrays(columns, values)
    trees = HistGradientBoostingRegressor(
        max_iter=100, learning_rate=0.05, max_leaf_nodes=8, min_samples_leaf=10, random_state=0
    ).fit(table[::2], measured[::2])
    rest = measured[1::2]
    return float(1 - ((rest - trees.predict(table[1::2])) ** 2).sum() / ((rest - rest.mean()) ** 2).sum())


def _arrays(columns: Iterable[Iterable[float]], values: Iterable[float]) -> tuple[FloatArray, FloatArray]:
    table = np.column_stack([np.array(list(column), dtype=np.float64) for column in columns])
    return np.array(list(values), dtype=np.float64), table


def r_squared(columns: Iterable[Iterable[float]], values: Iterable[float]) -> float:
    """Return the share of the variance of values that a linear function of columns explains."""
    measured, table = _arrays(columns, values)
    table = np.column_stack([np.ones(len(measured)), table])
    predicted = table @ np.linalg.lstsq(table, measured, rcond=None)[0]
    return float(1 - ((measured - predicted) ** 2).sum() / ((measured - measured.mean()) ** 2).sum())
