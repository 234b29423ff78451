"""Data parallelism of whole replicas by torch's composable DDP, where nothing is sharded or cast.

`fully_shard` over replicas alone copies every parameter in and out of its buffers for each pass and each gradient for its
reduction, which DDP does not: gradients are views of the buckets that are all-reduced while the backward pass goes on.
"""

import time  # no `annotations` from __future__: torch compares those of a hook with its classes

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import DDP, replicate
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from ..schema.plan import Plan
from .mesh import ParallelMesh
from .training.step_clock import StepClock


def is_replicated(mesh: ParallelMesh, plan: Plan) -> bool:
    """Tell whether ranks hold unsharded fp32 replicas of one stage and do nothing else: the case of DDP.

    Not under cp, whose backward pass waits for collectives of its own between DDP's: on gloo that was seen to hang.
    """
    layout = plan.layout
    alone = mesh.pp is None and mesh.tp is None and mesh.expert_mesh is None
    whole = layout.zero_stage == 0 and layout.dp_replicate > 1 and layout.cp == 1 and plan.offload is None
    return alone and whole and plan.workload.precision == "fp32"


class ReductionTimer:
    """When a module's last bucket of gradients left, so that waiting for it can be told from computing. Final.

    Attributes:
        group: ranks that hold replicas.
        left_s: of the bucket that was filled last, by time.perf_counter; 0 where none was since the last look.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.left_s = 0.0

    def settle(self, clock: StepClock) -> None:
        """Count what passed since the last bucket of a backward pass was full as waiting."""
        if self.left_s:
            clock.waited(self.left_s)
            self.left_s = 0.0


def _reduce(state: ReductionTimer, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Reduce a bucket that is full: DDP's hook."""
    state.left_s = time.perf_counter()
    return allreduce_hook(state.group, bucket)


def apply_ddp(stage: nn.Module, mesh: ParallelMesh) -> ReductionTimer:
    """Apply DDP in place; parameter names stay."""
    group = mesh.fsdp["dp_replicate"].get_group()
    reduction = ReductionTimer(group)
    module = replicate(stage, process_group=group, gradient_as_bucket_view=True, init_sync=False)
    assert isinstance(module, DDP)
    module.register_comm_hook(reduction, _reduce)
    return reduction
