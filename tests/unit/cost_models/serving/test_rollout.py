"""Rollouts: the grid against the sum over every step, waiting for slots, responses that are carried over."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.cost_models.serving.instance_model import InstanceModel
from meshwright.cost_models.serving.rollout import concurrent_rows, rollout, steady_rollout, stratified
from meshwright.schema.batch import Lengths
from meshwright.schema.rl import lengths_of_mean


class LinearSteps:
    """A step costs something by itself, by row, by token attended to and by token of a prompt."""

    def seconds(self, rows: Any, cached: Any, tokens: Any = 0, context: Any = 0, *, prompts: Any = 0) -> Any:
        return 0.01 + 1e-4 * np.asarray(rows) + 1e-8 * np.asarray(cached) + 1e-5 * np.asarray(tokens)


def model(max_batch: float = 64, cache: float = np.inf) -> InstanceModel:
    return InstanceModel(steps=LinearSteps(), max_batch=max_batch, cache_tokens=cache, max_batched_tokens=2048)


def every_step(lengths: np.ndarray, prompt_len: float, rows: int) -> float:
    """Decode step by step: the definition."""
    waiting, running, seconds = list(lengths), [], 0.0
    while waiting or running:
        while waiting and len(running) < rows:
            running.append([waiting.pop(0), 0.0])
        cached = sum(prompt_len + done + 0.5 for _, done in running)
        seconds += float(LinearSteps().seconds(len(running), cached))
        running = [[length, done + 1] for length, done in running if done + 1 < length]
    return seconds


@pytest.mark.parametrize("rows", [8, 40, 200])
def test_the_grid_is_within_a_hundredth_of_the_sum_over_every_step(rows: int) -> None:
    lengths = stratified(lengths_of_mean(120, 512), 150)
    answer, done = rollout(model(), lengths, 50.0, rows=rows)
    assert answer.decode_s == pytest.approx(every_step(lengths, 50.0, rows), rel=0.01)
    assert (done == lengths).all()


def test_the_longest_response_decides_where_all_run_at_once() -> None:
    short, long = Lengths(lengths=(100,), counts=(1,)), Lengths(lengths=(100, 2000), counts=(63, 1))
    alike = steady_rollout(model(), short, 10, 64)
    tailed = steady_rollout(model(), long, 10, 64)
    assert tailed.steps == 2000 and tailed.seconds > 10 * alike.seconds


def test_the_longest_of_many_responses_is_expected_on_a_lane_with_few_of_them() -> None:
    lengths = lengths_of_mean(1000, 100_000)
    few, many = (stratified(lengths, 16, among=count).max() for count in (16, 4096))
    drawn = np.random.default_rng(0).choice(
        lengths.lengths, (400, 4096), p=np.array(lengths.counts) / sum(lengths.counts)
    )
    assert few < many == pytest.approx(np.median(drawn.max(axis=1)), rel=0.1)


def test_carried_over_responses_give_more_samples_a_second_where_lengths_have_a_tail() -> None:
    lengths = lengths_of_mean(200, 2048, sigma=1.0)
    waiting = steady_rollout(model(max_batch=256), lengths, 50, 64)
    carrying = steady_rollout(model(max_batch=256), lengths, 50, 64, oversample=1.5)
    assert carrying.seconds < waiting.seconds / 1.15


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 200), st.integers(1, 64), st.integers(20, 400))
def test_more_concurrent_rows_take_no_more_steps_and_more_samples_no_less(count: int, rows: int, mean: int) -> None:
    lengths = stratified(lengths_of_mean(mean, 800), count)
    few, many = rollout(model(), lengths, 5.0, rows=rows)[0], rollout(model(), lengths, 5.0, rows=2 * rows)[0]
    assert many.steps <= few.steps * (1 + 1e-9) + lengths.max()
    more = rollout(model(), np.concatenate([lengths, lengths]), 5.0, rows=rows)[0]
    assert more.steps >= few.steps - 1e-9


def test_responses_to_one_prompt_share_its_pass() -> None:
    lengths = np.full(32, 100.0)
    alone, shared = (rollout(model(), lengths, 512.0, rows=32, shared_prompts=n)[0] for n in (1, 16))
    assert shared.prompt_s < alone.prompt_s / 8 and shared.decode_s == alone.decode_s


def test_the_cache_limits_rows() -> None:
    lengths = Lengths(lengths=(1000,), counts=(1,))
    assert concurrent_rows(model(cache=6000.0), lengths, 100) == 10
    assert concurrent_rows(model(max_batch=4), lengths, 100) == 4
