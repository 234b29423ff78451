"""Fit how far ratios of two layouts' step times are off ([ratio.sd]), and score choices that are made by it.

Rows that differ in nothing but their layout are a decision group. Every pair of its rows gives one error of log(time ratio); the
standard deviations of `cost_models.stage.interval` are the most likely ones under a Laplace distribution, with a prior that decides
where no pair says anything. Sources weigh alike (those with fewer than three groups in proportion), in them groups, in these
pairs. Runs that stalled between nodes are in no group.

What is reported of a source comes from values that were fitted on the other sources.
"""

from __future__ import annotations

from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from scipy.optimize import minimize

from ..cost_models.stage.interval import KINDS, margin
from ..schema.units import FloatArray
from ..validation.decisions import Group, choose_by, choose_naively, decision_groups
from ..validation.predict import predict
from ..validation.rows import read_runs

PRIOR = dict.fromkeys(KINDS, 0.08) | {"noise": 0.03, "schedule": 0.05}
"""Where no pair says anything: between what tensor and pipeline parallelism have."""

PRIOR_WEIGHT = 0.01
MANY_GROUPS = 3
LARGE_SOURCE = 15
"""Groups of a source that stands apart in the report."""

COVERED = (0.5, 0.8, 0.9)
PROBABILITIES = (0.5, 0.6, 0.65, 0.667, 0.7, 0.75, 0.8, 0.9)

Sd = dict[str, float]


def fit_sd(groups: Iterable[Group]) -> Sd:
    """Return the most likely standard deviation of each kind of difference."""
    groups = list(groups)
    count = Counter(group.source for group in groups)
    pairs = [group.pairs() for group in groups]
    weights = [
        np.full(len(error), min(1.0, count[group.source] / MANY_GROUPS) / count[group.source] / len(error))
        for group, (_, error) in zip(groups, pairs, strict=True)
    ]
    between, error = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
    weight = np.concatenate(weights) / sum(map(np.sum, weights))
    prior = np.log([PRIOR[kind] for kind in KINDS])

    def loss(log_sd: FloatArray) -> float:
        scale = np.sqrt(between @ np.exp(2 * log_sd) / 2)
        likely = weight @ (np.log(2 * scale) + np.abs(error) / scale)
        return float(likely + PRIOR_WEIGHT * np.sum((log_sd - prior) ** 2))

    fit = minimize(loss, prior, method="L-BFGS-B")
    return dict(zip(KINDS, np.exp(fit.x).tolist(), strict=True))


def coverage(group: Group, sd: Mapping[str, float]) -> list[float]:
    """Return the part of the pairs whose error is inside each of the intervals COVERED."""
    between, error = group.pairs()
    of_pair = np.sqrt(between @ np.square([sd[kind] for kind in KINDS]))
    return [float(np.mean(np.abs(error) <= margin(of_pair, 0.5 + part / 2))) for part in COVERED]


def report(options: Namespace) -> str:
    """Return the lines of coefficients.toml; coverage by source and regrets by probability, fitted on the other sources."""
    rows = [row for row in read_runs(options.runs) if row.decision_group]
    groups = decision_groups(rows, predict(rows))
    lines = ["[ratio.sd]", *(f"{kind} = {value:.3f}" for kind, value in fit_sd(groups).items()), ""]
    sources = list(dict.fromkeys(group.source for group in groups))
    sd_of = {source: fit_sd(group for group in groups if group.source != source) for source in sources}
    for source in sources:
        parts = np.array([coverage(group, sd_of[source]) for group in groups if group.source == source])
        covered = " ".join(
            f"{100 * part:.0f} %: {100 * value:.0f}" for part, value in zip(COVERED, parts.mean(axis=0), strict=True)
        )
        lines.append(f"# {source}, {len(parts)} groups, inside intervals of {covered}")
    everywhere = np.array([coverage(group, sd_of[group.source]) for group in groups])
    lines += [f"# groups alike: {(100 * everywhere.mean(axis=0)).round()}", ""]
    for probability in PROBABILITIES:
        chosen = [choose_by(group, sd_of[group.source], probability) for group in groups]
        lines.append(_regrets(f"probability {probability:g}", groups, chosen))
    lines.append(_regrets("naive", groups, [choose_naively(group) for group in groups]))
    return "\n".join(lines) + "\n"


def _regrets(name: str, groups: Sequence[Group], chosen: Sequence[int]) -> str:
    count = Counter(group.source for group in groups)
    parts: dict[str, list[float]] = defaultdict(list)
    for group, idx in zip(groups, chosen, strict=True):
        parts[group.source if count[group.source] >= LARGE_SOURCE else "others"].append(group.regret(idx))
    summaries = [
        f"{part} ({len(values)}) {100 * np.mean(values):.2f} %, at most {100 * max(values):.1f}"
        for part, values in [*parts.items(), ("all", [value for values in parts.values() for value in values])]
    ]
    return f"# regret, {name}: {'; '.join(summaries)}"
