"""Data parallelism by FSDP2's `fully_shard`, for every zero_stage and for mixed precision.

One mechanism for all of it, because it composes with tensor and pipeline parallelism and keeps parameter names. Only where ranks
hold unsharded fp32 replicas and nothing else it is torch's composable DDP, which spares the copies in and out of buffers.

| layout                               | what happens                                                                          |
|--------------------------------------|---------------------------------------------------------------------------------------|
| dp_shard > 1, zero_stage 3           | parameters are gathered for each block's forward and again for its backward pass      |
| zero_stage 2                         | gathered from forward to backward; gradients reduce-scattered after each micro-batch  |
| zero_stage 1                         | gathered once a step; full gradients are stored and reduced after the last micro-batch |
| dp_replicate > 1, dp_shard = 1       | a mesh (dp_replicate, 1): nothing is sharded, gradients are all-reduced once a step   |
| dp_replicate > 1, dp_shard > 1       | HSDP: sharded inside, all-reduced across                                              |
| cp > 1                               | its ranks count as further ones of dp_shard, or of dp_replicate at zero_stage 0       |
| no data parallelism, mixed precision | a mesh (1): only the cast of parameters and the fp32 reduction buffers remain         |
| no data parallelism, fp32            | nothing                                                                               |

Why the cast is FSDP's and not autocast: the same operators then run in the same precision whatever the layout (autocast computes
norms in fp32 and would keep the residual stream in fp32), gradients accumulate in fp32, and master parameters are fp32.
"""

import time  # no `annotations` from __future__: torch compares those of DDP's hook with its classes
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import DDP, replicate
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from ..schema.errors import RuntimeMismatchError
from ..schema.task import Precision
from ..schema.training_plan import TrainingPlan
from .expert_parallel import expert_placement
from .mesh import ParallelMesh
from .models.decoder import Decoder
from .models.layers import even_shard
from .offload.schedule import layer_of
from .training.step_clock import StepClock

_DTYPES: dict[Precision, torch.dtype] = {
    "fp32": torch.float32, "tf32": torch.float32, "bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16,
}  # fmt: skip


def compute_dtype(plan: TrainingPlan) -> torch.dtype:
    """Return the dtype of matrix products and activations."""
    precision = plan.workload.precision
    if precision not in _DTYPES:
        raise RuntimeMismatchError(
            f"precision {precision} cannot be executed by this version", help="plan with --precision bf16-mixed"
        )
    return _DTYPES[precision]


def set_products(plan: TrainingPlan) -> None:
    """Let torch multiply fp32 matrices on the matrix units or plainly, as the plan says; of 16 bits nothing is set.

    Said in both cases: NVIDIA's containers have TF32 on, torch has it off.
    """
    if plan.workload.is_full_precision:
        torch.set_float32_matmul_precision("high" if plan.workload.precision == "tf32" else "highest")


def apply_data_parallel(
    stage: Decoder, mesh: ParallelMesh, plan: TrainingPlan, *, has_groups: bool = False
) -> "ReductionTimer | None":
    """Apply `fully_shard` to each block, to embedding and head, and to the stage itself, in place; or DDP where that is enough."""
    layout = plan.layout
    is_only_axis = mesh.pp is None and mesh.tp is None and mesh.expert_mesh is None and layout.cp == 1
    is_unsharded = layout.zero_stage == 0 and layout.dp_replicate > 1 and plan.offload is None
    # Not where ranks share sequences: the backward pass waits for collectives of its own between DDP's, on gloo seen to hang.
    if is_only_axis and is_unsharded and not has_groups and plan.workload.is_full_precision:
        if not plan.workload.has_backward:
            return None
        reduction = ReductionTimer(mesh.fsdp["dp_replicate"].get_group())
        module = replicate(stage, process_group=reduction.group, gradient_as_bucket_view=True, init_sync=False)
        assert isinstance(module, DDP)
        module.register_comm_hook(reduction, _reduce)
        return reduction
    blocks = [(int(name) + 1, block) for name, block in stage.model.layers.items()]
    model, head, outer = stage.model, stage.lm_head, list[list[nn.Module]]()
    if not stage.spec.tie_embeddings or model.embed_tokens is None or head is None:
        groups = ((model.embed_tokens, model.embed_positions), (model.norm, head))
        outer = [unit for group in groups if (unit := [module for module in group if module is not None])]
    placement = expert_placement(stage, mesh)
    shard_units(stage, mesh, plan, blocks=blocks, outer=outer, head=head, placement=placement)
    return None


