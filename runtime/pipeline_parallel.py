"""Pipeline parallelism by torch.distributed.pipelining: one stage a rank, GPipe or 1F1B.

Stages come from the plan and need not be equal. Between stages travel hidden states [B, S, D]; with sequence parallelism each tp
rank sends its own [B, S / tp, D] to its peer.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from ..schema.plan import Plan
from .data_parallel import compute_dtype, loss_scale
from .mesh import ParallelMesh
from .models.decoder import Decoder
from .models.init import local_tensor


def build_schedule(stage: Decoder, mesh: ParallelMesh, plan: Plan, device: torch.device) -> PipelineScheduleSingle:
    """The schedule that runs this rank's stage; its losses are already divided by the number of micro-batches."""
    assert mesh.pp is not None
    layout, batch = plan.layout, plan.layout.micro_batch_size
    seq_len = plan.workload.seq_len // (layout.tp if layout.sequence_parallel else 1)
    tokens = torch.empty(batch, plan.workload.seq_len, dtype=torch.long, device="meta")
    hidden = torch.empty(
        batch, seq_len, plan.model.hidden_dim, dtype=compute_dtype(plan), device="meta", requires_grad=True
    )
    # Known shapes spare the trial run by which the stages would otherwise tell each other.
    pipeline_stage = PipelineStage(
        stage,
        mesh.pp_rank,
        layout.pp,
        device,
        input_args=tokens if mesh.is_first_stage else hidden,
        output_args=torch.empty(1, device="meta", requires_grad=True) if mesh.is_last_stage else hidden,
        group=mesh.pp.get_group(),
    )
    pipeline_stage.stage_index_to_group_rank = {
        idx: dist.get_group_rank(mesh.pp.get_group(), rank) for idx, rank in enumerate(mesh.pp.mesh.tolist())
    }
    kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[layout.schedule]
    # scale_grads would divide after the reduction; dividing the loss keeps the arithmetic of the other layouts.
    scale = loss_scale(plan) / plan.num_microbatches
    return kind(pipeline_stage, plan.num_microbatches, loss_fn=lambda loss, _: loss.sum() * scale, scale_grads=False)


def run_schedule(
    schedule: PipelineScheduleSingle, mesh: ParallelMesh, plan: Plan, inputs: Tensor, targets: Tensor
) -> Tensor:
    """Forward and backward of all micro-batches; the mean loss [] on the last stage, zero elsewhere."""
    losses: list[Tensor] = []
    args = (inputs,) if mesh.is_first_stage else ()
    if not mesh.is_last_stage:
        schedule.step(*args)
        return torch.zeros((), device=inputs.device)
    # The stage takes the loss itself; the schedule's own target only has to be there.
    schedule.step(*args, target=targets, losses=losses, targets=targets)
    return torch.stack([loss.detach() for loss in losses]).sum() / loss_scale(plan)


def reduce_tied_gradients(stage: Decoder, mesh: ParallelMesh) -> None:
    """Add the gradients of the two copies of a tied embedding, on the first and on the last stage."""
    if mesh.tied_group is None or not (mesh.is_first_stage or mesh.is_last_stage):
        return
    owner = stage.model.embed_tokens if mesh.is_first_stage else stage.lm_head
    assert owner is not None
    gradient = owner.weight.grad
    assert gradient is not None
    dist.all_reduce(local_tensor(gradient), group=mesh.tied_group)
