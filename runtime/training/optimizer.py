"""The update of a step: the optimizer, gradient clipping that is exact over all axes, and the corrections of sigmoid routers.

Routers: even loads of experts without a loss of their own (DeepSeek-V3, arXiv:2412.19437 section 2.1.2). A sigmoid router chooses
by score plus a correction, which rises after each step by a fixed rate for an expert that saw fewer tokens than the mean and falls
for one that saw more. A rank that counts the same tokens as another, or again when it recomputes, does so for all experts alike.

Without backward passes gradients are estimated from two forward passes (MeZO, arXiv:2305.17333, algorithm 1). All parameters move
by ``epsilon z`` and by ``-epsilon z``, z standard normal; with the mean losses l+ and l- of the same batch, ``g = (l+ - l-) / (2
epsilon)`` is the derivative along z, and the step is ``-learning_rate (g z + weight_decay p)``. Nothing is stored but the
parameters: z is drawn again from its seed each time, in full for each parameter and cut as it is sharded, so that every layout sees
the same numbers.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from ...schema.layers import Block, MoE
from ..documents.packs import RankBatch
from ..models.decoder import parameter_seed
from ..models.experts import MixtureOfExperts, Router
from ..models.layers import local_part, local_tensor
from ..offload.optimizer import OffloadedAdamW
from ..parallel_model import ParallelModel
from .options import TrainOptions, require_zeroth_order


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


def take_step(
    model: ParallelModel, optimizer: torch.optim.Optimizer, tokens: Tensor, *, max_grad_norm: float
) -> Tensor:
    """Do one step on this rank's share of the global batch; return the sums of `local_sums`."""
    sums = local_sums(model, optimizer, tokens)
    model.add_over_ranks(sums)
    update(model, optimizer, sums, max_grad_norm=max_grad_norm)
    return sums


def local_sums(
    model: ParallelModel,
    optimizer: torch.optim.Optimizer,
    tokens: Tensor | RankBatch,
    *,
    done: int = 0,
    votes: tuple[bool, bool] = (False, False),
) -> Tensor:
    """Compute the gradients of a step; return what this rank adds to loss, square of the gradients' norm and votes [4].

    All that is left to do then is local: whoever has the sums over all ranks can end the step (`update`).

    Args:
        tokens: this rank's share of the global batch, or of a batch of documents.
        done: steps before this one.
        votes: this rank asks all to end after the step; to interrupt the run after it.
    """
    if isinstance(optimizer, ZerothOrderSGD):
        optimizer.num_steps = done
        share = optimizer.losses(tokens)
    else:
        share = model.backward(tokens)
    numbers = [torch.full_like(share, float(vote)).float() for vote in votes]
    return torch.stack((share.float(), local_square(model), *numbers))


def update(model: ParallelModel, optimizer: torch.optim.Optimizer, sums: Tensor, *, max_grad_norm: float) -> bool:
    """End a step, given the sums over all ranks; return whether a gradient overflowed, so that nothing changed."""
    overflowed = model.loss_scale.is_dynamic and not math.isfinite(sums[1].item())
    if not overflowed:
        scale_gradients(model, sums[1].sqrt(), max_grad_norm)
        with model.clock.part("optimizer"):
            optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return overflowed


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
    """Counts tokens of this rank's sigmoid routers, and moves their corrections; every rank has one, also without such layers."""

    def __init__(self, model: ParallelModel, rate: float) -> None:
        self._model = model
        self._rate = rate
        mlps = [layer.mlp for layer in model.plan.model.iter_layers() if isinstance(layer, Block)]
        counts = [mlp.num_experts for mlp in mlps if isinstance(mlp, MoE) and mlp.router == "sigmoid" and rate]
        self._num_blocks, self._num_experts = len(mlps), max(counts, default=0)
        self._routers: dict[int, Router] = {}
        for name, block in model.module.model.layers.items() if counts else ():
            if isinstance(block.mlp, MixtureOfExperts) and block.mlp.gate.spec.router == "sigmoid":
                router = self._routers[int(name)] = block.mlp.gate
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


EPSILON = 1e-3
"""Source: the paper's experiments (appendix E)."""


class ZerothOrderSGD(torch.optim.Optimizer):
    """SGD along a random direction: `losses` takes the place of a backward pass; `step` then takes the step.

    The next z depends on ``num_steps``, the steps done, which a resumed run sets.
    """

    def __init__(
        self, model: ParallelModel, groups: list[dict[str, Any]], *, learning_rate: float, seed: int = 0
    ) -> None:
        super().__init__(groups, {"lr": learning_rate, "weight_decay": 0.0})
        self._model = model
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._seed = seed
        self._slope = 0.0
        self.num_steps = 0

    @torch.no_grad()
    def losses(self, tokens: Tensor | RankBatch) -> Tensor:
        """Return what this rank adds to the mean loss, [] on the device, half way between the two losses."""
        self._move(EPSILON)
        above = self._model.forward(tokens)
        self._move(-2 * EPSILON)
        below = self._model.forward(tokens)
        self._move(EPSILON)
        difference = above.double() - below.double()
        self._model.add_over_ranks(difference)
        self._slope = difference.item() / (2 * EPSILON)
        return (above + below) / 2

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Along z, by the slope that `losses` found."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                local = local_tensor(parameter)
                local.mul_(1 - group["lr"] * group["weight_decay"])
                local.add_(self._direction(parameter), alpha=-group["lr"] * self._slope)
        self.num_steps += 1

    def _move(self, distance: float) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                local_tensor(parameter).add_(self._direction(parameter), alpha=distance)

    def _direction(self, parameter: Tensor) -> Tensor:
        """Return the part of z that this rank has."""
        name = self._names[parameter]
        if name == "lm_head.weight" and self._model.plan.model.tie_embeddings:
            name = "model.embed_tokens.weight"
        device = local_tensor(parameter).device
        generator = torch.Generator(device).manual_seed(parameter_seed(self._seed, f"{self.num_steps}/{name}"))
        full = torch.empty(parameter.shape, dtype=parameter.dtype, device=device).normal_(generator=generator)
        return local_part(full, parameter)
