"""Batches of unequal lengths: against brute force, laws of schedules and bounds, and FlexSP's answers."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.schema.batch import SequenceCosts
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


def _parts(mask: int) -> Iterator[int]:
    """Subsets of a set that hold its lowest member."""
    lowest = mask & -mask
    rest = part = mask ^ lowest
    while True:
        yield part | lowest
        if not part:
            return
        part = (part - 1) & rest


class _Enumeration:
    """Every schedule of few sequences, one after the other: sequences as bits, nothing left out and nothing bounded."""

    def __init__(self, instance: BatchInstance) -> None:
        self.instance = instance
        sets = range(1 << len(instance.lengths))
        members = [[s for s in range(len(instance.lengths)) if mask >> s & 1] for mask in sets]
        self.groups = [
            [
                (degree, float(instance.seconds[idxs, column].sum()))
                for column, degree in enumerate(instance.degrees)
                if instance.lengths[idxs].sum() <= instance.tokens_per_rank * degree
            ]
            for idxs in members
        ]

    def micro_batch_s(self, mask: int, ranks: int) -> float:
        """The least seconds of a micro-batch of these sequences, over all ways to make groups of them."""
        if not mask:
            return 0.0
        best = math.inf
        for part in _parts(mask):
            for degree, seconds in self.groups[part]:
                if degree <= ranks:
                    best = min(best, max(seconds, self.micro_batch_s(mask ^ part, ranks - degree)))
        return best

    def waiting_s(self) -> float:
        """The objective (O)."""
        instance = self.instance
        known = [self.micro_batch_s(mask, instance.num_ranks) for mask in range(1 << len(instance.lengths))]

        def rest_s(mask: int) -> float:
            options = (known[part] + instance.fixed_s + rest_s(mask ^ part) for part in _parts(mask))
            return min(options) if mask else 0.0

        return rest_s((1 << len(instance.lengths)) - 1)

    def meeting_once_s(self) -> float:
        """The objective (O'): over all ways to make groups and to give each an aligned block, the busiest rank."""
        instance = self.instance

        def busiest_s(mask: int, loads: tuple[float, ...]) -> float:
            if not mask:
                return max(loads)
            best = math.inf
            for part in _parts(mask):
                for degree, seconds in self.groups[part]:
                    for first in range(0, len(loads) - degree + 1, degree):
                        after = tuple(
                            load + (seconds + instance.fixed_s) * (first <= rank < first + degree)
                            for rank, load in enumerate(loads)
                        )
                        if max(after) < best:
                            best = min(best, busiest_s(mask ^ part, after))
            return best

        return busiest_s((1 << len(instance.lengths)) - 1, (0.0,) * instance.num_ranks)


@pytest.mark.long
def test_few_sequences_are_scheduled_as_by_brute_force() -> None:
    """Both objectives, up to 6 sequences on up to 4 ranks, 200 instances of each."""
    for seed in range(200):
        rng = np.random.default_rng(seed)
        lengths = np.minimum(rng.lognormal(8, 1.2, size=rng.integers(1, 7)).astype(int) + 1, 24_000).tolist()
        ranks, tokens, fixed = int(rng.choice([3, 4, 4, 4])), int(rng.integers(12_000, 18_000)), rng.uniform(0, 700)
        instance = _instance(lengths, ranks=ranks, tokens=tokens if ranks == 3 else tokens // 2, fixed=float(fixed))
        instances = (instance, replace(instance, waits=False))
        expected = (_Enumeration(instance).waiting_s(), _Enumeration(instance).meeting_once_s())
        for each, seconds in zip(instances, expected, strict=True):
            answer = schedule_batch(each)
            assert check_batch(each, answer) == []
            assert answer.seconds == pytest.approx(seconds, rel=1e-9)
            assert answer.bound_seconds <= answer.seconds * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60_000), min_size=1, max_size=80),
    ranks=st.sampled_from([1, 2, 6, 8, 16]),
    tokens=st.integers(8_192, 20_000),
    fixed=st.floats(0, 1_000),
    waits=st.booleans(),
)
def test_every_schedule_keeps_the_constraints_and_is_not_below_the_bound(
    lengths: list[int], ranks: int, tokens: int, fixed: float, waits: bool
) -> None:
    largest = 2 ** (ranks.bit_length() - 1) * tokens
    if max(lengths) > largest:
        with pytest.raises(InfeasibleError, match=r"\(C2\)"):
            _instance(lengths, ranks=ranks, tokens=tokens, fixed=fixed)
        return
    instance = replace(_instance(lengths, ranks=ranks, tokens=tokens, fixed=fixed), waits=waits)
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


def test_ranks_that_meet_once_are_busy_more_evenly() -> None:
    """Nobody waits for a group: blocks of later rounds are within those of earlier ones, and long batches take less."""
    lengths = np.minimum(np.random.default_rng(3).lognormal(7.5, 1.3, 300).astype(int) + 1, 40_000).tolist()
    instance = replace(_instance(lengths, ranks=16, tokens=8_192, fixed=100.0), waits=False)
    answer = schedule_batch(instance)
    assert check_batch(instance, answer) == []
    size_of: dict[int, int] = {}
    for group in (group for groups in answer.micro_batches for group in groups):
        for rank in range(group.first, group.first + group.size):
            assert group.size <= size_of.get(rank, group.size)
            size_of[rank] = group.size
    assert answer.seconds <= 1.01 * schedule_batch(replace(instance, waits=True)).seconds
    assert answer.seconds <= 1.1 * answer.bound_seconds


def test_extreme_batches() -> None:
    ones = _instance([1] * 1_000, ranks=8, tokens=512, fixed=0.0)
    assert schedule_batch(ones).seconds == pytest.approx(lower_bound_s(ones), rel=1e-6)
    dominated = _instance([50_000, *[100] * 20], ranks=8, tokens=8_192, fixed=10.0)
    answer = schedule_batch(dominated)
    assert check_batch(dominated, answer) == []
    assert answer.seconds <= 1.2 * answer.bound_seconds
    for extreme in (ones, dominated):
        assert check_batch(replace(extreme, waits=False), schedule_batch(replace(extreme, waits=False))) == []
    one_by_one = _instance(
        [100] * 700, ranks=1, tokens=100, fixed=5.0
    )  # a micro-batch for each: no search of 700 deadlines
    assert schedule_batch(one_by_one).seconds == pytest.approx(lower_bound_s(one_by_one), rel=1e-6)
    odd = [60 + idx % 7 for idx in range(40)]  # two are more than a rank holds, although all tokens fit into fewer
    pairs = _instance(odd, ranks=2, tokens=100, fixed=5.0)
    assert pairs.min_micro_batches < len(schedule_batch(pairs).micro_batches) == 20
    for wrong in ([], [0], [5, -1]):
        with pytest.raises(ConfigError):
            _instance(wrong, ranks=2, tokens=10, fixed=0.0)
    with pytest.raises(ConfigError, match="would take no time"):
        SequenceCosts(linear_s=0.0, fixed_s=1.0)


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
