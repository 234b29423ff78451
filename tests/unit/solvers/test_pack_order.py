"""Packs through pipelines: the replay with seconds by micro-batch, and orders against all permutations."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from meshwright.cost_models.pipeline.replay import PipelineShape, makespan_s
from meshwright.schema import ConfigError
from meshwright.solvers.batch_groups.pack_order import UnequalReplay, order_packs

SECONDS = np.array([[1.0, 1.2, 0.9], [1.1, 1.3, 1.0], [0.9, 1.0, 1.1]])


def replay_of(schedule: str, count: int, *, num_model_chunks: int = 1) -> UnequalReplay:
    seconds = np.concatenate([SECONDS] * num_model_chunks, axis=1)
    shape = PipelineShape(schedule=schedule, pp=3, num_model_chunks=num_model_chunks, num_microbatches=count)
    return UnequalReplay(shape, seconds)


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("gpipe", 1), ("1f1b", 2), ("zb-h1", 1)])
def test_equal_packs_take_what_the_replay_says(schedule: str, chunks: int) -> None:
    replay = replay_of(schedule, 6, num_model_chunks=chunks)
    assert replay.makespan_s([1.0] * 6) == pytest.approx(makespan_s(replay.shape, *replay.seconds))
    assert replay.makespan_s([2.0] * 6) == pytest.approx(2 * makespan_s(replay.shape, *replay.seconds))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_orders_are_the_best_of_few_packs_and_nearly_so_of_more(schedule: str) -> None:
    few, more = replay_of(schedule, 5), replay_of(schedule, 7)
    for seed in range(4):
        factors = np.random.default_rng(seed).lognormal(0, 0.5, 7).tolist()
        for replay, tolerance in ((few, 1e-9), (more, 0.02)):
            given = factors[: replay.shape.num_microbatches]
            answer = order_packs(given, replay)
            assert sorted(answer.pipelines[0]) == list(range(len(given)))
            assert answer.seconds == pytest.approx(replay.makespan_s([given[pack] for pack in answer.pipelines[0]]))
            orders = itertools.islice(itertools.permutations(given), 0, None, 1 if replay is few else 17)
            assert answer.seconds <= min(map(replay.makespan_s, orders)) * (1 + tolerance)


def test_pipelines_get_packs_of_even_work() -> None:
    replay = replay_of("1f1b", 8)
    factors = np.random.default_rng(1).lognormal(0, 0.4, 32).tolist()
    answer = order_packs(factors, replay, num_pipelines=4)
    assert sorted(itertools.chain(*answer.pipelines)) == list(range(32))
    work = [sum(factors[pack] for pack in packs) for packs in answer.pipelines]
    assert max(work) / min(work) <= 1.05
    as_given = max(replay.makespan_s(factors[first : first + 8]) for first in range(0, 32, 8))
    assert answer.seconds < as_given
    for wrong in (factors[:-1], [0.0, *factors[1:]]):
        with pytest.raises(ConfigError):
            order_packs(wrong, replay, num_pipelines=4)
