"""Hot experts from step to step: the tokens of a step say which experts stand on every rank in the next one."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ...schema.errors import ConfigError
from ...schema.training_plan import TrainingPlan
from ..models.experts import MixtureOfExperts
from ..models.hot_experts import HotExperts, choose_hot
from ..parallel_model import ParallelModel

_MAX_IN_FLIGHT = 3
"""Passes a pipeline rank whose copies wait for their backward pass at most: those of zb-h2 (docs/method.md)."""


def require_hot_experts(plan: TrainingPlan, *, compiles: bool) -> None:
    """Raise unless experts can follow the load under a plan."""
    if compiles:
        raise ConfigError(
            "--hot-experts with --compile: blocks would be compiled anew whenever other experts are hot",
            help="leave one of them out",
        )
    if plan.layout.ep == 1 or plan.expert_slots:
        raise ConfigError(
            f"--hot-experts with ep {plan.layout.ep}"
            + (" and experts in slots of the plan" if plan.expert_slots else ""),
            help="use a plan with ep > 1 that was made without --expert-load",
        )


class ExpertLoad:
    """Counts the tokens of this rank's experts, and has the hottest of each layer stand on every rank.

    The weights of all slots wait together from a layer's forward to its backward pass, in what the plan leaves of the device's
    memory, and those of one layer have gradients at a time.

    Counters that others read and clear (optimizer.RouterBalance) are read before they do: call `follow` first.
    """

    def __init__(self, model: ParallelModel) -> None:
        blocks = model.module.model.layers.values()
        self._mixtures = [block.mlp for block in blocks if isinstance(block.mlp, MixtureOfExperts)]
        self._clears = [mixture.gate.load is None for mixture in self._mixtures]
        for mixture in self._mixtures:
            if mixture.gate.load is None:
                mixture.gate.load = torch.zeros(mixture.num_experts, dtype=torch.long, device=model.device)
        layout, workload = model.plan.layout, model.plan.workload
        self._expert_tp = layout.expert_tp
        self._tokens = layout.micro_batch_size * workload.seq_len / layout.cp / layout.tp * layout.expert_tp
        self._bytes = workload.compute_bytes
        estimate, passes = model.plan.estimate, 1 if layout.pp == 1 else _MAX_IN_FLIGHT * layout.pp
        free = estimate.budget_bytes - max(estimate.required_bytes, estimate.peak_reserved_bytes)
        self._room = max(free, 0) / (len(self._mixtures) * passes + 1)

    @torch.no_grad()
    def follow(self) -> list[tuple[int, ...]]:
        """Make the hottest experts of the last step hot for the next one; return those of each layer."""
        chosen = []
        for mixture, clears in zip(self._mixtures, self._clears, strict=True):
            assert mixture.ranks is not None
            assert mixture.ranks.exchange is not None
            assert mixture.gate.load is not None
            group = mixture.ranks.exchange
            load = mixture.gate.load.clone()
            dist.all_reduce(load, group=group)
            if clears:
                mixture.gate.load.zero_()
            spec = mixture.gate.spec
            expert_bytes = spec.expert.num_params(mixture.hidden_dim) / self._expert_tp * self._bytes
            hot = choose_hot(
                load.tolist(),
                group.size(),
                max_hot=max(0, int(self._room / expert_bytes) - mixture.num_experts // group.size()),
                rows=self._tokens * spec.top_k * group.size(),
                row_bytes=mixture.hidden_dim * self._bytes,
                expert_bytes=expert_bytes,
            )
            stand_on_every_rank(mixture, hot)
            chosen.append(hot)
        return chosen


def stand_on_every_rank(mixture: MixtureOfExperts, hot: tuple[int, ...]) -> None:
    """Put copies of these experts on every rank that the experts are shared out over, and of no others."""
    assert mixture.ranks is not None
    assert mixture.ranks.exchange is not None
    group = mixture.ranks.exchange
    mixture.place(HotExperts(hot, mixture.num_experts, group.size(), group.rank()) if hot else None)