def shard_units(
    stage: nn.Module,
    mesh: ParallelMesh,
    plan: TrainingPlan,
    *,
    blocks: Sequence[tuple[int, nn.Module]],
    outer: Sequence[list[nn.Module]],
    head: nn.Module | None,
    placement: Callable[[nn.Parameter], Any] | None = None,
) -> None:
    """Apply `fully_shard` to blocks (with their layer's index), to groups of modules around them, and to the stage, in place."""
    dtype, streamed = compute_dtype(plan), _streamed(plan)
    has_copies = mesh.expert_mesh is not None and plan.layout.expert_copies > 1
    if mesh.data_degree == 1 and dtype == torch.float32 and not has_copies and not streamed:
        return
    if mesh.tp is not None:
        # Tensor-parallel modules return views of DTensors; nothing here changes an activation in place before its hooks ran.
        warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(.*\) returned a view tensor")
    mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    policy = MixedPrecisionPolicy() if dtype == torch.float32 else mixed
    reshard = plan.layout.zero_stage == 3
    num_shards = mesh.fsdp.size(mesh.fsdp.ndim - 1)

    def placed_evenly(parameter: nn.Parameter) -> Any:
        return (placement(parameter) if placement is not None else None) or even_shard(parameter, num_shards)

    def shard(unit: nn.Module | list[nn.Module], *, streams: bool, reshards: bool) -> None:
        offload = CPUOffloadPolicy(pin_memory=torch.accelerator.is_available()) if streams else OffloadPolicy()
        fully_shard(
            unit, mesh=mesh.fsdp, mp_policy=policy, reshard_after_forward=reshards, shard_placement_fn=placed_evenly,
            offload_policy=offload,
        )  # fmt: skip

    for layer_idx, block in blocks:
        streams = layer_idx in streamed
        shard(block, streams=streams, reshards=reshard or streams)
    _prefetch([block for _, block in blocks], plan.layout.prefetch)
    for modules in outer:
        # The head's backward pass follows its forward pass at once: dropping its parameters between would gain nothing.
        keep = head is not None and head in modules
        streams = (plan.model.num_layers - 1 if keep else 0) in streamed
        shard(modules, streams=streams, reshards=(reshard or streams) and not keep)
    # The root owns what is left (all of embedding, norm and head when tied: two units may not share a parameter), and a
    # pipeline stage must be called through a sharded module.
    shard(stage, streams=0 in streamed and not outer, reshards=reshard)


def _prefetch(blocks: Sequence[nn.Module], depth: int) -> None:
    """Let each block gather the parameters of the next ``depth`` ones before it computes, in the order in which they are read.

    One is what `fully_shard` does by itself. Embedding and head do so in any case.
    """
    units = [block for block in blocks if isinstance(block, FSDPModule)]
    for idx, unit in enumerate(units if depth > 1 else ()):
        unit.set_modules_to_forward_prefetch(units[idx + 1 : idx + 1 + depth])
        unit.set_modules_to_backward_prefetch(units[max(idx - depth, 0) : idx][::-1])


def materialise(stage: Decoder, plan: TrainingPlan, device: torch.device) -> None:
    """Give a stage on the meta device memory without contents; streamed parameters get theirs on the host."""
    streamed = _streamed(plan)
    on_host = {id(p) for name, p in stage.named_parameters() if layer_of(name, plan.model) in streamed}
    stage._apply(lambda tensor: torch.empty_like(tensor, device="cpu" if id(tensor) in on_host else device))


def _streamed(plan: TrainingPlan) -> frozenset[int]:
    return frozenset() if plan.offload is None else frozenset(plan.offload.streamed_parameter_layers)


def before_micro_batch(stage: nn.Module, plan: TrainingPlan, *, is_last: bool) -> None:
    """Tell DDP or FSDP whether this micro-batch ends the step: below zero 2 gradients wait for it, parameters stay gathered."""
    if isinstance(stage, DDP):
        stage.set_requires_gradient_sync(is_last)
    if isinstance(stage, FSDPModule) and plan.layout.zero_stage < 2:
        stage.set_is_last_backward(is_last)
        stage.set_requires_gradient_sync(is_last)
        stage.set_reshard_after_backward(is_last)
        # torch 2.13 forgets the order of forward passes with the last backward pass only: that one would then gather once more what
        # the passes before it had last, and wait for ranks with one pass, which do not. The list is made by the first pass of all.
        getattr(fully_shard.state(stage)._comm_ctx, "post_forward_order", []).clear()  # type: ignore[attr-defined]
        for name, block in stage.model.layers.items() if isinstance(stage, Decoder) else ():
            if int(name) + 1 in _streamed(plan):  # leaves after every pass, and so do its gradients
                assert isinstance(block, FSDPModule)
                block.set_requires_gradient_sync(True)
                block.set_reshard_after_backward(True)


class ReductionTimer:
    """When the last bucket of gradients over ``group`` was full, to tell waiting for it from computing; 0: none since `settle`.

    Attributes:
        mean: puts another mean than the plain one into a bucket.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.filled_s = 0.0
        self.mean: Callable[[torch.Tensor], None] | None = None

    def settle(self, clock: StepClock) -> None:
        """Count what passed since the last bucket of a backward pass was full as waiting."""
        if self.filled_s:
            clock.waited(self.filled_s)
            self.filled_s = 0.0


def _reduce(state: ReductionTimer, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    state.filled_s = time.perf_counter()
    if state.mean is not None:
        state.mean(bucket.buffer())
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done
    return allreduce_hook(state.group, bucket)
