"""Advantages and losses against their definitions, token by token."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.runtime.rl.losses import (
    group_advantages,
    importance_ratios,
    policy_losses,
    taught,
    token_advantages,
    value_losses,
)
from meshwright.schema.rl import RlLoss

numbers = st.floats(-3, 3, allow_nan=False, width=32)


@settings(max_examples=50, deadline=None)
@given(st.lists(numbers, min_size=4, max_size=4), numbers, st.floats(0.5, 2))
def test_group_advantages_do_not_depend_on_shift_or_scale(rewards: list[float], shift: float, scale: float) -> None:
    if torch.tensor(rewards).std() < 0.1:
        return
    one = group_advantages(rewards, 4)
    other = group_advantages([scale * reward + shift for reward in rewards], 4)
    assert one == pytest.approx(other, abs=1e-3) and sum(one) == pytest.approx(0, abs=1e-6)


def test_groups_are_compared_within_and_equal_rewards_teach_nothing() -> None:
    values = group_advantages([0, 1, 5, 5, 7, 9], 2)
    assert values[2:4] == [0, 0] and values[:2] == pytest.approx(values[4:], abs=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(numbers, min_size=1, max_size=5), min_size=2, max_size=4), st.floats(0.5, 1), st.floats(0, 1))
def test_token_advantages_are_the_sum_of_the_definition(values: list[list[float]], gamma: float, trace: float) -> None:
    loss = RlLoss(discount=gamma, trace=trace)
    rewards = [float(idx) for idx in range(len(values))]
    expected = []
    for reward, row in zip(rewards, values, strict=True):
        deltas = [
            (reward if t == len(row) - 1 else 0.0) + gamma * (row[t + 1] if t + 1 < len(row) else 0.0) - row[t]
            for t in range(len(row))
        ]
        expected.append(
            [sum((gamma * trace) ** k * deltas[t + k] for k in range(len(row) - t)) for t in range(len(row))]
        )
    advantages, returns = token_advantages(rewards, values, loss)
    for row, known, of in zip(returns, values, expected, strict=True):
        assert row == pytest.approx([a + v for a, v in zip(of, known, strict=True)], abs=1e-5)
    flat = torch.tensor([a for row in advantages for a in row])
    assert abs(float(flat.mean())) < 1e-4


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(numbers, numbers, numbers, numbers), min_size=1, max_size=6))
def test_policy_loss_is_the_clipped_one_of_each_token(rows: list[tuple[float, float, float, float]]) -> None:
    loss = RlLoss(clip=0.2, reference_weight=0.1)
    p, old, a, q = (torch.tensor(column) for column in zip(*rows, strict=True))
    result = policy_losses(p, old, a, loss, q)
    for idx, (one, before, advantage, reference) in enumerate(rows):
        ratio = math.exp(one - before)
        surrogate = min(ratio * advantage, max(min(ratio, 1.2), 0.8) * advantage)
        apart = reference - one
        assert float(result[idx]) == pytest.approx(-surrogate + 0.1 * (math.exp(apart) - apart - 1), rel=1e-4, abs=1e-4)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=5), st.floats(1, 5))
def test_importance_ratios_are_quotients_up_to_the_cap(rows: list[tuple[float, float]], cap: float) -> None:
    now, drawn = zip(*rows, strict=True)
    expected = torch.minimum((torch.tensor(now) - torch.tensor(drawn)).exp(), torch.tensor(cap))
    assert importance_ratios(now, drawn, cap) == pytest.approx(expected.tolist(), rel=1e-5)


def test_importance_ratios_make_expectations_those_of_the_newer_weights() -> None:
    torch.manual_seed(0)
    old, new = torch.randn(5).log_softmax(0), torch.randn(5).log_softmax(0)
    tokens = torch.multinomial(old.exp(), 200_000, replacement=True)
    ratios = torch.tensor(importance_ratios(new[tokens].tolist(), old[tokens].tolist(), 1e9))
    values = torch.arange(5.0)
    assert float((ratios * values[tokens]).mean()) == pytest.approx(float((new.exp() * values).sum()), rel=0.02)


def test_the_gradient_is_the_policy_gradient_and_ends_where_the_ratio_is_clipped() -> None:
    p = torch.tensor([-1.0, -1.0, -0.2], requires_grad=True)
    old, advantages = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([2.0, -3.0, 2.0])
    policy_losses(p, old, advantages, RlLoss(clip=0.2)).sum().backward()
    assert p.grad is not None and p.grad.tolist() == pytest.approx([-2.0, 3.0, 0.0])


def test_value_loss_takes_the_worse_of_moved_and_clipped() -> None:
    loss = RlLoss(value_weight=1.0, value_clip=0.2)
    values, old, returns = torch.tensor([1.0, 0.1]), torch.tensor([0.0, 0.0]), torch.tensor([1.0, 1.0])
    assert value_losses(values, old, returns, loss).tolist() == pytest.approx([0.5 * 0.8**2, 0.5 * 0.9**2])


def test_a_teacher_adds_its_log_probability_less_the_actors_to_the_advantage_of_each_token() -> None:
    assert taught([1.0, -1.0], [-2.0, -0.5], [-1.0, -3.0], RlLoss(teacher_weight=0.5)) == [1.5, -2.25]
    assert taught([1.0], [-2.0], [-1.0], RlLoss()) == [1.0]
