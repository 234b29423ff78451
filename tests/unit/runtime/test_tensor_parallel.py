"""Shapes and collectives of tensor parallelism, on one process that plays the first of two ranks. Numbers are in tests/parity."""

from __future__ import annotations

import pytest
import torch
from meshwright.runtime import ParallelModel, parallelize
from meshwright.runtime.models.layers import local_tensor
from meshwright.schema import Layout, Workload
from plans import make_plan, tiny_model
from torch.distributed.tensor.debug import CommDebugMode

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook")  # of CommDebugMode's own hooks
NUM_BLOCKS = 2


def build(*, sequence_parallel: bool, tied: bool = False) -> ParallelModel:
    model = tiny_model(num_blocks=NUM_BLOCKS, tied=tied, qk_norm="per_head", out_bias=True)
    layout = Layout(tp=2, sequence_parallel=sequence_parallel, micro_batch_size=2)
    workload = Workload(seq_len=16, global_batch_size=2, precision="fp32")
    return parallelize(None, make_plan(model, layout, workload=workload), device=torch.device("cpu"))


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_gradients_are_never_larger_than_the_parameters(two_ranks: None, sequence_parallel: bool, tied: bool) -> None:
    model = build(sequence_parallel=sequence_parallel, tied=tied)
    sizes: dict[str, int] = {}
    for name, parameter in model.named_parameters():

        def record(parameter: torch.Tensor, name: str = name) -> None:
            assert parameter.grad is not None
            sizes[name] = local_tensor(parameter.grad).numel()

        parameter.register_post_accumulate_grad_hook(record)
    model.forward_backward(torch.zeros(2, 17, dtype=torch.long))
    assert sizes == {name: local_tensor(parameter).numel() for name, parameter in model.named_parameters()}


def test_sequence_parallel_needs_two_gathers_and_two_scatters_a_block_and_direction(two_ranks: None) -> None:
    model = build(sequence_parallel=True)
    with CommDebugMode() as collectives:
        model.module(torch.zeros(2, 16, dtype=torch.long), torch.zeros(2, 16, dtype=torch.long)).backward()
    counts = {str(op).split(".")[-1]: count for op, count in collectives.get_comm_counts().items()}
    # Embedding: scatter forward, gather back. Head: gather forward, scatter back, two sums in the loss.
    assert counts["all_gather_into_tensor"] == counts["reduce_scatter_tensor"] == 4 * NUM_BLOCKS + 2
    assert counts["allreduce_"] == 2


def test_without_sequence_parallel_it_is_two_sums_a_block_and_direction(two_ranks: None) -> None:
    model = build(sequence_parallel=False)
    with CommDebugMode() as collectives:
        model.module(torch.zeros(2, 16, dtype=torch.long), torch.zeros(2, 16, dtype=torch.long)).backward()
    counts = {str(op).split(".")[-1]: count for op, count in collectives.get_comm_counts().items()}
    assert counts == {"all_reduce": 4 * NUM_BLOCKS + 2, "allreduce_": 2}
