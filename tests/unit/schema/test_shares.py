"""What each data-parallel rank takes of a batch."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from meshwright.schema import Layout, ModelSpec, Workload
from meshwright.schema.engine_facts import ENGINES, PLANNED_ENGINES
from meshwright.schema.layout_rules import ENGINE_RULES, broken_rules, problem_facts
from meshwright.schema.shares import dealt, dealt_by_speed, even_shares, passes_together


@given(total=st.integers(1, 5000), num_ranks=st.integers(1, 300), unit=st.integers(1, 9))
def test_everything_is_dealt_once_and_as_evenly_as_units_allow(total: int, num_ranks: int, unit: int) -> None:
    shares = dealt(total * unit, num_ranks, unit)
    assert sum(shares) == total * unit
    assert max(shares) - min(shares) in (0, unit)
    assert list(shares) == sorted(shares, reverse=True)
    assert max(shares) == unit * -(-total // num_ranks)


@given(total=st.integers(3, 9), seconds=st.lists(st.sampled_from([1.0, 1.5, 2.0, 7.0]), min_size=1, max_size=3))
def test_no_other_deal_ends_sooner(total: int, seconds: list[float]) -> None:
    shares = dealt_by_speed(total, seconds)
    assert sum(shares) == total and min(shares) >= 1
    deals = (d for d in itertools.product(range(1, total + 1), repeat=len(seconds)) if sum(d) == total)
    ends = [max(n * each for n, each in zip(deal, seconds, strict=True)) for deal in deals]
    assert max(n * each for n, each in zip(shares, seconds, strict=True)) == min(ends)


@given(batch=st.integers(1, 2000), dp=st.integers(1, 64), size=st.integers(1, 16), pp=st.sampled_from([1, 2]))
def test_no_rank_takes_more_micro_batches_than_a_valid_layout_says(batch: int, dp: int, size: int, pp: int) -> None:
    layout = Layout(dp_replicate=dp, pp=pp, micro_batch_size=size)
    workload = Workload(seq_len=1024, global_batch_size=batch)
    problem = problem_facts(MODEL, workload, world_size=dp * pp, scaleup_domain=8)
    if broken_rules(layout, problem, ENGINE_RULES):
        return
    shares = even_shares(layout, batch)
    assert min(shares) > 0
    assert -(-max(shares) // size) == layout.num_microbatches(batch)


MODEL = ModelSpec.named("llama-3.1-8b")


@pytest.mark.parametrize("engine", PLANNED_ENGINES)
def test_engines_that_deal_evenly_refuse_a_batch_that_does_not_divide(engine: str) -> None:
    workload = Workload(seq_len=1024, global_batch_size=10, engine=engine)
    problem = problem_facts(MODEL, workload, world_size=4, scaleup_domain=8)
    broken = broken_rules(Layout(dp_replicate=4), problem, ENGINE_RULES)
    assert any("[batch_divides]" in text for text in broken) == (not ENGINES[engine].takes_uneven_shares)


def test_ranks_that_exchange_in_every_pass_run_as_many() -> None:
    alone = [Layout(dp_replicate=2), Layout(dp_shard=2, zero_stage=1), Layout(dp_replicate=2, cp=2, zero_stage=0)]
    together = [
        Layout(dp_shard=2),
        Layout(dp_shard=2, zero_stage=2),
        Layout(dp_replicate=2, ep=2),
        Layout(dp_replicate=2, pp=2),
    ]
    assert not any(map(passes_together, alone))
    assert all(map(passes_together, together))
