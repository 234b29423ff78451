"""Even loads of experts without a loss of their own (DeepSeek-V3, arXiv:2412.19437 section 2.1.2).

A sigmoid router chooses by score plus a correction. After each step the correction of an expert that saw fewer tokens than the mean
rises by a fixed rate, that of one that saw more falls. Tokens are counted where they are routed and added over all ranks; a rank
that counts the same tokens as another, or counts them again when it recomputes, does so for all experts alike, which leaves the
signs as they are.
"""

from __future__ import annotations

import torch

from ...schema.model import Block, MoE
from ..models.experts import MixtureOfExperts, Router
from ..parallel_model import ParallelModel


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
        """After a step: move the corrections and count anew."""
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
    """Whether a block has experts behind a sigmoid router."""
    return isinstance(block.mlp, MoE) and block.mlp.router == "sigmoid"


def _sigmoid_routers(model: ParallelModel) -> dict[int, Router]:
    """By the block's place in the model."""
    layers = model.module.model.layers.items()
    mixtures = {int(name): block.mlp for name, block in layers if isinstance(block.mlp, MixtureOfExperts)}
    return {idx: mixture.gate for idx, mixture in mixtures.items() if mixture.gate.spec.router == "sigmoid"}
