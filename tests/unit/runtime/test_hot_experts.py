"""Which experts are worth a copy on every rank, against every choice, and the slots that their rows go to."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.runtime.models.hot_experts import HotExperts, choose_hot
from meshwright.runtime.training.options import TrainOptions, prepare_options
from meshwright.schema import ConfigError, Layout
from meshwright.schema.layers import MoE
from small_jobs import small_plan


def moved_bytes(
    load: list[int], hot: tuple[int, ...], num_ranks: int, rows: float, row_bytes: float, expert_bytes: float
) -> float:
    """Count what the rank with most moves, expert by expert."""
    per_rank = len(load) // num_ranks
    tokens, copies = [], []
    for rank in range(num_ranks):
        stored = range(rank * per_rank, (rank + 1) * per_rank)
        travels = sum(load[e] for e in stored if e not in hot) / sum(load) * rows
        tokens.append(4 * row_bytes * travels * (num_ranks - 1) / num_ranks)
        sent = (num_ranks - 1) * sum(e in hot for e in stored)
        copies.append(max(sent, sum(e not in stored for e in hot)))
    return max(tokens) + 2 * expert_bytes * max(copies)


@settings(max_examples=60)
@given(
    load=st.lists(st.integers(0, 100), min_size=6, max_size=6).filter(any),
    num_ranks=st.sampled_from([2, 3]),
    expert_bytes=st.floats(0, 1e4),
    max_hot=st.integers(0, 6),
)
def test_no_other_number_of_the_hottest_moves_less(
    load: list[int], num_ranks: int, expert_bytes: float, max_hot: int
) -> None:
    chosen = choose_hot(load, num_ranks, rows=600, row_bytes=8, expert_bytes=expert_bytes, max_hot=max_hot)
    order = sorted(range(6), key=lambda expert: (-load[expert], expert))
    prefixes = [tuple(order[:count]) for count in range(max_hot + 1)]
    assert set(chosen) in [set(prefix) for prefix in prefixes]
    best = min(moved_bytes(load, hot, num_ranks, 600, 8, expert_bytes) for hot in prefixes)
    assert moved_bytes(load, chosen, num_ranks, 600, 8, expert_bytes) == pytest.approx(best)


def test_heavy_experts_stay_and_weightless_ones_all_stand_everywhere() -> None:
    load = [10, 1, 1, 1]
    assert choose_hot(load, 2, rows=100, row_bytes=8, expert_bytes=1e9, max_hot=4) == ()
    assert choose_hot(load, 2, rows=100, row_bytes=8, expert_bytes=0, max_hot=4) == (0, 1, 2, 3)
    assert choose_hot(load, 2, rows=100, row_bytes=8, expert_bytes=200, max_hot=4) == (0,)
    assert choose_hot([0, 0], 2, rows=100, row_bytes=8, expert_bytes=1, max_hot=4) == ()


@pytest.mark.parametrize("hot", [(2,), (0, 5), (0, 1, 2, 3, 4, 5)])
def test_rows_of_hot_experts_stay_and_others_go_where_they_are_stored(hot: tuple[int, ...]) -> None:
    for rank, expert in itertools.product(range(3), range(6)):
        slots = HotExperts(hot, 6, 3, rank)
        slot = int(slots.slot_of_rows(torch.tensor([expert]), torch.zeros(6))[0])
        assert slots.experts[slot] == expert
        assert slot // (2 + len(hot)) == (rank if expert in hot else expert // 2)


@pytest.mark.parametrize(("ep", "compiles", "said"), [(1, False, "with ep 1"), (2, True, "with --compile")])
def test_what_hot_experts_cannot_go_with_is_refused(ep: int, compiles: bool, said: str) -> None:
    plan = small_plan(Layout(dp_shard=2, ep=ep), experts=MoE(num_experts=4, top_k=2, ffn_dim=16))
    with pytest.raises(ConfigError, match=said):
        prepare_options(plan, TrainOptions(hot_experts=True, compile_blocks=compiles))
