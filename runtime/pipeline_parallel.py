"""Pipeline parallelism by torch.distributed.pipelining: one stage or several a rank, any order of their passes.

Stages come from the plan and need not be equal. Between them travel hidden states [B, S, D], S being a rank's part of the
sequence under context parallelism; with sequence parallelism each tp rank sends its own [B, S / tp, D] to its peer. GPipe and
1F1B with one stage a rank are torch's own; every other schedule is an order of passes (cost_models/pipeline/orders.py) that
torch's multi-stage runtime executes, with the transfers it adds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    _Action,
    _add_reduce_grad,
    _add_send_recv,
    _add_unshard_reshard,
    _PipelineScheduleRuntime,
)

from ..cost_models.pipeline.orders import Action, to_torch_csv
from ..cost_models.pipeline.simulation import pipeline_order
from ..schema.layout import Layout
from ..schema.schedules import SCHEDULES
from ..schema.training_plan import TrainingPlan
from .data_parallel import compute_dtype
from .mesh import ParallelMesh
from .models.layers import local_tensor
from .training.step_clock import StepClock

Schedule = PipelineScheduleSingle | _PipelineScheduleRuntime


class PackShape(NamedTuple):
    """Packs of documents as micro-batches of a step: their number, and the tokens that a rank has of each."""

    count: int
    num_tokens: int


def build_schedule(
    parts: Sequence[nn.Module],
    mesh: ParallelMesh,
    plan: TrainingPlan,
    clock: StepClock,
    loss_scale: Callable[[], float],
    *,
    boundary: Callable[[int], Tensor] | None = None,
    packs: PackShape | None = None,
    before_pass: Callable[[int], None] | None = None,
) -> Schedule:
    """Build the schedule that runs this rank's stages; its losses are already multiplied by the weights of the micro-batches.

    Args:
        boundary: what a stage sends, on the meta device; unset, hidden states.
        packs: the micro-batches, where they are not the plan's.
        before_pass: called with the micro-batch of each pass.
    """
    assert mesh.pp is not None
    last, count = len(plan.stages) - 1, plan.num_microbatches if packs is None else packs.count
    local_tokens = plan.workload.seq_len // plan.layout.cp if packs is None else packs.num_tokens

    def rows(layout: Layout) -> int:
        return layout.micro_batch_size if packs is None else 1

    # Known shapes spare the trial run by which the stages would otherwise tell each other.
    def leaving(stage_idx: int) -> Tensor:
        if boundary is not None:
            return boundary(stage_idx)
        layout = mesh.layouts[stage_idx]
        hidden_tokens = local_tokens // (layout.tp if layout.sequence_parallel else 1)
        shape = (rows(layout), hidden_tokens, plan.model.hidden_dim)
        return torch.empty(shape, dtype=compute_dtype(plan), device="meta", requires_grad=True)

    tokens = torch.empty(rows(mesh.layout), local_tokens, dtype=torch.long, device="meta")
    loss = torch.empty(1, device="meta", requires_grad=True)
    stages = [
        _Stage(
            part, idx, last + 1, clock.device, input_args=leaving(idx - 1) if idx else tokens,
            output_args=loss if idx == last else leaving(idx), group=mesh.pp.get_group(),
        )
        for part, idx in zip(parts, mesh.stage_idxs, strict=True)
    ]  # fmt: skip
    for stage in stages:
        stage.clock, stage.before_pass = clock, before_pass
        stage.shards_passes = plan.layout.zero_stage == 3 and isinstance(stage.submod, FSDPModule)
    # Ranks within the pipeline's process group, by position along pp: the group counts by rank.
    group_ranks = [dist.get_group_rank(mesh.pp.get_group(), rank) for rank in mesh.pipeline_ranks]

    # scale_grads would divide after the reduction; weighing the loss keeps the arithmetic of the other layouts.
    def loss_fn(loss: Tensor, weights: Tensor) -> Tensor:
        return loss.sum() * (weights[0] * loss_scale())

    torch_class = SCHEDULES[plan.layout.schedule].torch_class
    if torch_class and len(stages) == 1:
        stages[0].stage_index_to_group_rank = dict(enumerate(group_ranks))
        single: PipelineScheduleSingle = getattr(pipelining, torch_class)(
            stages[0], count, loss_fn=loss_fn, scale_grads=False
        )
        return single
    runtime = _PipelineScheduleRuntime(stages, count, loss_fn=loss_fn, scale_grads=False)  # type: ignore[arg-type]
    _load_order(runtime, plan, count, group_ranks)
    return runtime


def run_schedule(
    schedule: Schedule,
    mesh: ParallelMesh,
    scale: float,
    inputs: Tensor,
    weights: Tensor,
    *,
    last: Mapping[str, Tensor],
    every: Mapping[str, Tensor],
) -> Tensor:
    """Run forward and backward of all micro-batches, each with its weight [m]; return the sum of their losses [] on the rank of the
    last stage, zero elsewhere.

    Args:
        inputs: of the first stage; last, every: what the last stage takes by name, and every stage.
    """
    losses: list[Tensor] = []
    args = (inputs,) if mesh.is_first_stage else ()
    if not mesh.is_last_stage:
        schedule.step(*args, **every)
        return torch.zeros((), device=inputs.device)
    # The stage takes the targets itself; the schedule's own target is what `loss_fn` gets besides the loss.
    of_rows = weights.to(inputs.device).repeat_interleave(len(inputs) // len(weights))
    schedule.step(*args, target=of_rows, losses=losses, **last, **every)
    return torch.stack([loss.detach() for loss in losses]).sum() / scale


class Copies(NamedTuple):
    """A parameter of which several stages have a copy: this rank's, each by its module and name, and the group of the ranks."""

    attributes: list[tuple[nn.Module, str]]
    group: dist.ProcessGroup | None


