"""Repeated blocks over a V: complete orders within memory, and no longer than the recorded ones of the paper's authors."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.cost_models.pipeline.orders import Pipeline, block_slots, v_half, v_min
from meshwright.cost_models.pipeline.simulation import peak_bytes, simulate
from meshwright.schema.schedules import placement
from meshwright.solvers.pipeline.blocks import fitting_blocks, pulled_order, pulled_orders, resident_chunks
from meshwright.solvers.pipeline.greedy import block_orders, quick_order

RECORDED = Path(__file__).resolve().parents[4] / "shared/data/schedules/zero_bubble/zb_results.json"


def over_a_v(ranks: int, micro_batches: int, times: tuple[float, float, float] = (1.0, 1.0, 1.0), **more) -> Pipeline:
    """Equal stages whose F keeps 2, of which B and W free a half each."""
    stages = 2 * ranks
    forward, backward, weight = ((seconds,) * stages for seconds in times)
    return Pipeline(
        **{
            "num_microbatches": micro_batches,
            "rank_of_stage": placement(ranks, 2, "wave"),
            "forward_s": forward,
            "backward_s": backward,
            "weight_s": weight,
            "transfer_s": (0.0,) * (stages - 1),
            "held_bytes": (2.0,) * stages,
            "backward_freed_bytes": (1.0,) * stages,
            "weight_freed_bytes": (1.0,) * stages,
            **more,
        }
    )


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("down", [1, 2, 3])
def test_a_repeated_block_holds_what_it_is_said_to(ranks: int, down: int) -> None:
    """Counted on the order of many micro-batches, a weight pass freeing everything."""
    pipeline = over_a_v(ranks, 40, backward_freed_bytes=(0.0,) * 2 * ranks, weight_freed_bytes=(2.0,) * 2 * ranks)
    for block in [block for block, _ in zip(block_slots((down,) * (ranks - 1)), range(4), strict=False)]:
        # A cap of nothing leaves fill and drain where they are.
        peaks = peak_bytes(pipeline, pulled_order(pipeline, [0.0] * ranks, block)) / 2
        assert np.all(peaks <= resident_chunks(block))
        assert max(peaks) >= max(resident_chunks(block)) - 1


@settings(max_examples=40, deadline=None)
@given(
    ranks=st.integers(2, 6),
    micro_batches=st.integers(1, 14),
    chunks=st.floats(2.5, 14.0),
    pending=st.sampled_from([0.0, 0.5]),
    last_first=st.booleans(),
    seconds=st.lists(st.integers(1, 9), min_size=36, max_size=36),
)
def test_orders_of_blocks_are_complete_and_within_memory(
    ranks, micro_batches, chunks, pending, last_first, seconds
) -> None:
    stages = 2 * ranks
    pipeline = over_a_v(
        ranks, micro_batches, rank_of_stage=placement(ranks, 2, "wave_from_last" if last_first else "wave"),
        forward_s=tuple(seconds[:stages]), backward_s=tuple(seconds[12 : 12 + stages]), weight_s=tuple(seconds[24 : 24 + stages]),
        backward_freed_bytes=(-2 * pending,) * stages, weight_freed_bytes=(2 * (1 + pending),) * stages,
    )  # fmt: skip
    for makespan_s, order in block_orders(pipeline, [2 * chunks] * ranks, max_blocks=2):
        timeline = simulate(pipeline, order)  # refuses what lacks a pass or never ends
        assert sum(map(len, order)) == 3 * stages * micro_batches
        assert makespan_s == pytest.approx(timeline.makespan_s)
        assert max(timeline.peak_bytes) <= 2 * chunks + 1e-6


def test_pulling_forward_makes_named_orders_shorter_at_their_memory() -> None:
    for make, ranks, micro_batches in ((v_half, 8, 24), (v_half, 16, 64), (v_min, 6, 18), (v_min, 4, 12)):
        pipeline = over_a_v(ranks, micro_batches)
        named = simulate(pipeline, make(ranks, micro_batches))
        caps = (float(max(named.peak_bytes)),) * ranks
        assert min(seconds for seconds, _ in block_orders(pipeline, caps, max_blocks=4)) <= named.makespan_s


def test_blocks_fill_any_memory_between_the_named_ones() -> None:
    """On 8 ranks V-min holds 8 micro-batches of a stage and V-half 10; ZBV would hold 16."""
    largest = [max(max(resident_chunks(block)) for block in fitting_blocks([cap] * 8, 4)) for cap in range(8, 17)]
    assert largest == list(range(8, 17))
    assert fitting_blocks([3.0] * 8, 4) == []


def test_a_v_from_the_last_rank_is_the_same_mirrored() -> None:
    caps = (20.0,) * 8
    mirrored = over_a_v(8, 20, rank_of_stage=placement(8, 2, "wave_from_last"))
    first = list(pulled_orders(over_a_v(8, 20), caps, max_blocks=2))
    assert len(first) == 2
    assert [order[::-1] for order in pulled_orders(mirrored, caps, max_blocks=2)] == first


@pytest.mark.long
@pytest.mark.skipif(not RECORDED.is_file(), reason="the recorded schedules are not beside the repository")
def test_quick_orders_are_no_longer_than_the_authors() -> None:
    """V-half and V-min of sail-sg/zero-bubble on the recorded inputs, at the memory of their fullest rank; up to 2,000 passes."""
    compared = 0
    for case in json.loads(RECORDED.read_text()).values():
        given_, ranks = case["input"], case["input"]["p"]
        style = placement(ranks, 2, "wave")
        halves = {
            name: tuple(abs(given_[name][rank]) / 2 for rank in style)
            for name in ("f", "b", "w", "mem_f", "mem_b", "mem_w")
        }
        pipeline = over_a_v(
            ranks, given_["m"], forward_s=halves["f"], backward_s=halves["b"], weight_s=halves["w"],
            transfer_s=(given_["comm"],) * (2 * ranks - 1), held_bytes=halves["mem_f"],
            backward_freed_bytes=halves["mem_b"], weight_freed_bytes=halves["mem_w"],
        )  # fmt: skip
        for name in ("v_half", "v_min"):
            result = case["results"][name]
            if 6 * ranks * given_["m"] > 2000:
                continue
            order = quick_order(pipeline, (result["peak_mem"],) * ranks)
            assert order is not None
            assert simulate(pipeline, order).makespan_s <= result["makespan"] * (1 + 1e-9), (given_["name"], name)
            compared += 1
    assert compared >= 14
