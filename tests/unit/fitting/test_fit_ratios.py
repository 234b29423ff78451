"""The spread of ratios: known errors are found again, and intervals cover what they say."""

from __future__ import annotations

import numpy as np
import pytest
from meshwright.cost_models.stage.interval import KINDS
from meshwright.fitting.ratios import COVERED, coverage, fit_sd
from meshwright.schema import Layout
from meshwright.schema.layout_table import LayoutTable
from meshwright.validation.decisions import Group, choose_by, choose_naively

LAYOUTS = [
    Layout(dp_shard=16 // tp // pp, tp=tp, pp=pp, micro_batch_size=micro)
    for tp in (1, 2, 4) for pp in (1, 2) for micro in (1, 2, 4)
]  # fmt: skip


def groups(sd_tp: float, sd_noise: float, count: int = 60) -> list[Group]:
    """Groups in which every doubling of tp is off by one amount, and every run by another one."""
    random, table = np.random.default_rng(0), LayoutTable.from_layouts(LAYOUTS, 64)
    made = []
    for idx in range(count):
        off = np.log2(table.tp) * random.laplace(0, sd_tp / np.sqrt(2)) + random.normal(
            0, sd_noise / np.sqrt(2), len(table)
        )
        measured_s = random.uniform(1, 2, len(table))
        made.append(
            Group(f"source {idx % 4}", table, measured_s * np.exp(off), measured_s, np.ones(len(table), dtype=bool))
        )
    return made


def test_known_errors_are_found_and_covered() -> None:
    some = groups(0.15, 0.03)
    sd = fit_sd(some)
    assert 0.1 < sd["tp"] < 0.25
    assert sd["pp"] < 0.05
    assert sd["micro_batch"] < 0.05
    covered = np.mean([coverage(group, sd) for group in groups(0.15, 0.03, count=90)[60:]], axis=0)
    assert covered == pytest.approx(COVERED, abs=0.15)


def test_regret_is_that_of_the_choice() -> None:
    table = LayoutTable.from_layouts([Layout(dp_shard=8), Layout(tp=8)], 64)
    group = Group("a", table, np.array([1.02, 1.0]), np.array([1.0, 1.25]), np.ones(2, dtype=bool))
    sd = dict.fromkeys(KINDS, 0.1)
    assert choose_by(group, sd, 0.5) == 1
    assert choose_by(group, sd, 0.667) == choose_naively(group) == 0
    assert group.regret(1) == pytest.approx(0.2)
    assert group.regret(0) == 0