def reduce_shared_gradients(shared: Sequence[Copies]) -> None:
    """Add the gradients of the copies of each parameter, of one rank (the ends of a V) and over its group."""
    for attributes, group in shared:
        copies = [getattr(owner, name) for owner, name in attributes]
        if not copies or not copies[0].requires_grad:
            continue
        for copy in copies:
            copy.grad = torch.zeros_like(copy) if copy.grad is None else copy.grad
        first, *others = (local_tensor(copy.grad) for copy in copies)
        for gradient in others:
            first.add_(gradient)
        if group is not None:
            dist.all_reduce(first, group=group)
        for gradient in others:
            gradient.copy_(first)


class _Stage(PipelineStage):
    """A stage whose split weight passes add up in the precision of the reduction, as undivided backward passes do, and whose
    passes are parts of the step.
    """

    clock: StepClock
    before_pass: Callable[[int], None] | None = None
    shards_passes: bool = False
    """Zero 3: parameters are gathered for each pass, gradients reduced in each backward pass."""

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Run a backward pass; torch's would keep what it gathers, and gradients, until the last one."""
        if not self.shards_passes:
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        assert backward_type == "full", "split passes are left out by the rule split_backward_keeps_gathered"
        assert isinstance(self.submod, FSDPModule)
        self.submod.set_is_last_backward(False)  # what the last one ends, perform_reduce_grad does
        gradients = stage_backward(bwd_kwargs["stage_output"], bwd_kwargs["output_grads"], bwd_kwargs["input_values"])
        return gradients, None

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run one forward pass."""
        self._begin(fwd_chunk_id)
        with self.clock.part("forward", Action(self.stage_index, "F", fwd_chunk_id)):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run one backward pass, or that of the activations only."""
        self._begin(bwd_chunk_id)  # it may run forward again
        with self.clock.part("backward", Action(self.stage_index, "BW" if full_backward else "B", bwd_chunk_id)):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def _begin(self, micro_batch: int) -> None:
        if self.before_pass is not None:
            self.before_pass(micro_batch)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run one weight pass; FSDP's own hooks, which would move its gradients to fp32, do not run in it."""
        with self.clock.part("backward", Action(self.stage_index, "W", bwd_chunk_id)):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)  # type: ignore[no-untyped-call]
            for parameter in _sharded_parameters(self.submod):
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()


def _sharded_parameters(module: torch.nn.Module) -> Iterator[Any]:
    """Iterate over FSDP's records of the parameters of a stage."""
    if not isinstance(module, FSDPModule):
        return
    for state in fully_shard.state(module)._state_ctx.all_states:  # type: ignore[attr-defined]
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        for group in filter(None, groups):
            yield from group.fsdp_params


def _load_order(
    runtime: _PipelineScheduleRuntime, plan: TrainingPlan, num_microbatches: int, group_ranks: Sequence[int]
) -> None:
    """Give the runtime the plan's order, with transfers, and the gathering and reduction of sharded parameters.

    torch's own lowering drops gathered parameters of all but three stages between their passes: split backward passes then lose
    gradients, and below zero_stage 3 a step gathers once. So all stages of a rank stay active.
    """
    lines = to_torch_csv(pipeline_order(plan, num_microbatches)).splitlines()
    actions = {
        group_rank: [_Action.from_str(cell) for cell in line.split(",")]
        for group_rank, line in sorted(zip(group_ranks, lines, strict=True))
    }
    runtime._validate_and_set_stage_mapping(actions)
    in_passes = plan.layout.zero_stage == 3  # fully_shard gathers then
    gathered = {
        rank: _add_reduce_grad(
            row if in_passes else list(_add_unshard_reshard(row, len({a.stage_index for a in row}))), num_microbatches
        )
        for rank, row in actions.items()
    }
    runtime.pipeline_order = actions
    runtime.pipeline_order_with_comms = _add_send_recv(
        gathered,  # type: ignore[arg-type]
        stage_to_rank=lambda stage: runtime.stage_index_to_group_rank[stage],
        num_stages=len(plan.stages),
    )
