"""What `parallelize` refuses, with the numbers; what it accepts is in tests/parity."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from meshwright.runtime import Decoder, parallelize
from meshwright.runtime.mesh import ParallelMesh, require_ascending
from meshwright.schema import ConfigError, Layout, RuntimeMismatchError, TrainingPlan, Workload

sys.path.insert(0, str(Path(__file__).parents[2] / "parity"))
from plans import make_plan, tiny_model

WORKLOAD = Workload(seq_len=16, global_batch_size=8, precision="fp32")


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def plan_for(layout: Layout, **changes: object) -> TrainingPlan:
    return make_plan(tiny_model(), layout, workload=WORKLOAD.replace(**changes))


def test_without_a_job_it_says_how_to_start_one() -> None:
    with pytest.raises(RuntimeMismatchError, match="torchrun"):
        parallelize(None, plan_for(Layout(micro_batch_size=4)))


def test_another_number_of_ranks_is_refused(one_rank: None) -> None:
    with pytest.raises(RuntimeMismatchError, match="the plan is for 2 ranks, this job has 1"):
        parallelize(None, plan_for(Layout(tp=2, micro_batch_size=4)))


def test_model_of_another_plan_is_refused() -> None:
    with pytest.raises(RuntimeMismatchError, match="is not the one the plan is for"):
        parallelize(Decoder(tiny_model(num_blocks=2)), plan_for(Layout(micro_batch_size=4)))


def test_name_of_the_model_does_not_matter(one_rank: None) -> None:
    model = Decoder(tiny_model().replace(name="mine"))
    parallelize(model, plan_for(Layout(micro_batch_size=4)), device=torch.device("cpu"))


def test_fp8_is_refused() -> None:
    with pytest.raises(RuntimeMismatchError, match="fp8"):
        parallelize(None, plan_for(Layout(micro_batch_size=4), precision="fp8"))


def test_layout_that_breaks_a_rule_is_refused(one_rank: None) -> None:
    plan = plan_for(Layout(micro_batch_size=4))
    layout = plan.layout.model_copy(update={"micro_batch_size": 5})
    with pytest.raises(ConfigError, match="as few micro-batches of"):
        parallelize(None, plan.model_copy(update={"layout": layout}))


def test_batch_of_another_shape_is_refused(one_rank: None) -> None:
    model = parallelize(None, plan_for(Layout(micro_batch_size=4)), device=torch.device("cpu"))
    with pytest.raises(RuntimeMismatchError, match=r"\(8, 16\), the plan takes \(8, 17\)"):
        model.forward_backward(torch.zeros(8, 16, dtype=torch.long))


def test_coordinates_count_tp_fastest() -> None:
    layout = Layout(pp=2, dp_replicate=3, dp_shard=2, tp=2)
    mesh = ParallelMesh(None, layout, rank=2 * 3 * 2 + 2 * 2 * 2 + 1 * 2 + 1)  # type: ignore[arg-type]
    assert mesh.coordinates == {"pp": 1, "dp_replicate": 2, "dp_shard": 1, "cp": 0, "tp": 1}
    assert (mesh.dp_rank, mesh.layout.dp, mesh.is_last_stage) == (5, 6, True)


@pytest.mark.parametrize(
    ("layout", "rank_map", "bad_axis"),
    [
        (Layout(dp_shard=2, tp=2), (0, 2, 1, 3), None),
        (Layout(pp=2, tp=2), (2, 3, 0, 1), None),
        (Layout(dp_replicate=2), (1, 0), None),
        (Layout(tp=2), (1, 0), "tp"),
        (Layout(dp_shard=2, tp=2), (2, 3, 0, 1), "dp_shard"),
    ],
)
def test_rank_map_must_ascend_along_axes_that_hold_shards(
    layout: Layout, rank_map: tuple[int, ...], bad_axis: str | None
) -> None:
    if bad_axis is None:
        require_ascending(layout, rank_map)
    else:
        with pytest.raises(RuntimeMismatchError, match=f"must ascend along {bad_axis}"):
            require_ascending(layout, rank_map)


@pytest.mark.parametrize(("precision", "set_to"), [("tf32", "high"), ("fp32", "highest"), ("bf16-mixed", "medium")])
def test_products_in_fp32_are_as_the_plan_says(one_rank: None, precision: str, set_to: str) -> None:
    """Whatever the container has set; plans in 16 bits leave that alone."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        model = parallelize(None, plan_for(Layout(micro_batch_size=4), precision=precision), device=torch.device("cpu"))
        assert torch.get_float32_matmul_precision() == set_to
        assert next(model.module.parameters()).dtype == torch.float32
    finally:
        torch.set_float32_matmul_precision(before)
