"""Rows of experts among the slots that hold them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.runtime.models.experts import ExpertSlots
from meshwright.schema import ConfigError
from meshwright.schema.stages import LayerSlots


@settings(max_examples=60)
@given(st.lists(st.integers(0, 30), min_size=3, max_size=3), st.integers(1, 4), st.integers(0, 10**6))
def test_every_row_goes_to_a_slot_of_its_expert_in_proportion_to_shares(rows: list[int], more: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    experts = [0, 1, 2, *torch.randint(0, 3, (more,), generator=generator).tolist()]
    weights = torch.rand(len(experts), generator=generator, dtype=torch.float64) + 0.01
    totals = torch.zeros(3, dtype=torch.float64).index_add(0, torch.tensor(experts), weights)
    shares = (weights / totals[experts]).tolist()
    counts = torch.tensor(rows)
    expert_of_row = torch.arange(3).repeat_interleave(counts)
    slots = ExpertSlots(tuple(experts), tuple(shares), 3).slot_of_rows(expert_of_row, counts)
    assert torch.equal(torch.tensor(experts)[slots], expert_of_row)
    taken = torch.bincount(slots, minlength=len(experts))
    for slot, expert in enumerate(experts):
        assert abs(taken[slot].item() - shares[slot] * rows[expert]) <= 1


@pytest.mark.parametrize(
    ("experts", "shares", "message"),
    [
        ((0, 1), (1.0,), "2 slots need as many shares"),
        ((0, 2), (1.0, 1.0), "must hold each of the experts 0..2"),
        ((0, 1, 1), (1.0, 0.5, 0.4), "the shares of expert 1 add up to 0.9"),
    ],
)
def test_slots_that_lack_something_are_refused(
    experts: tuple[int, ...], shares: tuple[float, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LayerSlots(experts=experts, shares=shares)
