"""Batches of unequal lengths: against brute force, laws of schedules and bounds, and FlexSP's answers."""

from __future__ import annotations

import csv
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.schema.errors import ConfigError, InfeasibleError
from meshwright.solvers.batch_groups import BatchInstance, check_batch, lower_bound_s, schedule_batch

LENGTHS = Path(__file__).parents[3] / "../shared/data/variable_length"

# The cost model of FlexSP's published run, as the README beside the data states it: ms of a group of d GPUs.
_LINK = {2: 119.54, 4: 104.07, 8: 96.5, 16: 10.33, 32: 5.94, 64: 4.87}


def _flexsp_ms(lengths: np.ndarray, degree: int) -> np.ndarray:
    exchange = 2 * lengths * 4 * 2 * 32 * 4096 / 2**20 / degree / _LINK[degree] if degree > 1 else 0.0
    return (5.128e-6 * lengths**2 + 0.1839576 * lengths) / degree + exchange


def _instance(lengths: list[int], *, ranks: int, tokens: int, fixed: float) -> BatchInstance:
    return BatchInstance.of(lengths, _flexsp_ms, num_ranks=ranks, tokens_per_rank=tokens, fixed_s=fixed)


def _partitions(items: list[int]) -> Iterator[list[list[int]]]:
    if not items:
        yield []
        return
    for rest in _partitions(items[1:]):
        yield [[items[0]], *rest]
        for idx, part in enumerate(rest):
            yield [*rest[:idx], [items[0], *part], *rest[idx + 1 :]]


def _micro_batch_s(instance: BatchInstance, members: tuple[int, ...]) -> float:
    """Return the least seconds of a micro-batch of these sequences, over all groups and degrees."""
    best = math.inf
    for groups in _partitions(list(members)):
        for columns in itertools.product(range(len(instance.degrees)), repeat=len(groups)):
            sizes = [instance.degrees[column] for column in columns]
            if sum(sizes) > instance.num_ranks:
                continue
            if any(
                instance.lengths[group].sum() > instance.tokens_per_rank * size
                for group, size in zip(groups, sizes, strict=True)
            ):
                continue
            slowest = max(instance.seconds[group, column].sum() for group, column in zip(groups, columns, strict=True))
            best = min(best, float(slowest))
    return best


def _by_brute_force(instance: BatchInstance) -> float:
    known: dict[tuple[int, ...], float] = {}
    best = math.inf
    for micro_batches in _partitions(list(range(len(instance.lengths)))):
        total = 0.0
        for members in map(tuple, map(sorted, micro_batches)):
            if members not in known:
                known[members] = _micro_batch_s(instance, members)
            total += known[members] + instance.fixed_s
        best = min(best, total)
    return best


@pytest.mark.parametrize("seed", range(12))
def test_few_sequences_are_scheduled_as_by_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.lognormal(8, 1.2, size=rng.integers(1, 6)).astype(int) + 1, 24_000).tolist()
    instance = _instance(lengths, ranks=4, tokens=int(rng.integers(6_000, 9_000)), fixed=float(rng.uniform(0, 700)))
    answer = schedule_batch(instance)
    assert check_batch(instance, answer) == []
    assert answer.seconds == pytest.approx(_by_brute_force(instance), rel=1e-9)
    assert answer.bound_seconds <= answer.seconds * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60_000), min_size=1, max_size=80),
    ranks=st.sampled_from([1, 2, 6, 8, 16]),
    tokens=st.integers(8_192, 20_000),
    fixed=st.floats(0, 1_000),
)
def test_every_schedule_keeps_the_constraints_and_is_not_below_the_bound(
    lengths: list[int], ranks: int, tokens: int, fixed: float
) -> None:
    largest = 2 ** (ranks.bit_length() - 1) * tokens
    if max(lengths) > largest:
        with pytest.raises(InfeasibleError, match=r"\(C2\)"):
            _instance(lengths, ranks=ranks, tokens=tokens, fixed=fixed)
        return
    instance = _instance(lengths, ranks=ranks, tokens=tokens, fixed=fixed)
    answer = schedule_batch(instance)
    assert check_batch(instance, answer) == []
    assert lower_bound_s(instance) <= answer.seconds * (1 + 1e-9)
    assert schedule_batch(instance).micro_batches == answer.micro_batches


def test_check_names_what_is_wrong() -> None:
    instance = _instance([4_000, 4_000, 9_000], ranks=2, tokens=9_000, fixed=1.0)
    answer = schedule_batch(instance)
    twice = type(answer)((*answer.micro_batches, answer.micro_batches[0]), answer.seconds, 0.0, 0.0)
    assert any("(C1)" in text for text in check_batch(instance, twice))
    assert any("(O)" in text for text in check_batch(instance, twice))


def test_extreme_batches() -> None:
    ones = _instance([1] * 1_000, ranks=8, tokens=512, fixed=0.0)
    assert schedule_batch(ones).seconds == pytest.approx(lower_bound_s(ones), rel=1e-6)
    dominated = _instance([50_000, *[100] * 20], ranks=8, tokens=8_192, fixed=10.0)
    answer = schedule_batch(dominated)
    assert check_batch(dominated, answer) == []
    assert answer.seconds <= 1.2 * answer.bound_seconds
    for wrong in ([], [0], [5, -1]):
        with pytest.raises(ConfigError):
            _instance(wrong, ranks=2, tokens=10, fixed=0.0)


@pytest.mark.skipif(not LENGTHS.exists(), reason="needs ../shared/data/variable_length")
def test_batches_of_flexsp_are_faster_than_its_answers_and_near_the_bound() -> None:
    with (LENGTHS / "flexsp_results.csv").open() as file:
        results = {row["batch"]: row for row in csv.DictReader(file)}
    ratios = []
    for batch in json.loads((LENGTHS / "batches.json").read_text()):
        if batch["name"] not in results:
            continue
        row = results[batch["name"]]
        lengths = [-(-length // 128) * 128 for length in batch["lengths"]]
        instance = _instance(lengths, ranks=batch["gpus"], tokens=int(row["device_token_capacity"]), fixed=629.3563)
        answer = schedule_batch(instance)
        assert check_batch(instance, answer) == []
        assert answer.seconds <= min(float(row["flexsp_ms"]), float(row["adaptive_ms"]))
        assert answer.bound_seconds >= float(row["lower_bound_ms"]) - 0.1
        ratios.append(answer.seconds / float(row["lower_bound_ms"]))
    assert len(ratios) == 6
    assert np.mean(ratios) <= 1.06
    assert max(ratios) <= 1.15
