"""Batches through pipelines: constraints, the bound against all packings of few sequences, and what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.schema import ConfigError, InfeasibleError
from meshwright.schema.batch import FILLING_LEN, LengthCosts, PipelineCosts
from meshwright.solvers.batch_groups import BatchGroup, PackInstance, batch_bound_s, check_batch, schedule_batch
from pydantic import ValidationError


def costs_of(
    pp: int, *, num_pipelines: int = 1, schedule: str = "1f1b", chunks: int = 1, cp: int = 1, capacity: int = 4096
) -> LengthCosts:
    stages = pp * chunks
    return LengthCosts(
        num_ranks=num_pipelines * cp,
        tokens_per_rank=capacity // cp,
        fixed_s=0.02,
        waits=False,
        lengths=(16, 4096),
        token_s=((1e-3, 3e-3),),
        pipeline=PipelineCosts(
            schedule=schedule, pp=pp, num_model_chunks=chunks, cp=cp, forward_s=(0.3 / chunks,) * stages,
            backward_s=(0.4 / chunks,) * stages, weight_s=(0.3 / chunks,) * stages,
        ),
    )  # fmt: skip


def all_packings(sequences: Sequence[int], packs: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every way to put sequences into so many packs in order, some of them empty."""
    for places in itertools.product(range(packs), repeat=len(sequences)):
        yield tuple(tuple(s for s in sequences if places[s] == pack) for pack in range(packs))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_few_sequences_against_every_packing(schedule: str) -> None:
    for lengths in ([900, 80, 500, 300], [40, 2000, 60, 35], [700, 700, 710, 690]):
        instance = PackInstance.under(costs_of(2, schedule=schedule), lengths)
        answer = schedule_batch(instance)
        assert check_batch(instance, answer) == []
        best = min(
            instance.step_s([[BatchGroup(0, 1, pack, 0.0)] for pack in packs])
            for count in range(instance.pipeline.min_packs, 5)
            for packs in all_packings(range(len(lengths)), count)
            if max(sum(lengths[s] for s in pack) for pack in packs) <= instance.capacity
        )
        assert batch_bound_s(instance) <= best * (1 + 1e-9)
        assert answer.seconds <= 1.02 * best


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 4096), min_size=1, max_size=40),
    pp=st.sampled_from([2, 3, 4]),
    num_pipelines=st.sampled_from([1, 2, 3]),
    form=st.sampled_from([("1f1b", 1), ("1f1b", 2), ("zb-h1", 1), ("zb-v", 2)]),
    cp=st.sampled_from([1, 2]),
)
def test_schedules_keep_the_constraints_and_the_bound(
    lengths: list[int], pp: int, num_pipelines: int, form: tuple[str, int], cp: int
) -> None:
    schedule, chunks = form
    costs = costs_of(pp, num_pipelines=num_pipelines, schedule=schedule, chunks=chunks, cp=cp)
    instance = PackInstance.under(costs, lengths)
    answer = schedule_batch(instance)
    assert check_batch(instance, answer) == []
    assert answer.bound_seconds <= answer.seconds * (1 + 1e-9)
    assert len(answer.micro_batches) % instance.pipeline.unit == 0
    assert len(answer.micro_batches) >= instance.pipeline.min_packs
    assert all(len(groups) == num_pipelines for groups in answer.micro_batches)


def test_filling_takes_what_short_sequences_take() -> None:
    instance = PackInstance.under(costs_of(2), [1000, 400])
    full, filled = instance.pack_seconds([(0,), (1,)])
    short_s = float(instance.costs.seconds(instance.lengths[1:] * 0.0 + FILLING_LEN, 1)[0])
    assert full == pytest.approx(0.02 + float(instance.seconds[0]))
    assert filled == pytest.approx(0.02 + float(instance.seconds[1]) + 600 / FILLING_LEN * short_s)


def test_what_packs_do_not_suit_is_refused() -> None:
    with pytest.raises(InfeasibleError, match=r"5,000 tokens, the ranks of a pack hold 4,096 \(C2\)"):
        PackInstance.under(costs_of(2), [10, 5000])
    for wrong in ([], [0], [-4, 3]):
        with pytest.raises(ConfigError, match="at least one"):
            PackInstance.under(costs_of(2), wrong)
    for schedule, why in (("gpipe", "holds all micro-batches"), ("synthesised", "order of one number")):
        with pytest.raises((ConfigError, ValidationError), match=why):
            costs_of(2, schedule=schedule, chunks=1 if schedule == "gpipe" else 2)
