"""Orders in torch's schedule table: round trip, and torch's own reader and simulation take them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from meshwright.cost_models.pipeline import orders
from meshwright.cost_models.pipeline.orders import Action, Order, from_torch_csv, to_torch_csv
from meshwright.schema.errors import ConfigError
from meshwright.solvers.pipeline.greedy import EVENT_RULES, greedy_order
from pipelines import random_pipeline

SHARED = Path(__file__).resolve().parents[4] / "shared/data/schedules/torch_pipelining"


def test_letters_are_those_of_torch() -> None:
    order = ((Action(0, "F", 0), Action(0, "B", 0), Action(0, "W", 0), Action(0, "F", 1), Action(0, "BW", 1)),)
    assert to_torch_csv(order) == "0F0,0I0,0W0,0F1,0B1\n"


@pytest.mark.parametrize(
    "make", [orders.gpipe, orders.one_f_one_b, orders.zb_h2, orders.zb_v, orders.dualpipe_v, orders.v_min]
)
def test_round_trip(make) -> None:
    order = make(4, 9)
    assert from_torch_csv(to_torch_csv(order)) == order


def test_idle_cells_are_left_out_and_pairs_are_read_in_turn() -> None:
    assert from_torch_csv(",0F0, ,(0F1;3B0)OVERLAP_F_B\n") == (
        (Action(0, "F", 0), Action(0, "F", 1), Action(3, "BW", 0)),
    )


@pytest.mark.parametrize("cell", ["0SEND_F0", "0X1", "F0", "0F"])
def test_cell_that_is_not_a_pass_is_refused(cell: str) -> None:
    with pytest.raises(ConfigError, match="row 1"):
        from_torch_csv(f"0F0\n{cell}\n")


@pytest.mark.skipif(not SHARED.is_dir(), reason="the recorded schedules are not beside the repository")
def test_recorded_table_is_read_and_written_as_it_was() -> None:
    text = (SHARED / "zb_order_p2_m6_compute_only.csv").read_text()
    assert to_torch_csv(from_torch_csv(text)).split() == text.split()


@pytest.fixture
def fake_world() -> Iterator[int]:
    """A process group of four ranks that sends nothing; this process is rank 0."""
    dist = pytest.importorskip("torch.distributed")
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=4)
    yield 4
    dist.destroy_process_group()


def uneven(style: str) -> Order:
    costs = random_pipeline(3, ranks=4, micro_batches=6, chunks=2, style=style)  # type: ignore[arg-type]
    caps = [3 * sum(costs.held_bytes[s] for s in costs.stages_of(rank)) for rank in range(4)]
    return greedy_order(costs, caps, EVENT_RULES[0])[0]


@pytest.mark.parametrize(
    ("order", "stages_here"),
    [
        (orders.zb_h2(4, 6), (0,)),
        (orders.one_f_one_b(4, 8, 2), (0, 4)),
        (uneven("loop"), (0, 4)),
        (uneven("wave"), (0, 7)),
    ],
    ids=["zb-h2", "interleaved", "synthesised loop", "synthesised wave"],
)
def test_torch_reads_the_order_back_and_can_run_it(
    order: Order, stages_here: tuple[int, ...], fake_world: int, tmp_path: Path
) -> None:
    """torch checks that every pass is there, adds the transfers and simulates the whole without a deadlock.

    Its simulation does not know the gathers that it adds itself, so they are left out.
    """
    import torch
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime, _simulate_comms_compute

    num_stages = 1 + max(action.stage for actions in order for action in actions)
    micro_batches = 1 + max(action.micro_batch for actions in order for action in actions)
    (tmp_path / "order.csv").write_text(to_torch_csv(order))
    stages = [PipelineStage(torch.nn.Linear(2, 2), s, num_stages, torch.device("cpu")) for s in stages_here]
    schedule = _PipelineScheduleRuntime(stages, micro_batches, loss_fn=torch.nn.functional.mse_loss)
    schedule._load_csv(str(tmp_path / "order.csv"), format="compute_only")
    written = "\n".join(",".join(map(str, schedule.pipeline_order[rank])) for rank in range(fake_world))
    assert from_torch_csv(written) == order
    gathers = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
    with_transfers = {
        rank: [action for action in actions if action.computation_type.value not in gathers]
        for rank, actions in schedule.pipeline_order_with_comms.items()
    }
    timed = _simulate_comms_compute(with_transfers, lambda s: schedule.stage_index_to_group_rank[s], num_stages)
    for rank, actions in with_transfers.items():
        assert [action for action in timed[rank] if action is not None] == actions
