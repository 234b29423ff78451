"""ParallelModel: this rank's part of a model that is being trained.

What comes in: the tokens of this rank's share of a global batch. What goes out: the mean loss, and gradients on the parameters. The
axes themselves average gradients over the ranks that see different tokens. So a micro-batch of n sequences counts n D / B, for D
data-parallel ranks and a batch of B sequences: the average is the sum over all tokens, divided once by the batch, whatever each
rank takes of it (schema/shares.py). Of even shares that is 1 / m for each of m micro-batches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from ..cost_models.pipeline.orders import Action
from ..schema.errors import RuntimeMismatchError
from ..schema.shares import BatchShare, passes_together, share_of_rank
from ..schema.training_plan import TrainingPlan
from .batch_loss import BatchLoss
from .context_parallel import local_positions
from .data_parallel import ReductionTimer, before_micro_batch
from .documents.attention import DocumentAttention
from .documents.packs import Batch, Pack, RankBatch, rank_batch
from .loss_scale import LossScale
from .mesh import EXPERT_AXES, ParallelMesh
from .models.experts import Router
from .models.layers import local_tensor
from .offload.schedule import HostOffload
from .pipeline_parallel import Copies, PackShape, Schedule, build_schedule, reduce_shared_gradients, run_schedule
from .training.step_clock import StepClock


class BatchStages(Protocol):
    """Stages of a user's module (user_stages.py)."""

    def boundary(self, stage_idx: int) -> Tensor:
        """Return what a stage sends, on the meta device."""

    def given(self, batch: Any, *, has_targets: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the tensors of a batch that every stage gets by name, and those that the last one gets for its loss."""


def inputs_of(batch: Any, names: Sequence[str] | int) -> Any:
    """Return what of a batch a module is called with: these names of it, or so many of its first; the rest is for the loss.

    Raises:
        RuntimeMismatchError: some are missing.
    """
    if isinstance(batch, Tensor):
        batch = [batch] if isinstance(names, int) else {names[0]: batch}
    if isinstance(names, int):
        if isinstance(batch, Sequence) and len(batch) >= names:
            return list(batch[:names])
    elif isinstance(batch, Mapping) and set(names) <= set(batch):
        return {name: batch[name] for name in names}
    expected_inputs = f"{names} tensors by position" if isinstance(names, int) else ", ".join(names)
    raise RuntimeMismatchError(
        f"the batch is a {type(batch).__name__} without {expected_inputs}, which the model was traced with"
    )


def _decoder_loss(module: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    loss: Tensor = module(inputs, targets)
    return loss


@contextlib.contextmanager
def _not_counted(module: nn.Module) -> Iterator[None]:
    """Let routers count no tokens while inside."""
    routers = [router for router in module.modules() if isinstance(router, Router)]
    loads = [router.load for router in routers]
    for router in routers:
        router.load = None
    yield
    for router, load in zip(routers, loads, strict=True):
        router.load = load


ComputePass = Callable[[nn.Module], Tensor]
"""A pass: what it adds to a loss [], as a function of the module."""


class _Pass(NamedTuple):
    """A pass of a micro-batch; its mean loss is divided by ``inverse_weight``, 0 where it counts nothing."""

    inputs: Any
    targets: Tensor | None
    inverse_weight: float
    pack: Pack | None = None


class KeptState(Protocol):
    """What a checkpoint keeps besides model and optimizer."""

    def state(self) -> dict[str, Tensor]:
        """Return it by name; reading fills the same tensors."""
        ...


class ParallelModel:
    """One rank's part of a model: what `parallelize` returns.

    Attributes:
        module: this rank's layers, sharded: the entire model, one pipeline stage, or the layers of all its stages together (which
            the schedule runs stage by stage; this module then only holds them under their names).
        loss_scale: factor on the loss for the backward pass; whoever updates the parameters updates it as well.
        offload: its traffic with the host; None where the plan has no offload schedule.
        share: which sequences of each global batch are this rank's, and in which passes.
        local_updates: what is kept besides of a job whose islands train by themselves (training/islands.py).
        documents: the groups of ranks for batches of documents; None where `parallelize` was not asked for them.

    Args:
        parts: the stages of a pipeline that this rank runs.
        shared: parameters of which other stages have copies, too; not_counted: names of those that another stage counts.
        batch_parts: shares of the batch that this stage's micro-batches join, one of each rank of a stage with a smaller tp.
        stages: of a user's module, all of which get the batch; batch_loss: where the loss is not one of tokens.
    """

    def __init__(
        self,
        plan: TrainingPlan,
        mesh: ParallelMesh,
        module: nn.Module,
        device: torch.device,
        *,
        parts: Sequence[nn.Module] = (),
        offload: HostOffload | None = None,
        reduction: ReductionTimer | None = None,
        shared: Sequence[Copies] = (),
        not_counted: Collection[str] = (),
        loss_fn: Callable[[nn.Module, Any, Any], Tensor] = _decoder_loss,
        stages: BatchStages | None = None,
        batch_loss: BatchLoss | None = None,
        batch_parts: int = 1,
        documents: DocumentAttention | None = None,
    ) -> None:
        self.documents = documents
        self.local_updates: KeptState | None = None
        self._batch_parts = batch_parts
        self.plan, self.mesh, self.module, self.device = plan, mesh, module, device
        self.offload, self.reduction, self._loss_fn = offload, reduction, loss_fn
        self._shared, self._not_counted, self._batch_loss = shared, not_counted, batch_loss
        self._stages = stages
        self.share: BatchShare = share_of_rank(plan, mesh.dp_rank)
        self._inverse_weights = [self._inverse_weight(count) for count in self.share.passes]
        self.clock = StepClock(device, is_pipeline=mesh.pp is not None)
        scale = self.loss_scale = LossScale.from_plan(plan)
        self._schedule: Schedule | None = None
        if mesh.pp is not None:
            boundary = None if stages is None else stages.boundary
            self._build_schedule = partial(
                build_schedule, parts, mesh, plan, self.clock, lambda: scale.value, boundary=boundary
            )
            self._schedule = self._build_schedule()
        self._positions = local_positions(mesh, plan).to(device) if plan.layout.cp > 1 else None

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters of this rank, sharded or not."""
        return self.module.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the parameters of this rank with their names in the unsplit model."""
        return self.module.named_parameters()

    def forward_backward(self, tokens: Any) -> float:
        """Add the gradient of the mean loss over the global batch to the parameters' gradients; once a step.

        Args:
            tokens: where `parallelize` got a ``batch_loss``, `share.rows` of any batch: a tensor, or several by position or by
                name, samples first. Else [sequences, seq_len + 1]: `share.rows` of the global batch, the same on all ranks of one
                `mesh.dp_rank` (those of a cp group take their parts of it). Each token but the first is the target of those before.

        Returns:
            The mean loss over the global batch, on every rank.

        Raises:
            RuntimeMismatchError: the shape is not the plan's.
        """
        share = self.backward(tokens)
        self.add_over_ranks(share)
        return share.item()

    def prepare_batch(self, batch: Batch) -> RankBatch:
        """Return this rank's part of a batch of documents, on the host; reads what it takes of them.

        Raises:
            RuntimeMismatchError: the model was not made for documents, or there are no such groups of ranks.
            ConfigError: the groups do not compute every document once.
        """
        if self.documents is None:
            raise RuntimeMismatchError(
                "the model was not made for documents", help="call parallelize(..., documents=True)"
            )
        last = max((group.first + group.size for groups in batch.micro_batches for group in groups), default=0)
        if last > self.documents.num_ranks:
            raise RuntimeMismatchError(
                f"the batch has groups on {last} ranks, the plan {self.documents.num_ranks} that share a batch"
            )
        layout = self.plan.layout
        sizes = {group.size for groups in batch.micro_batches for group in groups}
        if layout.pp > 1 and sizes - {layout.cp}:
            raise RuntimeMismatchError(
                f"groups of {sorted(sizes)} ranks; through a pipeline the {layout.cp} ranks of cp share a pack"
            )
        return rank_batch(
            batch,
            self.documents.rank,
            ulysses_of=self.documents.ulysses_of,
            multiple=layout.tp,
            keeps_empty=passes_together(layout),
            fills_up=layout.pp > 1,
        )

    def backward_batch(self, batch: Batch | RankBatch) -> Tensor:
        """Add the gradient of the mean loss over all target tokens of a batch of documents; once a step, on all ranks.

        Args:
            batch: the same on all ranks, or what `prepare_batch` made of it, in another thread say.

        Returns:
            What this rank adds to that mean, [] on the device; `add_over_ranks` sums it.
        """
        return self.backward(batch if isinstance(batch, RankBatch) else self.prepare_batch(batch))

    def backward(self, tokens: Any) -> Tensor:
        """Do `forward_backward` without the last sum: return what this rank adds to the mean loss, [] on the device."""
        if isinstance(tokens, RankBatch) and self._schedule is not None:
            loss = self._run_packs(tokens)
        elif self._schedule is not None:
            inputs, targets = self._inputs_and_targets(tokens)
            weights = torch.tensor([1 / inverse if inverse else 0.0 for inverse in self._inverse_weights])
            every, last = dict[str, Tensor](), dict[str, Tensor]()
            if self._stages is not None:
                every, last = self._stages.given(inputs, has_targets=targets is not None)
            last |= {} if targets is None else {"targets": targets}
            first = tree_leaves(inputs)[0]
            loss = run_schedule(
                self._schedule, self.mesh, self.loss_scale.value, first, weights, last=last, every=every
            )
        else:
            loss = self._accumulate(self._passes(tokens))
        self._finish_gradients()
        return self._share_of_mean(loss)

    def _run_packs(self, batch: RankBatch) -> Tensor:
        """Run the packs of a batch through the pipeline; return the mean loss [] of this rank's share."""
        assert self.documents is not None
        passes = self._passes(batch)
        packs = [each.pack for each in passes if each.pack is not None]
        shape, enter = PackShape(len(packs), len(packs[0].inputs)), self.documents.enter
        # Receive buffers are of one shape, and an order of one number of micro-batches: both change with the batch.
        schedule = self._build_schedule(packs=shape, before_pass=lambda i: enter(packs[i]))
        weights = torch.tensor([1 / each.inverse_weight if each.inverse_weight else 0.0 for each in passes])
        inputs, targets = (torch.stack([getattr(pack, name) for pack in packs]) for name in ("inputs", "targets"))
        last = {"targets": targets}
        return run_schedule(schedule, self.mesh, self.loss_scale.value, inputs, weights, last=last, every={})

    @torch.no_grad()
    def forward(self, tokens: Tensor | RankBatch) -> Tensor:
        """Return what this rank adds to the mean loss over the global batch, [] on the device, without gradients or a pipeline."""
        assert self._schedule is None
        total = self._accumulate(self._passes(tokens), has_backward=False)
        self._reshard()
        return self._share_of_mean(total)

    def backward_sum(self, passes: Sequence[ComputePass]) -> Tensor:
        """Add the gradient of a sum over all ranks to the parameters' gradients; once a step, without a pipeline.

        Args:
            passes: functions of the module, run in a row, whose results [] count; as many on every rank, since ranks that share
                parameters gather them together.

        Returns:
            What this rank adds to the sum, [] on the device.
        """
        assert self._schedule is None
        degree = self.mesh.data_degree  # axes average over data ranks
        total = self._run([lambda module, each=each: degree * each(module) for each in passes], has_backward=True)
        self._finish_gradients()
        return self._share_of_mean(total)

    @torch.no_grad()
    def compute(self, passes: Sequence[ComputePass]) -> list[Tensor]:
        """Return what functions of the module give, without gradients or a pipeline; as many on every rank."""
        assert self._schedule is None
        results = [each(self.module) for each in passes]
        self._reshard()
        return results

    def _reshard(self) -> None:
        for unit in self.module.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()  # parameters that stay gathered would hide that their shards have moved

    def add_over_ranks(self, values: Tensor) -> None:
        """Sum over all ranks, in place."""
        if self.plan.layout.world_size > 1:
            dist.all_reduce(values)

    def is_first_copy(self, name: str, tensor: Tensor | None) -> bool:
        """Tell whether this rank counts its part of a parameter (or of its gradient) among the ranks that have a copy."""
        if tensor is None:
            return False
        if name in self._not_counted:
            return False
        copies = {"dp_replicate", "dp_shard", "cp", "tp"}
        if isinstance(tensor, DTensor):
            axes = tensor.device_mesh.mesh_dim_names or ()
            if not set(axes).isdisjoint(EXPERT_AXES):
                copies = set(EXPERT_AXES)
            copies -= {
                axis for axis, placement in zip(axes, tensor.placements, strict=True) if not placement.is_replicate()
            }
            if "dp_shard" not in copies and self.plan.layout.zero_stage:
                copies -= {"cp"}  # part of that axis
        return all(self.mesh.coordinates[axis] == 0 for axis in copies)

    def _inputs_and_targets(self, tokens: Any) -> tuple[Any, Tensor | None]:
        """Split tokens [B, S + 1] into inputs and targets [B', S / cp] on the device, B' those of all passes.

        A batch with a loss of its own is the input, without targets.
        """
        rows, shape = self.share.rows, self.share.shape
        if self._batch_loss is not None:
            return tree_map(self._of_all_passes, tokens), None
        expected = (len(rows), self.plan.workload.seq_len + 1)
        if tuple(tokens.shape) != expected:
            raise RuntimeMismatchError(
                f"tokens of shape {tuple(tokens.shape)}, the plan takes {expected}: sequences {rows.start} to {rows.stop - 1} of "
                f"{self.plan.workload.global_batch_size}, for data-parallel rank {self.mesh.dp_rank}, and seq_len + 1"
            )
        tokens = tokens.to(self.device)
        if repeated := sum(shape) - len(tokens):  # passes that this rank runs for its peers only
            tokens = torch.cat([tokens, tokens[:1].expand(repeated, -1)])
        if (parts := self._batch_parts) > 1:  # a micro-batch has those that run at the same time on other stages' ranks
            tokens = tokens.view(parts, len(shape), -1, tokens.shape[1]).transpose(0, 1).reshape(tokens.shape)
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        if self._positions is not None:
            inputs, targets = inputs[:, self._positions], targets[:, self._positions]
        return inputs, targets

    def _of_all_passes(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        rows, shape = self.share.rows, self.share.shape
        if not leaf.ndim or len(leaf) != len(rows):
            raise RuntimeMismatchError(
                f"a tensor {list(leaf.shape)} of the batch has not the {len(rows)} samples of this rank as its first dimension: "
                f"{rows.start} to {rows.stop - 1} of {self.plan.workload.global_batch_size}, for data-parallel rank "
                f"{self.mesh.dp_rank}"
            )
        leaf = leaf.to(self.device)
        repeated = sum(shape) - len(leaf)
        return torch.cat([leaf, leaf[:1].expand(repeated, *leaf.shape[1:])]) if repeated else leaf

    def _passes(self, tokens: Any) -> list[_Pass]:
        """Return the passes of a share of the batch."""
        if isinstance(tokens, RankBatch):
            # Of what is summed over the targets: axes average over data ranks, and a pass has the mean over its tokens.
            each = tokens.num_targets / self.mesh.data_degree
            packs = (pack.to(self.device) for pack in tokens.packs)
            return [
                _Pass(pack.inputs[None], pack.targets[None], each / len(pack.inputs) if pack.counts else 0.0, pack)
                for pack in packs
            ]
        shape, (inputs, targets) = list(self.share.shape), self._inputs_and_targets(tokens)
        leaves, spec = tree_flatten(inputs)
        parts = [leaf.split(shape) if isinstance(leaf, Tensor) else [leaf] * len(shape) for leaf in leaves]
        of_passes = [tree_unflatten([part[i] for part in parts], spec) for i in range(len(shape))]
        targets_of = [None] * len(shape) if targets is None else targets.split(shape)
        return list(map(_Pass, of_passes, targets_of, self._inverse_weights))

    def _accumulate(self, passes: Sequence[_Pass], *, has_backward: bool = True) -> Tensor:
        """Run all micro-batches in a row; return the mean loss [] of this rank's share."""
        return self._run([partial(self._loss_of, each) for each in passes], has_backward=has_backward)

    def _loss_of(self, each: _Pass, module: nn.Module) -> Tensor:
        """Return what a pass adds to the mean loss."""
        if each.pack is not None:
            assert self.documents is not None
            self.documents.enter(each.pack)
        with contextlib.nullcontext() if each.inverse_weight else _not_counted(module):
            loss = self._loss_fn(module, each.inputs, each.targets).sum()
        return loss / each.inverse_weight if each.inverse_weight else loss * 0.0

    def _run(self, passes: Sequence[ComputePass], *, has_backward: bool) -> Tensor:
        scale = self.loss_scale.value
        total = torch.zeros((), device=self.device)
        for i, compute in enumerate(passes):
            before_micro_batch(self.module, self.plan, is_last=i == len(passes) - 1)
            with self.clock.part("forward", Action(0, "F", i)):
                loss = compute(self.module)
            if has_backward:
                with self.clock.part("backward", Action(0, "BW", i)):
                    (loss * scale).backward()
                    if self.reduction is not None:
                        self.reduction.settle(self.clock)
            total += loss.detach()
        return total

    def _inverse_weight(self, num_sequences: int) -> float:
        """Return what the mean loss of a pass is divided by; 0 for one that counts nothing."""
        batch = self.plan.workload.global_batch_size
        return batch / (num_sequences * self.plan.layout.dp) if num_sequences else 0.0

    @torch.no_grad()
    def _finish_gradients(self) -> None:
        for parameter in self.parameters():
            gradient = parameter.grad
            # DTensor leaves gradients as its operators made them: those of norms under sequence parallelism are parts of a sum,
            # others may be unsharded where the parameter is split.
            if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
                continue
            if gradient.placements != parameter.placements:
                parameter.grad = gradient.redistribute(placements=parameter.placements)
        if self.loss_scale.value != 1:
            gradients = [local_tensor(parameter.grad) for parameter in self.parameters() if parameter.grad is not None]
            torch._foreach_mul_(gradients, 1 / self.loss_scale.value)
        reduce_shared_gradients(self._shared)

    def _share_of_mean(self, loss: Tensor) -> Tensor:
        """Return this rank's share of the mean over the ranks that computed a loss: one of each tp group of the last stage."""
        counts = self.mesh.is_last_stage and self.mesh.tp_rank == 0
        return loss / self.mesh.data_degree if counts else torch.zeros_like(loss)
