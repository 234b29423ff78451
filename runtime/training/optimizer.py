"""The update of a step: the optimizer, gradient clipping that is exact over all axes, and the corrections of sigmoid routers.

Routers: even loads of experts without a loss of their own (DeepSeek-V3, arXiv:2412.19437 section 2.1.2). A sigmoid router chooses
by score plus a correction. After each step the correction of an expert that saw fewer tokens than the mean rises by a fixed rate,
that of one that saw more falls. Tokens are counted where they are routed and added over all ranks; a rank that counts the same
tokens as another, or counts them again when it recomputes, does so for all experts alike, which leaves the signs as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from ...schema.layers import Block, MoE
from ..models.experts import MixtureOfExperts, Router
from ..models.sharded import local_tensor
from ..offload.optimizer import OffloadedAdamW
from ..parallel_model import ParallelModel
from .options import TrainOptions
from .zeroth_order import ZerothOrderSGD, require_zeroth_order


def build_optimizer(
    model: ParallelModel,
    *,
    learning_rate: float,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
    zeroth_order: bool = False,
) -> torch.optim.Optimizer:
    """Build AdamW or SGD (no momentum), as the plan's workload says; norms and biases are not decayed.

    A fused update takes either plain parameters or DTensors: those of foreign modules, of which tensor parallelism splits only
    some, are groups of their own.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {
            "params": [p for p in parameters if (p.ndim > 1) == is_matrix and isinstance(p, DTensor) == is_sharded],
            "weight_decay": weight_decay if is_matrix else 0.0,
        }
        for is_matrix in (True, False)
        for is_sharded in (True, False)
    ]
    groups = [group for group in groups if group["params"]]
    if zeroth_order or not model.plan.workload.has_backward:
        require_zeroth_order(model.plan)
        return ZerothOrderSGD(model, groups, learning_rate=learning_rate)
    if model.plan.workload.optimizer == "sgd":
        # DTensor has no fused SGD, and the foreach one would hold a decayed copy of all gradients.
        return torch.optim.SGD(groups, lr=learning_rate, foreach=False)
    if model.offload is not None:
        placements, folder = model.offload.placements(model.module), model.offload.schedule.storage_path
        copies = model.offload.copies
        return OffloadedAdamW(groups, placements, copies, learning_rate=learning_rate, betas=betas, folder=folder)
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=True)


@torch.no_grad()
def clip_gradients(model: ParallelModel, max_norm: float) -> float:
    """Scale all gradients so that their norm over the entire model is at most ``max_norm``.

    The norm is sqrt(sum of squares) over every element of the model once: a rank counts its local part of a parameter only if it
    is the first along each axis that holds copies of it. One sum over all ranks; no part is gathered.

    Returns:
        The norm before scaling, the same on every rank.
    """
    square = local_square(model)
    model.add_over_ranks(square)
    norm = square.sqrt()
    scale_gradients(model, norm, max_norm)
    return norm.item()


@torch.no_grad()
def local_square(model: ParallelModel) -> Tensor:
    """Return what this rank adds to the square of the norm of all gradients, fp32 []."""
    counted = [local_tensor(p.grad) for name, p in model.named_parameters() if model.is_first_copy(name, p.grad)]
    if not counted:
        return torch.zeros((), dtype=torch.float32, device=model.device)
    return nn.utils.get_total_norm(counted).square().to(model.device)


@torch.no_grad()
def scale_gradients(model: ParallelModel, norm: Tensor, max_norm: float) -> None:
    """Scale this rank's gradients so that a norm [] over the model becomes at most ``max_norm``; no wait for the device."""
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if scale.device.type == "cpu" and scale.item() == 1:
        return
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in (local_tensor(p.grad) for p in model.parameters() if p.grad is not None):
        by_device.setdefault(gradient.device, []).append(gradient)  # those of streamed parameters are on the host
    for device, gradients in by_device.items():
        torch._foreach_mul_(gradients, scale.to(device))


def build_scheduler(optimizer: torch.optim.Optimizer, options: TrainOptions, *, done: int) -> LambdaLR:
    """Return the schedule of the learning rate for step ``done + 1`` and those that follow."""
    for group in optimizer.param_groups:
        group["initial_lr"] = options.learning_rate
    return LambdaLR(optimizer, lambda idx: options.learning_rate_factor(idx + 1), last_epoch=done - 1)


class RouterBalance:
    """Counts tokens of this rank's sigmoid routers, and moves their corrections; every rank has one, also without such layers.

    Args:
        rate: by how much a step moves a correction.
    """

    def __init__(self, model: ParallelModel, rate: float) -> None:
        self._model = model
        self._rate = rate
        blocks = [layer for layer in model.plan.model.iter_layers() if isinstance(layer, Block)]
        self._num_blocks = len(blocks)
        self._num_experts = max((b.mlp.num_experts for b in blocks if is_balanced(b)), default=0) if rate else 0
        self._routers = _sigmoid_routers(model) if self._num_experts else {}
        for router in self._routers.values():
            router.load = torch.zeros(router.spec.num_experts, dtype=torch.long, device=model.device)

    @torch.no_grad()
    def update(self) -> None:
        """Move the corrections after a step and count anew."""
        if not self._num_experts:
            return
        loads = torch.zeros(self._num_blocks, self._num_experts, device=self._model.device)
        for idx, router in self._routers.items():
            assert router.load is not None
            loads[idx, : len(router.load)] = router.load
            router.load.zero_()
        self._model.add_over_ranks(loads)  # other stages fill in their layers
        for idx, router in self._routers.items():
            load = loads[idx, : router.spec.num_experts]
            router.e_score_correction_bias += self._rate * torch.sign(load.mean() - load)


def is_balanced(block: Block) -> bool:
    """Tell whether a block has experts behind a sigmoid router."""
    return isinstance(block.mlp, MoE) and block.mlp.router == "sigmoid"


def _sigmoid_routers(model: ParallelModel) -> dict[int, Router]:
    layers = model.module.model.layers.items()
    mixtures = {int(name): block.mlp for name, block in layers if isinstance(block.mlp, MixtureOfExperts)}
    return {idx: mixture.gate for idx, mixture in mixtures.items() if mixture.gate.spec.router == "sigmoid"}
